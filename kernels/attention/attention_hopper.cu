// Attention on Hopper GPUs: bf16 and fp16, heads of up to 128 columns (a multiple of 8).
//
// A block owns an SM and walks over its tasks. One warp copies tiles into rings in shared memory (TMA); two
// or three warpgroups of 64 rows each multiply them (wgmma), and one computes exponentials while another multiplies
// (FlashAttention-3, Shah et al. 2024, section 3).
//
//   forward   A warpgroup owns 64 queries. S of the next keys is multiplied beside P·V of these, also from one task to
//             the next.
//   backward  Twice, as on older GPUs (attention.cu): nothing is added across blocks, so there are no atomics, no order
//             to wait for and no fp32 copy of dQ, for seven products instead of five. With Sᵀ in the pass over keys, P,
//             Pᵀ, dS and dSᵀ all stay in registers. If it need not be deterministic: once, over keys, five products,
//             and dQ is added up in global memory.
//
// Only builds for sm_90a have this file, and it is compiled for nothing else.
//
// Heads narrower than D = 64 or 128 get columns of zeros from the copies. Rows of a tile past the end of their sequence
// hold the next one's: harmless where rows stay apart; where they are summed over, the loading warp zeroes them.
#include "kernels/attention/attention.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"

namespace {

// --- which task a block does when

// Tasks are the tiles of pairs of a sequence and a head. Blocks take them one by one as they get done, the longest
// first, so that all end at the same time: but by sections of pairs whose inner tensors stay in L2 together.
struct Schedule {
    int64_t pairs, heads;  // the sequence after the last stands for the tokens that belong to none
    int tiles;             // of the longest sequence
    int section;           // pairs
    uint32_t* next;        // the task to be taken next; 0 at the start
};

struct Task {
    int rank;  // of the tile, 0 for the longest of its pair; −1: there are no more tasks
    int head, sequence;
    Sequence seq;
};

// The same in all lanes, so that the compiler keeps it, and what follows from it, in uniform registers.
__device__ __forceinline__ int uniform(int x) {
    return __shfl_sync(ALL_LANES, x, 0);
}

// Numbers of blocks of BLOCK rows, end excluded.
template <int BLOCK>
struct Blocks {
    int begin, end;
    __device__ __forceinline__ explicit Blocks(RowRange rows)
        : begin(rows.begin / BLOCK), end(rows.end > rows.begin ? (rows.end + BLOCK - 1) / BLOCK : rows.begin / BLOCK) {}
    __device__ __forceinline__ bool contains(int block) const { return block >= begin && block < end; }
};

// --- the loading warp

struct Maps {
    CUtensorMap q, k, v, dout;
    CUtensorMap out, dq, dk, dv;  // boxes of 16 rows
};

// N tiles of ROWS rows of the same head from the same token on, for one phase of `full`. Rows from `count` on become
// zeros: such tiles, the last of their sequence, arrive at a barrier of the loading warp's own first. Where rows stay
// apart, all may come.
class Loader {
  public:
    __device__ explicit Loader(Mbarrier* own) : own_(own) {}

    template <int ROWS, int D, int N>
    __device__ __forceinline__ void load(unsigned char* const (&tiles)[N], const CUtensorMap* const (&maps)[N],
                                         int head, int token, Mbarrier* full, int count = ROWS) {
        const bool whole = count >= ROWS;
        Mbarrier* arrival = whole ? full : own_;
        if (lane_id() == 0) {
            mbarrier_arrive_expect_tx(arrival, N * ROWS * D * 2);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < D / PANEL_COLUMNS; c++)
                    tma_load(tiles[n] + c * ROWS * PANEL_ROW_BYTES, maps[n], c * PANEL_COLUMNS, head, token, arrival);
        }
        if (whole) return;
        mbarrier_wait(own_, parity_);
        parity_ ^= 1;
#pragma unroll
        for (int n = 0; n < N; n++)
            for (int i = lane_id(); i < (ROWS - count) * (D / 8); i += WARP)
                *reinterpret_cast<uint4*>(tiles[n] + swizzled_offset<ROWS>(count + i / (D / 8), i % (D / 8) * 8)) = {};
        fence_async_proxy();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(full);
    }

  private:
    Mbarrier* own_;
    int parity_ = 0;
};

// Tasks on their way from the loading warp, which is a task ahead, to the others.
struct TaskRing {
    static constexpr int STAGES = 2;
    MbarrierRing<STAGES> ring;
    Task tasks[STAGES];
};

// The loading warp's end. Asking for a number takes a microsecond, so it asks for the next one early.
template <typename T>
class TaskSource {
  public:
    __device__ __forceinline__ TaskSource(const Attention<T>& a, const Schedule& schedule, TaskRing& ring)
        : a_(a), schedule_(schedule), ring_(ring) {
        ask();
    }
    __device__ __forceinline__ bool next(Task& task) {
        const uint32_t i = uint32_t(uniform(int(number_)));
        task = {-1, 0, 0, {}};
        if (i < uint32_t(schedule_.pairs) * uint32_t(schedule_.tiles)) {
            ask();
            const uint32_t width = uint32_t(schedule_.section), in_section = width * uint32_t(schedule_.tiles);
            const uint32_t first = i / in_section * width, rest = i % in_section;
            const uint32_t here = min(width, uint32_t(schedule_.pairs) - first), pair = first + rest % here;
            task.rank = int(rest / here);
            task.head = int(pair % uint32_t(schedule_.heads)), task.sequence = int(pair / uint32_t(schedule_.heads));
            if (task.sequence < a_.S) task.seq = sequence_of(a_, task.sequence);
        }
        ring_.ring.wait_empty(at_);
        if (lane_id() == 0) {
            ring_.tasks[at_.stage] = task;
            mbarrier_arrive(&ring_.ring.full[at_.stage]);
        }
        at_.advance();
        return task.rank >= 0;
    }

