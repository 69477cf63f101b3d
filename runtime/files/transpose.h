// A band of a stored matrix, transposed into memory. The file holds [C, R], memory holds [R, C].
//
// Tiles of 8 x 8 are transposed in registers. Their rows are 32 bytes in memory, where rows of the matrix are kilobytes
// apart: with AVX they are stored past the caches, because ordinary stores first read the cache lines that they
// overwrite.
#pragma once

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace transpose_detail {

using Vector = float __attribute__((vector_size(32)));
constexpr int64_t TILE = 8;

// Streaming: past the caches; to must be a multiple of 32 bytes.
template <bool STREAMING>
void store(float* to, Vector v) {
#ifdef __AVX__
    if (STREAMING) return _mm256_stream_ps(to, v);
#endif
    std::memcpy(to, &v, sizeof v);
}

// to[j][i] = from[i][j] for i, j < 8: pairs of lanes, then pairs of pairs, then halves change places.
template <bool STREAMING>
void tile(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
    Vector a[TILE], b[TILE];
    for (int64_t i = 0; i < TILE; i++) std::memcpy(&a[i], from + i * from_stride, sizeof a[i]);
    for (int64_t i = 0; i < TILE; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (const int64_t i : {0, 1, 4, 5}) {
        a[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 2] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int64_t i = 0; i < TILE / 2; i++) {
        b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int64_t j = 0; j < TILE; j++) store<STREAMING>(to + j * to_stride, b[j]);
}

template <bool STREAMING>
void transpose_band(float* dst, const float* band, int64_t R, int64_t C, int64_t c0, int64_t c1, int64_t begin,
                    int64_t end) {
    const auto element = [&](int64_t r, int64_t c) {
        const int64_t i = r * C + c;
        if (i >= begin && i < end) dst[i - begin] = band[(c - c0) * R + r];
    };
    for (int64_t r = begin / C; r < R && r * C < end; r += TILE) {
        const bool whole = r + TILE <= R && r * C >= begin && (r + TILE) * C <= end;
        int64_t c = c0;
        for (; whole && c + TILE <= c1; c += TILE)
            tile<STREAMING>(dst + (r * C + c - begin), C, band + (c - c0) * R + r, R);
        for (; c < c1; c++)
            for (int64_t j = r; j < std::min(r + TILE, R); j++) element(j, c);
    }
}

}  // namespace transpose_detail

// Rows [c0, c1) of the file, band [c1 - c0, R], are columns c0 to c1 - 1 in memory. Writes those of their elements that
// are among elements [begin, end) of the matrix in memory, which dst holds.
inline void transpose_band(float* dst, const float* band, int64_t R, int64_t C, int64_t c0, int64_t c1, int64_t begin,
                           int64_t end) {
    using namespace transpose_detail;
#ifdef __AVX__
    if (C % TILE == 0 && c0 % TILE == 0 && reinterpret_cast<uintptr_t>(dst - begin) % sizeof(Vector) == 0) {
        transpose_band<true>(dst, band, R, C, c0, c1, begin, end);
        return _mm_sfence();  // before another thread reads them
    }
#endif
    transpose_band<false>(dst, band, R, C, c0, c1, begin, end);
}
