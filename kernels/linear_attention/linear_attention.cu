// Linear attention on tensor cores of sm_80 and later (mma.sync); fp32 by the same kernels with fused multiply-adds. On
// Hopper GPUs linear_attention_hopper.cu takes over what it can.
//
// The products of linear_attention_check.h, chunked: a block owns a segment of a sequence and 64 (of large heads fewer)
// columns of one head's result, and walks over the segment in chunks of 64 tokens with its columns of the state in
// registers. For each chunk, 16 rows to a warp:
//
//   scores = A·Bᵀ, masked and decayed, rounded;   O = A·state + scores·C;   state = decay·state + Bᵀ·C
//
// Segments are what is parallel over the sequence. There are as few as fill the GPU, so that most of what is read and
// written are the operands themselves: KeyState and QueryState sum up each segment by itself, prefix_kernel turns these
// into the state that each segment begins with, and where one segment is the whole sequence neither runs. Nothing is
// added atomically. Features, ĝ and δ are made when a tile has come to shared memory, and d from the scores.
//
// Form::Recurrent: scan_kernel, a column of the state to a warp, for heads of any size.
#include "kernels/linear_attention/linear_attention.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/linear_attention/linear_attention.cuh"

namespace {

using namespace linear_attention;

constexpr int64_t MIN_SEGMENT = 4 * MAX_CHUNK;

// Tile sizes. Shared memory stays within the 99 KiB that every GPU from sm_80 on has, but for heads of 128: where there
// is less than they ask for, the kernels for 256 take them.
template <typename T, int E>
constexpr int COLUMNS = std::is_same_v<T, float> ? 4096 / E
                        : E <= 128               ? 64
                                                 : 32;

template <typename T, int E, Role ROLE>
struct Sizes {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    static constexpr int WARPS = FP32 && E > 128 ? 2 : 4;
    static constexpr int CHUNK = WARPS * 16;
    // Each WARPS warps have M columns of the result; of heads of 128 two such groups share the tiles.
    static constexpr int M = COLUMNS<T, E>, GROUPS = !FP32 && E == 128 ? 2 : 1, BLOCK_M = GROUPS * M;
    static constexpr int THREADS = GROUPS * WARPS * WARP;
    static constexpr int STAGES = !FP32 && E <= 128 ? 2 : 1;
    static constexpr bool STATE_ONLY = state_only(ROLE);
    // Elements of T, then floats.
    static constexpr int A = STATE_ONLY ? 0 : CHUNK * PITCH<T, E>, B = CHUNK * PITCH<T, E>,
                         C = CHUNK * PITCH<T, BLOCK_M>;
    // The result of the forward pass comes to shared memory too, but for large heads.
    static constexpr bool COPY_FORWARD_OUT = ROLE == Role::DQ && E <= (FP32 ? 64 : 128);
    static constexpr int STAGE = A + B + C, FORWARD_OUT = COPY_FORWARD_OUT ? CHUNK * PITCH<T, E> : 0,
                         STATE = STATE_ONLY ? 0 : E * PITCH<T, BLOCK_M>;
    static constexpr int STAGE_FLOATS = 3 * CHUNK;  // norm, δ and gate of the rows
    static constexpr int VECTOR = (E > BLOCK_M ? E : BLOCK_M) * WARPS;
    static constexpr int GATE_FLOATS = 2 * (4 * CHUNK + 2);  // Γ (as double), what decays into and within, the whole
    static constexpr int BLOCKS = FP32 || E > 64 ? 1 : STATE_ONLY ? 4 : 3;
    // What the dynamic shared memory holds, in this order; the last two only where they are needed.
    static constexpr int BASE_BYTES = (STAGES * STAGE + STATE) * int(sizeof(T)) +
                                      (STAGES * STAGE_FLOATS + VECTOR) * int(sizeof(float)),
                         GATE_BYTES = GATE_FLOATS * int(sizeof(float)), OUT_BYTES = FORWARD_OUT * int(sizeof(T));
    static_assert(E == 128 || BASE_BYTES + GATE_BYTES + OUT_BYTES <= 99 * 1024);
    static int bytes(bool gate, bool normalise) {
        return BASE_BYTES + (gate ? GATE_BYTES : 0) + (normalise ? OUT_BYTES : 0);
    }
};

// f(step, row, column) for each pack of 16 bytes that load_tile gives this thread: its first element.
template <typename T, int D, int ROWS, int THREADS, int STEPS, typename F>
__device__ __forceinline__ void for_own_packs(int first_step, F f) {
    constexpr int W = FULL_WIDTH<T>, PACKS = D / W;
    static_assert(ROWS * PACKS % THREADS == 0);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int pack = (first_step + i) * THREADS + int(threadIdx.x);
        f(i, pack / PACKS, pack % PACKS * W);
    }
}

// x becomes f(x, row, column): in place, the packs of this thread, four at a time so that they don't wait for each
// other.
template <typename T, int D, int ROWS, int THREADS, typename F>
__device__ __forceinline__ void transform_tile(T* tile, F f) {
    constexpr int W = FULL_WIDTH<T>, STEPS = ROWS * (D / W) / THREADS, BATCH = STEPS < 4 ? STEPS : 4;
    static_assert(STEPS % BATCH == 0);
#pragma unroll
    for (int first = 0; first < STEPS; first += BATCH) {
        Pack<T, W> packs[BATCH];
        for_own_packs<T, D, ROWS, THREADS, BATCH>(
            first, [&](int i, int row, int column) { packs[i] = load_pack<W>(tile + row * PITCH<T, D> + column); });
        for_own_packs<T, D, ROWS, THREADS, BATCH>(first, [&](int i, int row, int column) {
            Floats<W> x = as_floats(packs[i]);
#pragma unroll
            for (int j = 0; j < W; j++) x[j] = f(x[j], row, column + j);
            const Pack<T, W> pack = as_pack<T>(x);
            *reinterpret_cast<uint4*>(tile + row * PITCH<T, D> + column) = reinterpret_cast<const uint4&>(pack);
        });
    }
}

// φ of a tile's elements that exist; the others stay 0.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void apply_features(T* tile, int count, int columns) {
    if (count >= ROWS && columns >= D)
        transform_tile<T, D, ROWS, THREADS>(tile, [](float x, int, int) { return feature<T>(x); });
    else
        transform_tile<T, D, ROWS, THREADS>(
            tile, [&](float x, int row, int column) { return row < count && column < columns ? feature<T>(x) : 0.0f; });
}

// Rows divided by their d; rows that don't exist stay 0.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void divide_rows(T* tile, int count, const float* norm) {
    transform_tile<T, D, ROWS, THREADS>(
        tile, [&](float x, int row, int) { return row < count ? x * reciprocal_for<T>(norm[row]) : 0.0f; });
}

// The numbers that divide_rows of this thread needs: each thread copies its own, so that it need not wait for others.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_norm(float* dst, const float* src, int count) {
    for_own_packs<T, D, ROWS, THREADS, ROWS*(D / FULL_WIDTH<T>) / THREADS>(
        0, [&](int, int row, int) { cp_async_4(dst + row, row < count ? src + row : src, row < count); });
}

// 16 rows of scores with 8·NT columns of B: of fp32 in blocks of 32 terms.
template <typename T, int E, bool KEEP, int NT>
__device__ __forceinline__ void score_product(float (&s)[1][NT][4], const TileA<T, 1, E, KEEP>& a, const T* b) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll 1
        for (int k = 0; k < E; k += 32) {
            float sum[1][NT][4] = {};
            mma_ABt<T, 1, NT, E, KEEP, 32>(sum, TileA<T, 1, E, KEEP>(a.rows + k), b + k);
#pragma unroll
            for (int i = 0; i < NT * 4; i++) s[0][i / 4][i % 4] += sum[0][i / 4][i % 4];
        }
    } else {
        mma_ABt(s, a, b);
    }
}

