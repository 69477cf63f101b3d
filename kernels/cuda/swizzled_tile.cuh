// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them, without bank conflicts.
//
// A tile is [columns / 64][rows][64]: panels of 64 columns. A row of a panel takes 128 bytes, whose eight 16-byte
// vectors are permuted by the row's last three bits (128-byte swizzle). A panel starts at a multiple of 1024 bytes.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = PANEL_COLUMNS * 2;
constexpr int SWIZZLE_ALIGNMENT = 1024;

// The offset in bytes of element (row, column) of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ int swizzled_offset(int row, int column) {
    const int vector = column % PANEL_COLUMNS / 8;
    return column / PANEL_COLUMNS * ROWS * PANEL_ROW_BYTES + row * PANEL_ROW_BYTES +
           ((vector ^ row % 8) * 8 + column % 8) * 2;
}
