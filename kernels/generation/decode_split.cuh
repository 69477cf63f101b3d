// Attention of one token over a piece of its context, by the warps of a block together: for decode_attention.cu.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// Keys of a piece, and pieces of a context.
constexpr int64_t DECODE_PIECE = 256;
__host__ __device__ inline int64_t decode_pieces(int64_t length) {
    return ceil_div(length, DECODE_PIECE);
}

// Shared memory of WARPS warps that work on up to HEADS heads.
template <int WARPS_, int HEADS_>
struct Piece {
    static constexpr int WARPS = WARPS_, HEADS = HEADS_;
    float* queries;  // [HEADS, stride], scaled and turned; zeros for heads that aren't there
    float* scores;   // [HEADS, DECODE_PIECE]
    float* sums;     // [WARPS, HEADS, stride]
    float* maxima;   // [HEADS]
    float* totals;   // [HEADS] Σ_j exp(S_j − maximum)
    int stride;      // at least HS

    // Afterwards: Σ_j exp(S_j − maximum)·v_j[c].
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

// k, v: of the piece's first key, `row` elements from one key to the next; keys ≤ DECODE_PIECE. W elements a vector, V
// vectors a lane for a key: channel (v·lanes + lane)·W + k of a head; lanes is a power of two. sync() holds the warps
// together; queries must be there before, and it ends with maxima, totals and sums there for all. BATCH keys and values
// of a lane are under way at a time; what is not unrolled for them is kept short.
template <int W, int V, int BATCH, typename Shared, typename T, typename Sync>
__device__ __forceinline__ void attend_piece(const Shared& shared, const T* k_cache, const T* v_cache, int64_t row,
                                             int keys, int heads, int HS, int lanes, Sync sync) {
    constexpr int WARPS = Shared::WARPS, HEADS = Shared::HEADS, THREADS = WARPS * WARP;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    // Scores: key j of the piece belongs to the group j % groups.
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
    const int rounds = (keys + groups - 1) / groups;  // the same for all lanes: group_sum is a warp's
    // What BATCH rounds read is asked for at once, and the first values before anything waits for the scores.
    using Vectors = Pack<T, W>[BATCH][V];
    const auto load = [&](Vectors& x, const T* cache, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int j = (first + b) * groups + mine;
                if (j < keys && channel(v) < HS) x[b][v] = load_pack<W>(cache + j * row + channel(v));
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
                if (in_group == 0 && j < keys) shared.scores[h * DECODE_PIECE + j] = s[h];
            }
        }
    }
    sync();

    // Softmax of a head: a warp's work.
#pragma unroll 1
    for (int h = warp; h < heads; h += WARPS) {
        float* const scores = shared.scores + h * DECODE_PIECE;
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
        if (lane == 0) shared.maxima[h] = max, shared.totals[h] = sum;
    }
    sync();

    // Values: each group adds up its keys, then the groups of a warp, then (Piece::sum) the warps.
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
                    const float p = h < heads ? shared.scores[h * DECODE_PIECE + j] : 0.0f;
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
    sync();
}
