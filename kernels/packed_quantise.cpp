// Quantisation to packed rows on the host, for both backends.
#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/packed_weight.h"
#include "kernels/packed_weight_check.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/device/cpu_dispatch.h"
#include "runtime/device/fp8_codes.h"

namespace {

constexpr int64_t G = PACKED_GROUP;

// The bits of the largest magnitude. Those of NaN are above those of infinity, so what is not finite remains visible.
ALWAYS_INLINE uint32_t absmax_bits(const float* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    return largest;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// fp8_encode(x, E4M3) without branches, so that it becomes vectors.
ALWAYS_INLINE uint8_t e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = std::min(bits & 0x7fffffffu, 0x43e00000u);  // at most 448
    const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;  // exponent bias 127
    // Below 2⁻⁶ codes are multiples of 2⁻⁹, which is the spacing of floats from 2¹⁴ on: the addition rounds.
    const float shifted = float_of(magnitude) + 0x1p14f;
    uint32_t subnormal;
    std::memcpy(&subnormal, &shifted, sizeof subnormal);
    const uint32_t code = magnitude < 0x3c800000u ? subnormal - 0x46800000u : normal - (120u << 3);
    return uint8_t(sign | code);
}

MULTIARCH void quantise_fp8(uint8_t* row, const float* x, int64_t C) {
    const float scale = float_of(absmax_bits(x, C)) / fp8_max(Fp8Format::E4M3);
    const float divisor = scale > 0 ? scale : 1;  // NaN and 0 give codes of no meaning, and of zeros
    for (int64_t i = 0; i < C; i++) row[i] = e4m3(x[i] / divisor);
    std::memcpy(row + C, &scale, sizeof scale);
}

// roundf(), half away from zero, as vectors; |x| < 2³¹.
ALWAYS_INLINE int32_t round_half_away(float x) {
    const int32_t whole = int32_t(x);
    const float rest = x - float(whole);
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

// scaled = x · (1 / d), rounded to fp32 as in llama.cpp: the compiler may not fuse the product with what is added to
// it. Zeros where 1 / d is not finite: d is then 0, beyond the range of fp16, or NaN.
ALWAYS_INLINE void scale_group(float (&scaled)[G], const float* x, float d) {
    const float inverse = d != 0 && std::isfinite(d) && std::isfinite(1 / d) ? 1 / d : 0;
    for (int64_t i = 0; i < G; i++) scaled[i] = x[i] * inverse;
    asm volatile("" : "+m"(scaled));
}

ALWAYS_INLINE void store_scale(uint8_t* scales, int64_t group, float d) {
    const fp16 stored = to_fp16(d);
    std::memcpy(scales + 2 * group, &stored, sizeof stored);
}

MULTIARCH void quantise_int8(uint8_t* row, const float* x, int64_t C) {
    float scaled[G];
    for (int64_t g = 0; g < C / G; g++) {
        const float d = float_of(absmax_bits(x + g * G, G)) / 127;
        scale_group(scaled, x + g * G, d);
        for (int64_t i = 0; i < G; i++) row[g * G + i] = uint8_t(int8_t(round_half_away(scaled[i])));
        store_scale(row + C, g, d);
    }
}

// The weight of the largest magnitude, the first of them; where one is not finite, infinity or NaN.
ALWAYS_INLINE float extreme_of(const float* x) {
    const float largest = float_of(absmax_bits(x, G));
    if (largest == 0 || !std::isfinite(largest)) return largest;
    return *std::find_if(x, x + G, [&](float w) { return std::fabs(w) == largest; });
}

MULTIARCH void quantise_int4(uint8_t* row, const float* x, int64_t C) {
    float scaled[G];
    uint8_t codes[G];
    for (int64_t g = 0; g < C / G; g++) {
        const float d = extreme_of(x + g * G) / -8;
        scale_group(scaled, x + g * G, d);
        for (int64_t i = 0; i < G; i++) codes[i] = uint8_t(std::min(15, int32_t(scaled[i] + 8.5f)));
        for (int64_t i = 0; i < G / 2; i++) row[g * G / 2 + i] = uint8_t(codes[i] | codes[G / 2 + i] << 4);
        store_scale(row + C / 2, g, d);
    }
}

void round_bf16(uint8_t* row, const float* x, int64_t C) {
    convert_from_float(row, DType::BF16, x, C);
}

bool bad_row(const PackedWeight& w, const uint8_t* row) {
    if (w.packing == Packing::Bf16) return false;
    const int64_t codes = packed_code_bytes(w.packing, w.cols);
    if (w.packing == Packing::Fp8) {
        float scale;
        std::memcpy(&scale, row + codes, sizeof scale);
        return !std::isfinite(scale) ||
               std::any_of(row, row + codes, [](uint8_t code) { return (code & 0x7f) == FP8_NAN; });
    }
    for (int64_t g = 0; g < w.cols / G; g++) {
        uint16_t d;
        std::memcpy(&d, row + codes + 2 * g, sizeof d);
        if ((d & 0x7c00) == 0x7c00) return true;
    }
    return false;
}

}  // namespace

void packed_quantise(const PackedWeight& out, Tensor inp) {
    check_matrix("packed_quantise", "inp", inp);
    const int64_t OC = inp.shape[0], C = inp.shape[1], bytes = packed_row_bytes(out.packing, C);
    check_packed("packed_quantise", out, OC, C);
    const auto quantise = out.packing == Packing::Fp8    ? quantise_fp8
                          : out.packing == Packing::Int8 ? quantise_int8
                          : out.packing == Packing::Int4 ? quantise_int4
                                                         : round_bf16;
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < OC; o++) {
        uint8_t* const row = out.rows.as<uint8_t>() + o * bytes;
        std::memset(row + bytes - 16, 0, 16);  // where the padding is
        quantise(row, inp.as<float>() + o * inp.stride[0], C);
    }
}

int64_t packed_bad_row(const PackedWeight& weight) {
    const int64_t OC = weight.rows.shape[0], bytes = packed_row_bytes(weight.packing, weight.cols);
    check_packed("packed_bad_row", weight, OC, weight.cols);
    int64_t first = OC;
#pragma omp parallel for schedule(static) reduction(min : first)
    for (int64_t o = 0; o < OC; o++)
        if (o < first && bad_row(weight, weight.rows.as<uint8_t>() + o * bytes)) first = o;
    return first < OC ? first : -1;
}
