#include "runtime/files/gguf_types.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "runtime/device/convert_dtype.h"

namespace {

constexpr int64_t SMALL = 32, LARGE = 256;  // values of a block

float read_fp16(const uint8_t* src) {
    fp16 x;
    std::memcpy(&x, src, sizeof x);
    return to_float(x);
}

uint32_t read_u32(const uint8_t* src) {
    uint32_t x;
    std::memcpy(&x, src, sizeof x);
    return x;
}

template <DType T>
bool convert_numbers(float* dst, const uint8_t* src, int64_t n) {
    convert_to_float(dst, src, T, n);
    return true;
}

// Q4_0, Q4_1, Q5_0, Q5_1: value j is q·d + m with q = nibble j, plus 16 if fifth bit j is set.
template <bool HAS_MINIMUM, bool HAS_FIFTH_BITS>
bool dequantise_small(float* dst, const uint8_t* src, int64_t n) {
    constexpr int OFFSET = HAS_MINIMUM ? 0 : HAS_FIFTH_BITS ? 16 : 8;
    bool finite = true;
    for (int64_t i = 0; i < n; i++, dst += SMALL) {
        const float d = read_fp16(src), m = HAS_MINIMUM ? read_fp16(src + 2) : 0.0f;
        finite = finite && std::isfinite(d) && std::isfinite(m);
        src += HAS_MINIMUM ? 4 : 2;
        const uint32_t fifth = HAS_FIFTH_BITS ? read_u32(src) : 0;
        src += HAS_FIFTH_BITS ? 4 : 0;
        for (int j = 0; j < 16; j++) {
            const int low = int(src[j] & 15) | int(fifth >> j & 1) << 4;
            const int high = int(src[j] >> 4) | int(fifth >> (j + 16) & 1) << 4;
            dst[j] = float(low - OFFSET) * d;
            dst[j + 16] = float(high - OFFSET) * d;
        }
        for (int j = 0; HAS_MINIMUM && j < SMALL; j++) dst[j] += m;
        src += 16;
    }
    return finite;
}

bool dequantise_q8_0(float* dst, const uint8_t* src, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++, src += 34, dst += SMALL) {
        const float d = read_fp16(src);
        finite = finite && std::isfinite(d);
        for (int j = 0; j < SMALL; j++) dst[j] = float(int8_t(src[2 + j])) * d;
    }
    return finite;
}

// The scale and the minimum of group j of 32 values, which 12 bytes hold: of groups 0 to 3 the low 6 bits of bytes j
// and j + 4; of groups 4 to 7 the halves of byte j + 4, and above them the high bits of bytes j − 4 and j.
struct ScaleAndMinimum {
    float scale, minimum;
};
ScaleAndMinimum scale_and_minimum(const uint8_t* packed, int j) {
    if (j < 4) return {float(packed[j] & 63), float(packed[j + 4] & 63)};
    return {float((packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)),
            float((packed[j + 4] >> 4) | (packed[j] >> 6 << 4))};
}

// Q4_K, Q5_K. Groups 2k and 2k + 1 are the low and the high halves of bytes [32·k, 32·k + 32); bit g of fifth-bit byte
// l belongs to value l of group g.
template <bool HAS_FIFTH_BITS>
bool dequantise_k4(float* dst, const uint8_t* src, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++, dst += LARGE) {
        const float d = read_fp16(src), m = read_fp16(src + 2);
        finite = finite && std::isfinite(d) && std::isfinite(m);
        const uint8_t *packed = src + 4, *fifth = src + 16, *q = fifth + (HAS_FIFTH_BITS ? 32 : 0);
        for (int g = 0; g < 8; g++) {
            const auto [scale, minimum] = scale_and_minimum(packed, g);
            const float a = d * scale, b = m * minimum;
            for (int l = 0; l < 32; l++) {
                int value = q[g / 2 * 32 + l] >> (g % 2 * 4) & 15;
                if (HAS_FIFTH_BITS) value |= (fifth[l] >> g & 1) << 4;
                dst[g * 32 + l] = a * float(value) - b;
            }
        }
        src = q + 128;
    }
    return finite;
}

// Two halves of 128 values. Value l of quarter k has the half k/2 of low byte l + 32·(k%2), and the bits 2k, 2k + 1 of
// high byte l; a scale is for 16 values.
bool dequantise_q6_k(float* dst, const uint8_t* src, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++, src += 210, dst += LARGE) {
        const float d = read_fp16(src + 208);
        finite = finite && std::isfinite(d);
        for (int half = 0; half < 2; half++) {
            const uint8_t *low = src + 64 * half, *high = src + 128 + 32 * half, *scale = src + 192 + 8 * half;
            float* const out = dst + 128 * half;
            for (int k = 0; k < 4; k++)
                for (int l = 0; l < 32; l++) {
                    const int bits = (low[l + 32 * (k % 2)] >> (k / 2 * 4) & 15) | (high[l] >> (2 * k) & 3) << 4;
                    out[32 * k + l] = d * float(int8_t(scale[2 * k + l / 16])) * float(bits - 32);
                }
        }
    }
    return finite;
}