  private:
    __device__ __forceinline__ void ask() {
        if (lane_id() == 0) number_ = atomicAdd(schedule_.next, 1);
    }
    const Attention<T>& a_;
    const Schedule& schedule_;
    TaskRing& ring_;
    RingPosition<TaskRing::STAGES> at_;
    uint32_t number_ = 0;
};

// The computing warps' end.
class TaskSink {
  public:
    __device__ __forceinline__ explicit TaskSink(TaskRing& ring) : ring_(ring) {}
    __device__ __forceinline__ bool next(Task& task) {
        ring_.ring.wait_full(at_);
        const Task& t = ring_.tasks[at_.stage];
        task = {uniform(t.rank),
                uniform(t.head),
                uniform(t.sequence),
                {uniform(t.seq.q0), uniform(t.seq.k0), uniform(t.seq.qlen), uniform(t.seq.klen), uniform(t.seq.first),
                 uniform(t.seq.last)}};
        ring_.ring.release(at_);
        at_.advance();
        return task.rank >= 0;
    }

  private:
    TaskRing& ring_;
    RingPosition<TaskRing::STAGES> at_;
};

// Threads and registers of a block: WARPGROUPS that compute and one that loads and gives registers up.
template <int WARPGROUPS>
struct Roles {
    static constexpr int WARPS = WARPGROUPS * WARPGROUP / WARP;  // that compute
    static constexpr int THREADS = (WARPGROUPS + 1) * WARPGROUP;
    static constexpr int LOADER_REGISTERS = WARPGROUPS == 3 ? 32 : 24;
    static constexpr int REGISTERS = WARPGROUPS == 3 ? 160 : 240;  // 65,536 in all

    template <typename Load, typename Compute>
    static __device__ __forceinline__ void run(Load load, Compute compute) {
        const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
        if (warpgroup == WARPGROUPS) {
            setmaxnreg_dec<LOADER_REGISTERS>();
            if (warp % 4 == 0) load();
        } else {
            setmaxnreg_inc<REGISTERS>();
            compute(warpgroup);
            tma_store_wait();  // the copies read the block's shared memory
        }
    }
};

// A block's shared memory, its barriers ready.
template <typename Sizes>
__device__ __forceinline__ typename Sizes::Shared& prepare_shared() {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& shared = *reinterpret_cast<typename Sizes::Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.init();
        mbarrier_init_fence();
    }
    __syncthreads();
    return shared;
}

// Columns past `last` (or before `first`) become `to`; the two bounds are for the thread's two rows. Against a bound
// that knows the thread's own first column, the others are constants of the instructions that compare.
template <int NT>
__device__ __forceinline__ void drop_after(float (&c)[NT][4], int last, int last_8, float to) {
    const int own = lane_id() % 4 * 2, bound[2] = {last - own, last_8 - own};
    for_each(c, 0, -own, [&](float& x, int row, int column) { x = column > bound[row / 8] ? to : x; });
}
template <int NT>
__device__ __forceinline__ void drop_before(float (&c)[NT][4], int first, int first_8, float to) {
    const int own = lane_id() % 4 * 2, bound[2] = {first - own, first_8 - own};
    for_each(c, 0, -own, [&](float& x, int row, int column) { x = column < bound[row / 8] ? to : x; });
}

// Scores of a warpgroup's 64 queries from r0 on, this thread's being `row` and row + 8, and the keys from j0 on: those
// of keys that a query doesn't see become `to`.
template <int NT>
__device__ __forceinline__ void mask_keys(float (&s)[NT][4], const Sequence& seq, int r0, int row, int j0, float to) {
    if (j0 + NT * 8 - 1 > min(r0 + seq.last, seq.klen - 1))
        drop_after(s, min(row + seq.last, seq.klen - 1) - j0, min(row + 8 + seq.last, seq.klen - 1) - j0, to);
    if (j0 < r0 + 63 + seq.first) drop_before(s, row + seq.first - j0, row + 8 + seq.first - j0, to);
}
// The same of 64 keys from r0 on and the queries from i0 on. (Keys past the last are the caller's.)
template <int NT>
__device__ __forceinline__ void mask_queries(float (&s)[NT][4], const Sequence& seq, int r0, int row, int i0,
                                             float to) {
    if (i0 < r0 + 63 - seq.last) drop_before(s, row - seq.last - i0, row + 8 - seq.last - i0, to);
    if (i0 + NT * 8 - 1 > r0 - seq.first) drop_after(s, row - seq.first - i0, row + 8 - seq.first - i0, to);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <int D>
struct ForwardSizes {
    static constexpr int WARPGROUPS = D <= 64 ? 3 : 2, BM = WARPGROUPS * 64, BN = 128;
    static constexpr int STAGES = D <= 64 ? 3 : 2;
    using Roles = ::Roles<WARPGROUPS>;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[2][BM * D * 2], out[BM * D * 2];  // q: of this task and the next
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[STAGES][BN * D * 2], v[STAGES][BN * D * 2];
        MbarrierRing<2> q_ring;
        MbarrierRing<STAGES> k_ring, v_ring;
        TaskRing tasks;
        Mbarrier loader;
        __device__ void init() {
            q_ring.init(Roles::WARPS), k_ring.init(Roles::WARPS), v_ring.init(Roles::WARPS);
            tasks.ring.init(Roles::WARPS);
            mbarrier_init(&loader, 1);
        }
    };
};

template <typename T, int D>
__device__ __forceinline__ void forward_load(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                             typename ForwardSizes<D>::Shared& shared) {
    using Sizes = ForwardSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN;
    Loader loader(&shared.loader);
    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> at;  // k's and v's
    TaskSource<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM);
        const Blocks<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const int kv_head = task.head / int(a.NH / a.NKV);
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            shared.k_ring.wait_empty(at);
            loader.load<BN, D, 1>({shared.k[at.stage]}, {&maps.k}, kv_head, seq.k0 + n * BN,
                                  &shared.k_ring.full[at.stage]);
            if (n == blocks.end - 1) {
                shared.q_ring.wait_empty(q_at);
                loader.load<BM, D, 1>({shared.q[q_at.stage]}, {&maps.q}, task.head, seq.q0 + i0,
                                      &shared.q_ring.full[q_at.stage]);
                q_at.advance();
            }
            shared.v_ring.wait_empty(at);
            loader.load<BN, D, 1>({shared.v[at.stage]}, {&maps.v}, kv_head, seq.k0 + n * BN,
                                  &shared.v_ring.full[at.stage], seq.klen - n * BN);
            at.advance();
        }
    }
}

