// The fused decode step: a persistent kernel with one block on each SM, from the embedding to the logits.
//
// One warp loads the block's share of all weights into a ring of stages, independently of the activations
// (decode_step_weights.cuh). Eight warps compute. Each multiplies one eighth of the columns of the block's rows, so
// that it waits for its own part of the activations only, and has its first weights in registers by then. One more warp
// adds the sums of the eight in order and sends the result, while these load the next matmul's weights. Block b
// computes the output pairs [b·pairs/blocks, (b + 1)·pairs/blocks) of every matrix (decode_step.cuh). What a block has
// computed goes to the others through the grid-wide exchange (decode_step_exchange.cuh). decode_step_plan.cuh has the
// launch arithmetic of GPT-2 124M and of a LLaMA of 1B.
//
// What the warps share: `rows`, `residual` and the norm's parts are written again once all eight have multiplied
// (sums_full); Partial, of which there are two, once the sums before the last are added (sums_free). The finishing warp
// reads the residual at its own outputs, which a computing warp overwrites with what it has sent.
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
// Resources (sm_90a, CUDA 13.0; 320 threads, with packed weights 288; one block per SM). An attention task has 1 query
// head if NKV = NH, else up to 2. The limit is 168 registers: with 9 or 10 warps one of the SM's four schedulers holds
// three, which share its 16,384 registers.
//
//   sequences (NB)               1             2             4             8
//   query heads of a task     1      2      1      2      1      2      1      2
//   bf16: registers          132    159    142    163    156    168    162    168
//         bytes of stack       0      0      0      0      0      8      0      0
//         static KiB         5.4    5.4    5.9    6.0   10.0   10.1   18.4   18.4
//   fp32: registers          127    148    136    152    151    168    168    168   (nothing spilled)
//   extended bf16: registers 147    168    159    168    167    168    167    168
//         bytes of stack       0      0      0      8      0     56      0     56
//   8-bit: registers         151    168    159    168    168    168    167    168
//         bytes of stack       0      0      0      8      0     24      0     24
//         static KiB        10.4   10.4   10.9   11.0   12.0   12.1   22.4   22.4
//   int4: registers          159    168    163    168    167    168    167    168
//         bytes of stack       0      0      0      8      0     24      0     24
//   8-bit extended: stack      0     32      0     56     40     64     24     72
//   int4 extended: stack       0     16      0     24     24     80     16     56
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
    int layer;        // 0 for the head
    uint32_t epoch;   // of the exchanges of the layer
    int halves;       // 2: gate and up of SwiGLU
    bool has_norm;    // of the input
    PairRange pairs;  // of the block
    __device__ __forceinline__ int owned() const { return pairs.end - pairs.first; }
};

// Matmul i of a step, in model order: QKV, PROJ, FC, FCPROJ of each layer, then the head. epoch: of the step before.
template <typename T>
__device__ __forceinline__ Matmul matmul_of(const Arguments<T>& a, int i, uint32_t epoch, const PairRange* pairs) {
    const int l = i / LAYER_MATRICES, which = l < a.num_layers ? i % LAYER_MATRICES : int(HEAD);
    return {which,
            which == HEAD ? 0 : l,
            epoch + uint32_t(l) + 1,
            which == FC && is_gated(a.activation) ? 2 : 1,
            which != PROJ && which != FCPROJ,
            pairs[which]};
}

// The end of a block's matmuls: adds the computing warps' sums, bias, activation and residual, and sends the result or
// stores the logits.
template <typename T, int NB, bool EXTENDED, int BITS>
struct Outputs {
    const Arguments<T>& a;
    Shared<NB, EXTENDED, T>& shared;
    const Partial<NB, BITS>& partial;
    const T* const residual;

    // The biases of the block's rows. Computing warps that end matmuls (packed weights) store some for the next one
    // while others still add these.
    __device__ __forceinline__ T* biases_of(int which) const { return shared.biases[BITS > 0 ? which & 1 : 0]; }
    // The row of the bias whose value is i-th there: those of each pair's first output come first, then those of the
    // second; of gate, then of up.
    __device__ __forceinline__ static int bias_row(const Matmul& op, const MatrixPlan& p, int i) {
        const int owned = op.owned(), r = (i >= owned) + (i >= 2 * owned) + (i >= 3 * owned);
        return 2 * (r / 2 * p.pairs + op.pairs.first + i - r * owned) + r % 2;
    }

