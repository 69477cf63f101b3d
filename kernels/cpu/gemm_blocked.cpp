#include "kernels/cpu/gemm_blocked.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "kernels/cpu/cpu_tile.h"
#include "runtime/error.h"

namespace {

// Block sizes, in elements. A B-panel of KC × tile columns stays in L1 while it is multiplied with the A-panels; the
// A-block of MC × KC (120 kB) stays in L2; the B-block of KC × NC (1 MB) is read from L2 or L3 once for each MC rows.
constexpr int64_t KC = 256, MC = 120, NC = 1024;
constexpr int64_t MAX_TILE = 12 * 32;

// Computes one tile of c, times alpha: tile rows × tile columns, K terms. a is [K][tile rows], b is [K][tile columns],
// both packed.
using TileKernel = void (*)(const float* a, const float* b, int64_t K, float alpha, bool accumulate, float* c,
                            int64_t ldc);

// The accumulators fill the register file: 12 × 2 of 32 AVX-512 registers, or 6 × 1 vec16 = 12 of 16 AVX2 registers.
// Each loaded vector of b is used ROWS times, each broadcast element of a VECTORS times, so loads stay off the critical
// path. Sums start at zero and are added to c at the end, which makes K a sum of short sums: smaller rounding errors.
template <int ROWS, int VECTORS>
ALWAYS_INLINE void multiply_tile(const float* a, const float* b, int64_t K, float alpha, bool accumulate, float* c,
                                 int64_t ldc) {
    vec16 sum[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < K; k++) {
        vec16 bk[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) bk[v] = vec_load(b + k * VECTORS * 16 + v * 16);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] += a[k * ROWS + r] * bk[v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            float* out = c + r * ldc + v * 16;
            vec_store(out, accumulate ? vec_load(out) + alpha * sum[r][v] : alpha * sum[r][v]);
        }
    }
}

void multiply_tile_6x16(const float* a, const float* b, int64_t K, float alpha, bool accumulate, float* c,
                        int64_t ldc) {
    multiply_tile<6, 1>(a, b, K, alpha, accumulate, c, ldc);
}

struct Tile {
    TileKernel kernel;
    int64_t rows, columns;
};

// Not MULTIARCH: the two instruction sets use tiles of different shapes, which packing must know.
WITH_AVX512 void multiply_tile_12x32(const float* a, const float* b, int64_t K, float alpha, bool accumulate, float* c,
                                     int64_t ldc) {
    multiply_tile<12, 2>(a, b, K, alpha, accumulate, c, ldc);
}

Tile best_tile() {
    return has_avx512() ? Tile{multiply_tile_12x32, 12, 32} : Tile{multiply_tile_6x16, 6, 16};
}

// Copies `width` lanes × K terms into panels of [K][tile]: lanes are rows of op(a) or columns of op(b). Lanes beyond
// the matrix become zero, so that the tile kernel needs no edge cases; their results are discarded.
void pack(float* packed, const float* source, int64_t lane_stride, int64_t k_stride, int64_t width, int64_t K,
          int64_t tile) {
    for (int64_t lane0 = 0; lane0 < width; lane0 += tile, packed += tile * K) {
        const float* panel = source + lane0 * lane_stride;
        const int64_t lanes = std::min(tile, width - lane0);
        if (lane_stride == 1) {
            for (int64_t k = 0; k < K; k++) {
                std::copy_n(panel + k * k_stride, lanes, packed + k * tile);
                std::fill_n(packed + k * tile + lanes, tile - lanes, 0.0f);
            }
        } else {
            if (k_stride == 1) transpose(packed, tile, panel, lane_stride, lanes, K, 1);
            for (int64_t lane = 0; lane < lanes && k_stride != 1; lane++)
                for (int64_t k = 0; k < K; k++) packed[k * tile + lane] = panel[lane * lane_stride + k * k_stride];
            for (int64_t k = 0; k < K; k++) std::fill_n(packed + k * tile + lanes, tile - lanes, 0.0f);
        }
    }
}

// The output matrix.
struct Result {
    float* data;
    int64_t row_stride, column_stride;
    float* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
};

// A tile that extends beyond c, or whose rows are not contiguous in c, is computed in a buffer, and the part inside c
// is copied. Also what it is added to is copied, so that the same instructions add as in a whole tile.
void multiply_edge_tile(const Tile& tile, const float* a, const float* b, int64_t K, float alpha, bool accumulate,
                        Result c, int64_t rows, int64_t columns) {
    alignas(64) float whole[MAX_TILE] = {};
    for (int64_t r = 0; accumulate && r < rows; r++)
        for (int64_t j = 0; j < columns; j++) whole[r * tile.columns + j] = *c.at(r, j);
    tile.kernel(a, b, K, alpha, accumulate, whole, tile.columns);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) *c.at(r, j) = whole[r * tile.columns + j];
}

struct Range {
    int64_t begin, end;
};

