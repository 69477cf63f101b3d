// A step of generation for a few texts in one launch: from their last tokens to the logits of the next.
//
//   x = wte[id] + wpe[position]                                   wpe only with learned positions
//   per block: qkv = W_qkv·norm1(x) + b,  att = attention over the cache (decode_attention.h),
//              x ← x + W_proj·att + b,    x ← x + W_fcproj·f(W_fc·norm2(x) + b) + b        (linear.h)
//   logits = W_head·normf(x)
//
// What linear() and decode_attention() compute one after the other takes five launches a block, each of which waits for
// the one before, finds its caches cold and ends in a tail: for a few texts that is more time than reading the weights
// takes. Here every SM runs one block from the first layer to the head. Its part of all weights streams
// through shared memory without a stop, far ahead of the arithmetic, and what the SMs tell each other goes
// from hand to hand: each word of an activation carries the number of the exchange it belongs to, so that it is its own
// signal and nobody waits for a barrier.
//
// x, qkv, att and act are rounded to T where linear() and decode_attention() round them; sums are fp32. A text's logits
// are the same bits whoever shares the step, but not the bits of those ops, whose sums have another order.
//
// For layers of softmax attention. Needs sm_90 or later. On the CPU, where nothing is launched, decode_step_max_batch() is
// 0.
#pragma once

#include <vector>

#include "kernels/generation/decode_batch.h"
#include "kernels/generation/linear.h"

struct NormWeights {
    Tensor weight, bias;  // [C] fp32; bias may be null
};
struct LinearWeights {
    Tensor weight, bias;  // [OC, C], [OC] or null
};
struct BlockWeights {
    NormWeights norm1, norm2;
    LinearWeights qkv, proj, fc, fcproj;
    LinearWeights gate;  // kind G: [NKV, C], [NKV] fp32
    Tensor headnorm;     // kind G: [HS] fp32
};
// Views of a model's weights.
struct InferenceWeights {
    Tensor wte, wpe;  // [Vp, C]; [positions, C] or null
    std::vector<BlockWeights> blocks;
    NormWeights normf;
    Tensor head;  // [Vp, C]
};

// What is the same in every step of a model. slots and capacity: of its cache.
struct DecodeModel {
    int64_t layers = 0, C = 0, NH = 0, NKV = 0, HS = 0, FFN = 0, Vp = 0;  // FFN: columns of fcproj
    int64_t slots = 0, capacity = 0;
    DType dtype = DType::F32;
    Activation activation = Activation::GELU;
    float eps = 1e-5f, scale = 1;
    bool centred = true;  // LayerNorm, else RMSNorm
};

// Texts that a step takes at most: as many as there are slots, up to LINEAR_SMALL_N, or fewer; 0 where such a model
// can't be run this way: on an old GPU, with channels or a head size that fill no 16 bytes, heads wider than 128, or
// rows too long for shared memory.
int64_t decode_step_max_batch(const DecodeModel& model);

// Bytes of scratch; 0 if decode_step_max_batch is.
int64_t decode_step_scratch(const DecodeModel& model);
// Prepares scratch (U8) for these weights and this cache, k and v [slots, capacity, NKV, HS] for each layer: once, and
// again if any of them moves. Throws Error where a shape or dtype is wrong, or rows are not contiguous and aligned to
// 16 bytes. Waits for the stream.
void decode_step_prepare(Tensor scratch, const DecodeModel& model, const InferenceWeights& weights,
                         const std::vector<Tensor>& k, const std::vector<Tensor>& v, Stream stream);

// logits [N, Vp], N ≤ decode_step_max_batch; ids [N] int32; place as for decode_attention. scratch is left as the next call
// needs it, whatever that one's N and max_length.
void decode_step(Tensor logits, Tensor ids, const DecodeBatch& place, const DecodeModel& model,
                 const InferenceWeights& weights, Tensor scratch, Stream stream);
