// Attention, forward (tiled_attention.cuh).
//
// Tile sizes are the fastest for bf16 on an H100 (D = 64, T = 1024). Shared memory stays within the 99 KiB of every GPU
// from sm_80 on. For bf16 (sm_90a, CUDA 13.0; shared memory in bytes, registers of a thread, blocks on an H100):
//
//   D    queries  keys  stages  shared memory  warps  registers  stack     blocks per SM
//   32   128      64    2       30,720         4      192        0         2
//   64   128      64    2       55,296         4      254        0         2
//   96   128      64    2       79,872         4      255        40 bytes  2
//   128  128      64    1       69,632         4      255        64 bytes  2
//   256  64       64    1       101,376        4      255        56 bytes  2
//
// GPT-2 124M (B=64, T=1024, NH=12, HS=64): 1024 / 128 = 8 tiles of queries for each of (64 + 1)·12 pairs of a sequence
// and a head (the last 12 for the tokens after the last sequence): 6,240 blocks of 128 threads.
#include "kernels/attention/tiled_attention.cuh"

namespace {

template <typename T, int D>
struct ForwardSizes {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    // With 32 rows a warp reads half as much from shared memory for each mma as with 16.
    static constexpr int MT = FP32 || D > 128 ? 1 : 2;
    static constexpr int WARPS = FP32 && D > 128 ? 2 : 4;
    static constexpr int BM = WARPS * MT * 16;
    static constexpr int BN = !FP32 ? 64 : D > 128 ? 16 : 32;
    static constexpr bool KEEP_Q = !FP32 && D <= 64;
    static constexpr int BLOCKS = !FP32 && D <= 128 ? 2 : 1;  // per SM, as many as registers allow
    // Two stages of K and V need one barrier in each step; one stage needs two, but half the memory.
    static constexpr int STAGES = D <= 96 || FP32 ? 2 : 1;
    static constexpr int BYTES = (BM + STAGES * 2 * BN) * PITCH<T, D> * int(sizeof(T));
};

// Two rows of each of a thread's MT tiles on their way through the online softmax. With c = scale·log₂e:
// P = 2^(c·S − c·(largest S so far)); `sum` holds this lane's columns only.
template <int MT>
struct OnlineSoftmax {
    float c, largest[MT][2], sum[MT][2] = {};

    __device__ __forceinline__ explicit OnlineSoftmax(float scale) : c(scale * LOG2E) {
#pragma unroll
        for (int m = 0; m < MT; m++) largest[m][0] = largest[m][1] = -INF;
    }

    // s becomes P; o is rescaled to the new maximum.
    template <int NT, int DT>
    __device__ __forceinline__ void step(float (&s)[MT][NT][4], float (&o)[MT][DT][4]) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float next = largest[m][half];
#pragma unroll
                for (int n = 0; n < NT; n++) next = fmaxf(next, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                next = row_max(next);
                // __fmul_rn: no contraction, so that what was subtracted earlier is exactly what is added back.
                const float subtract = next == -INF ? 0.0f : __fmul_rn(c, next);  // no key seen yet: not −∞ + ∞
                const float rescale = exp2_fast(__fmul_rn(c, largest[m][half]) - subtract);
                largest[m][half] = next;
                float added = 0;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[m][n][e] = exp2_fast(fmaf(s[m][n][e], c, -subtract));
                        added += s[m][n][e];
                    }
                sum[m][half] = fmaf(sum[m][half], rescale, added);
#pragma unroll
                for (int n = 0; n < DT; n++) {
                    o[m][n][2 * half] *= rescale;
                    o[m][n][2 * half + 1] *= rescale;
                }
            }
    }

    // Divides o by the sums of P; f(m, half, sum of P, largest S) for each row.
    template <int DT, typename F>
    __device__ __forceinline__ void finish(float (&o)[MT][DT][4], F f) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float total = row_sum(sum[m][half]), factor = total == 0 ? 0.0f : 1 / total;
#pragma unroll
                for (int n = 0; n < DT; n++) {
                    o[m][n][2 * half] *= factor;
                    o[m][n][2 * half + 1] *= factor;
                }
                f(m, half, total, largest[m][half]);
            }
    }
};

