// FlashAttention on tensor cores of sm_80 and later (mma.sync); fp32 by the same kernels with fused multiply-adds.
//
//   forward    a block owns BM queries of one head and walks over the keys that they see with an online softmax:
//              S = Q·Kᵀ, O += P·V.
//   backward   twice, so that no sum crosses blocks and nothing is added atomically: seven products where one pass with
//              atomics does five.
//     queries  a block owns queries: delta = Σ dout·out (kept for the second pass), S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
//     keys     a block owns keys of one KV head and walks over the queries of all heads that share it:
//              Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q. With Sᵀ, not S, Pᵀ and dSᵀ come out of the product
//              as the next one wants them: they never leave the registers.
//
// Warps own whole rows of a tile, so that row sums need four lanes and no shared memory. P and dS are rounded to T.
// A block's number gives tile, head and sequence; sequences come from cum_q and cum_k on the device, and blocks whose
// tile lies past their sequence's end return. The sequence after the last stands for the tokens that belong to none.
#include "kernels/attention/attention.h"

#include "kernels/attention/attention.cuh"
#include "kernels/attention/attention_check.h"
#include "kernels/cuda/warp_tile.cuh"

namespace {

constexpr int64_t MAX_HS = 256;

struct Task {
    int tile;
    int64_t head, sequence;
};

__device__ __forceinline__ Task task_of(int tiles, int64_t heads) {
    const unsigned rest = blockIdx.x / unsigned(tiles);
    return {int(blockIdx.x % unsigned(tiles)), int64_t(rest % unsigned(heads)), int64_t(rest / unsigned(heads))};
}

// ---------------------------------------------------------------------------------------------------------------------
// Tile sizes, the fastest found for bf16 on an H100 (D = 64, T = 1024). Shared memory stays within the 99 KiB that
// every GPU from sm_80 on has.

template <typename T, int D>
struct ForwardSizes {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    // With 32 rows a warp reads half as much from shared memory per product as with 16.
    static constexpr int MT = FP32 || D > 128 ? 1 : 2;
    static constexpr int WARPS = FP32 && D > 128 ? 2 : 4;
    static constexpr int BM = WARPS * MT * 16;
    static constexpr int BN = !FP32 ? 64 : D > 128 ? 16 : 32;
    static constexpr bool KEEP_Q = !FP32 && D <= 64;
    static constexpr int BLOCKS = !FP32 && D <= 128 ? 2 : 1;  // per SM, what registers allow
    // Two stages of K and V need one barrier for each step, one stage two but half the memory.
    static constexpr int STAGES = D <= 96 || FP32 ? 2 : 1;
    static constexpr int BYTES = (BM + STAGES * 2 * BN) * PITCH<T, D> * int(sizeof(T));
};

template <typename T, int D>
struct QueryPassSizes {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    static constexpr int MT = FP32 || D > 64 ? 1 : 2;
    static constexpr int WARPS = FP32 && D > 128 ? 1 : 4;
    static constexpr int BM = WARPS * MT * 16;
    static constexpr int BN = D * int(sizeof(T)) <= 256 ? 32 : 16;
    static constexpr int BLOCKS = FP32 || D > 64 ? 1 : 3;
    static constexpr int BYTES = (2 * BM + 4 * BN) * PITCH<T, D> * int(sizeof(T));
};

template <typename T, int D>
struct KeyPassSizes {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    static constexpr int MT = 1;
    static constexpr int WARPS = D * int(sizeof(T)) <= 256 ? 4 : D * int(sizeof(T)) <= 512 ? 2 : 1;
    static constexpr int BN = WARPS * MT * 16;                                                       // keys
    static constexpr int BQ = D * int(sizeof(T)) <= 192 ? 64 : D * int(sizeof(T)) <= 256 ? 32 : 16;  // queries
    static constexpr bool KEEP = !FP32 && D <= 64;
    static constexpr int DO = D > 128 ? 128 : D;  // columns of dk and dv in the registers of one block
    static constexpr int PARTS = D / DO;
    static constexpr int BLOCKS = FP32 || D > 64 ? 1 : 3;
    static constexpr int STATS = 2 * 2 * BQ * int(sizeof(float));  // lse and delta of two stages
    static constexpr int BYTES = (2 * BN + 4 * BQ) * PITCH<T, D> * int(sizeof(T)) + STATS;
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <typename T, int D>
__global__ void __launch_bounds__(ForwardSizes<T, D>::WARPS* WARP, (ForwardSizes<T, D>::BLOCKS))
    forward_kernel(const __grid_constant__ Attention<T> a) {
    using Sizes = ForwardSizes<T, D>;
    constexpr int MT = Sizes::MT, BM = Sizes::BM, BN = Sizes::BN, THREADS = Sizes::WARPS * WARP;
    static_assert(Sizes::BYTES <= 99 * 1024);
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int TILE = BN * PITCH<T, D>, STAGES = Sizes::STAGES;
    T *q_tile = reinterpret_cast<T*>(memory), *stages = q_tile + BM * PITCH<T, D>;

    const Task task = task_of(a.tiles, a.NH);
    if (task.sequence == a.S) {
        const int64_t first = max(0, a.cum_q[a.S]);
        zero_tail(a.out, task.head, first, a.Nq, a.HS, task.tile, a.tiles, THREADS);
        for (int64_t i = first + task.tile * THREADS + threadIdx.x; a.lse && i < a.Nq; i += a.tiles * THREADS)
            a.lse[task.head * a.lse_stride + i] = -INF;
        return;
    }
    const Sequence seq = sequence_of(a, task.sequence);
    const int i0 = (a.tiles - 1 - task.tile) * BM;  // the longest first
    if (i0 >= seq.qlen) return;
    const int64_t kv_head = task.head / (a.NH / a.NKV);
    const T *k = a.k.at(seq.k0, kv_head), *v = a.v.at(seq.k0, kv_head);
    const int keys = min(seq.klen, min(i0 + BM, seq.qlen) + seq.last);  // end of those that the last query sees
    const int first_key = max(0, i0 + seq.first) / BN * BN;             // that the first query sees, to whole steps
    const int lane = lane_id(), warp_row = threadIdx.x / WARP * MT * 16, row0 = i0 + warp_row + lane / 4;

    load_tile<T, D, BM, THREADS>(q_tile, a.q.at(seq.q0 + i0, task.head), a.q.token_stride, seq.qlen - i0, a.HS,
                                 a.aligned);
    const auto load_k = [&](T* tile, int j0) {
        load_tile<T, D, BN, THREADS>(tile, k + j0 * a.k.token_stride, a.k.token_stride, keys - j0, a.HS, a.aligned);
    };
    const auto load_v = [&](T* tile, int j0) {
        load_tile<T, D, BN, THREADS>(tile, v + j0 * a.v.token_stride, a.v.token_stride, keys - j0, a.HS, a.aligned);
    };
    const auto stage_of = [&](int j0) { return stages + j0 / BN % STAGES * 2 * TILE; };
    if (first_key < keys) load_k(stage_of(first_key), first_key);
    if (first_key < keys && STAGES == 2) load_v(stage_of(first_key) + TILE, first_key);
    cp_async_wait_all();
    __syncthreads();
    const TileA<T, MT, D, Sizes::KEEP_Q> q(q_tile + warp_row * PITCH<T, D>);

    // With c = scale·log₂e: P = 2^(c·S − c·(largest S so far)), and sums of this lane's columns.
    const float c = a.scale * LOG2E;
    float o[MT][D / 8][4] = {}, largest[MT][2], sum[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; m++) largest[m][0] = largest[m][1] = -INF;

    for (int j0 = first_key; j0 < keys; j0 += BN) {
        T *k_tile = stage_of(j0), *v_tile = k_tile + TILE;
        if (STAGES == 1) load_v(v_tile, j0);
        if (STAGES == 2 && j0 + BN < keys) {
            load_k(stage_of(j0 + BN), j0 + BN);
            load_v(stage_of(j0 + BN) + TILE, j0 + BN);
        }
        const bool seen = seq.any_seen(i0 + warp_row, MT * 16, j0, BN);  // by this warp
        float s[MT][BN / 8][4] = {};
        if (seen) {
            mma_ABt(s, q, k_tile);
            if (j0 + BN > keys || !seq.all_seen(i0 + warp_row, MT * 16, j0, BN)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int i = row0 + m * 16 + e / 2 * 8, j = j0 + n * 8 + lane % 4 * 2 + e % 2;
                            if (j >= keys || !seq.sees(i, j)) s[m][n][e] = -INF;
                        }
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float next = largest[m][half];
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
                        next = fmaxf(next, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    next = row_max(next);
                    // Rounded products: what was subtracted before must be what is added back.
                    const float subtract = next == -INF ? 0.0f : __fmul_rn(c, next);  // nothing seen: not −∞ + ∞
                    const float rescale = exp2_fast(__fmul_rn(c, largest[m][half]) - subtract);
                    largest[m][half] = next;
                    float added = 0;
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) {
                            s[m][n][e] = exp2_fast(fmaf(s[m][n][e], c, -subtract));
                            added += s[m][n][e];
                        }
                    sum[m][half] = fmaf(sum[m][half], rescale, added);
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        o[m][n][2 * half] *= rescale;
                        o[m][n][2 * half + 1] *= rescale;
                    }
                }
        }
        if (STAGES == 1) {
            cp_async_wait_all();
            __syncthreads();  // V has come, and nobody needs K any more
            if (j0 + BN < keys) load_k(k_tile, j0 + BN);
        }
        if (seen) mma_AB<T, D>(o, s, v_tile);
        cp_async_wait_all();
        __syncthreads();
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = row_sum(sum[m][half]), factor = total == 0 ? 0.0f : 1 / total;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[m][n][2 * half] *= factor;
                o[m][n][2 * half + 1] *= factor;
            }
            const int i = row0 + m * 16 + half * 8;
            if (a.lse && lane % 4 == 0 && i < seq.qlen)
                a.lse[task.head * a.lse_stride + seq.q0 + i] =
                    total == 0 ? -INF : a.scale * largest[m][half] + logf(total);
        }
    store_tile<T, D>(a.out.at(seq.q0 + i0 + warp_row, task.head), a.out.token_stride, seq.qlen - i0 - warp_row, a.HS,
                     a.aligned, q_tile + warp_row * PITCH<T, D>, o);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Σ_c dout·out of one row by the four lanes that share it; dout from shared memory. In the same order, whether or not
