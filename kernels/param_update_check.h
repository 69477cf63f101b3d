// The checks of an optimizer's arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/global_norm.h"
#include "kernels/param_update.h"

// Returns n, the number of elements of the arenas.
inline int64_t check_update_grads(const char* op, const Tensor& grads) {
    const bool known = grads.dtype == DType::F32 || grads.dtype == DType::BF16;
    require(grads && grads.rank == 1 && known, op, ": grads is ", dtype_name(grads.dtype), " ", shape_string(grads),
            ", expected fp32 or bf16 [n]");
    check_tensor(op, "grads", grads, grads.dtype, {grads.shape[0]});
    return grads.shape[0];
}

// A moment [n], or with n = −1 of any size: fp32 or bf16.
inline void check_moment(const char* op, const char* name, const Tensor& t, int64_t n) {
    const bool known = t.dtype == DType::F32 || t.dtype == DType::BF16;
    require(t && t.rank == 1 && known, op, ": ", name, " is ", dtype_name(t.dtype), " ", shape_string(t),
            ", expected fp32 or bf16 [", n < 0 ? "any size" : std::to_string(n), "]");
    check_tensor(op, name, t, t.dtype, {n < 0 ? t.shape[0] : n});
}

// Stochastic rounding has noise for 2^38 elements of a tensor.
inline void check_noise(const char* op, int64_t i, const ParamSegment& s) {
    require(s.first_element >= 0 && s.first_element <= (int64_t(1) << 38) - (s.end - s.begin), op, ": segment ", i,
            " begins at element ", s.first_element, " of its tensor, expected less than 2^38 elements");
}

inline void check_step_scalars(const char* op, const Tensor& scalars) {
    check_tensor(op, "scalars", scalars, DType::U8, {int64_t(sizeof(StepScalars))});
}

// Segments ascend and lie within the n elements of the arenas.
template <typename Segment>
void check_segments(const char* op, const Segment* segments, int64_t num_segments, int64_t n) {
    int64_t end = 0;  // of the previous segment
    for (int64_t i = 0; i < num_segments; i++) {
        const ParamSegment& s = segments[i];
        require(end <= s.begin && s.begin <= s.end && s.end <= n, op, ": segment ", i, " is [", s.begin, ", ", s.end,
                "), expected ascending segments within [0, ", n, ")");
        end = s.end;
    }
}

// Every segment's parameters are in params [any size] or in params_T [n].
template <typename Segment>
void check_params(const char* op, const Tensor& params, const Tensor& params_T, const Segment* segments,
                  int64_t num_segments, int64_t n) {
    if (params_T) {
        require(params_T.dtype == DType::BF16 || params_T.dtype == DType::F16, op, ": params_T is ",
                dtype_name(params_T.dtype), " ", shape_string(params_T), ", expected bf16 or fp16");
        check_tensor(op, "params_T", params_T, params_T.dtype, {n});
    }
    require(!params || params.rank == 1, op, ": params is ", dtype_name(params.dtype), " ", shape_string(params),
            ", expected fp32 [any size]");
    const int64_t params_size = params ? params.shape[0] : 0;
    check_tensor(op, "params", params, DType::F32, {params_size}, Given::Optional);

    int64_t end = 0;  // of the previous segment in params
    for (int64_t i = 0; i < num_segments; i++) {
        const ParamSegment& s = segments[i];
        if (s.fp32_begin >= 0) {
            require(end <= s.fp32_begin && s.fp32_begin <= params_size - (s.end - s.begin), op, ": segment ", i,
                    " lies at [", s.fp32_begin, ", ", s.fp32_begin + (s.end - s.begin),
                    ") of params, expected ascending segments within [0, ", params_size, ")");
            end = s.fp32_begin + (s.end - s.begin);
        } else {
            require(bool(params_T), op, ": segment ", i, " has no fp32 parameters, and params_T is missing");
            require(params_T.dtype == DType::BF16, op, ": segment ", i, " has no fp32 parameters, and params_T is ",
                    dtype_name(params_T.dtype), "; only bf16 is rounded stochastically");
            check_noise(op, i, s);
        }
    }
}

// The arguments of an update of each element by itself, second moments apart. Returns n, the number of elements of the
// arenas.
inline int64_t check_elementwise(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& m,
                                 const Tensor& grads, const ParamSegment* segments, int64_t num_segments,
                                 const Tensor& scalars) {
    const int64_t n = check_update_grads(op, grads);
    check_moment(op, "m", m, n);
    check_step_scalars(op, scalars);
    check_segments(op, segments, num_segments, n);
    check_params(op, params, params_T, segments, num_segments, n);
    for (int64_t i = 0; m.dtype == DType::BF16 && i < num_segments; i++) check_noise(op, i, segments[i]);
    return n;
}
