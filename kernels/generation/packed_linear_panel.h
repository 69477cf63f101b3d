// Panels of packed_linear() with AVX-512. For the .cpp files of its instruction sets alone.
#pragma once

// GCC 12 takes what its own intrinsics leave undefined for a mistake (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/generation/packed_linear_kernels.h"

#define VNNI __attribute__((target("arch=x86-64-v4,avx512vnni")))
#define VNNI_INLINE inline __attribute__((always_inline, target("arch=x86-64-v4,avx512vnni")))

namespace packed_panel {

constexpr int64_t G = PACKED_GROUP;

// What is added to codes of weights, so that they are not negative.
constexpr int offset(Packing packing) {
    return packing == Packing::Int8 ? 128 : 8;
}

// Each of 4 rows of 4 words in a vector's four quarters, transposed: vector k of the result has word k of all rows.
VNNI_INLINE void transpose_words(__m512i (&r)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]),
                  c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
}

VNNI_INLINE __m256i load_half(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
VNNI_INLINE __m128i load_quarter(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// A group of 16 outputs, whose rows begin at rows[i], to 8 vectors.
VNNI_INLINE void pack_int8(uint8_t* to, const uint8_t* const (&rows)[16], int64_t at) {
    const __m512i flip = _mm512_set1_epi8(-128);
    __m512i low[4], high[4];  // of outputs 0 … 7 and 8 … 15
    for (int i = 0; i < 4; i++) {
        const auto two = [&](int a) __attribute__((always_inline, target("arch=x86-64-v4,avx512vnni"))) {
            return _mm512_inserti64x4(_mm512_castsi256_si512(load_half(rows[a] + at)), load_half(rows[a + 4] + at), 1);
        };
        low[i] = _mm512_xor_si512(two(i), flip);
        high[i] = _mm512_xor_si512(two(8 + i), flip);
    }
    transpose_words(low);
    transpose_words(high);
    for (int k = 0; k < 4; k++) {
        _mm512_store_si512(to + 64 * k, _mm512_shuffle_i32x4(low[k], high[k], 0x88));
        _mm512_store_si512(to + 64 * (4 + k), _mm512_shuffle_i32x4(low[k], high[k], 0xdd));
    }
}

VNNI_INLINE void pack_int4(uint8_t* to, const uint8_t* const (&rows)[16], int64_t at) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i low[4], high[4];  // nibbles
    for (int i = 0; i < 4; i++) {
        __m512i four = _mm512_castsi128_si512(load_quarter(rows[i] + at));
        four = _mm512_inserti32x4(four, load_quarter(rows[4 + i] + at), 1);
        four = _mm512_inserti32x4(four, load_quarter(rows[8 + i] + at), 2);
        four = _mm512_inserti32x4(four, load_quarter(rows[12 + i] + at), 3);
        low[i] = _mm512_and_si512(four, mask);
        high[i] = _mm512_and_si512(_mm512_srli_epi16(four, 4), mask);
    }
    transpose_words(low);
    transpose_words(high);
    for (int k = 0; k < 4; k++) {
        _mm512_store_si512(to + 64 * k, low[k]);
        _mm512_store_si512(to + 64 * (4 + k), high[k]);
    }
}

// Outputs [begin, end); those beyond repeat the last one.
VNNI inline void fill(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    for (int64_t half = 0; half < 2; half++) {
        const uint8_t* rows[16];
        for (int64_t i = 0; i < 16; i++) rows[i] = p.row(std::min(begin + half * Panel::HALF + i, end - 1));
        for (int64_t g = 0; g < p.groups(); g++) {
            uint8_t* const to = panel.codes + g * Panel::GROUP_BYTES + half * Panel::GROUP_BYTES / 2;
            if (p.packing == Packing::Int8)
                pack_int8(to, rows, g * G);
            else
                pack_int4(to, rows, g * G / 2);
        }
    }
    fill_panel_scales(p, panel, begin, end);
}

// Adds a tile's partial sums, the i-th of PARTIAL_ORDER, to those that wait; afterwards waiting[PARTIAL_LEVELS − 1] is
// the sum of all 16.
template <int N>
VNNI_INLINE void add_partials(__m512 (&waiting)[PARTIAL_LEVELS][N], __m512 (&partial)[N], int i) {
    int level = 0;
    for (int ones = i; ones & 1; ones >>= 1, level++)
        for (int r = 0; r < N; r++) partial[r] = _mm512_add_ps(waiting[level][r], partial[r]);
    for (int r = 0; r < N; r++) waiting[level][r] = partial[r];
}

}  // namespace packed_panel
