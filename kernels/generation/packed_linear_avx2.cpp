// packed_linear() with AVX2, which every x86-64 build has. The instruction for dot products of bytes, maddubs, takes
// unsigned with signed ones and adds pairs to 16 bits that saturate. Int4: codes are 0 … 15, so pairs stay below 2¹²,
// and the 8 of a group are added in 16 bits. Int8: |w| times x with the sign of w, at most 2·128·127 a pair.
#include "kernels/generation/packed_linear_kernels.h"

#if !defined(__AVX2__) || !defined(__F16C__)
const PackedKernels* packed_kernels_avx2() {
    return nullptr;
}
#else
#include <immintrin.h>

namespace {

constexpr int64_t G = PACKED_GROUP;

ALWAYS_INLINE __m256i load32(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// The products of a group of a row as 8 sums of 4.
template <Packing P>
ALWAYS_INLINE __m256i dot_group(const uint8_t* w, const int8_t* x) {
    const __m256i codes = load32(x), ones = _mm256_set1_epi16(1);
    if constexpr (P == Packing::Int8) {
        const __m256i row = load32(w);
        return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(row), _mm256_sign_epi8(codes, row)), ones);
    } else {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
        const __m256i row = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(pairs, 4), pairs), _mm256_set1_epi8(15));
        return _mm256_madd_epi16(_mm256_maddubs_epi16(row, codes), ones);
    }
}

// Groups [0, n) of 8; the others give 0.
template <Packing P>
ALWAYS_INLINE __m256i dot_8_groups(const uint8_t* w, const int8_t* x, int64_t n) {
    const auto group = [&](int64_t g) __attribute__((always_inline)) {
        return g < n ? dot_group<P>(w + packed_code_bytes(P, g * G), x + g * G) : _mm256_setzero_si256();
    };
    const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(group(0), group(1)), _mm256_hadd_epi32(group(2), group(3)));
    const __m256i high =
        _mm256_hadd_epi32(_mm256_hadd_epi32(group(4), group(5)), _mm256_hadd_epi32(group(6), group(7)));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

// The scales of groups [g, g + n), n ≤ 8, of a row of weight; the others are 0.
ALWAYS_INLINE __m256 scales_of(const uint8_t* scales, int64_t g, int64_t n) {
    if (n == 8) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 2 * g)));
    __m128i halves = _mm_setzero_si128();
    std::memcpy(&halves, scales + 2 * g, size_t(2 * n));
    return _mm256_cvtph_ps(halves);
}

template <Packing P>
ALWAYS_INLINE __m256 add_8_groups(__m256 partial, const PackedLinear& p, const uint8_t* row, int64_t g, int64_t n) {
    __m256i sums = dot_8_groups<P>(row + packed_code_bytes(P, g * G), p.codes + g * G, n);
    sums = _mm256_add_epi32(sums, load32(p.offsets + g));
    const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(p.scales + g), scales_of(row + packed_code_bytes(P, p.C), g, n));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, partial);
}

template <Packing P>
void one_row_of(const PackedLinear& p, int64_t begin, int64_t end) {
    constexpr int64_t AHEAD = 2048;  // bytes, as in linear.cpp
    for (int64_t o = begin; o < end; o++) {
        const uint8_t* const row = p.row(o);
        __m256 partial[2] = {};
        int64_t g = 0;
        for (; g + PARTIALS <= p.groups(); g += PARTIALS) {
            const uint8_t* const codes = row + packed_code_bytes(P, g * G);
            for (int64_t i = 0; i < packed_code_bytes(P, PARTIALS * G); i += 64) __builtin_prefetch(codes + i + AHEAD);
            partial[0] = add_8_groups<P>(partial[0], p, row, g, 8);
            partial[1] = add_8_groups<P>(partial[1], p, row, g + 8, 8);
        }
        for (int half = 0; half < 2 && g < p.groups(); half++, g += 8)
            partial[half] = add_8_groups<P>(partial[half], p, row, g, std::min<int64_t>(8, p.groups() - g));
        p.store(0, o, LaneSums::tree(partial[0] + partial[1]));
    }
}

