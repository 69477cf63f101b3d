// Attention on Hopper GPUs, backward: bf16 and fp16, heads of up to 128 columns (a multiple of 8).
//
// Two persistent, warp-specialised kernels (hopper_tasks.cuh), as on older GPUs (tiled_attention.cuh): one over queries
// (delta and dQ), one over keys (dK and dV). Nothing is added across blocks, so that the results are deterministic
// without atomics or an fp32 copy of dQ, for seven matmuls instead of five. The key pass computes Sᵀ, so that P, Pᵀ, dS
// and dSᵀ all stay in registers. If the caller does not ask for determinism, a single pass over keys with five matmuls
// may take over (attention_single_pass_hopper.cu). At D = 64 the three idle warps of the producer's warpgroup add up
// the stored gradients over tokens, where the caller wants these sums.
//
//   pass     D    own rows  inner rows  stages  shared memory  consumers, registers  producer         blocks per SM
//   queries  64   192       64          4       140,288 bytes  3 warpgroups, 160     1 warpgroup, 32  1
//   queries  128  128       64          3       197,632 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//   keys     64   128       64          4       134,144 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//   keys     128  128       64          3       198,656 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//
// Tensor cores are the bound. At D = 64 an inner tile of the query pass has 3 matmuls of 2·192·64·64 FLOP, 1,152 cycles
// at 4,096 FLOP a cycle and SM, and 192·64 exponentials, 768 at 16 a cycle; one of the key pass 4 of 2·128·64·64,
// 1,024, and 512. At D = 128 the matmuls double.
//
// The kernels are launched with 128 (queries, D = 64) or 168 registers a thread (sm_90a, CUDA 13.0), which setmaxnreg
// redistributes. At D = 128 the query pass has 8 bytes of stack, the key pass 24.
//
// GPT-2 124M (B=64, T=1024, NH=12, HS=64) on an H100 SXM: (64 + 1)·12 = 780 pairs of a sequence and a head. The query
// pass has ceil(1024 / 192) = 6 tiles for each, 4,680 tasks; the key pass has 1024 / 128 = 8, 6,240 tasks; 132 blocks
// of 512 and 384 threads.
#include "kernels/attention/hopper_backward_keys.cuh"

namespace hopper {
namespace {

// --- the pass over queries: delta and dQ

template <int D>
struct QueryPassSizes {
    static constexpr int BM = int(gpu_scratch::hopper_query_rows(D)), WARPGROUPS = BM / 64, BN = 64;
    static constexpr int STAGES = D <= 64 ? 4 : 3;
    using Roles = hopper::Roles<WARPGROUPS>;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[BM * D * 2], dout[BM * D * 2], dq[BM * D * 2];
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[STAGES][BN * D * 2], v[STAGES][BN * D * 2];
        MbarrierRing<1> q_ring;
        MbarrierRing<STAGES> kv_ring;
        MbarrierRing<1> summed;
        TaskRing tasks;
        Mbarrier loader;
        __device__ void init() {
            q_ring.init(Roles::CONSUMER_WARPS);
            kv_ring.init(Roles::CONSUMER_WARPS);
            summed.init(SUMMING_WARPS, Roles::CONSUMER_WARPS);
            tasks.ring.init(Roles::CONSUMER_WARPS + (SUMS<D> ? SUMMING_WARPS : 0));
            mbarrier_init(&loader, 1);
        }
    };
};

template <typename T, int D>
__device__ __forceinline__ void query_pass_produce(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                   typename QueryPassSizes<D>::Shared& shared) {
    using Sizes = QueryPassSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN;
    TileLoader loader(&shared.loader);
    RingPosition<1> q_at;
    RingPosition<Sizes::STAGES> at;
    TaskProducer<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM);
        const BlockRange<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const int kv_head = task.head / int(a.NH / a.NKV);
        for (int n = blocks.begin; n < blocks.end; n++) {
            if (n == blocks.begin) {
                shared.q_ring.wait_empty(q_at);
                loader.load<BM, D, 2>({shared.q, shared.dout}, {&maps.q, &maps.dout}, task.head, seq.q0 + i0,
                                      shared.q_ring.full);
                q_at.advance();
            }
            shared.kv_ring.wait_empty(at);
            loader.load<BN, D, 2>({shared.k[at.stage], shared.v[at.stage]}, {&maps.k, &maps.v}, kv_head,
                                  seq.k0 + n * BN, &shared.kv_ring.full[at.stage], seq.klen - n * BN);
            at.advance();
        }
    }
}

