// Radix select: finds the largest unsigned key for which the amounts of all keys not below it reach a goal, without
// sorting. With an amount of 1 for each key and a goal of k, that is the k-th largest key.
//
// It decides 8 bits at a time from the top: a histogram of the keys that share the bits known so far, a scan over its
// 256 bins from the largest digit down, and the bin in which the sum reaches the goal gives the next 8 bits. Amounts
// are integers, so that atomics give the same sums in any order.
#pragma once

#include "kernels/cuda/block_scan.cuh"

constexpr int RADIX_BITS = 8, RADIX_BINS = 1 << RADIX_BITS;

template <typename Key, typename Amount>
struct RadixSelection {
    Key threshold;  // the key found; its undecided low bits are 0 if `complete` ended the search early
    Amount above;   // of the keys larger than it
};

// for_each_key(add): calls add(key, amount) for each of this thread's keys.
// reached(sum):      whether the amounts of all keys not below a key reach the goal; true for the sum of all keys.
// complete(sum):     whether a sum that has reached the goal meets it exactly: then all keys that share the bits known
//                    so far belong to the selection, and the search may end.
// Every thread of the block calls it and gets the result. It contains all barriers that its shared memory needs.
template <int THREADS, typename Key, typename Amount, typename ForEachKey, typename Reached, typename Complete>
__device__ RadixSelection<Key, Amount> radix_select(ForEachKey for_each_key, Reached reached, Complete complete) {
    static_assert(THREADS >= RADIX_BINS, "each of the first threads scans one bin");
    __shared__ Amount bins[RADIX_BINS], warp_sums[THREADS / WARP];
    __shared__ RadixSelection<Key, Amount> shared_selection;
    __shared__ bool shared_complete;
    const int digit = RADIX_BINS - 1 - int(threadIdx.x);
    RadixSelection<Key, Amount> selection{0, 0};
    for (int shift = int(sizeof(Key)) * 8 - RADIX_BITS; shift >= 0; shift -= RADIX_BITS) {
        if (digit >= 0) bins[digit] = 0;
        __syncthreads();
        const Key high_bits = ~((Key(RADIX_BINS) << shift) - 1);  // all that are known; the top digit's shift gives 0
        for_each_key([&](Key key, Amount amount) {
            if ((key & high_bits) == selection.threshold) atomicAdd(&bins[key >> shift & (RADIX_BINS - 1)], amount);
        });
        __syncthreads();
        const Amount mine = digit >= 0 ? bins[digit] : Amount(0);
        const BlockScan<Amount> scan = block_scan<THREADS>(mine, warp_sums);
        const Amount with_larger = selection.above + scan.inclusive(), larger = with_larger - mine;
        if (digit >= 0 && reached(with_larger) && !reached(larger)) {
            shared_selection = {selection.threshold | Key(digit) << shift, larger};
            shared_complete = complete(with_larger);
        }
        __syncthreads();
        selection = shared_selection;
        if (shared_complete) break;
    }
    return selection;
}

// A threshold that exactly the k largest of all keys reach, which must differ from each other; at least k of them.
// for_each_key(add) calls add(key) for each of this thread's keys.
template <int THREADS, typename Key, typename ForEachKey>
__device__ Key threshold_of_k_largest(int k, ForEachKey for_each_key) {
    const auto count = [&](auto add) { for_each_key([&](Key key) { add(key, 1); }); };
    const auto reached = [&](int sum) { return sum >= k; };
    const auto complete = [&](int sum) { return sum == k; };
    return radix_select<THREADS, Key, int>(count, reached, complete).threshold;
}
