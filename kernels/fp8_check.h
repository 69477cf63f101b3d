// The checks of the arguments of fp8.h for both backends.
#pragma once

#include "kernels/activation_check.h"
#include "kernels/fp8.h"

inline void check_fp8_slot(const char* op, const Fp8Record& record) {
    check_tensor(op, "scale", record.scale, DType::F32, {FP8_SCALE_FLOATS});
    check_tensor(op, "amax", record.amax, DType::F32, {1}, Given::Optional);
    check_tensor(op, "counts", record.counts, DType::I64, {NUM_FP8_COUNTS}, Given::Optional);
}

inline void check_fp8_output(const char* op, const Fp8Output& out, int64_t N, int64_t C) {
    check_fp8_slot(op, out.record);
    check_matrix(op, "rows", out.rows, N, C, Given::Optional, DType::U8);
    check_matrix(op, "columns", out.columns, C, N, Given::Optional, DType::U8);
}

inline void check_fp8_transpose(const char* op, const Tensor& columns, const Tensor& rows) {
    check_matrix(op, "rows", rows, DType::U8);
    check_matrix(op, "columns", columns, rows.shape[1], rows.shape[0], Given::Required, DType::U8);
}

inline void check_fp8_scales(const char* op, const Tensor& scales, const Tensor& history, const Tensor& amaxes) {
    require(scales.rank == 2, op, ": scales is ", shape_string(scales), ", expected [records, ", int(FP8_SCALE_FLOATS),
            "]");
    const int64_t S = scales.shape[0];
    check_matrix(op, "scales", scales, S, FP8_SCALE_FLOATS);
    check_matrix(op, "history", history);
    require(history.shape[0] >= 1, op, ": history is ", shape_string(history), ", expected at least one row");
    check_matrix(op, "history", history, history.shape[0], S);
    check_matrix(op, "amaxes", amaxes);
    check_matrix(op, "amaxes", amaxes, amaxes.shape[0], S);
    check_contiguous(op, "scales", scales);
}

inline void check_fp8_counts(const char* op, const Tensor& totals, const Tensor& counts) {
    check_tensor(op, "totals", totals, DType::I64, {NUM_FP8_COUNTS});
    require(counts.rank == 2, op, ": counts is ", shape_string(counts), ", expected [records, ", int(NUM_FP8_COUNTS),
            "]");
    check_tensor(op, "counts", counts, DType::I64, {counts.shape[0], NUM_FP8_COUNTS});
    check_contiguous(op, "counts", counts);
}
