// RoPE of one channel of a head, for the kernels that copy q and k and rotate them on the way.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// The RoPE table and its row for each token.
struct Angles {
    const int32_t* rows;
    const float* table;  // [length, pairs, 2]
    int64_t length;
    int pairs;

    // (cos, sin) of each pair; null, which means no rotation, without a table or such a row.
    __device__ __forceinline__ const float* of(int64_t token) const {
        if (!table) return nullptr;
        const int64_t row = rows[token];
        return row >= 0 && row < length ? table + row * pairs * 2 : nullptr;
    }
};

// Channel c of a head, rotated (kernels/rope.h) if it belongs to one of the `pairs` pairs; rotation null: unchanged.
template <typename T>
__device__ __forceinline__ float rotated(const T* x, int c, const float* rotation, int pairs) {
    const float v = as_float(x[c]);
    if (!rotation || c >= 2 * pairs) return v;
    const int i = c < pairs ? c : c - pairs;
    const float cosine = rotation[2 * i], sine = rotation[2 * i + 1];
    return c < pairs ? v * cosine - as_float(x[c + pairs]) * sine : v * cosine + as_float(x[c - pairs]) * sine;
}
