// ReLU², forward and backward, elementwise.
//
//   out = max(x, 0)²,   dinp = dout·2·max(x, 0)
//
// So et al. 2021 (Primer), section 4. Errors: wrong shape or dtype.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

// out [N, C]; inp [N, C]. May be the same memory.
void relu2_forward(Tensor out, Tensor inp, Stream stream);

// dinp [N, C] (overwritten; may be the same memory as dout); dout [N, C]; inp [N, C].
void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream);
