// Linear attention in chunks, on tensor cores of sm_80 and later (mma.sync); fp32 runs the same kernel with fused
// multiply-adds. On Hopper GPUs linear_attention_hopper.cu replaces it where it can.
//
// A block computes one result (linear_attention_common.h) for one split of a sequence and 64 columns (fewer for large
// heads) of one head. It loops over the split in chunks of 64 tokens and keeps its columns of the state in registers.
// For each chunk, 16 rows to a warp:
//
//   scores = A·Bᵀ, masked and decayed, rounded;   O = A·state + scores·C;   state = decay·state + Bᵀ·C
//
// Features, ĝ and δ are computed from the tiles in shared memory, and d from the scores.
//
// Resources on sm_90a (CUDA 13.0) for heads of 64, attention type linear; gated_linear needs no copy of out (DQ: 9,216
// bytes less) but 2,064 bytes for decays:
//
//                          threads   chunk   columns   stages   shared memory   registers   blocks per SM
//   bf16  Out, DV, DK          128      64        64        2        67,072 B         168               3
//         DQ                   128      64        64        2        76,288 B         168               3
//         KeyState, QueryState 128      64        64        2        39,424 B     127-128               4
//   fp32  Out, DV, DK          128      64        64        1        71,424 B     237-255               2
//         DQ                   128      64        64        1        88,832 B         255               2
//         KeyState, QueryState 128      64        64        1        36,608 B     237-249               2
//
// One launch: B = 8, T = 4096, 12 heads of 64, bf16 (linear_attention.cu: 4 splits of 1,024 tokens). Out has 1 column
// block · 12 heads · 4 splits · (8 + 1) sequences = 432 blocks, of which 384 loop over 16 chunks and 48 have no tokens
// after the last sequence to clear.
#include "kernels/cuda/block_scan.cuh"
#include "kernels/linear_attention/linear_attention.cuh"

namespace linear_attention {

// Tile sizes. Shared memory stays within the 99 KiB that every GPU from sm_80 on has, except for heads of 128: a GPU
// with too little shared memory for them uses the kernels for heads of 256.
template <typename T, int E>
constexpr int COLUMNS = std::is_same_v<T, float> ? 4096 / E
                        : E <= 128               ? 64
                                                 : 32;

template <typename T, int E, Result RESULT>
struct ChunkedConfig {
    static constexpr bool FP32 = std::is_same_v<T, float>;
    static constexpr int WARPS = FP32 && E > 128 ? 2 : 4;
    static constexpr int CHUNK = WARPS * 16;
    // Each group of WARPS warps computes M columns of the result. Heads of 128 have two groups, which share the tiles.
    static constexpr int M = COLUMNS<T, E>, GROUPS = !FP32 && E == 128 ? 2 : 1, BLOCK_M = GROUPS * M;
    static constexpr int THREADS = GROUPS * WARPS * WARP;
    static constexpr int STAGES = !FP32 && E <= 128 ? 2 : 1;
    static constexpr bool STATE_ONLY = state_only(RESULT), REVERSED = is_reversed(RESULT);
    // Elements of T, then floats.
    static constexpr int A = STATE_ONLY ? 0 : CHUNK * PITCH<T, E>, B = CHUNK * PITCH<T, E>,
                         C = CHUNK * PITCH<T, BLOCK_M>;
    // The forward pass's out is copied to shared memory too, except for large heads.
    static constexpr bool COPY_FORWARD_OUT = RESULT == Result::DQ && E <= (FP32 ? 64 : 128);
    static constexpr int STAGE = A + B + C, FORWARD_OUT = COPY_FORWARD_OUT ? CHUNK * PITCH<T, E> : 0,
                         STATE = STATE_ONLY ? 0 : E * PITCH<T, BLOCK_M>;
    static constexpr int STAGE_FLOATS = 3 * CHUNK;  // norm, δ and gate of the rows
    static constexpr int VECTOR_FLOATS = (E > BLOCK_M ? E : BLOCK_M) * WARPS;
    static constexpr int GATE_FLOATS = 2 * (4 * CHUNK + 2);  // Γ (as double), read and write decays, the chunk's decay
    static constexpr int BLOCKS = FP32 || E > 64 ? 1 : STATE_ONLY ? 4 : 3;  // per SM
    // The dynamic shared memory, in this order; the last two parts only where they are needed.
    static constexpr int BASE_BYTES = (STAGES * STAGE + STATE) * int(sizeof(T)) +
                                      (STAGES * STAGE_FLOATS + VECTOR_FLOATS) * int(sizeof(float)),
                         GATE_BYTES = GATE_FLOATS * int(sizeof(float)), OUT_BYTES = FORWARD_OUT * int(sizeof(T));
    static_assert(E == 128 || BASE_BYTES + GATE_BYTES + OUT_BYTES <= 99 * 1024);
    static int bytes(bool gate, bool normalise) {
        return BASE_BYTES + (gate ? GATE_BYTES : 0) + (normalise ? OUT_BYTES : 0);
    }

