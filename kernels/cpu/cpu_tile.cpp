#include "kernels/cpu/cpu_tile.h"

namespace {

// c [R, NV vectors] = a·b, stored as `into` says: a is [R, K] with rows lda apart or, TRANSPOSED, stored as [K, R]; b
// is [K, NV vectors].
template <typename V, int R, int NV, bool TRANSPOSED>
ALWAYS_INLINE void gemm_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                              int64_t K, Into into) {
    V sum[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sum[r][v] = into == Into::Continued ? load<V>(c + r * ldc + v * WIDTH<V>) : V{};
    }
    for (int64_t k = 0; k < K; k++) {
        V row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) row[v] = load<V>(b + k * ldb + v * WIDTH<V>);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const float x = TRANSPOSED ? a[k * lda + r] : a[r * lda + k];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) sum[r][v] += x * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float* to = c + r * ldc + v * WIDTH<V>;
            store(to, into == Into::Added ? load<V>(to) + sum[r][v] : sum[r][v]);
        }
    }
}

template <typename V, int R, int NV, bool TRANSPOSED>
ALWAYS_INLINE void gemm_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M,
                             int64_t K, Into into) {
    const int64_t step = TRANSPOSED ? 1 : lda;
    int64_t m = 0;
    for (; m + R <= M; m += R) {
        gemm_block<V, R, NV, TRANSPOSED>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, into);
    }
    for (; m < M; m++) {
        gemm_block<V, 1, NV, TRANSPOSED>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, into);
    }
}

// With the 32 registers of AVX-512 a block is 4×4 or 8×2 vectors, with AVX2's 16 registers of half the width 4×2.
template <typename V, bool TRANSPOSED>
ALWAYS_INLINE void tile_gemm(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M,
                             int64_t vecs, int64_t K, Into into) {
    int64_t v = 0;
    if constexpr (WIDTH<V> == LANES) {
        for (; v + 4 <= vecs; v += 4) {
            gemm_rows<V, 4, 4, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, into);
        }
        if (v + 3 == vecs) {
            gemm_rows<V, 4, 3, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, into);
            return;
        }
        for (; v + 2 <= vecs; v += 2) {
            gemm_rows<V, 8, 2, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, into);
        }
    }
    constexpr int NV = LANES / WIDTH<V>;
    for (; v < vecs; v++) {
        gemm_rows<V, 8 / NV, NV, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, into);
    }
}

template <bool TRANSPOSED>
WITH_AVX512 void tile_gemm_avx512(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                                  int64_t M, int64_t vecs, int64_t K, Into into) {
    tile_gemm<vec16, TRANSPOSED>(c, ldc, a, lda, b, ldb, M, vecs, K, into);
}

template <bool TRANSPOSED>
void tile_gemm_avx2(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M,
                    int64_t vecs, int64_t K, Into into) {
    tile_gemm<vec8, TRANSPOSED>(c, ldc, a, lda, b, ldb, M, vecs, K, into);
}

}  // namespace

void tile_AB(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
             int64_t K, Into into) {
    (has_avx512() ? tile_gemm_avx512<false> : tile_gemm_avx2<false>)(c, ldc, a, lda, b, ldb, M, vecs, K, into);
}

void tile_AtB(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
              int64_t K, Into into) {
    (has_avx512() ? tile_gemm_avx512<true> : tile_gemm_avx2<true>)(c, ldc, a, lda, b, ldb, M, vecs, K, into);
}

// In 8×8 blocks.
MULTIARCH void transpose(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t cols,
                         float scale) {
    const int64_t rows8 = rows / 8 * 8, cols8 = cols / 8 * 8;
    for (int64_t r = 0; r < rows8; r += 8) {
        for (int64_t c = 0; c < cols8; c += 8) {
            vec8 a[8], b[8];
            for (int i = 0; i < 8; i++) std::memcpy(&a[i], src + (r + i) * lds + c, sizeof(vec8));
            for (int i = 0; i < 8; i += 2) {  // pairs of rows: elements 0, 1, 4, 5 and 2, 3, 6, 7 interleaved
                b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
                b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
            }
            for (int i = 0; i < 8; i += 4) {  // columns 0 … 3 of four rows in the low half, 4 … 7 in the high half
                a[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                a[i + 1] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
                a[i + 2] = __builtin_shufflevector(b[i + 1], b[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
                a[i + 3] = __builtin_shufflevector(b[i + 1], b[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
            }
            for (int i = 0; i < 4; i++) {
                b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
            for (int i = 0; i < 8; i++) {
                b[i] *= scale;
                std::memcpy(dst + (c + i) * ldd + r, &b[i], sizeof(vec8));
            }
        }
        for (int64_t c = cols8; c < cols; c++) {
            for (int64_t i = r; i < r + 8; i++) dst[c * ldd + i] = src[i * lds + c] * scale;
        }
    }
    for (int64_t i = rows8; i < rows; i++) {
        for (int64_t c = 0; c < cols; c++) dst[c * ldd + i] = src[i * lds + c] * scale;
    }
}

void pack_lanes(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t C, float scale) {
    transpose(dst, ldd, src, lds, rows, C, scale);
    const int64_t padded = ceil_div(rows, LANES) * LANES;
    if (padded > rows) {
        for (int64_t c = 0; c < C; c++) std::fill(dst + c * ldd + rows, dst + c * ldd + padded, 0.0f);
    }
}

void pack_rows(float* dst, const float* src, int64_t lds, int64_t rows, int64_t C, float scale) {
    const int64_t padded = ceil_div(C, LANES) * LANES;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < C; c++) dst[r * padded + c] = src[r * lds + c] * scale;
        std::fill(dst + r * padded + C, dst + (r + 1) * padded, 0.0f);
    }
}
