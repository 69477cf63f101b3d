// Attention on Hopper GPUs, forward: bf16 and fp16, heads of up to 128 columns (a multiple of 8).
//
// A persistent, warp-specialised kernel (hopper_tasks.cuh). A consumer warpgroup owns 64 queries and walks over the
// keys that they see with an online softmax. The softmax of one warpgroup overlaps with the matmuls of another, and
// Q·Kᵀ of the next keys runs beside P·V of the current ones, across tasks too (FlashAttention-3, Shah et al. 2024,
// section 3).
//
//   D    queries  keys  stages q, k, v  shared memory  consumers, registers  producer         blocks per SM
//   64   192      128   2, 3, 3         173,056 bytes  3 warpgroups, 160     1 warpgroup, 32  1
//   128  128      128   2, 2, 2         230,400 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//
// The kernel is launched with 128 (D = 64) or 168 (D = 128) registers a thread (sm_90a, CUDA 13.0), which setmaxnreg
// redistributes, and has 8 (D = 64) or 16 bytes of stack.
//
// Its speed is limited by tensor cores, exponentials and issue slots alike at D = 64, by tensor cores at D = 128. K and
// V come from L2 (docs/understand/attention.md has the arithmetic).
//
// GPT-2 124M (B=64, T=1024, NH=12, HS=64) on an H100 SXM: ceil(1024 / 192) = 6 tiles of queries for each of (64 + 1)·12
// pairs of a sequence and a head (the last 12 for the tokens after the last sequence): 4,680 tasks for 132 blocks of
// 512 threads.
#include "kernels/attention/hopper_tiles.cuh"

namespace hopper {
namespace {

template <int D>
struct ForwardSizes {
    static constexpr int WARPGROUPS = D <= 64 ? 3 : 2, BM = WARPGROUPS * 64, BN = 128;
    static constexpr int STAGES = D <= 64 ? 3 : 2;
    using Roles = hopper::Roles<WARPGROUPS>;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[2][BM * D * 2], out[BM * D * 2];  // q: of this task and the next
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[STAGES][BN * D * 2], v[STAGES][BN * D * 2];
        MbarrierRing<2> q_ring;
        MbarrierRing<STAGES> k_ring, v_ring;
        TaskRing tasks;
        Mbarrier loader;
        __device__ void init() {
            q_ring.init(Roles::CONSUMER_WARPS);
            k_ring.init(Roles::CONSUMER_WARPS);
            v_ring.init(Roles::CONSUMER_WARPS);
            tasks.ring.init(Roles::CONSUMER_WARPS);
            mbarrier_init(&loader, 1);
        }
    };
};

template <typename T, int D, bool PAGED>
__device__ __forceinline__ void forward_produce(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename ForwardSizes<D>::Shared& shared) {
    using Sizes = ForwardSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN;
    TileLoader loader(&shared.loader);
    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> at;  // k's and v's
    TaskProducer<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM);
        const BlockRange<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const int kv_head = task.head / int(a.NH / a.NKV);
        static_assert(BN == KV_PAGE);
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            int first_row = seq.k0 + n * BN;
            if constexpr (PAGED) first_row = int(pages_of(a, task.sequence).row(n * BN));
            shared.k_ring.wait_empty(at);
            loader.load<BN, D, 1>({shared.k[at.stage]}, {&maps.k}, kv_head, first_row, &shared.k_ring.full[at.stage]);
            if (n == blocks.end - 1) {
                shared.q_ring.wait_empty(q_at);
                loader.load<BM, D, 1>({shared.q[q_at.stage]}, {&maps.q}, task.head, seq.q0 + i0,
                                      &shared.q_ring.full[q_at.stage]);
                q_at.advance();
            }
            shared.v_ring.wait_empty(at);
            loader.load<BN, D, 1>({shared.v[at.stage]}, {&maps.v}, kv_head, first_row, &shared.v_ring.full[at.stage],
                                  seq.klen - n * BN);
            at.advance();
        }
    }
}

