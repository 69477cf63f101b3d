// Linear attention on Hopper GPUs: bf16, heads of up to 128 columns (a multiple of 8), the two kinds that models have:
// L (elu + 1, normalised, no gate) and G (a gate alone).
//
// The walk is that of linear_attention.cu: a block owns a segment of a sequence and one head, and goes through it in
// chunks of 64 tokens with the state in registers. Here a warpgroup multiplies (wgmma): it has the 64 rows of the
// chunk, 64 columns of the result and as many of the state, and heads of 128 take two. dv and dk are made by one block,
// since they share all they read, and R: dv multiplies it by its rows, dk by its columns.
//
// A thread copies packs of its warp's 16 rows, of which it alone makes features, ĝ and δ when they have come: two
// barriers are all that a chunk needs, one before its products and one after them.
//
// Only builds for sm_90a have this file, and it is compiled for nothing else.
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"
#include "kernels/linear_attention/linear_attention.cuh"

namespace linear_attention {

namespace {

using T = bf16;

constexpr int TOKENS = 64, PACK = FULL_WIDTH<T>;
constexpr int PART = TOKENS * PANEL_ROW_BYTES;  // bytes of 64 columns of a tile

// Blocks of an SM. NORMALISED: kind L; else G. GROUPED: DV's KV heads have several query heads.
template <int D, Role ROLE, bool NORMALISED, bool GROUPED = false>
constexpr int BLOCKS = D > 64                                         ? (state_only(ROLE) ? 2 : 1)
                       : ROLE == Role::DV && (GROUPED || !NORMALISED) ? 2
                                                                      : 3;

// What lies where in shared memory, in bytes.
template <int D, Role ROLE, bool NORMALISED>
struct Sizes {
    static constexpr bool STATE_ONLY = state_only(ROLE);
    static constexpr int WARPGROUPS = D / 64, THREADS = WARPGROUPS * WARPGROUP, TILE = WARPGROUPS * PART;
    static constexpr int INPUTS = STATE_ONLY ? 2 : ROLE == Role::DV ? 4 : 3;  // a, b, c and, for dk, v
    static constexpr int STAGES = !STATE_ONLY ? 2 : D == 64 ? 4 : 3;
    // Then the state; G: c, decayed; DQ: the queries, and L: the result of the forward pass.
    static constexpr int STATE = STAGES * INPUTS * TILE, DECAYED = STATE + (STATE_ONLY ? 0 : D * D * 2),
                         QUERIES = DECAYED + (NORMALISED || STATE_ONLY ? 0 : TILE),
                         OUT = QUERIES + (ROLE == Role::DQ ? TILE : 0),
                         FLOATS = OUT + (ROLE == Role::DQ && NORMALISED ? TILE : 0);
    // Then floats. Of each stage, L: d and δ of a warpgroup's rows; G: the gates, for each warp.
    static constexpr int STAGE_FLOATS = WARPGROUPS * (NORMALISED ? 2 * TOKENS : 4 * TOKENS);
    static constexpr int ROWS = STAGES * STAGE_FLOATS;  // [WARPGROUPS][TOKENS]: parts of d's or δ's sums
    static constexpr int COLUMNS =
        ROWS + (NORMALISED && (ROLE == Role::Out || ROLE == Role::DQ) ? WARPGROUPS * TOKENS : 0);
    static constexpr int INTO = COLUMNS + TOKENS;  // [TOKENS]; COLUMNS [TOKENS]: DK's δ, G's Γ·log₂e
    static constexpr int VECTOR = INTO + (NORMALISED ? 0 : TOKENS);  // [2][D]: z or r, before a step and after it
    static constexpr int VECTOR_PARTS = VECTOR + (NORMALISED ? 2 * D : 0);  // [4][D]
    static constexpr int END = VECTOR_PARTS + (NORMALISED ? 4 * D : 0);
    static constexpr int BYTES = FLOATS + END * int(sizeof(float));
    static_assert(BLOCKS<D, ROLE, NORMALISED> * (BYTES + 1024) <= 228 * 1024);
};

// A thread's place: it copies and transforms packs (row(i), column) of tiles, i < 4, and has sums of rows row0 and
// row0 + 8.
struct Place {
    int warpgroup, warp, lane;
    __device__ __forceinline__ Place() {
        const int all = __shfl_sync(ALL_LANES, int(threadIdx.x) / WARP, 0);
        warpgroup = all / 4, warp = all % 4, lane = lane_id();
    }
    __device__ __forceinline__ int row(int i) const { return warp * 16 + i * 4 + lane / 8; }
    __device__ __forceinline__ int column() const { return warpgroup * 64 + lane % 8 * PACK; }
    __device__ __forceinline__ int offset(int i) const { return swizzled_offset<TOKENS>(row(i), column()); }
    __device__ __forceinline__ int row0() const { return warp * 16 + lane / 4; }
};

// This thread's packs of a tile; zeros from row `count` and from column `columns` on.
__device__ __forceinline__ void copy_packs(const Place& at, unsigned char* tile, const Heads<T>& rows, int64_t token,
                                           int64_t head, int count, int columns) {
    const T* src = rows.at(token, head);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = at.row(i) < count && at.column() < columns;
        cp_async_16(tile + at.offset(i), inside ? src + at.row(i) * rows.token_stride + at.column() : src, inside);
    }
}

// They become f(x, i); f gets the pack as floats.
template <typename F>
__device__ __forceinline__ void transform_packs(const Place& at, const unsigned char* from, unsigned char* to,
                                                int count, int columns, F f) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(from + at.offset(i)));
        f(x, i);
        Pack<T, PACK> pack = as_pack<T>(x);
        if (at.row(i) >= count || at.column() >= columns) pack = {};
        *reinterpret_cast<uint4*>(to + at.offset(i)) = reinterpret_cast<const uint4&>(pack);
    }
}

