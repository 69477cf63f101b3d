// Attention on Hopper GPUs, forward: bf16 and fp16, heads of up to 128 columns (a multiple of 8).
//
// A persistent, warp-specialised kernel (hopper_tasks.cuh). A consumer warpgroup owns 64 queries and walks over the
// keys that they see with an online softmax. The softmax of one warpgroup overlaps with the matmuls of another, and
// Q·Kᵀ of the next keys runs beside P·V of the current ones, across tasks too (FlashAttention-3, Shah et al. 2024,
// section 3).
//
//   D    rows     keys  stages q, k, v  shared memory  consumers, registers  producer         blocks per SM
//   64   192      128   2, 3, 3         173,056 bytes  3 warpgroups, 160     1 warpgroup, 32  1
//   128  128      128   2, 2, 2         230,400 bytes  2 warpgroups, 240     1 warpgroup, 24  1
//   64   grouped  128   2, 2, 2         91,136 bytes   1 warpgroup, 216      1 warpgroup, 40  2
//   128  grouped  128   2, 2, 2         181,248 bytes  1 warpgroup, 216      1 warpgroup, 40  1
//
// The rows of a tile are queries of one head. Where no sequence has more than one query, they are grouped instead: the
// 64 rows are that query's heads that share a KV head, so that its keys and values are read once. Key blocks, their
// order and the arithmetic of a row are the same: a row has the bits that it has in a pass over its whole sequence.
//
// The kernel is launched with 128 or, for 128 queries, 168 registers a thread (sm_90a, CUDA 13.0), which setmaxnreg
// redistributes. With 192 queries it has 8 bytes of stack, else none.
//
// Its speed is limited by tensor cores, exponentials and issue slots alike at D = 64, by tensor cores at D = 128. K and
// V come from L2 (docs/understand/attention.md has the arithmetic).
//
// GPT-2 124M (B=64, T=1024, NH=12, HS=64) on an H100 SXM: ceil(1024 / 192) = 6 tiles of queries for each of (64 + 1)·12
// pairs of a sequence and a head (the last 12 for the tokens after the last sequence): 4,680 tasks for 132 blocks of
// 512 threads.
//
// One query for each of 512 sequences of a LLaMA 1B shape (NH=32, NKV=8, HS=64) after 512 keys: (512 + 1)·8 = 4,104
// grouped tasks for 264 blocks of 256 threads. Reading the keys and values is the bound: 537 MB a layer, 179 µs at 3
// TB/s. An SM then gets 13 bytes a cycle, so a block of keys and values (32 KiB) takes 2,500 cycles; its matmuls and
// exponentials take 512 each. To hide 1 µs of latency at that rate takes 23 KB of copies under way on each SM: two
// blocks have at least 32 KiB each.
#include "kernels/attention/hopper_tiles.cuh"

namespace hopper {
namespace {

// GROUPED: the rows of a tile are the query heads of a KV head, for the only query of a sequence.
template <int HEAD_COLUMNS, bool GROUPED_HEADS>
struct ForwardSizes {
    static constexpr int D = HEAD_COLUMNS;
    static constexpr bool GROUPED = GROUPED_HEADS;
    static constexpr int WARPGROUPS = GROUPED ? 1 : D <= 64 ? 3 : 2, BM = WARPGROUPS * 64, BN = 128;
    static constexpr int STAGES = D <= 64 && !GROUPED ? 3 : 2;
    // Keys that TMA copies at once. Grouped, the keys past a sequence's end are not worth the time to read them.
    static constexpr int KEY_BOX = GROUPED ? 32 : BN;
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

template <typename T, typename Sizes, bool PAGED>
__device__ __forceinline__ void forward_produce(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename Sizes::Shared& shared) {
    constexpr int D = Sizes::D, BM = Sizes::BM, BN = Sizes::BN;
    constexpr bool GROUPED = Sizes::GROUPED;
    TileLoader loader(&shared.loader);
    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> at;  // k's and v's
    TaskProducer<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM);
        const BlockRange<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const int group = int(a.NH / a.NKV), kv_head = GROUPED ? task.head : task.head / group;
        const int head = GROUPED ? task.head * group : task.head, token = seq.q0 + (GROUPED ? 0 : i0);
        static_assert(BN == KV_PAGE);
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            int first_row = seq.k0 + n * BN;
            if constexpr (PAGED) first_row = int(pages_of(a, task.sequence).row(n * BN));
            const int count = seq.klen - n * BN;
            const auto load = [&](unsigned char* tile, const CUtensorMap& map, Mbarrier* full, int rows) {
                if constexpr (GROUPED)
                    load_first_rows<BN, D, Sizes::KEY_BOX>(tile, &map, kv_head, first_row, full, rows);
                else
                    loader.load<BN, D, 1>({tile}, {&map}, kv_head, first_row, full, rows);
            };
            shared.k_ring.wait_empty(at);
            load(shared.k[at.stage], maps.k, &shared.k_ring.full[at.stage], GROUPED ? count : BN);
            if (n == blocks.end - 1) {
                shared.q_ring.wait_empty(q_at);
                loader.load<BM, D, 1>({shared.q[q_at.stage]}, {&maps.q}, head, token, &shared.q_ring.full[q_at.stage]);
                q_at.advance();
            }
            shared.v_ring.wait_empty(at);
            load(shared.v[at.stage], maps.v, &shared.v_ring.full[at.stage], count);
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
                sum[half] = __fmul_rn(sum[half], factor[half]);  // in no instance of the kernel a fused multiply-add
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
    int unseen = 0;           // blocks of values before its last that this warpgroup does not see
    int token = 0, head = 0;  // of this warp's first row
    int begin = 0, end = 16;  // the rows that exist, of the warp's 16

