// The checks of packed weights, for both backends.
#pragma once

#include "kernels/check.h"
#include "runtime/model/packed_weight.h"

// A weight [OC, C].
inline void check_packed(const char* op, const PackedWeight& w, int64_t OC, int64_t C) {
    require(can_pack(w.packing, C), op, ": rows of ", C, " weights, expected a multiple of ", PACKED_GROUP);
    require(w.cols == C, op, ": the packed weight has rows of ", w.cols, " weights, expected ", C);
    check_tensor(op, "packed.rows", w.rows, DType::U8, {OC, packed_row_bytes(w.packing, C)});
    check_contiguous(op, "packed.rows", w.rows);
}
