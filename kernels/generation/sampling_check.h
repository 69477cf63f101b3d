// The checks of sample_tokens' arguments for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/generation/sampling.h"

inline void check_sampling(const char* op, DType dtype, const Tensor& ids, const Tensor& logits, int64_t V,
                           const SamplingBatch& batch, const Tensor& scratch) {
    const int64_t B = logits.shape[0], Vp = logits.shape[1];
    check_tensor(op, "logits", logits, dtype, {B, Vp});
    check_tensor(op, "ids", ids, DType::I32, {B});
    check_tensor(op, "sequences", batch.sequences, DType::I64, {B});
    check_tensor(op, "steps", batch.steps, DType::I64, {B});
    check_tensor(op, "rows", batch.rows, DType::U8, {B, int64_t(sizeof(SamplingRow))});
    check_contiguous(op, "rows", batch.rows);
    require(V > 0 && V <= Vp, op, ": V is ", V, ", expected 1 to ", Vp);
    const auto check_slots = [&](const char* name, const Tensor& t, int64_t columns, uint32_t needed_by) {
        const Given given = batch.classes & needed_by ? Given::Required : Given::Optional;
        check_matrix(op, name, t, t ? t.shape[0] : 0, columns, given, DType::I32);
    };
    check_slots("seen", batch.seen, (V + 31) / 32, sampling_class::REPEAT);
    check_slots("counts", batch.counts, V, sampling_class::COUNTS);
    check_slots("masks", batch.masks, (V + 31) / 32, sampling_class::MASK);
    check_scratch(op, scratch, sampling_scratch(B, V, batch.classes));
}
