// The checks of the arguments of lora_rows.h, for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/generation/lora_rows.h"

struct AdapterSizes {
    int64_t N, columns, adapters, tiles, parts, R;  // columns: of x or y
};

// Returns the number of parts.
inline int64_t check_adapter_weights(const char* op, DType dtype, const AdapterWeights& w) {
    require(w.a.rank == 3 && w.b.rank == 3, op, ": A is ", shape_string(w.a), " and B ", shape_string(w.b),
            ", expected [adapters, parts·R, C] and [OC, adapters, R]");
    const int64_t R = w.b.shape[2], C = w.a.shape[2], OC = w.b.shape[0];
    int64_t parts = 0;
    for (int64_t begin = 0; parts < LORA_MAX_PARTS && w.part_ends[size_t(parts)]; begin = w.part_ends[size_t(parts++)])
        require(w.part_ends[size_t(parts)] > begin && w.part_ends[size_t(parts)] <= OC, op, ": part ", parts,
                " ends at output ", w.part_ends[size_t(parts)], "; it must end after ", begin, " and by ", OC);
    require(parts > 0 && w.part_ends[size_t(parts - 1)] == OC, op, ": the parts end at output ",
            parts ? w.part_ends[size_t(parts - 1)] : 0, ", expected ", OC);
    require(R > 0 && R <= LORA_MAX_RANK && R % LORA_RANK_MULTIPLE == 0, op, ": a rank of ", R,
            "; it must be a positive multiple of ", LORA_RANK_MULTIPLE, ", at most ", LORA_MAX_RANK);
    check_tensor(op, "A", w.a, dtype, {w.a.shape[0], parts * R, C});
    check_tensor(op, "B", w.b, dtype, {OC, w.a.shape[0], R});
    for (const Tensor& t : {w.a, w.b}) check_contiguous(op, "A or B", t);
    return parts;
}

inline AdapterSizes check_adapters(const char* op, DType dtype, const Tensor& low_rank, const char* name,
                                   const Tensor& matrix, const AdapterWeights& w, const AdapterTiles& tiles) {
    check_matrix(op, name, matrix, dtype);
    const int64_t parts = check_adapter_weights(op, dtype, w), R = w.b.shape[2], C = w.a.shape[2], N = matrix.shape[0];
    check_tensor(op, "low_rank", low_rank, DType::F32, {adapter_splits(C), N, parts * R});
    check_contiguous(op, "low_rank", low_rank);
    const int64_t count = tiles.adapters.shape[0];
    check_tensor(op, "tiles.adapters", tiles.adapters, DType::I32, {count});
    check_tensor(op, "tiles.rows", tiles.rows, DType::I32, {count * LORA_TILE});
    return {N, matrix.shape[1], w.a.shape[0], count, parts, R};
}

inline AdapterSizes check_only_adapter(const char* op, DType dtype, const Tensor& y, const Tensor& h,
                                       const AdapterWeights& w) {
    check_matrix(op, "y", y, dtype);  // it has rows
    const int64_t parts = check_adapter_weights(op, dtype, w), OC = w.b.shape[0], R = w.b.shape[2], N = y.shape[0];
    require(w.a.shape[0] == 1, op, ": ", w.a.shape[0], " adapters, expected 1");
    check_matrix(op, "y", y, N, OC, Given::Required, dtype);
    check_matrix(op, "h", h, N, parts * R, Given::Required, dtype);
    return {N, OC, 1, 0, parts, R};
}
