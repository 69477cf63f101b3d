// Log-probabilities of several tokens of a row from that of one of them, without a second pass over the logits:
//
//   logprobs[b, i] = logits[b, ids[b, i]] − logits[b, target[b]] − loss[b]
//
// where loss[b] = −ln p(target[b]) (kernels/cross_entropy.h). NaN where target[b] < 0.
// Errors: wrong shape or dtype; on the CPU an id outside the row.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// logprobs [B, k] fp32; ids [B, k], targets [B] int32; losses [B] fp32; logits [B, Vp] fp32, on CUDA also bf16 or fp16.
void token_logprobs(Tensor logprobs, Tensor ids, Tensor losses, Tensor targets, Tensor logits, Stream stream);