template <typename T, int D>
__global__ void __launch_bounds__(ForwardSizes<T, D>::WARPS* WARP, (ForwardSizes<T, D>::BLOCKS))
    forward_kernel(const __grid_constant__ Attention<T> a) {
    using Sizes = ForwardSizes<T, D>;
    constexpr int MT = Sizes::MT, BM = Sizes::BM, BN = Sizes::BN, THREADS = Sizes::WARPS * WARP;
    static_assert(Sizes::BYTES <= 99 * 1024);
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int TILE = BN * PITCH<T, D>, STAGES = Sizes::STAGES;
    T *q_tile = reinterpret_cast<T*>(memory), *stages = q_tile + BM * PITCH<T, D>;

    const BlockTask task = task_of<BM, 1>(a, a.cum_q, a.Nq, a.NH);
    if (task.sequence < 0) return;
    if (task.sequence == a.S) {
        const int64_t first = max(0, a.cum_q[a.S]);
        zero_tail(a.out, task.head, first, a.Nq, a.HS, task.tile, task.tiles, THREADS);
        for (int64_t i = first + task.tile * THREADS + threadIdx.x; a.lse && i < a.Nq; i += task.tiles * THREADS)
            a.lse[task.head * a.lse_stride + i] = -INF;
        return;
    }
    const Sequence seq = sequence_of(a, task.sequence);
    const int i0 = (task.tiles - 1 - task.tile) * BM;  // the longest first
    if (i0 >= seq.qlen) return;
    const int64_t kv_head = task.head / (a.NH / a.NKV);
    const SequencePages pages = a.pages ? pages_of(a, task.sequence) : SequencePages{};
    static_assert(KV_PAGE % BN == 0);
    const auto row_of = [&](int j0) { return pages.pages ? pages.row(j0) : int64_t(seq.k0) + j0; };
    const int keys = min(seq.klen, min(i0 + BM, seq.qlen) + seq.last);  // end of the keys that the last query sees
    const int first_key = max(0, i0 + seq.first) / BN * BN;  // that the first query sees, rounded down to a step
    const int lane = lane_id(), warp_row = threadIdx.x / WARP * MT * 16, row0 = i0 + warp_row + lane / 4;

    load_tile<T, D, BM, THREADS>(q_tile, a.q.at(seq.q0 + i0, task.head), a.q.token_stride, seq.qlen - i0, a.HS,
                                 a.aligned);
    const auto load_k = [&](T* tile, int j0) {
        load_tile<T, D, BN, THREADS>(tile, a.k.at(row_of(j0), kv_head), a.k.token_stride, keys - j0, a.HS, a.aligned);
    };
    const auto load_v = [&](T* tile, int j0) {
        load_tile<T, D, BN, THREADS>(tile, a.v.at(row_of(j0), kv_head), a.v.token_stride, keys - j0, a.HS, a.aligned);
    };
    const auto stage_of = [&](int j0) { return stages + j0 / BN % STAGES * 2 * TILE; };
    if (first_key < keys) load_k(stage_of(first_key), first_key);
    if (first_key < keys && STAGES == 2) load_v(stage_of(first_key) + TILE, first_key);
    cp_async_wait_all();
    __syncthreads();
    const TileA<T, MT, D, Sizes::KEEP_Q> q(q_tile + warp_row * PITCH<T, D>);

    float o[MT][D / 8][4] = {};
    OnlineSoftmax<MT> softmax(a.scale);

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
                for_each(s, row0, j0, [&](float& x, int i, int j) {
                    if (j >= keys || !seq.sees(i, j)) x = -INF;
                });
            }
            softmax.step(s, o);
        }
        if (STAGES == 1) {
            cp_async_wait_all();
            __syncthreads();  // V has landed, and all warps have read K
            if (j0 + BN < keys) load_k(k_tile, j0 + BN);
        }
        if (seen) mma_AB<T, D>(o, s, v_tile);
        cp_async_wait_all();
        __syncthreads();
    }

    softmax.finish(o, [&](int m, int half, float total, float largest) {
        const int i = row0 + m * 16 + half * 8;
        if (a.lse && lane % 4 == 0 && i < seq.qlen)
            a.lse[task.head * a.lse_stride + seq.q0 + i] = total == 0 ? -INF : a.scale * largest + logf(total);
    });
    store_tile<T, D>(a.out.at(seq.q0 + i0 + warp_row, task.head), a.out.token_stride, seq.qlen - i0 - warp_row, a.HS,
                     a.aligned, q_tile + warp_row * PITCH<T, D>, o);
}

}  // namespace

template <typename T>
void tiled_attention_forward(const char* op, Attention<T> a, const AttentionSequences& sequences, Stream stream) {
    dispatch_head_size<T>(a.HS, [&](auto D) {
        using Sizes = ForwardSizes<T, D>;
        a.tiles = tiles_of(sequences.max_q, Sizes::BM);
        launch_tiles(op, forward_kernel<T, D>, a, a.Nq, Sizes::BM, 1, a.NH, Sizes::WARPS, Sizes::BYTES, stream);
    });
}

template void tiled_attention_forward(const char*, Attention<float>, const AttentionSequences&, Stream);
template void tiled_attention_forward(const char*, Attention<bf16>, const AttentionSequences&, Stream);
template void tiled_attention_forward(const char*, Attention<fp16>, const AttentionSequences&, Stream);