    // query: of the sequence, the warp's first; warp_row: its first row of the warpgroup; group: heads of a task.
    template <bool GROUPED>
    __device__ __forceinline__ void set(const Task& task, int query, int warp_row, int group) {
        token = task.seq.q0 + (GROUPED ? 0 : query);
        head = GROUPED ? task.head * group + warp_row : task.head;
        begin = GROUPED ? 0 : -query;
        end = GROUPED ? group - warp_row : 16;
    }
};

// Divides o by the sums of P; stores out and lse.
template <typename T, typename Sizes>
__device__ __forceinline__ void store_forward(const Attention<T>& a, const Maps& maps, const ForwardRows& rows,
                                              const OnlineSoftmax& softmax, float (&o)[Sizes::D / 8][4],
                                              unsigned char* tile, int tile_row) {
    constexpr bool GROUPED = Sizes::GROUPED;
    constexpr int D = Sizes::D;
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float total = row_sum(softmax.sum[half]), factor = total == 0 ? 0.0f : __frcp_rn(total);
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
            o[t][2 * half] *= factor;
            o[t][2 * half + 1] *= factor;
        }
        const int row = lane / 4 + half * 8, head = rows.head + (GROUPED ? row : 0);
        if (a.lse && lane % 4 == 0 && row >= rows.begin && row < rows.end)
            a.lse[head * a.lse_stride + rows.token + (GROUPED ? 0 : row)] =
                total == 0 ? -INF : a.scale * softmax.base[half] + logf(total);
    }
    store_rows<Sizes::BM>(
        OutputRows<T>{&maps.out, a.out.at(rows.token, rows.head), GROUPED ? a.out.head_stride : a.out.token_stride,
                      rows.head, rows.token, rows.begin, rows.end, a.HS},
        tile, tile_row, o);
}

// Tokens after the last sequence get out = 0 and lse = −∞: one part of `parts` of `group` heads, by a warpgroup.
template <typename T>
__device__ __forceinline__ void zero_forward_tail(const Attention<T>& a, int head, int group, int part, int parts) {
    const int64_t first = max(0, a.cum_q[a.S]);
    for (const int end = head + group; head < end; head++) {
        zero_tail(a.out, head, first, a.Nq, a.HS, part, parts, WARPGROUP);
        for (int64_t i = first + part * WARPGROUP + threadIdx.x % WARPGROUP; a.lse && i < a.Nq; i += parts * WARPGROUP)
            a.lse[head * a.lse_stride + i] = -INF;
    }
}

// Writes zeros to the values of a block from `first` on, those past the sequence's last key: by a block's only
// warpgroup, so that the producer warp need not wait until they have arrived, while no other copy is under way.
template <typename Sizes>
__device__ __forceinline__ void zero_values(typename Sizes::Shared& shared, RingPosition<Sizes::STAGES> at, int first) {
    if (first >= Sizes::BN) return;
    shared.v_ring.wait_full(at);
    zero_rows<Sizes::BN, Sizes::D, WARPGROUP>(shared.v[at.stage], first);
    fence_async_proxy();
    named_barrier_sync(1, WARPGROUP);
}

