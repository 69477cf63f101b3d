// Common code of the sampling kernels: their parameters, logits under mask and penalties, token weights, and
// reductions over a block.
#pragma once

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/exp2_product.h"
#include "kernels/generation/sampling.h"
#include "kernels/generation/token_key.h"
#include "runtime/rng.h"

namespace sampling {

// The logits of one sequence under its mask and penalties. Only a row that has them reads what they need.
template <typename T>
struct LogitRow {
    const T* logits;
    const SamplingRow* options;
    const int32_t *seen, *counts, *mask;  // of the slot; valid where the row's classes have them
    int64_t V;
    uint32_t classes;
    bool aligned;  // to 16 bytes

    __device__ __forceinline__ bool has(uint32_t class_bits) const { return (classes & class_bits) != 0; }
    // Multiplying by the inverse in double gives the bits of the division wherever the quotient is a normal float: no
    // quotient of floats is close enough to the middle between two floats for the roundings of doubles to matter. A
    // division would take many times the code.
    __device__ __forceinline__ float penalized(float x) const {
        return x > 0 ? float(double(x) * options->inverse_repeat) : x * options->repeat_penalty;
    }
    __device__ __forceinline__ float discounted(float x, int count) const {
        const double frequency = double(options->frequency_penalty) * count;
        return count > 0 ? float(double(x) - (double(options->presence_penalty) + frequency)) : x;
    }
    __device__ __forceinline__ float operator[](int64_t v) const {
        const float x = as_float(logits[v]);
        return has(sampling_class::ADJUSTED) ? adjusted(x, v) : x;
    }
    __device__ __forceinline__ float adjusted(float x, int64_t v) const {
        const auto bit = [v](const int32_t* words) { return uint32_t(words[v / 32]) >> (v % 32) & 1; };
        if (has(sampling_class::MASK) && !bit(mask)) return -INFINITY;
        if (has(sampling_class::REPEAT) && bit(seen)) x = penalized(x);
        return has(sampling_class::COUNTS) ? discounted(x, counts[v]) : x;
    }
    // Logits begin … begin + N − 1, loaded together; −∞ (no weight) beyond the vocabulary. begin is a multiple of N,
    // and N divides 32.
    template <int N>
    __device__ __forceinline__ Floats<N> load(int64_t begin) const {
        const int left = int(min(int64_t(N), V - begin));
        Floats<N> x;
        if (aligned && left == N) {
            x = load_floats<N>(logits + begin);
        } else {
            const T* const from = logits + (left > 0 ? begin : 0);
            T raw[N];
#pragma unroll
            for (int i = 0; i < N; i++) raw[i] = from[min(i, max(left - 1, 0))];
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = i < left ? as_float(raw[i]) : -INFINITY;
        }
        if (has(sampling_class::ADJUSTED) && left > 0) adjust(x, begin, left);
        return x;
    }
    // The same as adjusted() for each of them.
    template <int N>
    __device__ __forceinline__ void adjust(Floats<N>& x, int64_t begin, int left) const {
        const auto bits = [begin](const int32_t* words) { return uint32_t(words[begin / 32]) >> (begin % 32); };
        if (has(sampling_class::REPEAT)) {
            const uint32_t marks = bits(seen);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (marks >> i & 1) x[i] = penalized(x[i]);
        }
        if (has(sampling_class::COUNTS)) {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i < left) x[i] = discounted(x[i], counts[begin + i]);
        }
        if (has(sampling_class::MASK)) {
            const uint32_t allowed = bits(mask);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (!(allowed >> i & 1)) x[i] = -INFINITY;
        }
    }
};

template <typename T>
struct SamplingParams {
    int32_t* ids;
    const T* logits;
    const SamplingRow* rows;
    int32_t *seen, *counts;
    const int32_t* masks;
    const int64_t *sequences, *steps;
    int64_t logits_stride, seen_stride, counts_stride, masks_stride, V;
    bool aligned;

    // Whether row b needs one of these kernels.
    __device__ __forceinline__ bool needs(int64_t b, uint32_t class_bits) const {
        return (rows[b].classes & class_bits) != 0;
    }
    __device__ __forceinline__ LogitRow<T> row(int64_t b) const {
        const int64_t slot = rows[b].slot;
        LogitRow<T> r;
        r.logits = logits + b * logits_stride;
        r.options = rows + b;
        r.seen = seen + slot * seen_stride;
        r.counts = counts + slot * counts_stride;
        r.mask = masks + slot * masks_stride;
        r.V = V;
        r.classes = rows[b].classes;
        r.aligned = aligned;
        return r;
    }
    __device__ __forceinline__ double uniform(int64_t b) const {
        const Philox4 random = philox(rows[b].seed, uint64_t(sequences[b]), uint64_t(steps[b]));
        return uniform01(random.v[0], random.v[1]);
    }
    // Called by one thread of the grid for each row. id −1: the logits can't be sampled from.
    __device__ __forceinline__ void write_token(int64_t b, int32_t id) const {
        ids[b] = id;
        if (id < 0) return;
        const int64_t slot = rows[b].slot;
        if (needs(b, sampling_class::REPEAT)) seen[slot * seen_stride + id / 32] |= int32_t(1u << (id % 32));
        if (needs(b, sampling_class::COUNTS)) counts[slot * counts_stride + id]++;
    }
};

