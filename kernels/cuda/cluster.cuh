// Thread block clusters (sm_90): blocks that run at the same time on neighbouring SMs and write into each other's
// shared memory. One function for each PTX instruction.
#pragma once

#include "kernels/cuda/cp_async.cuh"

// The rank of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster, in two halves. After it, all blocks have started and their mbarriers are
// initialised (given mbarrier_init_fence() before it); no other memory is ordered. A block may not exit while others
// still write to its shared memory.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of all threads of the cluster that orders their accesses to shared memory.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The shared memory address in block `rank` that corresponds to p in this block.
__device__ __forceinline__ uint32_t map_shared_rank(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
// Arrives at the mbarrier at `address` of a block of the cluster. Orders no memory accesses of this thread for the
// other block: that would be a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// Stores x at `address` in the shared memory of a block of the cluster. The mbarrier of the same block at `mbarrier`
// counts the bytes; waiting for it makes them visible. Only for clusters of two blocks or more.
__device__ __forceinline__ void st_async(uint32_t address, const float2& x, uint32_t mbarrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
        "f"(x.x), "f"(x.y), "r"(mbarrier)
        : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, const float4& x, uint32_t mbarrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mbarrier)
        : "memory");
}
