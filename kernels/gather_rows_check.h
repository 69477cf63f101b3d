// Argument checks of both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/gather_rows.h"

// some: the matrix [n, C] of the numbered rows; all: the matrix [N, C] that they belong to.
inline void check_rows(const char* op, const char* some_name, const Tensor& some, const char* all_name,
                       const Tensor& all, const Tensor& rows, DType dtype) {
    check_matrix(op, some_name, some, dtype);
    check_matrix(op, all_name, all, dtype);
    check_matrix(op, all_name, all, all.shape[0], some.shape[1], Given::Required, dtype);
    check_tensor(op, "rows", rows, DType::I32, {some.shape[0]});
}