// lse, in units of ln 2, and delta = Σ dout·out of the thread's two rows. Stores delta for the pass over keys.
template <typename T>
__device__ __forceinline__ void row_statistics(const Attention<T>& a, const Sequence& seq, int head, int row,
                                               float (&lse)[2], float (&delta)[2]) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + half * 8;
        const bool exists = i >= 0;
        const int64_t token = seq.q0 + (exists ? i : 0);
        lse[half] = exists ? a.lse[head * a.lse_stride + token] * LOG2E : 0.0f;
        float sum = 0;
        for (int col = lane % 4 * 8; exists && col < a.HS; col += 32) {
            const Floats<8> x = load_floats<8>(a.out.at(token, head) + col);
            const Floats<8> g = load_floats<8>(a.dout.at(token, head) + col);
#pragma unroll
            for (int e = 0; e < 8; e++) sum = fmaf(g[e], x[e], sum);
        }
        delta[half] = row_sum(sum);
        if (exists && lane % 4 == 0) a.delta[head * a.Nq + token] = delta[half];
    }
}

template <typename T, int D>
__device__ __forceinline__ void query_pass_consume(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                   typename QueryPassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = QueryPassSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN, WARPGROUPS = Sizes::WARPGROUPS;
    const int lane = lane_id(), warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    RingPosition<1> q_at;
    RingPosition<Sizes::STAGES> at;
    TaskConsumer tasks(shared.tasks);
    SummedTile summed(shared.summed, SUMS<D> ? a.dq_row_sums : nullptr);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) {
            zero_tail(a.dq, task.head, max(0, a.cum_q[a.S]), a.Nq, a.HS, task.rank * WARPGROUPS + warpgroup,
                      task.tiles * WARPGROUPS, WARPGROUP);
            continue;
        }
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM), r0 = i0 + warpgroup * 64;
        if (i0 + BM <= 0) continue;
        const BlockRange<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const BlockRange<BN> mine(keys_seen(seq, r0, r0 + 64));
        const int row = r0 + warp_row + lane / 4;

        float lse[2], delta[2];
        row_statistics(a, seq, task.head, row, lse, delta);

        float s[BN / 8][4], dp[BN / 8][4], dq[D / 8][4];
        uint32_t ds[BN / 16][4];
        const float c = a.scale * LOG2E;
        set_zero(dq);
        if (blocks.end > blocks.begin) {
            shared.q_ring.wait_full(q_at);
            const uint32_t q = shared_address(shared.q) + warpgroup * 64 * PANEL_ROW_BYTES,
                           dout = shared_address(shared.dout) + warpgroup * 64 * PANEL_ROW_BYTES;
            RingPosition<Sizes::STAGES> unreleased;
            bool running = false;  // wgmmas that read stage `unreleased`
            const auto finish = [&] {
                wgmma_wait<0>();
                pin_registers(dq);
                if (running) shared.kv_ring.release(unreleased);
                running = false;
            };
            for (int n = blocks.begin; n < blocks.end; n++, at.advance()) {
                shared.kv_ring.wait_full(at);
                if (!mine.contains(n)) {
                    finish();
                    shared.kv_ring.release(at);
                    continue;
                }
                const uint32_t k = shared_address(shared.k[at.stage]), v = shared_address(shared.v[at.stage]);
                wgmma_ABt<T, BM, D>(s, q, k);
                wgmma_ABt<T, BM, D>(dp, dout, v);
                wgmma_wait<1>();
                pin_registers(s);
                pin_registers(dq);
                if (running) shared.kv_ring.release(unreleased);
#pragma unroll
                for (int t = 0; t < BN / 8; t++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[t][e] = exp2_fast(fmaf(s[t][e], c, -lse[e / 2]));
                mask_keys(s, seq, r0, row, n * BN, 0);
                pin_registers(s);
                wgmma_wait<0>();
                pin_registers(dp);
#pragma unroll
                for (int t = 0; t < BN / 8; t++)
#pragma unroll
                    for (int e = 0; e < 4; e++) dp[t][e] = s[t][e] * (dp[t][e] - delta[e / 2]);
                round_to_A<T>(ds, dp);
                wgmma_AB<T>(dq, ds, k);
                unreleased = at;
                running = true;
            }
            finish();
            shared.q_ring.release_and_advance(q_at);
        }
        scale_all(dq, a.scale);
        const int first = r0 + warp_row;
        summed.wait();
        store_rows<BM>(OutputRows<T>{&maps.dq, a.dq.at(seq.q0 + first, task.head), a.dq.token_stride, task.head,
                                     seq.q0 + first, -first, 16, a.HS},
                       shared.dq, warpgroup * 64 + warp_row, dq);
        summed.done();
    }
}

