// Conversions between fp32 and the 16-bit floats, round to nearest even, on the host.
#pragma once

#include <cstring>

#include "runtime/device/tensor.h"

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline bf16 to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {uint16_t(bits >> 16 | 0x40)};  // NaN stays a (quiet) NaN
    return {uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16)};
}

float to_float(fp16 x);
fp16 to_fp16(float f);

// n elements of src (F32, BF16, F16, F64) as fp32, and fp32 as dst's dtype. Throws Error for other dtypes.
void convert_to_float(float* dst, const void* src, DType src_dtype, int64_t n);
void convert_from_float(void* dst, DType dst_dtype, const float* src, int64_t n);