constexpr GgufTypeFacts TYPES[] = {{0, "F32", 1, 4, convert_numbers<DType::F32>, false},
                                   {1, "F16", 1, 2, convert_numbers<DType::F16>, false},
                                   {30, "BF16", 1, 2, convert_numbers<DType::BF16>, false},
                                   {8, "Q8_0", SMALL, 34, dequantise_q8_0, false},
                                   {2, "Q4_0", SMALL, 18, dequantise_small<false, false>, false},
                                   {3, "Q4_1", SMALL, 20, dequantise_small<true, false>, false},
                                   {6, "Q5_0", SMALL, 22, dequantise_small<false, true>, false},
                                   {7, "Q5_1", SMALL, 24, dequantise_small<true, true>, false},
                                   {12, "Q4_K", LARGE, 144, dequantise_k4<false>, false},
                                   {13, "Q5_K", LARGE, 176, dequantise_k4<true>, false},
                                   {14, "Q6_K", LARGE, 210, dequantise_q6_k, false},
                                   {10, "Q2_K", LARGE, 84, nullptr, true},
                                   {11, "Q3_K", LARGE, 110, nullptr, true},
                                   {16, "IQ2_XXS", LARGE, 66, nullptr, true},
                                   {17, "IQ2_XS", LARGE, 74, nullptr, true},
                                   {18, "IQ3_XXS", LARGE, 98, nullptr, true},
                                   {19, "IQ1_S", LARGE, 50, nullptr, true},
                                   {20, "IQ4_NL", SMALL, 18, nullptr, true},
                                   {21, "IQ3_S", LARGE, 110, nullptr, true},
                                   {22, "IQ2_S", LARGE, 82, nullptr, true},
                                   {23, "IQ4_XS", LARGE, 136, nullptr, true},
                                   {29, "IQ1_M", LARGE, 56, nullptr, true},
                                   {34, "TQ1_0", LARGE, 54, nullptr, true},
                                   {35, "TQ2_0", LARGE, 66, nullptr, true},
                                   {39, "MXFP4", SMALL, 17, nullptr, true},
                                   {9, "Q8_1", SMALL, 40, nullptr, false},
                                   {15, "Q8_K", LARGE, 292, nullptr, false},
                                   {24, "I8", 1, 1, nullptr, false},
                                   {25, "I16", 1, 2, nullptr, false},
                                   {26, "I32", 1, 4, nullptr, false},
                                   {27, "I64", 1, 8, nullptr, false},
                                   {28, "F64", 1, 8, nullptr, false}};

void write_fp16(uint8_t* dst, float x) {
    const fp16 half = to_fp16(x);
    std::memcpy(dst, &half, sizeof half);
}

// 0 of a scale that is 0, or so small that fp16 makes it 0 and fp32 cannot hold its inverse.
float inverse_of(float d) {
    return std::fabs(d) < 0x1p-127f ? 0.0f : 1 / d;
}

}  // namespace

const GgufTypeFacts* find_gguf_type(uint32_t number) {
    const auto* const found = std::find_if(std::begin(TYPES), std::end(TYPES),
                                           [number](const GgufTypeFacts& t) { return t.number == number; });
    return found == std::end(TYPES) ? nullptr : found;
}

const GgufTypeFacts& facts_of(GgufType type) {
    return *find_gguf_type(uint32_t(type));
}

void quantise_q8_0(uint8_t* dst, const float* src, int64_t n) {
    for (int64_t i = 0; i < n; i++, src += SMALL, dst += 34) {
        float largest = 0;
        for (int j = 0; j < SMALL; j++) largest = std::max(largest, std::fabs(src[j]));
        const float d = largest / 127, inverse = inverse_of(d);
        write_fp16(dst, d);
        for (int j = 0; j < SMALL; j++) dst[2 + j] = uint8_t(int8_t(std::round(src[j] * inverse)));
    }
}

void quantise_q4_0(uint8_t* dst, const float* src, int64_t n) {
    for (int64_t i = 0; i < n; i++, src += SMALL, dst += 18) {
        const float extreme =
            *std::max_element(src, src + SMALL, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        const float d = extreme / -8, inverse = inverse_of(d);
        write_fp16(dst, d);
        const auto code = [&](float x) { return uint8_t(std::min(15, int(x * inverse + 8.5f))); };
        for (int j = 0; j < 16; j++) dst[2 + j] = uint8_t(code(src[j]) | code(src[j + 16]) << 4);
    }
}