    // A warp's share: rows of the state, and its 16 rows of the chunk times M columns, in tiles of mma.sync.
    static constexpr int STATE_ROWS = E / WARPS, ROW_TILES = STATE_ROWS / 16, COLUMN_TILES = M / 8;
    // Keys whose scores are computed at once. Tensor cores take more, masked ones among them: independent mma
    // instructions hide more latency than skipping masked keys saves.
    static constexpr int KEYS = FP32 ? 16 : 32, KEY_BLOCKS = CHUNK / KEYS, KEY_TILES = KEYS / 8;
    // The vector of the state: the operand that it sums, whether with weights, and its columns.
    static constexpr bool VECTOR_OF_C = RESULT == Result::DQ || RESULT == Result::DK, HAS_VECTOR = RESULT != Result::DV,
                          WEIGHTED_VECTOR = RESULT == Result::DK || RESULT == Result::QueryState;
    static constexpr int VECTOR_COLUMNS = VECTOR_OF_C ? BLOCK_M : E, VECTOR_STEPS = (VECTOR_COLUMNS + 63) / 64;
    // A's rows stay in registers where there are enough.
    static constexpr bool KEEP_A = !FP32 && E <= 128 && RESULT != Result::DQ && RESULT != Result::DK;
    // dq and dk end with the gradient of the feature map, which reads q or k.
    static constexpr bool HAS_INPUTS = RESULT == Result::DQ || RESULT == Result::DK;
};

// ---- tiles in shared memory

namespace {

// f(step, row, column) for each 16-byte pack that load_tile copies in this thread; row and column of its first element.
template <typename T, int D, int ROWS, int THREADS, int STEPS, typename F>
__device__ __forceinline__ void for_each_pack(int first_step, F f) {
    constexpr int W = FULL_WIDTH<T>, PACKS = D / W;
    static_assert(ROWS * PACKS % THREADS == 0);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int pack = (first_step + i) * THREADS + int(threadIdx.x);
        f(i, pack / PACKS, pack % PACKS * W);
    }
}

// x = f(x, row, column) for this thread's packs of a tile, in place. Four packs at a time hide each other's latency.
template <typename T, int D, int ROWS, int THREADS, typename F>
__device__ __forceinline__ void transform_tile(T* tile, F f) {
    constexpr int W = FULL_WIDTH<T>, STEPS = ROWS * (D / W) / THREADS, BATCH = STEPS < 4 ? STEPS : 4;
    static_assert(STEPS % BATCH == 0);
#pragma unroll
    for (int first = 0; first < STEPS; first += BATCH) {
        Pack<T, W> packs[BATCH];
        for_each_pack<T, D, ROWS, THREADS, BATCH>(
            first, [&](int i, int row, int column) { packs[i] = load_pack<W>(tile + row * PITCH<T, D> + column); });
        for_each_pack<T, D, ROWS, THREADS, BATCH>(first, [&](int i, int row, int column) {
            Floats<W> x = as_floats(packs[i]);
#pragma unroll
            for (int j = 0; j < W; j++) x[j] = f(x[j], row, column + j);
            const Pack<T, W> pack = as_pack<T>(x);
            *reinterpret_cast<uint4*>(tile + row * PITCH<T, D> + column) = reinterpret_cast<const uint4&>(pack);
        });
    }
}

// x = φ(x) for the elements of a tile that exist; the others stay 0.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void apply_features(T* tile, int count, int columns) {
    if (count >= ROWS && columns >= D)
        transform_tile<T, D, ROWS, THREADS>(tile, [](float x, int, int) { return feature<T>(x); });
    else
        transform_tile<T, D, ROWS, THREADS>(
            tile, [&](float x, int row, int column) { return row < count && column < columns ? feature<T>(x) : 0.0f; });
}

// Rows divided by their d; rows that do not exist stay 0.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void divide_rows(T* tile, int count, const float* norm) {
    transform_tile<T, D, ROWS, THREADS>(
        tile, [&](float x, int row, int) { return row < count ? x * reciprocal_for<T>(norm[row]) : 0.0f; });
}

// Copies the d that divide_rows reads in this thread: each thread copies its own, so that no barrier is needed.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_norm(float* dst, const float* src, int count) {
    for_each_pack<T, D, ROWS, THREADS, ROWS*(D / FULL_WIDTH<T>) / THREADS>(
        0, [&](int, int row, int) { cp_async_4(dst + row, row < count ? src + row : src, row < count); });
}