template <typename T, int D>
__device__ __forceinline__ void query_pass_sum(const Attention<T>& a, typename QueryPassSizes<D>::Shared& shared,
                                               int warp) {
    constexpr int BM = QueryPassSizes<D>::BM;
    RingPosition<1> at;
    TaskConsumer tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S || !a.dq_row_sums) continue;
        const int i0 = first_query(task.seq, task.rank, BM);
        const bool exists = i0 + BM > 0;
        if (exists) shared.summed.wait_full(at);
        sum_rows<BM, T>(a.dq_row_sums + (sum_row(task, warp) * a.NH + task.head) * a.HS, a.HS, shared.dq, max(0, -i0),
                        BM, warp);
        if (exists) shared.summed.release_and_advance(at);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(QueryPassSizes<D>::Roles::THREADS, 1)
    query_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                             const __grid_constant__ Schedule schedule) {
    using Sizes = QueryPassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    const auto produce = [&] { query_pass_produce<T, D>(a, maps, schedule, shared); };
    const auto consume = [&](int warpgroup) { query_pass_consume<T, D>(a, maps, schedule, shared, warpgroup); };
    if constexpr (SUMS<D>)
        Sizes::Roles::run(produce, consume, [&](int warp) { query_pass_sum<T, D>(a, shared, warp); });
    else
        Sizes::Roles::run(produce, consume);
}

// --- the pass over keys: dK and dV

struct NoExtra {};
template <int D>
using KeyPassSizes = KeySizes<D, D <= 64 ? 4 : 3, NoExtra>;

template <typename T, int D>
__device__ __forceinline__ void key_pass_consume(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                 typename KeyPassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = KeyPassSizes<D>;
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ, WARPGROUPS = Sizes::WARPGROUPS;
    const int lane = lane_id(), warp_row = threadIdx.x % WARPGROUP / WARP * 16, group = int(a.NH / a.NKV);
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    TaskConsumer tasks(shared.tasks);
    SummedTile summed(shared.summed, SUMS<D> ? a.dkv_row_sums : nullptr);
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
        const BlockRange<BQ> mine(queries_seeing(seq, r0, min(r0 + 64, seq.klen)));
        const int row = r0 + warp_row + lane / 4;

        float s[BQ / 8][4], dp[BQ / 8][4], dk[D / 8][4], dv[D / 8][4];
        uint32_t p[BQ / 16][4], ds[BQ / 16][4];
        const float c = a.scale * LOG2E;
        set_zero(dk);
        set_zero(dv);
        if (blocks.end > blocks.begin) {
            shared.kv_ring.wait_full(kv_at);
            const uint32_t k = shared_address(shared.k) + warpgroup * 64 * PANEL_ROW_BYTES,
                           v = shared_address(shared.v) + warpgroup * 64 * PANEL_ROW_BYTES;
            RingPosition<Sizes::STAGES> unreleased;
            bool running = false;  // wgmmas that read stage `unreleased`
            const auto finish = [&] {
                wgmma_wait<0>();
                pin_registers(dk);
                pin_registers(dv);
                if (running) shared.q_ring.release(unreleased);
                running = false;
            };
            for_queries(0, group, blocks, [&](int, int m) {
                shared.q_ring.wait_full(at);
                if (!mine.contains(m)) {
                    finish();
                    shared.q_ring.release_and_advance(at);
                    return;
                }
                const uint32_t q = shared_address(shared.q[at.stage]), dout = shared_address(shared.dout[at.stage]);
                wgmma_ABt<T, BN, D>(s, k, q);
                wgmma_ABt<T, BN, D>(dp, v, dout);
                wgmma_wait<1>();
                pin_registers(s);
                pin_registers(dk);
                pin_registers(dv);
                if (running) shared.q_ring.release(unreleased);
                scores_to_probabilities(s, shared.lse[at.stage], c);
                mask_queries(s, seq, r0, row, m * BQ, 0);
                round_to_A<T>(p, s);
                wgmma_AB<T>(dv, p, dout);
                wgmma_wait<1>();
                pin_registers(dp);
                probability_to_score_gradients(dp, s, shared.delta[at.stage]);
                round_to_A<T>(ds, dp);
                wgmma_AB<T>(dk, ds, q);
                if constexpr (Sizes::OVERLAP) {
                    unreleased = at;
                    running = true;
                } else {
                    wgmma_wait<0>();
                    shared.q_ring.release(at);
                }
                at.advance();
            });
            finish();
            shared.kv_ring.release_and_advance(kv_at);
        }
        summed.wait();
        store_key_gradients<BN>(a, maps, task, r0 + warp_row, shared, warpgroup * 64 + warp_row, dk, dv);
        summed.done();
    }
}

