#include "runtime/device/convert_dtype.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 16;  // elements; below, starting threads costs more than it saves

float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

uint32_t float_to_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

float to_float(float x) {
    return x;
}
float to_float(double x) {
    return float(x);
}

template <typename T>
T from_float(float f) {
    if constexpr (std::is_same_v<T, bf16>)
        return to_bf16(f);
    else if constexpr (std::is_same_v<T, fp16>)
        return to_fp16(f);
    else
        return T(f);
}

// Elements go through memcpy because src and dst may be raw bytes of a file, which need not be aligned.
template <typename T>
void load_floats(float* dst, const char* src, int64_t n) {
#pragma omp parallel for schedule(static) if (n >= PARALLEL_FROM)
    for (int64_t i = 0; i < n; i++) {
        T x;
        std::memcpy(&x, src + i * int64_t(sizeof(T)), sizeof(T));
        dst[i] = to_float(x);
    }
}

template <typename T>
void store_floats(char* dst, const float* src, int64_t n) {
#pragma omp parallel for schedule(static) if (n >= PARALLEL_FROM)
    for (int64_t i = 0; i < n; i++) {
        const T x = from_float<T>(src[i]);
        std::memcpy(dst + i * int64_t(sizeof(T)), &x, sizeof(T));
    }
}

}  // namespace

float to_float(fp16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3FFu;
    if (exponent == 0) {  // zero or subnormal: mantissa·2^-24, exact in fp32
        return bits_to_float(float_to_bits(float(mantissa) * 0x1p-24f) | sign);
    }
    if (exponent == 31) return bits_to_float(sign | 0x7F800000u | mantissa << 13);
    return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

fp16 to_fp16(float f) {
    const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7FFFFFFFu;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
    if (magnitude > 0x7F800000u) return {uint16_t(sign | 0x7E00u)};   // NaN stays a (quiet) NaN
    if (magnitude >= 0x477FF000u) return {uint16_t(sign | 0x7C00u)};  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result is a multiple of 2^-24, which is the spacing of floats in [0.5, 1): the addition
        // rounds.
        const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
        return {uint16_t(sign | rounded)};
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1);
    return {uint16_t(sign | rounded >> 13)};
}

void convert_to_float(float* dst, const void* src, DType src_dtype, int64_t n) {
    const char* bytes = static_cast<const char*>(src);
    switch (src_dtype) {
        case DType::F32:
            return load_floats<float>(dst, bytes, n);
        case DType::F64:
            return load_floats<double>(dst, bytes, n);
        case DType::BF16:
            return load_floats<bf16>(dst, bytes, n);
        case DType::F16:
            return load_floats<fp16>(dst, bytes, n);
        default:
            throw Error(str("cannot convert ", dtype_name(src_dtype), " to fp32; use fp32, fp64, bf16 or fp16"));
    }
}

void convert_from_float(void* dst, DType dst_dtype, const float* src, int64_t n) {
    char* bytes = static_cast<char*>(dst);
    switch (dst_dtype) {
        case DType::F32:
            return store_floats<float>(bytes, src, n);
        case DType::F64:
            return store_floats<double>(bytes, src, n);
        case DType::BF16:
            return store_floats<bf16>(bytes, src, n);
        case DType::F16:
            return store_floats<fp16>(bytes, src, n);
        default:
            throw Error(str("cannot convert fp32 to ", dtype_name(dst_dtype), "; use fp32, fp64, bf16 or fp16"));
    }
}