// rows are aligned.
template <typename T>
__device__ __forceinline__ float row_delta(const T* dout, const T* out, int HS, bool aligned) {
    constexpr int W = FULL_WIDTH<T>;
    float sum = 0;
    for (int c = lane_id() % 4 * W; c < HS; c += 4 * W) {
        Floats<W> x = {};
        if (aligned)
            x = load_floats<W>(out + c);
        else
#pragma unroll
            for (int i = 0; i < W; i++) x[i] = c + i < HS ? as_float(out[c + i]) : 0.0f;
        const Floats<W> g = load_floats<W>(dout + c);
#pragma unroll
        for (int i = 0; i < W; i++) sum = fmaf(g[i], x[i], sum);
    }
    return row_sum(sum);
}

template <typename T, int D>
__global__ void __launch_bounds__(QueryPassSizes<T, D>::WARPS* WARP, (QueryPassSizes<T, D>::BLOCKS))
    backward_queries_kernel(const __grid_constant__ Attention<T> a) {
    using Sizes = QueryPassSizes<T, D>;
    constexpr int MT = Sizes::MT, BM = Sizes::BM, BN = Sizes::BN, THREADS = Sizes::WARPS * WARP;
    constexpr int STAGE = 2 * BN * PITCH<T, D>;  // K and V of one step
    static_assert(Sizes::BYTES <= 99 * 1024);
    extern __shared__ __align__(16) unsigned char memory[];
    T *q_tile = reinterpret_cast<T*>(memory), *dout_tile = q_tile + BM * PITCH<T, D>,
      *stages = dout_tile + BM * PITCH<T, D>;

    const Task task = task_of(a.tiles, a.NH);
    if (task.sequence == a.S)
        return zero_tail(a.dq, task.head, max(0, a.cum_q[a.S]), a.Nq, a.HS, task.tile, a.tiles, THREADS);
    const Sequence seq = sequence_of(a, task.sequence);
    const int i0 = (a.tiles - 1 - task.tile) * BM;
    if (i0 >= seq.qlen) return;
    const int64_t kv_head = task.head / (a.NH / a.NKV);
    const T *k = a.k.at(seq.k0, kv_head), *v = a.v.at(seq.k0, kv_head);
    const int keys = min(seq.klen, min(i0 + BM, seq.qlen) + seq.last), first_key = max(0, i0 + seq.first) / BN * BN;
    const int lane = lane_id(), warp_row = threadIdx.x / WARP * MT * 16, row0 = i0 + warp_row + lane / 4;
    const auto load_keys = [&](int j0) {
        T* stage = stages + j0 / BN % 2 * STAGE;
        load_tile<T, D, BN, THREADS>(stage, k + j0 * a.k.token_stride, a.k.token_stride, keys - j0, a.HS, a.aligned);
        load_tile<T, D, BN, THREADS>(stage + BN * PITCH<T, D>, v + j0 * a.v.token_stride, a.v.token_stride, keys - j0,
                                     a.HS, a.aligned);
    };

    load_tile<T, D, BM, THREADS>(q_tile, a.q.at(seq.q0 + i0, task.head), a.q.token_stride, seq.qlen - i0, a.HS,
                                 a.aligned);
    load_tile<T, D, BM, THREADS>(dout_tile, a.dout.at(seq.q0 + i0, task.head), a.dout.token_stride, seq.qlen - i0, a.HS,
                                 a.aligned);
    if (first_key < keys) load_keys(first_key);
    cp_async_wait_all();
    __syncthreads();
    const TileA<T, MT, D, false> q(q_tile + warp_row * PITCH<T, D>), dout(dout_tile + warp_row * PITCH<T, D>);

    float lse[MT][2], delta[MT][2];  // of this lane's rows, lse in units of ln 2
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp_row + lane / 4 + m * 16 + half * 8, i = i0 + row;
            const bool exists = i < seq.qlen;
            lse[m][half] = exists ? a.lse[task.head * a.lse_stride + seq.q0 + i] * LOG2E : 0.0f;
            const float d =
                row_delta(dout_tile + row * PITCH<T, D>, a.out.at(seq.q0 + i, task.head), exists ? a.HS : 0, a.aligned);
            delta[m][half] = d;
            if (exists && lane % 4 == 0) a.delta[task.head * a.Nq + seq.q0 + i] = d;
        }

    const float c = a.scale * LOG2E;
    float dq[MT][D / 8][4] = {};
    for (int j0 = first_key; j0 < keys; j0 += BN) {
        if (j0 > first_key) {
            cp_async_wait_all();
            __syncthreads();  // this step's keys have come, and nobody needs the other stage any more
        }
        if (j0 + BN < keys) load_keys(j0 + BN);
        if (!seq.any_seen(i0 + warp_row, MT * 16, j0, BN)) continue;  // by this warp
        const T *k_tile = stages + j0 / BN % 2 * STAGE, *v_tile = k_tile + BN * PITCH<T, D>;
        const bool masked = j0 + BN > keys || !seq.all_seen(i0 + warp_row, MT * 16, j0, BN);
        float s[MT][BN / 8][4] = {}, dp[MT][BN / 8][4] = {};
        mma_ABt(s, q, k_tile);
        mma_ABt(dp, dout, v_tile);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float p = exp2_fast(fmaf(s[m][n][e], c, -lse[m][e / 2]));
                    dp[m][n][e] = p * (dp[m][n][e] - delta[m][e / 2]);
                    if (masked) {
                        const int i = row0 + m * 16 + e / 2 * 8, j = j0 + n * 8 + lane % 4 * 2 + e % 2;
                        if (j >= keys || !seq.sees(i, j)) dp[m][n][e] = 0;
                    }
                }
        mma_AB<T, D>(dq, dp, k_tile);
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dq[m][n][e] *= a.scale;
    store_tile<T, D>(a.dq.at(seq.q0 + i0 + warp_row, task.head), a.dq.token_stride, seq.qlen - i0 - warp_row, a.HS,
                     a.aligned, q_tile + warp_row * PITCH<T, D>, dq);
}

