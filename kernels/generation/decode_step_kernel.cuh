// The fused decode step: a persistent kernel with one block on each SM, from the embedding to the logits.
//
// One warp loads the block's share of all weights into a ring of stages, independently of the activations
// (decode_step_weights.cuh). Eight warps compute. Each multiplies one eighth of the columns of the block's rows, so
// that it waits for its own part of the activations only, and has its first weights in registers by then. After one
// barrier the sums of the warps are added in order. Block b computes the output pairs [b·pairs/blocks,
// (b + 1)·pairs/blocks) of every matrix (decode_step.cuh). What a block has computed goes to the others through the
// grid-wide exchange (decode_step_exchange.cuh). decode_step_plan.cuh has the launch arithmetic of GPT-2 124M and of a
// LLaMA of 1B.
//
// The data flow; ══▶ is the grid-wide exchange, and each block computes its share of every line but the first:
//
//   embedding    ids, positions ─▶ residual [N, C], all of it in every block
//   QKV          residual ─▶ norm1 ─▶ matmul ══▶ q, k, v
//   attention    q, k, v ─▶ rotate, append k and v ─▶ one KV split ══▶ combine the splits in order ══▶ att
//   PROJ         att ─▶ matmul, add residual ══▶ residual
//   FC           residual ─▶ norm2 ─▶ matmul, activation ══▶ act
//   FCPROJ       act ─▶ matmul, add residual ══▶ residual                     (QKV to FCPROJ for each layer)
//   HEAD         residual ─▶ normf ─▶ matmul ─▶ logits [N, Vp]
//
// Resources (sm_90a, CUDA 13.0; 288 threads, one block per SM). An attention task has 1 query head if NKV = NH, else up
// to 2. The limit is 168 registers: with 9 warps one of the SM's four schedulers holds three, which share its 16,384
// registers.
//
//   sequences (NB)               1             2             4             8
//   query heads of a task     1      2      1      2      1      2      1      2
//   bf16: registers          141    164    157    167    163    168    168    168
//         bytes of stack       0      0      0      0      0      8      8      0
//         static KiB         5.2    5.2    5.8    5.9   10.0   10.0   18.2   18.4
//   fp32: registers          141    152    155    158    161    168    168    168   (nothing spilled)
//   extended bf16: registers 152    168    167    168    168    168    168    168
//         bytes of stack       0      0      0      8      0     64      8     56
//   8-bit: registers         147    168    161    168    168    168    167    168
//         bytes of stack       0      0      0      0      0     16      0     24
//         static KiB        10.2   10.2   10.8   10.9   12.0   12.0   22.2   22.4
//   int4: registers          153    168    161    168    167    168    167    168
//         bytes of stack       0      0      0      0      0     16      0     16
//   8-bit extended: stack      0     32      0     56     40    120     56    112
//   int4 extended: stack       0     48      8     72     24    104     40     96
//
// The extended kernel (is_extended in decode_step_plan.cuh) serves the options that GPT-2 and LLaMA lack. It is an
// instance of its own, so that theirs keep their registers: QK-norm where a warp receives a head, before RoPE; the norm
// after the embedding in every block; a bias of the head where logits are finished; and attention tasks that differ
// from layer to layer, which thread 0 finds one layer ahead.
//
// Packed weights have instances, too: one for int4 (decode_step_int4.cu) and one for both fp8 and int8, whose
// conversions are parts of the same kernel of which one is run (decode_step_8bit.cu, decode_step_packed_matmul.cuh).
//
// Dynamic shared memory takes the rest of the SM's 227 KiB: GPT-2 124M 216 KiB with 17 stages of 12 KiB, a LLaMA of 1B
// 187 KiB with 5 stages of 32 KiB (one sequence, bf16).
#pragma once

#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/generation/decode_step_attention.cuh"
#include "kernels/generation/decode_step_matmul.cuh"
#include "kernels/generation/decode_step_packed_matmul.cuh"
#include "kernels/generation/decode_step_plan.cuh"

