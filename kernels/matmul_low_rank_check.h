// Checks of arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/matmul_low_rank.h"

// Checks the adapters of a layer of OC outputs, and returns P·R.
inline int64_t check_adapters(const char* op, const LoraWeights& adapters, int64_t OC, DType dtype) {
    require(adapters.parts, op, ": the adapters have no parts");
    check_matrix(op, "b", adapters.b, dtype);
    int64_t rows = 0;
    for (const LoraPart& part : *adapters.parts) {
        require(part.row >= 0 && part.rows >= 0 && part.row + part.rows <= OC, op, ": an adapter of rows ", part.row,
                " to ", part.row + part.rows, " of ", OC);
        rows += part.rows;
    }
    check_matrix(op, "b", adapters.b, rows, adapters.b.shape[1], Given::Required, dtype);
    return int64_t(adapters.parts->size()) * adapters.b.shape[1];
}

inline void check_low_rank(const char* op, const LowRank& low_rank, const Tensor& out) {
    check_matrix(op, "out", out, out.dtype);
    const int64_t ranks = check_adapters(op, low_rank.adapters, out.shape[1], out.dtype);
    check_matrix(op, "h", low_rank.h, out.shape[0], ranks, Given::Required, out.dtype);
}

inline void check_low_rank(const char* op, const LowRankGradient& low_rank, const Tensor& dinp) {
    check_matrix(op, "dinp", dinp, dinp.dtype);
    check_matrix(op, "a", low_rank.a, dinp.dtype);
    check_matrix(op, "a", low_rank.a, low_rank.a.shape[0], dinp.shape[1], Given::Required, dinp.dtype);
    check_matrix(op, "dh", low_rank.dh, dinp.shape[0], low_rank.a.shape[0], Given::Required, dinp.dtype);
}

inline void check_low_rank(const char* op, const LowRankGradient& low_rank, const ActivationGradient& d) {
    require(!d.dbias, op, ": dbias is not computed beside adapters");
    check_low_rank(op, low_rank, d.dact);
}

inline void check_block_diagonal(const char* op, const Tensor& out, const LoraWeights& adapters) {
    check_activation_dtype(op, "out", out);
    check_matrix(op, "out", out, out.dtype);
    const int64_t ranks = check_adapters(op, adapters, out.shape[0], out.dtype);
    check_tensor(op, "out", out, out.dtype, {out.shape[0], ranks});
    check_contiguous(op, "out", out);
}
