// The checks of sample_tokens' arguments for both backends.
#pragma once

#include <cmath>

#include "kernels/check.h"
#include "kernels/generation/sampling.h"

inline void check_sampling(const char* op, DType dtype, const Tensor& ids, const Tensor& logits, int64_t V,
                           const Tensor& sequences, const Tensor& steps, const SamplingOptions& options,
                           const Tensor& seen, const Tensor& scratch) {
    const int64_t B = logits.shape[0], Vp = logits.shape[1];
    check_tensor(op, "logits", logits, dtype, {B, Vp});
    check_tensor(op, "ids", ids, DType::I32, {B});
    check_tensor(op, "sequences", sequences, DType::I64, {B});
    check_tensor(op, "steps", steps, DType::I64, {B});
    require(V > 0 && V <= Vp, op, ": V is ", V, ", expected 1 to ", Vp);
    require(options.temperature >= 0 && std::isfinite(options.temperature), op, ": temperature is ",
            options.temperature, ", expected 0 or more");
    require(options.top_k >= 0, op, ": top_k is ", options.top_k, ", expected 0 or more");
    require(options.top_p > 0 && options.top_p <= 1, op, ": top_p is ", options.top_p,
            ", expected above 0 and up to 1");
    require(options.min_p >= 0 && options.min_p <= 1, op, ": min_p is ", options.min_p, ", expected 0 to 1");
    require(options.repeat_penalty > 0 && std::isfinite(options.repeat_penalty), op, ": repeat_penalty is ",
            options.repeat_penalty, ", expected more than 0");
    check_tensor(op, "seen", seen, DType::I32, {B, (V + 31) / 32},
                 options.repeat_penalty == 1 ? Given::Optional : Given::Required);
    check_scratch(op, scratch, sampling_scratch(B, V, options));
}