namespace fused_decode {

// One matmul of the stage loop, for a block.
struct Matmul {
    int which;        // Matrix
    uint32_t epoch;   // of the exchanges of the layer
    int halves;       // 2: gate and up of SwiGLU
    bool has_norm;    // of the input
    PairRange pairs;  // of the block
    __device__ __forceinline__ int owned() const { return pairs.end - pairs.first; }
};

// The computing warps of a block.
template <typename T, int NB, int HEADS, bool EXTENDED, int BITS>
struct ComputingWarps {
    static constexpr bool PACKED = BITS > 0;
    static constexpr int W = FULL_WIDTH<T>, Q = QUAD<T>;
    static constexpr int CHUNK_ROWS = chunk_rows(NB, BITS);
    using WarpProduct = std::conditional_t<PACKED, PackedWarpMatmul<NB, T, BITS>, WarpMatmul<NB, T>>;

    const Arguments<T>& a;
    Shared<NB, EXTENDED, T>& shared;
    Partial<NB, BITS>& partial;
    float2 (*const softmax_statistics)[HEADS];  // of attention
    char* const memory;
    const Layer* const layers;
    T* const rows;      // [N, K] the input of a matmul; for packed weights regrouped()
    T* const residual;  // [N, C] the residual
    const int thread, warp, lane;
    const int my_head;   // of an attention task: the thread has two channels of it
    const Slice normed;  // the warp's part of C

    __device__ __forceinline__ ComputingWarps(const Arguments<T>& arguments, Shared<NB, EXTENDED, T>& of_block,
                                              Partial<NB, BITS>& sums, float2 (*const statistics)[HEADS], char* dynamic)
        : a(arguments),
          shared(of_block),
          partial(sums),
          softmax_statistics(statistics),
          memory(dynamic),
          layers(reinterpret_cast<const Layer*>(memory + a.layers_offset)),
          rows(reinterpret_cast<T*>(memory + a.rows_offset)),
          residual(reinterpret_cast<T*>(memory + a.residual_offset)),
          thread(int(threadIdx.x)),
          warp(thread / WARP),
          lane(thread % WARP),
          my_head(2 * thread / a.HS),
          normed(slice_of<T, PACKED>(a.C, warp)) {}

    // The stage loop, in model order: QKV, attention and PROJ, FC, FCPROJ of each layer, then the head. All matmuls run
    // the same code, so that it stays in the instruction cache.
    __device__ __forceinline__ void run(Ring ring) {
        const uint32_t epoch = shared.epoch;
        prepare_attention();
        sync_computing_warps();
        const int swiglu_halves = is_gated(a.activation) ? 2 : 1;
        int parity = 0;  // of partial
#pragma unroll 1
        for (int i = 0; i <= LAYER_MATRICES * a.num_layers; i++) {
            const int l = i / LAYER_MATRICES, which = l < a.num_layers ? i % LAYER_MATRICES : int(HEAD);
            const MatrixPlan& p = a.plans[which];
            const Layer& layer = layers[which == HEAD ? 0 : l];
            const Matmul op{which, epoch + uint32_t(l) + 1, which == FC ? swiglu_halves : 1,
                            which != PROJ && which != FCPROJ, shared.pairs[which]};
            const int owned = op.owned();
            if (which == PROJ) {
                Attention<HEADS, NB, EXTENDED, T>(a, layer, options_of(l), shared, first_task(l),
                                                  memory + a.attention_offset, softmax_statistics, my_head, op.epoch)
                    .run();
                // While the others finish their attention. The barrier of PROJ makes it visible.
                if (EXTENDED && thread == 0 && l + 1 < a.num_layers) find_first_task(l + 1);
            }

            // The biases of the block's rows: loaded early, stored before the matmul's first barrier.
            const T* const bias = which == HEAD ? nullptr : static_cast<const T*>(layer.bias[which]);
            const bool has_bias = bias && thread < 2 * op.halves * owned;
            T my_bias{};
            if (has_bias) my_bias = bias[bias_row(op, p)];

            const int norm_stage = ring.stage;
            const float* const norm_weight = reinterpret_cast<const float*>(ring.current());
            if (op.has_norm) {
                ring.wait_full();
                ring.advance();
            }
            const Slice slice = slice_of<T, PACKED>(p.K, warp);
            WarpProduct matmul(p, slice, 2 * op.halves * owned);
            matmul.next(ring, slice, min(a.stages_at_once, p.chunk));
            if (i == 0)
                embed();
            else
                receive_input(op, p, slice);
            if (op.has_norm) {
                if (owned > 0) norm(norm_weight, which == HEAD ? a.normf_bias : layer.norm_bias[which == FC]);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared.empty + norm_stage);
            }
            // Early, while no other load is waited for.
            if (which == FC && l + 1 < a.num_layers) prefetch_cache(layers[l + 1], first_task(l + 1));
            if (has_bias) shared.biases[which & 1][thread] = my_bias;
            __syncwarp();
            if (owned == 0) sync_computing_warps();  // so that no block is more than a matmul ahead
            int first = 0, done = 0;                 // stages: of this chunk, multiplied
            while (matmul.taken > 0) {
                float(*const to)[CHUNK_ROWS] =
                    reinterpret_cast<float(*)[CHUNK_ROWS]>(&partial[parity][warp][0][(done - first) * p.stage_rows]);
                matmul.multiply(ring, rows + slice.first * W, shared.zeros, a.N, to);
                done += matmul.taken;
                if (done - first == p.chunk || matmul.rows_left <= 0) {
                    sync_computing_warps();
                    finish_rows(op, p, bias, parity, first, done);
                    parity ^= 1;
                    first = done;
                }
                matmul.next(ring, slice, min(a.stages_at_once, p.chunk - (done - first)));
            }
        }
        // Every block has read the epoch by now, because it has taken part in an exchange since.
        if (blockIdx.x == 0 && thread == 0) *a.epoch = epoch + uint32_t(a.num_layers);
    }

