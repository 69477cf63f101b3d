// packed_linear() with AVX-512 VNNI: vpdpbusd adds four products of unsigned with signed bytes to 32 bits. Codes of
// weights get an offset that makes them unsigned: Int8's 128; Int4's have theirs.
#include "kernels/generation/packed_linear_kernels.h"

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || defined(NO_AVX512)
const PackedKernels* packed_kernels_vnni() {
    return nullptr;
}
#else
#include "kernels/generation/packed_linear_panel.h"

namespace {

using namespace packed_panel;

// One row of inp: a block of 16 groups of a row of weight.
template <Packing P>
struct Block {
    static constexpr int LOADS = P == Packing::Int8 ? 8 : 4;                  // vectors of codes
    static constexpr int64_t BYTES = packed_code_bytes(P, PARTIALS* G);       // of codes
    static constexpr int64_t WORDS = packed_code_bytes(P, PACKED_GROUP) / 4;  // of a group
};

// The codes of inp as the vectors of a block meet them. Int4: the lower and the upper halves of four groups.
template <Packing P>
VNNI_INLINE void load_codes(__m512i (&x)[8], const int8_t* codes) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = _mm512_loadu_si512(codes + 64 * i);
    if (P == Packing::Int8) return;
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        const __m512i lower = _mm512_shuffle_i32x4(x[i], x[i + 1], 0x88);
        x[i + 1] = _mm512_shuffle_i32x4(x[i], x[i + 1], 0xdd);
        x[i] = lower;
    }
}

// Adds the four words of each quarter of four vectors: quarter q of the result has those of quarter q of all four.
VNNI_INLINE __m512i add_words(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)),
                  cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// The integer sums of 16 groups, in their order: of all, or of the first n ≤ GROUPS.
template <Packing P, int GROUPS>
VNNI_INLINE __m512i dot_groups(const uint8_t* w, const __m512i (&x)[8], int64_t n) {
    constexpr int LOADS = (Block<P>::LOADS * GROUPS + PARTIALS - 1) / PARTIALS;
    const __m512i zero = _mm512_setzero_si512(), low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
    __m512i sum[8] = {zero, zero, zero, zero, zero, zero, zero, zero};
#pragma GCC unroll 8
    for (int i = 0; i < LOADS; i++) {
        const int64_t words = std::clamp<int64_t>(n * Block<P>::WORDS - 16 * i, 0, 16);
        const __m512i codes = GROUPS == PARTIALS ? _mm512_loadu_si512(w + 64 * i)
                                                 : _mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1), w + 64 * i);
        if constexpr (P == Packing::Int8) {
            sum[i] = _mm512_dpbusd_epi32(zero, _mm512_xor_si512(codes, flip), x[i]);
        } else {
            sum[i] = _mm512_dpbusd_epi32(zero, _mm512_and_si512(codes, low), x[2 * i]);
            const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
            sum[i] = _mm512_dpbusd_epi32(sum[i], upper, x[2 * i + 1]);
        }
    }
    const __m512i first = add_words(sum[0], sum[1], sum[2], sum[3]);
    if constexpr (P == Packing::Int8) {  // a group is half of a vector: two quarters
        const __m512i second = LOADS > 4 ? add_words(sum[4], sum[5], sum[6], sum[7]) : zero;
        const __m512i both =
            _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x88), _mm512_shuffle_i32x4(first, second, 0xdd));
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), both);
    } else {
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), first);
    }
}

// Adds up to GROUPS groups from g on of OB rows of weight to their partial sums.
template <Packing P, int GROUPS, int OB>
VNNI_INLINE void add_block(__m512 (&partial)[OB], const PackedLinear& p, const uint8_t* row, int64_t g) {
    const int64_t n = std::min(PARTIALS, p.groups() - g);
    __m512i x[8];
    load_codes<P>(x, p.codes + g * G);
    const __m512i offsets = _mm512_loadu_si512(p.offsets + g);
    const __m512 dx = _mm512_loadu_ps(p.scales + g);
#pragma GCC unroll 4
    for (int o = 0; o < OB; o++) {
        const uint8_t *const w = row + o * p.row_bytes, *const scales = w + packed_code_bytes(P, p.C) + 2 * g;
        const __m512i sums = dot_groups<P, GROUPS>(w + packed_code_bytes(P, g * G), x, n);
        const __m256i halves =
            GROUPS == PARTIALS ? load_half(scales) : _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), scales);
        partial[o] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums, offsets)),
                                     _mm512_mul_ps(_mm512_cvtph_ps(halves), dx), partial[o]);
    }
}

