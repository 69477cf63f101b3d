// Asynchronous copies from global to shared memory [cp.async] (sm_80 and later). A thread waits for its own copies;
// a barrier then makes them visible to the other threads of the block.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes, or writes zeros if `inside` is false; src is then not read.
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_4(void* dst, const void* src, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
// The copies since the last commit form a group.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the last PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