// Two rows of scores of each thread on their way to probabilities. With c = scale·log₂e: P = 2^(c·S − c·base), and sums
// of this thread's columns. The base is the largest S so far, but moves only when it is left behind by 8 powers of two
// (FlashAttention-4's lazy rescaling): until then P stays below 256, as exact as below 1, and nothing need be rescaled.
struct Softmax {
    static constexpr float SLACK = 8;
    float c, base[2] = {-INF, -INF}, sum[2] = {0, 0};

    // s becomes P. Returns whether any row of this warp moved its base: o's rows must then be multiplied by factor.
    template <int NT>
    __device__ __forceinline__ bool step(float (&s)[NT][4], float (&factor)[2]) {
        float most[4], next[2];  // four chains: their latencies overlap
#pragma unroll
        for (int e = 0; e < 4; e++) most[e] = s[0][e];
#pragma unroll
        for (int n = 1; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) most[e] = fmaxf(most[e], s[n][e]);
        next[0] = fmaxf(most[0], most[1]), next[1] = fmaxf(most[2], most[3]);
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            const float other[2] = {__shfl_xor_sync(ALL_LANES, next[0], lanes),
                                    __shfl_xor_sync(ALL_LANES, next[1], lanes)};
            next[0] = fmaxf(next[0], other[0]), next[1] = fmaxf(next[1], other[1]);
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
        // Nothing seen yet: not −∞ − −∞.
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

template <typename T, int D>
__device__ __forceinline__ void forward_compute(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename ForwardSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = ForwardSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN, WARPGROUPS = Sizes::WARPGROUPS;
    constexpr int TURN_THREADS = 2 * WARPGROUP;
    const int lane = lane_id(), warp_row = uniform(threadIdx.x % WARPGROUP / WARP * 16);
    const int turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % WARPGROUPS;  // named barriers
    // Products are issued in turns, a warpgroup's exponentials then run beside the products of the next.
    const auto take_turn = [&] { named_barrier_sync(turn, TURN_THREADS); };
    const auto give_turn = [&] { named_barrier_arrive(next_turn, TURN_THREADS); };
    if (warpgroup == WARPGROUPS - 1) give_turn();

    RingPosition<2> q_at;
    RingPosition<Sizes::STAGES> k_at, v_at;
    const auto pass_keys = [&](int blocks) {
#pragma unroll 1
        for (; blocks > 0; blocks--) {
            shared.k_ring.wait_full(k_at), shared.k_ring.release(k_at), k_at.advance();
            take_turn(), give_turn();
        }
    };
    const auto pass_values = [&](int blocks) {
#pragma unroll 1
        for (; blocks > 0; blocks--) shared.v_ring.wait_full(v_at), shared.v_ring.release(v_at), v_at.advance();
    };

    float s[BN / 8][4], o[D / 8][4], factor[2];
    uint32_t p[BN / 16][4];
    Softmax softmax{a.scale * LOG2E};
    // The task before: its last P·V is issued beside the first scores of the next. Until then its stage of V stays
    // taken; two stages suffice, as a warpgroup leaves out at most one block of those that another of its task sees.
    struct {
        bool exists = false, summed = false;
        int unseen = 0;         // blocks of values before its last that it does not see
        int row = 0, head = 0;  // row: this warp's first query, of the sequence that starts at `token`
        int token = 0;
    } last;

    const auto issue_scores = [&] {
        const uint32_t q = shared_address(shared.q[q_at.stage]) + warpgroup * 64 * PANEL_ROW_BYTES;
        shared.k_ring.wait_full(k_at);
        wgmma_ABt<T, BM, D>(s, q, shared_address(shared.k[k_at.stage]));
    };
    const auto issue_sums = [&] {
        shared.v_ring.wait_full(v_at);
        wgmma_AB<T>(o, p, shared_address(shared.v[v_at.stage]));
    };
    const auto release_keys = [&] {
        pin_registers(s);
        shared.k_ring.release(k_at), k_at.advance();
    };
    const auto release_values = [&] {
        pin_registers(o);
        shared.v_ring.release(v_at), v_at.advance();
    };

    TaskSink tasks(shared.tasks);
    for (bool more = true; more;) {
        Task task;
        more = tasks.next(task);
        const bool tail = more && task.sequence == a.S;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM), r0 = i0 + warpgroup * 64;
        const bool exists = more && !tail && i0 + BM > 0;
        const Blocks<BN> blocks(exists ? keys_seen(seq, i0, i0 + BM) : RowRange{});
        const Blocks<BN> mine(exists ? keys_seen(seq, r0, r0 + 64) : RowRange{});
        const bool any = blocks.end > blocks.begin, sees = mine.end > mine.begin;

        if (last.summed && (!sees || last.unseen > 0)) {
            issue_sums();
            wgmma_wait<0>();
            release_values();
            last.summed = false;
        }
        if (any) shared.q_ring.wait_full(q_at);
        const int unseen = sees ? blocks.end - mine.end : 0;
        pass_keys(unseen);
        if (sees) {
            take_turn();
            issue_scores();
            if (last.summed) {
                issue_sums();
                give_turn();
                wgmma_wait<0>();
                release_values();
            } else {
                give_turn();
                wgmma_wait<0>();
            }
            release_keys();
        }
        if (last.exists) {
            pass_values(last.unseen);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float total = row_sum(softmax.sum[half]), scale = total == 0 ? 0.0f : __frcp_rn(total);
#pragma unroll
                for (int t = 0; t < D / 8; t++) o[t][2 * half] *= scale, o[t][2 * half + 1] *= scale;
                const int i = last.row + lane / 4 + half * 8;
                if (a.lse && lane % 4 == 0 && i >= 0)
                    a.lse[last.head * a.lse_stride + last.token + i] =
                        total == 0 ? -INF : a.scale * softmax.base[half] + logf(total);
            }
            store_rows<BM>(OutputRows<T>{&maps.out, a.out.at(last.token + last.row, last.head), a.out.token_stride,
                                         last.head, last.token + last.row, -last.row, 16, a.HS},
                           shared.out, warpgroup * 64 + warp_row, o);
        }
        if (tail) {
            const int64_t first = max(0, a.cum_q[a.S]);
            const int part = task.rank * WARPGROUPS + warpgroup, parts = schedule.tiles * WARPGROUPS;
            zero_tail(a.out, task.head, first, a.Nq, a.HS, part, parts, WARPGROUP);
            for (int64_t i = first + part * WARPGROUP + threadIdx.x % WARPGROUP; a.lse && i < a.Nq;
                 i += parts * WARPGROUP)
                a.lse[task.head * a.lse_stride + i] = -INF;
        }

        set_zero(o);
        softmax = {a.scale * LOG2E};
        last = {exists, sees, sees ? mine.begin - blocks.begin : 0, r0 + warp_row, task.head, int(seq.q0)};
        pass_values(unseen);
        if (sees) {
            const auto scores_to_weights = [&](int n) {
                mask_keys(s, seq, r0, r0 + warp_row + lane / 4, n * BN, -INF);
                return softmax.step(s, factor);
            };
            int n = mine.end - 1;
            scores_to_weights(n);
            round_to_A<T>(p, s);
            for (; n > mine.begin; n--) {
                take_turn();
                issue_scores();
                issue_sums();
                give_turn();
                wgmma_wait<1>();
                release_keys();
                const bool moved = scores_to_weights(n - 1);
                wgmma_wait<0>();
                release_values();
                if (moved) {
#pragma unroll
                    for (int t = 0; t < D / 8; t++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[t][e] *= factor[e / 2];
                }
                round_to_A<T>(p, s);
            }
        } else {
#pragma unroll 1
            for (int n = blocks.begin; n < blocks.end; n++) pass_keys(1), pass_values(1);
        }
        if (any) shared.q_ring.release(q_at), q_at.advance();
        pass_keys(last.unseen);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(ForwardSizes<D>::Roles::THREADS, 1)
    forward_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                          const __grid_constant__ Schedule schedule) {
    using Sizes = ForwardSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { forward_load<T, D>(a, maps, schedule, shared); },
                      [&](int w) { forward_compute<T, D>(a, maps, schedule, shared, w); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, the pass over queries: delta and dQ

template <int D>
struct QueryPassSizes {
    static constexpr int WARPGROUPS = D <= 64 ? 3 : 2, BM = WARPGROUPS * 64, BN = 64;
    static constexpr int STAGES = D <= 64 ? 4 : 3;
    using Roles = ::Roles<WARPGROUPS>;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[BM * D * 2], dout[BM * D * 2], dq[BM * D * 2];
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[STAGES][BN * D * 2], v[STAGES][BN * D * 2];
        MbarrierRing<1> q_ring;
        MbarrierRing<STAGES> kv_ring;
        TaskRing tasks;
        Mbarrier loader;
        __device__ void init() {
            q_ring.init(Roles::WARPS), kv_ring.init(Roles::WARPS);
            tasks.ring.init(Roles::WARPS);
            mbarrier_init(&loader, 1);
        }
    };
};

template <typename T, int D>
__device__ __forceinline__ void query_pass_load(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                typename QueryPassSizes<D>::Shared& shared) {
    using Sizes = QueryPassSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN;
    Loader loader(&shared.loader);
    RingPosition<1> q_at;
    RingPosition<Sizes::STAGES> at;
    TaskSource<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM);
        const Blocks<BN> blocks(keys_seen(seq, i0, i0 + BM));
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

template <typename T, int D>
__device__ __forceinline__ void query_pass_compute(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                   typename QueryPassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = QueryPassSizes<D>;
    constexpr int BM = Sizes::BM, BN = Sizes::BN, WARPGROUPS = Sizes::WARPGROUPS;
    const int lane = lane_id(), warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    RingPosition<1> q_at;
    RingPosition<Sizes::STAGES> at;
    TaskSink tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) {
            zero_tail(a.dq, task.head, max(0, a.cum_q[a.S]), a.Nq, a.HS, task.rank * WARPGROUPS + warpgroup,
                      schedule.tiles * WARPGROUPS, WARPGROUP);
            continue;
        }
        const Sequence& seq = task.seq;
        const int i0 = first_query(seq, task.rank, BM), r0 = i0 + warpgroup * 64;
        if (i0 + BM <= 0) continue;
        const Blocks<BN> blocks(keys_seen(seq, i0, i0 + BM));
        const Blocks<BN> mine(keys_seen(seq, r0, r0 + 64));
        const int row = r0 + warp_row + lane / 4;

        float lse[2], delta[2];  // of this thread's rows, lse in units of ln 2
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + half * 8;
            const bool exists = i >= 0;
            const int64_t token = seq.q0 + (exists ? i : 0);
            lse[half] = exists ? a.lse[task.head * a.lse_stride + token] * LOG2E : 0.0f;
            float sum = 0;
            for (int col = lane % 4 * 8; exists && col < a.HS; col += 32) {
                const Floats<8> x = load_floats<8>(a.out.at(token, task.head) + col);
                const Floats<8> g = load_floats<8>(a.dout.at(token, task.head) + col);
#pragma unroll
                for (int e = 0; e < 8; e++) sum = fmaf(g[e], x[e], sum);
            }
            delta[half] = row_sum(sum);
            if (exists && lane % 4 == 0) a.delta[task.head * a.Nq + token] = delta[half];
        }

        float s[BN / 8][4], dp[BN / 8][4], dq[D / 8][4];
        uint32_t ds[BN / 16][4];
        const float c = a.scale * LOG2E;
        set_zero(dq);
        if (blocks.end > blocks.begin) {
            shared.q_ring.wait_full(q_at);
            const uint32_t q = shared_address(shared.q) + warpgroup * 64 * PANEL_ROW_BYTES,
                           dout = shared_address(shared.dout) + warpgroup * 64 * PANEL_ROW_BYTES;
            RingPosition<Sizes::STAGES> unreleased;
            bool running = false;  // products that read stage `unreleased`
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
                unreleased = at, running = true;
            }
            finish();
            shared.q_ring.release(q_at);
            q_at.advance();
        }
        scale_all(dq, a.scale);
        const int first = r0 + warp_row;
        store_rows<BM>(OutputRows<T>{&maps.dq, a.dq.at(seq.q0 + first, task.head), a.dq.token_stride, task.head,
                                     seq.q0 + first, -first, 16, a.HS},
                       shared.dq, warpgroup * 64 + warp_row, dq);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(QueryPassSizes<D>::Roles::THREADS, 1)
    query_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                             const __grid_constant__ Schedule schedule) {
    using Sizes = QueryPassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { query_pass_load<T, D>(a, maps, schedule, shared); },
                      [&](int w) { query_pass_compute<T, D>(a, maps, schedule, shared, w); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, the pass over keys: dK and dV

// Scores Sᵀ of queries become Pᵀ, c = scale·log₂e.
template <int NT>
__device__ __forceinline__ void scores_to_weights(float (&s)[NT][4], const float* lse, float c) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + t * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) s[t][e] = exp2_fast(fmaf(s[t][e], c, (e % 2 ? two.y : two.x) * -LOG2E));
    }
}
// dPᵀ becomes dSᵀ.
template <int NT>
__device__ __forceinline__ void weight_gradients_to_score_gradients(float (&dp)[NT][4], const float (&p)[NT][4],
                                                                    const float* delta) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float2 two = *reinterpret_cast<const float2*>(delta + t * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[t][e] = p[t][e] * (dp[t][e] - (e % 2 ? two.y : two.x));
    }
}

