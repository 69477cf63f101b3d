// Attention, backward (tiled_attention.cuh): one kernel over queries, one over keys.
//
// Tile sizes are the fastest for bf16 on an H100 (D = 64, T = 1024). Shared memory stays within the 99 KiB of every GPU
// from sm_80 on. For bf16 (sm_90a, CUDA 13.0; shared memory in bytes, registers of a thread, blocks on an H100):
//
//   pass     D    own rows  inner rows  shared memory  warps  registers  stack     blocks per SM
//   queries  32   128       32          30,720         4      166        0         3
//   queries  64   128       32          55,296         4      168        24 bytes  3
//   queries  96   64        32          53,248         4      182        0         2
//   queries  128  64        32          69,632         4      208        0         2
//   queries  256  64        16          101,376        4      241        0         2
//   keys     32   64        64          31,744         4      166        0         3
//   keys     64   64        64          56,320         4      168        8 bytes   3
//   keys     96   64        64          80,896         4      248        0         2
//   keys     128  64        32          70,144         4      250        0         2
//   keys     256  32        16          67,840         2      244        0         3
//
// GPT-2 124M (B=64, T=1024, NH=12, HS=64): (64 + 1)·12 = 780 pairs of a sequence and a head (the last 12 for the tokens
// after the last sequence). The query pass has 1024 / 128 = 8 tiles for each, 6,240 blocks of 128 threads; the key pass
// has 1024 / 64 = 16, 12,480 blocks of 128 threads.
#include "kernels/attention/tiled_attention.cuh"

namespace {

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
    static constexpr int DO = D > 128 ? 128 : D;  // columns of dk and dv that fit the registers of one block
    static constexpr int PARTS = D / DO;
    static constexpr int BLOCKS = FP32 || D > 64 ? 1 : 3;
    static constexpr int STATS = 2 * 2 * BQ * int(sizeof(float));  // lse and delta of two stages
    static constexpr int BYTES = (2 * BN + 4 * BQ) * PITCH<T, D> * int(sizeof(T)) + STATS;
};

// Σ_c dout·out of one row by the four lanes that share it; dout lies in shared memory. The order of additions does not
// depend on the alignment of rows.
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

    const BlockTask task = task_of<BM, 1>(a, a.cum_q, a.Nq, a.NH);
    if (task.sequence < 0) return;
    if (task.sequence == a.S)
        return zero_tail(a.dq, task.head, max(0, a.cum_q[a.S]), a.Nq, a.HS, task.tile, task.tiles, THREADS);
    const Sequence seq = sequence_of(a, task.sequence);
    const int i0 = (task.tiles - 1 - task.tile) * BM;
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
            __syncthreads();  // this step's keys have landed, and all warps have read the other stage
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

    scale_all(dq, a.scale);
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

    const BlockTask task = task_of<BN, Sizes::PARTS>(a, a.cum_k, a.Nk, a.NKV);
    const int first_column = task.part * DO;  // of dk and dv
    if (task.sequence < 0) return;
    if (task.sequence == a.S) {
        const int64_t first = max(0, a.cum_k[a.S]);
        zero_tail(a.dk, task.head, first, a.Nk, a.HS, task.tile, task.tiles, THREADS);
        return zero_tail(a.dv, task.head, first, a.Nk, a.HS, task.tile, task.tiles, THREADS);
    }
    const Sequence seq = sequence_of(a, task.sequence);
    const int j0 = task.tile * BN;  // the first keys are seen by the most queries
    if (j0 >= seq.klen) return;
    const int64_t group = a.NH / a.NKV, first_head = task.head * group;
    const int first_query = max(0, j0 - seq.last) / BQ * BQ;                // that sees key j0, rounded down to a step
    const int queries = min(seq.qlen, min(j0 + BN, seq.klen) - seq.first);  // end of the queries that see the last key
    const int steps = max(0, (queries - first_query + BQ - 1) / BQ), all_steps = int(group) * steps;
    const int lane = lane_id(), warp_row = threadIdx.x / WARP * MT * 16, row0 = j0 + warp_row + lane / 4;
    const auto load_queries = [&](int step) {
        const int64_t head = first_head + step / steps;
        const int i0 = first_query + step % steps * BQ, count = seq.qlen - i0;
        T* stage = stages + step % 2 * STAGE;
        load_tile<T, D, BQ, THREADS>(stage, a.q.at(seq.q0 + i0, head), a.q.token_stride, count, a.HS, a.aligned);
        load_tile<T, D, BQ, THREADS>(stage + BQ * PITCH<T, D>, a.dout.at(seq.q0 + i0, head), a.dout.token_stride, count,
                                     a.HS, a.aligned);
        // Rows that don't exist get zeros: P = 1 is then multiplied by dO = 0.
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
            __syncthreads();  // this step's queries have landed, and all warps have read the other stage
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

    scale_all(dk, a.scale);
    const int count = seq.klen - j0 - warp_row;
    const int columns = a.HS - first_column;
    store_tile<T, D>(a.dk.at(seq.k0 + j0 + warp_row, task.head) + first_column, a.dk.token_stride, count, columns,
                     a.aligned, k_tile + warp_row * PITCH<T, D>, dk);
    store_tile<T, D>(a.dv.at(seq.k0 + j0 + warp_row, task.head) + first_column, a.dv.token_stride, count, columns,
                     a.aligned, v_tile + warp_row * PITCH<T, D>, dv);
}

}  // namespace

template <typename T>
void tiled_attention_backward(const char* op, Attention<T> a, const AttentionSequences& sequences, Stream stream) {
    dispatch_head_size<T>(a.HS, [&](auto D) {
        using Queries = QueryPassSizes<T, D>;
        using Keys = KeyPassSizes<T, D>;
        if (a.Nq > 0) {
            a.tiles = tiles_of(sequences.max_q, Queries::BM);
            launch_tiles(op, backward_queries_kernel<T, D>, a, a.Nq, Queries::BM, 1, a.NH, Queries::WARPS,
                         Queries::BYTES, stream);
        }
        if (a.Nk > 0) {
            a.tiles = tiles_of(sequences.max_k, Keys::BN);
            launch_tiles(op, backward_keys_kernel<T, D>, a, a.Nk, Keys::BN, Keys::PARTS, a.NKV, Keys::WARPS,
                         Keys::BYTES, stream);
        }
    });
}

template void tiled_attention_backward(const char*, Attention<float>, const AttentionSequences&, Stream);
template void tiled_attention_backward(const char*, Attention<bf16>, const AttentionSequences&, Stream);
template void tiled_attention_backward(const char*, Attention<fp16>, const AttentionSequences&, Stream);
