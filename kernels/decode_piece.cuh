// Attention of one token over a piece of its context, by some warps together: for decode_attention.cu, where a block
// has one piece, and decode_step.cu, where it comes between products.
//
// Groups of lanes own a key each. A group keeps the softmax of its keys as it goes (maximum, sum, Σ p·v, rescaled when
// the maximum grows; Milakov and Gimelshein 2018), so that nothing but the end is common to the warps.
#pragma once

#include "kernels/cuda_common.cuh"

// Keys of a piece, and pieces of a context.
constexpr int64_t DECODE_PIECE = 256;
__host__ __device__ inline int64_t decode_pieces(int64_t length) {
    return ceil_div(length, DECODE_PIECE);
}

// exp(x − max), where max may be that of no keys at all.
template <typename T>
__device__ __forceinline__ float weight_of(float x, float max) {
    return x == -INFINITY ? 0.0f : exp_for<T>(x - max);
}

// Shared memory of WARPS warps that work on up to HEADS heads.
template <int WARPS_, int HEADS_, typename T_>
struct Piece {
    static constexpr int WARPS = WARPS_, HEADS = HEADS_;
    using T = T_;
    float* queries;  // [HEADS, stride], scaled and turned; zeros for heads that aren't there
    float* sums;     // [WARPS, HEADS, stride] Σ_j exp(S_j − maximum)·v_j
    float* maxima;   // [WARPS, HEADS]
    float* totals;   // [WARPS, HEADS] Σ_j exp(S_j − maximum)
    int stride;      // at least HS
    // The newest key and value, [HS]: they are not read from the cache.
    T *key, *value;

    // Afterwards, over all warps.
    __device__ __forceinline__ float maximum(int h) const {
        float x = maxima[h];
#pragma unroll
        for (int w = 1; w < WARPS; w++) x = nan_max(x, maxima[w * HEADS + h]);
        return x;
    }
    // Σ_j exp(S_j − max), and the sums of COUNT channels from c on.
    template <int COUNT>
    __device__ __forceinline__ float total(int h, int c, float max, float (&sum)[COUNT]) const {
        float x = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) sum[i] = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float f = weight_of<T>(maxima[w * HEADS + h], max);
            x = fmaf(totals[w * HEADS + h], f, x);
#pragma unroll
            for (int i = 0; i < COUNT; i++) sum[i] = fmaf(sums[(w * HEADS + h) * stride + c + i], f, sum[i]);
        }
        return x;
    }
};

// k, v: of the piece's first key, `row` elements from one key to the next; keys ≤ DECODE_PIECE, of which key `newest`
// (-1: none) is in shared memory instead. W elements a vector, V vectors a lane for a key: channel (v·lanes + lane)·W +
// k of a head; lanes is a power of two. The first keys and values are asked for, then ready() is called, which returns
// when queries, key and value are there; afterwards the caller holds the warps together before it reads maxima, totals
// and sums. BATCH keys and values of a lane are under way at a time.
template <int W, int V, int BATCH, typename Shared, typename T, typename Ready>
__device__ __forceinline__ void attend_piece(const Shared& shared, const T* k_cache, const T* v_cache, int64_t row,
                                             int keys, int newest, int HS, int lanes, Ready ready) {
    constexpr int WARPS = Shared::WARPS, HEADS = Shared::HEADS, THREADS = WARPS * WARP;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    // Key j of the piece belongs to the group j % groups.
    const int in_group = lane % lanes, groups = THREADS / lanes, mine = thread / lanes;
    const auto channel = [&](int v) { return (v * lanes + in_group) * W; };
    const int rounds = (keys + groups - 1) / groups;  // the same for all lanes, for their shuffles
    using Vectors = Pack<T, W>[BATCH][V];
    const auto load = [&](Vectors& x, const T* cache, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int j = (first + b) * groups + mine;
                if (j < keys && j != newest && channel(v) < HS) x[b][v] = load_pack<W>(cache + j * row + channel(v));
            }
    };
    const auto add_newest = [&](Vectors& x, const T* from, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < V; v++)
                if ((first + b) * groups + mine == newest && channel(v) < HS) x[b][v] = load_pack<W>(from + channel(v));
    };
    Vectors key = {}, value = {};
    load(key, k_cache, 0);
    load(value, v_cache, 0);
    ready();
    float q[HEADS][V * W];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < W; k++)
                q[h][v * W + k] = channel(v) < HS ? shared.queries[h * shared.stride + channel(v) + k] : 0.0f;
    float max[HEADS], total[HEADS] = {}, o[HEADS][V * W] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++) max[h] = -INFINITY;
#pragma unroll 1
    for (int first = 0; first < rounds; first += BATCH) {
        add_newest(key, shared.key, first);
        float p[BATCH][HEADS] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Floats<W> x = as_floats(key[b][v]);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int k = 0; k < W; k++) p[b][h] = fmaf(q[h][v * W + k], x[k], p[b][h]);
            }
        if (first + BATCH < rounds) load(key, k_cache, first + BATCH);
        for (int offset = lanes / 2; offset > 0; offset /= 2)
#pragma unroll
            for (int b = 0; b < BATCH; b++)
#pragma unroll
                for (int h = 0; h < HEADS; h++) p[b][h] += __shfl_xor_sync(ALL_LANES, p[b][h], offset);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float larger = max[h];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if ((first + b) * groups + mine >= keys) p[b][h] = -INFINITY;
                larger = nan_max(larger, p[b][h]);
            }
            const float old = weight_of<T>(max[h], larger);
            total[h] *= old;
#pragma unroll
            for (int i = 0; i < V * W; i++) o[h][i] *= old;
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                p[b][h] = weight_of<T>(p[b][h], larger);
                total[h] += p[b][h];
            }
            max[h] = larger;
        }
        add_newest(value, shared.value, first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if ((first + b) * groups + mine >= keys) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Floats<W> x = as_floats(value[b][v]);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int k = 0; k < W; k++) o[h][v * W + k] = fmaf(p[b][h], x[k], o[h][v * W + k]);
            }
        }
        if (first + BATCH < rounds) load(value, v_cache, first + BATCH);
    }
    // The groups of a warp together.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float larger = max[h];
        for (int offset = lanes; offset < WARP; offset *= 2)
            larger = nan_max(larger, __shfl_xor_sync(ALL_LANES, larger, offset));
        const float f = weight_of<T>(max[h], larger);
        total[h] *= f;
#pragma unroll
        for (int i = 0; i < V * W; i++) o[h][i] *= f;
        max[h] = larger;
    }
    for (int offset = lanes; offset < WARP; offset *= 2)
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            total[h] += __shfl_xor_sync(ALL_LANES, total[h], offset);
#pragma unroll
            for (int i = 0; i < V * W; i++) o[h][i] += __shfl_xor_sync(ALL_LANES, o[h][i], offset);
        }
    if (lane >= lanes) return;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int at = warp * HEADS + h;
        if (lane == 0) shared.maxima[at] = max[h], shared.totals[at] = total[h];
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < W; k++)
                if (channel(v) < HS) shared.sums[at * shared.stride + channel(v) + k] = o[h][v * W + k];
    }
}
