// Where the keys of a KV split are in a sequence's cache slot: in consecutive rows or, with a window, in a ring.
#pragma once

// The row of key j of a split. RING: a row of the slot, which is a ring of `rows` rows, at least as many as the split
// has keys; `first` is the row of the split's first key. Without RING: counted from the split's first key; `first` and
// `rows` are not used.
template <bool RING>
__device__ __forceinline__ int cache_row(int j, int first, int rows) {
    if constexpr (!RING) return j;
    return first + j < rows ? first + j : first + j - rows;
}
