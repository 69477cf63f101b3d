// Attention of one token over one KV split, with ordinary multiply-adds: for decode_attention.cu. The warps of a block
// work on a split together, in three phases: scores, softmax, values.
#pragma once

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/generation/paged_keys.cuh"

// Keys of a KV split, and splits of a context.
constexpr int64_t SIMT_SPLIT_KEYS = 256;
__host__ __device__ inline int64_t simt_splits(int64_t length) {
    return ceil_div(length, SIMT_SPLIT_KEYS);
}

// Shared memory of WARPS warps that work on up to HEADS heads.
template <int WARPS_, int HEADS_>
struct SplitWorkspace {
    static constexpr int WARPS = WARPS_, HEADS = HEADS_;
    float* queries;  // [HEADS, stride], scaled and rotated; zeros for missing heads
    float* scores;   // [HEADS, SIMT_SPLIT_KEYS]
    float* sums;     // [WARPS, HEADS, stride]
    float* maxima;   // [HEADS]
    float* totals;   // [HEADS] Σ_j exp(S_j − maximum)
    int stride;      // at least HS

    // After attend_split(): Σ_j exp(S_j − maximum)·v_j[c].
    __device__ __forceinline__ float sum(int h, int c) const {
        float x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += sums[(w * HEADS + h) * stride + c];
        return x;
    }
};

// Sum over the `lanes` lanes that share a key.
__device__ __forceinline__ float group_sum(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// keys ≤ SIMT_SPLIT_KEYS. A group of `lanes` lanes, a power of two, shares a key. Each lane holds V vectors of W
// elements of it: channel (v·lanes + lane)·W + k of a head. A lane has BATCH keys and values in flight at a time.
//
// The caller fills shared.queries and synchronizes the block before. On return maxima, totals and sums are visible to
// all threads.
template <int W, int V, int BATCH, typename Workspace, typename T>
__device__ __forceinline__ void attend_split(const Workspace& shared, const PagedKeys<T>& k_cache,
                                             const PagedKeys<T>& v_cache, int keys, int heads, int HS, int lanes) {
    constexpr int WARPS = Workspace::WARPS, HEADS = Workspace::HEADS, THREADS = WARPS * WARP;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    // Scores: key j of the split belongs to group j % groups.
    const int in_group = lane % lanes, groups = THREADS / lanes, mine = thread / lanes;
    const auto channel = [&](int v) { return (v * lanes + in_group) * W; };
    float q[HEADS][V * W];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < W; k++)
                q[h][v * W + k] = channel(v) < HS ? shared.queries[h * shared.stride + channel(v) + k] : 0.0f;
    const int rounds = (keys + groups - 1) / groups;  // the same for all lanes: group_sum needs the whole warp
    // All loads of BATCH rounds are issued at once, and the first values are requested before the scores are needed.
    using Vectors = Pack<T, W>[BATCH][V];
    const auto load = [&](Vectors& x, const PagedKeys<T>& cache, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int j = (first + b) * groups + mine;
                if (j < keys && channel(v) < HS) x[b][v] = load_pack<W>(cache.at(j) + channel(v));
            }
    };
    Vectors key = {}, value = {};
    load(key, k_cache, 0);
    load(value, v_cache, 0);
#pragma unroll 1
    for (int first = 0; first < rounds; first += BATCH) {
        if (first > 0) load(key, k_cache, first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int j = (first + b) * groups + mine;
            float s[HEADS] = {};
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Floats<W> x = as_floats(key[b][v]);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int k = 0; k < W; k++) s[h] += q[h][v * W + k] * x[k];
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                s[h] = group_sum(s[h], lanes);
                if (in_group == 0 && j < keys) shared.scores[h * SIMT_SPLIT_KEYS + j] = s[h];
            }
        }
    }
    __syncthreads();

    // Softmax: one warp for each head.
#pragma unroll 1
    for (int h = warp; h < heads; h += WARPS) {
        float* const scores = shared.scores + h * SIMT_SPLIT_KEYS;
        float max = -INFINITY, sum = 0;
#pragma unroll 1
        for (int j = lane; j < keys; j += WARP) max = fmaxf(max, scores[j]);
        max = warp_max(max);
#pragma unroll 1
        for (int j = lane; j < keys; j += WARP) {
            const float p = expf(scores[j] - max);
            scores[j] = p;
            sum += p;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            shared.maxima[h] = max;
            shared.totals[h] = sum;
        }
    }
    __syncthreads();

    // Values: each group sums over its keys, then the groups of a warp are added, then (SplitWorkspace::sum) the warps.
    float o[HEADS][V * W] = {};
#pragma unroll 1
    for (int first = 0; first < rounds; first += BATCH) {
        if (first > 0) load(value, v_cache, first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int j = (first + b) * groups + mine;
            if (j >= keys) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Floats<W> x = as_floats(value[b][v]);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float p = h < heads ? shared.scores[h * SIMT_SPLIT_KEYS + j] : 0.0f;
#pragma unroll
                    for (int k = 0; k < W; k++) o[h][v * W + k] += p * x[k];
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < V * W; i++)
            for (int offset = lanes; offset < WARP; offset *= 2) o[h][i] += __shfl_xor_sync(ALL_LANES, o[h][i], offset);
    if (lane < lanes) {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int v = 0; v < V; v++)
#pragma unroll
                for (int k = 0; k < W; k++)
                    if (channel(v) < HS)
                        shared.sums[(warp * HEADS + h) * shared.stride + channel(v) + k] = o[h][v * W + k];
    }
    __syncthreads();
}