template <typename T, int D>
__device__ __forceinline__ void key_pass_sum(const Attention<T>& a, typename KeyPassSizes<D>::Shared& shared,
                                             int warp) {
    constexpr int BN = KeyPassSizes<D>::BN;
    RingPosition<1> at;
    TaskConsumer tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S || !a.dkv_row_sums) continue;
        const int end = min(BN, task.seq.klen - task.rank * BN);
        float* const to = a.dkv_row_sums + (sum_row(task, warp) * 2 * a.NKV + task.head) * a.HS;
        if (end > 0) shared.summed.wait_full(at);
        sum_rows<BN, T>(to, a.HS, shared.dk(), 0, end, warp);
        sum_rows<BN, T>(to + a.NKV * a.HS, a.HS, shared.dv, 0, end, warp);
        if (end > 0) shared.summed.release_and_advance(at);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(KeyPassSizes<D>::Roles::THREADS, 1)
    key_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                           const __grid_constant__ Schedule schedule) {
    using Sizes = KeyPassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    const auto produce = [&] { key_pass_produce<T, D, Sizes>(a, maps, schedule, shared); };
    const auto consume = [&](int warpgroup) { key_pass_consume<T, D>(a, maps, schedule, shared, warpgroup); };
    if constexpr (SUMS<D>)
        Sizes::Roles::run(produce, consume, [&](int warp) { key_pass_sum<T, D>(a, shared, warp); });
    else
        Sizes::Roles::run(produce, consume);
}

template <typename T, int D>
void launch_query_pass(const char* op, const Attention<T>& a, const AttentionSequences& sequences, Stream stream) {
    using Sizes = QueryPassSizes<D>;
    const Tiled queries{a.cum_q, a.Nq, Sizes::BM};
    const Schedule schedule = make_schedule(a.S, a.NH, tiles_of(sequences.max_q, Sizes::BM),
                                            sequences.max_k * D * 4 * a.NKV / a.NH, a.next_task, queries);
    launch_persistent<Sizes>(op, query_pass_hopper_kernel<T, D>, a, backward_maps(op, a, Sizes::BM, Sizes::BN),
                             schedule, stream);
}

template <typename T, int D>
void launch_key_pass(const char* op, const Attention<T>& a, const AttentionSequences& sequences, Stream stream) {
    using Sizes = KeyPassSizes<D>;
    launch_persistent<Sizes>(op, key_pass_hopper_kernel<T, D>, a, backward_maps(op, a, Sizes::BQ, Sizes::BN),
                             key_schedule(a, sequences, D, Sizes::BN, 4), stream);
}

}  // namespace
}  // namespace hopper

template <typename T>
void hopper_attention_backward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                               Stream stream) {
    if (a.dq_sums) return hopper::backward_single_pass(op, a, sequences, stream);
    hopper::dispatch_head_size(a.HS, [&](auto D) {
        if (a.Nq > 0) hopper::launch_query_pass<T, D>(op, a, sequences, stream);
        if (a.Nk > 0) hopper::launch_key_pass<T, D>(op, a, sequences, stream);
    });
}

template void hopper_attention_backward(const char*, const Attention<bf16>&, const AttentionSequences&, Stream);
template void hopper_attention_backward(const char*, const Attention<fp16>&, const AttentionSequences&, Stream);
