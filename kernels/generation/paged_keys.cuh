// The keys or values of a KV split in a paged cache, for the kernels of decode_attention.cu.
#pragma once

#include "kernels/kv_page.cuh"

template <typename T>
struct PagedKeys {
    const T* cache;  // of the KV head in the cache's first row
    int64_t row;     // elements from one row to the next
    SequencePages pages;
    int first;  // position of the split's first key

    __device__ __forceinline__ const T* at(int key) const { return cache + pages.row(first + key) * row; }
};
