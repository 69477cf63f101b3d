// GELU in its tanh form, forward and backward, elementwise.
//
//   u = √(2/π)·(x + 0.044715·x³),   out = x/2·(1 + tanh u)
//   dinp = dout·(½(1 + tanh u) + x/2·(1 − tanh² u)·√(2/π)·(1 + 3·0.044715·x²))
//
// Hendrycks, Gimpel 2016, section 2.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Kernels compute in fp32.
// Throws Error on a wrong shape, dtype or inner stride. Row strides may exceed the number of columns.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [N, C] T; inp [N, C] T. May be the same memory.
void gelu_forward(Tensor out, Tensor inp, Stream stream);

// dinp [N, C] T (overwritten; may be the same memory as dout); dout [N, C] T; inp [N, C] T.
void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream);
