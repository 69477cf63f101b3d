// The functions of tensor_ops.h on vectors of 16 floats, for its CPU kernels. Where lanes choose between values, loops
// over the lanes are used, as in kernels/cpu/cpu.h.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "tensor_library/tensor_ops.h"

namespace tensor_detail {

constexpr float INF = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

template <typename Choose>
ALWAYS_INLINE vec16 vec_select(Choose choose, vec16 a, vec16 b) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = choose(i) ? a[i] : b[i];
    return r;
}

// The maximum; NaN if either is NaN.
ALWAYS_INLINE vec16 vec_nan_max(vec16 a, vec16 b) {
    return vec_select([&](int i) INLINE_LAMBDA { return a[i] > b[i] || a[i] != a[i]; }, a, b);
}

// ln x = k·ln 2 + ln m with √½ ≤ m < √2, and ln m = 2·artanh s = 2s·(1 + s²/3 + s⁴/5 + …), s = (m − 1)/(m + 1). |s| ≤
// 0.172, so the first omitted term is 2e-9 of the sum. ln 2 is split in two parts, so that k times the first is exact.
ALWAYS_INLINE vec16 vec_log(vec16 x) {
    const auto subnormal = [&](int i) INLINE_LAMBDA { return x[i] < 0x1p-126f; };
    const vec16 normal = vec_select(subnormal, x * 0x1p23f, x),
                exponent0 = vec_select(subnormal, vec_set(-23), vec16{});
    typedef uint32_t uvec16 __attribute__((vector_size(64)));  // wraps for numbers below 0, whose result is NaN anyway
    const uvec16 bits = reinterpret_cast<uvec16>(normal);
    const ivec16 k = reinterpret_cast<ivec16>(bits - 0x3f3504f3u) >> 23;  // the bits of √½, the least m
    const vec16 m = reinterpret_cast<vec16>(bits - (reinterpret_cast<uvec16>(k) << 23));
    vec16 exponent;
    for (int i = 0; i < 16; i++) exponent[i] = float(k[i]);
    exponent += exponent0;
    const vec16 f = m - 1.0f, s = f / (2.0f + f), s2 = s * s;
    const vec16 series = s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
    // 2s = f − s·f: f is exact and carries the leading digits.
    const vec16 log_m = f - (s * f - 2 * s * series);
    vec16 r = exponent * 0x1.62e4p-1f + (log_m + exponent * 0x1.7f7d1cp-20f);
    r = vec_select([&](int i) INLINE_LAMBDA { return x[i] > 0 && x[i] < INF; }, r, x);  // ∞ and NaN stay
    r = vec_select([&](int i) INLINE_LAMBDA { return x[i] == 0; }, vec_set(-INF), r);
    return vec_select([&](int i) INLINE_LAMBDA { return x[i] < 0; }, vec_set(NOT_A_NUMBER), r);
}

ALWAYS_INLINE vec16 vec_sigmoid(vec16 x) {
    const vec16 e = vec_exp(-vec_abs(x)), r = 1.0f / (1.0f + e), er = e * r;
    return vec_select([&](int i) INLINE_LAMBDA { return x[i] < 0; }, er, r);
}

// (1 − e)/(1 + e) with e = exp(−2|x|). This cancels for small x, where the odd series up to x¹³ replaces it: its first
// omitted term, 929569/638512875·x¹⁵, is 1e-8 of the sum at |x| = 0.45.
ALWAYS_INLINE vec16 vec_tanh(vec16 x) {
    const vec16 magnitude = vec_abs(x), e = vec_exp(-2.0f * magnitude), x2 = x * x;
    const vec16 large = (1.0f - e) / (1.0f + e);
    const vec16 series =
        x2 * (-1.0f / 3 +
              x2 * (2.0f / 15 +
                    x2 * (-17.0f / 315 + x2 * (62.0f / 2835 + x2 * (-1382.0f / 155925 + x2 * (21844.0f / 6081075))))));
    vec16 r;
    for (int i = 0; i < 16; i++)
        r[i] = std::copysign(magnitude[i] < 0.45f ? magnitude[i] + magnitude[i] * series[i] : large[i], x[i]);
    return r;
}

template <typename F>
ALWAYS_INLINE vec16 each_lane(F f) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = f(i);
    return r;
}

template <TensorFunction F>
ALWAYS_INLINE vec16 apply(vec16 x, vec16 y) {
    using Fn = TensorFunction;
    if constexpr (F == Fn::Id) return x;
    if constexpr (F == Fn::Neg) return -x;
    if constexpr (F == Fn::Inv) return 1.0f / x;
    if constexpr (F == Fn::Exp) return vec_exp(x);
    if constexpr (F == Fn::Log) return vec_log(x);
    if constexpr (F == Fn::Sigmoid) return vec_sigmoid(x);
    if constexpr (F == Fn::Tanh) return vec_tanh(x);
    if constexpr (F == Fn::Relu) return vec_nan_max(x, vec16{});
    if constexpr (F == Fn::Add) return x + y;
    if constexpr (F == Fn::Sub) return x - y;
    if constexpr (F == Fn::Mul) return x * y;
    if constexpr (F == Fn::Div) return x / y;
    if constexpr (F == Fn::Max) return vec_nan_max(x, y);
    // std::pow: exp(y·ln x) would need ln x to twice the digits.
    if constexpr (F == Fn::Pow) return each_lane([&](int i) { return std::pow(x[i], y[i]); });
    if constexpr (F == Fn::Lt) return each_lane([&](int i) INLINE_LAMBDA { return x[i] < y[i] ? 1.0f : 0.0f; });
    if constexpr (F == Fn::Eq) return each_lane([&](int i) INLINE_LAMBDA { return x[i] == y[i] ? 1.0f : 0.0f; });
    if constexpr (F == Fn::IsClose)
        return each_lane([&](int i)
                             INLINE_LAMBDA { return std::fabs(double(x[i]) - double(y[i])) < 1e-2 ? 1.0f : 0.0f; });
    if constexpr (F == Fn::InvBack) return -(y / x) / x;  // x² might overflow where the result does not
    if constexpr (F == Fn::LogBack) return y / x;
    if constexpr (F == Fn::ReluBack) return vec_select([&](int i) INLINE_LAMBDA { return x[i] > 0; }, y, vec16{});
}

}  // namespace tensor_detail
