// The checks of matmul_batched's arguments for both backends.
#pragma once

#include "kernels/check.h"

struct BatchedSizes {
    int64_t batch, M, N, K;
};

inline BatchedSizes check_matmul_batched(const char* op, const Tensor& out, const Tensor& a, const Tensor& b,
                                         bool transpose_a, bool transpose_b, float beta, const Tensor& add,
                                         DType dtype) {
    const auto check = [&](const char* name, const Tensor& t, int64_t batch, int64_t rows, int64_t columns) {
        check_tensor(op, name, t, dtype, {batch, rows, columns});
        check_contiguous(op, name, t);
    };
    require(out && out.rank == 3, op, ": out is ", dtype_name(out.dtype), " ", shape_string(out), ", expected ",
            dtype_name(dtype), " [batch, M, N]");
    require(a && a.rank == 3, op, ": a is ", dtype_name(a.dtype), " ", shape_string(a), ", expected ",
            dtype_name(dtype), transpose_a ? " [batch, K, M]" : " [batch, M, K]");
    const BatchedSizes s{out.shape[0], out.shape[1], out.shape[2], a.shape[transpose_a ? 1 : 2]};
    check("out", out, s.batch, s.M, s.N);
    check("a", a, s.batch, transpose_a ? s.K : s.M, transpose_a ? s.M : s.K);
    check("b", b, s.batch, transpose_b ? s.N : s.K, transpose_b ? s.K : s.N);
    if (beta != 0) check("add", add, s.batch, s.M, s.N);
    require(s.K > 0, op, ": the inner dimension is 0");
    return s;
}