// One thread's rectangle of c.
void multiply_rectangle(const Tile& tile, Range rows, Range columns, int64_t K, StridedMatrix a, StridedMatrix b,
                        float alpha, bool accumulate, Result c, float* packed_a, float* packed_b) {
    for (int64_t j0 = columns.begin; j0 < columns.end; j0 += NC) {
        const int64_t nc = std::min(NC, columns.end - j0);
        for (int64_t k0 = 0; k0 < K; k0 += KC) {
            const int64_t kc = std::min(KC, K - k0);
            const bool add = accumulate || k0 > 0;
            pack(packed_b, b.at(k0, j0), b.column_stride, b.row_stride, nc, kc, tile.columns);
            for (int64_t i0 = rows.begin; i0 < rows.end; i0 += MC) {
                const int64_t mc = std::min(MC, rows.end - i0);
                pack(packed_a, a.at(i0, k0), a.row_stride, a.column_stride, mc, kc, tile.rows);
                for (int64_t j = 0; j < nc; j += tile.columns)
                    for (int64_t i = 0; i < mc; i += tile.rows) {
                        const float *pa = packed_a + i * kc, *pb = packed_b + j * kc;
                        float* out = c.at(i0 + i, j0 + j);
                        if (c.column_stride == 1 && mc - i >= tile.rows && nc - j >= tile.columns)
                            tile.kernel(pa, pb, kc, alpha, add, out, c.row_stride);
                        else
                            multiply_edge_tile(tile, pa, pb, kc, alpha, add, {out, c.row_stride, c.column_stride},
                                               std::min(tile.rows, mc - i), std::min(tile.columns, nc - j));
                    }
            }
        }
    }
}

// Part p of `parts` nearly equal parts of `size`, cut at multiples of `tile`.
Range part(int64_t size, int64_t tile, int64_t parts, int64_t p) {
    const int64_t tiles = ceil_div(size, tile);
    return {std::min(size, tiles * p / parts * tile), std::min(size, tiles * (p + 1) / parts * tile)};
}

}  // namespace

void gemm_blocked(int64_t M, int64_t N, int64_t K, StridedMatrix a, StridedMatrix b, bool accumulate, float* c,
                  int64_t c_row_stride, int64_t c_column_stride, float alpha) {
    if (M == 0 || N == 0) return;
    const Result out{c, c_row_stride, c_column_stride};
    if (K == 0) {
        for (int64_t i = 0; i < M && !accumulate; i++)
            for (int64_t j = 0; j < N; j++) *out.at(i, j) = 0;
        return;
    }
    const Tile tile = best_tile();

    // Threads take a grid of rectangles and do not share a packed block: each packs what it needs (some of it twice),
    // and none waits for another. The chosen grid has the least cost of its largest rectangle: for each k,
    // rows·columns/16 vector operations and rows + columns copies.
    const int64_t tiles_m = ceil_div(M, tile.rows), tiles_n = ceil_div(N, tile.columns);
    const bool small = double(M) * double(N) * double(K) < 1e5;  // a parallel region would cost more than it saves
    const int64_t threads = small ? 1 : std::min<int64_t>(omp_get_max_threads(), tiles_m * tiles_n);
    int64_t grid_m = 1, grid_n = threads;
    double best = INFINITY;
    for (int64_t m = 1; m <= threads; m++) {
        const int64_t n = threads / m;
        const double rows = double(ceil_div(tiles_m, m) * tile.rows),
                     columns = double(ceil_div(tiles_n, n) * tile.columns);
        const double cost = rows * columns / 16 + rows + columns;
        if (cost < best) {
            best = cost;
            grid_m = m;
            grid_n = n;
        }
    }

    // The only allocation inside a CPU kernel: like a GEMM library, it owns its packing buffers, and the driver's
    // arenas do not.
    const int64_t kc = std::min(KC, K);
    const int64_t a_size = ceil_div(std::min(MC, M), tile.rows) * tile.rows * kc;
    const int64_t b_size = ceil_div(std::min(NC, N), tile.columns) * tile.columns * kc;
    const int64_t per_thread = ceil_div(a_size, 16) * 16 + ceil_div(b_size, 16) * 16;
    const size_t bytes = size_t(per_thread * grid_m * grid_n) * sizeof(float);
    const std::unique_ptr<float, decltype(&std::free)> buffer(static_cast<float*>(std::aligned_alloc(64, bytes)),
                                                              &std::free);
    require(buffer != nullptr, "matmul: no memory for ", bytes, " bytes of packing buffers");

#pragma omp parallel for schedule(static) num_threads(int(grid_m * grid_n)) if (grid_m * grid_n > 1)
    for (int64_t p = 0; p < grid_m * grid_n; p++) {
        float* packed_a = buffer.get() + p * per_thread;
        float* packed_b = packed_a + ceil_div(a_size, 16) * 16;
        multiply_rectangle(tile, part(M, tile.rows, grid_m, p / grid_n), part(N, tile.columns, grid_n, p % grid_n), K,
                           a, b, alpha, accumulate, out, packed_a, packed_b);
    }
}

void gemm_blocked(bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda,
                  const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc, float alpha) {
    gemm_blocked(M, N, K, {a, transpose_a ? 1 : lda, transpose_a ? lda : 1},
                 {b, transpose_b ? 1 : ldb, transpose_b ? ldb : 1}, accumulate, c, ldc, 1, alpha);
}