// Weights as fixed-point integers, whose sums are the same in any order, and the bins of a histogram of them.
using FixedWeight = unsigned long long;
constexpr double FIXED_ONE = 0x1p44;
constexpr int WEIGHT_BINS = 2048;
constexpr double BINS_PER_OCTAVE = 45;

// exp((x − max)/temperature) of a logit x: the token's probability relative to that of the most likely token.
struct TokenWeight {
    double max;   // the largest logit
    double rate;  // log2(e)/temperature
    __device__ __forceinline__ double operator()(float x) const { return exp2_product(double(x) - max, rate); }
    __device__ __forceinline__ FixedWeight fixed(float x) const { return FixedWeight(llrint((*this)(x)*FIXED_ONE)); }
    // From one bin to the next the weight falls by a factor of 2^(1/45). The last bin has all tokens whose fixed-point
    // weight is 0.
    __device__ __forceinline__ int bin(float x) const {
        const double at = (max - double(x)) * rate * BINS_PER_OCTAVE;
        return at < WEIGHT_BINS - 1 ? int(at) : WEIGHT_BINS - 1;
    }
};

// The tokens of a row that the filters keep: those with a key of at least `threshold` and a weight of at least min_p.
struct Filter {
    uint64_t threshold;
    TokenWeight weight;
    double min_p;
    // The weight of a token, 0 if it is not kept. Without a branch, so that the compiler interleaves several of them.
    __device__ __forceinline__ double kept(float x, int64_t v) const {
        const double w = weight(token_key(x, v) >= threshold ? x : -INFINITY);
        return w >= min_p ? w : 0.0;
    }
};

// A chunk of the vocabulary: its most likely token (NaN if it has one), and Σ exp((x − its own maximum)/temperature).
struct alignas(16) ChunkSummary {
    uint64_t best;
    double sum;
};

// Without filters and with a threshold, one warp processes a chunk, 16 consecutive tokens a lane: enough for the
// exponentials to hide each other's latency, few enough to spread one sequence over most of the GPU.
constexpr int LANE_TOKENS = 16, CHUNK = WARP * LANE_TOKENS;
constexpr int CHUNK_WARPS = 4, CHUNK_THREADS = CHUNK_WARPS * WARP;

// The index of this warp's chunk among the chunks of all rows. The warps of a block have nothing else in common.
__device__ __forceinline__ int64_t chunk_of_warp() {
    return int64_t(blockIdx.x) * CHUNK_WARPS + threadIdx.x / WARP;
}

// The kernels that filter by blocks use 256 threads.
constexpr int FILTER_THREADS = 256, FILTER_WARPS = FILTER_THREADS / WARP;

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
    const uint32_t high = uint32_t(key >> 32), largest = __reduce_max_sync(ALL_LANES, high);
    return uint64_t(largest) << 32 | __reduce_max_sync(ALL_LANES, high == largest ? uint32_t(key) : 0u);
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// The largest key of a block of THREADS threads. Put a barrier between two calls.
template <int THREADS>
__device__ uint64_t block_max(uint64_t key) {
    __shared__ uint64_t warp_maxima[THREADS / WARP];
    key = warp_max(key);
    if (threadIdx.x % WARP == 0) warp_maxima[threadIdx.x / WARP] = key;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) key = max(key, warp_maxima[w]);
    return key;
}

// Finds the most likely token of a row for all threads of the block. False if the logits can't be sampled from.
template <int THREADS>
__device__ bool find_best(const ChunkSummary* chunks, int num_chunks, uint64_t* best) {
    uint64_t mine = 0;
    for (int c = int(threadIdx.x); c < num_chunks; c += THREADS) mine = max(mine, chunks[c].best);
    *best = block_max<THREADS>(mine);
    return isfinite(token_logit(*best));
}

// Inverse-CDF sampling over the threads of a block, each with a weight `mine`: finds the thread in which the cumulative
// sum passes target(total of all weights). That is the last thread with a weight above 0 before which the sum does not
// exceed the target, so that rounding can't leave it without one. Returns true in that thread, where *remaining is the
// target minus the sum of the threads before it. Put a barrier between two calls.
template <int THREADS, typename Target>
__device__ bool cdf_passes_here(double mine, Target target, double* remaining) {
    __shared__ double warp_sums[THREADS / WARP];
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
    const BlockScan<double> scan = block_scan<THREADS>(mine, warp_sums);
    double left = target(scan.total);
    int passing_warp = 0;
    *remaining = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) {
        if (warp_sums[w] > 0 && left >= 0) {
            passing_warp = w;
            *remaining = left;
        }
        left -= warp_sums[w];
    }
    *remaining -= scan.in_warp - mine;
    const unsigned candidates = __ballot_sync(ALL_LANES, mine > 0 && *remaining >= 0);
    return warp == passing_warp && candidates >> lane == 1;
}

// Likewise for the weights of one thread: the index at which their cumulative sum passes `remaining`.
template <int N>
__device__ __forceinline__ int cdf_index(const double (&weights)[N], double remaining) {
    int index = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (weights[i] > 0 && remaining >= 0) index = i;
        remaining -= weights[i];
    }
    return index;
}

}  // namespace sampling
