// The two 8-bit floats of low-precision matmuls (Micikevicius et al. 2022, "FP8 formats for deep learning", table 1).
//
//            exponent  mantissa  largest  smallest normal  smallest subnormal  infinities
//   E4M3     4 bits    3 bits    448      2⁻⁶              2⁻⁹                 none
//   E5M2     5 bits    2 bits    57344    2⁻¹⁴             2⁻¹⁶                ±0x7c
//
// A quantised tensor x is stored as codes of x·scale, so that its largest magnitude lies near the format's largest
// number. Scales are powers of two: multiplying by them is exact, on every backend and in any order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime/names.h"
#include "runtime/rng.h"

enum class Fp8Format : uint8_t { E4M3, E5M2 };

constexpr Names<2> FP8_FORMAT_NAMES = {"e4m3", "e5m2"};
constexpr uint8_t FP8_NAN = 0x7f;  // the canonical NaN of both formats

HOST_DEVICE constexpr float fp8_max(Fp8Format f) {
    return f == Fp8Format::E4M3 ? 448.0f : 57344.0f;
}

// 2ᵉ for −126 ≤ e ≤ 127.
HOST_DEVICE inline float power_of_two(int e) {
    const uint32_t bits = uint32_t(e + 127) << 23;
    float x = 0;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

// A scale on the device: FP8_SCALE_FLOATS numbers. The inverse is the first, since cuBLASLt reads its factors only at
// addresses that are multiples of 16 bytes.
enum Fp8ScaleNumber { FP8_INVERSE_SCALE, FP8_SCALE, FP8_SCALE_FLOATS = 4 };

// The scale 2ᵉ.
HOST_DEVICE inline void fp8_store_scale(float* to, int e) {
    to[FP8_INVERSE_SCALE] = power_of_two(-e);
    to[FP8_SCALE] = power_of_two(e);
    for (int i = 2; i < FP8_SCALE_FLOATS; i++) to[i] = 0;
}

// Rounds to nearest even. Beyond the largest number: that number (saturation). NaN and ±∞ become NaN, so that a tensor
// that is not finite stays one. The same codes as the GPU's conversion with saturation, except for ±∞.
inline uint8_t fp8_encode(float x, Fp8Format f) {
    const int mantissa = f == Fp8Format::E4M3 ? 3 : 2, smallest_exponent = f == Fp8Format::E4M3 ? -6 : -14;
    const uint8_t largest = f == Fp8Format::E4M3 ? 0x7e : 0x7b;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint8_t sign = uint8_t(bits >> 24 & 0x80);
    bits &= 0x7fffffffu;
    if (bits >= 0x7f800000u) return FP8_NAN;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof bits);
    if (magnitude >= fp8_max(f)) return sign | largest;
    const int exponent = std::max(int(bits >> 23) - 127, smallest_exponent);
    // In units of the last place. Scaling by a power of two is exact. What rounds up to the next power of two carries
    // into the exponent of the code.
    const int units = int(std::nearbyint(magnitude * power_of_two(mantissa - exponent)));
    return uint8_t(sign | (((exponent - smallest_exponent) << mantissa) + units));
}

inline float fp8_decode(uint8_t code, Fp8Format f) {
    const int mantissa = f == Fp8Format::E4M3 ? 3 : 2, bias = f == Fp8Format::E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    float magnitude =
        std::ldexp(float(exponent ? fraction + (1 << mantissa) : fraction), std::max(exponent, 1) - bias - mantissa);
    if (f == Fp8Format::E4M3 && (code & 0x7f) == 0x7f) magnitude = NAN;
    if (f == Fp8Format::E5M2 && exponent == 31) magnitude = fraction ? NAN : INFINITY;
    return code & 0x80 ? -magnitude : magnitude;
}

// The exponent e of the scale 2ᵉ: the largest with amax·2ᵉ ≤ fp8_max·2⁻ᵐᵃʳᵍⁱⁿ. 0 if amax is 0 or not finite. Limited so
// that 2ᵉ and 2⁻ᵉ are normal fp32 numbers.
HOST_DEVICE inline int fp8_scale_exponent(float amax, Fp8Format f, int margin) {
    uint32_t bits = 0;
    memcpy(&bits, &amax, sizeof bits);
    if (bits == 0 || bits >= 0x7f800000u) return 0;
    // Both largest numbers are 1.75 times a power of two.
    const int largest = f == Fp8Format::E4M3 ? 8 : 15, exponent = int(bits >> 23) - 127;
    const int e = largest - exponent - ((bits & 0x7fffffu) > 0x600000u) - margin;
    return e < -126 ? -126 : e > 126 ? 126 : e;
}
