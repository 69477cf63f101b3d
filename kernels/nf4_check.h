// The checks of the arguments of nf4.h for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/nf4.h"

inline void check_nf4(const char* op, const Nf4Weights& w, int64_t n) {
    require(n % NF4_BLOCK == 0, op, ": ", n, " weights, expected a multiple of ", NF4_BLOCK);
    check_tensor(op, "codes", w.codes, DType::U8, {n / 2});
    check_tensor(op, "absmax_codes", w.absmax_codes, DType::U8, {nf4_blocks(n)});
    check_tensor(op, "group_absmax", w.group_absmax, DType::F32, {nf4_groups(n)});
    check_tensor(op, "mean", w.mean, DType::F32, {1});
}