    // The options of layer l; null if the kernel is not extended.
    __device__ __forceinline__ const LayerOptions* options_of(int l) const {
        return EXTENDED ? reinterpret_cast<const LayerOptions*>(layers + a.num_layers) + l : nullptr;
    }
    // The block's first attention task in layer l: the same in all layers, unless the kernel is extended.
    __device__ __forceinline__ Task& first_task(int l) const {
        return shared.first_task[EXTENDED ? l & 1 : 0];
    }
    __device__ __forceinline__ void find_first_task(int l) {
        first_task(l) = {};
        if (int(blockIdx.x) < num_tasks<EXTENDED>(a, options_of(l)))
            first_task(l) =
                task_of<HEADS, EXTENDED>(a, layers[l], shared.positions, shared.slots, options_of(l), int(blockIdx.x));
    }

    // The block's first attention task, and the RoPE rotation of each sequence.
    __device__ __forceinline__ void prepare_attention() {
        if (thread == 0) find_first_task(0);
#pragma unroll 1
        for (int n = warp; n < a.N; n += WARPS) {
            const float* const rotation = a.angles.of(n);
            if (lane == 0) shared.has_rotation[n] = rotation;
            if (rotation)
#pragma unroll 1
                for (int c = lane; c < 2 * a.angles.pairs; c += WARP) shared.rotations[n][c] = rotation[c];
        }
    }

    // Channels c … c + Q − 1 of a token.
    __device__ __forceinline__ Floats<Q> embedded(int64_t id, int c) const {
        if constexpr (PACKED) {
            const MatrixPlan& p = a.plans[HEAD];
            const uint8_t* const row = static_cast<const uint8_t*>(a.wte) + id * p.row_bytes;
            if (p.packing == Packing::Fp8) return dequantise_four<Packing::Fp8>(row, a.C, c);
            if (p.packing == Packing::Int8) return dequantise_four<Packing::Int8>(row, a.C, c);
            return dequantise_four<Packing::Int4>(row, a.C, c);
        } else {
            return load_floats<Q>(static_cast<const T*>(a.wte) + id * a.C + c);
        }
    }

