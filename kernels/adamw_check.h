// The checks of adamw_update's arguments for both backends. Returns n, the number of elements of the arenas.
#pragma once

#include "kernels/adamw.h"
#include "kernels/param_update_check.h"

inline int64_t check_adamw(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& m,
                           const Tensor& v, const Tensor& grads, const ParamSegment* segments, int64_t num_segments,
                           const Tensor& scalars) {
    const int64_t n = check_elementwise(op, params, params_T, m, grads, segments, num_segments, scalars);
    check_moment(op, "v", v, -1);
    require(v.dtype == m.dtype, op, ": v is ", dtype_name(v.dtype), " and m is ", dtype_name(m.dtype),
            ", expected one dtype");
    int64_t end = 0;  // of the previous segment in v
    for (int64_t i = 0; i < num_segments; i++) {
        const int64_t begin = segments[i].v_begin < 0 ? segments[i].begin : segments[i].v_begin;
        const int64_t size = segments[i].end - segments[i].begin;
        require(end <= begin && begin <= v.shape[0] - size, op, ": segment ", i, " lies at [", begin, ", ",
                begin + size, ") of v, expected ascending segments within [0, ", v.shape[0], ")");
        end = begin + size;
    }
    return n;
}
