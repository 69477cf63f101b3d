// Quantises rows of weights to 8 and 4 bits, and back (runtime/model/packed_weight.h has the formats).
//
// Fp8: round to nearest even of w / scale, saturating (fp8_codes.h). Int8 and Int4 are llama.cpp's quantisers of Q8_0
// and Q4_0 (ggml-quants.c: quantize_row_q8_0_ref, quantize_row_q4_0_ref): Int8 has d = max |w| / 127 and codes
// round(w · (1 / d)), half away from zero, with d in fp32, and stores d rounded to fp16. Int4 has d = the weight of the
// largest magnitude, the first of them, / −8, and codes min(15, trunc(w · (1 / d) + 8.5)). A row or a group of zeros
// has scale 0. Bf16: round to nearest even.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/packed_weight.h"

// Quantises inp [OC, C] fp32. Both are in host memory, on every backend: weights are quantised once, when they are
// read. On all threads. A weight that is not finite, or too large for an fp16 scale, gives a scale that is not finite:
// packed_bad_row() finds it. Throws Error on a wrong shape or dtype, and where PACKED_GROUP does not divide C.
void packed_quantise(const PackedWeight& out, Tensor inp);

// The first row, in host memory, with a scale that is infinite or NaN or, of Fp8, a code that is NaN; −1: there is
// none.
int64_t packed_bad_row(const PackedWeight& weight);

// out [OC, C] T = the weights, rounded once. T: fp32, on a GPU also bf16 and fp16. On a GPU rows of out begin at
// multiples of 16 bytes. Throws Error on a wrong shape, dtype or alignment, and where PACKED_GROUP does not divide C.
void packed_dequantise(Tensor out, const PackedWeight& weight, Stream stream);
