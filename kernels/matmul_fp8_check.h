// The checks of matmul_fp8's arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/matmul_fp8.h"

// Rows of a that the CPU decodes at a time; b is decoded whole.
constexpr int64_t MATMUL_FP8_CPU_ROWS = 256;

inline void check_matmul_fp8(const char* op, const Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b,
                             const Tensor& bias, bool accumulate) {
    check_matrix(op, "a", a.codes, DType::U8);
    const int64_t M = a.codes.shape[0], K = a.codes.shape[1], N = b.codes.shape[0];
    check_matrix(op, "b", b.codes, N, K, Given::Required, DType::U8);
    check_tensor(op, "a's scale", a.scale, DType::F32, {FP8_SCALE_FLOATS});
    check_tensor(op, "b's scale", b.scale, DType::F32, {FP8_SCALE_FLOATS});
    check_matrix(op, "out", out, M, N, Given::Required, out.dtype);
    check_tensor(op, "bias", bias, out.dtype, {N}, Given::Optional);
    require(K % 16 == 0 && N % 16 == 0 && K > 0, op, ": K = ", K, ", N = ", N, "; they must be multiples of 16");
    require(a.format == Fp8Format::E4M3 || b.format == Fp8Format::E4M3, op,
            ": both operands are e5m2; at least one must be e4m3");
    require(!bias || !accumulate, op, ": a bias and accumulate can't be combined");
}