    // The warp's part of the embedding.
    __device__ __forceinline__ void embed() {
        const int first = normed.first * W, quads = normed.count * (W / Q);
#pragma unroll 1
        for (int n = 0; n < a.N; n++) {
            const int64_t id = a.ids[n], position = shared.positions[n];
#pragma unroll 1
            for (int q = lane; q < quads; q += WARP) {
                const int c = first + q * Q;
                Floats<Q> v = {};
                if (id >= 0 && id < a.vocab) v = embedded(id, c);
                if (a.wpe && position >= 0 && position < a.wpe_rows) {
                    const Floats<Q> p = load_floats<Q>(a.wpe + position * a.C + c);
#pragma unroll
                    for (int k = 0; k < Q; k++) v[k] += p[k];
                }
                *reinterpret_cast<Pack<T, Q>*>(residual + n * a.C + c) = as_pack<T>(v);
            }
        }
        if constexpr (EXTENDED) {
            if (!a.embedding_norm_weight) return;
            norm<true>(a.embedding_norm_weight, a.embedding_norm_bias);
            sync_computing_warps();  // shared.norm_parts is free for the next norm
        }
    }

    // The warp's part of the input: the residual where a norm follows, else the input itself.
    __device__ __forceinline__ void receive_input(const Matmul& op, const MatrixPlan& p, Slice slice) {
        const int which = op.which, from = which == QKV || which == HEAD ? FCPROJ : which - 1;
        const uint64_t* const words = which == PROJ ? a.att_words : a.matmul_words[from];
        const int at = slice.first * (W / Q);
        uint2* const to = reinterpret_cast<uint2*>(op.has_norm ? residual : rows) + at;
        const uint32_t epoch = which == QKV || which == HEAD ? op.epoch - 1 : op.epoch;
        const int row = p.K / Q, count = slice.count * (W / Q);
        constexpr int BATCH = NB == 1 ? 3 : NB == 2 ? 4 : 8;
        const bool regroup = PACKED && !op.has_norm;
        const auto arrange = [&](uint2 pair) { return regroup ? regrouped(pair) : pair; };
        if (NB == 1 && count <= WARP)
            receive<1>(to, words + 2 * at, epoch, 1, row, count, arrange);
        else
            receive<BATCH>(to, words + 2 * at, epoch, a.N, row, count, arrange);
    }

    // Calls f(sequence, offset in [N, C], channel) for each group of Q channels of the warp's part of C.
    template <typename F>
    __device__ __forceinline__ void for_each_quad(F f) const {
        const int first = normed.first * W, quads = normed.count * (W / Q);
#pragma unroll 1
        for (int q = lane; q < quads; q += WARP)
#pragma unroll
            for (int n = 0; n < NB; n++)
                if (n < a.N) f(n, n * a.C + first + q * Q, first + q * Q);
    }

    // The warp's part of the residual of each sequence, normalized, to `rows`. weight: [C], then the bias.
    // OF_EMBEDDING: in place, with the bias of the norm after the embedding.
    template <bool OF_EMBEDDING = false>
    __device__ __forceinline__ void norm(const float* weight, bool has_bias) {
        const int quads = normed.count * (W / Q);
        float mean[NB] = {}, m2[NB] = {};
        if (a.centred) {
            for_each_quad([&](int n, int at, int) { mean[n] = add_elements(mean[n], load_floats<Q>(residual + at)); });
            const float per_element = 1 / float(max(quads * Q, 1));
#pragma unroll
            for (int n = 0; n < NB; n++) mean[n] = warp_sum(mean[n]) * per_element;
        }
        for_each_quad(
            [&](int n, int at, int) { m2[n] = add_squared_deviations(m2[n], load_floats<Q>(residual + at), mean[n]); });
#pragma unroll
        for (int n = 0; n < NB; n++) {
            m2[n] = warp_sum(m2[n]);
            if (lane == 0) shared.norm_parts[n][warp] = {mean[n], m2[n]};
        }
        sync_computing_warps();
        // Lane n combines the warps' parts for sequence n.
        RowPart part[WARPS];
        // RMSNorm has no mean. Beside dense weights, the choice would cost a step of GPT-2 124M 3%.
        const bool centred = !PACKED || a.centred;
        float row_mean = 0, row_m2 = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            part[w] = shared.norm_parts[lane % NB][w];
            if (centred) row_mean = fmaf(part[w].mean, float(slice_of<T, PACKED>(a.C, w).count * W), row_mean);
        }
        row_mean /= float(a.C);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float count = float(slice_of<T, PACKED>(a.C, w).count * W);
            row_m2 += centred ? m2_around(row_mean, part[w], count) : part[w].m2;
        }
        const float rstd = rsqrtf(row_m2 / float(a.C) + a.eps);
        float means[NB], rstds[NB];
