// Attention on Hopper GPUs, backward in a single pass over keys: dK, dV and, added up in fp32 in global memory, dQ.
// Five matmuls instead of the seven of attention_backward_hopper.cu, but not deterministic: the additions to a row of
// dQ arrive in any order. For heads of 65 to 128 columns, or more than 2048 keys.
//
// A persistent, warp-specialised kernel (hopper_tasks.cuh). A block owns 128 keys, a consumer warpgroup 64 of them. The
// warpgroups exchange dSᵀ through shared memory; each then computes half of the columns of dQ = dS·K of all 128 keys
// and adds them to global memory (cp.reduce.async.bulk).
//
//   D    keys  queries  stages  shared memory  consumers, registers  producer         blocks per SM
//   64   128   64       4       166,912 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//   128  128   64       2       231,424 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//
// The kernel is launched with 168 registers a thread (sm_90a, CUDA 13.0), which setmaxnreg redistributes; at D = 128 it
// has 40 bytes of stack. The kernels for delta and for rounding dQ take 28 to 30 registers and no shared memory.
//
// LLaMA-3 8B with one sequence of 8192 (B=1, NH=32, NKV=8, HS=128) on an H100 SXM: 8192 / 128 = 64 tiles of keys for
// each of (1 + 1)·8 pairs of a sequence and a KV head: 1,024 tasks for 132 blocks of 384 threads. GPT-2 124M (T=1024,
// HS=64) takes two passes. Of the row kernels, delta takes 16 threads for each of the 8192·32 rows, 16,384 blocks of
// 256; rounding dQ takes 8, 8,192 blocks.
#include "kernels/attention/hopper_backward_keys.cuh"
#include "kernels/cuda/launch_shapes.h"

