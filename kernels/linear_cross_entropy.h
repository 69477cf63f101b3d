// The head of a language model and its loss, forward and backward: a linear layer, softmax and cross-entropy.
//
//   logits = inp·weightᵀ + bias,   losses and dlogits as in kernels/cross_entropy.h
//   dinp = dlogits·weight,   dweight (+)= dlogitsᵀ·inp,   dbias (+)= Σ_n dlogits[n]
//
// With a LoRA adapter of the weight (models/lora.h) logits += s·h·bᵀ, where h = inp·aᵀ. With dh = s·dlogits·b:
//   db (+)= s·dlogitsᵀ·h,   da (+)= dhᵀ·inp,   dinp += dh·a
//
// n tokens, C channels, vocabulary size V, Vp ≥ V rows of weight. The driver calls it on chunks of tokens, so that no
// [B·T, Vp] buffer exists. T is the dtype of inp: fp32, on CUDA also bf16 and fp16.
//
// On Hopper, in bf16 and without bias, softcap and adapter, no pass over the logits follows the matmul
// (kernels/cross_entropy_hopper.h). Elsewhere matmul.h and cross_entropy.h compute it one after the other.
//
// Throws Error as matmul.h and cross_entropy.h do; a target outside [0, V) is treated as there.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/linear_weight.h"
#include "runtime/model/softcap_config.h"

struct LinearCrossEntropy {
    Tensor losses;    // fp32 [n], nats
    Tensor dinp;      // [n, C] T
    Tensor dweight;   // [Vp, C] fp32 or T, or null: not computed
    Tensor dbias;     // fp32 [Vp], or null
    Tensor inp;       // [n, C] T; undefined afterwards
    Tensor weight;    // [Vp, C] T
    Tensor bias;      // [Vp] T, or null
    Tensor targets;   // int32 [n]; IGNORE_TARGET: no loss
    Tensor logits;    // [n, Vp] T, scratch: undefined afterwards
    int64_t V = 0;    // columns of the logits from V on are padding
    float dloss = 1;  // the gradient of each token's loss: 1/(tokens of the step)
    Tensor dlosses;   // fp32 [n]: instead of dloss, one for each token; null: dloss. Of ignored tokens any value
    Softcap softcap;  // of the logits
    bool accumulate = false;  // gradients of parameters are added to, else overwritten
    LoraWeights lora;         // a [R, C], b [V, R] T, scale; a null: no adapter
    Tensor low_rank;          // [n, R] T, scratch of an adapter: h, which may not change between the two calls below
    Tensor dlow_rank;         // [n, R] T, scratch
    Tensor da, db;            // of a's and b's shape, fp32 or T
};

void linear_cross_entropy(const LinearCrossEntropy& x, Stream stream);

// The same in two calls, for gradients that depend on the losses of other tokens: losses first, which keeps in logits
// what the gradient needs; then dinp, dweight and dbias by x.dlosses. Both get the same x, except for what dlosses
// holds. Between them losses, logits and inp may not change. linear_cross_entropy() with dlosses makes these calls.
void linear_cross_entropy_losses(const LinearCrossEntropy& x, Stream stream);
void linear_cross_entropy_gradient(const LinearCrossEntropy& x, Stream stream);

// The losses alone, with the same bits. dinp, dweight, dbias and dloss are not used, and inp is not changed.
void linear_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream);

// out [n, V or more] += s·(inp·aᵀ)·bᵀ: the adapter's part of logits. low_rank [n, R] receives inp·aᵀ.
void add_low_rank(Tensor out, Tensor low_rank, Tensor inp, const LoraWeights& lora, Stream stream);
