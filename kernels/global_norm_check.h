// The checks of sum_squares' and step_control's arguments for both backends.
#pragma once

#include <algorithm>

#include "kernels/check.h"
#include "kernels/global_norm.h"

// The blocks of a sum of squares, fixed so that the order of the sum depends on n alone: on the CPU of
// SUM_SQUARES_BLOCK elements, on a GPU up to 1024 (an H100 holds 1056) of at least 4 elements for each of 256 threads.
constexpr int64_t SUM_SQUARES_BLOCK = 1 << 15;
inline int64_t sum_squares_blocks(int64_t n, Device device) {
    if (device == Device::CPU) return (n + SUM_SQUARES_BLOCK - 1) / SUM_SQUARES_BLOCK;
    return std::min<int64_t>(1024, (n + 1023) / 1024);
}

// Returns the number of gradients.
inline int64_t check_sum_squares(const Tensor& sum, const Tensor& grads, const Tensor& scratch) {
    const char* op = "sum_squares";
    require(grads.rank == 1 && (grads.dtype == DType::F32 || grads.dtype == DType::BF16), op, ": grads is ",
            dtype_name(grads.dtype), " ", shape_string(grads), ", expected fp32 or bf16 [n]");
    check_tensor(op, "sum", sum, DType::F64, {1});
    check_tensor(op, "grads", grads, grads.dtype, {grads.shape[0]});
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