// s += A·Bᵀ, 16 rows and 8·NT columns. fp32 sums 32 terms at a time.
template <typename T, int E, bool KEEP, int NT>
__device__ __forceinline__ void score_matmul(float (&s)[1][NT][4], const TileA<T, 1, E, KEEP>& a, const T* b) {
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

}  // namespace

// ---- the kernel

// One block: its work, its shared memory and, in registers, the state that it carries from chunk to chunk. A step is a
// chunk and, where a KV head has several query heads (REVERSED), one of these.
template <typename T, int E, Result RESULT>
struct ChunkedBlock {
    using Z = ChunkedConfig<T, E, RESULT>;
    // Differences of sums of gates: fp32 results need more digits where the sums are large.
    using Gamma = std::conditional_t<Z::FP32, double, float>;
    static constexpr int WARPS = Z::WARPS, THREADS = Z::THREADS, CHUNK = Z::CHUNK, M = Z::M, BLOCK_M = Z::BLOCK_M,
                         STAGES = Z::STAGES, ROW_TILES = Z::ROW_TILES, COLUMN_TILES = Z::COLUMN_TILES, KEYS = Z::KEYS,
                         KEY_BLOCKS = Z::KEY_BLOCKS, KEY_TILES = Z::KEY_TILES, TOKENS = CHUNK / WARP;
    static constexpr bool REVERSED = Z::REVERSED, STATE_ONLY = Z::STATE_ONLY, VECTOR_OF_C = Z::VECTOR_OF_C,
                          HAS_VECTOR = Z::HAS_VECTOR;
    using A = TileA<T, 1, E, Z::KEEP_A>;
    using Scores = RoundedA<T, 1, KEY_TILES>;

    const Params<T>& p;
    const Task task;
    int first_column, columns;
    Sequence seq;
    int begin, end, chunks, steps_per_chunk, steps;
    int64_t kv, first_key_head;
    // This thread: the warp within its group, the group's first column of the block's, the warp's rows of the chunk.
    int lane, warp, group_column, row_block, row0, state_row0;
    // Shared memory.
    T *stages, *state_tile, *forward_out;
    float* stage_floats;  // [STAGES][3][CHUNK]
    float* vectors;       // [columns][WARPS]
    Gamma* gammas;        // [2][CHUNK]
    float* decays;        // [2][2·CHUNK + 2]
    // Global memory: the split's state, and where the split's decay belongs.
    int64_t state_index;
    float* state_memory;
    Gamma all_gates = 0;  // of the split

    // Registers, which run() declares: as members of one object they would share its memory until loops are unrolled,
    // and the compiler would optimise the scalars around them less. A warp has E/WARPS rows of the state, and of its
    // vector the sums of the warp's 16 tokens of each chunk.
    using State = float[ROW_TILES][COLUMN_TILES][4];
    using Vector = float[Z::VECTOR_STEPS][2];
    using Rows = float[1][COLUMN_TILES][4];
    using Inputs = Pack<T, 2>[2][COLUMN_TILES];

    // A step's tokens and shared memory.
    struct Step {
        int t, count;
        bool first_head, last_head;
        bool has_state;  // the state is not 0
        int64_t token;
        T *a_tile, *b_tile, *c_tile;
        const float *floats, *beta;
        Gamma* gamma;
        // Decay of the state until row i reads it; of row i until the end of the chunk; of the whole chunk.
        float *read_decay, *write_decay, *chunk_decay;
    };

    __device__ __forceinline__ ChunkedBlock(const Params<T>& params, const Task& task_) : p(params), task(task_) {
        extern __shared__ __align__(16) unsigned char memory[];
        stages = reinterpret_cast<T*>(memory);
        state_tile = stages + STAGES * Z::STAGE;
        stage_floats = reinterpret_cast<float*>(state_tile + Z::STATE);
        vectors = stage_floats + STAGES * Z::STAGE_FLOATS;
        gammas = reinterpret_cast<Gamma*>(memory + Z::BASE_BYTES);
        decays = reinterpret_cast<float*>(memory + Z::BASE_BYTES) + 4 * CHUNK;
        forward_out = reinterpret_cast<T*>(memory + Z::BASE_BYTES + (p.gate ? Z::GATE_BYTES : 0));

        first_column = task.column_block * BLOCK_M;
        columns = min(BLOCK_M, p.M - first_column);
        seq = sequence_of(p.cum, task.sequence, p.N);
        begin = task.split * p.split_length;
        end = min(begin + p.split_length, seq.length);
        chunks = (end - begin + CHUNK - 1) / CHUNK;
        const int group = int(p.NH / p.NKV);
        steps_per_chunk = REVERSED ? group : 1;
        steps = chunks * steps_per_chunk;
        kv = REVERSED || STATE_ONLY ? task.head : task.head / group;
        first_key_head = REVERSED ? kv * group : kv;
        lane = lane_id();
        warp = int(threadIdx.x) / WARP % WARPS;
        group_column = int(threadIdx.x) / (WARPS * WARP) * M;
        // The row blocks rotate over the warps, so that those with many unmasked keys fall on all four
        // partitions of the SM.
        row_block = int((warp + blockIdx.x) % WARPS);
        row0 = row_block * 16 + lane / 4;
        state_row0 = warp * Z::STATE_ROWS + lane / 4;
        state_index = (task.sequence * (p.splits + 1) + task.split) * p.NKV + kv;
        state_memory = p.states + state_index * p.state_size;
    }

