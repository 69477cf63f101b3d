// Linear attention on Hopper GPUs: bf16, heads of up to 128 columns (a multiple of 8), attention types linear (elu + 1,
// normalised, no gate) and gated_linear (a gate alone).
//
// The loop is that of linear_attention_chunked.cu: a block processes a split of a sequence for one head, in chunks of
// 64 tokens with the state in registers. dv and dk share a block, because both read k, v, q and ĝ and both need R: dv
// multiplies it by its rows, dk by its columns.
//
// Each thread copies packs of its warp's 16 rows, and transforms the same packs to features, ĝ and δ when they arrive.
// A chunk therefore needs two barriers only: one before its matmuls and one after them.
//
// Resources (CUDA 13.0); chunks of 64 tokens, 2 stages. Two values: linear, gated_linear.
//
//               heads   threads    shared memory, bytes   registers   blocks per SM
//   Out            64       128         60,416,  68,096    168, 168            3, 3
//   DQ             64       128         76,800,  76,288    168, 168            3, 3
//   DV + DK        64       128         76,544,  84,480    168, 235            3, 2
//     grouped      64       128         76,544,  84,480    255, 252            2, 2
//   Out           128       256        136,960, 152,064    209, 225            1, 1
//   DQ            128       256        169,728, 168,448    242, 251            1, 1
//   DV + DK       128       256        169,216, 184,832    255, 255            1, 1
//
// One launch: B = 8, T = 4096, 12 heads of 64 on an H100 with 132 SMs (linear_attention.cu: 4 splits of 1,024 tokens).
// Out has 12 heads · 4 splits · (8 + 1) sequences = 432 blocks. 384 of them loop over 16 chunks; 48 only look for
// tokens after the last sequence. 132 SMs hold 396 blocks at once, so the 384 run in one wave.
#include "kernels/linear_attention/linear_attention_hopper.cuh"

namespace linear_attention {

namespace hopper {

// One block of Out, DQ, or DV and DK together: `p` has the parameters of DV then, `other` those of DK.
template <int D, Result RESULT, bool NORMALISED, bool GROUPED>
struct ChunkBlock {
    using Z = Config<D, RESULT, NORMALISED>;
    static constexpr int TILE = Z::TILE, WARPGROUPS = Z::WARPGROUPS;
    static constexpr bool REVERSED = Z::REVERSED, GATED = Z::GATED;
    // DQ reads the queries only at the end of a step. The copy groups, in order: a step's tiles, its queries, the next
    // step's tiles.
    static constexpr int LATER_GROUPS = RESULT == Result::DQ ? 1 : 0;
    using Rows = float[8][4];
    using Rounded = uint32_t[4][4];

    const Params<T>&p, &other;
    const Task& task;
    const ChunkLoop& loop;
    const ThreadPosition thread;
    int row0, column0;  // of this thread's accumulators
    unsigned char *memory, *state_tile, *queries, *forward_out;
    float *floats, *row_parts, *vectors, *vector_parts;
    float *of_columns, *read_decay;  // of_columns: Γ·log₂e where gated, else DK's δ

    // A step's tokens and shared memory.
    struct Step {
        int count;
        int64_t token;
        bool first_head, last_head;
        const float *vector, *rows;
        unsigned char *a_tile, *b_tile, *c_tile, *value_tile;
    };

    __device__ __forceinline__ ChunkBlock(const Params<T>& params, const Params<T>& other_params, const Task& task_,
                                          const ChunkLoop& loop_, unsigned char* shared)
        : p(params), other(other_params), task(task_), loop(loop_), memory(shared) {
        row0 = thread.row0();
        column0 = thread.warpgroup * 64 + thread.lane % 4 * 2;
        state_tile = memory + Z::STATE;
        queries = memory + Z::QUERIES;
        forward_out = memory + Z::OUT;
        floats = reinterpret_cast<float*>(memory + Z::FLOATS);
        row_parts = floats + Z::ROWS;
        vectors = floats + Z::VECTOR;
        vector_parts = floats + Z::VECTOR_PARTS;
        of_columns = floats + Z::COLUMNS;
        read_decay = floats + Z::READ_DECAY;
    }