// Each row times factor(i).
template <typename F>
__device__ __forceinline__ void scale_packs(const Place& at, const unsigned char* from, unsigned char* to, int count,
                                            int columns, F factor) {
    transform_packs(at, from, to, count, columns, [&](Floats<PACK>& x, int i) {
        const float f = factor(i);
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] *= f;
    });
}

// Gradients become ĝ: rows divided by d.
__device__ __forceinline__ void divide_packs(const Place& at, unsigned char* tile, const float* norm, int count,
                                             int columns) {
    scale_packs(at, tile, tile, count, columns,
                [&](int i) { return at.row(i) < count ? reciprocal_for<T>(norm[at.row(i)]) : 0.0f; });
}

// φ = max(x + 1, min(exp(x), 1)): the greater is x + 1 above 0 and the exponential below. Two at a time, but for the
// exponentials: what is rounded to T first need not be rounded again.
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

__device__ __forceinline__ void apply_features(const Place& at, unsigned char* tile, int count, int columns) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4& pack = *reinterpret_cast<uint4*>(tile + at.offset(i));
        uint4 y = {features_of(pack.x), features_of(pack.y), features_of(pack.z), features_of(pack.w)};
        if (at.row(i) >= count || at.column() >= columns) y = {};
        pack = y;
    }
}

// Over the eight lanes that have the packs of a row.
__device__ __forceinline__ float pack_row_sum(float x) {
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Sums of columns over this warp's 16 rows of a tile that its threads have transformed, rows weighted.
__device__ __forceinline__ void sum_columns(const Place& at, const unsigned char* tile, const float* weights,
                                            float (&sum)[PACK]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(tile + at.offset(i)));
        const float weight = weights ? weights[at.row(i)] : 1.0f;
#pragma unroll
        for (int j = 0; j < PACK; j++) sum[j] = fmaf(weight, x[j], sum[j]);
    }
}
__device__ __forceinline__ void sum_over_rows(float (&sum)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 8);
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 16);
    }
}

// The gates of a chunk: what a lane has of its tokens 2·lane and 2·lane + 1.
struct Decays {
    float gamma[2];          // Γ·log₂e
    float into[2];           // what the state decays by until it reaches the token
    float within[2];         // what the token's product decays by until it is handed on
    float whole, log_whole;  // all of the chunk

    __device__ __forceinline__ Decays(const float* gates, bool reversed) {
        const int lane = lane_id();
        const float first = gates[2 * lane] * LOG2E, both = fmaf(gates[2 * lane + 1], LOG2E, first);
        float before = both;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const float other = __shfl_up_sync(ALL_LANES, before, offset);
            if (lane >= offset) before += other;
        }
        log_whole = __shfl_sync(ALL_LANES, before, WARP - 1);
        whole = exp2_fast(log_whole);
        before -= both;
        gamma[0] = before + first, gamma[1] = before + both;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float from_start = exp2_fast(gamma[i]), to_end = exp2_fast(log_whole - gamma[i]);
            into[i] = reversed ? to_end : from_start, within[i] = reversed ? from_start : to_end;
        }
    }
    __device__ __forceinline__ float within_row(int row) const {
        const float x = __shfl_sync(ALL_LANES, within[0], row / 2), y = __shfl_sync(ALL_LANES, within[1], row / 2);
        return row % 2 ? y : x;
    }
};

