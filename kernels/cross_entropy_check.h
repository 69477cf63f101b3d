// Argument checks of cross-entropy, for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/cross_entropy.h"
#include "kernels/softcap.h"

struct CrossEntropySizes {
    int64_t N, Vp;
};

inline CrossEntropySizes check_cross_entropy(const char* op, DType dtype, const Tensor& losses, const Tensor& logits,
                                             const Tensor& targets, int64_t V, const Softcap& softcap) {
    check_matrix(op, "logits", logits, dtype);
    const CrossEntropySizes z{logits.shape[0], logits.shape[1]};
    require(V >= 1 && V <= z.Vp, op, ": V is ", V, ", expected 1 … ", z.Vp, ", the columns of logits");
    check_tensor(op, "losses", losses, DType::F32, {z.N});
    check_tensor(op, "targets", targets, DType::I32, {z.N});
    check_softcap(op, softcap);
    return z;
}

inline CrossEntropySizes check_cross_entropy_backward(const char* op, DType dtype, const Tensor& logits,
                                                      const Tensor& losses, const Tensor& dlosses,
                                                      const Tensor& targets, int64_t V, const Softcap& softcap) {
    const CrossEntropySizes z = check_cross_entropy(op, dtype, losses, logits, targets, V, softcap);
    check_tensor(op, "dlosses", dlosses, DType::F32, {z.N});
    return z;
}