constexpr int KEY_PASS_WARPGROUPS = 2, KEY_PASS_BN = KEY_PASS_WARPGROUPS * 64, KEY_PASS_BQ = 64;

// Of this pass, and of the single one, which needs Extra beside it.
template <int D, int STAGES_, typename Extra>
struct KeySizes {
    static constexpr int WARPGROUPS = KEY_PASS_WARPGROUPS, BN = KEY_PASS_BN, BQ = KEY_PASS_BQ;
    static constexpr int STAGES = STAGES_;
    using Roles = ::Roles<WARPGROUPS>;
    // Whether P and dS are still being multiplied while the next scores are: registers for that are there at D = 64.
    static constexpr bool OVERLAP = D <= 64;
    static constexpr bool SUMS_OVER_KEYS = !std::is_empty_v<Extra>;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[BN * D * 2], v[BN * D * 2], sums[BN * D * 2];
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[STAGES][BQ * D * 2], dout[STAGES][BQ * D * 2];
        Extra extra;
        alignas(16) float lse[STAGES][BQ], delta[STAGES][BQ];
        MbarrierRing<1> kv_ring;
        MbarrierRing<STAGES> q_ring;
        TaskRing tasks;
        Mbarrier loader;
        __device__ void init() {
            kv_ring.init(Roles::WARPS);
            q_ring.init(Roles::WARPS, 1 + WARP);  // the copies of lse and delta arrive for each thread
            tasks.ring.init(Roles::WARPS);
            mbarrier_init(&loader, 1);
        }
    };
};