// Online softmax of two rows of scores of each thread. With c = scale·log₂e, P = 2^(c·S − c·base). The base is the
// largest S so far, but it moves only if the maximum exceeds it by 8 powers of two (FlashAttention-4's lazy rescaling):
// until then P stays below 256, as exact as below 1, and o needs no rescaling. `sum` holds this thread's columns only.
struct OnlineSoftmax {
    static constexpr float SLACK = 8;
    float c, base[2] = {-INF, -INF}, sum[2] = {0, 0};

    // s becomes P. Returns whether any row of this warp moved its base: the caller then multiplies o's rows by factor.
    template <int NT>
    __device__ __forceinline__ bool step(float (&s)[NT][4], float (&factor)[2]) {
        float most[4], next[2];  // four independent chains of maxima, so that their latencies overlap
#pragma unroll
        for (int e = 0; e < 4; e++) most[e] = s[0][e];
#pragma unroll
        for (int n = 1; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) most[e] = fmaxf(most[e], s[n][e]);
        next[0] = fmaxf(most[0], most[1]);
        next[1] = fmaxf(most[2], most[3]);
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            const float other[2] = {__shfl_xor_sync(ALL_LANES, next[0], lanes),
                                    __shfl_xor_sync(ALL_LANES, next[1], lanes)};
            next[0] = fmaxf(next[0], other[0]);
            next[1] = fmaxf(next[1], other[1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (!((next[half] - base[half]) * c > SLACK)) next[half] = base[half];
        const bool moved = __any_sync(ALL_LANES, next[0] != base[0] || next[1] != base[1]);
        if (moved) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                factor[half] = next[half] == base[half] ? 1.0f : exp2_fast((base[half] - next[half]) * c);
                base[half] = next[half];
                sum[half] *= factor[half];
            }
        }
        // −∞ − −∞ would be NaN in a row that has seen no key yet.
        const float shift[2] = {base[0] == -INF ? 0.0f : base[0] * c, base[1] == -INF ? 0.0f : base[1] * c};
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exp2_fast(fmaf(s[n][e], c, -shift[e / 2]));
                sum[e / 2] += s[n][e];
            }
        return moved;
    }
};

// The rows of a task that a warp has computed but not stored. Their last P·V is issued together with the first scores
// of the next task; until then it is pending and occupies a stage of V. Two stages suffice, because a warpgroup skips
// at most one block of values that another warpgroup of the same task reads.
struct ForwardRows {
    bool exists = false, pending = false;
    int unseen = 0;         // blocks of values before its last that this warpgroup does not see
    int row = 0, head = 0;  // row: this warp's first query, of the sequence that starts at `token`
    int token = 0;
};

// Divides o by the sums of P; stores out and lse.
template <typename T, int D>
__device__ __forceinline__ void store_forward(const Attention<T>& a, const Maps& maps, const ForwardRows& rows,
                                              const OnlineSoftmax& softmax, float (&o)[D / 8][4], unsigned char* tile,
                                              int tile_row) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float total = row_sum(softmax.sum[half]), factor = total == 0 ? 0.0f : __frcp_rn(total);
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
            o[t][2 * half] *= factor;
            o[t][2 * half + 1] *= factor;
        }
        const int i = rows.row + lane / 4 + half * 8;
        if (a.lse && lane % 4 == 0 && i >= 0)
            a.lse[rows.head * a.lse_stride + rows.token + i] =
                total == 0 ? -INF : a.scale * softmax.base[half] + logf(total);
    }
    store_rows<ForwardSizes<D>::BM>(
        OutputRows<T>{&maps.out, a.out.at(rows.token + rows.row, rows.head), a.out.token_stride, rows.head,
                      rows.token + rows.row, -rows.row, 16, a.HS},
        tile, tile_row, o);
}

