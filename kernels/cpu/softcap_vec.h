// f and f' of kernels/softcap.h on 16 logits, for the OpenMP kernels. Not for .cu files.
#pragma once

#include "kernels/cpu/cpu.h"
#include "runtime/model/softcap_config.h"

struct CappedLogits {
    vec16 value, slope;
};

// tanh u = ±(1 − e)/(1 + e) and 1/cosh² u = 4e/(1 + e)² with e = exp(−2|u|), which neither overflows nor cancels in f'.
// rsqrt: beyond 2³⁰ f is ±c in fp32, and u² could overflow. All keep NaN.
ALWAYS_INLINE CappedLogits capped(vec16 x, Softcap::Function function, float cap) {
    const vec16 u = x / cap, absolute = vec_abs(u);
    if (function == Softcap::Function::Tanh) {
        const vec16 e = vec_exp(-2.0f * absolute), q = 1.0f / (1.0f + e), t = cap * (1.0f - e) * q;
        return {u < 0.0f ? -t : t, 4.0f * e * q * q};
    }
    constexpr float LARGE = 0x1p30f;
    const vec16 v = absolute > LARGE ? (u < 0.0f ? vec_set(-LARGE) : vec_set(LARGE)) : u, square = 1.0f + v * v;
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = 1 / std::sqrt(square[i]);
    return {cap * (v * r), r * r * r};
}
