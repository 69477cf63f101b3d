// Softmax and cross-entropy in one pass over each row of logits; the gradient overwrites the logits.
//
//   z = f(logits)                                                          (f: softcap.h; without a softcap z = logits)
//   loss[n] = ln Σ_{v<V} exp(z[n, v]) − z[n, target[n]]                    (0 where target[n] = IGNORE_TARGET)
//   dlogits[n, v] = dloss·(softmax(z[n])[v] − [v = target[n]])·f'(logits[n, v])    (0 where ignored, and for v ≥ V)
//
// n tokens, vocabulary size V, Vp ≥ V columns in memory; padded columns never enter the softmax. The driver calls it on
// chunks of tokens, so that no [B·T, V] buffer exists.
// T is the dtype of the logits: fp32, on CUDA also bf16 and fp16. Losses (nats) and sums are fp32.
//
// Throws Error on a wrong shape or dtype, if V > Vp, and if the cap is not positive. A target outside [0, V) that is
// not IGNORE_TARGET is an Error on the CPU; on CUDA, where the launch does not wait for the kernel, the token's loss is
// NaN, which skips the step.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/softcap_config.h"

constexpr int32_t IGNORE_TARGET = -1;

// losses [n] fp32; logits [n, Vp] T; targets [n] int32.
void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, Softcap softcap, Stream stream);

// The same, and overwrites logits with dlogits. dloss is the gradient of each token's loss: 1/(tokens of the step).
void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    Softcap softcap, Stream stream);

// The gradient alone, for losses that cross_entropy_forward computed from the same logits: overwrites them with
// dlogits. dlosses [n] fp32: the gradient of each token's loss, instead of dloss; of ignored tokens any value, also
// NaN. The softmax p is exp((z − z[target]) − loss). Its relative error is some u·(1 + loss + |ln p|), u = 2⁻²⁴,
// because the loss is fp32.
void cross_entropy_backward(Tensor logits, Tensor losses, Tensor dlosses, Tensor targets, int64_t V, Softcap softcap,
                            Stream stream);
