// Rows of a paged KV cache (kernels/kv_page.h) on the GPU.
#pragma once

#include "kernels/cuda/l2_policy.cuh"
#include "kernels/kv_page.h"

// The pages of a sequence: a row of the page table.
struct SequencePages {
    const int32_t* pages;
    int columns, count;  // of the table; pages of the cache

    // The row of the token at `position`. Values outside the table and the cache are clamped: no access leaves them.
    __device__ __forceinline__ int64_t row(int position) const {
        constexpr int PAGE = int(KV_PAGE);
        const int page = load_kept(pages + min(position / PAGE, columns - 1));
        return int64_t(min(unsigned(page), unsigned(count - 1))) * PAGE + position % PAGE;
    }
};