template <typename T, int D>
__global__ void __launch_bounds__(KeyPassSizes<T, D>::WARPS* WARP, (KeyPassSizes<T, D>::BLOCKS))
    backward_keys_kernel(const __grid_constant__ Attention<T> a) {
    using Sizes = KeyPassSizes<T, D>;
    constexpr int MT = Sizes::MT, BN = Sizes::BN, BQ = Sizes::BQ, DO = Sizes::DO, THREADS = Sizes::WARPS * WARP;
    constexpr int STAGE = 2 * BQ * PITCH<T, D>;  // Q and dO of one step
    static_assert(Sizes::BYTES <= 99 * 1024);
    extern __shared__ __align__(16) unsigned char memory[];
    T *k_tile = reinterpret_cast<T*>(memory), *v_tile = k_tile + BN * PITCH<T, D>, *stages = v_tile + BN * PITCH<T, D>;
    float* stats = reinterpret_cast<float*>(stages + 2 * STAGE);

    Task task = task_of(a.tiles * Sizes::PARTS, a.NKV);
    const int first_column = task.tile % Sizes::PARTS * DO;  // of dk and dv
    task.tile /= Sizes::PARTS;
    if (task.sequence == a.S) {
        const int64_t first = max(0, a.cum_k[a.S]);
        zero_tail(a.dk, task.head, first, a.Nk, a.HS, task.tile, a.tiles, THREADS);
        return zero_tail(a.dv, task.head, first, a.Nk, a.HS, task.tile, a.tiles, THREADS);
    }
    const Sequence seq = sequence_of(a, task.sequence);
    const int j0 = task.tile * BN;  // the first keys are seen by the most queries
    if (j0 >= seq.klen) return;
    const int64_t group = a.NH / a.NKV, first_head = task.head * group;
    const int first_query = max(0, j0 - seq.last) / BQ * BQ;                // that sees key j0, to whole steps
    const int queries = min(seq.qlen, min(j0 + BN, seq.klen) - seq.first);  // end of those that see the last key
    const int steps = max(0, (queries - first_query + BQ - 1) / BQ), all_steps = int(group) * steps;
    const int lane = lane_id(), warp_row = threadIdx.x / WARP * MT * 16, row0 = j0 + warp_row + lane / 4;
    const auto load_queries = [&](int step) {
        const int64_t head = first_head + step / steps;
        const int i0 = first_query + step % steps * BQ, count = seq.qlen - i0;
        T* stage = stages + step % 2 * STAGE;
        load_tile<T, D, BQ, THREADS>(stage, a.q.at(seq.q0 + i0, head), a.q.token_stride, count, a.HS, a.aligned);
        load_tile<T, D, BQ, THREADS>(stage + BQ * PITCH<T, D>, a.dout.at(seq.q0 + i0, head), a.dout.token_stride, count,
                                     a.HS, a.aligned);
        // Rows that don't exist get zeros: P = 1 then meets dO = 0.
        for (int i = threadIdx.x; i < BQ; i += THREADS) {
            const bool exists = i < count;
            const int64_t at = seq.q0 + i0 + (exists ? i : 0);
            cp_async_4(stats + step % 2 * 2 * BQ + i, a.lse + head * a.lse_stride + at, exists);
            cp_async_4(stats + step % 2 * 2 * BQ + BQ + i, a.delta + head * a.Nq + at, exists);
        }
    };

    load_tile<T, D, BN, THREADS>(k_tile, a.k.at(seq.k0 + j0, task.head), a.k.token_stride, seq.klen - j0, a.HS,
                                 a.aligned);
    load_tile<T, D, BN, THREADS>(v_tile, a.v.at(seq.k0 + j0, task.head), a.v.token_stride, seq.klen - j0, a.HS,
                                 a.aligned);
    if (all_steps > 0) load_queries(0);
    cp_async_wait_all();
    __syncthreads();
    const TileA<T, MT, D, Sizes::KEEP> k(k_tile + warp_row * PITCH<T, D>), v(v_tile + warp_row * PITCH<T, D>);

    const float c = a.scale * LOG2E;
    float dk[MT][DO / 8][4] = {}, dv[MT][DO / 8][4] = {};
    for (int step = 0; step < all_steps; step++) {
        if (step > 0) {
            cp_async_wait_all();
            __syncthreads();  // this step's queries have come, and nobody needs the other stage any more
        }
        if (step + 1 < all_steps) load_queries(step + 1);
        const int i0 = first_query + step % steps * BQ;
        if (!seq.any_seen(i0, BQ, j0 + warp_row, MT * 16)) continue;  // of this warp
        const T *q_tile = stages + step % 2 * STAGE, *dout_tile = q_tile + BQ * PITCH<T, D>;
        const float *lse = stats + step % 2 * 2 * BQ, *delta = lse + BQ;
        const bool masked = !seq.all_seen(i0, BQ, j0 + warp_row, MT * 16);
        float p[MT][BQ / 8][4] = {}, ds[MT][BQ / 8][4] = {};
        mma_ABt(p, k, q_tile);
#pragma unroll
        for (int n = 0; n < BQ / 8; n++) {
            const Floats<2> l = load_floats<2>(lse + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    p[m][n][e] = exp2_fast(fmaf(p[m][n][e], c, -l[e % 2] * LOG2E));
                    if (masked) {
                        const int i = i0 + n * 8 + lane % 4 * 2 + e % 2, j = row0 + m * 16 + e / 2 * 8;
                        if (!seq.sees(i, j)) p[m][n][e] = 0;
                    }
                }
        }
        mma_AB<T, D>(dv, p, dout_tile + first_column);
        mma_ABt(ds, v, dout_tile);
#pragma unroll
        for (int n = 0; n < BQ / 8; n++) {
            const Floats<2> d = load_floats<2>(delta + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - d[e % 2]);
        }
        mma_AB<T, D>(dk, ds, q_tile + first_column);
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < DO / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk[m][n][e] *= a.scale;
    const int count = seq.klen - j0 - warp_row;
    const int columns = a.HS - first_column;
    store_tile<T, D>(a.dk.at(seq.k0 + j0 + warp_row, task.head) + first_column, a.dk.token_stride, count, columns,
                     a.aligned, k_tile + warp_row * PITCH<T, D>, dk);
    store_tile<T, D>(a.dv.at(seq.k0 + j0 + warp_row, task.head) + first_column, a.dv.token_stride, count, columns,
                     a.aligned, v_tile + warp_row * PITCH<T, D>, dv);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch

// f(std::integral_constant<int, D>) with the smallest compiled D that holds a head; columns from HS on are zeros.
template <typename T, typename F>
void dispatch_head_size(int64_t HS, F f) {
    if constexpr (!std::is_same_v<T, float>) {
        if (HS <= 32) return f(std::integral_constant<int, 32>{});
        if (HS > 64 && HS <= 96) return f(std::integral_constant<int, 96>{});
    }
    if (HS <= 64) return f(std::integral_constant<int, 64>{});
    if (HS <= 128) return f(std::integral_constant<int, 128>{});
    f(std::integral_constant<int, 256>{});
}

// tasks: blocks for one sequence and head.
template <typename T>
void launch(const char* op, void (*kernel)(Attention<T>), const Attention<T>& a, int64_t tasks, int64_t heads,
            int warps, int bytes, Stream stream) {
    const int64_t blocks = tasks * heads * (a.S + 1);
    require(blocks < int64_t(1) << 31, op, ": ", a.S, " sequences of up to ", a.tiles, " tiles and ", heads,
            " heads are more than one launch can hold");
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    kernel<<<unsigned(blocks), unsigned(warps * WARP), size_t(bytes), cuda_stream(stream)>>>(a);
    check_launch(op, stream);
}

// All but the gradients.
template <typename T>
Attention<T> forward_arguments(const AttentionSizes& z, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const AttentionSequences& sequences, float scale) {
    Attention<T> a{};
    a.q = heads_of<T>(q), a.k = heads_of<T>(k), a.v = heads_of<T>(v), a.out = heads_of<T>(out);
    a.lse = lse.as<float>(), a.lse_stride = lse.stride[0];
    a.cum_q = sequences.cum_q.as<int32_t>(), a.cum_k = sequences.cum_k.as<int32_t>();
    a.causal = sequences.causal;
    // One that reaches past the longest sequence is as good as none, and sums with it stay within int.
    a.window = int(std::min(sequences.window, std::max(sequences.max_q, sequences.max_k)));
    a.S = z.S, a.Nq = z.Nq, a.Nk = z.Nk, a.NH = z.NH, a.NKV = z.NKV;
    a.HS = int(z.HS);
    a.scale = scale;
    return a;
}

// Bytes of the fp32 sums of dq, which come first in the scratch.
int64_t dq_sums_bytes([[maybe_unused]] int64_t Nq, [[maybe_unused]] int64_t NH, [[maybe_unused]] int64_t HS,
                      [[maybe_unused]] bool deterministic, [[maybe_unused]] int64_t max_k) {
#ifdef HAVE_SM90A
    if (!deterministic) return hopper_attention_sums(Nq, NH, HS, max_k);
#endif
    return 0;
}

}  // namespace

int64_t attention_max_head_size() {
    return MAX_HS;
}

int64_t attention_forward_scratch() {
    return 16;  // the next task's number
}

void attention_forward(Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, const AttentionSequences& sequences,
                       float scale, Tensor scratch, Stream stream) {
    const char* op = "attention_forward";
    const DType dtype = check_activation_dtype(op, "q", q);
    const AttentionSizes z = check_attention(op, dtype, q, k, v, sequences, scale);
    check_tensor(op, "out", out, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq}, Given::Optional);
    check_scratch(op, scratch, attention_forward_scratch());
    if (z.Nq == 0) return;

    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Attention<T> a = forward_arguments<T>(z, q, k, v, out, lse, sequences, scale);
        a.aligned = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out});
        a.next_task = static_cast<uint32_t*>(scratch.data);
