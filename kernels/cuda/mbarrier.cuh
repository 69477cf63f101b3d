// Barriers in shared memory [mbarrier], rings of stages that they guard, and named barriers [barrier]. sm_90 and later.
//
// A phase of an mbarrier completes when its expected arrivals have arrived and the expected bytes have been written.
// Waiting takes the phase's parity: 0 for the first phase, 1 for the second, 0 for the third.
#pragma once

#include "kernels/cuda/cp_async.cuh"

using Mbarrier = uint64_t;  // in shared memory

__device__ __forceinline__ void mbarrier_init(Mbarrier* b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to TMA copies and to the cluster; __syncthreads() follows.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}

// Arrives once all earlier cp_async_4 and cp_async_16 of this thread have completed. Counts as one of the mbarrier's
// arrivals.
__device__ __forceinline__ void mbarrier_arrive_cp_async(Mbarrier* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* b, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n"
        "}\n" ::"r"(shared_address(b)),
        "r"(parity)
        : "memory");
}

// A stage of a ring and the parity of its current use. Producer and consumers walk the ring in the same order.
template <int STAGES>
struct RingPosition {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void advance(int stages) {
        stage += stages;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// The mbarriers of a ring: the producer fills a stage and completes `full`, each consumer warp arrives at `empty`.
template <int STAGES>
struct MbarrierRing {
    Mbarrier full[STAGES], empty[STAGES];
    __device__ void init(int consumer_warps, int producer_arrivals = 1) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], producer_arrivals);
            mbarrier_init(&empty[s], consumer_warps);
        }
    }
    __device__ __forceinline__ void wait_full(RingPosition<STAGES> at) { mbarrier_wait(&full[at.stage], at.parity); }
    __device__ __forceinline__ void wait_empty(RingPosition<STAGES> at) {
        mbarrier_wait(&empty[at.stage], at.parity ^ 1);
    }
    // Called by a whole warp, once it and its wgmma instructions have read the stage.
    __device__ __forceinline__ void release(RingPosition<STAGES> at) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(&empty[at.stage]);
    }
    __device__ __forceinline__ void release_and_advance(RingPosition<STAGES>& at) {
        release(at);
        at.advance();
    }
    // A stage that the warp does not read.
    __device__ __forceinline__ void skip(RingPosition<STAGES>& at) {
        wait_full(at);
        release_and_advance(at);
    }
};

// Barriers of some of a block's warps, by number, 1 to 15. `threads` counts all threads that sync or arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