    __device__ __forceinline__ Step step_at(int step) const {
        Step s;
        s.count = loop.count(step);
        s.token = loop.token(step);
        s.first_head = !GROUPED || loop.first_of_chunk(step);
        s.last_head = !GROUPED || loop.last_of_chunk(step);
        s.vector = vectors + step % 2 * D;
        s.rows = floats + step % 2 * Z::STAGE_FLOATS;
        s.a_tile = memory + step % 2 * Z::INPUTS * TILE;
        s.b_tile = s.a_tile + TILE;
        s.c_tile = s.b_tile + TILE;
        s.value_tile = s.c_tile + TILE;
        return s;
    }

    // ---- copies

    __device__ __forceinline__ void load(int step) const {
        const int count = loop.count(step), stage = step % 2;
        const int64_t token = loop.token(step), key_head = loop.key_head(step);
        unsigned char* tiles = memory + stage * Z::INPUTS * TILE;
        float* rows = floats + stage * Z::STAGE_FLOATS;
        copy_packs(thread, tiles, p.a, token, task.head, count, p.E);
        copy_packs(thread, tiles + TILE, p.b, token, key_head, count, p.E);
        copy_packs(thread, tiles + 2 * TILE, p.c, token, key_head, count, p.M);
        if constexpr (REVERSED) copy_packs(thread, tiles + 3 * TILE, other.a, token, task.head, count, other.E);
        if constexpr (NORMALISED && RESULT == Result::DQ) {
            copy_rows(thread, rows, p.norm + task.head * p.norm_stride + token, nullptr, count);
            copy_packs(thread, forward_out, p.forward_out, token, task.head, count, p.E);
        }
        if constexpr (NORMALISED && REVERSED)
            copy_rows(thread, rows, p.norm + key_head * p.norm_stride + token, p.delta + key_head * p.N + token, count);
        if constexpr (GATED) copy_gates(thread, rows, p.gate + token * p.gate_stride + loop.kv, p.gate_stride, count);
    }

    __device__ __forceinline__ void load_queries(int step) const {
        if (step < loop.steps)
            copy_packs(thread, queries, p.inputs, loop.token(step), task.head, loop.count(step), p.M);
        cp_async_commit();
    }

    __device__ __forceinline__ void load_state(State<D>& state) const {
        if (NORMALISED && int(threadIdx.x) < D) vectors[threadIdx.x] = 0;
        if (p.has_states) {
            float* const start =
                p.states + ((task.sequence * (p.splits + 1) + task.split) * p.NKV + loop.kv) * p.state_size;
            for_each_state<D>(thread, state, p, start, [](float& x, float y) { x = y; });
            if (NORMALISED && int(threadIdx.x) < (RESULT == Result::DQ ? p.M : p.E))
                vectors[threadIdx.x] = start[p.state_vector + threadIdx.x];
        }
        if constexpr (NORMALISED) __syncthreads();
    }

    // ---- before the first barrier: operands in shared memory

    // row_parts = sign·(this thread's rows of x times those of y), summed over the warpgroup's columns; y(i) is pack i.
    template <typename F>
    __device__ __forceinline__ void store_row_dots(const unsigned char* tile, float sign, F y) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Floats<PACK> x = load_floats<PACK>(reinterpret_cast<const T*>(tile + thread.offset(i))),
                               other_x = y(i);
            float d = 0;
#pragma unroll
            for (int j = 0; j < PACK; j++) d = fmaf(x[j], sign * other_x[j], d);
            d = pack_row_sum(d);
            if (thread.lane % 8 == 0) row_parts[thread.warpgroup * TOKENS + thread.row(i)] = d;
        }
    }