template <typename T, int E, Role ROLE>
__global__ void __launch_bounds__((Sizes<T, E, ROLE>::THREADS), (Sizes<T, E, ROLE>::BLOCKS))
    product_kernel(const __grid_constant__ Product<T> p) {
    using Z = Sizes<T, E, ROLE>;
    // Differences of sums of gates: of fp32 they must hold digits where the sums are large.
    using Gamma = std::conditional_t<Z::FP32, double, float>;
    constexpr int WARPS = Z::WARPS, THREADS = Z::THREADS, CHUNK = Z::CHUNK, M = Z::M, BLOCK_M = Z::BLOCK_M,
                  STAGES = Z::STAGES;
    constexpr int ROW_TILES = E / WARPS / 16, COLUMN_TILES = M / 8, TOKENS = CHUNK / WARP;
    // Keys that scores are computed with at a time: on tensor cores more, masked ones among them, because products that
    // don't wait for each other are worth more than those that could be left out.
    constexpr int KEYS = Z::FP32 ? 16 : 32, KEY_BLOCKS = CHUNK / KEYS, KEY_TILES = KEYS / 8;
    constexpr bool REVERSED = is_reversed(ROLE), STATE_ONLY = Z::STATE_ONLY;
    // What the vector sums up, and over which of the tiles.
    constexpr bool VECTOR_OF_C = ROLE == Role::DQ || ROLE == Role::DK, HAS_VECTOR = ROLE != Role::DV,
                   WEIGHTED_VECTOR = ROLE == Role::DK || ROLE == Role::QueryState;
    constexpr int VECTOR_COLUMNS = VECTOR_OF_C ? BLOCK_M : E, VECTOR_STEPS = (VECTOR_COLUMNS + 63) / 64;
    // A's rows stay in registers where there are enough.
    constexpr bool KEEP = !Z::FP32 && E <= 128 && ROLE != Role::DQ && ROLE != Role::DK;

    extern __shared__ __align__(16) unsigned char memory[];
    T *stages = reinterpret_cast<T*>(memory), *state_tile = stages + STAGES * Z::STAGE;
    float* stage_floats = reinterpret_cast<float*>(state_tile + Z::STATE);         // [STAGES][3][CHUNK]
    float* vectors = stage_floats + STAGES * Z::STAGE_FLOATS;                      // [columns][WARPS]
    Gamma* gammas = reinterpret_cast<Gamma*>(memory + Z::BASE_BYTES);              // [2][CHUNK]
    float* decays = reinterpret_cast<float*>(memory + Z::BASE_BYTES) + 4 * CHUNK;  // [2][2·CHUNK + 2]
    T* forward_out = reinterpret_cast<T*>(memory + Z::BASE_BYTES + (p.gate ? Z::GATE_BYTES : 0));

    const int64_t row_heads = REVERSED || STATE_ONLY ? p.NKV : p.NH;
    const Task task = task_of(p.parts, row_heads, p.segments);
    const int first_column = task.part * BLOCK_M, columns = min(BLOCK_M, p.M - first_column);
    if (!STATE_ONLY && task.sequence == p.S) {  // tokens after the last sequence
        const int64_t first = max(0, p.cum[p.S]);
        for (int64_t token = first + task.segment; token < p.N; token += p.segments) {
            for (int c = threadIdx.x; c < columns; c += THREADS) p.out.at(token, task.head)[first_column + c] = T{};
            if (ROLE == Role::Out && p.norm && task.part == 0 && threadIdx.x == 0)
                p.norm[task.head * p.norm_stride + token] = 0;
        }
        return;
    }
    const Sequence seq = sequence_of(p.cum, task.sequence, p.N);
    const int begin = task.segment * p.segment_length, end = min(begin + p.segment_length, seq.length);
    if (begin >= end) return;
    if (STATE_ONLY && !p.all_segments && (REVERSED ? begin == 0 : end == seq.length)) return;
    const int chunks = (end - begin + CHUNK - 1) / CHUNK;
    const int group = int(p.NH / p.NKV), steps_per_chunk = REVERSED ? group : 1, steps = chunks * steps_per_chunk;
    const int64_t kv = REVERSED || STATE_ONLY ? task.head : task.head / group;
    const int64_t first_key_head = REVERSED ? kv * group : kv;
    const int lane = lane_id(), warp = int(threadIdx.x) / WARP % WARPS;  // of its group
    const int group_column = int(threadIdx.x) / (WARPS * WARP) * M;      // the group's first, of the block's
    // Warps with many keys to see and with few take turns on the SM's four parts.
    const int row_block = int((warp + blockIdx.x) % WARPS), row0 = row_block * 16 + lane / 4;
    // Keys that no row of this warp sees.
    const auto hidden = [&](int block) {
        return REVERSED ? block < row_block * 16 / KEYS : block > row_block * 16 / KEYS;
    };

    const auto chunk_begin = [&](int step) {
        const int chunk = step / steps_per_chunk;
        return begin + (REVERSED ? chunks - 1 - chunk : chunk) * CHUNK;
    };
    const auto load = [&](int step) {
        const int t = chunk_begin(step), count = min(CHUNK, end - t);
        const int64_t token = seq.first + t, key_head = first_key_head + step % steps_per_chunk;
        T *a = stages + step % STAGES * Z::STAGE, *b = a + Z::A, *c = b + Z::B;
        float* floats = stage_floats + step % STAGES * Z::STAGE_FLOATS;
        if constexpr (!STATE_ONLY) {
            load_tile<T, E, CHUNK, THREADS>(a, p.a.at(token, task.head), p.a.token_stride, count, p.E, p.aligned);
        }
        load_tile<T, E, CHUNK, THREADS>(b, p.b.at(token, key_head), p.b.token_stride, count, p.E, p.aligned);
        load_tile<T, BLOCK_M, CHUNK, THREADS>(c, p.c.at(token, key_head) + first_column, p.c.token_stride, count,
                                              columns, p.aligned);
        if (p.normalise) {
            const float* norm = p.norm + (ROLE == Role::DQ ? task.head : key_head) * p.norm_stride + token;
            if constexpr (ROLE == Role::DQ || ROLE == Role::DK) {
                load_norm<T, E, CHUNK, THREADS>(floats, norm, count);
            } else if constexpr (ROLE == Role::DV || ROLE == Role::QueryState) {
                load_norm<T, BLOCK_M, CHUNK, THREADS>(floats, norm, count);
            }
            if constexpr (WEIGHTED_VECTOR) {
                const float* delta = p.delta + key_head * p.N + token;
                for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
                    cp_async_4(floats + CHUNK + i, i < count ? delta + i : delta, i < count);
                }
            }
        }
        if (p.gate && threadIdx.x < WARP) {
#pragma unroll
            for (int j = 0; j < TOKENS; j++) {
                const int i = lane * TOKENS + j;
                const float* gate = p.gate + token * p.gate_stride + kv;
                cp_async_4(floats + 2 * CHUNK + i, i < count ? gate + i * p.gate_stride : gate, i < count);
            }
        }
    };
    const auto load_forward_out = [&](int step) {
        const int t = chunk_begin(step);
        if constexpr (Z::COPY_FORWARD_OUT) {
            load_tile<T, E, CHUNK, THREADS>(forward_out, p.forward_out.at(seq.first + t, task.head),
                                            p.forward_out.token_stride, min(CHUNK, end - t), p.E, p.aligned);
        }
    };
    load(0);
    if (p.normalise) load_forward_out(0);

    // The state: a warp has E/WARPS rows of it, and of the vector what the tokens add that it looks at.
    const int state_row0 = warp * (E / WARPS) + lane / 4;
    const int64_t slot = (task.sequence * (p.segments + 1) + task.segment) * p.NKV + kv;
    float* const state_memory = p.states + slot * p.state_size;
    float state[ROW_TILES][COLUMN_TILES][4] = {}, vector[VECTOR_STEPS][2] = {};
    const auto for_state = [&](auto f) {  // f(number in registers, number in memory)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = state_row0 + m * 16 + e / 2 * 8,
                              column = group_column + n * 8 + lane % 4 * 2 + e % 2;
                    if (row < p.E && column < columns)
                        f(state[m][n][e], state_memory[row * p.state_row + (first_column + column) * p.state_column]);
                }
    };
    if (!STATE_ONLY && p.has_states) {
        for_state([](float& x, float y) { x = y; });
        if (HAS_VECTOR && p.normalise && warp == 0)
#pragma unroll
            for (int r = 0; r < VECTOR_STEPS; r++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int column = r * 64 + lane * 2 + i;
                    if (column < (VECTOR_OF_C ? columns : p.E))
                        vector[r][i] = state_memory[p.state_vector + (VECTOR_OF_C ? first_column : 0) + column];
                }
    }
    // The warps' sums of a column lie side by side. Of several groups the first sums up the vector.
    const auto store_vector = [&] {
#pragma unroll
        for (int i = 0; i < VECTOR_STEPS * 2; i++) {
            const int column = i / 2 * 64 + lane * 2 + i % 2;
            if (column < VECTOR_COLUMNS && group_column == 0) vectors[column * WARPS + warp] = vector[i / 2][i % 2];
        }
    };
    const auto vector_at = [&](int column) {
        const Floats<WARPS> x = load_floats<WARPS>(vectors + column * WARPS);
        float sum = x[0];
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum += x[w];
        return sum;
    };
    Gamma all_gates = 0;
    float o[1][COLUMN_TILES][4], norm[2];

    for (int step = 0; step < steps; step++) {
        const int t = chunk_begin(step), count = min(CHUNK, end - t), head_step = step % steps_per_chunk;
        const bool first_head = head_step == 0, last_head = head_step == steps_per_chunk - 1;
        const int64_t token = seq.first + t;
        T *a_tile = stages + step % STAGES * Z::STAGE, *b_tile = a_tile + Z::A, *c_tile = b_tile + Z::B;
        const float *floats = stage_floats + step % STAGES * Z::STAGE_FLOATS, *beta = floats + CHUNK;
        Gamma* gamma = gammas + step % 2 * CHUNK;
        // What the state decays by until row i; what row i decays by until it is handed on; all of the chunk.
        float *into = decays + step % 2 * (2 * CHUNK + 2), *within = into + CHUNK, *whole = within + CHUNK;

        cp_async_wait_all();
        if (!p.aligned) __syncthreads();  // then threads have copied what others look at
        if (p.elu) {
            if constexpr (ROLE == Role::Out || ROLE == Role::DV)
                apply_features<T, E, CHUNK, THREADS>(a_tile, count, p.E);
            if constexpr (ROLE == Role::Out || ROLE == Role::DV || STATE_ONLY)
                apply_features<T, E, CHUNK, THREADS>(b_tile, count, p.E);
            if constexpr (ROLE == Role::DQ || ROLE == Role::DK)
                apply_features<T, BLOCK_M, CHUNK, THREADS>(c_tile, count, columns);
        }
        if (p.normalise) {
            if constexpr (ROLE == Role::DQ) divide_rows<T, E, CHUNK, THREADS>(a_tile, count, floats);
            if constexpr (ROLE == Role::DK) divide_rows<T, E, CHUNK, THREADS>(b_tile, count, floats);
            if constexpr (ROLE == Role::DV || ROLE == Role::QueryState)
                divide_rows<T, BLOCK_M, CHUNK, THREADS>(c_tile, count, floats);
        }
        if (p.gate && threadIdx.x < WARP) {
            Gamma sum[TOKENS];
#pragma unroll
            for (int i = 0; i < TOKENS; i++)
                sum[i] = Gamma(floats[2 * CHUNK + lane * TOKENS + i]) + (i > 0 ? sum[i - 1] : Gamma(0));
            Gamma before = sum[TOKENS - 1];
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                const Gamma other = __shfl_up_sync(ALL_LANES, before, offset);
                if (lane >= offset) before += other;
            }
            const Gamma total = __shfl_sync(ALL_LANES, before, WARP - 1);
            before -= sum[TOKENS - 1];
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {
                const Gamma g = before + sum[i];
                const float from_start = exp_for<T>(float(g)), to_end = exp_for<T>(float(total - g));
                gamma[lane * TOKENS + i] = g;
                into[lane * TOKENS + i] = REVERSED ? to_end : from_start;
                within[lane * TOKENS + i] = REVERSED ? from_start : to_end;
            }
            if (lane == 0) *whole = exp_for<T>(float(total));
            if (first_head) all_gates += total;
        }
        __syncthreads();  // tiles are ready, and nobody needs those of the step before
        if (STAGES == 2 && step + 1 < steps) load(step + 1);

        const bool carried = step >= steps_per_chunk || (!STATE_ONLY && p.has_states);  // the state is not 0
        if constexpr (!STATE_ONLY) {
            if (first_head && carried) {
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
                    for (int n = 0; n < COLUMN_TILES; n++) {
                        T* at = state_tile + (state_row0 + m * 16) * PITCH<T, BLOCK_M> + group_column + n * 8 +
                                lane % 4 * 2;
                        store_floats<2>(at, {state[m][n][0], state[m][n][1]});
                        store_floats<2>(at + 8 * PITCH<T, BLOCK_M>, {state[m][n][2], state[m][n][3]});
                    }
                if (HAS_VECTOR && p.normalise) store_vector();
            }
            const TileA<T, 1, E, KEEP> a(a_tile + row_block * 16 * PITCH<T, E>);
            const T* a_rows = a_tile + row0 * PITCH<T, E>;

            // The row's δ, from ĝ as it is multiplied.
            float delta[2] = {};
            if constexpr (ROLE == Role::DQ) {
                if (p.normalise) {
                    constexpr int W = FULL_WIDTH<T>;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int row = row0 + half * 8;
#pragma unroll
                        for (int c = lane % 4 * W; c < E; c += 4 * W) {
                            const Floats<W> x = load_floats<W>(a_rows + half * 8 * PITCH<T, E> + c);
                            Floats<W> y = {};
                            if constexpr (Z::COPY_FORWARD_OUT) {
                                y = load_floats<W>(forward_out + row * PITCH<T, E> + c);
                            } else {
                                const T* at = p.forward_out.at(token + row, task.head) + c;
#pragma unroll
                                for (int i = 0; i < W; i++) y[i] = row < count && c + i < p.E ? as_float(at[i]) : 0.0f;
                            }
#pragma unroll
                            for (int i = 0; i < W; i++) delta[half] = fmaf(x[i], -y[i], delta[half]);
                        }
                        delta[half] = row_sum(delta[half]);
                        if (task.part == 0 && group_column == 0 && lane % 4 == 0 && row < count)
                            p.delta[task.head * p.N + token + row] = delta[half];
                    }
                }
            }

            RoundedA<T, 1, KEY_TILES> scores[KEY_BLOCKS];
            float score_sum[2] = {};
            Gamma row_gamma[2] = {};
            if (p.gate) row_gamma[0] = gamma[row0], row_gamma[1] = gamma[row0 + 8];
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; block++) {
                if (hidden(block)) continue;
                float s[1][KEY_TILES][4] = {};
                score_product<T, E, KEEP>(s, a, b_tile + block * KEYS * PITCH<T, E>);
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int i = row0 + e / 2 * 8, j = block * KEYS + n * 8 + lane % 4 * 2 + e % 2;
                        float& x = s[0][n][e];
                        if (ROLE == Role::DQ) x += delta[e / 2];
                        if (ROLE == Role::DK && p.normalise) x += beta[j];
                        if (p.gate)
                            x *=
                                exp_for<T>(float(REVERSED ? gamma[j] - row_gamma[e / 2] : row_gamma[e / 2] - gamma[j]));
                        if (REVERSED ? j < i : j > i) x = 0;
                        if (ROLE == Role::Out) score_sum[e / 2] += x;
                    }
                scores[block] = RoundedA<T, 1, KEY_TILES>(s);
            }
            __syncthreads();  // the state has come to shared memory; forward_out has been read
            if (ROLE == Role::DQ && p.normalise && step + 1 < steps) load_forward_out(step + 1);

            // What dq or dk is the gradient of, early enough to be there at the end.
            Pack<T, 2> inputs[2][COLUMN_TILES];
            constexpr bool HAS_INPUTS = ROLE == Role::DQ || ROLE == Role::DK;
            if (HAS_INPUTS && last_head && (p.elu || p.dots)) {
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int n = 0; n < COLUMN_TILES; n++) {
                        const int row = row0 + half * 8, column = group_column + n * 8 + lane % 4 * 2;
                        const T* at = p.inputs.at(token + row, task.head) + first_column + column;
                        if (row < count && column + 1 < columns && p.aligned) {
                            inputs[half][n] = load_pack<2>(at);
                        } else {
                            Floats<2> x = {};
                            if (row < count && column < columns) x[0] = as_float(at[0]);
                            if (row < count && column + 1 < columns) x[1] = as_float(at[1]);
                            inputs[half][n] = as_pack<T>(x);
                        }
                    }
            }

            if (first_head) {
#pragma unroll
                for (int i = 0; i < COLUMN_TILES * 4; i++) o[0][i / 4][i % 4] = 0;
                norm[0] = norm[1] = 0;
                if (carried) {
                    mma_AB<T, BLOCK_M>(o, a, state_tile + group_column);
                    if (HAS_VECTOR && p.normalise) {
                        if constexpr (VECTOR_OF_C) {
#pragma unroll
                            for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
                                for (int e = 0; e < 2; e++) {
                                    const float z = vector_at(group_column + n * 8 + lane % 4 * 2 + e);
#pragma unroll
                                    for (int half = 0; half < 2; half++)
                                        o[0][n][half * 2 + e] =
                                            fmaf(ROLE == Role::DQ ? delta[half] : 1.0f, z, o[0][n][half * 2 + e]);
                                }
                        } else {
                            constexpr int W = FULL_WIDTH<T>;
#pragma unroll
                            for (int c = 0; c < E; c += 4 * W) {
                                const int at = c + lane % 4 * W;
                                const Floats<W> x = load_floats<W>(a_rows + at),
                                                y = load_floats<W>(a_rows + 8 * PITCH<T, E> + at);
#pragma unroll
                                for (int i = 0; i < W; i++) {
                                    const float z = vector_at(at + i);
                                    norm[0] = fmaf(x[i], z, norm[0]);
                                    norm[1] = fmaf(y[i], z, norm[1]);
                                }
                            }
                        }
                    }
                    if (p.gate)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const float factor = into[row0 + half * 8];
                            norm[half] *= factor;
#pragma unroll
                            for (int n = 0; n < COLUMN_TILES; n++) {
                                o[0][n][half * 2] *= factor;
                                o[0][n][half * 2 + 1] *= factor;
                            }
                        }
                }
            }
            norm[0] += score_sum[0], norm[1] += score_sum[1];
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; block++) {
                if (hidden(block)) continue;
                mma_AB<T, BLOCK_M>(o, scores[block], c_tile + block * KEYS * PITCH<T, BLOCK_M> + group_column);
            }

            if (last_head) {
                if (ROLE == Role::Out && p.normalise) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float d = row_sum(norm[half]) + LINEAR_ATTENTION_EPS, factor = 1 / d;
                        if (p.norm && task.part == 0 && group_column == 0 && lane % 4 == 0 && row0 + half * 8 < count)
                            p.norm[task.head * p.norm_stride + token + row0 + half * 8] = d;
#pragma unroll
                        for (int n = 0; n < COLUMN_TILES; n++) {
                            o[0][n][half * 2] *= factor;
                            o[0][n][half * 2 + 1] *= factor;
                        }
                    }
                }
                if (HAS_INPUTS && (p.elu || p.dots)) {
                    float dot[2] = {};
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int n = 0; n < COLUMN_TILES; n++) {
                            const Floats<2> x = as_floats(inputs[half][n]);
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                const float f = p.elu ? feature<T>(x[e]) : x[e];
                                float& d = o[0][n][half * 2 + e];
                                dot[half] = fmaf(rounded_to<T>(f), d, dot[half]);
                                if (p.elu) d *= fminf(f, 1.0f);  // φ' = min(φ, 1)
                            }
                        }
                    if (p.dots)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const float sum = row_sum(dot[half]);
                            if (lane % 4 == 0 && row0 + half * 8 < count)
                                p.dots[((task.part * Z::GROUPS + group_column / M) * row_heads + task.head) * p.N +
                                       token + row0 + half * 8] = sum;
                        }
                }
                // By way of A's rows, which nobody needs any more: of several groups, when all are that far.
                if (Z::GROUPS > 1) __syncthreads();
                store_tile<T, E>(p.out.at(token + row_block * 16, task.head) + first_column + group_column,
                                 p.out.token_stride, count - row_block * 16, columns - group_column, p.aligned,
                                 a_tile + row_block * 16 * PITCH<T, E> + group_column, o);
            }
        }

        if (STATE_ONLY || step + steps_per_chunk < steps) {  // somebody needs the state
            if (p.gate && first_head) {
                const float factor = *whole;
#pragma unroll
                for (int i = 0; i < ROW_TILES * COLUMN_TILES * 4; i++)
                    state[i / 4 / COLUMN_TILES][i / 4 % COLUMN_TILES][i % 4] *= factor;
#pragma unroll
                for (int i = 0; i < VECTOR_STEPS * 2; i++) vector[i / 2][i % 2] *= factor;
            }
            mma_AtB<T, E, BLOCK_M, CHUNK>(state, b_tile + warp * (E / WARPS), c_tile + group_column,
                                          p.gate ? within : nullptr);
            if (HAS_VECTOR && p.normalise && group_column == 0) {
#pragma unroll
                for (int r = 0; r < VECTOR_STEPS; r++) {
                    const int column = r * 64 + lane * 2;
                    if (column >= VECTOR_COLUMNS) continue;
                    constexpr int D = VECTOR_OF_C ? BLOCK_M : E;
                    const T* at = (VECTOR_OF_C ? c_tile : b_tile) + warp * 16 * PITCH<T, D> + column;
                    float sum[2] = {};
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        const Floats<2> x = load_floats<2>(at + i * PITCH<T, D>);
                        float weight = WEIGHTED_VECTOR ? beta[warp * 16 + i] : 1.0f;
                        if (p.gate) weight *= within[warp * 16 + i];
                        sum[0] = fmaf(weight, x[0], sum[0]);
                        sum[1] = fmaf(weight, x[1], sum[1]);
                    }
                    vector[r][0] += sum[0], vector[r][1] += sum[1];
                }
            }
        }
        if (STAGES == 1 && step + 1 < steps) {
            __syncthreads();
            load(step + 1);
        }
    }

    if constexpr (STATE_ONLY) {
        for_state([](float x, float& y) { y = x; });
        if (task.part > 0) return;
        if (p.gate && threadIdx.x == 0) p.decays[slot] = exp_for<T>(float(all_gates));
        if (!p.normalise) return;
        store_vector();
        __syncthreads();
        for (int e = threadIdx.x; e < p.E; e += THREADS) state_memory[p.state_vector + e] = vector_at(e);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// States between segments

constexpr int PREFIX_THREADS = 256;

struct Prefix {
    float* states;        // [S, segments + 1, NKV, size]: sums of single segments become what a segment begins with
    const float* decays;  // [S, segments + 1, NKV], or null
    const float *initial, *initial_z;
    float *final, *final_z;
    const int32_t* rows;  // of final and final_z, or null
    int64_t num_rows;
    const int32_t* cum;
    int64_t N, NKV, size, matrix;  // size: matrix E·M, and E more where there is a vector
    int segments, segment_length;
    bool reversed;
    bool sums, last_sum;  // of segments: present; present also of the last one in walking order
};

// Block x has a sequence and head; a thread W numbers of its states.
template <int W>
__global__ void __launch_bounds__(PREFIX_THREADS) prefix_kernel(const __grid_constant__ Prefix p) {
    pdl_wait();
    pdl_launch_dependents();
    const int64_t at = blockIdx.x, s = at / p.NKV, kv = at % p.NKV;
    const int64_t i = (int64_t(blockIdx.y) * PREFIX_THREADS + threadIdx.x) * W;
    if (i >= p.size) return;
    const int count = min(p.segments, (sequence_of(p.cum, s, p.N).length + p.segment_length - 1) / p.segment_length);
    const auto segment = [&](int n) { return (s * (p.segments + 1) + (p.reversed ? count - 1 - n : n)) * p.NKV + kv; };
    const int64_t step = p.reversed ? -p.NKV : p.NKV;
    const float* decays = p.decays ? p.decays + segment(0) : nullptr;
    float* states = p.states + segment(0) * p.size + i;
    const bool in_matrix = i < p.matrix;
    Floats<W> x = {};
    if (p.initial)
        x = load_floats<W>(in_matrix ? p.initial + at * p.matrix + i
                                     : p.initial_z + at * (p.size - p.matrix) + i - p.matrix);
    constexpr int BATCH = 8;  // loads in flight
    const int summed = !p.sums ? 0 : p.last_sum ? count : count - 1;
    for (int n = 0; n < count; n += BATCH) {
        Floats<W> sum[BATCH];
        float decay[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            sum[b] = n + b < summed ? load_floats<W>(states + (n + b) * step * p.size) : Floats<W>{};
            decay[b] = n + b < summed && decays ? decays[(n + b) * step] : 1.0f;
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (n + b >= count) break;
            store_floats<W>(states + (n + b) * step * p.size, x);
#pragma unroll
            for (int j = 0; j < W; j++) x[j] = fmaf(x[j], decay[b], sum[b][j]);
        }
    }
    if (!p.reversed) store_floats<W>(states + count * step * p.size, x);
    const int64_t row = state_row(p.rows, p.num_rows, s), to = row * p.NKV + kv;
    if (row < 0) return;
    if (in_matrix && p.final) store_floats<W>(p.final + to * p.matrix + i, x);
    if (!in_matrix && p.final_z) store_floats<W>(p.final_z + to * (p.size - p.matrix) + i - p.matrix, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// The gate's gradient

constexpr int GATE_THREADS = 256;

struct GateGradient {
    float* dgate;  // [N, NKV]
    int64_t stride;
    const float *query_dots, *key_dots;      // [query_parts, NH, N], [key_parts, NKV, N]
    const float *key_states, *query_states;  // or null: nothing flows through a segment's end
    const int32_t* cum;
    int64_t S, N, NH, NKV, size;
    int segments, segment_length, query_parts, key_parts;
    bool through_the_end;  // of the sequence
};

// Σ of x over this thread and those before it in the block; the block's sum in `total`.
__device__ __forceinline__ float scan_block(float x, float& total) {
    __shared__ float sums[GATE_THREADS / WARP];
    const int lane = lane_id(), warp = threadIdx.x / WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const float other = __shfl_up_sync(ALL_LANES, x, offset);
        if (lane >= offset) x += other;
    }
    if (lane == WARP - 1) sums[warp] = x;
    __syncthreads();
    float before = 0;
    total = 0;
    for (int w = 0; w < GATE_THREADS / WARP; w++) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    __syncthreads();
    return before + x;
}

// dg_t of a segment: what flows through its end, ⟨S, R⟩ there, and φ(q)·dφ(q) − φ(k)·dφ(k) of the tokens from t on. So
// that errors add up over a segment only, however long the sequence is.
__global__ void __launch_bounds__(GATE_THREADS) gate_kernel(const __grid_constant__ GateGradient p) {
    const Task task = task_of(1, p.NKV, p.segments);
    const int64_t kv = task.head;
    if (task.sequence == p.S) {
        for (int64_t token = max(0, p.cum[p.S]) + int64_t(task.segment) * GATE_THREADS + threadIdx.x; token < p.N;
             token += int64_t(p.segments) * GATE_THREADS)
            p.dgate[token * p.stride + kv] = 0;
        return;
    }
    const Sequence seq = sequence_of(p.cum, task.sequence, p.N);
    const int begin = task.segment * p.segment_length, end = min(begin + p.segment_length, seq.length);
    if (begin >= end) return;
    float through = 0;
    if (p.key_states && (end < seq.length || p.through_the_end)) {
        const auto state = [&](const float* states, int segment) {
            return states + ((task.sequence * (p.segments + 1) + segment) * p.NKV + kv) * p.size;
        };
        const float *key = state(p.key_states, task.segment + 1), *query = state(p.query_states, task.segment);
        float sum = 0;
        for (int64_t i = threadIdx.x; i < p.size; i += GATE_THREADS) sum = fmaf(key[i], query[i], sum);
        through = block_sum<GATE_THREADS>(sum);
    }
    const int64_t group = p.NH / p.NKV;
    for (int last = end; last > begin; last -= GATE_THREADS) {
        const int t = last - 1 - int(threadIdx.x);
        float x = 0;
        if (t >= begin) {
            const int64_t token = seq.first + t;
            for (int part = 0; part < p.query_parts; part++)
                for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                    x += p.query_dots[(part * p.NH + h) * p.N + token];
            for (int part = 0; part < p.key_parts; part++) x -= p.key_dots[(part * p.NKV + kv) * p.N + token];
        }
        float total;
        x = scan_block(x, total);
        if (t >= begin) p.dgate[(seq.first + t) * p.stride + kv] = through + x;
        through += total;
    }
}

// φ(x)·dφ of each token and head from d = dφ·φ'(x), for the scan, whose blocks see single columns:
// φ(x)·dφ = d·max(φ(x), 1), for φ' = min(φ, 1).
template <typename T>
struct Dots {
    float* dots;  // [heads, N]
    Heads<T> gradient, inputs;
    int64_t N, heads;
    int size;
    bool elu;
};

template <typename T>
__global__ void __launch_bounds__(GATE_THREADS) dots_kernel(const __grid_constant__ Dots<T> p) {
    const int64_t row = (int64_t(blockIdx.x) * GATE_THREADS + threadIdx.x) / WARP;
    if (row >= p.N * p.heads) return;
    const int64_t head = row / p.N, token = row % p.N;
    const T *d = p.gradient.at(token, head), *x = p.inputs.at(token, head);
    float sum = 0;
    for (int i = lane_id(); i < p.size; i += WARP) {
        const float input = as_float(x[i]);
        sum = fmaf(as_float(d[i]), p.elu ? fmaxf(feature<float>(input), 1.0f) : input, sum);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) p.dots[row] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// The scan

constexpr int SCAN_WARPS = 8, SCAN_THREADS = SCAN_WARPS * WARP, SCAN_TOKENS = 8, SCAN_STEPS = 16;  // 16·32 = 512 rows
constexpr int SCAN_BLOCK = 32;  // tokens whose additions to the state are kept apart, so that fp32 sums hold digits

// A warp owns a column of the state, 16 rows in each lane, and reads a token's a and b, which the block has brought to
// shared memory for 8 tokens and all its warps.
template <typename T>
struct Scan {
    Product<T> p;
    Role role;
    LinearAttentionState initial, final;  // of the pass: dfinal and dinitial where reversed
    float* end_state;                     // DQ: states, whose slot 1 gets the final one
};

template <typename T>
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(const __grid_constant__ Scan<T> scan) {
    const Product<T>& p = scan.p;
    const Role role = scan.role;
    const bool reversed = is_reversed(role), vector_of_c = role == Role::DQ || role == Role::DK,
               has_vector = p.normalise && role != Role::DV;
    constexpr int MAX = SCAN_STEPS * WARP;
    __shared__ float a_tile[SCAN_TOKENS][MAX], b_tile[SCAN_TOKENS][MAX], c_tile[SCAN_TOKENS][SCAN_WARPS],
        delta[SCAN_TOKENS], carry[SCAN_TOKENS];
    const int64_t row_heads = reversed ? p.NKV : p.NH;
    const Task task = task_of(p.parts, row_heads, 1);
    const int warp = threadIdx.x / WARP, lane = lane_id(), first_column = task.part * SCAN_WARPS;
    const int column = first_column + warp, columns = min(SCAN_WARPS, p.M - first_column);
    if (task.sequence == p.S) {
        for (int64_t token = max(0, p.cum[p.S]); token < p.N; token++) {
            if (threadIdx.x < columns) p.out.at(token, task.head)[first_column + threadIdx.x] = T{};
            if (role == Role::Out && p.norm && task.part == 0 && threadIdx.x == 0)
                p.norm[task.head * p.norm_stride + token] = 0;
        }
        return;
    }
    const Sequence seq = sequence_of(p.cum, task.sequence, p.N);
    const int64_t group = p.NH / p.NKV, kv = reversed ? task.head : task.head / group,
                  first_key_head = reversed ? kv * group : kv, key_heads = reversed ? group : 1;
    const int64_t at = task.sequence * p.NKV + kv;
    const bool mine = column < p.M;  // this warp has a column

    float state[SCAN_STEPS] = {}, recent[SCAN_STEPS] = {};          // rows lane, lane + 32, …
    float vector[SCAN_STEPS] = {}, recent_vector[SCAN_STEPS] = {};  // Out: z; else vector[0] is the column's
    const auto row_of = [&](int r) { return r * WARP + lane; };
    const auto matrix_at = [&](int r) { return at * p.E * p.M + row_of(r) * p.state_row + column * p.state_column; };
    if (scan.initial.s.data && mine) {
#pragma unroll
        for (int r = 0; r < SCAN_STEPS; r++)
            if (row_of(r) < p.E) state[r] = static_cast<const float*>(scan.initial.s.data)[matrix_at(r)];
        const float* z = static_cast<const float*>(scan.initial.z.data);
        if (has_vector) {
            if (vector_of_c) {
                vector[0] = z[at * p.M + column];
            } else {
#pragma unroll
                for (int r = 0; r < SCAN_STEPS; r++)
                    if (row_of(r) < p.E) vector[r] = z[at * p.E + row_of(r)];
            }
        }
    }
    const auto decay = [&](float factor) {
#pragma unroll
        for (int r = 0; r < SCAN_STEPS; r++)
            state[r] *= factor, recent[r] *= factor, vector[r] *= factor, recent_vector[r] *= factor;
    };
    const auto merge = [&] {
#pragma unroll
        for (int r = 0; r < SCAN_STEPS; r++) {
            state[r] += recent[r], vector[r] += recent_vector[r];
            recent[r] = recent_vector[r] = 0;
        }
    };
    const auto gate = [&](int t) { return p.gate[(seq.first + t) * p.gate_stride + kv]; };

    // Of each token its key heads in turn: all are added to the state before the token's row is read off it.
    const int64_t entries = seq.length * key_heads;
    for (int64_t first = 0; first < entries; first += SCAN_TOKENS) {
        const int count = int(min(int64_t(SCAN_TOKENS), entries - first));
        const auto time_of = [&](int n) {
            const int t = int((first + n) / key_heads);
            return reversed ? seq.length - 1 - t : t;
        };
        const auto key_head_of = [&](int n) { return first_key_head + (first + n) % key_heads; };
        if (first % SCAN_BLOCK == 0) merge();
        __syncthreads();
        for (int i = threadIdx.x; i < count * p.E; i += SCAN_THREADS) {
            const int n = i / p.E, e = i % p.E;
            const int64_t token = seq.first + time_of(n), h = key_head_of(n);
            float x = as_float(p.a.at(token, task.head)[e]), y = as_float(p.b.at(token, h)[e]);
            if (p.elu && (role == Role::Out || role == Role::DV)) x = feature<T>(x), y = feature<T>(y);
            if (p.normalise && role == Role::DQ) x /= p.norm[task.head * p.norm_stride + token];
            if (p.normalise && role == Role::DK) y /= p.norm[h * p.norm_stride + token];
            a_tile[n][e] = x, b_tile[n][e] = y;
        }
        for (int i = threadIdx.x; i < count * columns; i += SCAN_THREADS) {
            const int n = i / columns, m = i % columns;
            const int64_t token = seq.first + time_of(n), h = key_head_of(n);
            float x = as_float(p.c.at(token, h)[first_column + m]);
            if (p.elu && vector_of_c) x = feature<T>(x);
            if (p.normalise && role == Role::DV) x /= p.norm[h * p.norm_stride + token];
            c_tile[n][m] = x;
        }
        if (threadIdx.x < count) {
            const int t = time_of(threadIdx.x);
            if (p.gate) carry[threadIdx.x] = !reversed ? expf(gate(t)) : t + 1 < seq.length ? expf(gate(t + 1)) : 1.0f;
            if (has_vector && role == Role::DK)
                delta[threadIdx.x] = p.delta[key_head_of(threadIdx.x) * p.N + seq.first + t];
        }
        __syncthreads();
        if (has_vector && role == Role::DQ) {
            if (warp < count) {
                const int64_t token = seq.first + time_of(warp);
                const T* out = p.forward_out.at(token, task.head);
                float sum = 0;
                for (int e = lane; e < p.E; e += WARP) sum = fmaf(a_tile[warp][e], -as_float(out[e]), sum);
                sum = warp_sum(sum);
                if (lane == 0) {
                    delta[warp] = sum;
                    if (task.part == 0) p.delta[task.head * p.N + token] = sum;
                }
            }
            __syncthreads();
        }
        if (!mine) continue;
        for (int n = 0; n < count; n++) {
            if (p.gate && key_head_of(n) == first_key_head) decay(carry[n]);
            const float c = c_tile[n][warp];
            if (has_vector && vector_of_c) recent_vector[0] += role == Role::DK ? delta[n] * c : c;
            float sum = 0, d = 0;
#pragma unroll
            for (int r = 0; r < SCAN_STEPS; r++) {
                const int e = row_of(r);
                if (e >= p.E) break;
                const float a = a_tile[n][e], b = b_tile[n][e];
                recent[r] = fmaf(b, c, recent[r]);
                sum = fmaf(a, state[r] + recent[r], sum);
                if (has_vector && role == Role::Out) {
                    recent_vector[r] += b;
                    d = fmaf(a, vector[r] + recent_vector[r], d);
                }
            }
            if (key_head_of(n) != first_key_head + key_heads - 1) continue;
            sum = warp_sum(sum);
            const int64_t token = seq.first + time_of(n);
            if (has_vector && role == Role::Out) {
                d = warp_sum(d) + LINEAR_ATTENTION_EPS;
                sum /= d;
                if (p.norm && column == 0 && lane == 0) p.norm[task.head * p.norm_stride + token] = d;
            }
            if (has_vector && vector_of_c) sum += (role == Role::DQ ? delta[n] : 1.0f) * (vector[0] + recent_vector[0]);
            if (p.elu && vector_of_c) sum *= fminf(feature<T>(as_float(p.inputs.at(token, task.head)[column])), 1.0f);
            if (lane == 0) p.out.at(token, task.head)[column] = from_float<T>(sum);
        }
    }
    if (!mine) return;
    merge();
    if (reversed && p.gate && seq.length > 0) decay(expf(gate(0)));
    if (!reversed && task.head % group != 0) return;  // the heads of a group have the same state
    float *s = static_cast<float*>(scan.final.s.data), *z = static_cast<float*>(scan.final.z.data);
    if (const int32_t* rows = static_cast<const int32_t*>(scan.final.rows.data)) {  // of the forward pass
        const int64_t row = state_row(rows, scan.final.s.shape[0], task.sequence),
                      shift = (row - task.sequence) * p.NKV;
        if (row < 0) return;
        if (s) s += shift * p.E * p.M;
        if (z) z += shift * p.E;
    }
    if (role == Role::DQ && scan.end_state) {
        float* slot = scan.end_state + ((task.sequence * 2 + 1) * p.NKV + kv) * p.state_size;
        s = slot - at * p.E * p.M;
        z = slot + p.state_vector - at * p.M;
    }
    if (s && role != Role::DK)
#pragma unroll
        for (int r = 0; r < SCAN_STEPS; r++)
            if (row_of(r) < p.E) s[matrix_at(r)] = state[r];
    if (z && has_vector) {
        if (vector_of_c) {
            if (lane == 0) z[at * p.M + column] = vector[0];
        } else if (task.part == 0 && warp == 0) {
#pragma unroll
            for (int r = 0; r < SCAN_STEPS; r++)
                if (row_of(r) < p.E) z[at * p.E + row_of(r)] = vector[r];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decode

constexpr int DECODE_THREADS = 256, DECODE_WARPS = DECODE_THREADS / WARP, DECODE_HEADS = 4;

template <typename T>
struct Decode {
    Heads<T> q, k, v, out;  // [S, heads, size]
    const float* gate;      // [S, NKV] or null
    int64_t gate_stride;
    float *s, *z;         // [R, NKV, E, M]; [R, NKV, E] or null
    const int32_t* rows;  // [S] or null
    int64_t num_rows;
    int64_t NH, NKV;
    int E, M;
    bool elu;
};

// A block has the state of one sequence and KV head. Its warps share out the rows, its lanes the columns; of the query
// heads DECODE_HEADS read along at a time, the first of them with the update.
template <typename T>
__global__ void __launch_bounds__(DECODE_THREADS) decode_kernel(const __grid_constant__ Decode<T> p) {
    constexpr int MAX = int(LINEAR_ATTENTION_MAX_SIZE);
    __shared__ float k[MAX], q[DECODE_HEADS][MAX], norm[DECODE_HEADS], sums[DECODE_WARPS][DECODE_HEADS][WARP];
    const int64_t s = blockIdx.x / p.NKV, kv = blockIdx.x % p.NKV, group = p.NH / p.NKV;
    const int warp = threadIdx.x / WARP, lane = lane_id();
    const int64_t row = state_row(p.rows, p.num_rows, s), at = row * p.NKV + kv;
    if (row < 0) {
        for (int64_t i = threadIdx.x; i < group * p.M; i += DECODE_THREADS)
            p.out.at(s, kv * group + i / p.M)[i % p.M] = T{};
        return;
    }
    float *state = p.s + at * p.E * p.M, *z = p.z ? p.z + at * p.E : nullptr;
    const float carry = p.gate ? expf(p.gate[s * p.gate_stride + kv]) : 1.0f;
    const auto phi = [&](T x) { return p.elu ? feature<float>(as_float(x)) : as_float(x); };
    for (int e = threadIdx.x; e < p.E; e += DECODE_THREADS) {
        k[e] = phi(p.k.at(s, kv)[e]);
        if (z) z[e] = fmaf(z[e], carry, k[e]);
    }
    for (int64_t first = 0; first < group; first += DECODE_HEADS) {
        const int heads = int(min(int64_t(DECODE_HEADS), group - first));
        __syncthreads();
        for (int i = threadIdx.x; i < DECODE_HEADS * p.E; i += DECODE_THREADS) {
            const int h = i / p.E, e = i % p.E;
            q[h][e] = h < heads ? phi(p.q.at(s, kv * group + first + h)[e]) : 0.0f;
        }
        __syncthreads();
        if (z && warp < heads) {
            float sum = 0;
            for (int e = lane; e < p.E; e += WARP) sum = fmaf(q[warp][e], z[e], sum);
            sum = warp_sum(sum);
            if (lane == 0) norm[warp] = sum + LINEAR_ATTENTION_EPS;
        }
        for (int m0 = 0; m0 < p.M; m0 += WARP) {
            const int m = m0 + lane;
            float o[DECODE_HEADS] = {};
            if (m < p.M) {
                const float v = as_float(p.v.at(s, kv)[m]);
                for (int e = warp; e < p.E; e += DECODE_WARPS) {
                    float x = state[int64_t(e) * p.M + m];
                    if (first == 0) {
                        x = fmaf(x, carry, k[e] * v);
                        state[int64_t(e) * p.M + m] = x;
                    }
#pragma unroll
                    for (int h = 0; h < DECODE_HEADS; h++) o[h] = fmaf(q[h][e], x, o[h]);
                }
            }
#pragma unroll
            for (int h = 0; h < DECODE_HEADS; h++) sums[warp][h][lane] = o[h];
            __syncthreads();
            if (warp < heads && m < p.M) {
                float sum = 0;
                for (int w = 0; w < DECODE_WARPS; w++) sum += sums[w][warp][lane];
                p.out.at(s, kv * group + first + warp)[m] = from_float<T>(z ? sum / norm[warp] : sum);
            }
            __syncthreads();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch

// How many segments, of how many tokens, a sequence is cut into: as few as fill the GPU with blocks.
struct Segments {
    int64_t count, length;
};

int64_t num_blocks(const LinearAttentionSizes& z) {
    return num_sms() * (std::max(z.E, z.M) <= 64 ? 3 : 1);
}

// States of segments, and one for each sequence's end, that a pass of such sizes has at most where sequences are cut:
// there are as many sequences of 1.5 times `wanted` tokens as there can be, each cut into two.
int64_t most_states(const LinearAttentionSizes& z, int64_t blocks) {
    return 2 * std::min(ceil_div(blocks, std::max<int64_t>(1, z.NKV)), ceil_div(z.N, MIN_SEGMENT));
}

Segments segments_of(const LinearAttentionSizes& z) {
    constexpr int64_t UNIT = MAX_CHUNK;
    const int64_t blocks = num_blocks(z);
    // dk and dv have a block for each KV head.
    const int64_t wanted = std::max(ceil_div(z.N * z.NKV, blocks), MIN_SEGMENT);
    const int64_t count = std::max<int64_t>(1, (z.max_length + wanted / 2) / wanted);
    const int64_t length = std::max<int64_t>(1, ceil_div(ceil_div(z.max_length, count), UNIT)) * UNIT;
    const Segments cut{std::max<int64_t>(1, ceil_div(z.max_length, length)), length};
    // Many sequences of which some are long (packed documents) fill the GPU uncut, and need no states in between.
    if (cut.count == 1 || z.S * (cut.count + 1) <= most_states(z, blocks)) return cut;
    return {1, ceil_div(z.max_length, UNIT) * UNIT};
}

// The parts of the scratch, in floats, in the order in which they lie.
struct Layout {
    int64_t states, decays, delta = 0, query_dots = 0, key_dots = 0;
    int passes = 1;

    Layout(const LinearAttentionSizes& z, bool backward) {
        // Uncut, a sequence needs its two only where states come in or go out.
        const int64_t count =
            z.NKV * std::max(z.states ? 2 * z.S : 0, z.max_length > MIN_SEGMENT ? most_states(z, num_blocks(z)) : 0);
        const int64_t parts = ceil_div(z.E, 16) + 1;                          // at most
        states = count * (z.E * z.M + z.E), decays = ceil_div(count, 4) * 4;  // states stay aligned to 16 bytes
        if (!backward) return;
        passes = 2;
        delta = z.NH * z.N, query_dots = parts * z.NH * z.N, key_dots = parts * z.NKV * z.N;
    }
    int64_t bytes() const {
        return (passes * (states + decays) + delta + query_dots + key_dots) * int64_t(sizeof(float));
    }
};

// All tensors of a pass, and the launches of its products.
template <typename T>
struct Pass {
    const char* op;
    LinearAttentionSizes z;
    LinearAttentionType type;
    Stream stream;
    Tensor cum, q, k, v, gate, out, norm, dout, dq, dk, dv;
    LinearAttentionState initial, dfinal;
    float *key_states, *key_decays, *query_states, *query_decays, *delta, *query_dots, *key_dots;
    bool aligned;

    bool recurrent() const {
        using Form = LinearAttentionType::Form;
        return type.form == Form::Recurrent || std::max(z.E, z.M) > LINEAR_ATTENTION_MAX_CHUNKED_SIZE;
    }
    Segments segments() const {
        const int64_t all = std::max<int64_t>(1, z.max_length);
        return recurrent() ? Segments{1, all} : segments_of(z);
    }
    int64_t state_size() const { return z.E * z.M + (type.normalise ? z.E : 0); }
    bool elu() const { return type.features == FeatureMap::EluPlusOne; }
    static constexpr bool transposed(Role role) { return role == Role::DQ || role == Role::DK; }

    Product<T> product(Role role) const {
        Product<T> p{};
        const Heads<T> query = heads_of<T>(q), key = heads_of<T>(k), value = heads_of<T>(v),
                       gradient = heads_of<T>(dout);
        switch (role) {
            case Role::Out:
                p.a = query, p.b = key, p.c = value, p.out = heads_of<T>(out);
                break;
            case Role::DQ:
                p.a = gradient, p.b = value, p.c = key, p.out = heads_of<T>(dq), p.inputs = query,
                p.forward_out = heads_of<T>(out);
                break;
            case Role::DV:
                p.a = key, p.b = query, p.c = gradient, p.out = heads_of<T>(dv);
                break;
            case Role::DK:
                p.a = value, p.b = gradient, p.c = query, p.out = heads_of<T>(dk), p.inputs = key;
                break;
            case Role::KeyState:
                p.b = key, p.c = value;
                break;
            case Role::QueryState:
                p.b = query, p.c = gradient;
                break;
        }
        p.E = int(transposed(role) ? z.M : z.E), p.M = int(transposed(role) ? z.E : z.M);
        if (gate) p.gate = gate.as<float>(), p.gate_stride = gate.stride[0];
        if (norm) p.norm = norm.as<float>(), p.norm_stride = norm.stride[0];
        if (gate) p.dots = role == Role::DQ ? query_dots : role == Role::DK ? key_dots : nullptr;
        p.delta = delta;
        p.states = is_reversed(role) ? query_states : key_states;
        p.decays = is_reversed(role) ? query_decays : key_decays;
        p.state_size = state_size(), p.state_vector = z.E * z.M;
        p.state_row = transposed(role) ? 1 : z.M, p.state_column = transposed(role) ? z.M : 1;
        p.cum = cum.as<int32_t>();
        p.S = z.S, p.N = z.N, p.NH = z.NH, p.NKV = z.NKV;
        const Segments g = segments();
        p.segments = int(g.count), p.segment_length = int(g.length);
        p.elu = elu(), p.normalise = type.normalise, p.aligned = aligned;
        return p;
    }

    // Columns of the kernels for Hopper GPUs; 0: they do not take this pass.
    int hopper() const {
#ifdef HAVE_SM90A
        if constexpr (std::is_same_v<T, bf16>) return hopper_columns(product(Role::Out));
#endif
        return 0;
    }

    template <typename Arguments>
    void launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t blocks, int threads, int bytes) const {
        require(blocks < int64_t(1) << 31, op, ": ", z.S, " sequences of up to ", z.max_length, " tokens and ", z.NH,
                " heads are more than one launch can hold");
        if (blocks == 0) return;
        if (bytes > 0) cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
        kernel<<<unsigned(blocks), unsigned(threads), size_t(bytes), cuda_stream(stream)>>>(arguments);
        check_launch(op, stream);
    }

    // f(std::integral_constant<int, E>) with the smallest compiled size that holds a product's rows a and b.
    template <typename F>
    static auto dispatch_size(int64_t E, F f) {
        if (E <= 64) return f(std::integral_constant<int, 64>{});
        constexpr int LARGEST = Sizes<T, 128, Role::DQ>::BASE_BYTES + Sizes<T, 128, Role::DQ>::GATE_BYTES +
                                Sizes<T, 128, Role::DQ>::OUT_BYTES;
        if (E <= 128 && LARGEST <= max_shared_bytes()) return f(std::integral_constant<int, 128>{});
        return f(std::integral_constant<int, 256>{});
    }
    // Blocks that share out the columns of a result, and parts of the dots that they write.
    int64_t parts(Role role, bool of_dots = false) const {
        if (const int columns = hopper()) return of_dots ? columns / 64 : 1;
        return dispatch_size(transposed(role) ? z.M : z.E, [&](auto size) {
            using Z = Sizes<T, size, Role::Out>;
            return ceil_div(transposed(role) ? z.E : z.M, Z::BLOCK_M) * (of_dots ? Z::GROUPS : 1);
        });
    }

    // flag: of KeyState and QueryState all_segments, of the others has_states.
    template <Role ROLE>
    void run_product(bool flag) const {
        Product<T> p = product(ROLE);
        p.parts = int(parts(ROLE));
        (state_only(ROLE) ? p.all_segments : p.has_states) = flag;
        const int64_t blocks = (state_only(ROLE) ? z.S : z.S + 1) * p.segments *
                               (is_reversed(ROLE) || state_only(ROLE) ? z.NKV : z.NH) * p.parts;
#ifdef HAVE_SM90A
        if constexpr (std::is_same_v<T, bf16>)
            if (hopper()) {
                if constexpr (ROLE != Role::DV && ROLE != Role::DK) return hopper_product(op, ROLE, p, blocks, stream);
                Product<T> other = product(Role::DK);
                other.has_states = flag;
                return hopper_key_gradients(op, p, other, blocks, stream);
            }
#endif
        dispatch_size(p.E, [&](auto size) {
            using Z = Sizes<T, size, ROLE>;
            launch(product_kernel<T, size, ROLE>, p, blocks, Z::THREADS, Z::bytes(bool(gate), type.normalise));
        });
    }

    // What segments begin with: S and z, or R and r. sums: of the segments; last: of the last one too.
    void run_prefix(bool reversed, bool sums, bool last, const LinearAttentionState& from,
                    const LinearAttentionState& to) const {
        const auto data = [](const Tensor& t) { return t ? t.as<float>() : nullptr; };
        Prefix p{};
        p.states = reversed ? query_states : key_states;
        if (gate) p.decays = reversed ? query_decays : key_decays;
        p.initial = data(from.s), p.initial_z = data(from.z), p.final = data(to.s), p.final_z = data(to.z);
        if (to.rows) p.rows = to.rows.as<int32_t>(), p.num_rows = to.s.shape[0];
        p.cum = cum.as<int32_t>();
        p.N = z.N, p.NKV = z.NKV, p.size = state_size(), p.matrix = z.E * z.M;
        p.segments = int(segments().count), p.segment_length = int(segments().length);
        p.reversed = reversed, p.sums = sums, p.last_sum = last;
        if (z.S * z.NKV == 0) return;
        const auto launch_prefix = [&](auto width) {
            const int64_t parts = ceil_div(p.size, PREFIX_THREADS * width);
            launch_pdl(op, prefix_kernel<width>, dim3(unsigned(z.S * z.NKV), unsigned(parts)), PREFIX_THREADS, 0,
                       stream, p);
        };
        const bool whole_packs = z.E % 4 == 0 && rows_aligned({from.s, from.z, to.s, to.z});
        if (whole_packs)
            launch_prefix(std::integral_constant<int, 4>{});
        else
            launch_prefix(std::integral_constant<int, 1>{});
    }

    // Sums of segments and their prefixes, where there is anything to hand on. Returns whether segments need them.
    template <Role ROLE>
    bool run_states(const LinearAttentionState& from, const LinearAttentionState& to, bool to_the_end) const {
        const bool last = to.s || to_the_end, several = segments().count > 1;
        if (!last && !several && !from.s) return false;
        if (last || several) run_product<ROLE>(last);
        run_prefix(is_reversed(ROLE), last || several, last, from, to);
        return several || from.s;
    }

    void run_scan(Role role, const LinearAttentionState& from, const LinearAttentionState& to, float* end_state) const {
        Scan<T> scan{product(role), role, from, to, end_state};
        scan.p.parts = int(ceil_div(scan.p.M, SCAN_WARPS));
        launch(scan_kernel<T>, scan, (z.S + 1) * (is_reversed(role) ? z.NKV : z.NH) * scan.p.parts, SCAN_THREADS, 0);
    }

    void run_dots(float* to, const Tensor& gradient, const Tensor& inputs) const {
        const Dots<T> d{to, heads_of<T>(gradient), heads_of<T>(inputs), z.N, gradient.shape[1], int(z.E), elu()};
        launch(dots_kernel<T>, d, ceil_div(d.N * d.heads * WARP, GATE_THREADS), GATE_THREADS, 0);
    }

    // states: something flows through the ends of segments.
    void run_gate(const Tensor& dgate, bool states, int64_t query_parts, int64_t key_parts) const {
        GateGradient p{};
        p.dgate = dgate.as<float>(), p.stride = dgate.stride[0];
        p.query_dots = query_dots, p.key_dots = key_dots;
        if (states) p.key_states = key_states, p.query_states = query_states;
        p.cum = cum.as<int32_t>();
        p.S = z.S, p.N = z.N, p.NH = z.NH, p.NKV = z.NKV, p.size = state_size();
        p.segments = int(segments().count), p.segment_length = int(segments().length);
        p.query_parts = int(query_parts), p.key_parts = int(key_parts);
        p.through_the_end = bool(dfinal.s);
        launch(gate_kernel, p, (z.S + 1) * z.NKV * p.segments, GATE_THREADS, 0);
    }
};

DType check_dtype(const char* op, const Tensor& q) {
    require(bool(q), op, ": q is missing");
    require(q.dtype == DType::F32 || q.dtype == DType::BF16, op, ": q is ", dtype_name(q.dtype), " ", shape_string(q),
            ", expected fp32 or bf16");
    return q.dtype;
}

// f(T{})
template <typename F>
void dispatch(DType dtype, F f) {
    if (dtype == DType::F32)
        f(float{});
    else
        f(bf16{});
}

template <typename T>
Pass<T> pass_of(const char* op, const LinearAttentionSizes& z, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& gate, const LinearAttentionState& initial, const LinearAttentionSequences& sequences,
                const LinearAttentionType& type, const Tensor& scratch, bool backward, Stream stream) {
    Pass<T> p{};
    p.op = op, p.z = z, p.type = type, p.stream = stream, p.cum = sequences.cum;
    p.q = q, p.k = k, p.v = v, p.gate = gate, p.initial = initial;
    const Layout layout(z, backward);
    p.key_states = static_cast<float*>(scratch.data);
    p.key_decays = p.key_states + layout.states;
    if (!backward) return p;
    p.query_states = p.key_decays + layout.decays;
    p.query_decays = p.query_states + layout.states;
    p.delta = p.query_decays + layout.decays;
    p.query_dots = p.delta + layout.delta;
    p.key_dots = p.query_dots + layout.query_dots;
    return p;
}

}  // namespace

int64_t linear_attention_forward_scratch(const LinearAttentionSizes& z) {
    return Layout(z, false).bytes();
}

int64_t linear_attention_backward_scratch(const LinearAttentionSizes& z) {
    return Layout(z, true).bytes();
}

void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                              Tensor scratch, Stream stream) {
    const char* op = "linear_attention_forward";
    const DType dtype = check_dtype(op, q);
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, initial, sequences, type);
    check_linear_attention_forward(op, dtype, z, out, norm, final, type, scratch);
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        Pass<T> p = pass_of<T>(op, z, q, k, v, gate, initial, sequences, type, scratch, false, stream);
        p.out = out;
        if (type.normalise) p.norm = norm;
        if (p.recurrent()) return p.run_scan(Role::Out, initial, final, nullptr);
        p.aligned = z.E % FULL_WIDTH<T> == 0 && z.M % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out});
        const bool states = p.template run_states<Role::KeyState>(initial, final, false);
        p.template run_product<Role::Out>(states);
    });
}

void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                               Tensor scratch, Stream stream) {
    const char* op = "linear_attention_backward";
    const DType dtype = check_dtype(op, q);
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, initial, sequences, type);
    check_linear_attention_backward(op, dtype, z, dq, dk, dv, dgate, dinitial, dout, dfinal, gate, out, norm, type,
                                    scratch);
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        Pass<T> p = pass_of<T>(op, z, q, k, v, gate, initial, sequences, type, scratch, true, stream);
        p.dq = dq, p.dk = dk, p.dv = dv, p.dout = dout, p.dfinal = dfinal;
        if (type.normalise) p.out = out, p.norm = norm;
        const bool to_the_end = gate && dfinal.s;  // the gates' gradient then asks for S after the last token
        if (p.recurrent()) {
            p.run_scan(Role::DQ, initial, {}, to_the_end ? p.key_states : nullptr);
            p.run_scan(Role::DV, dfinal, {dinitial.s, Tensor{}}, nullptr);
            p.run_scan(Role::DK, dfinal, {Tensor{}, dinitial.z}, nullptr);
            if (!gate) return;
            p.run_dots(p.query_dots, dq, q);
            p.run_dots(p.key_dots, dk, k);
            if (to_the_end) p.run_prefix(true, false, false, dfinal, {});
            p.run_gate(dgate, to_the_end, 1, 1);
        } else {
            p.aligned = z.E % FULL_WIDTH<T> == 0 && z.M % FULL_WIDTH<T> == 0 &&
                        rows_aligned({q, k, v, dout, dq, dk, dv, p.out});
            const bool key_states = p.template run_states<Role::KeyState>(initial, {}, to_the_end);
            p.template run_product<Role::DQ>(key_states);
            const bool query_states = p.template run_states<Role::QueryState>(dfinal, dinitial, false);
            p.template run_product<Role::DV>(query_states);
            if (!p.hopper()) p.template run_product<Role::DK>(query_states);
            if (gate)
                p.run_gate(dgate, p.segments().count > 1 || to_the_end, p.parts(Role::DQ, true),
                           p.parts(Role::DK, true));
        }
    });
}

void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttentionType& type, Stream stream) {
    const char* op = "linear_attention_decode";
    const DType dtype = check_dtype(op, q);
    const LinearAttentionSizes z = check_linear_attention_decode(op, dtype, out, state, q, k, v, gate, type);
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        Pass<T> p{};
        p.op = op, p.z = z, p.stream = stream;
        Decode<T> d{};
        d.q = heads_of<T>(q), d.k = heads_of<T>(k), d.v = heads_of<T>(v), d.out = heads_of<T>(out);
        if (gate) d.gate = gate.as<float>(), d.gate_stride = gate.stride[0];
        d.s = state.s.as<float>();
        if (type.normalise) d.z = state.z.as<float>();
        if (state.rows) d.rows = state.rows.as<int32_t>(), d.num_rows = state.s.shape[0];
        d.NH = z.NH, d.NKV = z.NKV, d.E = int(z.E), d.M = int(z.M);
        d.elu = type.features == FeatureMap::EluPlusOne;
        p.launch(decode_kernel<T>, d, z.S * z.NKV, DECODE_THREADS, 0);
    });
}