// Warpgroups issue their matmuls one after the other: the softmax of one then overlaps with the matmuls of the next.
template <int WARPGROUPS>
class IssueOrder {
  public:
    __device__ __forceinline__ explicit IssueOrder(int warpgroup)
        : own_(1 + warpgroup), next_(1 + (warpgroup + 1) % WARPGROUPS) {
        if (warpgroup == WARPGROUPS - 1) done();
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (WARPGROUPS > 1) named_barrier_sync(own_, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void done() const {
        if constexpr (WARPGROUPS > 1) named_barrier_arrive(next_, 2 * WARPGROUP);
    }

  private:
    const int own_, next_;  // named barriers
};

template <typename T, typename Sizes>
__device__ __forceinline__ void forward_consume(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename Sizes::Shared& shared, int warpgroup) {
    constexpr int D = Sizes::D, BM = Sizes::BM, BN = Sizes::BN, WARPGROUPS = Sizes::WARPGROUPS;
    constexpr bool GROUPED = Sizes::GROUPED;
    const int lane = lane_id(), warp_row = uniform(threadIdx.x % WARPGROUP / WARP * 16);
    const int group = GROUPED ? int(a.NH / a.NKV) : 1;  // heads of a task
    const IssueOrder<WARPGROUPS> order(warpgroup);
    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> k_at, v_at;
    const auto skip_keys = [&](int blocks) {
#pragma unroll 1
        for (; blocks > 0; blocks--) {
            shared.k_ring.skip(k_at);
            order.wait();
            order.done();
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
            order.wait();
            issue_QK();
            if (last.pending) {
                issue_PV();
                order.done();
                wgmma_wait<0>();
                release_values();
            } else {
                order.done();
                wgmma_wait<0>();
            }
            release_keys();
        }
        if (last.exists) {
            skip_values(last.unseen);
            store_forward<T, Sizes>(a, maps, last, softmax, o, shared.out, warpgroup * 64 + warp_row);
        }
        if (tail)
            zero_forward_tail(a, task.head * group, group, task.rank * WARPGROUPS + warpgroup, task.tiles * WARPGROUPS);

        set_zero(o);
        softmax = {a.scale * LOG2E};
        last = {exists, sees, sees ? mine.begin - blocks.begin : 0};
        last.set<GROUPED>(task, r0 + warp_row, warp_row, group);
        skip_values(unseen);
        if (sees) {
            constexpr int STEP = GROUPED ? 0 : 1;  // queries from one row to the next
            const int first = GROUPED ? 0 : r0;
            const auto scores_to_probabilities = [&](int n) {
                mask_keys<STEP>(s, seq, first, first + STEP * (warp_row + lane / 4), n * BN, -INF);
                return softmax.step(s, factor);
            };
            int n = mine.end - 1;
            scores_to_probabilities(n);
            round_to_A<T>(p, s);
            if constexpr (GROUPED) zero_values<Sizes>(shared, v_at, seq.klen - n * BN);
            for (; n > mine.begin; n--) {
                order.wait();
                issue_QK();
                issue_PV();
                order.done();
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
template <typename T, typename Sizes, bool PAGED>
__global__ void __launch_bounds__(Sizes::Roles::THREADS, Sizes::Roles::BLOCKS)
    forward_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                          const __grid_constant__ Schedule schedule) {
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { forward_produce<T, Sizes, PAGED>(a, maps, schedule, shared); },
                      [&](int warpgroup) { forward_consume<T, Sizes>(a, maps, schedule, shared, warpgroup); });
}

template <typename Sizes, typename T>
void launch_forward(const char* op, const Attention<T>& a, const AttentionSequences& sequences, Stream stream) {
    const auto map_of_rows = [&](const Heads<T>& x, int rows) {
        return Sizes::GROUPED ? make_tensor_map(op, x, a.Nq, a.NH, a.HS, 1, PANEL_COLUMNS, rows)
                              : make_tensor_map(op, x, a.Nq, a.NH, a.HS, rows);
    };
    Maps maps{};
    maps.q = map_of_rows(a.q, Sizes::BM);
    const int64_t key_rows = a.pages ? a.num_pages * KV_PAGE : a.Nk;
    maps.k = make_tensor_map(op, a.k, key_rows, a.NKV, a.HS, Sizes::KEY_BOX);
    maps.v = make_tensor_map(op, a.v, key_rows, a.NKV, a.HS, Sizes::KEY_BOX);
    maps.out = map_of_rows(a.out, 16);
    const Tiled queries{a.cum_q, a.Nq, Sizes::BM};
    const int64_t heads = Sizes::GROUPED ? a.NKV : a.NH;
    const Schedule schedule = make_schedule(a.S, heads, tiles_of(sequences.max_q, Sizes::BM),
                                            sequences.max_k * Sizes::D * 4 * a.NKV / heads, a.next_task, queries);
    const auto kernel = a.pages ? forward_hopper_kernel<T, Sizes, true> : forward_hopper_kernel<T, Sizes, false>;
    launch_persistent<Sizes>(op, kernel, a, maps, schedule, stream);
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
        using Grouped = hopper::ForwardSizes<D, true>;
        if (sequences.max_q == 1 && a.NH <= Grouped::BM * a.NKV)
            hopper::launch_forward<Grouped>(op, a, sequences, stream);
        else
            hopper::launch_forward<hopper::ForwardSizes<D, false>>(op, a, sequences, stream);
    });
}

#define INSTANTIATE(T)                                         \
    template bool hopper_attention_takes(const Attention<T>&); \
    template void hopper_attention_forward(const char*, const Attention<T>&, const AttentionSequences&, Stream);
INSTANTIATE(bf16)
INSTANTIATE(fp16)
#undef INSTANTIATE