// The steps of a block's walk: of each chunk, where a KV head has several query heads, these in turn.
struct Walk {
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

__device__ __forceinline__ Walk walk_of(const Product<T>& p, const Task& task, bool of_queries, bool reversed,
                                        bool grouped) {
    Walk w;
    w.seq = sequence_of(p.cum, task.sequence, p.N);
    w.begin = task.segment * p.segment_length, w.end = min(w.begin + p.segment_length, w.seq.length);
    w.chunks = (w.end - w.begin + TOKENS - 1) / TOKENS;
    const int group = int(p.NH / p.NKV);
    w.reversed = reversed, w.heads = grouped ? group : 1, w.steps = w.chunks * w.heads;
    w.kv = task.head / (of_queries ? group : 1);
    w.first_head = reversed ? w.kv * group : w.kv;
    return w;
}

// A warpgroup's columns of the state: rows m·64 + row0 + 0, 8.
template <int D>
using State = float[D / 64][8][4];

// f(number in registers, number in memory)
template <int D, typename F>
__device__ __forceinline__ void for_state(const Place& at, State<D>& state, const Product<T>& p, float* memory, F f) {
#pragma unroll
    for (int m = 0; m < D / 64; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = m * 64 + at.row0() + e / 2 * 8,
                          column = at.warpgroup * 64 + n * 8 + at.lane % 4 * 2 + e % 2;
                if (row < p.E && column < p.M) f(state[m][n][e], memory[row * p.state_row + column * p.state_column]);
            }
}

template <int D>
__device__ __forceinline__ void scale_state(State<D>& state, float factor) {
#pragma unroll
    for (int i = 0; i < D / 64 * 32; i++) state[i / 32][i / 4 % 8][i % 4] *= factor;
}

// state += Bᵀ·C; a group of its own.
template <int D>
__device__ __forceinline__ void add_to_state(const Place& at, State<D>& state, uint32_t b, uint32_t c) {
    const uint32_t right = mn_major_descriptor<TOKENS>(c + at.warpgroup * PART);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < D / 64; m++)
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            wgmma_k16<T, true, true>(state[m], mn_major_descriptor<TOKENS>(b + m * PART) + mn_major_step(k),
                                     right + mn_major_step(k), true);
    wgmma_commit();
}

template <int D>
__device__ __forceinline__ void pin_state(State<D>& state) {
#pragma unroll
    for (int m = 0; m < D / 64; m++) pin_registers(state[m]);
}

// A step's d and, where given, δ of this warp's rows on their way to shared memory; or the gates of all rows, which
// each warp has for itself.
__device__ __forceinline__ void copy_rows(const Place& at, float* dst, const float* norm, const float* delta,
                                          int count) {
    const int row = at.warp * 16 + at.lane % 16;
    const float* src = at.lane < 16 ? norm : delta;
    if (src)
        cp_async_4(dst + (at.warpgroup * 2 + at.lane / 16) * TOKENS + row, row < count ? src + row : src, row < count);
}
__device__ __forceinline__ void copy_gates(const Place& at, float* dst, const float* gate, int64_t stride, int count) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int i = at.lane + j * WARP;
        cp_async_4(dst + (at.warpgroup * 4 + at.warp) * TOKENS + i, i < count ? gate + i * stride : gate, i < count);
    }
}

// Zeros for the tokens after the last sequence.
template <Role ROLE>
__device__ __forceinline__ void zero_tail(const Product<T>& p, const Task& task) {
    const int64_t first = max(0, p.cum[p.S]);
    for (int64_t token = first + task.segment; token < p.N; token += p.segments) {
        for (int c = threadIdx.x; c < p.M; c += blockDim.x) p.out.at(token, task.head)[c] = T{};
        if (ROLE == Role::Out && p.norm && threadIdx.x == 0) p.norm[task.head * p.norm_stride + token] = 0;
    }
}

