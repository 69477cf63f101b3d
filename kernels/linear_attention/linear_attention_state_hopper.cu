// The states of linear attention on Hopper GPUs: KeyState and QueryState, the sum of each split by itself.
//
// Resources (CUDA 13.0); chunks of 64 tokens, 4 stages (heads of 128: 3). Two values: linear, gated_linear.
//
//               heads   threads    shared memory, bytes   registers   blocks per SM
//   KeyState       64       128         69,376,  70,144     94, 104            3, 3
//   QueryState     64       128         69,376,  70,144    110, 110            3, 3
//   KeyState      128       256        104,704, 104,960    122, 118            2, 2
//   QueryState    128       256        104,704, 104,960    128, 128            2, 2
//
// One launch: B = 8, T = 4096, 12 heads of 64 (4 splits of 1,024 tokens): 12 · 4 · 8 = 384 blocks. 96 of them return at
// once, because no split begins with the state at the end of a sequence; 288 loop over 16 chunks.
#include "kernels/linear_attention/linear_attention_hopper.cuh"

namespace linear_attention::hopper {

template <int D, Result RESULT, bool NORMALISED>
struct StateBlock {
    using Z = Config<D, RESULT, NORMALISED>;
    static constexpr int TILE = Z::TILE, STAGES = Z::STAGES;
    static constexpr bool REVERSED = Z::REVERSED, GATED = Z::GATED;

    const Params<T>& p;
    const Task& task;
    const ChunkLoop& loop;
    const ThreadPosition thread;
    unsigned char* memory;
    float *floats, *vector_parts;
    float all_gates = 0, whole = 1;

    __device__ __forceinline__ StateBlock(const Params<T>& params, const Task& task_, const ChunkLoop& loop_,
                                          unsigned char* shared)
        : p(params), task(task_), loop(loop_), memory(shared) {
        floats = reinterpret_cast<float*>(memory + Z::FLOATS);
        vector_parts = floats + Z::VECTOR_PARTS;
    }

    __device__ __forceinline__ void load(int step) const {
        if (step < loop.steps) {
            const int count = loop.count(step), stage = step % STAGES;
            const int64_t token = loop.token(step), key_head = loop.key_head(step);
            unsigned char* tiles = memory + stage * 2 * TILE;
            float* rows = floats + stage * Z::STAGE_FLOATS;
            copy_packs(thread, tiles, p.b, token, key_head, count, p.E);
            copy_packs(thread, tiles + TILE, p.c, token, key_head, count, p.M);
            if constexpr (NORMALISED && REVERSED)
                copy_rows(thread, rows, p.norm + key_head * p.norm_stride + token, p.delta + key_head * p.N + token,
                          count);
            if constexpr (GATED)
                copy_gates(thread, rows, p.gate + token * p.gate_stride + loop.kv, p.gate_stride, count);
        }
        cp_async_commit();
    }

    // Transforms a step's tiles once they have arrived. z: sums of this thread's rows.
    __device__ __forceinline__ void prepare(int step, float (&z)[PACK]) {
        const int count = loop.count(step);
        unsigned char *const b_tile = memory + step % STAGES * 2 * TILE, *const c_tile = b_tile + TILE;
        const float* const rows = floats + step % STAGES * Z::STAGE_FLOATS;
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        if constexpr (NORMALISED) {
            const float *norm = rows + thread.warpgroup * 2 * TOKENS, *delta = norm + TOKENS;
            apply_features(thread, b_tile, count, p.E);
            if constexpr (REVERSED) divide_packs(thread, c_tile, norm, count, p.M);
            sum_columns(thread, b_tile, REVERSED ? delta : nullptr, z);
        } else {
            const Decays decays(rows + (thread.warpgroup * 4 + thread.warp) * TOKENS, REVERSED);
            whole = loop.first_of_chunk(step) ? decays.whole : 1.0f;
            if (loop.first_of_chunk(step)) all_gates += decays.log_whole;
            scale_packs(thread, c_tile, c_tile, count, p.M, [&](int i) { return decays.write_of_row(thread.row(i)); });
        }
        fence_async_proxy();
    }

    __device__ __forceinline__ void store(State<D>& state, float (&z)[PACK]) const {
        const int64_t state_index = (task.sequence * (p.splits + 1) + task.split) * p.NKV + loop.kv;
        float* const result = p.states + state_index * p.state_size;
        for_each_state<D>(thread, state, p, result, [](float x, float& y) { y = x; });
        if (GATED && threadIdx.x == 0) p.decays[state_index] = exp2_fast(all_gates);
        if constexpr (NORMALISED) {
            store_column_sums<D>(thread, z, vector_parts);
            __syncthreads();
            for (int e = threadIdx.x; e < p.E; e += Z::THREADS)
                result[p.state_vector + e] =
                    vector_parts[e] + vector_parts[D + e] + vector_parts[2 * D + e] + vector_parts[3 * D + e];
        }
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int step = 0; step < STAGES - 1; step++) load(step);
        State<D> state = {};
        float z[PACK] = {};
        prepare(0, z);
        for (int step = 0; step < loop.steps; step++) {
            const uint32_t b_tile = shared_address(memory + step % STAGES * 2 * TILE);
            __syncthreads();  // the step's tiles are ready, and those of the previous step have been read
            load(step + STAGES - 1);
            if (GATED) {
                scale_all(state, whole);
                pin_state<D>(state);
            }
            add_to_state<D>(thread, state, b_tile, b_tile + TILE);
            if (step + 1 < loop.steps) prepare(step + 1, z);
            wgmma_wait<0>();
            pin_state<D>(state);
        }
        store(state, z);
    }
};

namespace {

template <int D, Result RESULT, bool NORMALISED>
__global__ void __launch_bounds__((Config<D, RESULT, NORMALISED>::THREADS), (BLOCKS<D, RESULT, NORMALISED>))
    state_hopper_kernel(const __grid_constant__ Params<T> p) {
    constexpr bool REVERSED = is_reversed(RESULT);
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    pdl_launch_dependents();
    const Task task = task_of(1, p.NKV, p.splits);
    const ChunkLoop loop = loop_of(p, task, false, REVERSED, REVERSED);
    if (loop.begin >= loop.end) return;
    if (!p.with_last_split && (REVERSED ? loop.begin == 0 : loop.end == loop.seq.length)) return;
    StateBlock<D, RESULT, NORMALISED>(p, task, loop, memory).run();
}

template <Result RESULT>
void run(const char* op, const Params<T>& p, int64_t blocks, Stream stream) {
    dispatch_config(p, [&](auto D, auto normalised) {
        using Z = Config<D, RESULT, normalised>;
        const auto kernel = state_hopper_kernel<D, RESULT, normalised>;
        prepare_launch(op, kernel, Z::BYTES, blocks);
        // No programmatic dependent launch: the blocks are few, and would crowd on the SMs where the previous kernel
        // ends first.
        kernel<<<unsigned(blocks), Z::THREADS, Z::BYTES, cuda_stream(stream)>>>(p);
        check_launch(op, stream);
    });
}

}  // namespace

void launch_state(const char* op, Result result, const Params<T>& p, int64_t blocks, Stream stream) {
    if (result == Result::KeyState)
        run<Result::KeyState>(op, p, blocks, stream);
    else
        run<Result::QueryState>(op, p, blocks, stream);
}

}  // namespace linear_attention::hopper
