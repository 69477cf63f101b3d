// Activation functions of numbers in registers.
#pragma once

#include "kernels/activation.h"
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

// NaN stays NaN, which fmaxf(x, 0) would drop.
__device__ __forceinline__ float relu(float x) {
    return x < 0 ? 0 : x;
}
__device__ __forceinline__ float relu2(float x) {
    return relu(x) * relu(x);
}

// How the forward functions of the inference kernels compute exp and the division.
enum class Math {
    Exact,  // to about one unit in the last place of fp32
    Fast,   // by the special function unit, to a few units: for results that are rounded to 16 bits
};

// x·σ(z)
template <Math MATH>
__device__ __forceinline__ float times_sigmoid(float x, float z) {
    if constexpr (MATH == Math::Exact) return x / (1 + expf(-z));
    return x * __fdividef(1.0f, 1.0f + exp2_for<bf16>(-LOG2E * z));
}

// ½x(1 + tanh u) = x·σ(2u)
template <Math MATH = Math::Exact>
__device__ __forceinline__ float gelu(float x) {
    return times_sigmoid<MATH>(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

template <Math MATH = Math::Exact>
__device__ __forceinline__ float swiglu(float gate, float up) {
    return times_sigmoid<MATH>(gate, gate) * up;
}

// The activations of one number. SwiGLU takes two: its callers handle it.
template <Math MATH = Math::Exact>
__device__ __forceinline__ float activate(Activation f, float x) {
    if (f == Activation::GELU) return gelu<MATH>(x);
    if (f == Activation::ReLU2) return relu2(x);
    return x;
}