namespace hopper {
namespace {

// Rows of the fp32 sums of dQ, [heads, 2, tokens, D / 2]: half of a head's columns at a time. The 16-byte vectors of a
// row are permuted: vector 4j + t holds columns 16j + 2t, + 1, + 8 and + 9, the accumulators of one thread, and rows of
// odd tokens swap j with j ^ 1. So warps write their image in shared memory without bank conflicts.
template <int D>
struct GradientRows {
    static constexpr int COLUMNS = D / 2;
    static __host__ __device__ __forceinline__ int64_t row(int64_t Nq, int64_t head, int half, int64_t token) {
        return ((head * 2 + half) * Nq + token) * COLUMNS;
    }
    static __device__ __forceinline__ int first_vector(int64_t token, int j) { return 4 * (j ^ int(token % 2)); }
};

template <int D>
struct SinglePassExtra {
    // dSᵀ of this step and of the previous one, which the other warpgroup may still read.
    alignas(SWIZZLE_ALIGNMENT) unsigned char ds[2][KEY_PASS_BN * KEY_PASS_BQ * 2];
    float4 dq[KEY_PASS_WARPGROUPS][WARPGROUP / WARP][16 * GradientRows<D>::COLUMNS / 4];  // image of each warp's rows
};
template <int D>
using SinglePassSizes = KeySizes<D, D <= 64 ? 4 : 2, SinglePassExtra<D>>;

// Adds the first `rows` of the warp's 16 rows of dQ, of the tokens from `token` on, to those at `to`.
template <int D, int NT>
__device__ __forceinline__ void add_rows(float* to, int64_t token, int rows, float4* image, const float (&c)[NT][4]) {
    const int lane = lane_id();
    if (lane == 0) tma_store_wait();
    __syncwarp();  // the image may now be written
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < NT / 2; j++)
            image[(lane / 4 + half * 8) * (NT * 2) + GradientRows<D>::first_vector(token + lane / 4, j) + lane % 4] = {
                c[2 * j][2 * half], c[2 * j][2 * half + 1], c[2 * j + 1][2 * half], c[2 * j + 1][2 * half + 1]};
    fence_async_proxy();
    __syncwarp();
    if (lane > 0 || rows <= 0) return;
    bulk_reduce_add(to, image, min(rows, 16) * NT * 32);
    tma_store_commit();
}

template <typename T, int D>
__device__ __forceinline__ void single_pass_consume(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                    typename SinglePassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = SinglePassSizes<D>;
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ, WARPGROUPS = Sizes::WARPGROUPS, COLUMNS = GradientRows<D>::COLUMNS;
    constexpr int GRADIENTS_READY = 1;  // a named barrier
    const int lane = lane_id(), warp_row = uniform(threadIdx.x % WARPGROUP / WARP * 16), group = int(a.NH / a.NKV);
    float4* image = shared.extra.dq[warpgroup][warp_row / 16];
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    int buffer = 0;  // of dSᵀ
    TaskConsumer tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        const int tile = task.rank;
        if (task.sequence == a.S) {
            zero_key_tail(a, task.head, tile * WARPGROUPS + warpgroup, task.tiles * WARPGROUPS);
            continue;
        }
        const Sequence& seq = task.seq;
        const int j0 = tile * BN, r0 = j0 + warpgroup * 64;
        if (j0 >= seq.klen) continue;
        const BlockRange<BQ> blocks(queries_seeing(seq, j0, min(j0 + BN, seq.klen)));
        const int row = r0 + warp_row + lane / 4;

        float s[BQ / 8][4], dp[BQ / 8][4], dq[COLUMNS / 8][4], dk[D / 8][4], dv[D / 8][4];
        uint32_t p[BQ / 16][4], ds[BQ / 16][4];
        const float c = a.scale * LOG2E;
        set_zero(dk);
        set_zero(dv);
        if (blocks.end > blocks.begin) {
            shared.kv_ring.wait_full(kv_at);
            const uint32_t keys = shared_address(shared.k), k = keys + warpgroup * 64 * PANEL_ROW_BYTES,
                           v = shared_address(shared.v) + warpgroup * 64 * PANEL_ROW_BYTES;
            // dSᵀ·Q of the previous step, which reads stage last_at, runs beside this step's scores.
            RingPosition<Sizes::STAGES> last_at;
            bool running = false;
            const auto finish_last = [&] {
                pin_registers(dk);
                if (running) shared.q_ring.release(last_at);
            };
            for_queries(task.head * group, group, blocks, [&](int head, int m) {
                shared.q_ring.wait_full(at);
                const uint32_t q = shared_address(shared.q[at.stage]), dout = shared_address(shared.dout[at.stage]);
                wgmma_ABt<T, BN, D>(s, k, q);
                if constexpr (Sizes::OVERLAP) {
                    wgmma_wait<1>();
                    finish_last();
                }
                wgmma_ABt<T, BN, D>(dp, v, dout);
                wgmma_wait<1>();
                pin_registers(s);
                scores_to_probabilities(s, shared.lse[at.stage], c);
                mask_queries(s, seq, r0, row, m * BQ, 0);
                if (r0 + 64 > seq.klen)
                    for_each(s, row, 0, [&](float& x, int key, int) { x = key < seq.klen ? x : 0; });
                round_to_A<T>(p, s);
                wgmma_AB<T>(dv, p, dout);
                wgmma_wait<1>();
                pin_registers(dp);
                probability_to_score_gradients(dp, s, shared.delta[at.stage]);
                round_to_A<T>(ds, dp);
                store_rounded<BN>(shared.extra.ds[buffer], warpgroup * 64 + warp_row, ds);
                fence_async_proxy();
                named_barrier_sync(GRADIENTS_READY, WARPGROUPS * WARPGROUP);
                wgmma_AtB<T, BN>(dq, shared_address(shared.extra.ds[buffer]), keys, warpgroup * COLUMNS);
                wgmma_AB<T>(dk, ds, q);
                wgmma_wait<1>();
                pin_registers(dv);
                pin_registers(dq);
                const int first = m * BQ + warp_row;
                const int64_t token = seq.q0 + first;
                add_rows<D>(a.dq_sums + GradientRows<D>::row(a.Nq, head, warpgroup, token), token, seq.qlen - first,
                            image, dq);
                buffer ^= 1;
                if constexpr (Sizes::OVERLAP) {
                    last_at = at;
                    running = true;
                } else {
                    wgmma_wait<0>();
                    pin_registers(dk);
                    shared.q_ring.release(at);
                }
                at.advance();
            });
            wgmma_wait<0>();
            finish_last();
            shared.kv_ring.release_and_advance(kv_at);
        }
        store_key_gradients<BN>(a, maps, task, r0 + warp_row, shared, warpgroup * 64 + warp_row, dk, dv);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(SinglePassSizes<D>::Roles::THREADS, 1)
    single_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                              const __grid_constant__ Schedule schedule) {
    using Sizes = SinglePassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { key_pass_produce<T, D, Sizes>(a, maps, schedule, shared); },
                      [&](int warpgroup) { single_pass_consume<T, D>(a, maps, schedule, shared, warpgroup); });
}

constexpr int ROW_KERNEL_THREADS = 256;

