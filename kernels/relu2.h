// ReLU², forward and backward, elementwise.
//
//   out = max(x, 0)²,   dinp = dout·2·max(x, 0)
//
// So et al. 2021 (Primer), section 4.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Kernels compute in fp32.
// Throws Error on a wrong shape, dtype or inner stride. Row strides may exceed the number of columns.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [N, C] T; inp [N, C] T. May be the same memory.
void relu2_forward(Tensor out, Tensor inp, Stream stream);

// dinp [N, C] T (overwritten; may be the same memory as dout); dout [N, C] T; inp [N, C] T.
void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream);