struct NothingExtra {};
template <int D>
using KeyPassSizes = KeySizes<D, D <= 64 ? 4 : 3, NothingExtra>;

// The key pass walks over the queries of all heads of a group, one head after another.
template <int BQ, typename F>
__device__ __forceinline__ void for_queries(int first_head, int group, const Blocks<BQ>& blocks, F f) {
    for (int head = first_head; head < first_head + group; head++)
        for (int m = blocks.begin; m < blocks.end; m++) f(head, m);
}

// Sizes: of this pass or of the single one, which also sums over keys.
template <typename T, int D, typename Sizes>
__device__ __forceinline__ void key_pass_load(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                              typename Sizes::Shared& shared) {
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ;
    const int group = int(a.NH / a.NKV);
    Loader loader(&shared.loader);
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    TaskSource<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int j0 = task.rank * BN;
        const Blocks<BQ> blocks(queries_seeing(seq, j0, min(j0 + BN, seq.klen)));
        if (blocks.end <= blocks.begin) continue;
        shared.kv_ring.wait_empty(kv_at);
        loader.load<BN, D, 2>({shared.k, shared.v}, {&maps.k, &maps.v}, task.head, seq.k0 + j0, shared.kv_ring.full,
                              Sizes::SUMS_OVER_KEYS ? seq.klen - j0 : BN);
        kv_at.advance();
        for_queries(task.head * group, group, blocks, [&](int head, int m) {
            shared.q_ring.wait_empty(at);
            Mbarrier* full = &shared.q_ring.full[at.stage];
            for (int i = lane_id(); i < BQ; i += WARP) {
                const bool exists = m * BQ + i < seq.qlen;
                const int64_t token = seq.q0 + (exists ? m * BQ + i : 0);
                cp_async_4(&shared.lse[at.stage][i], a.lse + head * a.lse_stride + token, exists);
                cp_async_4(&shared.delta[at.stage][i], a.delta + head * a.Nq + token, exists);
            }
            mbarrier_arrive_cp_async(full);
            loader.load<BQ, D, 2>({shared.q[at.stage], shared.dout[at.stage]}, {&maps.q, &maps.dout}, head,
                                  seq.q0 + m * BQ, full, seq.qlen - m * BQ);
            at.advance();
        });
    }
}

