// One block, so that the sums need neither a second kernel nor atomics. LLaMA 1B: the head computes 4,096 rows at a
// time, 8 for each thread, each of which takes three exponentials in fp64; the launch and this take microseconds, the
// head's matmuls milliseconds.
#include "kernels/policy_loss.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/policy_formula.h"
#include "kernels/policy_loss_check.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP;

__global__ void __launch_bounds__(THREADS) loss_kernel(PolicyArrays x, double* stats, int64_t n, bool accumulate) {
    double mine[NUM_POLICY_STATS] = {};
    for (int64_t i = threadIdx.x; i < n; i += THREADS) add_policy_token(mine, x, i);
    __shared__ double partial[NUM_POLICY_STATS][WARPS];
#pragma unroll
    for (int stat = 0; stat < NUM_POLICY_STATS; stat++) {
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2)
            mine[stat] = combined_policy_stat(stat, mine[stat], __shfl_xor_sync(ALL_LANES, mine[stat], offset));
        if (threadIdx.x % WARP == 0) partial[stat][threadIdx.x / WARP] = mine[stat];
    }
    __syncthreads();
    const int stat = int(threadIdx.x);
    if (stat >= NUM_POLICY_STATS) return;
    double sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum = combined_policy_stat(stat, sum, partial[stat][warp]);
    stats[stat] = accumulate ? combined_policy_stat(stat, stats[stat], sum) : sum;
}

}  // namespace

void policy_loss(const PolicyLoss& x, Stream stream) {
    const int64_t n = check_policy_loss(x);
    loss_kernel<<<1, THREADS, 0, cuda_stream(stream)>>>(arrays_of(x), x.stats.as<double>(), n, x.accumulate);
    check_launch("policy_loss", stream);
}
