// out = inp or out += inp, between fp32 and bf16: for gradients that ranks exchange or that are kept in bf16.
//
// The sum is computed in fp32 and rounded once to out's dtype, to nearest or stochastically. Throws Error on a wrong
// shape or dtype.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [n] fp32 or bf16 (overwritten, or added to if `add`); inp [n] fp32 or bf16, not overlapping out.
void accumulate(Tensor out, Tensor inp, bool add, Stream stream);

// The noise of one rounding (kernels/stochastic_rounding.h).
struct RoundingNoise {
    uint64_t seed = 0, key = 0;  // of the run; of the tensor that out is a part of
    int64_t first_element = 0;   // the index of out[0] in that tensor; its elements are < 2³⁸
    Tensor t;                    // [1] int64 on the device: which rounding of the tensor it is, < 2²⁸
};

// The same with out [n] bf16, rounded stochastically, so that a sum of many terms is exact in expectation. Rounded to
// nearest, terms below half a bf16 unit of the sum would be lost.
void accumulate_stochastic(Tensor out, Tensor inp, bool add, const RoundingNoise& noise, Stream stream);