// Tokens after the last sequence get out = 0 and lse = −∞: one part of `parts`, by a warpgroup.
template <typename T>
__device__ __forceinline__ void zero_forward_tail(const Attention<T>& a, int head, int part, int parts) {
    const int64_t first = max(0, a.cum_q[a.S]);
    zero_tail(a.out, head, first, a.Nq, a.HS, part, parts, WARPGROUP);
    for (int64_t i = first + part * WARPGROUP + threadIdx.x % WARPGROUP; a.lse && i < a.Nq; i += parts * WARPGROUP)
        a.lse[head * a.lse_stride + i] = -INF;
}

template <typename T, int D>
__device__ __forceinline__ void forward_consume(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename ForwardSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = ForwardSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN, WARPGROUPS = Sizes::WARPGROUPS;
    const int lane = lane_id(), warp_row = uniform(threadIdx.x % WARPGROUP / WARP * 16);
    // Warpgroups issue their matmuls one after the other: the softmax of one then overlaps with the matmuls of the
    // next.
    const int barrier = 1 + warpgroup, next_barrier = 1 + (warpgroup + 1) % WARPGROUPS;
    const auto issue_wait = [&] { named_barrier_sync(barrier, 2 * WARPGROUP); };
    const auto issue_done = [&] { named_barrier_arrive(next_barrier, 2 * WARPGROUP); };
    if (warpgroup == WARPGROUPS - 1) issue_done();

    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> k_at, v_at;
    const auto skip_keys = [&](int blocks) {
#pragma unroll 1
        for (; blocks > 0; blocks--) {
            shared.k_ring.skip(k_at);
            issue_wait();
            issue_done();
        }
    };
    const auto skip_values = [&](int blocks) {
#pragma unroll 1
        for (; blocks > 0; blocks--) {
            shared.v_ring.skip(v_at);
        }
    };

    float s[BN / 8][4], o[D / 8][4], factor[2];
    uint32_t p[BN / 16][4];
    OnlineSoftmax softmax{a.scale * LOG2E};
    ForwardRows last;
    const auto issue_QK = [&] {
        const uint32_t q = shared_address(shared.q[q_at.stage]) + warpgroup * 64 * PANEL_ROW_BYTES;
        shared.k_ring.wait_full(k_at);
        wgmma_ABt<T, BM, D>(s, q, shared_address(shared.k[k_at.stage]));
    };
    const auto issue_PV = [&] {
        shared.v_ring.wait_full(v_at);
        wgmma_AB<T>(o, p, shared_address(shared.v[v_at.stage]));
    };
    const auto release_keys = [&] {
        pin_registers(s);
        shared.k_ring.release_and_advance(k_at);
    };
    const auto release_values = [&] {
        pin_registers(o);
        shared.v_ring.release_and_advance(v_at);
    };

    TaskConsumer tasks(shared.tasks);
    for (bool more = true; more;) {
        Task task;
        more = tasks.next(task);
        const bool tail = more && task.sequence == a.S;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM), r0 = i0 + warpgroup * 64;
        const bool exists = more && !tail && i0 + BM > 0;
        const BlockRange<BN> blocks(exists ? keys_seen(seq, i0, i0 + BM) : RowRange{});
        const BlockRange<BN> mine(exists ? keys_seen(seq, r0, r0 + 64) : RowRange{});
        const bool any = !blocks.empty(), sees = !mine.empty();

        if (last.pending && (!sees || last.unseen > 0)) {
            issue_PV();
            wgmma_wait<0>();
            release_values();
            last.pending = false;
        }
        if (any) shared.q_ring.wait_full(q_at);
        const int unseen = sees ? blocks.end - mine.end : 0;
        skip_keys(unseen);
        if (sees) {
            issue_wait();
            issue_QK();
            if (last.pending) {
                issue_PV();
                issue_done();
                wgmma_wait<0>();
                release_values();
            } else {
                issue_done();
                wgmma_wait<0>();
            }
            release_keys();
        }
        if (last.exists) {
            skip_values(last.unseen);
            store_forward<T, D>(a, maps, last, softmax, o, shared.out, warpgroup * 64 + warp_row);
        }
        if (tail) zero_forward_tail(a, task.head, task.rank * WARPGROUPS + warpgroup, task.tiles * WARPGROUPS);

        set_zero(o);
        softmax = {a.scale * LOG2E};
        last = {exists, sees, sees ? mine.begin - blocks.begin : 0, r0 + warp_row, task.head, int(seq.q0)};
        skip_values(unseen);
        if (sees) {
            const auto scores_to_probabilities = [&](int n) {
                mask_keys(s, seq, r0, r0 + warp_row + lane / 4, n * BN, -INF);
                return softmax.step(s, factor);
            };
            int n = mine.end - 1;
            scores_to_probabilities(n);
            round_to_A<T>(p, s);
            for (; n > mine.begin; n--) {
                issue_wait();
                issue_QK();
                issue_PV();
                issue_done();
                wgmma_wait<1>();
                release_keys();
                const bool moved = scores_to_probabilities(n - 1);
                wgmma_wait<0>();
                release_values();
                if (moved) scale_rows(o, factor);
                round_to_A<T>(p, s);
            }
        } else {
#pragma unroll 1
            for (int n = blocks.begin; n < blocks.end; n++) {
                skip_keys(1);
                skip_values(1);
            }
        }
        if (any) shared.q_ring.release_and_advance(q_at);
        skip_keys(last.unseen);
    }
}

