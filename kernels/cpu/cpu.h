// For the OpenMP kernels: vectors of 16 floats with exp, sum and maximum. Not for .cu files.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime/device/cpu_dispatch.h"

// 16 floats: one AVX-512 register or two AVX2 registers. vec_load/vec_store take any alignment.
// GCC warns that arguments of this type have another ABI with AVX-512 (-Wpsabi). The Makefile turns the warning off,
// because these functions are always inlined.
typedef float vec16 __attribute__((vector_size(64)));
typedef int32_t ivec16 __attribute__((vector_size(64)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

ALWAYS_INLINE vec16 vec_load(const float* p) {
    vec16 v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

ALWAYS_INLINE void vec_store(float* p, vec16 v) {
    std::memcpy(p, &v, sizeof(v));
}

// The first n < 16 floats; the other lanes come from rest (for a maximum: −∞, for a sum: 0).
ALWAYS_INLINE vec16 vec_load_partial(const float* p, int64_t n, vec16 rest = vec16{}) {
    std::memcpy(&rest, p, static_cast<size_t>(n) * sizeof(float));
    return rest;
}

ALWAYS_INLINE void vec_store_partial(float* p, vec16 v, int64_t n) {
    std::memcpy(p, &v, static_cast<size_t>(n) * sizeof(float));
}

// x in all lanes, as one broadcast. It goes through integers, because GCC 12 compiles the splat of a float to 16
// insertions. Arithmetic with a vec16 takes x itself.
ALWAYS_INLINE vec16 vec_set(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return reinterpret_cast<vec16>(bits | ivec16{});
}

// Loops over the lanes, which GCC 12 compiles to one instruction each; a > b ? a : b on vec16 becomes scalar code with
// AVX2. The result is b if a or b is NaN.
ALWAYS_INLINE vec16 vec_max(vec16 a, vec16 b) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = a[i] > b[i] ? a[i] : b[i];
    return r;
}

ALWAYS_INLINE vec16 vec_min(vec16 a, vec16 b) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = a[i] < b[i] ? a[i] : b[i];
    return r;
}

ALWAYS_INLINE vec16 vec_abs(vec16 x) {
    return reinterpret_cast<vec16>(reinterpret_cast<ivec16>(x) & 0x7fffffff);
}

// Sums in the lanes of a vec16, from one iteration of a loop to the next. With AVX2 GCC keeps a vec16 that lives across
// iterations on the stack and moves it in pieces of 8 and 16 bytes; two vec8 stay in registers. Only loads of 8 floats
// keep them there: halves of a vec16 that was loaded become scalar loads.
struct LaneSums {
    vec8 low = {}, high = {};

    // += y · x; x, y: 16 floats each, or y in all lanes.
    ALWAYS_INLINE void add_products(const float* x, const float* y) {
        low += load(x) * load(y);
        high += load(x + 8) * load(y + 8);
    }
    ALWAYS_INLINE void add_products(const float* x, float y) {
        low += y * load(x);
        high += y * load(x + 8);
    }
    ALWAYS_INLINE void store(float* to) const {
        std::memcpy(to, &low, sizeof low);
        std::memcpy(to + 8, &high, sizeof high);
    }
    ALWAYS_INLINE float sum() const { return tree(low + high); }

    static ALWAYS_INLINE vec8 load(const float* p) {
        vec8 v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static ALWAYS_INLINE float tree(vec8 a) {
        const vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
        return (b[0] + b[2]) + (b[1] + b[3]);
    }
};

// Sum and maximum over the lanes as a tree of fixed shape: AVX2 and AVX-512 give the same bits.
ALWAYS_INLINE float vec_sum(vec16 x) {
    return LaneSums::tree(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                          __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}

ALWAYS_INLINE float vec_hmax(vec16 x) {
    x = vec_max(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = vec_max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}

// eˣ for any x: 1.02 ulp at most where the result is normal; subnormal results, 0, ∞ and NaN are right.
// x = n·ln 2 + r with |r| ≤ ln(2)/2, ln 2 in two parts (Cody, Waite 1980); eʳ = 1 + r + r²·q(r), q a minimax polynomial
// of relative error 2^−28. 2ⁿ is applied in two factors, so that neither overflows before the product does.
ALWAYS_INLINE vec16 vec_exp(vec16 x) {
    constexpr float round_magic = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits of the mantissa
    x = vec_min(vec_set(89.0f), x);           // e⁸⁹ overflows, e⁻¹⁰⁵ rounds to 0
    x = vec_max(vec_set(-105.0f), x);
    const vec16 shifted = x * 0x1.715476p+0f + round_magic;
    const vec16 n = shifted - round_magic;
    const vec16 r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    vec16 q = r * 0x1.6a2352p-10f + 0x1.123a6cp-7f;
    q = q * r + 0x1.5558f4p-5f;
    q = q * r + 0x1.555490p-3f;
    q = q * r + 0x1.fffffcp-2f;
    const vec16 p = 1.0f + (r + r * r * q);
    const ivec16 k = reinterpret_cast<ivec16>(shifted) - 0x4b400000;  // n as an integer
    const ivec16 half = k >> 1;
    const vec16 scale1 = reinterpret_cast<vec16>((half + 127) << 23);
    const vec16 scale2 = reinterpret_cast<vec16>((k - half + 127) << 23);
    return p * scale1 * scale2;
}
