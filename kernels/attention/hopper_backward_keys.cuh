// Common code of the two backward passes over keys on Hopper GPUs: the key pass (attention_backward_hopper.cu) and the
// single pass (attention_single_pass_hopper.cu). A consumer warpgroup owns 64 keys of a KV head and walks over the
// queries of all heads that share it. It computes Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, so that Pᵀ and dSᵀ are already laid out as
// operand A of dV += Pᵀ·dO and dK += dSᵀ·Q.
#pragma once

#include "kernels/attention/hopper_tiles.cuh"
#include "kernels/cuda/launch_shapes.h"

namespace hopper {

// Sᵀ becomes Pᵀ = 2^(c·S − lse·log₂e), c = scale·log₂e.
template <int NT>
__device__ __forceinline__ void scores_to_probabilities(float (&s)[NT][4], const float* lse, float c) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + t * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) s[t][e] = exp2_fast(fmaf(s[t][e], c, (e % 2 ? two.y : two.x) * -LOG2E));
    }
}
// dPᵀ becomes dSᵀ = Pᵀ·(dPᵀ − delta).
template <int NT>
__device__ __forceinline__ void probability_to_score_gradients(float (&dp)[NT][4], const float (&p)[NT][4],
                                                               const float* delta) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float2 two = *reinterpret_cast<const float2*>(delta + t * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[t][e] = p[t][e] * (dp[t][e] - (e % 2 ? two.y : two.x));
    }
}

constexpr int KEY_PASS_BN = int(gpu_scratch::HOPPER_KEY_ROWS), KEY_PASS_WARPGROUPS = KEY_PASS_BN / 64, KEY_PASS_BQ = 64;

// --- sums of the gradients over tokens (AttentionGradientSums)
//
// Three warps that have nothing else to do add up the rows of a tile where the consumers leave them rounded for TMA, in
// shared memory. Each takes every third row and stores a row of sums.

// Whether the passes compute the sums: a lane of sum_rows() adds up two columns, so up to 64.
template <int D>
constexpr bool SUMS = D <= gpu_scratch::HOPPER_SUM_MAX_HS;
constexpr int SUMMING_WARPS = int(gpu_scratch::HOPPER_SUM_ROWS);
static_assert(SUMMING_WARPS == WARPGROUP / WARP - 1);

// The consumers' end: wait() before they write the tile, done() when their rows are written.
class SummedTile {
  public:
    __device__ __forceinline__ SummedTile(MbarrierRing<1>& ring, const float* sums) : ring_(ring), wanted_(sums) {}
    __device__ __forceinline__ void wait() {
        if (wanted_) ring_.wait_empty(at_);
    }
    __device__ __forceinline__ void done() {
        if (!wanted_) return;
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(&ring_.full[0]);
        at_.advance();
    }

  private:
    MbarrierRing<1>& ring_;
    RingPosition<1> at_;
    const bool wanted_;
};

// The warp's sums over its rows, of those from `begin` to `end`, to `to` [columns].
template <int ROWS, typename T>
__device__ __forceinline__ void sum_rows(float* to, int columns, const unsigned char* tile, int begin, int end,
                                         int warp) {
    const int column = lane_id() * 2;
    float2 sum = {0, 0};
#pragma unroll 4
    for (int row = begin + warp; row < end; row += SUMMING_WARPS) {
        const T* const two = reinterpret_cast<const T*>(tile + swizzled_offset<ROWS>(row, column));
        sum.x += as_float(two[0]);
        sum.y += as_float(two[1]);
    }
    if (column < columns) *reinterpret_cast<float2*>(to + column) = sum;
}
// The warp's row of the sums of a task's tile.
__device__ __forceinline__ int64_t sum_row(const Task& task, int warp) {
    return (int64_t(task.sequence) * task.tiles + task.rank) * SUMMING_WARPS + warp;
}

// Of the key pass, and of the single pass, which needs Extra too.
template <int D, int STAGES_, typename Extra>
struct KeySizes {
    static constexpr int WARPGROUPS = KEY_PASS_WARPGROUPS, BN = KEY_PASS_BN, BQ = KEY_PASS_BQ;
    static constexpr int STAGES = STAGES_;
    using Roles = hopper::Roles<WARPGROUPS>;
    // Whether dSᵀ·Q overlaps with the next scores: only D = 64 leaves registers for that.
    static constexpr bool OVERLAP = D <= 64;
    // Whether a matmul contracts over keys (dQ), so that keys past the last must be zeros.
    static constexpr bool CONTRACTS_KEYS = !std::is_empty_v<Extra>;
    // Whether dK and dV have tiles of their own, which are summed.
    static constexpr bool SEPARATE_TILES = SUMS<D> && !CONTRACTS_KEYS;
    struct Shared {
        alignas(SWIZZLE_ALIGNMENT) unsigned char k[BN * D * 2], v[BN * D * 2],
            dv[(SEPARATE_TILES ? 2 : 1) * BN * D * 2];
        alignas(SWIZZLE_ALIGNMENT) unsigned char q[STAGES][BQ * D * 2], dout[STAGES][BQ * D * 2];
        Extra extra;
        alignas(16) float lse[STAGES][BQ], delta[STAGES][BQ];
        MbarrierRing<1> kv_ring;
        MbarrierRing<STAGES> q_ring;
        MbarrierRing<1> summed;
        TaskRing tasks;
        Mbarrier loader;
        __device__ unsigned char* dk() { return SEPARATE_TILES ? dv + BN * D * 2 : dv; }
        __device__ void init() {
            kv_ring.init(Roles::CONSUMER_WARPS);
            q_ring.init(Roles::CONSUMER_WARPS, 1 + WARP);  // lse and delta: each lane arrives
            summed.init(SUMMING_WARPS, Roles::CONSUMER_WARPS);
            tasks.ring.init(Roles::CONSUMER_WARPS + (SEPARATE_TILES ? SUMMING_WARPS : 0));
            mbarrier_init(&loader, 1);
        }
    };
};

