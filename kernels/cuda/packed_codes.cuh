// Packed weights (runtime/model/packed_weight.h) on their way to arithmetic: four neighbours as floats, or a group of
// 32 as operands of two mma.sync.m16n8k16 (mma.cuh).
//
// In an mma a row of the weights belongs to four neighbouring lanes. Lane t of them loads a quarter of the bytes of a
// group, eight weights, and makes four pairs of T of their codes: pairs 0 and 1 for the first mma, 2 and 3 for the
// second. Which columns those are does not matter as long as activation_pairs() takes the same. Codes are exact in bf16
// and in fp16, so that only the scales are left for the sums, in fp32.
//
//   Fp8    The bits of a code in the place of a T's have an exponent that is too small by the difference of the biases,
//          also where the code is subnormal: a multiplication by a power of two.
//   Int8   The low 7 bits are the mantissa of 128 + low; minus 128 or, if the sign bit is set, 256. The sign bit is the
//          lowest of the exponent of bf16. (fp16: 1024 + (code ^ 128) − 1152.)
//   Int4   The mantissa of 128 + code (fp16: 1024 + code); minus that of 8.
//
// Setting the mantissa of a number whose last place is 1 is known from FasterTransformer (Kim et al. 2022, "Who says
// elephants can't run", section 3).
#pragma once

#include "kernels/cuda/mma.cuh"
#include "runtime/model/packed_weight.h"

// Calls f with the packing as std::integral_constant.
template <typename F>
__host__ __device__ __forceinline__ void dispatch_packing(Packing packing, F f) {
    if (packing == Packing::Fp8)
        f(std::integral_constant<Packing, Packing::Fp8>{});
    else if (packing == Packing::Int8)
        f(std::integral_constant<Packing, Packing::Int8>{});
    else
        f(std::integral_constant<Packing, Packing::Int4>{});
}

// Code bytes of a group, and 32-bit words that each of four lanes takes of them.
__host__ __device__ constexpr int group_bytes(Packing packing) {
    return packing == Packing::Int4 ? 16 : 32;
}
constexpr int LANE_WORDS = 2;  // at most

// Two numbers of T in a word.
template <typename T>
using Twin = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;

template <typename T>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    const Twin<T> sum = __hadd2(reinterpret_cast<const Twin<T>&>(a), reinterpret_cast<const Twin<T>&>(b));
    return reinterpret_cast<const uint32_t&>(sum);
}
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    const Twin<T> product = __hmul2(reinterpret_cast<const Twin<T>&>(a), reinterpret_cast<const Twin<T>&>(b));
    return reinterpret_cast<const uint32_t&>(product);
}

// (word & mask) | bits: one instruction, for which the compiler must be asked.
template <uint32_t MASK, uint32_t BITS>
__device__ __forceinline__ uint32_t masked_or(uint32_t word) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(MASK), "n"(BITS));
    return result;
}

// The codes in bytes 1 and 3 of a word.
template <typename T>
__device__ __forceinline__ uint32_t fp8_pair(uint32_t word) {
    if constexpr (std::is_same_v<T, bf16>)
        return multiply_pairs<T>((word >> 4 & 0x07f007f0u) | (word & 0x80008000u), 0x7b807b80u);  // 2¹²⁰
    else
        return multiply_pairs<T>((word >> 1 & 0x3f803f80u) | (word & 0x80008000u), 0x5c005c00u);  // 2⁸
}
// The codes in bytes 0 and 2 of a word.
template <typename T>
__device__ __forceinline__ uint32_t int8_pair(uint32_t word) {
    if constexpr (std::is_same_v<T, bf16>)
        return add_pairs<T>(masked_or<0x007f007f, 0x43004300>(word), masked_or<0x00800080, 0xc300c300>(word));
    else
        return add_pairs<T>(masked_or<0x00ff00ff, 0x64006400>(word ^ 0x00800080u), 0xe480e480u);  // −1152
}
// The codes in bits 0 to 3 and 16 to 19 of a word.
template <typename T>
__device__ __forceinline__ uint32_t int4_pair(uint32_t word) {
    if constexpr (std::is_same_v<T, bf16>)
        return add_pairs<T>(masked_or<0x000f000f, 0x43004300>(word), 0xc308c308u);  // −136
    else
        return add_pairs<T>(masked_or<0x000f000f, 0x64006400>(word), 0xe408e408u);  // −1032
}

// The codes in bytes 0 and 2 of a word, of which bytes 1 and 3 repeat the sign: fp8_pair() in an instruction less.
template <typename T>
__device__ __forceinline__ uint32_t fp8_pair_of_signed(uint32_t word) {
    if constexpr (std::is_same_v<T, bf16>)
        return multiply_pairs<T>(word * 16 & 0x87f087f0u, 0x7b807b80u);  // 2¹²⁰
    else
        return multiply_pairs<T>(word * 128 & 0xbf80bf80u, 0x5c005c00u);  // 2⁸
}

