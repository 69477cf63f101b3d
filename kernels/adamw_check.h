// The checks of adamw_update's arguments for both backends. Returns n, the number of elements of the arenas.
#pragma once

#include "kernels/adamw.h"
#include "kernels/param_update_check.h"

inline int64_t check_adamw(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& m,
                           const Tensor& v, const Tensor& grads, const AdamWSegment* segments, int64_t num_segments,
                           const Tensor& scalars) {
    const int64_t n = check_update_grads(op, grads);
    check_tensor(op, "m", m, DType::F32, {n});
    check_tensor(op, "v", v, DType::F32, {n});
    check_step_scalars(op, scalars);
    check_segments(op, segments, num_segments, n);
    check_params(op, params, params_T, segments, num_segments, n);
    return n;
}
