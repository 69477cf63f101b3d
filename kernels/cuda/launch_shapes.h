// The parts of the launch geometry of training's CUDA kernels that decide how much scratch memory they need. Host code
// only, so that the CPU build can plan for a GPU (kernels/scratch.h).
#pragma once

#include <algorithm>
#include <cstdint>

namespace gpu_scratch {

constexpr int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// --- norms: the block of the backward pass, dim3(threads, groups). A group of `threads` holds a row, one vector each.
// The values that a thread keeps over all rows (weight and up to three sums for 8 columns) then take 32 registers
// whatever the length of the row. With more columns a thread would keep so much that too few threads could be resident.
struct NormBlock {
    int threads, groups, blocks_per_sm;
};
constexpr int NORM_VECTOR = 8;                      // elements of a vector: 16 bytes of bf16, 32 bytes of fp32
constexpr int NORM_THREADS = 384, NORM_BLOCKS = 2;  // 80 registers a thread
constexpr int NORM_MAX_THREADS = 1024;

inline NormBlock norm_block(int64_t C) {
    constexpr int64_t WARP_SIZE = 32;
    const int64_t vectors = divide_up(divide_up(C, NORM_VECTOR), WARP_SIZE) * WARP_SIZE;
    const int threads = int(std::min<int64_t>(NORM_MAX_THREADS, vectors));
    const int groups = std::max(1, NORM_THREADS / threads);
    return {threads, groups, std::max(1, NORM_THREADS * NORM_BLOCKS / (threads * groups))};
}
// As many blocks as are resident at once, but no more than there are rows for.
inline int64_t norm_blocks(int64_t N, int64_t C, int64_t sms) {
    const NormBlock block = norm_block(C);
    return std::max<int64_t>(1, std::min(block.blocks_per_sm * sms, divide_up(N, block.groups)));
}
// Bytes for `sums` sums over rows.
inline int64_t norm_partials(int64_t N, int64_t C, int64_t sums, int64_t sms) {
    return C == 0 ? 0 : norm_blocks(N, C, sms) * sums * C * int64_t(sizeof(float));
}

// --- QK-norm: blocks for the gradients of q's and of k's weight, each as many as its share of the heads, at least one.
struct QkBlocks {
    int64_t q, k;
};
constexpr int64_t QK_BLOCKS_PER_SM = 2;

inline QkBlocks qk_blocks(int64_t NH, int64_t NKV, int64_t sms) {
    const int64_t all = QK_BLOCKS_PER_SM * sms;
    const int64_t q = std::clamp<int64_t>((all * NH + (NH + NKV) / 2) / std::max<int64_t>(NH + NKV, 1), 1, all - 1);
    return {q, all - q};
}

// --- the embedding's backward pass: entries of a block's segment, and the parts of its scratch. Each part is aligned.
constexpr int64_t EMBEDDING_SEGMENT = 32;

inline int64_t embedding_aligned(int64_t bytes) {
    return divide_up(bytes, 256) * 256;
}
inline int64_t embedding_partials(int64_t entries, int64_t C) {
    return divide_up(entries, EMBEDDING_SEGMENT) * 2 * C * int64_t(sizeof(float));
}
// An upper bound of what cub::DeviceRadixSort asks for with keys and values of 32 bits: a copy of both (8 bytes an
// entry); 1 KiB for each tile of at least 4096 entries; histograms and counters.
inline int64_t embedding_sort(int64_t entries) {
    return 8 * entries + entries / 4 + (int64_t(64) << 10);
}

// --- Muon: elements of a matrix whose squares a block sums.
constexpr int64_t MATRIX_CHUNK = 16384;

inline int64_t matrix_chunks(int64_t size) {
    return divide_up(size, MATRIX_CHUNK);
}

// --- softmax attention
constexpr int64_t ATTENTION_COUNTER = 16;  // bytes of the task counter
constexpr int64_t HOPPER_ATTENTION_MAX_HS = 128;

// The fp32 sums of dq in the backward pass that is not deterministic (attention_single_pass_hopper.cu); 0 if it is not
// faster. Two passes over heads of 64 columns are faster up to 2048 keys: zeroing and rounding the sums takes a fixed
// time, and the time that two matmuls fewer save grows with the keys.
inline int64_t hopper_dq_sums(int64_t Nq, int64_t NH, int64_t HS, int64_t max_k) {
    if (HS > HOPPER_ATTENTION_MAX_HS || (HS <= 64 && max_k <= 2048)) return 0;
    return Nq * NH * (HS <= 64 ? 64 : 128) * int64_t(sizeof(float));
}

// Rows of a tile in the two passes of the deterministic backward pass (attention_backward_hopper.cu): of the query pass
// for heads of HS columns, and of the key pass. Of AttentionGradientSums each tile has HOPPER_SUM_ROWS rows.
constexpr int64_t hopper_query_rows(int64_t HS) {
    return HS <= 64 ? 192 : 128;
}
constexpr int64_t HOPPER_KEY_ROWS = 128, HOPPER_SUM_ROWS = 3, HOPPER_SUM_MAX_HS = 64;

}  // namespace gpu_scratch