    __device__ __forceinline__ bool has_work() const {
        if (begin >= end) return false;
        return !STATE_ONLY || p.with_last_split || (REVERSED ? begin != 0 : end != seq.length);
    }

    __device__ __forceinline__ int chunk_begin(int step) const {
        const int chunk = step / steps_per_chunk;
        return begin + (REVERSED ? chunks - 1 - chunk : chunk) * CHUNK;
    }

    __device__ __forceinline__ Step step_at(int step) const {
        Step s;
        const int head_step = step % steps_per_chunk;
        s.t = chunk_begin(step);
        s.count = min(CHUNK, end - s.t);
        s.first_head = head_step == 0;
        s.last_head = head_step == steps_per_chunk - 1;
        s.has_state = step >= steps_per_chunk || (!STATE_ONLY && p.has_states);
        s.token = seq.first + s.t;
        s.a_tile = stages + step % STAGES * Z::STAGE;
        s.b_tile = s.a_tile + Z::A;
        s.c_tile = s.b_tile + Z::B;
        s.floats = stage_floats + step % STAGES * Z::STAGE_FLOATS;
        s.beta = s.floats + CHUNK;
        s.gamma = gammas + step % 2 * CHUNK;
        s.read_decay = decays + step % 2 * (2 * CHUNK + 2);
        s.write_decay = s.read_decay + CHUNK;
        s.chunk_decay = s.write_decay + CHUNK;
        return s;
    }