// Out, DQ, or DV and DK together: `p` is then DV's product, `other` DK's.
template <int D, Role ROLE, bool NORMALISED, bool GROUPED>
__global__ void __launch_bounds__((Sizes<D, ROLE, NORMALISED>::THREADS), (BLOCKS<D, ROLE, NORMALISED, GROUPED>))
    product_hopper_kernel(const __grid_constant__ Product<T> p, const __grid_constant__ Product<T> other) {
    using Z = Sizes<D, ROLE, NORMALISED>;
    constexpr int TILE = Z::TILE, WARPGROUPS = Z::WARPGROUPS;
    constexpr bool REVERSED = ROLE == Role::DV, GATED = !NORMALISED;
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    unsigned char *const state_tile = memory + Z::STATE, *const queries = memory + Z::QUERIES,
                         *const forward_out = memory + Z::OUT;
    float *const floats = reinterpret_cast<float*>(memory + Z::FLOATS), *const row_parts = floats + Z::ROWS,
                 *const vectors = floats + Z::VECTOR, *const vector_parts = floats + Z::VECTOR_PARTS,
                 *const gamma = floats + Z::COLUMNS, *const into = floats + Z::INTO;
    float* const delta_tile = gamma;  // L

    pdl_wait();
    pdl_launch_dependents();
    const Task task = task_of(1, REVERSED ? p.NKV : p.NH, p.segments);
    if (task.sequence == p.S) {
        zero_tail<ROLE>(p, task);
        if (REVERSED) zero_tail<ROLE>(other, task);
        return;
    }
    const Walk walk = walk_of(p, task, !REVERSED, REVERSED, GROUPED);
    if (walk.begin >= walk.end) return;
    const Place at;
    const int row0 = at.row0(), column0 = at.warpgroup * 64 + at.lane % 4 * 2;  // of this thread's sums

    const auto load = [&](int step) {
        const int count = walk.count(step), stage = step % 2;
        const int64_t token = walk.token(step), key_head = walk.key_head(step);
        unsigned char* tiles = memory + stage * Z::INPUTS * TILE;
        float* rows = floats + stage * Z::STAGE_FLOATS;
        copy_packs(at, tiles, p.a, token, task.head, count, p.E);
        copy_packs(at, tiles + TILE, p.b, token, key_head, count, p.E);
        copy_packs(at, tiles + 2 * TILE, p.c, token, key_head, count, p.M);
        if constexpr (REVERSED) copy_packs(at, tiles + 3 * TILE, other.a, token, task.head, count, other.E);
        if constexpr (NORMALISED && ROLE == Role::DQ) {
            copy_rows(at, rows, p.norm + task.head * p.norm_stride + token, nullptr, count);
            copy_packs(at, forward_out, p.forward_out, token, task.head, count, p.E);
        }
        if constexpr (NORMALISED && REVERSED)
            copy_rows(at, rows, p.norm + key_head * p.norm_stride + token, p.delta + key_head * p.N + token, count);
        if constexpr (GATED) copy_gates(at, rows, p.gate + token * p.gate_stride + walk.kv, p.gate_stride, count);
    };
    // DQ needs the queries only where a step ends. Copies form groups: a step's tiles, its queries, the next step's
    // tiles.
    const auto load_queries = [&](int step) {
        if (step < walk.steps) copy_packs(at, queries, p.inputs, walk.token(step), task.head, walk.count(step), p.M);
        cp_async_commit();
    };
    constexpr int LATER_GROUPS = ROLE == Role::DQ ? 1 : 0;
    load(0);
    cp_async_commit();
    if constexpr (ROLE == Role::DQ) load_queries(0);

    State<D> state = {};
    if (NORMALISED && int(threadIdx.x) < D) vectors[threadIdx.x] = 0;
    if (p.has_states) {
        float* const start =
            p.states + ((task.sequence * (p.segments + 1) + task.segment) * p.NKV + walk.kv) * p.state_size;
        for_state<D>(at, state, p, start, [](float& x, float y) { x = y; });
        if (NORMALISED && int(threadIdx.x) < (ROLE == Role::DQ ? p.M : p.E))
            vectors[threadIdx.x] = start[p.state_vector + threadIdx.x];
    }
    if constexpr (NORMALISED) __syncthreads();
    float o[8][4] = {}, o_keys[8][4] = {};  // o_keys: dk's, beside dv's

    for (int step = 0; step < walk.steps; step++) {
        const int count = walk.count(step);
        const int64_t token = walk.token(step);
        const bool first_head = !GROUPED || walk.first_of_chunk(step), last_head = !GROUPED || walk.last_of_chunk(step);
        const float* const vector = vectors + step % 2 * D;
        unsigned char *const a_tile = memory + step % 2 * Z::INPUTS * TILE, *const b_tile = a_tile + TILE,
                             *const c_tile = b_tile + TILE, *const value_tile = c_tile + TILE;
        const float* const rows = floats + step % 2 * Z::STAGE_FLOATS;
        const unsigned char* const handed_on = GATED ? memory + Z::DECAYED : c_tile;  // by the chunk

        cp_async_wait<LATER_GROUPS>();
        __syncwarp();
        float whole = 1;
        if constexpr (NORMALISED) {
            const float *norm = rows + at.warpgroup * 2 * TOKENS, *delta = norm + TOKENS;
            float sum[PACK] = {};
            if constexpr (ROLE == Role::Out) {
                apply_features(at, b_tile, count, p.E);
                apply_features(at, a_tile, count, p.E);
                const Floats<PACK> z = load_floats<PACK>(vector + at.column());
#pragma unroll
                for (int i = 0; i < 4; i++) {  // φ(q)·z
                    const Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(a_tile + at.offset(i)));
                    float d = 0;
#pragma unroll
                    for (int j = 0; j < PACK; j++) d = fmaf(x[j], z[j], d);
                    d = pack_row_sum(d);
                    if (at.lane % 8 == 0) row_parts[at.warpgroup * TOKENS + at.row(i)] = d;
                }
                sum_columns(at, b_tile, nullptr, sum);
            }
            if constexpr (ROLE == Role::DQ) {
                apply_features(at, c_tile, count, p.M);
                divide_packs(at, a_tile, norm, count, p.E);
#pragma unroll
                for (int i = 0; i < 4; i++) {  // δ, from ĝ as it is multiplied
                    const Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(a_tile + at.offset(i))),
                                       y = load_floats<PACK>(reinterpret_cast<const T*>(forward_out + at.offset(i)));
                    float d = 0;
#pragma unroll
                    for (int j = 0; j < PACK; j++) d = fmaf(x[j], -y[j], d);
                    d = pack_row_sum(d);
                    if (at.lane % 8 == 0) row_parts[at.warpgroup * TOKENS + at.row(i)] = d;
                }
                sum_columns(at, c_tile, nullptr, sum);
            }
            if constexpr (REVERSED) {
                apply_features(at, a_tile, count, p.E);
                apply_features(at, b_tile, count, p.E);
                divide_packs(at, c_tile, norm, count, p.M);
                if (at.warpgroup == 0 && at.lane < 16)
                    delta_tile[at.warp * 16 + at.lane] = delta[at.warp * 16 + at.lane];
                sum_columns(at, b_tile, delta, sum);
            }
            sum_over_rows(sum);
            if (at.lane < 8) {
#pragma unroll
                for (int j = 0; j < PACK; j++) vector_parts[at.warp * D + at.column() + j] = sum[j];
            }
        } else {
            const Decays decays(rows + (at.warpgroup * 4 + at.warp) * TOKENS, REVERSED);
            whole = decays.whole;
            if (at.warpgroup == 0 && at.warp == 0)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    gamma[2 * at.lane + i] = decays.gamma[i], into[2 * at.lane + i] = decays.into[i];
            scale_packs(at, c_tile, memory + Z::DECAYED, count, p.M,
                        [&](int i) { return decays.within_row(at.row(i)); });
        }
        if (first_head) {
#pragma unroll
            for (int m = 0; m < D / 64; m++) {
                uint32_t rounded[4][4];
                round_to_A<T>(rounded, state[m]);
                store_rounded<D>(state_tile + at.warpgroup * D * PANEL_ROW_BYTES, m * 64 + at.warp * 16, rounded);
            }
        }
        fence_async_proxy();
        __syncthreads();  // tiles are ready
        if (step + 1 < walk.steps) load(step + 1);
        cp_async_commit();
        if (NORMALISED && int(threadIdx.x) < D) {
            const float* part = vector_parts + threadIdx.x;
            vectors[(step + 1) % 2 * D + threadIdx.x] =
                vector[threadIdx.x] + ((part[0] + part[D]) + (part[2 * D] + part[3 * D]));
        }
        float row_sums[2] = {};  // Out: d without ε; DQ: δ
        if constexpr (NORMALISED && !REVERSED) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int w = 0; w < WARPGROUPS; w++) row_sums[half] += row_parts[w * TOKENS + row0 + half * 8];
            if (ROLE == Role::DQ && at.warpgroup == 0 && at.lane % 4 == 0)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (row0 + half * 8 < count) p.delta[task.head * p.N + token + row0 + half * 8] = row_sums[half];
        }

        // Rows a, their products with rows b, and these times c's columns.
        const auto multiply = [&](auto role, float(&sums)[8][4]) {
            constexpr Role R = decltype(role)::value;
            const uint32_t a = shared_address(R == Role::DK ? value_tile : a_tile),
                           b = shared_address(R == Role::DK ? c_tile : b_tile),
                           c = shared_address(R == Role::DK ? b_tile : c_tile), s_tile = shared_address(state_tile);
            float s[8][4];
            wgmma_ABt<T, TOKENS, D>(s, a, b);
            if (first_head) {
                const uint32_t left = k_major_descriptor(a);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    if constexpr (R == Role::DK)
                        wgmma_k16<T, false, false>(
                            sums, left + k_major_step<TOKENS>(k),
                            k_major_descriptor(s_tile + at.warpgroup * 64 * PANEL_ROW_BYTES) + k_major_step<D>(k),
                            k > 0);
                    else
                        wgmma_k16<T, false, true>(
                            sums, left + k_major_step<TOKENS>(k),
                            mn_major_descriptor<D>(s_tile + at.warpgroup * D * PANEL_ROW_BYTES) + mn_major_step(k),
                            k > 0);
                }
                wgmma_commit();
            }
            wgmma_wait<0>();
            pin_registers(s);
            pin_registers(sums);
            if (GATED && R != Role::DK && first_head) scale_state<D>(state, whole), pin_state<D>(state);
            float row_gamma[2] = {};
            if constexpr (GATED) row_gamma[0] = gamma[row0], row_gamma[1] = gamma[row0 + 8];
            if (first_head && (GATED || R == Role::DQ || R == Role::DK)) {
                float factor[2] = {1, 1};
                if constexpr (GATED) factor[0] = into[row0], factor[1] = into[row0 + 8];
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    Floats<2> v = {};
                    if constexpr (NORMALISED) v = load_floats<2>(vector + column0 + n * 8);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sums[n][e] = GATED           ? sums[n][e] * factor[e / 2]
                                     : R == Role::DQ ? fmaf(row_sums[e / 2], v[e % 2], sums[n][e])
                                                     : sums[n][e] + v[e % 2];
                }
            }
            float score_sums[2] = {};