    // Attention type linear: features, ĝ, the rows' share of d or δ, and the chunk's sums for the vector.
    __device__ __forceinline__ void prepare_normalised(const Step& s) const {
        const float *norm = s.rows + thread.warpgroup * 2 * TOKENS, *delta = norm + TOKENS;
        float sum[PACK] = {};
        if constexpr (RESULT == Result::Out) {
            apply_features(thread, s.b_tile, s.count, p.E);
            apply_features(thread, s.a_tile, s.count, p.E);
            const Floats<PACK> z = load_floats<PACK>(s.vector + thread.column());
            store_row_dots(s.a_tile, 1, [&](int) { return z; });  // φ(q)·z
            sum_columns(thread, s.b_tile, nullptr, sum);
        }
        if constexpr (RESULT == Result::DQ) {
            apply_features(thread, s.c_tile, s.count, p.M);
            divide_packs(thread, s.a_tile, norm, s.count, p.E);
            store_row_dots(s.a_tile, -1, [&](int i) {  // δ, from ĝ as it is multiplied (rounded to T)
                return load_floats<PACK>(reinterpret_cast<const T*>(forward_out + thread.offset(i)));
            });
            sum_columns(thread, s.c_tile, nullptr, sum);
        }
        if constexpr (REVERSED) {
            apply_features(thread, s.a_tile, s.count, p.E);
            apply_features(thread, s.b_tile, s.count, p.E);
            divide_packs(thread, s.c_tile, norm, s.count, p.M);
            if (thread.warpgroup == 0 && thread.lane < 16)
                of_columns[thread.warp * 16 + thread.lane] = delta[thread.warp * 16 + thread.lane];
            sum_columns(thread, s.b_tile, delta, sum);
        }
        store_column_sums<D>(thread, sum, vector_parts);
    }

    // Attention type gated_linear: the decays, and c decayed until the end of the chunk. Returns the chunk's decay.
    __device__ __forceinline__ float prepare_gated(const Step& s) const {
        const Decays decays(s.rows + (thread.warpgroup * 4 + thread.warp) * TOKENS, REVERSED);
        if (thread.warpgroup == 0 && thread.warp == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                of_columns[2 * thread.lane + i] = decays.gamma[i];
                read_decay[2 * thread.lane + i] = decays.read[i];
            }
        scale_packs(thread, s.c_tile, memory + Z::DECAYED, s.count, p.M,
                    [&](int i) { return decays.write_of_row(thread.row(i)); });
        return decays.whole;
    }

    // The state, rounded to T, as an operand in shared memory.
    __device__ __forceinline__ void store_state_tile(const State<D>& state) const {
#pragma unroll
        for (int m = 0; m < D / 64; m++) {
            Rounded rounded;
            round_to_A<T>(rounded, state[m]);
            store_rounded<D>(state_tile + thread.warpgroup * D * PANEL_ROW_BYTES, m * 64 + thread.warp * 16, rounded);
        }
    }

    // ---- between the barriers: matmuls

    // The vector of the next step.
    __device__ __forceinline__ void update_vector(int step, const Step& s) const {
        if (int(threadIdx.x) >= D) return;
        const float* part = vector_parts + threadIdx.x;
        vectors[(step + 1) % 2 * D + threadIdx.x] =
            s.vector[threadIdx.x] + ((part[0] + part[D]) + (part[2 * D] + part[3 * D]));
    }

    // Out: φ(q)·z of this thread's rows; DQ: δ, which is stored too.
    __device__ __forceinline__ void load_row_sums(const Step& s, float (&row_sums)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int w = 0; w < WARPGROUPS; w++) row_sums[half] += row_parts[w * TOKENS + row0 + half * 8];
        if (RESULT == Result::DQ && thread.warpgroup == 0 && thread.lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (row0 + half * 8 < s.count) p.delta[task.head * p.N + s.token + row0 + half * 8] = row_sums[half];
    }

