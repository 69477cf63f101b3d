// Common code of the kernels for Hopper GPUs: shared memory, the packs that a thread copies and transforms, the decays
// of a chunk and the loop over the chunks of a split. Included by *_hopper.cu only, which are compiled for sm_90a
// alone.
//
// A warpgroup computes with wgmma: it has the 64 rows of a chunk, 64 columns of the result and 64 columns of the state.
// Heads of 128 take two warpgroups.
#pragma once

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"
#include "kernels/linear_attention/linear_attention.cuh"

namespace linear_attention::hopper {

using T = bf16;

constexpr int TOKENS = 64, PACK = FULL_WIDTH<T>;
constexpr int PANEL = TOKENS * PANEL_ROW_BYTES;  // bytes of 64 columns of a tile

// Blocks per SM. NORMALISED: attention type linear; else gated_linear. GROUPED: DV and DK of KV heads with several
// query heads.
template <int D, Result RESULT, bool NORMALISED, bool GROUPED = false>
constexpr int BLOCKS = D > 64                                             ? (state_only(RESULT) ? 2 : 1)
                       : RESULT == Result::DV && (GROUPED || !NORMALISED) ? 2
                                                                          : 3;

// The layout of shared memory, in bytes.
template <int D, Result RESULT, bool NORMALISED>
struct Config {
    static constexpr bool STATE_ONLY = state_only(RESULT), REVERSED = is_reversed(RESULT), GATED = !NORMALISED;
    static constexpr int WARPGROUPS = D / 64, THREADS = WARPGROUPS * WARPGROUP, TILE = WARPGROUPS * PANEL;
    static constexpr int INPUTS = STATE_ONLY ? 2 : RESULT == Result::DV ? 4 : 3;  // a, b, c and, for dk, v
    static constexpr int STAGES = !STATE_ONLY ? 2 : D == 64 ? 4 : 3;
    // After the stages: the state; gated: c, decayed; DQ: the queries, and normalised: out of the forward pass.
    static constexpr int STATE = STAGES * INPUTS * TILE, DECAYED = STATE + (STATE_ONLY ? 0 : D * D * 2),
                         QUERIES = DECAYED + (NORMALISED || STATE_ONLY ? 0 : TILE),
                         OUT = QUERIES + (RESULT == Result::DQ ? TILE : 0),
                         FLOATS = OUT + (RESULT == Result::DQ && NORMALISED ? TILE : 0);
    // Then floats. Each stage: d and δ of each warpgroup's rows (normalised), or the gates for each warp (gated).
    static constexpr int STAGE_FLOATS = WARPGROUPS * (NORMALISED ? 2 * TOKENS : 4 * TOKENS);
    static constexpr int ROWS = STAGES * STAGE_FLOATS;  // [WARPGROUPS][TOKENS]: partial sums of d or δ
    static constexpr int COLUMNS =
        ROWS + (NORMALISED && (RESULT == Result::Out || RESULT == Result::DQ) ? WARPGROUPS * TOKENS : 0);
    static constexpr int READ_DECAY = COLUMNS + TOKENS;  // [TOKENS]; COLUMNS [TOKENS]: DK's δ, or Γ·log₂e where gated
    static constexpr int VECTOR = READ_DECAY + (NORMALISED ? 0 : TOKENS);   // [2][D]: z or r before and after a step
    static constexpr int VECTOR_PARTS = VECTOR + (NORMALISED ? 2 * D : 0);  // [4][D]
    static constexpr int END = VECTOR_PARTS + (NORMALISED ? 4 * D : 0);
    static constexpr int BYTES = FLOATS + END * int(sizeof(float));
    static_assert(BLOCKS<D, RESULT, NORMALISED> * (BYTES + 1024) <= 228 * 1024);
};

// A thread's position in the tiles: the thread copies and transforms the packs (row(i), column()), i < 4, of each tile,
// and holds accumulators of rows row0() and row0() + 8.
struct ThreadPosition {
    int warpgroup, warp, lane;
    __device__ __forceinline__ ThreadPosition() {
        const int all = __shfl_sync(ALL_LANES, int(threadIdx.x) / WARP, 0);
        warpgroup = all / 4;
        warp = all % 4;
        lane = lane_id();
    }
    __device__ __forceinline__ int row(int i) const { return warp * 16 + i * 4 + lane / 8; }
    __device__ __forceinline__ int column() const { return warpgroup * 64 + lane % 8 * PACK; }
    __device__ __forceinline__ int offset(int i) const { return swizzled_offset<TOKENS>(row(i), column()); }
    __device__ __forceinline__ int row0() const { return warp * 16 + lane / 4; }
};

// ---- a thread's packs

// Starts the copies of this thread's packs of a tile; zeros from row `count` and from column `columns` on.
__device__ __forceinline__ void copy_packs(const ThreadPosition& thread, unsigned char* tile, const Heads<T>& rows,
                                           int64_t token, int64_t head, int count, int columns) {
    const T* src = rows.at(token, head);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = thread.row(i) < count && thread.column() < columns;
        cp_async_16(tile + thread.offset(i), inside ? src + thread.row(i) * rows.token_stride + thread.column() : src,
                    inside);
    }
}

