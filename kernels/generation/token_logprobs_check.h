// The checks of token_logprobs' arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/generation/token_logprobs.h"

inline void check_token_logprobs(const char* op, DType dtype, const Tensor& logprobs, const Tensor& ids,
                                 const Tensor& losses, const Tensor& targets, const Tensor& logits) {
    check_matrix(op, "logits", logits, dtype);
    check_matrix(op, "logprobs", logprobs);
    const int64_t B = logits.shape[0], k = logprobs.shape[1];
    require(logprobs.shape[0] == B, op, ": logprobs is fp32 ", shape_string(logprobs), ", expected ", B, " rows");
    check_tensor(op, "ids", ids, DType::I32, {B, k});
    check_tensor(op, "losses", losses, DType::F32, {B});
    check_tensor(op, "targets", targets, DType::I32, {B});
}
