// Where the keys of a KV split are in a sequence's cache slot: in consecutive rows or, with a window, in a ring.
#pragma once

// The row of key j of a split whose first key has row `first`. RING: of `rows` rows, at least the split's keys;
// without, rows are counted from the split's first key, and both are unused.
template <bool RING>
__device__ __forceinline__ int cache_row(int j, int first, int rows) {
    if constexpr (!RING) return j;
    return first + j < rows ? first + j : first + j - rows;
}
