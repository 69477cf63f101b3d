// out = inp, or out += inp, between fp32 and bf16: gradients on their way between ranks.
//
// The sum is formed in fp32 and rounded once, to nearest, to out's dtype. Errors: wrong shape or dtype.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [n] fp32 or bf16 (overwritten, or added to if `add`); inp [n] fp32 or bf16, other memory than out.
void accumulate(Tensor out, Tensor inp, bool add, Stream stream);
