// The checks of top_k's arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/generation/topk.h"

inline void check_top_k(const char* op, DType dtype, const Tensor& values, const Tensor& ids, const Tensor& inp,
                        const Tensor& scratch) {
    check_matrix(op, "inp", inp, dtype);
    const int64_t B = inp.shape[0], V = inp.shape[1];
    require(values && values.rank == 2, op, ": values is ", shape_string(values), ", expected [", B, ", k]");
    const int64_t k = values.shape[1];
    require(V <= 0x7fffffff, op, ": rows of ", V, " elements are too long; ids have 31 bits");
    require(k >= 1 && k <= TOP_K_MAX && k <= V, op, ": k is ", k, ", expected 1 to ", std::min(V, TOP_K_MAX));
    check_tensor(op, "values", values, dtype, {B, k});
    check_tensor(op, "ids", ids, DType::I32, {B, k});
    check_scratch(op, scratch, top_k_scratch(B, V, k));
}
