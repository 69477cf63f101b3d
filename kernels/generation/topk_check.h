// The arguments of top_k, checked, and the order of its elements, for both backends.
#pragma once

#include <cstring>

#include "kernels/check.h"
#include "kernels/generation/topk.h"
#include "runtime/rng.h"

// One number for a value and its place, larger for what comes first: the value's bits, changed so that they order like
// the value, above the complement of the id. Never 0.
HOST_DEVICE inline uint64_t top_k_key(float x, int64_t id) {
    uint32_t bits = 0xffffffffu;  // NaN
    if (x == x) {
        x += 0.0f;  // −0 becomes 0
        memcpy(&bits, &x, sizeof(bits));
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(id));
}

HOST_DEVICE inline int32_t top_k_id(uint64_t key) {
    return int32_t(~uint32_t(key));
}

inline void check_top_k(const char* op, DType dtype, const Tensor& values, const Tensor& ids, const Tensor& inp,
                        const Tensor& scratch) {
    check_matrix(op, "inp", inp, dtype);
    const int64_t B = inp.shape[0], V = inp.shape[1];
    require(values && values.rank == 2, op, ": values is ", shape_string(values), ", expected [", B, ", k]");
    const int64_t k = values.shape[1];
    require(V <= 0x7fffffff, op, ": rows of ", V, " elements are too long; ids have 31 bits");
    require(k >= 1 && k <= TOP_K_MAX && k <= V, op, ": k is ", k, ", expected 1 to ", std::min(V, TOP_K_MAX));
    check_tensor(op, "values", values, dtype, {B, k});
    check_tensor(op, "ids", ids, DType::I32, {B, k});
    check_scratch(op, scratch, top_k_scratch(B, V, k));
}
