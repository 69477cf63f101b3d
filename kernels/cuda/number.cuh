// One number of a stored dtype T (float, bf16 or fp16) as a float, and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "runtime/device/tensor.h"

__device__ __forceinline__ float as_float(float x) {
    return x;
}
__device__ __forceinline__ float as_float(bf16 x) {
    return __uint_as_float(uint32_t(x.bits) << 16);
}
__device__ __forceinline__ float as_float(fp16 x) {
    return __half2float(__ushort_as_half(x.bits));
}

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else if constexpr (std::is_same_v<T, bf16>)
        return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
    else
        return {__half_as_ushort(__float2half_rn(x))};
}

// x after a round trip through T.
template <typename T>
__device__ __forceinline__ float rounded_to(float x) {
    return as_float(from_float<T>(x));
}

constexpr float LOG2E = 1.44269504f;

// exp, 2^x and 1/x. For fp32 results they are accurate to about one unit in the last place. For 16-bit results the
// special function unit computes them: its error of two more units vanishes in the rounding. exp2_for and
// reciprocal_for are then one instruction, which flushes subnormal arguments and results to 0.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
    return std::is_same_v<T, float> ? expf(x) : __expf(x);
}
template <typename T>
__device__ __forceinline__ float exp2_for(float x) {
    if constexpr (std::is_same_v<T, float>) return exp2f(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <typename T>
__device__ __forceinline__ float reciprocal_for(float x) {
    if constexpr (std::is_same_v<T, float>) return 1 / x;
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
