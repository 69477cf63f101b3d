// NF4: the frozen weights of a model in 4 bits (Dettmers et al. 2023, "QLoRA", section 3), as bitsandbytes stores them.
//
//   w[i] = NF4_VALUES[code[i]] · absmax[i / 64]
//   absmax[b] = nf4_absmax_values()[absmax code[b]] · group_absmax[b / 256] + mean, rounded once
//
// The 16 values are quantiles of the normal distribution, scaled to [-1, 1]. A block of 64 weights is divided by its
// largest magnitude. These magnitudes are stored in 8 bits themselves ("double quantisation"): less their mean, divided
// by the largest of a group of 256. 4.13 bits a weight in all.
// On a GPU out and codes of nf4_dequantise(), and what nf4_to_fp8() writes, begin at multiples of 16 bytes.
// Throws Error on a wrong shape, dtype or alignment, on a number of weights that is not a multiple of 64, and
// nf4_quantise() on weights that are not finite.
#pragma once

#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/device/tensor.h"

constexpr int64_t NF4_BLOCK = 64, NF4_GROUP = 256;

// n weights.
struct Nf4Weights {
    Tensor codes;         // [n / 2] U8; of two weights the first in the high four bits
    Tensor absmax_codes;  // [n / 64] U8
    Tensor group_absmax;  // [⌈n / 64 / 256⌉] fp32
    Tensor mean;          // [1] fp32
};

// A weight [rows, cols]: matrices that are quantised each by itself, one below the other.
struct Nf4Matrix {
    struct Part {
        int64_t row, rows;
        Nf4Weights weights;
    };
    int64_t rows, cols;
    std::vector<Part> parts;
    Tensor fp8_scale = {};  // [FP8_SCALE_FLOATS] fp32: of the whole weight in E4M3, by its largest magnitude
};

constexpr int64_t nf4_blocks(int64_t n) {
    return n / NF4_BLOCK;
}
constexpr int64_t nf4_groups(int64_t n) {
    return (nf4_blocks(n) + NF4_GROUP - 1) / NF4_GROUP;
}

// Quantises inp [n] fp32. All tensors are in host memory, on every backend: weights are quantised once, when they are
// read. On all threads. Returns the largest magnitude of the dequantised weights. Of the codes only those of the blocks
// that begin at a weight first ≤ i < end are written, for a rank that keeps no others.
float nf4_quantise(const Nf4Weights& out, Tensor inp, int64_t first = 0, int64_t end = INT64_MAX);

// The weights as E4M3 codes of w·matrix.fp8_scale (runtime/device/fp8_codes.h), for fp8 matmuls: w as nf4_dequantise()
// gives it in fp32, in no other dtype between. Uses the beginning of out (U8, rows·cols or more) and returns it as
// [rows, cols], or transposed as [cols, rows].
Tensor nf4_to_fp8(Tensor out, const Nf4Matrix& matrix, bool transposed, Stream stream);

// out [n] fp32, on a GPU also bf16 and fp16: the weights, rounded once.
void nf4_dequantise(Tensor out, const Nf4Weights& weights, Stream stream);
// Uses the beginning of out [rows·cols or more], and returns it as [rows, cols].
Tensor nf4_dequantise(Tensor out, const Nf4Matrix& matrix, Stream stream);