    // Starts the copies of a step's tiles, norms, δ and gates.
    __device__ __forceinline__ void load(int step) const {
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
            const float* norms = p.norm + (RESULT == Result::DQ ? task.head : key_head) * p.norm_stride + token;
            if constexpr (RESULT == Result::DQ || RESULT == Result::DK) {
                load_norm<T, E, CHUNK, THREADS>(floats, norms, count);
            } else if constexpr (RESULT == Result::DV || RESULT == Result::QueryState) {
                load_norm<T, BLOCK_M, CHUNK, THREADS>(floats, norms, count);
            }
            if constexpr (Z::WEIGHTED_VECTOR) {
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
    }

    __device__ __forceinline__ void load_forward_out(int step) const {
        const int t = chunk_begin(step);
        if constexpr (Z::COPY_FORWARD_OUT) {
            load_tile<T, E, CHUNK, THREADS>(forward_out, p.forward_out.at(seq.first + t, task.head),
                                            p.forward_out.token_stride, min(CHUNK, end - t), p.E, p.aligned);
        }
    }

    // f(element in registers, element in global memory)
    template <typename F>
    __device__ __forceinline__ void for_each_state(State& state, F f) const {
        for_each(state, state_row0, group_column, [&](float& x, int row, int column) {
            if (row < p.E && column < columns)
                f(x, state_memory[row * p.state_row + (first_column + column) * p.state_column]);
        });
    }

    __device__ __forceinline__ void load_state(State& state, Vector& vector) const {
        for_each_state(state, [](float& x, float y) { x = y; });
        if (HAS_VECTOR && p.normalise && warp == 0)
#pragma unroll
            for (int r = 0; r < Z::VECTOR_STEPS; r++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int column = r * 64 + lane * 2 + i;
                    if (column < (VECTOR_OF_C ? columns : p.E))
                        vector[r][i] = state_memory[p.state_vector + (VECTOR_OF_C ? first_column : 0) + column];
                }
    }

    // The warps' sums of a column are adjacent. With several groups the first one computes the vector.
    __device__ __forceinline__ void store_vector(const Vector& vector) const {
#pragma unroll
        for (int i = 0; i < Z::VECTOR_STEPS * 2; i++) {
            const int column = i / 2 * 64 + lane * 2 + i % 2;
            if (column < Z::VECTOR_COLUMNS && group_column == 0) vectors[column * WARPS + warp] = vector[i / 2][i % 2];
        }
    }

    __device__ __forceinline__ float vector_at(int column) const {
        const Floats<WARPS> x = load_floats<WARPS>(vectors + column * WARPS);
        float sum = x[0];
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum += x[w];
        return sum;
    }

    // φ and ĝ of the tiles that have arrived, in place.
    __device__ __forceinline__ void transform_operands(const Step& s) const {
        if (p.elu) {
            if constexpr (RESULT == Result::Out || RESULT == Result::DV)
                apply_features<T, E, CHUNK, THREADS>(s.a_tile, s.count, p.E);
            if constexpr (RESULT == Result::Out || RESULT == Result::DV || STATE_ONLY)
                apply_features<T, E, CHUNK, THREADS>(s.b_tile, s.count, p.E);
            if constexpr (RESULT == Result::DQ || RESULT == Result::DK)
                apply_features<T, BLOCK_M, CHUNK, THREADS>(s.c_tile, s.count, columns);
        }
        if (p.normalise) {
            if constexpr (RESULT == Result::DQ) divide_rows<T, E, CHUNK, THREADS>(s.a_tile, s.count, s.floats);
            if constexpr (RESULT == Result::DK) divide_rows<T, E, CHUNK, THREADS>(s.b_tile, s.count, s.floats);
            if constexpr (RESULT == Result::DV || RESULT == Result::QueryState)
                divide_rows<T, BLOCK_M, CHUNK, THREADS>(s.c_tile, s.count, s.floats);
        }
    }

    // Γ and the decays of a chunk from its gates, by the first warp.
    __device__ __forceinline__ void compute_decays(const Step& s) {
        Gamma sum[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
            sum[i] = Gamma(s.floats[2 * CHUNK + lane * TOKENS + i]) + (i > 0 ? sum[i - 1] : Gamma(0));
        Gamma before = warp_inclusive_sum(sum[TOKENS - 1]);
        const Gamma total = __shfl_sync(ALL_LANES, before, WARP - 1);
        before -= sum[TOKENS - 1];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            const Gamma g = before + sum[i];
            const float from_start = exp_for<T>(float(g)), to_end = exp_for<T>(float(total - g));
            s.gamma[lane * TOKENS + i] = g;
            s.read_decay[lane * TOKENS + i] = REVERSED ? to_end : from_start;
            s.write_decay[lane * TOKENS + i] = REVERSED ? from_start : to_end;
        }
        if (lane == 0) *s.chunk_decay = exp_for<T>(float(total));
        if (s.first_head) all_gates += total;
    }

    // The state, rounded to T, as an operand in shared memory.
    __device__ __forceinline__ void store_state_tile(const State& state, const Vector& vector) const {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                T* at = state_tile + (state_row0 + m * 16) * PITCH<T, BLOCK_M> + group_column + n * 8 + lane % 4 * 2;
                store_floats<2>(at, {state[m][n][0], state[m][n][1]});
                store_floats<2>(at + 8 * PITCH<T, BLOCK_M>, {state[m][n][2], state[m][n][3]});
            }
        if (HAS_VECTOR && p.normalise) store_vector(vector);
    }

