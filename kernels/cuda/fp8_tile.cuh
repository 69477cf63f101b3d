// Tiles of fp8 codes, which kernels write by rows, by columns (transposed) or both.
//
//   tile                128 rows x 64 columns; a thread has 4 rows x 8 columns: the codes of its 4 rows of a column
//   fill
//                       a word of the transposed tile
//   global memory       64 bytes of a row are written or read at a time, and 128 of a column written
//   shared memory       64 rows of 33 words: 8.25 KiB. The odd pitch makes the transposed reads free of bank conflicts;
//                       writes have two-way ones
#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/cuda_common.cuh"
#include "runtime/device/fp8_codes.h"

namespace fp8_tile {

constexpr int THREADS = 256, TILE_ROWS = 128, TILE_COLUMNS = 64, W = 8, ROWS = 4;
constexpr int GROUPS = TILE_COLUMNS / W, PITCH = TILE_ROWS / ROWS + 1;
static_assert(THREADS == TILE_ROWS / ROWS * GROUPS);

using Tile = uint32_t[TILE_COLUMNS][PITCH];

// Blocks for a matrix [N, C].
inline dim3 grid(int64_t N, int64_t C) {
    return grid_of(ceil_div(N, TILE_ROWS) * ceil_div(C, TILE_COLUMNS));
}

// Where a block's tile begins, and the first row and column of the thread.
struct Place {
    int64_t n0, c0, n, c;
    __device__ explicit Place(int64_t C) {
        const RowItem at = row_item(blockIdx.x, ceil_div(C, TILE_COLUMNS));
        n0 = at.row * TILE_ROWS;
        c0 = at.item * TILE_COLUMNS;
        n = n0 + threadIdx.x / GROUPS * ROWS;
        c = c0 + threadIdx.x % GROUPS * W;
    }
};

// Two codes, the first in the lower byte. The numbers are finite, or NaN.
template <Fp8Format FORMAT>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
    constexpr __nv_fp8_interpretation_t KIND = FORMAT == Fp8Format::E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, KIND);
}

// Row i of the 4 x 4 bytes in x becomes column i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&x)[4]) {
    const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, b, 0x5410);
    x[1] = __byte_perm(a, b, 0x7632);
    x[2] = __byte_perm(c, d, 0x5410);
    x[3] = __byte_perm(c, d, 0x7632);
}

// The thread's codes into the transposed tile: codes[h][i] are columns 4·h to 4·h + 3 of its row i, the first in the
// lowest byte.
__device__ __forceinline__ void stage(Tile& tile, uint32_t (&codes)[2][ROWS]) {
    const int quad = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        transpose_bytes(codes[half]);
#pragma unroll
        for (int k = 0; k < 4; k++) tile[group * W + half * 4 + k][quad] = codes[half][k];
    }
}

// Writes the transposed tile of a matrix [N, C] to columns [C, N], whose rows are `stride` bytes apart: 16 rows of a
// column in one store where all of them exist and are aligned.
__device__ __forceinline__ void store_columns(const Tile& tile, uint8_t* columns, int64_t stride, const Place& at,
                                              int64_t N, int64_t C) {
    const int64_t n0 = at.n0, c0 = at.c0;
    constexpr int CHUNK = 16, CHUNKS = TILE_ROWS / CHUNK;
    const bool aligned = (reinterpret_cast<uintptr_t>(columns) | uintptr_t(stride)) % CHUNK == 0;
    for (int item = threadIdx.x; item < TILE_COLUMNS * CHUNKS; item += THREADS) {
        const int column = item / CHUNKS, word = item % CHUNKS * (CHUNK / 4);
        const int64_t n = n0 + word * 4;
        if (c0 + column >= C || n >= N) continue;
        const uint4 codes = {tile[column][word], tile[column][word + 1], tile[column][word + 2],
                             tile[column][word + 3]};
        uint8_t* to = columns + (c0 + column) * stride + n;
        if (aligned && n + CHUNK <= N) {
            *reinterpret_cast<uint4*>(to) = codes;
        } else {
            for (int i = 0; i < min(int64_t(CHUNK), N - n); i++)
                to[i] = uint8_t(tile[column][word + i / 4] >> i % 4 * 8);
        }
    }
}

}  // namespace fp8_tile