// f(head, m) for the blocks of queries of all heads that share the KV head, one head after another.
template <int BQ, typename F>
__device__ __forceinline__ void for_queries(int first_head, int group, const BlockRange<BQ>& blocks, F f) {
    for (int head = first_head; head < first_head + group; head++)
        for (int m = blocks.begin; m < blocks.end; m++) f(head, m);
}

// Sizes: KeyPassSizes or SinglePassSizes.
template <typename T, int D, typename Sizes>
__device__ __forceinline__ void key_pass_produce(const Attention<T>& a, const Maps& maps, const Schedule& schedule,
                                                 typename Sizes::Shared& shared) {
    constexpr int BN = Sizes::BN, BQ = Sizes::BQ;
    const int group = int(a.NH / a.NKV);
    TileLoader loader(&shared.loader);
    RingPosition<1> kv_at;
    RingPosition<Sizes::STAGES> at;
    TaskProducer<T> tasks(a, schedule, shared.tasks);
    for (Task task; tasks.next(task);) {
        if (task.sequence == a.S) continue;
        const Sequence& seq = task.seq;
        const int j0 = task.rank * BN;
        const BlockRange<BQ> blocks(queries_seeing(seq, j0, min(j0 + BN, seq.klen)));
        if (blocks.end <= blocks.begin) continue;
        shared.kv_ring.wait_empty(kv_at);
        loader.load<BN, D, 2>({shared.k, shared.v}, {&maps.k, &maps.v}, task.head, seq.k0 + j0, shared.kv_ring.full,
                              Sizes::CONTRACTS_KEYS ? seq.klen - j0 : BN);
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

// Keys after the last sequence get dk = dv = 0: one part of `parts`, by a warpgroup.
template <typename T>
__device__ __forceinline__ void zero_key_tail(const Attention<T>& a, int head, int part, int parts) {
    const int64_t first = max(0, a.cum_k[a.S]);
    zero_tail(a.dk, head, first, a.Nk, a.HS, part, parts, WARPGROUP);
    zero_tail(a.dv, head, first, a.Nk, a.HS, part, parts, WARPGROUP);
}

// Stores a warp's dk and dv of 16 keys of the task's sequence, from `first` on, through the rows of the block's tiles
// from tile_row on.
template <int BN, typename Shared, typename T, int NT>
__device__ __forceinline__ void store_key_gradients(const Attention<T>& a, const Maps& maps, const Task& task,
                                                    int first, Shared& shared, int tile_row, float (&dk)[NT][4],
                                                    const float (&dv)[NT][4]) {
    scale_all(dk, a.scale);
    const Sequence& seq = task.seq;
    const auto store = [&](const CUtensorMap* map, const Heads<T>& to, unsigned char* tile, const float(&c)[NT][4]) {
        store_rows<BN>(OutputRows<T>{map, to.at(seq.k0 + first, task.head), to.token_stride, task.head, seq.k0 + first,
                                     0, seq.klen - first, a.HS},
                       tile, tile_row, c);
    };
    store(&maps.dv, a.dv, shared.dv, dv);
    store(&maps.dk, a.dk, shared.dk(), dk);
}

// --- launch

template <typename T>
Maps backward_maps(const char* op, const Attention<T>& a, int q_rows, int k_rows) {
    Maps maps{};
    maps.q = make_tensor_map(op, a.q, a.Nq, a.NH, a.HS, q_rows);
    maps.k = make_tensor_map(op, a.k, a.Nk, a.NKV, a.HS, k_rows);
    maps.v = make_tensor_map(op, a.v, a.Nk, a.NKV, a.HS, k_rows);
    maps.dout = make_tensor_map(op, a.dout, a.Nq, a.NH, a.HS, q_rows);
    maps.dq = make_tensor_map(op, a.dq, a.Nq, a.NH, a.HS, 16);
    maps.dk = make_tensor_map(op, a.dk, a.Nk, a.NKV, a.HS, 16);
    maps.dv = make_tensor_map(op, a.dv, a.Nk, a.NKV, a.HS, 16);
    return maps;
}

// query_bytes: what the inner loop reads for each query and column.
template <typename T>
Schedule key_schedule(const Attention<T>& a, const AttentionSequences& sequences, int64_t D, int rows,
                      int query_bytes) {
    const Tiled keys{a.cum_k, a.Nk, rows};
    return make_schedule(a.S, a.NKV, tiles_of(sequences.max_k, rows),
                         sequences.max_q * D * query_bytes * (a.NH / a.NKV), a.next_task, keys);
}

// The whole backward pass as a single pass over keys, with dq added up in a.dq_sums: not deterministic
// (attention_single_pass_hopper.cu).
template <typename T>
void backward_single_pass(const char* op, const Attention<T>& a, const AttentionSequences& sequences, Stream stream);

}  // namespace hopper