// Codes as the panel holds them, four of each output.
void fill_panel(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < PANEL_OUTPUTS; i++) {
        const uint8_t* const row = p.row(std::min(begin + i, end - 1));
        for (int64_t g = 0; g < p.groups(); g++) {
            uint8_t* const to =
                panel.codes + g * Panel::GROUP_BYTES + i / Panel::HALF * Panel::GROUP_BYTES / 2 + i % Panel::HALF * 4;
            uint32_t words[8];
            if (p.packing == Packing::Int8) {
                std::memcpy(words, row + g * G, sizeof words);
            } else {
                std::memcpy(words, row + g * G / 2, sizeof words / 2);
                for (int k = 0; k < 4; k++) {
                    words[4 + k] = words[k] >> 4 & 0x0f0f0f0f;
                    words[k] &= 0x0f0f0f0f;
                }
            }
            for (int64_t k = 0; k < 8; k++) std::memcpy(to + k * Panel::HALF * 4, &words[k], 4);
        }
    }
    fill_panel_scales(p, panel, begin, end);
}

// NB rows of inp from n on, 8 outputs of the panel from `first` on.
template <Packing P, int NB>
ALWAYS_INLINE void tile(const PackedLinear& p, const Panel& panel, int64_t n, int64_t first,
                        float (*out)[PANEL_OUTPUTS]) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int64_t half = first / Panel::HALF, lane = first % Panel::HALF;
    __m256 waiting[PARTIAL_LEVELS][NB];
    for (int i = 0; i < PARTIALS; i++) {
        __m256 partial[NB] = {};
        for (int64_t g = PARTIAL_ORDER[i]; g < p.groups(); g += PARTIALS) {
            const uint8_t* const w = panel.group(g, half) + 4 * lane;
            __m256i sum[NB] = {};
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                const __m256i row = load32(w + k * Panel::HALF * 4);
                const __m256i magnitude = P == Packing::Int8 ? _mm256_abs_epi8(row) : row;
#pragma GCC unroll 4
                for (int r = 0; r < NB; r++) {
                    int32_t four;
                    std::memcpy(&four, p.codes + (n + r) * p.code_stride + g * G + 4 * k, sizeof four);
                    const __m256i x = _mm256_set1_epi32(four);
                    if constexpr (P == Packing::Int8) {
                        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, row));
                        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
                    } else {
                        sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(magnitude, x));
                    }
                }
            }
            const __m256 d = _mm256_loadu_ps(panel.scale(g, half) + lane);
#pragma GCC unroll 4
            for (int r = 0; r < NB; r++) {
                if constexpr (P == Packing::Int4) sum[r] = _mm256_madd_epi16(sum[r], ones);
                const int64_t at = (n + r) * p.group_stride + g;
                sum[r] = _mm256_add_epi32(sum[r], _mm256_set1_epi32(p.offsets[at]));
                partial[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), _mm256_mul_ps(_mm256_set1_ps(p.scales[at]), d),
                                             partial[r]);
            }
        }
        int level = 0;
        for (int ones_of_i = i; ones_of_i & 1; ones_of_i >>= 1, level++)
            for (int r = 0; r < NB; r++) partial[r] = _mm256_add_ps(waiting[level][r], partial[r]);
        for (int r = 0; r < NB; r++) waiting[level][r] = partial[r];
    }
    for (int r = 0; r < NB; r++) _mm256_storeu_ps(out[r] + first, waiting[PARTIAL_LEVELS - 1][r]);
}

template <Packing P>
void panel_of(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    constexpr int NB = 4;
    fill_panel(p, panel, begin, end);
    float out[NB][PANEL_OUTPUTS];
    for (int64_t n = 0; n < p.N; n += NB) {  // the rows of inp are padded to a multiple of 16
        for (int64_t first = 0; first < end - begin; first += 8) tile<P, NB>(p, panel, n, first, out);
        for (int64_t r = 0; r < std::min<int64_t>(NB, p.N - n); r++) p.store_row(n + r, begin, end - begin, out[r]);
    }
}

void one_row(const PackedLinear& p, int64_t begin, int64_t end) {
    (p.packing == Packing::Int8 ? one_row_of<Packing::Int8> : one_row_of<Packing::Int4>)(p, begin, end);
}

void panel_rows(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    (p.packing == Packing::Int8 ? panel_of<Packing::Int8> : panel_of<Packing::Int4>)(p, panel, begin, end);
}

}  // namespace

const PackedKernels* packed_kernels_avx2() {
    static constexpr PackedKernels KERNELS = {"AVX2", one_row, panel_rows,
                                              [](Packing packing) { return packing == Packing::Int4 ? 8 : 0; }};
    return &KERNELS;
}
#endif