// The two codes in the lower bytes of a word, for which Int4 has two pairs: the lower halves of the bytes, and the
// upper ones of columns 16 further.
template <Packing P, typename T>
__device__ __forceinline__ uint32_t neighbour_codes(uint32_t word, int upper) {
    constexpr int TO_EVEN_BYTES = 0x4140;
    if constexpr (P == Packing::Fp8) {
        uint32_t with_signs;
        asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(with_signs) : "r"(word));
        return fp8_pair_of_signed<T>(with_signs);
    }
    if constexpr (P == Packing::Int8) return int8_pair<T>(__byte_perm(word, 0, TO_EVEN_BYTES));
    return int4_pair<T>(__byte_perm(word, 0, TO_EVEN_BYTES) >> 4 * upper);
}

// The eight weights of a lane, without their scale, in the order of their columns. word: its bytes of the group, from
// group_bytes / 4·t on. REGROUPED: in the order of regrouped() activations, which takes fewer instructions.
template <Packing P, typename T, bool REGROUPED = false>
__device__ __forceinline__ void code_pairs(uint32_t (&pair)[4], const uint32_t (&word)[LANE_WORDS]) {
    constexpr int EVEN_FIRST = 0x3120;  // bytes 0, 2, 1, 3: pairs lie in every other byte
    if constexpr (P == Packing::Int4) {
        const uint32_t nibbles = REGROUPED ? word[0] : __byte_perm(word[0], 0, EVEN_FIRST);
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = int4_pair<T>(nibbles >> (i % 2 * 8 + i / 2 * 4));
    } else {
#pragma unroll
        for (int i = 0; i < LANE_WORDS; i++) {
            if constexpr (P == Packing::Fp8) {  // to bytes 1 and 3
                pair[2 * i] = fp8_pair<T>(REGROUPED ? word[i] << 8 : __byte_perm(word[i], 0, 0x1404));
                pair[2 * i + 1] = fp8_pair<T>(REGROUPED ? word[i] : __byte_perm(word[i], 0, 0x3424));
            } else {
                const uint32_t bytes = REGROUPED ? word[i] : __byte_perm(word[i], 0, EVEN_FIRST);
                pair[2 * i] = int8_pair<T>(bytes);
                pair[2 * i + 1] = int8_pair<T>(bytes >> 8);
            }
        }
    }
}

// Four activations as columns 0, 2, 1, 3: a pair is two columns apart, as the bytes of a word that one mask takes.
__device__ __forceinline__ uint2 regrouped(uint2 four) {
    return make_uint2(__byte_perm(four.x, four.y, 0x5410), __byte_perm(four.x, four.y, 0x7632));
}

// The activations of a group, from x on, that belong to those weights.
template <Packing P, typename T>
__device__ __forceinline__ void activation_pairs(uint32_t (&pair)[4], const T* x, int t) {
    constexpr int PARTS = P == Packing::Int4 ? 2 : 1, W = 8 / PARTS;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const Pack<T, W> part = load_pack<W>(x + i * int(PACKED_GROUP) / PARTS + W * t);
#pragma unroll
        for (int k = 0; k < W / 2; k++) pair[i * W / 2 + k] = part.word[k];
    }
}

// A lane's words of a group.
template <Packing P>
__device__ __forceinline__ void load_codes(uint32_t (&word)[LANE_WORDS], const char* from) {
    if constexpr (P == Packing::Int4) {
        word[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
        const uint2 both = *reinterpret_cast<const uint2*>(from);
        word[0] = both.x;
        word[1] = both.y;
    }
}

// a·b rounded to odd: toward 0, with the last bit set if that is not exact. Rounded on to 16 bits, it has been rounded
// once.
__device__ __forceinline__ float product_to_odd(float a, float b) {
    const float y = __fmul_rz(a, b);
    return __uint_as_float(__float_as_uint(y) | (fmaf(a, b, -y) != 0));
}

// Weights c … c + 3 of a row of C: 4 divides c. In fp32, rounded to nearest or to odd.
template <Packing P, bool TO_ODD = false>
__device__ __forceinline__ Floats<4> dequantise_four(const uint8_t* row, int64_t C, int64_t c) {
    Floats<4> w;
    const uint8_t* const scales = row + packed_code_bytes(P, C);
    const int64_t group = c / PACKED_GROUP, in_group = c % PACKED_GROUP;
    const int64_t at = P == Packing::Int4 ? group * (PACKED_GROUP / 2) + in_group % (PACKED_GROUP / 2) : c;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(row + at);
    const float scale = P == Packing::Fp8 ? *reinterpret_cast<const float*>(scales)
                                          : as_float(reinterpret_cast<const fp16*>(scales)[group]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t byte = word >> 8 * i & 0xff;
        float code;
        if constexpr (P == Packing::Fp8)
            code = __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
        else if constexpr (P == Packing::Int8)
            code = float(int8_t(byte));
        else
            code = float(int(in_group < PACKED_GROUP / 2 ? byte & 15 : byte >> 4) - 8);
        w[i] = TO_ODD ? product_to_odd(scale, code) : scale * code;
    }
    return w;
}