    // o = A·state; one wgmma group. DK reads the state by its columns.
    template <Result R>
    __device__ __forceinline__ void read_state(uint32_t a, Rows& o) const {
        const uint32_t left = k_major_descriptor(a), tile = shared_address(state_tile);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if constexpr (R == Result::DK)
                wgmma_k16<T, false, false>(
                    o, left + k_major_step<TOKENS>(k),
                    k_major_descriptor(tile + thread.warpgroup * 64 * PANEL_ROW_BYTES) + k_major_step<D>(k), k > 0);
            else
                wgmma_k16<T, false, true>(
                    o, left + k_major_step<TOKENS>(k),
                    mn_major_descriptor<D>(tile + thread.warpgroup * D * PANEL_ROW_BYTES) + mn_major_step(k), k > 0);
        }
        wgmma_commit();
    }

    // Applies the decay or adds the vector to what read_state computed.
    template <Result R>
    __device__ __forceinline__ void finish_state_rows(const Step& s, const float (&row_sums)[2], Rows& o) const {
        float factor[2] = {1, 1};
        if constexpr (GATED) {
            factor[0] = read_decay[row0];
            factor[1] = read_decay[row0 + 8];
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            Floats<2> v = {};
            if constexpr (NORMALISED) v = load_floats<2>(s.vector + column0 + n * 8);
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[n][e] = GATED             ? o[n][e] * factor[e / 2]
                          : R == Result::DQ ? fmaf(row_sums[e / 2], v[e % 2], o[n][e])
                                            : o[n][e] + v[e % 2];
        }
    }

    // δ, decay and mask of the scores; adds their row sums, which Out needs.
    template <Result R>
    __device__ __forceinline__ void finish_scores(const float (&row_gamma)[2], float (&row_sums)[2],
                                                  Rows& scores) const {
        float score_sums[2] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            Floats<2> of_column = {};  // Γ or δ
            if constexpr (GATED || R == Result::DK)
                of_column = load_floats<2>(of_columns + n * 8 + thread.lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = row0 + e / 2 * 8, column = n * 8 + thread.lane % 4 * 2 + e % 2;
                float& x = scores[n][e];
                if (NORMALISED && R == Result::DQ) x += row_sums[e / 2];
                if (NORMALISED && R == Result::DK) x += of_column[e % 2];
                if (GATED)
                    x *=
                        exp2_fast(REVERSED ? of_column[e % 2] - row_gamma[e / 2] : row_gamma[e / 2] - of_column[e % 2]);
                x = (REVERSED ? column < row : column > row) ? 0.0f : x;
                score_sums[e / 2] += x;
            }
        }
        if (NORMALISED && R == Result::Out)
