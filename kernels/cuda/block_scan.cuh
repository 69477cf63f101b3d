// Prefix sums over the threads of a warp or of a block, in the order of the thread index. The order of additions is
// fixed: a tree within each warp, then the warps one after the other.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// The sum of x over this lane and those before it.
template <typename Number>
__device__ __forceinline__ Number warp_inclusive_sum(Number x) {
    const int lane = int(threadIdx.x) % WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const Number below = __shfl_up_sync(ALL_LANES, x, offset);
        if (lane >= offset) x += below;
    }
    return x;
}

// The sums that a thread has after a scan over its block.
template <typename Number>
struct BlockScan {
    Number before_warp;  // sum over the warps before this one
    Number in_warp;      // sum over this lane and those before it in the warp
    Number total;        // sum over the block

    // Sums over the threads before this one, with and without this thread's own x.
    __device__ __forceinline__ Number inclusive() const { return before_warp + in_warp; }
    __device__ __forceinline__ Number exclusive(Number x) const { return before_warp + (in_warp - x); }
};

// Every thread of the block calls it. warp_sums is shared memory; afterwards it holds the sum of each warp, and it may
// be written again after the next __syncthreads().
template <int THREADS, typename Number>
__device__ __forceinline__ BlockScan<Number> block_scan(Number x, Number (&warp_sums)[THREADS / WARP]) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    const int warp = int(threadIdx.x) / WARP;
    BlockScan<Number> scan{0, warp_inclusive_sum(x), 0};
    if (threadIdx.x % WARP == WARP - 1) warp_sums[warp] = scan.in_warp;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) {
        if (w == warp) scan.before_warp = scan.total;
        scan.total += warp_sums[w];
    }
    return scan;
}
