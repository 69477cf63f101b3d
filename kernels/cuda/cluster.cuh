// Thread block clusters (sm_90): blocks that run at the same time on neighbouring SMs and write into each
// other's shared memory. One function for each PTX instruction.
#pragma once

#include "kernels/cuda/warp_tile.cuh"

// This block among those of its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster in two halves. It orders no memory but the initialisation of barriers behind
// which barrier_init_fence() stands (wgmma.cuh): who has waited knows that all have started and may send to them.
// Nobody may leave who is still to be sent to.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
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
// Numbers to `address`, whose bytes the barrier (wgmma.cuh) at `barrier`, of the same block, counts: who waits for
// that barrier sees them, and nobody waits for more. Only in launches with clusters of two blocks or more [st.async].
__device__ __forceinline__ void cluster_send(uint32_t address, const float2& x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
        "f"(x.x), "f"(x.y), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void cluster_send(uint32_t address, const float4& x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}