// f(x, i) changes each pack x, given as floats.
template <typename F>
__device__ __forceinline__ void transform_packs(const ThreadPosition& thread, const unsigned char* from,
                                                unsigned char* to, int count, int columns, F f) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(from + thread.offset(i)));
        f(x, i);
        Pack<T, PACK> pack = as_pack<T>(x);
        if (thread.row(i) >= count || thread.column() >= columns) pack = {};
        *reinterpret_cast<uint4*>(to + thread.offset(i)) = reinterpret_cast<const uint4&>(pack);
    }
}

// Multiplies each row by factor(i).
template <typename F>
__device__ __forceinline__ void scale_packs(const ThreadPosition& thread, const unsigned char* from, unsigned char* to,
                                            int count, int columns, F factor) {
    transform_packs(thread, from, to, count, columns, [&](Floats<PACK>& x, int i) {
        const float f = factor(i);
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] *= f;
    });
}

// Gradients become ĝ: rows divided by d.
__device__ __forceinline__ void divide_packs(const ThreadPosition& thread, unsigned char* tile, const float* norm,
                                             int count, int columns) {
    scale_packs(thread, tile, tile, count, columns,
                [&](int i) { return thread.row(i) < count ? reciprocal_for<T>(norm[thread.row(i)]) : 0.0f; });
}

// φ = max(x + 1, min(exp(x), 1)): the greater is x + 1 above 0 and the exponential below. bf16x2 arithmetic except for
// the exponentials; rounding these to T first gives the same result.
__device__ __forceinline__ uint32_t features_of(uint32_t two) {
    Pack<T, 2> pack;
    pack.word[0] = two;
    const Floats<2> x = as_floats(pack);
    const uint32_t exponentials = pack_two<T>(exp2_fast(x[0] * LOG2E), exp2_fast(x[1] * LOG2E));
    const __nv_bfloat162 one = __float2bfloat162_rn(1.0f);
    const __nv_bfloat162 y = __hmax2_nan(__hadd2(reinterpret_cast<const __nv_bfloat162&>(two), one),
                                         __hmin2_nan(reinterpret_cast<const __nv_bfloat162&>(exponentials), one));
    return reinterpret_cast<const uint32_t&>(y);
}

__device__ __forceinline__ void apply_features(const ThreadPosition& thread, unsigned char* tile, int count,
                                               int columns) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4& pack = *reinterpret_cast<uint4*>(tile + thread.offset(i));
        uint4 y = {features_of(pack.x), features_of(pack.y), features_of(pack.z), features_of(pack.w)};
        if (thread.row(i) >= count || thread.column() >= columns) y = {};
        pack = y;
    }
}

