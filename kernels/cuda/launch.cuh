// Launch geometry: properties of the GPU, grid sizes, and the row of a flat index.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "runtime/device/cuda_check.h"

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cuda_check(cudaGetDevice(&device), "device_attribute");
    cuda_check(cudaDeviceGetAttribute(&value, attribute, device), "device_attribute");
    return value;
}

// SMs of the current device, queried once.
inline int64_t num_sms() {
    static const int count = device_attribute(cudaDevAttrMultiProcessorCount);
    return count;
}

// The most shared memory that a block may request, in bytes.
inline int64_t max_shared_bytes() {
    static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return bytes;
}

// Shared memory of an SM in bytes. A resident block takes what it requests and 1 KiB for the system.
inline int64_t shared_bytes_per_sm() {
    static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    return bytes;
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// A one-dimensional grid has at most 2³¹ − 1 blocks. Kernels whose threads take one element or more need fewer for any
// tensor that fits in memory: with 256 threads a block they reach 5·10¹¹ elements. More rows than that, in a kernel
// with a block for each row, are an Error.
inline dim3 grid_of(int64_t blocks) {
    require(blocks <= 0x7fffffff, "a launch of ", blocks,
            " blocks, more than the 2147483647 of a grid; use fewer rows");
    return dim3(static_cast<unsigned>(blocks));
}

// The row of item i and its index in that row, where each row has per_row items. Divides in 32 bits where possible,
// because 64-bit divisions take several times as long.
struct RowItem {
    int64_t row, item;
};
__device__ __forceinline__ RowItem row_item(int64_t i, int64_t per_row) {
    if ((uint64_t(i) | uint64_t(per_row)) >> 32 == 0) {
        const uint32_t row = uint32_t(i) / uint32_t(per_row);
        return {row, uint32_t(i) - row * uint32_t(per_row)};
    }
    return {i / per_row, i % per_row};
}