#pragma unroll
            for (int half = 0; half < 2; half++) row_sums[half] += row_sum(score_sums[half]);
    }

    // o (+)= A·state + scores·C; then, except for DK, which comes before DV, state = decay·state + Bᵀ·C.
    template <Result R>
    __device__ __forceinline__ void multiply(const Step& s, float chunk_decay, float (&row_sums)[2], State<D>& state,
                                             Rows& o) const {
        const uint32_t a = shared_address(R == Result::DK ? s.value_tile : s.a_tile),
                       b = shared_address(R == Result::DK ? s.c_tile : s.b_tile),
                       c = shared_address(R == Result::DK ? s.b_tile : s.c_tile);
        Rows scores;
        wgmma_ABt<T, TOKENS, D>(scores, a, b);
        if (s.first_head) read_state<R>(a, o);
        wgmma_wait<0>();
        pin_registers(scores);
        pin_registers(o);
        if (GATED && R != Result::DK && s.first_head) {
            scale_all(state, chunk_decay);
            pin_state<D>(state);
        }
        float row_gamma[2] = {};
        if constexpr (GATED) {
            row_gamma[0] = of_columns[row0];
            row_gamma[1] = of_columns[row0 + 8];
        }
        if (s.first_head && (GATED || R == Result::DQ || R == Result::DK)) finish_state_rows<R>(s, row_sums, o);
        finish_scores<R>(row_gamma, row_sums, scores);
        Rounded rounded;
        round_to_A<T>(rounded, scores);
        wgmma_AB<T>(o, rounded, c + thread.warpgroup * PANEL);
        if constexpr (R == Result::DK) {
            wgmma_wait<0>();
            pin_registers(o);
        } else {
            add_to_state<D>(thread, state, shared_address(s.b_tile),
                            shared_address(GATED ? memory + Z::DECAYED : s.c_tile));
            wgmma_wait<0>();
            pin_registers(o);
            pin_state<D>(state);
        }
    }

    // ---- results

    // Out: rows divided by d.
    __device__ __forceinline__ void normalise_rows(const Step& s, const float (&row_sums)[2], Rows& o) const {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float d = row_sums[half] + LINEAR_ATTENTION_EPS;
            factor[half] = 1 / d;
            if (p.norm && thread.warpgroup == 0 && thread.lane % 4 == 0 && row0 + half * 8 < s.count)
                p.norm[task.head * p.norm_stride + s.token + row0 + half * 8] = d;
        }
        scale_rows(o, factor);
    }

    // DQ, DK: dφ becomes dφ·φ' (linear), or φ·dφ of each row is stored for the gradient of the gate (gated_linear).
    template <Result R>
    __device__ __forceinline__ void apply_feature_gradient(const Step& s, float* dots, Rows& o) const {
        const unsigned char* inputs = R == Result::DQ ? queries : s.a_tile;
        [[maybe_unused]] float dot[2] = {};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Floats<2> f = load_floats<2>(
                    reinterpret_cast<const T*>(inputs + swizzled_offset<TOKENS>(row0 + half * 8, column0 + n * 8)));
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& d = o[n][half * 2 + e];
                    if constexpr (GATED)
                        dot[half] = fmaf(f[e], d, dot[half]);
                    else  // φ' = min(φ, 1) = min(exp, 1); the tile of keys holds φ
                        d *= fminf(R == Result::DQ ? exp2_fast(f[e] * LOG2E) : f[e], 1.0f);
                }
            }
        if constexpr (GATED) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t heads = REVERSED ? p.NKV : p.NH;
                const float sum = row_sum(dot[half]);
                if (thread.lane % 4 == 0 && row0 + half * 8 < s.count)
                    dots[(thread.warpgroup * heads + task.head) * p.N + s.token + row0 + half * 8] = sum;
            }
        }
    }

    // Accumulators become results, rounded to T.
    template <Result R>
    __device__ __forceinline__ void finish(const Step& s, const Params<T>& params, const float (&row_sums)[2], Rows& o,
                                           Rounded& rounded) const {
        if constexpr (R == Result::Out && NORMALISED) normalise_rows(s, row_sums, o);
        if constexpr (R == Result::DQ || R == Result::DK) apply_feature_gradient<R>(s, params.dots, o);
        round_to_A<T>(rounded, o);
    }

    // Stores the results in whole rows, through a tile that no warp reads any more.
    __device__ __forceinline__ void store(const Step& s, const Params<T>& params, unsigned char* tile,
                                          const Rounded& rounded) const {
        store_rounded<TOKENS>(tile + thread.warpgroup * PANEL, thread.warp * 16, rounded);
        __syncwarp();
        T* to = params.out.at(s.token, task.head);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (thread.row(i) < s.count && thread.column() < params.M)
                *reinterpret_cast<uint4*>(to + thread.row(i) * params.out.token_stride + thread.column()) =
                    *reinterpret_cast<const uint4*>(tile + thread.offset(i));
    }

    __device__ __forceinline__ void run_step(int step, State<D>& state, Rows& o, Rows& o_keys) const {
        const Step s = step_at(step);
        cp_async_wait<LATER_GROUPS>();
        __syncwarp();
        float chunk_decay = 1;
        if constexpr (NORMALISED)
            prepare_normalised(s);
        else
            chunk_decay = prepare_gated(s);
        if (s.first_head) store_state_tile(state);
        fence_async_proxy();
        __syncthreads();  // the tiles are ready
        if (step + 1 < loop.steps) load(step + 1);
        cp_async_commit();
        if constexpr (NORMALISED) update_vector(step, s);
        float row_sums[2] = {};  // Out: d without ε; DQ: δ
        if constexpr (NORMALISED && !REVERSED) load_row_sums(s, row_sums);

        Rounded rounded, rounded_keys;
        if constexpr (REVERSED) {
            multiply<Result::DK>(s, chunk_decay, row_sums, state, o_keys);
            if (s.last_head) finish<Result::DK>(s, other, row_sums, o_keys, rounded_keys);
        }
        multiply<RESULT>(s, chunk_decay, row_sums, state, o);
        if constexpr (RESULT == Result::DQ) {
            cp_async_wait<LATER_GROUPS>();
            __syncwarp();
        }
        if (s.last_head) finish<RESULT>(s, p, row_sums, o, rounded);
        __syncthreads();  // the matmuls have read the tiles
        if (s.last_head) {
            if constexpr (REVERSED) store(s, other, s.value_tile, rounded_keys);
            store(s, p, s.a_tile, rounded);
        }
        if constexpr (RESULT == Result::DQ) {
            __syncwarp();
            load_queries(step + 1);
        }
    }

    __device__ __forceinline__ void run() const {
        load(0);
        cp_async_commit();
        if constexpr (RESULT == Result::DQ) load_queries(0);
        State<D> state = {};
        load_state(state);
        Rows o = {}, o_keys = {};  // o_keys: dk's, beside dv's
        for (int step = 0; step < loop.steps; step++) run_step(step, state, o, o_keys);
    }
};

