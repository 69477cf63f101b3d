// Quantisation to fp8 (runtime/device/fp8_codes.h) for matmuls of 8-bit operands (matmul_fp8.h).
//
//   rows[n, c] = columns[c, n] = fp8(y[n, c]·scale),   amax = max(amax, max |y|)
//
// cuBLASLt multiplies fp8 matrices only as A·Bᵀ. A tensor is multiplied over its channels in the forward pass and over
// its tokens for a weight's gradient, so it is written in both orientations, in one pass. y is a matrix, or the output
// of an activation function or of its gradient, as rounded to the dtype T of the activations: the codes are those of
// two kernels, one that stores y and one that quantises it.
//
// |y·scale| beyond the format's largest number becomes that number. NaN and ±∞ become NaN.
// T: fp32 on the CPU, bf16 on a GPU, where C and I must be multiples of 16 and rows aligned to 16 bytes. Row strides
// may exceed the number of columns. Throws Error on a wrong shape, dtype or inner stride.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/device/tensor.h"
#include "runtime/model/activation_config.h"

// The scale of a tensor and what is recorded of it, on the device.
struct Fp8Record {
    Tensor scale;   // [FP8_SCALE_FLOATS] fp32
    Tensor amax;    // [1] fp32, not finite if a y was not; null: not recorded
    Tensor counts;  // [NUM_FP8_COUNTS] int64, added to; null: not recorded
};
enum Fp8Count { FP8_ELEMENTS, FP8_SATURATED, FP8_UNDERFLOWED, NUM_FP8_COUNTS };
// FP8_SATURATED: |y·scale| > fp8_max. FP8_UNDERFLOWED: y ≠ 0 has the code of 0.

// The output of a call; any of the tensors may be null.
struct Fp8Output {
    Fp8Format format;
    Fp8Record record;
    Tensor rows;     // [N, C] U8
    Tensor columns;  // [C, N] U8
};

// y = inp [N, C] T.
void fp8_quantise(const Fp8Output& out, Tensor inp, Stream stream);

// y [N, I] = f(inp), of kernels/activation.h. act [N, I] T receives it, or null. inp [N, I] T; if f is gated [N, 2·I].
void fp8_activation_forward(const Fp8Output& out, Tensor act, Activation f, Tensor inp, Stream stream);

// y = the gradient of inp, of its shape. dinp T receives it, or null; it may be the same memory as inp, or as dout
// where that has its shape. dout [N, I] T.
void fp8_activation_backward(const Fp8Output& out, Tensor dinp, Activation f, Tensor dout, Tensor inp, Stream stream);

// columns [C, N] U8 = the transpose of rows [N, C] U8: the other orientation of a tensor. On a GPU rows are aligned to
// 16 bytes, and C is a multiple of 16.
void fp8_transpose(Tensor columns, Tensor rows, Stream stream);

// Quantises a weight to E4M3, in host memory on every backend: frozen weights are quantised once, when they are read.
// On all threads. y = inp [N, C] fp32, rounded to dtype: the codes and the scale (fp8_set_scale with margin 0) are
// those that fp8_quantise() gives a weight that is stored in it. rows [N, C], scale [FP8_SCALE_FLOATS]. Returns the
// largest magnitude, ∞ if a weight is not finite. Of the codes only those of weights first ≤ n·C + c < end are written,
// for a rank that keeps no others.
float fp8_quantise_on_host(Tensor rows, Tensor scale, Tensor inp, DType dtype, int64_t first = 0,
                           int64_t end = INT64_MAX);

// Sets record.scale to the largest power of two for which amax·scale ≤ fp8_max·2⁻ᵐᵃʳᵍⁱⁿ; to 1 if amax is 0 or not
// finite (fp8_scale_exponent()).
void fp8_set_scale(const Fp8Record& record, Fp8Format format, int margin, Stream stream);

// Delayed scaling (Micikevicius et al. 2022, section 3.1): the scale of the next step comes from the largest amax of
// the last H steps. For each record, the largest amax of all ranks becomes the newest row of history, the oldest row is
// dropped, and the scale is set as by fp8_set_scale from the largest value in history.
//
// scales [S, FP8_SCALE_FLOATS], history [H, S] fp32, the newest step first, H ≥ 1; amaxes [ranks, S] fp32. An amax that
// is not finite leaves the record's history as it is. A record whose history is all zero gets the scale 1. If H is 1,
// history may be the first row of amaxes.
void fp8_update_scales(Tensor scales, Tensor history, Tensor amaxes, Fp8Format format, int margin, Stream stream);

// totals [NUM_FP8_COUNTS] = the sums over the records of counts [S, NUM_FP8_COUNTS] int64.
void fp8_sum_counts(Tensor totals, Tensor counts, Stream stream);
