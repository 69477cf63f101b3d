// A block for each pair: one half of its threads adds up the losses of the chosen response, the other those of the
// rejected one, and the first thread computes the pair in fp64. LLaMA 8B, 4 sequences of 4096 tokens with 4 pairs each,
// responses of 400 tokens: 16 blocks, of which each thread has 3 or 4 losses. The launch takes longer than the work.
#include "kernels/preference_loss.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/preference_formula.h"
#include "kernels/preference_loss_check.h"

namespace {

constexpr int SIDE_THREADS = 128, THREADS = 2 * SIDE_THREADS;

// Calls f(i) for the tokens of this thread: of the chosen response in the first half of the block, of the rejected one
// in the second.
template <typename F>
__device__ __forceinline__ void for_own_tokens(const PairRows& rows, F f) {
    const bool chosen = threadIdx.x < SIDE_THREADS;
    const int64_t begin = chosen ? rows.chosen : rows.rejected, end = chosen ? rows.rejected : rows.end;
    for (int64_t i = begin + threadIdx.x % SIDE_THREADS; i < end; i += SIDE_THREADS) f(i);
}

struct Logps {
    double chosen, rejected;
};

// ℓ of both responses, in all threads. Every thread of the block must call it, once.
__device__ __forceinline__ Logps sum_logps(const float* losses, const PairRows& rows) {
    __shared__ double sums[THREADS];
    double mine = 0;
    for_own_tokens(rows, [&](int64_t i) { mine += losses[i]; });
    sums[threadIdx.x] = mine;
    __syncthreads();
#pragma unroll
    for (int half = SIDE_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x % SIDE_THREADS < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return {-sums[0], -sums[SIDE_THREADS]};
}

struct LossArguments {
    float *stats, *dlosses;
    const float* losses;
    const PairRows* rows;
    const float* reference;
    int64_t begin, end;
    float scale;
    PreferenceOptions options;
};

__global__ void __launch_bounds__(THREADS) loss_kernel(LossArguments a) {
    const int64_t p = blockIdx.x;
    const PairRows rows = a.rows[p];
    if (rows.chosen < a.begin || rows.chosen >= a.end) return;
    float* const stats = a.stats + p * NUM_PAIR_STATS;
    const bool absent = rows.chosen == rows.end;
    if (absent || !lies_within(rows, a.begin, a.end)) {
        if (threadIdx.x < NUM_PAIR_STATS) stats[threadIdx.x] = absent ? 0 : NAN;
        return;
    }
    const Logps logps = sum_logps(a.losses, rows);
    __shared__ float dloss[2];
    if (threadIdx.x == 0) {
        const bool given = a.reference != nullptr;
        const PairSide chosen{logps.chosen, given ? a.reference[2 * p] : 0.0, double(rows.rejected - rows.chosen)};
        const PairSide rejected{logps.rejected, given ? a.reference[2 * p + 1] : 0.0, double(rows.end - rows.rejected)};
        const PairLoss pair = preference_loss_of(a.options, chosen, rejected);
        store_pair_stats(stats, pair, chosen, rejected);
        dloss[0] = float(-a.scale * pair.dlogp[0]);
        dloss[1] = float(-a.scale * pair.dlogp[1]);
    }
    if (!a.dlosses) return;
    __syncthreads();
    const float own = dloss[threadIdx.x / SIDE_THREADS];
    for_own_tokens(rows, [&](int64_t i) { a.dlosses[i] = own; });
}

__global__ void __launch_bounds__(THREADS)
    logps_kernel(float* logps, const float* losses, const PairRows* all_rows, int64_t n) {
    const int64_t p = blockIdx.x;
    const PairRows rows = all_rows[p];
    const bool absent = rows.chosen == rows.end;
    if (absent || !lies_within(rows, 0, n)) {
        if (threadIdx.x < 2) logps[2 * p + threadIdx.x] = absent ? 0 : NAN;
        return;
    }
    const Logps sums = sum_logps(losses, rows);
    if (threadIdx.x > 0) return;
    logps[2 * p] = float(sums.chosen);
    logps[2 * p + 1] = float(sums.rejected);
}

constexpr int SUM_THREADS = NUM_PAIR_STATS * WARP;

// Runs as one block, a warp for each stat.
__global__ void __launch_bounds__(SUM_THREADS)
    sum_kernel(double* sums, const float* stats, int64_t P, bool accumulate) {
    const int stat = int(threadIdx.x) / WARP, lane = int(threadIdx.x) % WARP;
    double sum = 0;
    for (int64_t p = lane; p < P; p += WARP) sum += stats[p * NUM_PAIR_STATS + stat];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (lane == 0) sums[stat] = accumulate ? sums[stat] + sum : sum;
}

const PairRows* pairs_of(const Tensor& rows) {
    return reinterpret_cast<const PairRows*>(rows.as<int32_t>());
}

}  // namespace

void preference_loss(const PreferenceLoss& x, Stream stream) {
    const PreferenceSizes z = check_preference_loss(x);
    if (z.P == 0) return;
    loss_kernel<<<grid_of(z.P), THREADS, 0, cuda_stream(stream)>>>(
        {x.stats.as<float>(), x.dlosses.as<float>(), x.losses.as<float>(), pairs_of(x.rows), x.reference.as<float>(),
         x.begin, x.end, x.scale, x.options});
    check_launch("preference_loss", stream);
}

void pair_logps(Tensor logps, Tensor losses, Tensor rows, Stream stream) {
    const PreferenceSizes z = check_pair_logps(logps, losses, rows);
    if (z.P == 0) return;
    logps_kernel<<<grid_of(z.P), THREADS, 0, cuda_stream(stream)>>>(logps.as<float>(), losses.as<float>(),
                                                                    pairs_of(rows), z.n);
    check_launch("pair_logps", stream);
}

void sum_pair_stats(Tensor sums, Tensor stats, bool accumulate, Stream stream) {
    const int64_t P = check_sum_pair_stats(sums, stats);
    sum_kernel<<<1, SUM_THREADS, 0, cuda_stream(stream)>>>(sums.as<double>(), stats.as<float>(), P, accumulate);
    check_launch("sum_pair_stats", stream);
}