    // DQ: δ of this thread's rows, from ĝ as it is multiplied (rounded to T).
    __device__ __forceinline__ void compute_delta(const Step& s, const T* a_rows, float (&delta)[2]) const {
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
                    const T* at = p.forward_out.at(s.token + row, task.head) + c;
#pragma unroll
                    for (int i = 0; i < W; i++) y[i] = row < s.count && c + i < p.E ? as_float(at[i]) : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < W; i++) delta[half] = fmaf(x[i], -y[i], delta[half]);
            }
            delta[half] = row_sum(delta[half]);
            if (task.column_block == 0 && group_column == 0 && lane % 4 == 0 && row < s.count)
                p.delta[task.head * p.N + s.token + row] = delta[half];
        }
    }

    // Whether no row of this warp sees any key of the block.
    __device__ __forceinline__ bool masked(int block) const {
        return REVERSED ? block < row_block * 16 / KEYS : block > row_block * 16 / KEYS;
    }

    // Scores of this warp's rows, decayed, masked and rounded to T; Out: their row sums before rounding.
    __device__ __forceinline__ void compute_scores(const Step& s, const A& a, const float (&delta)[2],
                                                   Scores (&scores)[KEY_BLOCKS], float (&score_sum)[2]) const {
        Gamma row_gamma[2] = {};
        if (p.gate) {
            row_gamma[0] = s.gamma[row0];
            row_gamma[1] = s.gamma[row0 + 8];
        }
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; block++) {
            if (masked(block)) continue;
            float c[1][KEY_TILES][4] = {};
            score_matmul<T, E, Z::KEEP_A>(c, a, s.b_tile + block * KEYS * PITCH<T, E>);
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = row0 + e / 2 * 8, j = block * KEYS + n * 8 + lane % 4 * 2 + e % 2;
                    float& x = c[0][n][e];
                    if (RESULT == Result::DQ) x += delta[e / 2];
                    if (RESULT == Result::DK && p.normalise) x += s.beta[j];
                    if (p.gate)
                        x *=
                            exp_for<T>(float(REVERSED ? s.gamma[j] - row_gamma[e / 2] : row_gamma[e / 2] - s.gamma[j]));
                    if (REVERSED ? j < i : j > i) x = 0;
                    if (RESULT == Result::Out) score_sum[e / 2] += x;
                }
            scores[block] = Scores(c);
        }
    }

    // The rows of q or k that dq or dk is the gradient of. They are loaded early, to arrive before the step ends.
    __device__ __forceinline__ void load_inputs(const Step& s, Inputs& inputs) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                const int row = row0 + half * 8, column = group_column + n * 8 + lane % 4 * 2;
                const T* at = p.inputs.at(s.token + row, task.head) + first_column + column;
                if (row < s.count && column + 1 < columns && p.aligned) {
                    inputs[half][n] = load_pack<2>(at);
                } else {
                    Floats<2> x = {};
                    if (row < s.count && column < columns) x[0] = as_float(at[0]);
                    if (row < s.count && column + 1 < columns) x[1] = as_float(at[1]);
                    inputs[half][n] = as_pack<T>(x);
                }
            }
    }

    // o += the vector's share (DQ, DK), or norm += A·vector (Out).
    __device__ __forceinline__ void add_vector(const T* a_rows, const float (&delta)[2], Rows& o,
                                               float (&norm)[2]) const {
        if constexpr (VECTOR_OF_C) {
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float z = vector_at(group_column + n * 8 + lane % 4 * 2 + e);
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        o[0][n][half * 2 + e] =
                            fmaf(RESULT == Result::DQ ? delta[half] : 1.0f, z, o[0][n][half * 2 + e]);
                }
        } else {
            constexpr int W = FULL_WIDTH<T>;
#pragma unroll
            for (int c = 0; c < E; c += 4 * W) {
                const int at = c + lane % 4 * W;
                const Floats<W> x = load_floats<W>(a_rows + at), y = load_floats<W>(a_rows + 8 * PITCH<T, E> + at);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float z = vector_at(at + i);
                    norm[0] = fmaf(x[i], z, norm[0]);
                    norm[1] = fmaf(y[i], z, norm[1]);
                }
            }
        }
    }

    // o = A·state, decayed; what the tokens before the chunk contribute.
    __device__ __forceinline__ void read_state(const Step& s, const A& a, const T* a_rows, const float (&delta)[2],
                                               Rows& o, float (&norm)[2]) const {
        set_zero(o[0]);
        norm[0] = norm[1] = 0;
        if (!s.has_state) return;
        mma_AB<T, BLOCK_M>(o, a, state_tile + group_column);
        if (HAS_VECTOR && p.normalise) add_vector(a_rows, delta, o, norm);
        if (!p.gate) return;
        const float decay[2] = {s.read_decay[row0], s.read_decay[row0 + 8]};
        norm[0] *= decay[0];
        norm[1] *= decay[1];
        scale_rows(o[0], decay);
    }

    // Out: rows divided by d.
    __device__ __forceinline__ void normalise_rows(const Step& s, Rows& o, const float (&norm)[2]) const {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float d = row_sum(norm[half]) + LINEAR_ATTENTION_EPS;
            factor[half] = 1 / d;
            if (p.norm && task.column_block == 0 && group_column == 0 && lane % 4 == 0 && row0 + half * 8 < s.count)
                p.norm[task.head * p.norm_stride + s.token + row0 + half * 8] = d;
        }
        scale_rows(o[0], factor);
    }

    // DQ, DK: dφ becomes dφ·φ'; φ·dφ of each row, which the gradient of the gate needs.
    __device__ __forceinline__ void apply_feature_gradient(const Step& s, const Inputs& inputs, Rows& o) const {
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
                const int64_t heads = REVERSED || STATE_ONLY ? p.NKV : p.NH;
                if (lane % 4 == 0 && row0 + half * 8 < s.count)
                    p.dots[((task.column_block * Z::GROUPS + group_column / M) * heads + task.head) * p.N + s.token +
                           row0 + half * 8] = sum;
            }
    }

    // One step of Out, DQ, DV or DK, up to the update of the state.
    __device__ __forceinline__ void compute_rows(int step, const Step& s, const State& state, const Vector& vector,
                                                 Rows& o, float (&norm)[2]) const {
        if (s.first_head && s.has_state) store_state_tile(state, vector);
        const A a(s.a_tile + row_block * 16 * PITCH<T, E>);
        const T* a_rows = s.a_tile + row0 * PITCH<T, E>;

        float delta[2] = {};
        if constexpr (RESULT == Result::DQ) {
            if (p.normalise) compute_delta(s, a_rows, delta);
        }
        Scores scores[KEY_BLOCKS];
        float score_sum[2] = {};
        compute_scores(s, a, delta, scores, score_sum);
        __syncthreads();  // state_tile is complete; forward_out has been read
        if (RESULT == Result::DQ && p.normalise && step + 1 < steps) load_forward_out(step + 1);

        Inputs inputs;
        if (Z::HAS_INPUTS && s.last_head && (p.elu || p.dots)) load_inputs(s, inputs);
        if (s.first_head) read_state(s, a, a_rows, delta, o, norm);
        norm[0] += score_sum[0];
        norm[1] += score_sum[1];
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; block++) {
            if (masked(block)) continue;
            mma_AB<T, BLOCK_M>(o, scores[block], s.c_tile + block * KEYS * PITCH<T, BLOCK_M> + group_column);
        }
        if (!s.last_head) return;
        if (RESULT == Result::Out && p.normalise) normalise_rows(s, o, norm);
        if (Z::HAS_INPUTS && (p.elu || p.dots)) apply_feature_gradient(s, inputs, o);
        // The rows pass through A's tile, which no warp reads any more; with several groups, once all are done with it.
        if (Z::GROUPS > 1) __syncthreads();
        store_tile<T, E>(p.out.at(s.token + row_block * 16, task.head) + first_column + group_column,
                         p.out.token_stride, s.count - row_block * 16, columns - group_column, p.aligned,
                         s.a_tile + row_block * 16 * PITCH<T, E> + group_column, o);
    }

    // state = decay·state + Bᵀ·C, and the vector of the state likewise.
    __device__ __forceinline__ void update_state(const Step& s, State& state, Vector& vector) const {
        if (p.gate && s.first_head) {
            const float decay = *s.chunk_decay;
            scale_all(state, decay);
#pragma unroll
            for (int i = 0; i < Z::VECTOR_STEPS * 2; i++) vector[i / 2][i % 2] *= decay;
        }
        mma_AtB<T, E, BLOCK_M, CHUNK>(state, s.b_tile + warp * Z::STATE_ROWS, s.c_tile + group_column,
                                      p.gate ? s.write_decay : nullptr);
        if constexpr (HAS_VECTOR) {
            if (p.normalise && group_column == 0) update_vector(s, vector);
        }
    }

    __device__ __forceinline__ void update_vector(const Step& s, Vector& vector) const {
#pragma unroll
        for (int r = 0; r < Z::VECTOR_STEPS; r++) {
            const int column = r * 64 + lane * 2;
            if (column >= Z::VECTOR_COLUMNS) continue;
            constexpr int D = VECTOR_OF_C ? BLOCK_M : E;
            const T* at = (VECTOR_OF_C ? s.c_tile : s.b_tile) + warp * 16 * PITCH<T, D> + column;
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const Floats<2> x = load_floats<2>(at + i * PITCH<T, D>);
                float weight = Z::WEIGHTED_VECTOR ? s.beta[warp * 16 + i] : 1.0f;
                if (p.gate) weight *= s.write_decay[warp * 16 + i];
                sum[0] = fmaf(weight, x[0], sum[0]);
                sum[1] = fmaf(weight, x[1], sum[1]);
            }
            vector[r][0] += sum[0];
            vector[r][1] += sum[1];
        }
    }

    __device__ __forceinline__ void store_state(State& state, const Vector& vector) const {
        for_each_state(state, [](float x, float& y) { y = x; });
        if (task.column_block > 0) return;
        if (p.gate && threadIdx.x == 0) p.decays[state_index] = exp_for<T>(float(all_gates));
        if (!p.normalise) return;
        store_vector(vector);
        __syncthreads();
        for (int e = threadIdx.x; e < p.E; e += THREADS) state_memory[p.state_vector + e] = vector_at(e);
    }

    __device__ __forceinline__ void run() {
        State state = {};
        Vector vector = {};
        Rows o;
        float norm[2];
        load(0);
        if (p.normalise) load_forward_out(0);
        if (!STATE_ONLY && p.has_states) load_state(state, vector);
        for (int step = 0; step < steps; step++) {
            const Step s = step_at(step);
            cp_async_wait_all();
            if (!p.aligned) __syncthreads();  // unaligned tiles are transformed by other threads than those that copied
            transform_operands(s);
            if (p.gate && threadIdx.x < WARP) compute_decays(s);
            __syncthreads();  // the tiles are ready, and no warp reads those of the previous step
            if (STAGES == 2 && step + 1 < steps) load(step + 1);
            if constexpr (!STATE_ONLY) compute_rows(step, s, state, vector, o, norm);
            if (STATE_ONLY || step + steps_per_chunk < steps)
                update_state(s, state, vector);  // the last state is not needed
            if (STAGES == 1 && step + 1 < steps) {
                __syncthreads();
                load(step + 1);
            }
        }
        if constexpr (STATE_ONLY) store_state(state, vector);
    }
};

