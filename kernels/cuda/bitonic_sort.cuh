// Bitonic sort in shared memory by all threads of a block (Batcher 1968).
#pragma once

#include <cstdint>

// Sorts n keys in shared memory, the largest first. n is a power of two. Begins and ends with a barrier.
__device__ inline void sort_descending(uint64_t* keys, int n) {
    for (int run = 2; run <= n; run *= 2)
        for (int step = run / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = int(threadIdx.x); i < n / 2; i += int(blockDim.x)) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const bool descending = (low & run) == 0;
                if ((keys[low] < keys[high]) == descending) {
                    const uint64_t key = keys[low];
                    keys[low] = keys[high];
                    keys[high] = key;
                }
            }
        }
    __syncthreads();
}
