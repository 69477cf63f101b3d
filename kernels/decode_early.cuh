// Attention of one token over a piece of its context, by some warps together, for decode_step.cu: what lies in the
// cache is asked for before the query and the newest key are there (decode_piece.cuh is for blocks that begin with
// both).
//
// Groups of lanes own a key each. A group keeps the softmax of its keys as it goes (maximum, sum, Σ p·v, rescaled when
// the maximum grows; Milakov and Gimelshein 2018), so that nothing but the end is common to the warps.
#pragma once

#include "kernels/cuda_common.cuh"

// exp(x − max), where max may be that of no keys at all.
template <typename T>
__device__ __forceinline__ float weight_of(float x, float max) {
    return x == -INFINITY ? 0.0f : exp_for<T>(x - max);
}

// Shared memory of WARPS warps that work on up to HEADS heads.
template <int WARPS_, int HEADS_, typename T_>
struct EarlyPiece {
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

// k, v: of the piece's first key, `row` elements from one key to the next; keys ≤ DECODE_PIECE, of which the last one
// is in shared memory instead where `newest`. A lane has W channels of a key, and 1 << log_lanes of them own it. The
// first keys and values are asked for, then ready() is called, which returns when queries, key and value are there;
// afterwards the caller holds the warps together before it reads maxima, totals and sums. BATCH keys and values of a
// lane are under way at a time.
template <int W, int BATCH, typename Shared, typename T, typename Ready>
__device__ __forceinline__ void attend_early(const Shared& shared, const T* k_cache, const T* v_cache, int64_t row,
                                             int keys, bool newest, int HS, int log_lanes, Ready ready) {
    constexpr int HEADS = Shared::HEADS, LOG_THREADS = 8, THREADS = Shared::WARPS * WARP;
    static_assert(THREADS == 1 << LOG_THREADS);
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    // Key j of the piece belongs to the group j mod groups: `count` keys, `rounds` at most.
    const int lanes = 1 << log_lanes, channel = (lane & (lanes - 1)) * W, groups = THREADS >> log_lanes,
              mine = thread >> log_lanes;
    const int rounds = ((keys - 1) >> (LOG_THREADS - log_lanes)) + 1,
              count = rounds - (mine >= keys - (rounds - 1) * groups);
    const bool inside = channel < HS, fresh = newest && mine == keys - 1 - (rounds - 1) * groups;
    const int cached = count - fresh;
    const int64_t step = groups * row;
    const T *k = k_cache + mine * row + channel, *v = v_cache + mine * row + channel;
    using Vectors = Pack<T, W>[BATCH];
    const auto load = [&](Vectors& x, const T*& from, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++, from += step)
            if (inside && first + b < cached) x[b] = load_pack<W>(from);
    };
    const auto add_newest = [&](Vectors& x, const T* from, int first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (fresh && inside && first + b == cached) x[b] = load_pack<W>(from + channel);
    };
    Vectors key = {}, value = {};
    load(key, k, 0);
    load(value, v, 0);
    ready();
    float q[HEADS][W], max[HEADS], total[HEADS] = {}, o[HEADS][W] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        max[h] = -INFINITY;
#pragma unroll
        for (int i = 0; i < W; i++) q[h][i] = inside ? shared.queries[h * shared.stride + channel + i] : 0.0f;
    }
#pragma unroll 1
    for (int first = 0; first < rounds; first += BATCH) {
        add_newest(key, shared.key, first);
        float p[BATCH][HEADS] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const Floats<W> x = as_floats(key[b]);
#pragma unroll
            for (int i = 0; i < W; i++)
#pragma unroll
                for (int h = 0; h < HEADS; h++) p[b][h] = fmaf(q[h][i], x[i], p[b][h]);
        }
        load(key, k, first + BATCH);
#pragma unroll 1
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
                if (first + b >= count) p[b][h] = -INFINITY;
                larger = nan_max(larger, p[b][h]);
            }
            const float old = weight_of<T>(max[h], larger);
            total[h] *= old;
#pragma unroll
            for (int i = 0; i < W; i++) o[h][i] *= old;
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
            const Floats<W> x = as_floats(value[b]);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < W; i++) o[h][i] = fmaf(p[b][h], x[i], o[h][i]);
        }
        load(value, v, first + BATCH);
    }
    // The groups of a warp together.
    float common[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) common[h] = max[h];
#pragma unroll 1
    for (int offset = lanes; offset < WARP; offset *= 2)
#pragma unroll
        for (int h = 0; h < HEADS; h++) common[h] = nan_max(common[h], __shfl_xor_sync(ALL_LANES, common[h], offset));
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float f = weight_of<T>(max[h], common[h]);
        total[h] *= f;
#pragma unroll
        for (int i = 0; i < W; i++) o[h][i] *= f;
    }
#pragma unroll 1
    for (int offset = lanes; offset < WARP; offset *= 2)
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            total[h] += __shfl_xor_sync(ALL_LANES, total[h], offset);
#pragma unroll
            for (int i = 0; i < W; i++) o[h][i] += __shfl_xor_sync(ALL_LANES, o[h][i], offset);
        }
    if (lane >= lanes) return;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int at = warp * HEADS + h;
        if (lane == 0) shared.maxima[at] = common[h], shared.totals[at] = total[h];
#pragma unroll
        for (int i = 0; i < W; i++)
            if (inside) shared.sums[at * shared.stride + channel + i] = o[h][i];
    }
}