// delta = Σ dout·out of all queries; D / 8 lanes of a warp take one query and head.
template <typename T, int D>
__global__ void __launch_bounds__(ROW_KERNEL_THREADS) delta_hopper_kernel(const __grid_constant__ Attention<T> a) {
    constexpr int LANES = D / 8;
    const int column = threadIdx.x % LANES * 8;
    const int64_t i = (blockIdx.x * int64_t(ROW_KERNEL_THREADS) + threadIdx.x) / LANES;
    const auto [token, head] = row_item(min(i, a.Nq * a.NH - 1), a.NH);
    float sum = 0;
    if (column < a.HS) {
        const Floats<8> x = load_floats<8>(a.out.at(token, head) + column);
        const Floats<8> g = load_floats<8>(a.dout.at(token, head) + column);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(g[e], x[e], sum);
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    if (column == 0 && i < a.Nq * a.NH) a.delta[head * a.Nq + token] = sum;
}

// dq = scale · its sums, rounded; a thread takes 16 columns of a row.
template <typename T, int D>
__global__ void __launch_bounds__(ROW_KERNEL_THREADS) round_dq_hopper_kernel(const __grid_constant__ Attention<T> a) {
    constexpr int PARTS = D / 16, COLUMNS = GradientRows<D>::COLUMNS;
    const int column = threadIdx.x % PARTS * 16, half = column / COLUMNS;
    const int64_t i = (blockIdx.x * int64_t(ROW_KERNEL_THREADS) + threadIdx.x) / PARTS;
    if (i >= a.Nq * a.NH || column >= a.HS) return;
    const auto [token, head] = row_item(i, a.NH);
    const float* row = a.dq_sums + GradientRows<D>::row(a.Nq, head, half, token);
    const float4* vectors =
        reinterpret_cast<const float4*>(row) + GradientRows<D>::first_vector(token, column % COLUMNS / 16);
    Floats<8> low, high;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const float4 x = vectors[t];
        low[2 * t] = x.x * a.scale;
        low[2 * t + 1] = x.y * a.scale;
        high[2 * t] = x.z * a.scale;
        high[2 * t + 1] = x.w * a.scale;
    }
    T* to = a.dq.at(token, head) + column;
    store_floats(to, low);
    if (column + 8 < a.HS) store_floats(to + 8, high);
}

// lanes: threads for each row of a head.
template <typename T>
void launch_row_kernel(const char* op, void (*kernel)(Attention<T>), const Attention<T>& a, int lanes, Stream stream) {
    if (a.Nq == 0) return;
    const int64_t blocks = ceil_div(a.Nq * a.NH * lanes, ROW_KERNEL_THREADS);
    require(blocks < int64_t(1) << 31, op, ": ", a.Nq, " tokens of ", a.NH, " heads are more than one launch can hold");
    kernel<<<unsigned(blocks), ROW_KERNEL_THREADS, 0, cuda_stream(stream)>>>(a);
    check_launch(op, stream);
}

}  // namespace

template <typename T>
void backward_single_pass(const char* op, const Attention<T>& a, const AttentionSequences& sequences, Stream stream) {
    dispatch_head_size(a.HS, [&](auto D) {
        using Sizes = SinglePassSizes<D>;
        cuda_check(cudaMemsetAsync(a.dq_sums, 0, size_t(a.Nq * a.NH * D) * sizeof(float), cuda_stream(stream)), op);
        launch_row_kernel(op, delta_hopper_kernel<T, D>, a, D / 8, stream);
        if (a.Nk > 0)
            launch_persistent<Sizes>(op, single_pass_hopper_kernel<T, D>, a, backward_maps(op, a, Sizes::BQ, Sizes::BN),
                                     key_schedule(a, sequences, D, Sizes::BN, 8), stream);
        launch_row_kernel(op, round_dq_hopper_kernel<T, D>, a, D / 16, stream);
    });
}

template void backward_single_pass(const char*, const Attention<bf16>&, const AttentionSequences&, Stream);
template void backward_single_pass(const char*, const Attention<fp16>&, const AttentionSequences&, Stream);

}  // namespace hopper

int64_t hopper_attention_sums(int64_t Nq, int64_t NH, int64_t HS, int64_t max_k) {
    static_assert(gpu_scratch::HOPPER_ATTENTION_MAX_HS == hopper::MAX_HS);
    return is_hopper() ? gpu_scratch::hopper_dq_sums(Nq, NH, HS, max_k) : 0;
}