namespace {

// Zeros for the tokens after the last sequence.
template <typename T, int E, Result RESULT>
__device__ __forceinline__ void zero_tail(const Params<T>& p, const Task& task) {
    using Z = ChunkedConfig<T, E, RESULT>;
    const int first_column = task.column_block * Z::BLOCK_M, columns = min(Z::BLOCK_M, p.M - first_column);
    const int64_t first = max(0, p.cum[p.S]);
    for (int64_t token = first + task.split; token < p.N; token += p.splits) {
        for (int c = threadIdx.x; c < columns; c += Z::THREADS) p.out.at(token, task.head)[first_column + c] = T{};
        if (RESULT == Result::Out && p.norm && task.column_block == 0 && threadIdx.x == 0)
            p.norm[task.head * p.norm_stride + token] = 0;
    }
}

template <typename T, int E, Result RESULT>
__global__ void __launch_bounds__((ChunkedConfig<T, E, RESULT>::THREADS), (ChunkedConfig<T, E, RESULT>::BLOCKS))
    chunked_kernel(const __grid_constant__ Params<T> p) {
    using Z = ChunkedConfig<T, E, RESULT>;
    const Task task = task_of(p.column_blocks, Z::REVERSED || Z::STATE_ONLY ? p.NKV : p.NH, p.splits);
    if (!Z::STATE_ONLY && task.sequence == p.S) return zero_tail<T, E, RESULT>(p, task);
    ChunkedBlock<T, E, RESULT> block(p, task);
    if (block.has_work()) block.run();
}

// ---- launch

// f(std::integral_constant<int, E>) with the smallest compiled size that holds E elements.
template <typename T, typename F>
auto dispatch_size(int64_t E, F f) {
    if (E <= 64) return f(std::integral_constant<int, 64>{});
    using Largest = ChunkedConfig<T, 128, Result::DQ>;
    if (E <= 128 && Largest::BASE_BYTES + Largest::GATE_BYTES + Largest::OUT_BYTES <= max_shared_bytes())
        return f(std::integral_constant<int, 128>{});
    return f(std::integral_constant<int, 256>{});
}

template <Result RESULT, typename T>
void launch_result(const char* op, const Params<T>& p, int64_t blocks, Stream stream) {
    dispatch_size<T>(p.E, [&](auto size) {
        using Z = ChunkedConfig<T, size, RESULT>;
        launch(op, chunked_kernel<T, size, RESULT>, p, blocks, Z::THREADS, Z::bytes(p.gate, p.normalise), stream);
    });
}

}  // namespace