// Sum over the eight lanes that hold the packs of a row.
__device__ __forceinline__ float pack_row_sum(float x) {
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Adds each column of this warp's 16 rows of a tile to `sum`, rows weighted. The warp has transformed these rows
// itself.
__device__ __forceinline__ void sum_columns(const ThreadPosition& thread, const unsigned char* tile,
                                            const float* weights, float (&sum)[PACK]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(tile + thread.offset(i)));
        const float weight = weights ? weights[thread.row(i)] : 1.0f;
#pragma unroll
        for (int j = 0; j < PACK; j++) sum[j] = fmaf(weight, x[j], sum[j]);
    }
}
// The sums of sum_columns over all lanes; lanes 0 to 7 store them as this warp's row of parts [4][D].
template <int D>
__device__ __forceinline__ void store_column_sums(const ThreadPosition& thread, float (&sum)[PACK], float* parts) {
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 8);
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 16);
    }
    if (thread.lane < 8) {
#pragma unroll
        for (int j = 0; j < PACK; j++) parts[thread.warp * D + thread.column() + j] = sum[j];
    }
}

// Starts the copies of d and, where given, δ of this warp's rows.
__device__ __forceinline__ void copy_rows(const ThreadPosition& thread, float* dst, const float* norm,
                                          const float* delta, int count) {
    const int row = thread.warp * 16 + thread.lane % 16;
    const float* src = thread.lane < 16 ? norm : delta;
    if (src)
        cp_async_4(dst + (thread.warpgroup * 2 + thread.lane / 16) * TOKENS + row, row < count ? src + row : src,
                   row < count);
}
// Starts the copies of the gates of all rows; each warp has its own copy.
__device__ __forceinline__ void copy_gates(const ThreadPosition& thread, float* dst, const float* gate, int64_t stride,
                                           int count) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int i = thread.lane + j * WARP;
        cp_async_4(dst + (thread.warpgroup * 4 + thread.warp) * TOKENS + i, i < count ? gate + i * stride : gate,
                   i < count);
    }
}

// ---- decays

// The decays of a chunk; each lane holds those of tokens 2·lane and 2·lane + 1.
struct Decays {
    float gamma[2];          // Γ·log₂e
    float read[2];           // of the state until the token reads it
    float write[2];          // of the token's outer product until the end of the chunk
    float whole, log_whole;  // of the whole chunk

    __device__ __forceinline__ Decays(const float* gates, bool reversed) {
        const int lane = lane_id();
        const float first = gates[2 * lane] * LOG2E, both = fmaf(gates[2 * lane + 1], LOG2E, first);
        float before = warp_inclusive_sum(both);
        log_whole = __shfl_sync(ALL_LANES, before, WARP - 1);
        whole = exp2_fast(log_whole);
        before -= both;
        gamma[0] = before + first;
        gamma[1] = before + both;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float from_start = exp2_fast(gamma[i]), to_end = exp2_fast(log_whole - gamma[i]);
            read[i] = reversed ? to_end : from_start;
            write[i] = reversed ? from_start : to_end;
        }
    }
    __device__ __forceinline__ float write_of_row(int row) const {
        const float x = __shfl_sync(ALL_LANES, write[0], row / 2), y = __shfl_sync(ALL_LANES, write[1], row / 2);
        return row % 2 ? y : x;
    }
};

// ---- the loop over a split

// A step is a chunk and, where a KV head has several query heads, one of these.
struct ChunkLoop {
    Sequence seq;
    int begin, end, chunks, heads, steps;
    int64_t kv, first_head;
    bool reversed;

