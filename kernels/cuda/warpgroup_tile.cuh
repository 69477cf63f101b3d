// Accumulators of a warpgroup on their way out of registers: into the A operand of the next wgmma, into a tile in
// shared memory, or to global memory. Layout and element-wise operations are those of warp_tile.cuh.
#pragma once

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/cuda/wgmma.cuh"

// Rounds accumulators to T, laid out as the A operand of a wgmma.
template <typename T, int NT>
__device__ __forceinline__ void round_to_A(uint32_t (&a)[NT / 2][4], const float (&c)[NT][4]) {
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        a[k][0] = pack_two<T>(c[2 * k][0], c[2 * k][1]);
        a[k][1] = pack_two<T>(c[2 * k][2], c[2 * k][3]);
        a[k][2] = pack_two<T>(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = pack_two<T>(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

// Four 8×8 matrices of 16-bit elements; `address` is that of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Stores the rounded accumulators of a warp to its 16 rows of a tile of ROWS rows.
template <int ROWS, int K>
__device__ __forceinline__ void store_rounded(unsigned char* tile, int first_row, const uint32_t (&a)[K][4]) {
    const int lane = lane_id(), row = first_row + lane % 16;
#pragma unroll
    for (int k = 0; k < K; k++)
        stmatrix_x4(shared_address(tile + swizzled_offset<ROWS>(row, k * 16 + lane / 16 * 8)), a[k]);
}

// Where a warp stores 16 rows of one head in global memory.
template <typename T>
struct OutputRows {
    const CUtensorMap* map;  // boxes of 16 tokens
    T* data;                 // the first row; the others are `stride` apart
    int64_t stride;
    int head, token;  // of the first row in the map
    int begin, end;   // the rows that exist, of 0 … 16
    int columns;      // a multiple of 8
};

// Stores accumulators, rounded, through the warp's rows of a tile of ROWS rows in shared memory: by TMA if all 16 rows
// exist, else by vectors of 16 bytes.
template <int ROWS, int NT, typename T>
__device__ __forceinline__ void store_rows(const OutputRows<T>& to, unsigned char* tile, int first_row,
                                           const float (&c)[NT][4]) {
    const int lane = lane_id();
    if (lane == 0) tma_store_wait();
    __syncwarp();  // the tile's rows may now be written
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<uint32_t*>(tile +
                                         swizzled_offset<ROWS>(first_row + lane / 4 + half * 8, n * 8 + lane % 4 * 2)) =
                pack_two<T>(c[n][2 * half], c[n][2 * half + 1]);
    if (to.begin <= 0 && to.end >= 16) {
        fence_async_proxy();
        __syncwarp();
        if (lane > 0) return;
#pragma unroll
        for (int panel = 0; panel < NT * 8 / PANEL_COLUMNS; panel++)
            tma_store(to.map, panel * PANEL_COLUMNS, to.head, to.token,
                      tile + swizzled_offset<ROWS>(first_row, panel * PANEL_COLUMNS));
        tma_store_commit();
        return;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * NT; i += WARP) {
        const int row = i / NT, column = i % NT * 8;
        if (row >= to.begin && row < to.end && column < to.columns)
            *reinterpret_cast<uint4*>(to.data + row * to.stride + column) =
                *reinterpret_cast<const uint4*>(tile + swizzled_offset<ROWS>(first_row + row, column));
    }
}