template <typename T>
ColumnBlocks chunked_column_blocks(int64_t E, int64_t M) {
    return dispatch_size<T>(E, [&](auto size) {
        using Z = ChunkedConfig<T, size, Result::Out>;
        const int64_t blocks = ceil_div(M, Z::BLOCK_M);
        return ColumnBlocks{blocks, blocks * Z::GROUPS};
    });
}

template <typename T>
void launch_chunked(const char* op, Result result, const Params<T>& p, int64_t blocks, Stream stream) {
    switch (result) {
        case Result::Out:
            return launch_result<Result::Out>(op, p, blocks, stream);
        case Result::DQ:
            return launch_result<Result::DQ>(op, p, blocks, stream);
        case Result::DV:
            return launch_result<Result::DV>(op, p, blocks, stream);
        case Result::DK:
            return launch_result<Result::DK>(op, p, blocks, stream);
        case Result::KeyState:
            return launch_result<Result::KeyState>(op, p, blocks, stream);
        case Result::QueryState:
            return launch_result<Result::QueryState>(op, p, blocks, stream);
    }
}

template ColumnBlocks chunked_column_blocks<float>(int64_t, int64_t);
template ColumnBlocks chunked_column_blocks<bf16>(int64_t, int64_t);
template void launch_chunked<float>(const char*, Result, const Params<float>&, int64_t, Stream);
template void launch_chunked<bf16>(const char*, Result, const Params<bf16>&, int64_t, Stream);

}  // namespace linear_attention
