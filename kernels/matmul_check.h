// Checks of arguments for both backends.
#pragma once

#include "kernels/activation_check.h"
#include "kernels/matmul.h"

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

// Checks the tensor that matmul_forward_add() adds to the matmul of inp.
inline void check_added(const char* op, const Tensor& out, const Tensor& add, const Tensor& inp) {
    check_matrix(op, "add", add, out.shape[0], out.shape[1], Given::Required, out.dtype);
    require(row_stride(add) == row_stride(out), op, ": the rows of add are ", row_stride(add),
            " elements apart, those of out ", row_stride(out));
    require(inp.shape[1] > 0, op, ": inp has no columns");
}

inline void check_activation_output(const char* op, Activation f, const Tensor& out, const Tensor& pre, DType dtype,
                                    bool keeps_pre) {
    const int64_t I = check_activation_input(op, "pre", f, pre, dtype);
    require(out || (keeps_pre && f != Activation::GELU), op, ": out is missing");
    check_matrix(op, "out", out, pre.shape[0], I, Given::Optional, dtype);
}

inline void check_activation_gradient(const char* op, Activation f, const ActivationGradient& d, const Tensor& pre,
                                      DType dtype) {
    require(f != Activation::None, op, ": no activation function is given");
    check_matrix(op, "dact", d.dact, dtype);
    const int64_t N = d.dact.shape[0], I = d.dact.shape[1], columns = activation_inputs(f, I);
    check_matrix(op, "pre", pre, N, columns, Given::Required, dtype);
    check_matrix(op, "dpre", d.dpre, N, columns, Given::Required, dtype);
    require(!d.act || is_gated(f), op, ": act is computed for gated functions only");
    check_matrix(op, "act", d.act, N, I, Given::Optional, dtype);
    check_tensor(op, "dbias", d.dbias, DType::F32, {columns}, Given::Optional);
}
