// Sums and maxima over a warp and over a block. Every thread gets the same bits: the order is a tree of fixed shape.
#pragma once

#include <cuda_runtime.h>

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// The maximum; NaN if either is NaN (fmaxf would drop it).
__device__ __forceinline__ float nan_max(float a, float b) {
    return a > b || a != a ? a : b;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = nan_max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Every thread of the block must call it. THREADS is the size of the block, a multiple of 32.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_sum(x);
    if constexpr (THREADS == WARP) return x;
    __shared__ float partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) sum += partial[w];
    __syncthreads();  // before the next call writes partial
    return sum;
}

// Two sums for the barriers of one.
template <int THREADS>
__device__ __forceinline__ void block_sum(float& x, float& y) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_sum(x);
    y = warp_sum(y);
    if constexpr (THREADS == WARP) return;
    __shared__ float2 partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = {x, y};
    __syncthreads();
    x = y = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) {
        x += partial[w].x;
        y += partial[w].y;
    }
    __syncthreads();
}

// The sum in fp64, valid in thread 0. Call it once in a kernel.
template <int THREADS>
__device__ inline double block_sum_fp64(double x) {
    __shared__ double shared[THREADS];
    shared[threadIdx.x] = x;
    __syncthreads();
#pragma unroll
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

template <int THREADS>
__device__ __forceinline__ float block_max(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_max(x);
    if constexpr (THREADS == WARP) return x;
    __shared__ float partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    float max = partial[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; w++) max = nan_max(max, partial[w]);
    __syncthreads();
    return max;
}
