// Common code of the attention kernels of all GPUs: their arguments, and which query sees which keys.
#pragma once

#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/kv_page.cuh"

constexpr float INF = std::numeric_limits<float>::infinity();

// The arguments of a kernel; the forward pass leaves the gradients out.
template <typename T>
struct Attention {
    Heads<T> q, k, v, out, dout, dq, dk, dv;
    float *lse, *delta;  // [NH, Nq], rows lse_stride and Nq apart
    int64_t lse_stride;
    uint32_t* next_task;                // Hopper GPUs: the task counter
    float* dq_sums;                     // Hopper GPUs: dq in fp32; null: the deterministic backward pass
    float *dq_row_sums, *dkv_row_sums;  // Hopper GPUs: AttentionGradientSums, or null
    const int32_t *cum_q, *cum_k;
    const int32_t* count;        // of the sequences that are not empty; null: unknown
    int64_t S, Nq, Nk, NH, NKV;  // Nk: upper bound of cum_k
    bool causal;
    int window;  // 0: none
    int tiles;   // of the longest sequence
    int HS;
    float scale;
    bool aligned;  // all rows are aligned to 16 bytes
    // Forward: the page table [rows, page_columns] and each sequence's row [S]; null: the keys are not in pages.
    const int32_t *pages, *page_rows;
    int page_columns, num_pages;
};

// With pages.
template <typename T>
__device__ __forceinline__ SequencePages pages_of(const Attention<T>& a, int64_t s) {
    return {a.pages + int64_t(a.page_rows[s]) * a.page_columns, a.page_columns, a.num_pages};
}

struct Sequence {
    int q0, k0, qlen, klen;
    int first, last;  // query i sees the keys i + first … i + last that exist

    __device__ __forceinline__ bool sees(int i, int j) const {
        return unsigned(j - i - first) <= unsigned(last - first);
    }
    // Whether any of the `queries` queries from i on sees any of the `keys` keys from j on; whether all see all.
    __device__ __forceinline__ bool any_seen(int i, int queries, int j, int keys) const {
        return j <= i + queries - 1 + last && j + keys - 1 >= i + first;
    }
    __device__ __forceinline__ bool all_seen(int i, int queries, int j, int keys) const {
        return j + keys - 1 <= i + last && j >= i + queries - 1 + first;
    }
};

// Clamped, so that a sequence lies within the tensors whatever cum_q and cum_k hold.
template <typename T>
__device__ __forceinline__ Sequence sequence_of(const Attention<T>& a, int64_t s) {
    const auto begin = [](const int32_t* cum, int64_t i, int64_t n) {
        return int(max(int64_t(0), min(int64_t(cum[i]), n)));
    };
    const int q0 = begin(a.cum_q, s, a.Nq), k0 = begin(a.cum_k, s, a.Nk),
              qlen = max(0, begin(a.cum_q, s + 1, a.Nq) - q0), klen = max(0, begin(a.cum_k, s + 1, a.Nk) - k0),
              offset = klen - qlen;
    return {q0,
            k0,
            qlen,
            klen,
            a.window ? offset - a.window + 1 : -qlen,
            a.causal   ? offset
            : a.window ? offset + a.window - 1
                       : klen};
}

// Where a count of sequences is given, tiles of `rows` tokens have an index across all sequences in use. Sequence s
// owns the indices from ⌊cum[s] / rows⌋ + s on: at least as many as it has tiles and at most one more. So they are
// known without a sum over the sequences before it. The tokens after the last sequence follow like one more sequence.
// Example, rows = 128: sequences of 100, 300 and 130 tokens begin at 0, 100 and 400 and own the indices 0, 1 … 4 and
// 5 … 6; with 1 + 3 + 2 tiles, index 4 has no tile.
struct PackedTile {
    int sequence;     // S: the tokens after the last sequence; −1: there is no such tile
    int rank, tiles;  // which of the sequence's indices, and how many it owns
};

// The number of indices; with `sequences` an upper bound, an upper bound.
__host__ __device__ __forceinline__ int64_t packed_tiles(int64_t sequences, int64_t tokens, int rows) {
    return tokens / rows + sequences + 1;
}

template <typename T>
__device__ __forceinline__ int sequences_in_use(const Attention<T>& a) {
    return int(max(int64_t(0), min(int64_t(*a.count), a.S)));
}

// used: sequences_in_use(a); cum, tokens: cum_q and Nq, or cum_k and Nk.
template <typename T>
__device__ __forceinline__ PackedTile packed_tile(const Attention<T>& a, int used, const int32_t* cum, int64_t tokens,
                                                  int rows, int64_t index) {
    const int end = int(packed_tiles(used, tokens, rows));
    if (index >= end) return {-1, 0, 0};
    const auto first = [&](int s) { return int(max(int64_t(0), min(int64_t(cum[s]), tokens))) / rows + s; };
    int low = 0, high = used;  // first(low) ≤ index
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first(middle) <= index)
            low = middle;
        else
            high = middle - 1;
    }
    const int begin = first(low), next = low < used ? first(low + 1) : end;
    return {low < used ? low : int(a.S), int(index) - begin, next - begin};
}

// Rows of a sequence, end excluded.
struct RowRange {
    int begin, end;
};

// Tiles of queries are counted from the end of a sequence. The incomplete tile, whose first queries have negative
// indices, is then at the beginning, where queries see the fewest keys.
__device__ __forceinline__ int first_query(const Sequence& seq, int rank, int rows) {
    return seq.qlen - (rank + 1) * rows;
}

// The keys that any of the queries [begin, end) sees; the queries that see any of the keys [begin, end).
__device__ __forceinline__ RowRange keys_seen(const Sequence& seq, int begin, int end) {
    begin = max(0, begin);
    if (begin >= end) return {0, 0};
    return {max(0, begin + seq.first), min(seq.klen, end + seq.last)};
}
__device__ __forceinline__ RowRange queries_seeing(const Sequence& seq, int begin, int end) {
    if (begin >= end) return {0, 0};
    return {max(0, begin - seq.last), min(seq.qlen, end - seq.first)};
}

// Writes zeros to one head of the tokens [first, n): one part of `parts`, by `threads` threads.
template <typename T>
__device__ void zero_tail(const Heads<T>& heads, int64_t head, int64_t first, int64_t n, int HS, int part, int parts,
                          int threads) {
    for (int64_t token = first + part; token < n; token += parts)
        for (int c = int(threadIdx.x) % threads; c < HS; c += threads) heads.at(token, head)[c] = T{};
}

// --- the kernels for Hopper GPUs (attention_*_hopper.cu): 16-bit types, heads of up to 128 columns. Builds that have
// them define HAVE_SM90A.

// Whether this GPU is a Hopper and TMA can copy the rows.
template <typename T>
bool hopper_attention_takes(const Attention<T>& a);

template <typename T>
void hopper_attention_forward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                              Stream stream);
template <typename T>
void hopper_attention_backward(const char* op, const Attention<T>& a, const AttentionSequences& sequences,
                               Stream stream);

// Bytes of dq_sums; 0 if the single backward pass does not exist or is not faster.
int64_t hopper_attention_sums(int64_t Nq, int64_t NH, int64_t HS, int64_t max_k);

// --- launch

// At least one tile, for the tokens after the last sequence.
inline int tiles_of(int64_t longest, int tile) {
    return int(std::max<int64_t>(1, ceil_div(longest, tile)));
}