// PAGED: the keys are in pages. An instance of its own, because the producer warp has no registers to spare.
template <typename T, int D, bool PAGED>
__global__ void __launch_bounds__(ForwardSizes<D>::Roles::THREADS, 1)
    forward_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                          const __grid_constant__ Schedule schedule) {
    using Sizes = ForwardSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { forward_produce<T, D, PAGED>(a, maps, schedule, shared); },
                      [&](int warpgroup) { forward_consume<T, D>(a, maps, schedule, shared, warpgroup); });
}

}  // namespace
}  // namespace hopper

template <typename T>
bool hopper_attention_takes(const Attention<T>& a) {
    return is_hopper() && a.aligned && a.HS <= hopper::MAX_HS;
}

template <typename T>
void hopper_attention_forward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                              Stream stream) {
    hopper::dispatch_head_size(a.HS, [&](auto D) {
        using Sizes = hopper::ForwardSizes<D>;
        hopper::Maps maps{};
        maps.q = make_tensor_map(op, a.q, a.Nq, a.NH, a.HS, Sizes::BM);
        const int64_t key_rows = a.pages ? a.num_pages * KV_PAGE : a.Nk;
        maps.k = make_tensor_map(op, a.k, key_rows, a.NKV, a.HS, Sizes::BN);
        maps.v = make_tensor_map(op, a.v, key_rows, a.NKV, a.HS, Sizes::BN);
        maps.out = make_tensor_map(op, a.out, a.Nq, a.NH, a.HS, 16);
        const hopper::Tiled queries{a.cum_q, a.Nq, Sizes::BM};
        const hopper::Schedule schedule =
            hopper::make_schedule(a.S, a.NH, tiles_of(sequences.max_q, Sizes::BM),
                                  sequences.max_k * D * 4 * a.NKV / a.NH, a.next_task, queries);
        const auto kernel =
            a.pages ? hopper::forward_hopper_kernel<T, D, true> : hopper::forward_hopper_kernel<T, D, false>;
        hopper::launch_persistent<Sizes>(op, kernel, a, maps, schedule, stream);
    });
}

#define INSTANTIATE(T)                                         \
    template bool hopper_attention_takes(const Attention<T>&); \
    template void hopper_attention_forward(const char*, const Attention<T>&, const AttentionSequences&, Stream);
INSTANTIATE(bf16)
INSTANTIATE(fp16)
#undef INSTANTIATE