template <Packing P, int OB>
VNNI_INLINE void dot_rows(const PackedLinear& p, int64_t o) {
    // OB rows are prefetched as one stream, a part of it with each block. From 8 KiB on a core gets all that memory
    // gives one (EPYC 9005: 37 GB/s, and 24 with 2 KiB).
    constexpr int64_t AHEAD = 8192;
    const uint8_t* const row = p.row(o);
    const int64_t blocks = (p.groups() + PARTIALS - 1) / PARTIALS, part = OB * p.row_bytes / blocks;
    const uint8_t* ahead = row + AHEAD;
    const auto prefetch = [&]() __attribute__((always_inline, target("arch=x86-64-v4,avx512vnni"))) {
        for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(ahead + i);
        ahead += part;
    };
    __m512 partial[OB];
    for (int i = 0; i < OB; i++) partial[i] = _mm512_setzero_ps();
    int64_t g = 0;
    for (; g + PARTIALS <= p.groups(); g += PARTIALS) {
        prefetch();
        add_block<P, PARTIALS>(partial, p, row, g);
    }
    if (g < p.groups()) prefetch();
    if (g + 8 < p.groups())
        add_block<P, 15>(partial, p, row, g);
    else if (g < p.groups())
        add_block<P, 8>(partial, p, row, g);
    for (int i = 0; i < OB; i++) {
        vec16 all;
        std::memcpy(&all, &partial[i], sizeof all);
        p.store(0, o + i, vec_sum(all));
    }
}

template <Packing P>
VNNI void one_row_of(const PackedLinear& p, int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + 4 <= end; o += 4) dot_rows<P, 4>(p, o);
    for (; o < end; o++) dot_rows<P, 1>(p, o);
}

void one_row(const PackedLinear& p, int64_t begin, int64_t end) {
    (p.packing == Packing::Int8 ? one_row_of<Packing::Int8> : one_row_of<Packing::Int4>)(p, begin, end);
}

// NB rows of inp from n on, all outputs of the panel: 2·NB integer sums and as many partial sums, in 6·4 of the 32
// registers.
template <int NB>
VNNI void tile(const PackedLinear& p, const Panel& panel, int64_t n, float (*out)[PANEL_OUTPUTS]) {
    __m512 waiting[PARTIAL_LEVELS][2 * NB];
    for (int i = 0; i < PARTIALS; i++) {
        __m512 partial[2 * NB];
#pragma GCC unroll 12
        for (int r = 0; r < 2 * NB; r++) partial[r] = _mm512_setzero_ps();
        for (int64_t g = PARTIAL_ORDER[i]; g < p.groups(); g += PARTIALS) {
            const int8_t* const x = p.codes + n * p.code_stride + g * G;
            const int64_t at = n * p.group_stride + g;
            __m512i sum[2 * NB];
#pragma GCC unroll 6
            for (int r = 0; r < NB; r++)
                sum[2 * r] = sum[2 * r + 1] = _mm512_set1_epi32(p.offsets[at + r * p.group_stride]);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                const __m512i w0 = _mm512_load_si512(panel.group(g, 0) + 64 * k),
                              w1 = _mm512_load_si512(panel.group(g, 1) + 64 * k);
#pragma GCC unroll 6
                for (int r = 0; r < NB; r++) {
                    int32_t four;
                    std::memcpy(&four, x + r * p.code_stride + 4 * k, sizeof four);
                    const __m512i codes = _mm512_set1_epi32(four);
                    sum[2 * r] = _mm512_dpbusd_epi32(sum[2 * r], w0, codes);
                    sum[2 * r + 1] = _mm512_dpbusd_epi32(sum[2 * r + 1], w1, codes);
                }
            }
            const __m512 d[2] = {_mm512_load_ps(panel.scale(g, 0)), _mm512_load_ps(panel.scale(g, 1))};
#pragma GCC unroll 6
            for (int r = 0; r < NB; r++) {
                const __m512 dx = _mm512_set1_ps(p.scales[at + r * p.group_stride]);
                for (int half = 0; half < 2; half++)
                    partial[2 * r + half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[2 * r + half]),
                                                            _mm512_mul_ps(dx, d[half]), partial[2 * r + half]);
            }
        }
        add_partials(waiting, partial, i);
    }
    for (int r = 0; r < NB; r++)
        for (int half = 0; half < 2; half++)
            _mm512_storeu_ps(out[r] + half * Panel::HALF, waiting[PARTIAL_LEVELS - 1][2 * r + half]);
}

VNNI void panel_rows(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    constexpr int NB = 6;
    fill(p, panel, begin, end);
    float out[NB][PANEL_OUTPUTS];
    for (int64_t n = 0; n < p.N; n += NB) {
        const int64_t rows = std::min<int64_t>(NB, p.N - n);
        constexpr void (*TILES[])(const PackedLinear&, const Panel&, int64_t, float(*)[PANEL_OUTPUTS]) = {
            tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
        TILES[rows - 1](p, panel, n, out);
        for (int64_t r = 0; r < rows; r++) p.store_row(n + r, begin, end - begin, out[r]);
    }
}

}  // namespace

const PackedKernels* packed_kernels_vnni() {
    static constexpr PackedKernels KERNELS = {"AVX-512 VNNI", one_row, panel_rows, offset};
    return has_avx512() && __builtin_cpu_supports("avx512vnni") ? &KERNELS : nullptr;
}
#endif
