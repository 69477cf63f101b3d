// The checks of the arguments of nf4.h for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/nf4.h"

inline void check_nf4(const char* op, const Nf4Weights& w, int64_t n) {
    require(n % NF4_BLOCK == 0, op, ": ", n, " weights, expected a multiple of ", NF4_BLOCK);
    check_tensor(op, "codes", w.codes, DType::U8, {n / 2});
    check_tensor(op, "absmax_codes", w.absmax_codes, DType::U8, {nf4_blocks(n)});
    check_tensor(op, "group_absmax", w.group_absmax, DType::F32, {nf4_groups(n)});
    check_tensor(op, "mean", w.mean, DType::F32, {1});
}

inline void check_nf4_to_fp8(const char* op, const Tensor& out, const Nf4Matrix& m) {
    require(bool(out) && out.dtype == DType::U8 && out.contiguous() && out.numel() >= m.rows * m.cols, op,
            ": out is missing, not uint8, or smaller than the ", m.rows * m.cols, " weights");
    require(m.cols % NF4_BLOCK == 0, op, ": ", m.cols, " columns, expected a multiple of ", NF4_BLOCK);
    check_tensor(op, "fp8_scale", m.fp8_scale, DType::F32, {FP8_SCALE_FLOATS});
    for (const Nf4Matrix::Part& part : m.parts) check_nf4(op, part.weights, part.rows * m.cols);
}
