// Argument checks of norm.h, for both backends. centred: LayerNorm, else RMSNorm.
#pragma once

#include "kernels/check.h"
#include "kernels/norm.h"

struct NormSizes {
    int64_t N, C;
};

// RMSNorm is not centred and has no bias. An argument that would have no effect is a mistake of the caller.
inline void check_not_given(const char* op, const char* name, const Tensor& t) {
    require(!t, op, ": ", name, " is given, expected none");
}

// add_after: the residual is added behind the norm.
inline NormSizes check_norm(const char* op, const NormForward& a, DType dtype, bool centred, bool add_after) {
    check_matrix(op, "inp", a.inp, dtype);
    const NormSizes z{a.inp.shape[0], a.inp.shape[1]};
    check_matrix(op, "out", a.out, z.N, z.C, Given::Required, dtype);
    check_matrix(op, "sum", a.sum, z.N, z.C, Given::Optional, dtype);
    check_tensor(op, "rstd", a.rstd, DType::F32, {z.N}, Given::Optional);
    check_matrix(op, "residual", a.residual, z.N, z.C, add_after ? Given::Required : Given::Optional, dtype);
    check_tensor(op, "weight", a.weight, DType::F32, {z.C});
    check_tensor(op, "mean", a.mean, DType::F32, {z.N}, Given::Optional);
    check_tensor(op, "bias", a.bias, DType::F32, {z.C}, Given::Optional);
    if (add_after) check_not_given(op, "sum", a.sum);
    if (!centred) {
        check_not_given(op, "mean", a.mean);
        check_not_given(op, "bias", a.bias);
    }
    return z;
}

inline NormSizes check_norm(const char* op, const NormBackward& a, DType dtype, bool centred) {
    check_matrix(op, "inp", a.inp, dtype);
    const NormSizes z{a.inp.shape[0], a.inp.shape[1]};
    check_matrix(op, "dinp", a.dinp, z.N, z.C, Given::Required, dtype);
    check_tensor(op, "dweight", a.dweight, DType::F32, {z.C}, Given::Optional);
    check_tensor(op, "dsum", a.dsum, DType::F32, {z.C}, Given::Optional);
    check_matrix(op, "dout", a.dout, z.N, z.C, Given::Required, dtype);
    check_matrix(op, "dresidual", a.dresidual, z.N, z.C, Given::Optional, dtype);
    check_tensor(op, "weight", a.weight, DType::F32, {z.C});
    check_tensor(op, "rstd", a.rstd, DType::F32, {z.N});
    check_tensor(op, "dbias", a.dbias, DType::F32, {z.C}, Given::Optional);
    if (centred) {
        check_tensor(op, "mean", a.mean, DType::F32, {z.N});
    } else {
        check_not_given(op, "mean", a.mean);
        check_not_given(op, "dbias", a.dbias);
    }
    check_scratch(op, a.scratch, centred ? layernorm_backward_scratch(z.N, z.C) : rmsnorm_backward_scratch(z.N, z.C));
    return z;
}