#pragma unroll
        for (int n = 0; n < NB; n++) {
            means[n] = __shfl_sync(ALL_LANES, row_mean, n);
            rstds[n] = __shfl_sync(ALL_LANES, rstd, n);
        }
        for_each_quad([&](int n, int at, int c) {
            const Floats<Q> x = load_floats<Q>(residual + at), scale = load_floats<Q>(weight + c);
            Floats<Q> shift = {};
            if (has_bias) shift = load_floats<Q>(OF_EMBEDDING ? a.embedding_norm_bias + c : weight + a.C + c);
            Floats<Q> y = normalize(x, means[n], rstds[n], scale, shift);
            if constexpr (PACKED && !OF_EMBEDDING) y = {{y[0], y[2], y[1], y[3]}};  // regrouped()
            *reinterpret_cast<Pack<T, Q>*>((OF_EMBEDDING ? residual : rows) + at) = as_pack<T>(y);
        });
    }

    // Prefetches the keys and values of the block's first attention task to L2.
    __device__ __forceinline__ void prefetch_cache(const Layer& layer, const Task& t) {
#pragma unroll 1
        for (int j = thread; j < t.keys; j += THREADS) {
            const int64_t at = ((t.last - j) * a.NKV + t.kv) * a.HS;
#pragma unroll 1
            for (int c = 0; c < a.HS; c += 128 / int(sizeof(T)))
                for (const void* cache : {layer.k, layer.v}) prefetch_line(static_cast<const T*>(cache) + at + c);
        }
    }

    // The thread's row of the bias, for a thread below 2·halves·owned.
    __device__ __forceinline__ int bias_row(const Matmul& op, const MatrixPlan& p) const {
        const int r = thread / op.owned();
        return 2 * (r / 2 * p.pairs + op.pairs.first + thread - r * op.owned()) + r % 2;
    }

    // The end of the matmul for the stages [first, end): adds the warps' sums, bias, activation and residual, and sends
    // the result or stores the logits. One thread for each output pair and sequence.
    __device__ __forceinline__ void finish_rows(const Matmul& op, const MatrixPlan& p, const T* bias, int parity,
                                                int first, int end) {
        const int which = op.which, owned = op.owned();
        const int n = thread % NB, pair = (first << p.log_per_stage) + thread / NB;
        if (n >= a.N || pair >= min(end << p.log_per_stage, owned)) return;
        const int ring_stage = pair >> p.log_per_stage, begin = ring_stage << p.log_per_stage;
        const int row = (ring_stage - first) * p.stage_rows + 2 * (pair - begin);
        const int to_up = 2 * min(1 << p.log_per_stage, owned - begin);
        float y[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half >= op.halves) break;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 x = *reinterpret_cast<const float2*>(&partial[parity][w][n][row + half * to_up]);
                y[2 * half] += x.x;
                y[2 * half + 1] += x.y;
            }
            if (bias) {
                y[2 * half] += as_float(shared.biases[which & 1][2 * half * owned + pair]);
                y[2 * half + 1] += as_float(shared.biases[which & 1][(2 * half + 1) * owned + pair]);
            }
        }
        const int at = op.pairs.first + pair;  // of all output pairs
        if (which == HEAD) {
            if constexpr (EXTENDED)
                if (a.head_bias) {
                    y[0] += as_float(a.head_bias[2 * at]);
                    y[1] += as_float(a.head_bias[2 * at + 1]);
                }
            store_floats<2>(a.logits + n * a.logits_stride + 2 * at, Floats<2>{{y[0], y[1]}});
            return;
        }
        if (which == FC) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (is_gated(a.activation))
                    y[r] = activate(a.activation, y[r], y[2 + r]);
                else
                    y[r] = activate(a.activation, y[r]);
            }
        }
        if (which == PROJ || which == FCPROJ) {
            const T* const x = residual + n * a.C + 2 * at;
            y[0] += as_float(x[0]);
            y[1] += as_float(x[1]);
        }
        uint64_t* const to = a.matmul_words[which] + int64_t(n) * (2 * p.pairs / PER_WORD<T>);
        send<T>(to, at, y[0], y[1], op.epoch);
    }
};

