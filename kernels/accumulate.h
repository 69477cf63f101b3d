// out = inp or out += inp, between fp32 and bf16: for gradients that ranks exchange.
//
// The sum is computed in fp32 and rounded once, to nearest, to out's dtype. Throws Error on a wrong shape or dtype.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [n] fp32 or bf16 (overwritten, or added to if `add`); inp [n] fp32 or bf16, not overlapping out.
void accumulate(Tensor out, Tensor inp, bool add, Stream stream);
