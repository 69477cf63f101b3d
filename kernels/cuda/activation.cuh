// The activations of linear.h for one number, where they are computed on the way from a product to memory.
#pragma once

#include <cuda_runtime.h>

// gelu.h: with tanh spelt out, 1 + tanh(u) = 2/(1 + exp(−2u)).
__device__ __forceinline__ float gelu(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1 + expf(-2 * u));
}

__device__ __forceinline__ float relu2(float x) {
    return x > 0 ? x * x : 0;
}

__device__ __forceinline__ float swiglu(float gate, float up) {
    return gate / (1 + expf(-gate)) * up;
}