// Keys that belong to no sequence have no gradients: one part of `parts`, by a warpgroup.
template <typename T>
__device__ __forceinline__ void zero_keys_of_none(const Attention<T>& a, int head, int part, int parts) {
    const int64_t first = max(0, a.cum_k[a.S]);
    zero_tail(a.dk, head, first, a.Nk, a.HS, part, parts, WARPGROUP);
    zero_tail(a.dv, head, first, a.Nk, a.HS, part, parts, WARPGROUP);
}

// A warp's sums for 16 keys of the task's sequence from `first` on, by way of rows of `tile` from tile_row on.
template <int BN, typename T, int NT>
__device__ __forceinline__ void store_key_gradients(const Attention<T>& a, const Maps& maps, const Task& task,
                                                    int first, unsigned char* tile, int tile_row, float (&dk)[NT][4],
                                                    const float (&dv)[NT][4]) {
    scale_all(dk, a.scale);
    const Sequence& seq = task.seq;
    const auto store = [&](const CUtensorMap* map, const Heads<T>& to, const float(&sums)[NT][4]) {
        store_rows<BN>(OutputRows<T>{map, to.at(seq.k0 + first, task.head), to.token_stride, task.head, seq.k0 + first,
                                     0, seq.klen - first, a.HS},
                       tile, tile_row, sums);
    };
    store(&maps.dv, a.dv, dv);
    store(&maps.dk, a.dk, dk);
}

template <typename T, int D>
__device__ __forceinline__ void key_pass_compute(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                 typename KeyPassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = KeyPassSizes<D>;
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ, WARPGROUPS = Sizes::WARPGROUPS;
    const int lane = lane_id(), warp_row = threadIdx.x % WARPGROUP / WARP * 16, group = int(a.NH / a.NKV);
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    TaskSink tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        const int tile = task.rank;
        if (task.sequence == a.S) {
            zero_keys_of_none(a, task.head, tile * WARPGROUPS + warpgroup, schedule.tiles * WARPGROUPS);
            continue;
        }
        const Sequence& seq = task.seq;
        const int j0 = tile * BN, r0 = j0 + warpgroup * 64;
        if (j0 >= seq.klen) continue;
        const Blocks<BQ> blocks(queries_seeing(seq, j0, min(j0 + BN, seq.klen)));
        const Blocks<BQ> mine(queries_seeing(seq, r0, min(r0 + 64, seq.klen)));
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
            bool running = false;  // products that read stage `unreleased`
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
                    shared.q_ring.release(at);
                    at.advance();
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
                scores_to_weights(s, shared.lse[at.stage], c);
                mask_queries(s, seq, r0, row, m * BQ, 0);
                round_to_A<T>(p, s);
                wgmma_AB<T>(dv, p, dout);
                wgmma_wait<1>();
                pin_registers(dp);
                weight_gradients_to_score_gradients(dp, s, shared.delta[at.stage]);
                round_to_A<T>(ds, dp);
                wgmma_AB<T>(dk, ds, q);
                if constexpr (Sizes::OVERLAP) {
                    unreleased = at, running = true;
                } else {
                    wgmma_wait<0>();
                    shared.q_ring.release(at);
                }
                at.advance();
            });
            finish();
            shared.kv_ring.release(kv_at);
            kv_at.advance();
        }
        store_key_gradients<BN>(a, maps, task, r0 + warp_row, shared.sums, warpgroup * 64 + warp_row, dk, dv);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(KeyPassSizes<D>::Roles::THREADS, 1)
    key_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                           const __grid_constant__ Schedule schedule) {
    using Sizes = KeyPassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { key_pass_load<T, D, Sizes>(a, maps, schedule, shared); },
                      [&](int w) { key_pass_compute<T, D>(a, maps, schedule, shared, w); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, a single pass over keys: dK, dV and, added up in fp32 in global memory, dQ

// The sums of dQ: [heads, 2, tokens, D / 2], half the columns of a head at a time. A row's pieces of 16 bytes are
// permuted: piece 4j + t has columns 16j + 2t, + 1, + 8 and + 9, what a thread of a product holds, and rows of odd
// tokens have j ^ 1 for j, so that warps write their image in shared memory without bank conflicts.
template <int D>
struct GradientSums {
    static constexpr int COLUMNS = D / 2;
    static __host__ __device__ __forceinline__ int64_t row(int64_t Nq, int64_t head, int half, int64_t token) {
        return ((head * 2 + half) * Nq + token) * COLUMNS;
    }
    static __device__ __forceinline__ int first_piece(int64_t token, int j) { return 4 * (j ^ int(token % 2)); }
};

template <int D>
struct SinglePassExtra {
    // dSᵀ of a step and of the one before, which the other warpgroup may still read.
    alignas(SWIZZLE_ALIGNMENT) unsigned char ds[2][KEY_PASS_BN * KEY_PASS_BQ * 2];
    float4 dq[KEY_PASS_WARPGROUPS][WARPGROUP / WARP][16 * GradientSums<D>::COLUMNS / 4];  // of each warp
};
template <int D>
using SinglePassSizes = KeySizes<D, D <= 64 ? 4 : 2, SinglePassExtra<D>>;

// Adds the warp's 16 rows of dQ, of tokens from `token` on, to those at `to`, as many as exist.
template <int D, int NT>
__device__ __forceinline__ void add_rows(float* to, int64_t token, int rows, float4* image, const float (&c)[NT][4]) {
    const int lane = lane_id();
    if (lane == 0) tma_store_wait();
    __syncwarp();  // the image may be written
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < NT / 2; j++)
            image[(lane / 4 + half * 8) * (NT * 2) + GradientSums<D>::first_piece(token + lane / 4, j) + lane % 4] = {
                c[2 * j][2 * half], c[2 * j][2 * half + 1], c[2 * j + 1][2 * half], c[2 * j + 1][2 * half + 1]};
    fence_async_proxy();
    __syncwarp();
    if (lane > 0 || rows <= 0) return;
    bulk_reduce_add(to, image, min(rows, 16) * NT * 32);
    tma_store_commit();
}

template <typename T, int D>
__device__ __forceinline__ void single_pass_compute(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                    typename SinglePassSizes<D>::Shared& shared, int warpgroup) {
    using Sizes = SinglePassSizes<D>;
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ, WARPGROUPS = Sizes::WARPGROUPS, COLUMNS = GradientSums<D>::COLUMNS;
    constexpr int GRADIENTS_READY = 1;  // a named barrier
    const int lane = lane_id(), warp_row = uniform(threadIdx.x % WARPGROUP / WARP * 16), group = int(a.NH / a.NKV);
    float4* image = shared.extra.dq[warpgroup][warp_row / 16];
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    int buffer = 0;  // of dSᵀ
    TaskSink tasks(shared.tasks);
    for (Task task; tasks.next(task);) {
        const int tile = task.rank;
        if (task.sequence == a.S) {
            zero_keys_of_none(a, task.head, tile * WARPGROUPS + warpgroup, schedule.tiles * WARPGROUPS);
            continue;
        }
        const Sequence& seq = task.seq;
        const int j0 = tile * BN, r0 = j0 + warpgroup * 64;
        if (j0 >= seq.klen) continue;
        const Blocks<BQ> blocks(queries_seeing(seq, j0, min(j0 + BN, seq.klen)));
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
            // Of the step before, whose dK is multiplied beside the scores of this.
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
                scores_to_weights(s, shared.lse[at.stage], c);
                mask_queries(s, seq, r0, row, m * BQ, 0);
                if (r0 + 64 > seq.klen)
                    for_each(s, row, 0, [&](float& x, int key, int) { x = key < seq.klen ? x : 0; });
                round_to_A<T>(p, s);
                wgmma_AB<T>(dv, p, dout);
                wgmma_wait<1>();
                pin_registers(dp);
                weight_gradients_to_score_gradients(dp, s, shared.delta[at.stage]);
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
                add_rows<D>(a.dq_sums + GradientSums<D>::row(a.Nq, head, warpgroup, token), token, seq.qlen - first,
                            image, dq);
                buffer ^= 1;
                if constexpr (Sizes::OVERLAP) {
                    last_at = at, running = true;
                } else {
                    wgmma_wait<0>();
                    pin_registers(dk);
                    shared.q_ring.release(at);
                }
                at.advance();
            });
            wgmma_wait<0>();
            finish_last();
            shared.kv_ring.release(kv_at);
            kv_at.advance();
        }
        store_key_gradients<BN>(a, maps, task, r0 + warp_row, shared.sums, warpgroup * 64 + warp_row, dk, dv);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(SinglePassSizes<D>::Roles::THREADS, 1)
    single_pass_hopper_kernel(const __grid_constant__ Attention<T> a, const __grid_constant__ Maps maps,
                              const __grid_constant__ Schedule schedule) {
    using Sizes = SinglePassSizes<D>;
    auto& shared = prepare_shared<Sizes>();
    Sizes::Roles::run([&] { key_pass_load<T, D, Sizes>(a, maps, schedule, shared); },
                      [&](int w) { single_pass_compute<T, D>(a, maps, schedule, shared, w); });
}