#pragma unroll
            for (int n = 0; n < 8; n++) {
                Floats<2> of_column = {};  // Γ or δ
                if constexpr (GATED || R == Role::DK) of_column = load_floats<2>(gamma + n * 8 + at.lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = row0 + e / 2 * 8, column = n * 8 + at.lane % 4 * 2 + e % 2;
                    float& x = s[n][e];
                    if (NORMALISED && R == Role::DQ) x += row_sums[e / 2];
                    if (NORMALISED && R == Role::DK) x += of_column[e % 2];
                    if (GATED)
                        x *= exp2_fast(REVERSED ? of_column[e % 2] - row_gamma[e / 2]
                                                : row_gamma[e / 2] - of_column[e % 2]);
                    x = (REVERSED ? column < row : column > row) ? 0.0f : x;
                    score_sums[e / 2] += x;
                }
            }
            if (NORMALISED && R == Role::Out)
#pragma unroll
                for (int half = 0; half < 2; half++) row_sums[half] += row_sum(score_sums[half]);
            uint32_t weights[4][4];
            round_to_A<T>(weights, s);
            wgmma_AB<T>(sums, weights, c + at.warpgroup * PART);
            if constexpr (R == Role::DK) {
                wgmma_wait<0>();
                pin_registers(sums);
            } else {
                add_to_state<D>(at, state, shared_address(b_tile), shared_address(handed_on));
                wgmma_wait<0>();
                pin_registers(sums);
                pin_state<D>(state);
            }
        };
        // Sums become results, rounded.
        const auto finish = [&](auto role, const Product<T>& x, float(&sums)[8][4], uint32_t(&rounded)[4][4]) {
            constexpr Role R = decltype(role)::value;
            if constexpr (R == Role::Out && NORMALISED) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float d = row_sums[half] + LINEAR_ATTENTION_EPS, factor = 1 / d;
                    if (x.norm && at.warpgroup == 0 && at.lane % 4 == 0 && row0 + half * 8 < count)
                        x.norm[task.head * x.norm_stride + token + row0 + half * 8] = d;
#pragma unroll
                    for (int n = 0; n < 8; n++) sums[n][half * 2] *= factor, sums[n][half * 2 + 1] *= factor;
                }
            }
            if constexpr (R == Role::DQ || R == Role::DK) {
                const unsigned char* inputs = R == Role::DQ ? queries : a_tile;
                [[maybe_unused]] float dot[2] = {};
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const Floats<2> f = load_floats<2>(reinterpret_cast<const T*>(
                            inputs + swizzled_offset<TOKENS>(row0 + half * 8, column0 + n * 8)));
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float& d = sums[n][half * 2 + e];
                            if constexpr (GATED)
                                dot[half] = fmaf(f[e], d, dot[half]);
                            else  // φ' = min(φ, 1) = min(exp, 1); the keys' φ is in the tile
                                d *= fminf(R == Role::DQ ? exp2_fast(f[e] * LOG2E) : f[e], 1.0f);
                        }
                    }
                if constexpr (GATED) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int64_t heads = REVERSED ? p.NKV : p.NH;
                        const float sum = row_sum(dot[half]);
                        if (at.lane % 4 == 0 && row0 + half * 8 < count)
                            x.dots[(at.warpgroup * heads + task.head) * p.N + token + row0 + half * 8] = sum;
                    }
                }
            }
            round_to_A<T>(rounded, sums);
        };
        // By way of a tile that nobody needs any more.
        const auto store = [&](const Product<T>& x, unsigned char* tile, const uint32_t(&rounded)[4][4]) {
            store_rounded<TOKENS>(tile + at.warpgroup * PART, at.warp * 16, rounded);
            __syncwarp();
            T* to = x.out.at(token, task.head);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (at.row(i) < count && at.column() < x.M)
                    *reinterpret_cast<uint4*>(to + at.row(i) * x.out.token_stride + at.column()) =
                        *reinterpret_cast<const uint4*>(tile + at.offset(i));
        };
        constexpr std::integral_constant<Role, ROLE> own;
        constexpr std::integral_constant<Role, Role::DK> keys;
        uint32_t rounded[4][4], rounded_keys[4][4];
        if constexpr (REVERSED) {
            multiply(keys, o_keys);
            if (last_head) finish(keys, other, o_keys, rounded_keys);
        }
        multiply(own, o);
        if constexpr (ROLE == Role::DQ) {
            cp_async_wait<LATER_GROUPS>();
            __syncwarp();
        }
        if (last_head) finish(own, p, o, rounded);
        __syncthreads();  // products have read the tiles
        if (last_head) {
            if constexpr (REVERSED) store(other, value_tile, rounded_keys);
            store(p, a_tile, rounded);
        }
        if constexpr (ROLE == Role::DQ) {
            __syncwarp();
            load_queries(step + 1);
        }
    }
}