template <typename T, int NB, int HEADS, bool EXTENDED, int BITS>
__global__ void __launch_bounds__(THREADS + WARP, 1) decode_step_kernel(const __grid_constant__ Arguments<T> a) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared<NB, EXTENDED, T> shared;
    __shared__ Partial<NB, BITS> partial;
    __shared__ float2 softmax_statistics[WARPS][HEADS];
    static_assert(sizeof(shared) + sizeof(partial) + sizeof(softmax_statistics) <= reserved_bytes(NB, BITS));
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    Layer* const layers = reinterpret_cast<Layer*>(memory + a.layers_offset);
#pragma unroll 1
    for (int s = thread; s < a.stages; s += THREADS + WARP) {
        mbarrier_init(shared.full + s, 1);
        mbarrier_init(shared.empty + s, WARPS);
    }
    if (thread == 0) mbarrier_init_fence();
#pragma unroll 1
    for (int i = thread; i < a.num_layers * int(LAYER_BYTES<EXTENDED> / sizeof(uint64_t)); i += THREADS + WARP)
        reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    if (thread < a.N) {
        shared.positions[thread] = a.positions[thread];
        shared.slots[thread] = a.slots[thread];
    }
    if (thread == 0) shared.epoch = *a.epoch;
    if (BITS > 0 && thread < int(PACKED_GROUP)) shared.zeros[thread] = from_float<T>(0);
    if (thread < MATRICES) shared.pairs[thread] = pairs_of_block(a.plans[thread]);
    __syncthreads();
    Ring ring{shared.full, shared.empty, memory + a.ring_offset, a.stages, a.stage_bytes};
    if (warp == WARPS) {
        if (BITS > 0 || lane == 0) stream_weights<T, BITS>(a, layers, shared.pairs, ring);
        return;
    }
    ComputingWarps<T, NB, HEADS, EXTENDED, BITS>(a, shared, partial, softmax_statistics, memory).run(ring);
#endif
}

// --- launch

template <typename T, int BITS>
void launch(const char* op, const Arguments<T>& a, const Plan& z, bool extended, Stream stream) {
    const auto run = [&](auto kernel) {
        const int64_t bytes = z.shared_bytes();
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
        cudaLaunchAttribute cooperative = {};
        cooperative.id = cudaLaunchAttributeCooperative;  // all blocks are resident at once, or the launch fails
        cooperative.val.cooperative = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid_of(z.blocks);
        config.blockDim = dim3(THREADS + WARP);
        config.dynamicSmemBytes = size_t(bytes);
        config.stream = cuda_stream(stream);
        config.attrs = &cooperative;
        config.numAttrs = 1;
        cuda_check(cudaLaunchKernelEx(&config, kernel, a), op);
        check_launch(op, stream);
    };
    const auto run_for = [&](auto batch) {
        constexpr int NB = decltype(batch)::value;
        const bool one_head = a.NH == a.NKV;
        if (extended)
            run(one_head ? decode_step_kernel<T, NB, 1, true, BITS>
                         : decode_step_kernel<T, NB, QUERY_TILE, true, BITS>);
        else
            run(one_head ? decode_step_kernel<T, NB, 1, false, BITS>
                         : decode_step_kernel<T, NB, QUERY_TILE, false, BITS>);
    };
    if (a.N == 1) return run_for(std::integral_constant<int, 1>{});
    if (a.N == 2) return run_for(std::integral_constant<int, 2>{});
    if (a.N <= 4) return run_for(std::integral_constant<int, 4>{});
    run_for(std::integral_constant<int, int(LINEAR_SMALL_N)>{});
}

// Packed weights: decode_step_8bit.cu, decode_step_int4.cu.
extern template void launch<bf16, 8>(const char*, const Arguments<bf16>&, const Plan&, bool, Stream);
extern template void launch<fp16, 8>(const char*, const Arguments<fp16>&, const Plan&, bool, Stream);
extern template void launch<bf16, 4>(const char*, const Arguments<bf16>&, const Plan&, bool, Stream);
extern template void launch<fp16, 4>(const char*, const Arguments<fp16>&, const Plan&, bool, Stream);

}  // namespace fused_decode