constexpr int ROW_KERNEL_THREADS = 256;

// delta of all queries; D / 8 lanes of a warp take one of a head.
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

// dq of its sums; a thread takes 16 columns of a row.
template <typename T, int D>
__global__ void __launch_bounds__(ROW_KERNEL_THREADS) round_sums_hopper_kernel(const __grid_constant__ Attention<T> a) {
    constexpr int PARTS = D / 16, COLUMNS = GradientSums<D>::COLUMNS;
    const int column = threadIdx.x % PARTS * 16, half = column / COLUMNS;
    const int64_t i = (blockIdx.x * int64_t(ROW_KERNEL_THREADS) + threadIdx.x) / PARTS;
    if (i >= a.Nq * a.NH || column >= a.HS) return;
    const auto [token, head] = row_item(i, a.NH);
    const float* row = a.dq_sums + GradientSums<D>::row(a.Nq, head, half, token);
    const float4* pieces =
        reinterpret_cast<const float4*>(row) + GradientSums<D>::first_piece(token, column % COLUMNS / 16);
    Floats<8> low, high;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const float4 x = pieces[t];
        low[2 * t] = x.x * a.scale, low[2 * t + 1] = x.y * a.scale;
        high[2 * t] = x.z * a.scale, high[2 * t + 1] = x.w * a.scale;
    }
    T* to = a.dq.at(token, head) + column;
    store_floats(to, low);
    if (column + 8 < a.HS) store_floats(to + 8, high);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch

// inner_bytes: what a pair's tasks read again and again.
Schedule make_schedule(int64_t S, int64_t heads, int tiles, int64_t inner_bytes, uint32_t* next) {
    constexpr int64_t L2_SHARE = 32 << 20, MOST = 32;
    const int64_t pairs = (S + 1) * heads;
    const int64_t fit = std::clamp<int64_t>(L2_SHARE / std::max<int64_t>(1, inner_bytes), 1, MOST);
    // All of nearly the same size: a small last section would leave blocks without work at the end.
    return {pairs, heads, tiles, int(ceil_div(pairs, ceil_div(pairs, fit))), next};
}

__global__ void first_task_kernel(uint32_t* next) {
    *next = 0;
}

