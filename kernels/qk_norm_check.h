// Argument checks of qk_norm for both backends: shapes and dtypes, not values.
#pragma once

#include "kernels/check.h"
#include "kernels/qk_norm.h"

struct QkNormSizes {
    int64_t N, H, HS;
    int64_t table_length, pairs;  // of the table; 0 without RoPE
};

// x, name: the tensor that the others must match.
inline QkNormSizes check_qk_norm(const char* op, const char* name, const Tensor& x, DType dtype, const Tensor& rstd,
                                 Given rstd_given, const QkWeights& weight, const Tensor& positions,
                                 const Tensor& table, int64_t NH) {
    require(x && x.rank == 3, op, ": ", name, " is ", shape_string(x), ", expected [N, H, HS]");
    QkNormSizes z{x.shape[0], x.shape[1], x.shape[2], 0, 0};
    check_tensor(op, name, x, dtype, {z.N, z.H, z.HS});
    require(z.HS >= 1 && z.HS <= QK_NORM_MAX_HEAD, op, ": head size ", z.HS, " lies outside [1, ", QK_NORM_MAX_HEAD,
            "]");
    require(NH >= 0 && NH <= z.H, op, ": NH is ", NH, ", expected 0 … ", z.H, ", the heads of ", name);
    check_tensor(op, "rstd", rstd, DType::F32, {z.N, z.H}, rstd_given);
    check_contiguous(op, "rstd", rstd);
    require(bool(weight.q) == bool(weight.k), op, ": weight.", weight.q ? "k" : "q",
            " is missing; give both weights or none");
    check_tensor(op, "weight.q", weight.q, DType::F32, {z.HS}, Given::Optional);
    check_tensor(op, "weight.k", weight.k, DType::F32, {z.HS}, Given::Optional);
    if (!table) return z;
    require(table.rank == 3, op, ": table is ", shape_string(table), ", expected [T, R/2, 2]");
    z.table_length = table.shape[0];
    z.pairs = table.shape[1];
    check_tensor(op, "table", table, DType::F32, {z.table_length, z.pairs, 2});
    check_contiguous(op, "table", table);
    check_tensor(op, "positions", positions, DType::I32, {z.N});
    require(2 * z.pairs <= z.HS, op, ": the table rotates ", 2 * z.pairs, " channels, the head has ", z.HS);
    return z;
}

// The backward pass: also dinp, kept, dweight and scratch.
inline QkNormSizes check_qk_norm_backward(const char* op, DType dtype, const Tensor& dinp, const QkWeights& dweight,
                                          const Tensor& dout, const Tensor& kept, const Tensor& rstd,
                                          const QkWeights& weight, const Tensor& positions, const Tensor& table,
                                          int64_t NH, const Tensor& scratch) {
    const QkNormSizes z = check_qk_norm(op, "dout", dout, dtype, rstd, Given::Required, weight, positions, table, NH);
    check_tensor(op, "dinp", dinp, dtype, {z.N, z.H, z.HS});
    check_tensor(op, "kept", kept, dtype, {z.N, z.H, z.HS});
    if (!weight.q) return z;
    require(bool(dweight.q) == bool(dweight.k), op, ": dweight.", dweight.q ? "k" : "q",
            " is missing; give both gradients or none");
    check_tensor(op, "dweight.q", dweight.q, DType::F32, {z.HS}, Given::Optional);
    check_tensor(op, "dweight.k", dweight.k, DType::F32, {z.HS}, Given::Optional);
    check_scratch(op, scratch, qk_norm_backward_scratch(z.N, NH, z.H - NH, z.HS));
    return z;
}
