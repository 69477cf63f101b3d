// The fused decode step: from the last tokens of up to LINEAR_SMALL_N sequences to the logits of the next ones, in one
// persistent kernel.
//
//   x = wte[id] + wpe[position]                                   wpe only with learned positions
//   per block: qkv = W_qkv·norm1(x) + b,  att = attention over the cache (decode_attention.h),
//              x ← x + W_proj·att + b,    x ← x + W_fcproj·f(W_fc·norm2(x) + b) + b        (linear.h)
//   logits = W_head·normf(x)
//
// linear() and decode_attention() take five launches a block for the same. Each of them waits for the previous one,
// starts with cold caches and ends with idle SMs; for a small batch that costs more time than reading the weights. Here
// every SM runs one thread block from the first layer to the head. Its share of all weights streams through shared
// memory without a pause, far ahead of the arithmetic. SMs exchange activations word by word: each word carries the
// epoch of its exchange, by which the reader knows that it has arrived, so that no grid-wide barrier is needed.
//
// Flags inside the data words are the idea of NCCL's LL protocol; one persistent kernel for a whole model is known as a
// megakernel (Hazy Research 2025, "Look Ma, No Bubbles!"). x, qkv, att and act are rounded to T where linear() and
// decode_attention() round them; sums are fp32. The logits of a sequence have the same bits whatever the batch, but not
// the bits of those ops, which add in another order.
//
// T is fp32, bf16 or fp16. Packed weights (runtime/model/packed_weight.h) stream as bytes and are converted in
// registers; T then has 16 bits. All layers have softmax attention. QK-norm (kernels/qk_norm.h), a norm after the
// embedding, a bias of the head, windows and layers without RoPE are those of the ops. Needs sm_90 or later;
// decode_step_max_batch() is 0 on other GPUs and on the CPU.
#pragma once

#include <optional>
#include <vector>

#include "kernels/generation/decode_batch.h"
#include "kernels/generation/linear.h"
#include "kernels/generation/lora_rows.h"
#include "runtime/model/linear_weight.h"
#include "runtime/model/packed_weight.h"

// Views of a model's weights.
struct InferenceWeights {
    Tensor wte, wpe;  // [Vp, C], null if it is packed; [positions, C] or null
    const struct PackedWeight* packed_wte = nullptr;
    std::vector<BlockWeights> blocks;
    NormWeights normf;
    LinearWeights head;          // [Vp, C]
    NormWeights embedding_norm;  // after the embedding; or null
    // LoRA adapters that a row may use, by layer, or none. The fused decode step does not read them.
    std::vector<BlockAdapters> adapters;
};

// Options that may differ from layer to layer.
struct DecodeLayer {
    bool rope = true;    // q and k are rotated if the batch has a table
    int64_t window = 0;  // 0: none (decode_attention.h)
};

// A layer's paged KV cache: k, v [pages, KV_PAGE, NKV, HS], and the page table [slots, ⌈capacity / KV_PAGE⌉] int32
// (kernels/kv_page.h).
struct LayerCache {
    Tensor k, v, pages;
};

// Sizes and options that do not change from step to step. slots: rows of the page tables; capacity: the longest
// sequence.
struct DecodeModel {
    int64_t layers = 0, C = 0, NH = 0, NKV = 0, HS = 0, FFN = 0, Vp = 0;  // FFN: columns of fcproj
    int64_t slots = 0, capacity = 0;
    DType dtype = DType::F32;
    Activation activation = Activation::GELU;
    float eps = 1e-5f, scale = 1;
    bool centred = true;  // LayerNorm, else RMSNorm
    bool qk_norm = false, embedding_norm = false, head_bias = false;
    std::optional<Packing> packing = {};     // of wte, the head and all matrices; none: they are in T
    std::vector<DecodeLayer> layer_options;  // by layer; empty: the defaults in all of them
};

// The largest batch size that decode_step takes: min(slots, LINEAR_SMALL_N), or less where the activations of more
// sequences leave too little shared memory for three stages of weights. 0 if the fused decode step does not support the
// model: on older GPUs, if C, HS or FFN is not a multiple of 16 bytes, if Vp is odd, if HS > 128, if a block would have
// more than 256 outputs of one of a layer's matrices, or if one sequence does not fit. With packed weights also if T is
// fp32 or if 32 does not divide C, NH·HS or FFN.
int64_t decode_step_max_batch(const DecodeModel& model);

// Bytes of scratch; 0 if decode_step_max_batch is.
int64_t decode_step_scratch(const DecodeModel& model);
// Prepares scratch (U8) for these weights and the cache of each layer. Call it once, and again if any of them moves.
// Waits for the stream. Errors: wrong shapes or dtypes, a model that is not supported, a negative window, rows that are
// not contiguous or not aligned to 16 bytes.
void decode_step_prepare(Tensor scratch, const DecodeModel& model, const InferenceWeights& weights,
                         const std::vector<LayerCache>& cache, Stream stream);

// logits [N, Vp], N ≤ decode_step_max_batch; ids [N] int32; batch and its finished sequences as for decode_attention,
// except that batch.pages is not read and that the logits of a finished sequence are unspecified. Each call leaves
// scratch ready for the next, whatever the N and max_length of that call. Errors: wrong shapes or dtypes, N too large,
// rows of logits that are not aligned.
void decode_step(Tensor logits, Tensor ids, const DecodeBatch& batch, const DecodeModel& model,
                 const InferenceWeights& weights, Tensor scratch, Stream stream);
