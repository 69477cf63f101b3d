// f and f' of kernels/softcap.h.
#pragma once

#include <type_traits>

#include "kernels/cuda/number.cuh"
#include "runtime/model/softcap_config.h"

// e^x. For logits T of 16 bits the special function unit computes it: its error vanishes in the rounding. (__expf would
// spend three more instructions on subnormal results; here they are 0.)
template <typename T>
__device__ __forceinline__ float logit_exp(float x) {
    if constexpr (std::is_same_v<T, float>) return expf(x);
    return exp2_for<T>(x * LOG2E);
}

struct CappedLogit {
    float value, slope;
};

// The division and the square root, too, are approximate for 16 bits. Both forms as in kernels/cpu/softcap_vec.h.
template <typename T>
__device__ __forceinline__ CappedLogit capped(float x, Softcap softcap) {
    constexpr bool EXACT = std::is_same_v<T, float>;
    const float u = EXACT ? x / softcap.cap : x * (1 / softcap.cap);
    if (softcap.function == Softcap::Function::Tanh) {
        const float e = logit_exp<T>(-2 * fabsf(u)), q = EXACT ? 1 / (1 + e) : __fdividef(1, 1 + e);
        return {copysignf(softcap.cap * (1 - e) * q, u), 4 * e * q * q};
    }
    constexpr float LARGE = 0x1p30f;
    const float v = fabsf(u) > LARGE ? copysignf(LARGE, u) : u, square = fmaf(v, v, 1.0f);
    const float r = EXACT ? 1 / sqrtf(square) : rsqrtf(square);
    return {softcap.cap * (v * r), r * r * r};
}