#ifdef HAVE_SM90A
        if constexpr (!std::is_same_v<T, float>)
            if (hopper_attention_takes(a)) return hopper_attention_forward(op, a, sequences, stream);
#endif
        dispatch_head_size<T>(z.HS, [&](auto head_size) {
            using Sizes = ForwardSizes<T, head_size>;
            a.tiles = tiles_of(sequences.max_q, Sizes::BM);
            launch(op, forward_kernel<T, head_size>, a, a.tiles, a.NH, Sizes::WARPS, Sizes::BYTES, stream);
        });
    });
}

int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t HS, bool deterministic, int64_t max_k) {
    // Then delta and the next task's number.
    return dq_sums_bytes(Nq, NH, HS, deterministic, max_k) + Nq * NH * int64_t(sizeof(float)) +
           attention_forward_scratch();
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                        Tensor lse, const AttentionSequences& sequences, float scale, Tensor scratch, Stream stream,
                        bool deterministic) {
    const char* op = "attention_backward";
    const DType dtype = check_activation_dtype(op, "q", q);
    const AttentionSizes z = check_attention(op, dtype, q, k, v, sequences, scale);
    check_tensor(op, "dq", dq, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "dk", dk, dtype, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dv", dv, dtype, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dout", dout, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "out", out, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq});
    check_scratch(op, scratch, attention_backward_scratch(z.Nq, z.NH, z.HS, deterministic, sequences.max_k));

    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Attention<T> a = forward_arguments<T>(z, q, k, v, out, lse, sequences, scale);
        a.dq = heads_of<T>(dq), a.dk = heads_of<T>(dk), a.dv = heads_of<T>(dv), a.dout = heads_of<T>(dout);
        const int64_t sums = dq_sums_bytes(z.Nq, z.NH, z.HS, deterministic, sequences.max_k) / int64_t(sizeof(float));
        a.dq_sums = sums > 0 ? static_cast<float*>(scratch.data) : nullptr;
        a.delta = static_cast<float*>(scratch.data) + sums;
        a.next_task = reinterpret_cast<uint32_t*>(a.delta + z.Nq * z.NH);
        a.aligned = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out, dout, dq, dk, dv});
#ifdef HAVE_SM90A
        if constexpr (!std::is_same_v<T, float>)
            if (hopper_attention_takes(a)) return hopper_attention_backward(op, a, sequences, stream);
#endif
        dispatch_head_size<T>(z.HS, [&](auto head_size) {
            using Queries = QueryPassSizes<T, head_size>;
            using Keys = KeyPassSizes<T, head_size>;
            if (z.Nq > 0) {
                a.tiles = tiles_of(sequences.max_q, Queries::BM);
                launch(op, backward_queries_kernel<T, head_size>, a, a.tiles, a.NH, Queries::WARPS, Queries::BYTES,
                       stream);
            }
            if (z.Nk > 0) {
                a.tiles = tiles_of(sequences.max_k, Keys::BN);
                launch(op, backward_keys_kernel<T, head_size>, a, int64_t(a.tiles) * Keys::PARTS, a.NKV, Keys::WARPS,
                       Keys::BYTES, stream);
            }
        });
    });
}
