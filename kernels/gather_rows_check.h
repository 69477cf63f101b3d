// Argument checks of both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/gather_rows.h"

// gathered [n, C]: row i is row rows[i] of all [N, C].
inline void check_rows(const char* op, const char* gathered_name, const Tensor& gathered, const char* all_name,
                       const Tensor& all, const Tensor& rows, DType dtype) {
    check_matrix(op, gathered_name, gathered, dtype);
    check_matrix(op, all_name, all, dtype);
    check_matrix(op, all_name, all, all.shape[0], gathered.shape[1], Given::Required, dtype);
    check_tensor(op, "rows", rows, DType::I32, {gathered.shape[0]});
}
