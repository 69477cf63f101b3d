// Argument checks of layernorm.h and rmsnorm.h, for both backends.
#pragma once

#include "kernels/check.h"

struct NormSizes {
    int64_t N, C;
};

inline NormSizes check_norm_forward(const char* op, DType dtype, const Tensor& out, const Tensor& sum,
                                    const Tensor& rstd, const Tensor& inp, const Tensor& residual, const Tensor& weight,
                                    Given residual_given = Given::Optional) {
    check_matrix(op, "inp", inp, dtype);
    const NormSizes z{inp.shape[0], inp.shape[1]};
    check_matrix(op, "out", out, z.N, z.C, Given::Required, dtype);
    check_matrix(op, "sum", sum, z.N, z.C, Given::Optional, dtype);
    check_tensor(op, "rstd", rstd, DType::F32, {z.N}, Given::Optional);
    check_matrix(op, "residual", residual, z.N, z.C, residual_given, dtype);
    check_tensor(op, "weight", weight, DType::F32, {z.C});
    return z;
}

inline NormSizes check_norm_backward(const char* op, DType dtype, const Tensor& dinp, const Tensor& dweight,
                                     const Tensor& dsum, const Tensor& dout, const Tensor& dresidual, const Tensor& inp,
                                     const Tensor& weight, const Tensor& rstd) {
    check_matrix(op, "inp", inp, dtype);
    const NormSizes z{inp.shape[0], inp.shape[1]};
    check_matrix(op, "dinp", dinp, z.N, z.C, Given::Required, dtype);
    check_tensor(op, "dweight", dweight, DType::F32, {z.C}, Given::Optional);
    check_tensor(op, "dsum", dsum, DType::F32, {z.C}, Given::Optional);
    check_matrix(op, "dout", dout, z.N, z.C, Given::Required, dtype);
    check_matrix(op, "dresidual", dresidual, z.N, z.C, Given::Optional, dtype);
    check_tensor(op, "weight", weight, DType::F32, {z.C});
    check_tensor(op, "rstd", rstd, DType::F32, {z.N});
    return z;
}