// KeyState and QueryState.
template <int D, Role ROLE, bool NORMALISED>
__global__ void __launch_bounds__((Sizes<D, ROLE, NORMALISED>::THREADS), (BLOCKS<D, ROLE, NORMALISED>))
    state_hopper_kernel(const __grid_constant__ Product<T> p) {
    using Z = Sizes<D, ROLE, NORMALISED>;
    constexpr int TILE = Z::TILE, STAGES = Z::STAGES;
    constexpr bool REVERSED = ROLE == Role::QueryState, GATED = !NORMALISED;
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    float *const floats = reinterpret_cast<float*>(memory + Z::FLOATS), *const vector_parts = floats + Z::VECTOR_PARTS;
    pdl_launch_dependents();
    const Task task = task_of(1, p.NKV, p.segments);
    const Walk walk = walk_of(p, task, false, REVERSED, REVERSED);
    if (walk.begin >= walk.end) return;
    if (!p.all_segments && (REVERSED ? walk.begin == 0 : walk.end == walk.seq.length)) return;
    const Place at;

    const auto load = [&](int step) {
        if (step < walk.steps) {
            const int count = walk.count(step), stage = step % STAGES;
            const int64_t token = walk.token(step), key_head = walk.key_head(step);
            unsigned char* tiles = memory + stage * 2 * TILE;
            float* rows = floats + stage * Z::STAGE_FLOATS;
            copy_packs(at, tiles, p.b, token, key_head, count, p.E);
            copy_packs(at, tiles + TILE, p.c, token, key_head, count, p.M);
            if constexpr (NORMALISED && REVERSED)
                copy_rows(at, rows, p.norm + key_head * p.norm_stride + token, p.delta + key_head * p.N + token, count);
            if constexpr (GATED) copy_gates(at, rows, p.gate + token * p.gate_stride + walk.kv, p.gate_stride, count);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) load(step);

    State<D> state = {};
    float z[PACK] = {}, all_gates = 0, whole = 1;  // z: of this thread's rows
    // A step's tiles, once they have come.
    const auto prepare = [&](int step) {
        const int count = walk.count(step);
        unsigned char *const b_tile = memory + step % STAGES * 2 * TILE, *const c_tile = b_tile + TILE;
        const float* const rows = floats + step % STAGES * Z::STAGE_FLOATS;
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        if constexpr (NORMALISED) {
            const float *norm = rows + at.warpgroup * 2 * TOKENS, *delta = norm + TOKENS;
            apply_features(at, b_tile, count, p.E);
            if constexpr (REVERSED) divide_packs(at, c_tile, norm, count, p.M);
            sum_columns(at, b_tile, REVERSED ? delta : nullptr, z);
        } else {
            const Decays decays(rows + (at.warpgroup * 4 + at.warp) * TOKENS, REVERSED);
            whole = walk.first_of_chunk(step) ? decays.whole : 1.0f;
            if (walk.first_of_chunk(step)) all_gates += decays.log_whole;
            scale_packs(at, c_tile, c_tile, count, p.M, [&](int i) { return decays.within_row(at.row(i)); });
        }
        fence_async_proxy();
    };
    prepare(0);
    for (int step = 0; step < walk.steps; step++) {
        const uint32_t b_tile = shared_address(memory + step % STAGES * 2 * TILE);
        __syncthreads();  // the step's tiles are ready, and those of the step before have been read
        load(step + STAGES - 1);
        if (GATED) scale_state<D>(state, whole), pin_state<D>(state);
        add_to_state<D>(at, state, b_tile, b_tile + TILE);
        if (step + 1 < walk.steps) prepare(step + 1);
        wgmma_wait<0>();
        pin_state<D>(state);
    }

    const int64_t slot = (task.sequence * (p.segments + 1) + task.segment) * p.NKV + walk.kv;
    float* const result = p.states + slot * p.state_size;
    for_state<D>(at, state, p, result, [](float x, float& y) { y = x; });
    if (GATED && threadIdx.x == 0) p.decays[slot] = exp2_fast(all_gates);
    if constexpr (NORMALISED) {
        sum_over_rows(z);
        if (at.lane < 8)
#pragma unroll
            for (int j = 0; j < PACK; j++) vector_parts[at.warp * D + at.column() + j] = z[j];
        __syncthreads();
        for (int e = threadIdx.x; e < p.E; e += Z::THREADS)
            result[p.state_vector + e] =
                vector_parts[e] + vector_parts[D + e] + vector_parts[2 * D + e] + vector_parts[3 * D + e];
    }
}

template <typename Kernel>
void prepare_launch(const char* op, Kernel kernel, int bytes, int64_t blocks) {
    require(blocks < int64_t(1) << 31, op, ": ", blocks, " blocks are more than one launch can hold");
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
}

// f(std::integral_constant<int, D>, std::bool_constant<NORMALISED>)
template <typename F>
void dispatch(const Product<T>& p, F f) {
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

template <Role ROLE>
void run(const char* op, const Product<T>& p, [[maybe_unused]] const Product<T>& other, int64_t blocks, Stream stream) {
    if (blocks == 0) return;
    dispatch(p, [&](auto D, auto normalised) {
        using Z = Sizes<D, ROLE, normalised>;
        [[maybe_unused]] const auto launch_product = [&](auto grouped) {
            const auto kernel = product_hopper_kernel<D, ROLE, normalised, grouped>;
            prepare_launch(op, kernel, Z::BYTES, blocks);
            launch_pdl(op, kernel, dim3(unsigned(blocks)), Z::THREADS, Z::BYTES, stream, p, other);
        };
        if constexpr (state_only(ROLE)) {
            // Not before the previous kernel has ended: the few blocks there are would crowd where it ends first.
            const auto kernel = state_hopper_kernel<D, ROLE, normalised>;
            prepare_launch(op, kernel, Z::BYTES, blocks);
            kernel<<<unsigned(blocks), Z::THREADS, Z::BYTES, cuda_stream(stream)>>>(p);
            check_launch(op, stream);
        }
        if constexpr (ROLE == Role::DV) {
            if (p.NH == p.NKV)
                launch_product(std::false_type{});
            else
                launch_product(std::true_type{});
        } else if constexpr (!state_only(ROLE)) {
            launch_product(std::false_type{});
        }
    });
}

}  // namespace

int hopper_columns(const Product<T>& p) {
    static const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                               device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    const bool L = p.elu && p.normalise && !p.gate, G = !p.elu && !p.normalise && p.gate;
    const int size = std::max(p.E, p.M);
    return !hopper || !p.aligned || !(L || G) || size > 128 ? 0 : size <= 64 ? 64 : 128;
}

void hopper_product(const char* op, Role role, const Product<T>& p, int64_t blocks, Stream stream) {
    switch (role) {
        case Role::Out:
            return run<Role::Out>(op, p, {}, blocks, stream);
        case Role::DQ:
            return run<Role::DQ>(op, p, {}, blocks, stream);
        case Role::KeyState:
            return run<Role::KeyState>(op, p, {}, blocks, stream);
        default:
            return run<Role::QueryState>(op, p, {}, blocks, stream);
    }
}

void hopper_key_gradients(const char* op, const Product<T>& dv, const Product<T>& dk, int64_t blocks, Stream stream) {
    run<Role::DV>(op, dv, dk, blocks, stream);
}

}  // namespace linear_attention