namespace {

// Zeros for the tokens after the last sequence.
template <Result RESULT>
__device__ __forceinline__ void zero_tail(const Params<T>& p, const Task& task) {
    const int64_t first = max(0, p.cum[p.S]);
    for (int64_t token = first + task.split; token < p.N; token += p.splits) {
        for (int c = threadIdx.x; c < p.M; c += blockDim.x) p.out.at(token, task.head)[c] = T{};
        if (RESULT == Result::Out && p.norm && threadIdx.x == 0) p.norm[task.head * p.norm_stride + token] = 0;
    }
}

template <int D, Result RESULT, bool NORMALISED, bool GROUPED>
__global__ void __launch_bounds__((Config<D, RESULT, NORMALISED>::THREADS), (BLOCKS<D, RESULT, NORMALISED, GROUPED>))
    chunked_hopper_kernel(const __grid_constant__ Params<T> p, const __grid_constant__ Params<T> other) {
    constexpr bool REVERSED = is_reversed(RESULT);
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    pdl_wait();
    pdl_launch_dependents();
    const Task task = task_of(1, REVERSED ? p.NKV : p.NH, p.splits);
    if (task.sequence == p.S) {
        zero_tail<RESULT>(p, task);
        if (REVERSED) zero_tail<RESULT>(other, task);
        return;
    }
    const ChunkLoop loop = loop_of(p, task, !REVERSED, REVERSED, GROUPED);
    if (loop.begin < loop.end) ChunkBlock<D, RESULT, NORMALISED, GROUPED>(p, other, task, loop, memory).run();
}

template <Result RESULT, bool GROUPED>
void run(const char* op, const Params<T>& p, const Params<T>& other, int64_t blocks, Stream stream) {
    dispatch_config(p, [&](auto D, auto normalised) {
        using Z = Config<D, RESULT, normalised>;
        const auto kernel = chunked_hopper_kernel<D, RESULT, normalised, GROUPED>;
        prepare_launch(op, kernel, Z::BYTES, blocks);
        launch_pdl(op, kernel, dim3(unsigned(blocks)), Z::THREADS, Z::BYTES, stream, p, other);
    });
}

}  // namespace

}  // namespace hopper

int hopper_columns(const Params<bf16>& p) {
    const bool linear = p.elu && p.normalise && !p.gate, gated_linear = !p.elu && !p.normalise && p.gate;
    const int size = std::max(p.E, p.M);
    return !is_hopper() || !p.aligned || !(linear || gated_linear) || size > 128 ? 0 : size <= 64 ? 64 : 128;
}

void launch_hopper(const char* op, Result result, const Params<bf16>& p, int64_t blocks, Stream stream) {
    if (blocks == 0) return;
    if (state_only(result)) return hopper::launch_state(op, result, p, blocks, stream);
    if (result == Result::Out)
        hopper::run<Result::Out, false>(op, p, {}, blocks, stream);
    else
        hopper::run<Result::DQ, false>(op, p, {}, blocks, stream);
}

void launch_hopper_dv_dk(const char* op, const Params<bf16>& dv, const Params<bf16>& dk, int64_t blocks,
                         Stream stream) {
    if (blocks == 0) return;
    if (dv.NH == dv.NKV)
        hopper::run<Result::DV, false>(op, dv, dk, blocks, stream);
    else
        hopper::run<Result::DV, true>(op, dv, dk, blocks, stream);
}

}  // namespace linear_attention