template <typename Sizes, typename T>
void launch(const char* op, void (*kernel)(Attention<T>, Maps, Schedule), const Attention<T>& a, const Maps& maps,
            const Schedule& schedule, Stream stream) {
    const int64_t tasks = schedule.pairs * schedule.tiles, blocks = std::min(tasks, num_sms());
    require(tasks < int64_t(1) << 31, op, ": ", a.S, " sequences of up to ", schedule.tiles, " tiles and ",
            schedule.heads, " heads are more than one launch can hold");
    constexpr int bytes = sizeof(typename Sizes::Shared);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    first_task_kernel<<<1, 1, 0, cuda_stream(stream)>>>(schedule.next);
    kernel<<<unsigned(blocks), Sizes::Roles::THREADS, bytes, cuda_stream(stream)>>>(a, maps, schedule);
    check_launch(op, stream);
}

constexpr int MAX_HS = 128;

template <typename F>
void dispatch_head_size(int HS, F f) {
    if (HS <= 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}

}  // namespace

template <typename T>
bool hopper_attention_takes(const Attention<T>& a) {
    return is_hopper() && a.aligned && a.HS <= MAX_HS;
}

int64_t hopper_attention_sums(int64_t Nq, int64_t NH, int64_t HS, int64_t max_k) {
    // Two passes over heads of 64 columns are faster up to 2048 keys: zeroing and rounding the sums takes a fixed time,
    // what two products fewer save grows with the keys.
    if (!is_hopper() || HS > MAX_HS || (HS <= 64 && max_k <= 2048)) return 0;
    int64_t bytes = 0;
    dispatch_head_size(int(HS), [&](auto D) { bytes = Nq * NH * D * int64_t(sizeof(float)); });
    return bytes;
}

template <typename T>
void hopper_attention_forward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                              Stream stream) {
    dispatch_head_size(a.HS, [&](auto D) {
        using Sizes = ForwardSizes<D>;
        Maps maps{};
        maps.q = make_tensor_map(op, a.q, a.Nq, a.NH, a.HS, Sizes::BM);
        maps.k = make_tensor_map(op, a.k, a.Nk, a.NKV, a.HS, Sizes::BN);
        maps.v = make_tensor_map(op, a.v, a.Nk, a.NKV, a.HS, Sizes::BN);
        maps.out = make_tensor_map(op, a.out, a.Nq, a.NH, a.HS, 16);
        const Schedule schedule = make_schedule(a.S, a.NH, tiles_of(sequences.max_q, Sizes::BM),
                                                sequences.max_k * D * 4 * a.NKV / a.NH, a.next_task);
        launch<Sizes>(op, forward_hopper_kernel<T, D>, a, maps, schedule, stream);
    });
}

template <typename T>
void hopper_attention_backward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                               Stream stream) {
    dispatch_head_size(a.HS, [&](auto D) {
        const auto key_schedule = [&](int rows, int bytes) {
            return make_schedule(a.S, a.NKV, tiles_of(sequences.max_k, rows),
                                 sequences.max_q * D * bytes * (a.NH / a.NKV), a.next_task);
        };
        const auto maps_of = [&](int q_rows, int k_rows) {
            Maps maps{};
            maps.q = make_tensor_map(op, a.q, a.Nq, a.NH, a.HS, q_rows),
            maps.k = make_tensor_map(op, a.k, a.Nk, a.NKV, a.HS, k_rows);
            maps.v = make_tensor_map(op, a.v, a.Nk, a.NKV, a.HS, k_rows),
            maps.dout = make_tensor_map(op, a.dout, a.Nq, a.NH, a.HS, q_rows);
            maps.dq = make_tensor_map(op, a.dq, a.Nq, a.NH, a.HS, 16);
            maps.dk = make_tensor_map(op, a.dk, a.Nk, a.NKV, a.HS, 16),
            maps.dv = make_tensor_map(op, a.dv, a.Nk, a.NKV, a.HS, 16);
            return maps;
        };
        if (a.dq_sums) {
            using Sizes = SinglePassSizes<D>;
            const auto launch_rows = [&](void (*kernel)(Attention<T>), int lanes) {
                if (a.Nq == 0) return;
                const int64_t blocks = ceil_div(a.Nq * a.NH * lanes, ROW_KERNEL_THREADS);
                require(blocks < int64_t(1) << 31, op, ": ", a.Nq, " tokens of ", a.NH,
                        " heads are more than one launch can hold");
                kernel<<<unsigned(blocks), ROW_KERNEL_THREADS, 0, cuda_stream(stream)>>>(a);
                check_launch(op, stream);
            };
            cuda_check(cudaMemsetAsync(a.dq_sums, 0, size_t(a.Nq * a.NH * D) * sizeof(float), cuda_stream(stream)), op);
            launch_rows(delta_hopper_kernel<T, D>, D / 8);
            if (a.Nk > 0)
                launch<Sizes>(op, single_pass_hopper_kernel<T, D>, a, maps_of(Sizes::BQ, Sizes::BN),
                              key_schedule(Sizes::BN, 8), stream);
            launch_rows(round_sums_hopper_kernel<T, D>, D / 16);
            return;
        }
        if (a.Nq > 0) {
            using Sizes = QueryPassSizes<D>;
            const Schedule schedule = make_schedule(a.S, a.NH, tiles_of(sequences.max_q, Sizes::BM),
                                                    sequences.max_k * D * 4 * a.NKV / a.NH, a.next_task);
            launch<Sizes>(op, query_pass_hopper_kernel<T, D>, a, maps_of(Sizes::BM, Sizes::BN), schedule, stream);
        }
        if (a.Nk > 0) {
            using Sizes = KeyPassSizes<D>;
            launch<Sizes>(op, key_pass_hopper_kernel<T, D>, a, maps_of(Sizes::BQ, Sizes::BN),
                          key_schedule(Sizes::BN, 4), stream);
        }
    });
}

#define INSTANTIATE(T)                                                                                           \
    template bool hopper_attention_takes(const Attention<T>&);                                                   \
    template void hopper_attention_forward(const char*, const Attention<T>&, const AttentionSequences&, Stream); \
    template void hopper_attention_backward(const char*, const Attention<T>&, const AttentionSequences&, Stream);
INSTANTIATE(bf16)
INSTANTIATE(fp16)
#undef INSTANTIATE
