// RoPE of one head, for the OpenMP kernels that rotate. Not for .cu files.
#pragma once

#include "kernels/cpu/cpu.h"
#include "runtime/device/tensor.h"

// Rotates in place: channel i with channel i + half. pairs [half, 2]: cos, sin. sign −1 rotates back.
ALWAYS_INLINE void rotate_head(float* x, const float* pairs, int64_t half, float sign) {
    for (int64_t i = 0; i < half; i++) {
        const float c = pairs[2 * i], s = sign * pairs[2 * i + 1], a = x[i], b = x[i + half];
        x[i] = a * c - b * s;
        x[i + half] = b * c + a * s;
    }
}

inline void check_positions(const char* op, const Tensor& positions, int64_t table_length) {
    const int32_t* position = positions.as<int32_t>();
    for (int64_t n = 0; n < positions.shape[0]; n++) {
        require(position[n] >= 0 && position[n] < table_length, op, ": position ", position[n], " of token ", n,
                " lies outside the table of ", table_length, " positions");
    }
}
