// What stays in L2 while a kernel streams more than fits. A decode step reads the whole KV cache once in each layer:
// without these hints the few words that every block of the next layer needs first come from DRAM.
#pragma once

#include "kernels/cuda/cp_async.cuh"

// Loads a word that is wanted again: its line is evicted last.
__device__ __forceinline__ int32_t load_kept(const int32_t* p) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    int32_t v;
    asm volatile("ld.global.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(__cvta_generic_to_global(p)), "l"(policy));
    return v;
}

// As cp_async_16, for bytes that are not wanted again: their line is evicted first.
__device__ __forceinline__ void cp_async_16_once(void* dst, const void* src, bool inside) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(dst)),
                 "l"(src), "r"(inside ? 16 : 0), "l"(policy)
                 : "memory");
}