    // An output pair of the block, and the rows of Partial that have its sums: row and row + 1, with SwiGLU those of
    // gate; those of up are `to_up` further.
    struct Output {
        int pair, row, to_up;
    };
    // first: stage of the chunk.
    __device__ __forceinline__ static Output output_of(const Matmul& op, const MatrixPlan& p, int first, int pair) {
        const int ring_stage = pair >> p.log_per_stage, begin = ring_stage << p.log_per_stage;
        return {pair, (ring_stage - first) * p.stage_rows + 2 * (pair - begin),
                2 * min(1 << p.log_per_stage, op.owned() - begin)};
    }

    // Of sequence n; the sums are in partial[parity].
    __device__ __forceinline__ void finish(const Matmul& op, const MatrixPlan& p, bool has_bias, int parity,
                                           const Output& output, int n) const {
        const auto& [pair, row, to_up] = output;
        const int which = op.which, owned = op.owned();
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
            if (has_bias) {
                y[2 * half] += as_float(biases_of(which)[2 * half * owned + pair]);
                y[2 * half + 1] += as_float(biases_of(which)[(2 * half + 1) * owned + pair]);
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
    const Outputs<T, NB, EXTENDED, BITS> outputs;

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
          normed(slice_of<T, PACKED>(a.C, warp)),
          outputs{a, shared, partial, residual} {}

    // The stage loop, in model order: QKV, attention and PROJ, FC, FCPROJ of each layer, then the head. All matmuls run
    // the same code, so that it stays in the instruction cache.
    __device__ __forceinline__ void run(Ring ring) {
        const uint32_t epoch = shared.epoch;
        prepare_attention();
        sync_computing_warps();
        int chunk = 0;  // of all matmuls
#pragma unroll 1
        for (int i = 0; i <= LAYER_MATRICES * a.num_layers; i++) {
            const Matmul op = matmul_of(a, i, epoch, shared.pairs);
            const int l = op.layer, which = op.which, owned = op.owned();
            const MatrixPlan& p = a.plans[which];
            const Layer& layer = layers[l];
            if (which == PROJ) {
                Attention<HEADS, NB, EXTENDED, T>(a, layer, options_of(l), shared, first_task(l),
                                                  memory + a.attention_offset, softmax_statistics, my_head, op.epoch)
                    .run();
                // While the others finish their attention. The barrier of PROJ makes it visible.
                if (EXTENDED && thread == 0 && l + 1 < a.num_layers) find_first_task(l + 1);
            }

            // Packed: the biases of the block's rows are loaded early, and stored before the matmul's first barrier.
            const T* const bias = PACKED && which != HEAD ? static_cast<const T*>(layer.bias[which]) : nullptr;
            const bool has_bias = bias && thread < 2 * op.halves * owned;
            T my_bias{};
            if (has_bias) my_bias = bias[outputs.bias_row(op, p, thread)];

            const int norm_stage = ring.stage;
            const float* const norm_weight = reinterpret_cast<const float*>(ring.current());
            if (op.has_norm) {
                ring.wait_full();
                ring.advance();
            }
            const Slice slice = slice_of<T, PACKED>(p.K, warp);
            WarpProduct matmul(p, slice, 2 * op.halves * owned);
            matmul.next(ring, slice, min(a.stages_at_once, p.chunk));
            // All warps have multiplied: `rows` may be overwritten.
            if (!PACKED && chunk > 0) mbarrier_wait(shared.sums_full + (chunk - 1) % 2, (chunk - 1) / 2 % 2);
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
            if (has_bias) outputs.biases_of(which)[thread] = my_bias;
            __syncwarp();
            if (owned == 0) sync_computing_warps();  // so that no block is more than a matmul ahead
            int first = 0, done = 0;                 // stages: of this chunk, multiplied
            while (matmul.taken > 0) {
                const int parity = chunk % 2;  // of partial
                if (!PACKED && done == first) mbarrier_wait(shared.sums_free + parity, chunk / 2 % 2 ^ 1);
                float(*const to)[CHUNK_ROWS] =
                    reinterpret_cast<float(*)[CHUNK_ROWS]>(&partial[parity][warp][0][(done - first) * p.stage_rows]);
                matmul.multiply(ring, rows + slice.first * W, shared.zeros, a.N, to);
                done += matmul.taken;
                if (done - first == p.chunk || matmul.rows_left <= 0) {
                    if constexpr (PACKED) {
                        sync_computing_warps();
                        const auto output = outputs.output_of(op, p, first, (first << p.log_per_stage) + thread / NB);
                        if (output.pair < min(done << p.log_per_stage, owned) && thread % NB < a.N)
                            outputs.finish(op, p, bias, parity, output, thread % NB);
                    } else {
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(shared.sums_full + parity);
                    }
                    chunk++;
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
        // One pass: differences from the slice's first element (shifted data: Chan, Golub and LeVeque, 1983). Squares
        // of n of them are at most n times M2, so that nothing is lost where the mean is large.
        float shift[NB] = {}, sum[NB] = {}, squares[NB] = {};
        __syncwarp();  // a lane has received that element
        if (a.centred && normed.count > 0)
#pragma unroll
            for (int n = 0; n < NB; n++) shift[n] = as_float(residual[min(n, a.N - 1) * a.C + normed.first * W]);
        for_each_quad([&](int n, int at, int) {
            const Floats<Q> x = load_floats<Q>(residual + at);
#pragma unroll
            for (int k = 0; k < Q; k++) {
                sum[n] += x[k] - shift[n];
                squares[n] = fmaf(x[k] - shift[n], x[k] - shift[n], squares[n]);
            }
        });
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2)
#pragma unroll
            for (int n = 0; n < NB; n++) {
                sum[n] += __shfl_xor_sync(ALL_LANES, sum[n], offset);
                squares[n] += __shfl_xor_sync(ALL_LANES, squares[n], offset);
            }
        // Products that are added to have a rounding of their own (__fmul_rn): the same bits for any number of
        // sequences.
        const float share = a.centred ? shared.norm_shares[warp] : 0.0f;
        if (lane == 0)
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const float mean = __fmul_rn(sum[n], share);
                shared.norm_parts[n][warp] = {shift[n] + mean, fmaf(-mean, sum[n], squares[n])};
            }
        sync_computing_warps();
        // Lane n combines the warps' parts for sequence n.
        float row_mean = 0, row_m2 = 0;
        RowPart part[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            part[w] = shared.norm_parts[lane % NB][w];
            row_mean = fmaf(part[w].mean, shared.norm_counts[w], row_mean);
        }
        row_mean = __fmul_rn(row_mean, a.per_channel);
#pragma unroll
        for (int w = 0; w < WARPS; w++) row_m2 += m2_around(row_mean, part[w], shared.norm_counts[w]);
        const float rstd = rsqrtf(fmaf(row_m2, a.per_channel, a.eps));
        float means[NB], rstds[NB];
#pragma unroll
        for (int n = 0; n < NB; n++) {
            means[n] = NB == 1 ? row_mean : __shfl_sync(ALL_LANES, row_mean, n);
            rstds[n] = NB == 1 ? rstd : __shfl_sync(ALL_LANES, rstd, n);
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
};

// The warp that ends matmuls of dense weights, while the computing warps load the next one's.
template <typename T, int NB, bool EXTENDED>
struct FinishingWarp {
    const Outputs<T, NB, EXTENDED, 0> outputs;
    const Layer* const layers;
    const int lane;

    __device__ __forceinline__ void run() const {
        const auto& a = outputs.a;
        auto& shared = outputs.shared;
        const uint32_t epoch = shared.epoch;
        int chunk = 0;  // of all matmuls
#pragma unroll 1
        for (int i = 0; i <= LAYER_MATRICES * a.num_layers; i++) {
            const Matmul op = matmul_of(a, i, epoch, shared.pairs);
            const MatrixPlan& p = a.plans[op.which];
            const T* const bias = op.which == HEAD ? nullptr : static_cast<const T*>(layers[op.layer].bias[op.which]);
            if (bias) {
#pragma unroll 1
                for (int j = lane; j < 2 * op.halves * op.owned(); j += WARP)
                    outputs.biases_of(op.which)[j] = bias[outputs.bias_row(op, p, j)];
                __syncwarp();
            }
            const int per_stage = 1 << p.log_per_stage, stages = (op.owned() + per_stage - 1) >> p.log_per_stage;
#pragma unroll 1
            for (int first = 0; first < stages; first += p.chunk, chunk++) {
                const int begin = first << p.log_per_stage,
                          end = min(min(first + p.chunk, stages) << p.log_per_stage, op.owned());
                auto output = outputs.output_of(op, p, first, begin + lane / NB);
                mbarrier_wait(shared.sums_full + chunk % 2, chunk / 2 % 2);
#pragma unroll 1
                while (output.pair < end) {
                    if (lane % NB < a.N) outputs.finish(op, p, bias, chunk % 2, output, lane % NB);
                    output = outputs.output_of(op, p, first, output.pair + WARP / NB);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared.sums_free + chunk % 2);
            }
        }
    }
};

template <typename T, int NB, int HEADS, bool EXTENDED, int BITS>
__global__ void __launch_bounds__(block_threads(BITS), 1) decode_step_kernel(const __grid_constant__ Arguments<T> a) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared<NB, EXTENDED, T> shared;
    __shared__ Partial<NB, BITS> partial;
    __shared__ float2 softmax_statistics[WARPS][HEADS];
    static_assert(sizeof(shared) + sizeof(partial) + sizeof(softmax_statistics) <= reserved_bytes(NB, BITS));
    constexpr int BLOCK_THREADS = block_threads(BITS);
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    Layer* const layers = reinterpret_cast<Layer*>(memory + a.layers_offset);
#pragma unroll 1
    for (int s = thread; s < a.stages; s += BLOCK_THREADS) {
        mbarrier_init(shared.full + s, 1);
        mbarrier_init(shared.empty + s, WARPS);
    }
    if (thread < 2) {
        mbarrier_init(shared.sums_full + thread, WARPS);
        mbarrier_init(shared.sums_free + thread, 1);
    }
    mbarrier_init_fence();
#pragma unroll 1
    for (int i = thread; i < a.num_layers * int(LAYER_BYTES<EXTENDED> / sizeof(uint64_t)); i += BLOCK_THREADS)
        reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    if (thread < a.N) {
        shared.positions[thread] = a.positions[thread];
        shared.slots[thread] = a.slots[thread];
    }
    if (thread == 0) shared.epoch = *a.epoch;
    if (thread < WARPS) {
        const float count = float(slice_of<T, (BITS > 0)>(a.C, thread).count * FULL_WIDTH<T>);
        shared.norm_counts[thread] = count;
        shared.norm_shares[thread] = 1 / max(count, 1.0f);
    }
    if (BITS > 0 && thread < int(PACKED_GROUP)) shared.zeros[thread] = from_float<T>(0);
    if (thread < MATRICES) shared.pairs[thread] = pairs_of_block(a.plans[thread]);
    __syncthreads();
    Ring ring{shared.full, shared.empty, memory + a.ring_offset, a.stages, a.stage_bytes};
    if (warp == WARPS) {
        if (BITS > 0 || lane == 0) stream_weights<T, BITS>(a, layers, shared.pairs, ring);
        return;
    }
    if constexpr (BITS == 0)
        if (warp == WARPS + 1) {
            const T* const residual = reinterpret_cast<const T*>(memory + a.residual_offset);
            return FinishingWarp<T, NB, EXTENDED>{{a, shared, partial, residual}, layers, lane}.run();
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
        config.blockDim = dim3(block_threads(BITS));
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
