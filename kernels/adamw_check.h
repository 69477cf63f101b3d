// The checks of adamw_update's arguments for both backends. Returns n, the number of elements of the arenas.
#pragma once

#include "kernels/adamw.h"
#include "kernels/param_update_check.h"

inline int64_t check_adamw(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& m,
                           const Tensor& v, const Tensor& grads, const AdamWSegment* segments, int64_t num_segments,
                           const Tensor& scalars) {
    const int64_t n = check_update_grads(op, grads);
    check_moment(op, "m", m, n);
    check_moment(op, "v", v, -1);
    require(v.dtype == m.dtype, op, ": v is ", dtype_name(v.dtype), " and m is ", dtype_name(m.dtype),
            ", expected one dtype");
    check_step_scalars(op, scalars);
    check_segments(op, segments, num_segments, n);
    check_params(op, params, params_T, segments, num_segments, n);
    int64_t end = 0;  // of the previous segment in v
    for (int64_t i = 0; i < num_segments; i++) {
        const int64_t begin = segments[i].v_begin < 0 ? segments[i].begin : segments[i].v_begin;
        const int64_t size = segments[i].end - segments[i].begin;
        require(end <= begin && begin <= v.shape[0] - size, op, ": segment ", i, " lies at [", begin, ", ",
                begin + size, ") of v, expected ascending segments within [0, ", v.shape[0], ")");
        end = begin + size;
        if (m.dtype == DType::BF16) check_noise(op, i, segments[i]);
    }
    return n;
}
