// The checks of sum_squares' and step_control's arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/global_norm.h"

// Returns the number of gradients.
inline int64_t check_sum_squares(const Tensor& sum, const Tensor& grads, const Tensor& scratch) {
    const char* op = "sum_squares";
    require(grads.rank == 1, op, ": grads is ", dtype_name(grads.dtype), " ", shape_string(grads),
            ", expected fp32 [n]");
    check_tensor(op, "sum", sum, DType::F64, {1});
    check_tensor(op, "grads", grads, DType::F32, {grads.shape[0]});
    check_scratch(op, scratch, sum_squares_scratch(grads.shape[0]));
    return grads.shape[0];
}

// Returns the number of ranks.
inline int64_t check_step_control(const Tensor& scalars, const Tensor& sums, double grad_unit) {
    const char* op = "step_control";
    check_tensor(op, "scalars", scalars, DType::U8, {int64_t(sizeof(StepScalars))});
    require(sums.rank == 2 && sums.shape[0] > 0, op, ": sums is ", dtype_name(sums.dtype), " ", shape_string(sums),
            ", expected fp64 [ranks, ", int(NUM_STEP_SUMS), "]");
    check_tensor(op, "sums", sums, DType::F64, {sums.shape[0], NUM_STEP_SUMS});
    require(grad_unit > 0, op, ": grad_unit is ", grad_unit, "; it must be positive");
    return sums.shape[0];
}
