// The logistic function of numbers in registers.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// σ(x), σ(−x) = 1 − σ(x), and σ'(x) = σ(x)·σ(−x). T is the dtype that results are rounded to. For fp32, with
// e = exp(−|x|), none of them cancels: they are 1/(1 + e), e/(1 + e) and e/(1 + e)². For 16 bits, 1 − σ(x) has an
// absolute error of 2^-24. That is enough, because callers add it, multiplied, to σ(x) or to 1.
struct Sigmoid {
    float value, complement, derivative;
};

// For 16 bits: σ(x) from y = −log2(e)·x − 24. 2^24·σ(x) comes first, so that nothing is flushed to 0 before the last
// multiplication.
__device__ __forceinline__ Sigmoid sigmoid_of_exponent(float y) {
    const float r = reciprocal_for<bf16>(0x1p-24f + exp2_for<bf16>(y)) * 0x1p-24f;
    return {r, 1 - r, r - r * r};
}

template <typename T>
__device__ __forceinline__ Sigmoid sigmoid(float x) {
    if constexpr (std::is_same_v<T, float>) {
        const float e = expf(-fabsf(x)), r = 1 / (1 + e), er = e * r;
        return {x < 0 ? er : r, x < 0 ? r : er, er * r};
    }
    return sigmoid_of_exponent(-LOG2E * x - 24);
}
