// The activations of linear.h for one number, where they are computed on the way from a product to memory: T is the
// dtype that they are rounded to there (exp_for).
#pragma once

#include "kernels/cuda_common.cuh"

template <typename T>
__device__ __forceinline__ float quotient_for(float x, float y) {
    return std::is_same_v<T, float> ? x / y : __fdividef(x, y);
}

// gelu.h: with tanh spelt out, 1 + tanh(u) = 2/(1 + exp(−2u)).
template <typename T = float>
__device__ __forceinline__ float gelu(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return quotient_for<T>(x, 1 + exp_for<T>(-2 * u));
}

__device__ __forceinline__ float relu2(float x) {
    return x > 0 ? x * x : 0;
}

template <typename T = float>
__device__ __forceinline__ float swiglu(float gate, float up) {
    return quotient_for<T>(gate, 1 + exp_for<T>(-gate)) * up;
}
