// Thread block clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors and write into each
// other's shared memory. One function for each PTX instruction.
#pragma once

#include "kernels/warp_tile.cuh"

// This block among those of its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster in two halves: what a thread wrote before it arrived, in whosever shared
// memory, is seen by all that have waited. Nobody may be written to who has not started, and nobody may leave who is
// still to be written to.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where in the shared memory of block `rank` lies what in this one's lies at p.
__device__ __forceinline__ uint32_t cluster_address(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
__device__ __forceinline__ void cluster_store(uint32_t address, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