    __device__ __forceinline__ bool first_of_chunk(int step) const { return heads == 1 || step % heads == 0; }
    __device__ __forceinline__ bool last_of_chunk(int step) const { return heads == 1 || step % heads == heads - 1; }
    __device__ __forceinline__ int chunk_begin(int step) const {
        const int chunk = heads == 1 ? step : step / heads;
        return begin + (reversed ? chunks - 1 - chunk : chunk) * TOKENS;
    }
    __device__ __forceinline__ int count(int step) const { return min(TOKENS, end - chunk_begin(step)); }
    __device__ __forceinline__ int64_t token(int step) const { return seq.first + chunk_begin(step); }
    __device__ __forceinline__ int64_t key_head(int step) const { return first_head + (heads == 1 ? 0 : step % heads); }
};

// of_queries: task.head is a query head, else a KV head. grouped: the steps include the query heads of a KV head.
__device__ __forceinline__ ChunkLoop loop_of(const Params<T>& p, const Task& task, bool of_queries, bool reversed,
                                             bool grouped) {
    ChunkLoop loop;
    loop.seq = sequence_of(p.cum, task.sequence, p.N);
    loop.begin = task.split * p.split_length;
    loop.end = min(loop.begin + p.split_length, loop.seq.length);
    loop.chunks = (loop.end - loop.begin + TOKENS - 1) / TOKENS;
    const int group = int(p.NH / p.NKV);
    loop.reversed = reversed;
    loop.heads = grouped ? group : 1;
    loop.steps = loop.chunks * loop.heads;
    loop.kv = task.head / (of_queries ? group : 1);
    loop.first_head = reversed ? loop.kv * group : loop.kv;
    return loop;
}

// ---- the state

// A warpgroup's 64 columns of the state: rows m·64 + row0() + 0, 8.
template <int D>
using State = float[D / 64][8][4];

// f(element in registers, element in global memory)
template <int D, typename F>
__device__ __forceinline__ void for_each_state(const ThreadPosition& thread, State<D>& state, const Params<T>& p,
                                               float* memory, F f) {
#pragma unroll
    for (int m = 0; m < D / 64; m++)
        for_each(state[m], m * 64 + thread.row0(), thread.warpgroup * 64, [&](float& x, int row, int column) {
            if (row < p.E && column < p.M) f(x, memory[row * p.state_row + column * p.state_column]);
        });
}

template <int D>
__device__ __forceinline__ void pin_state(State<D>& state) {
#pragma unroll
    for (int m = 0; m < D / 64; m++) pin_registers(state[m]);
}

// state += Bᵀ·C; one wgmma group.
template <int D>
__device__ __forceinline__ void add_to_state(const ThreadPosition& thread, State<D>& state, uint32_t b, uint32_t c) {
    const uint32_t right = mn_major_descriptor<TOKENS>(c + thread.warpgroup * PANEL);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < D / 64; m++)
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            wgmma_k16<T, true, true>(state[m], mn_major_descriptor<TOKENS>(b + m * PANEL) + mn_major_step(k),
                                     right + mn_major_step(k), true);
    wgmma_commit();
}

// ---- launch

// f(std::integral_constant<int, D>, std::bool_constant<NORMALISED>)
template <typename F>
void dispatch_config(const Params<T>& p, F f) {
    const auto with_columns = [&](auto D) {
        if (p.normalise)
            f(D, std::true_type{});
        else
            f(D, std::false_type{});
    };
    if (hopper_columns(p) == 64)
        with_columns(std::integral_constant<int, 64>{});
    else
        with_columns(std::integral_constant<int, 128>{});
}

template <typename Kernel>
void prepare_launch(const char* op, Kernel kernel, int bytes, int64_t blocks) {
    require(blocks < int64_t(1) << 31, op, ": ", blocks,
            " blocks are more than one launch can hold; use fewer or shorter sequences");
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
}

// linear_attention_state_hopper.cu: KeyState or QueryState.
void launch_state(const char* op, Result result, const Params<T>& p, int64_t blocks, Stream stream);

}  // namespace linear_attention::hopper
