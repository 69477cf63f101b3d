// The activation functions of the MLP, forward and backward, elementwise.
//
//   GELU, tanh form   u = √(2/π)·(x + 0.044715·x³),   out = x/2·(1 + tanh u)
//                     dinp = dout·(½(1 + tanh u) + x/2·(1 − tanh² u)·√(2/π)·(1 + 3·0.044715·x²))
//   ReLU²             out = max(x, 0)²,   dinp = dout·2·max(x, 0)
//   SwiGLU            gate = inp[n, i], up = inp[n, I + i], σ = 1/(1 + exp(−gate)):   out[n, i] = gate·σ·up
//                     dgate = dout·up·σ·(1 + gate·(1 − σ)),   dup = dout·gate·σ
//
// I inner channels. A gated function (SwiGLU) has inputs [N, 2·I], the packed output of the fused gate-up matmul, the
// others [N, I]. Hendrycks, Gimpel 2016, section 2; So et al. 2021 (Primer), section 4; Shazeer 2020, eq. 6.
// T is the dtype of all tensors of a call: fp32, on CUDA also bf16 and fp16. Kernels compute in fp32.
// Throws Error on a wrong shape, dtype or inner stride, and for Activation::None. Row strides may exceed the number of
// columns.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/activation_config.h"

// out [N, I] T; inp [N, I or 2·I] T, which may be the same memory as out unless f is gated.
void activation_forward(Activation f, Tensor out, Tensor inp, Stream stream);

// dinp as inp, overwritten. out: only of a gated f, [N, I] T, receives the bits of activation_forward(), for a pass
// that did not keep them; or null. dout [N, I] T; inp [N, I or 2·I] T. dinp may be the same memory as dout, of a gated
// f as inp, and then out as dout.
void activation_backward(Activation f, Tensor dinp, Tensor out, Tensor dout, Tensor inp, Stream stream);
