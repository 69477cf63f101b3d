// RoPE of one head as the kernels of the KV cache apply it: to a value on its way from one place to another.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// Row of the angle table for a token: null where there is no table or no such row, and nothing is turned.
struct Angles {
    const int32_t* rows;
    const float* table;  // [length, pairs, 2]
    int64_t length;
    int pairs;

    __device__ __forceinline__ const float* of(int64_t token) const {
        if (!table) return nullptr;
        const int64_t row = rows[token];
        return row >= 0 && row < length ? table + row * pairs * 2 : nullptr;
    }
};

// Channel c of a head after the rotation by its `pairs` pairs (kernels/rope.h); turn null: as it is.
template <typename T>
__device__ __forceinline__ float rotated(const T* x, int c, const float* turn, int pairs) {
    const float v = as_float(x[c]);
    if (!turn || c >= 2 * pairs) return v;
    const int i = c < pairs ? c : c - pairs;
    const float cosine = turn[2 * i], sine = turn[2 * i + 1];
    return c < pairs ? v * cosine - as_float(x[c + pairs]) * sine : v * cosine + as_float(x[c - pairs]) * sine;
}
