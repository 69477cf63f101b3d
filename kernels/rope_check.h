// Argument checks of rope, for both backends.
#pragma once

#include "kernels/check.h"

struct RopeSizes {
    int64_t N, H, HS, T, pairs;  // T: rows of the table
};

inline RopeSizes check_rope(const char* op, DType dtype, const Tensor& x, const Tensor& positions,
                            const Tensor& table) {
    require(x && x.rank == 3, op, ": x is ", shape_string(x), ", expected [N, H, HS]");
    require(table && table.rank == 3, op, ": table is ", shape_string(table), ", expected [T, R/2, 2]");
    const RopeSizes z{x.shape[0], x.shape[1], x.shape[2], table.shape[0], table.shape[1]};
    check_tensor(op, "x", x, dtype, {z.N, z.H, z.HS});
    check_tensor(op, "positions", positions, DType::I32, {z.N});
    check_tensor(op, "table", table, DType::F32, {z.T, z.pairs, 2});
    check_contiguous(op, "table", table);
    require(2 * z.pairs <= z.HS, op, ": the table rotates ", 2 * z.pairs, " channels, the head has ", z.HS);
    return z;
}
