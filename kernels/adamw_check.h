// The checks of adamw_update's arguments for both backends.
#pragma once

#include "kernels/adamw.h"
#include "kernels/check.h"

inline void check_adamw(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& m, const Tensor& v,
                        const Tensor& grads, const AdamWSegment* segments, int64_t num_segments,
                        const Tensor& scalars) {
    require(grads && grads.rank == 1, op, ": grads is ", dtype_name(grads.dtype), " ", shape_string(grads),
            ", expected fp32 [n]");
    const int64_t n = grads.shape[0];
    check_tensor(op, "grads", grads, DType::F32, {n});
    check_tensor(op, "m", m, DType::F32, {n});
    check_tensor(op, "v", v, DType::F32, {n});
    check_tensor(op, "scalars", scalars, DType::U8, {int64_t(sizeof(StepScalars))});
    if (params_T) {
        require(params_T.dtype == DType::BF16 || params_T.dtype == DType::F16, op, ": params_T is ",
                dtype_name(params_T.dtype), " ", shape_string(params_T), ", expected bf16 or fp16");
        check_tensor(op, "params_T", params_T, params_T.dtype, {n});
    }
    require(!params || params.rank == 1, op, ": params is ", dtype_name(params.dtype), " ", shape_string(params),
            ", expected fp32 [any size]");
    const int64_t params_size = params ? params.shape[0] : 0;
    check_tensor(op, "params", params, DType::F32, {params_size}, Given::Optional);

    int64_t end = 0, fp32_end = 0;  // ends of the previous segments
    for (int64_t i = 0; i < num_segments; i++) {
        const AdamWSegment& s = segments[i];
        require(end <= s.begin && s.begin <= s.end && s.end <= n, op, ": segment ", i, " is [", s.begin, ", ", s.end,
                "), expected ascending segments within [0, ", n, ")");
        end = s.end;
        if (s.fp32_begin >= 0) {
            require(fp32_end <= s.fp32_begin && s.fp32_begin <= params_size - (s.end - s.begin), op, ": segment ", i,
                    " lies at [", s.fp32_begin, ", ", s.fp32_begin + (s.end - s.begin),
                    ") of params, expected ascending segments within [0, ", params_size, ")");
            fp32_end = s.fp32_begin + (s.end - s.begin);
        } else {
            require(bool(params_T), op, ": segment ", i, " has no fp32 parameters, and params_T is missing");
            require(params_T.dtype == DType::BF16, op, ": segment ", i, " has no fp32 parameters, and params_T is ",
                    dtype_name(params_T.dtype), "; only bf16 is rounded stochastically");
            require(s.first_element >= 0 && s.first_element <= (int64_t(1) << 38) - (s.end - s.begin), op, ": segment ",
                    i, " begins at element ", s.first_element, " of its tensor, expected less than 2^38 elements");
        }
    }
}
