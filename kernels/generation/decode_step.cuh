// Common code of the parts of the fused decode step: the matrices of a layer, the division of their rows among blocks
// and stages of the weight ring, and the kernel's arguments. A block owns output pairs, each two consecutive outputs of
// a matmul. For decode_step.cu.
#pragma once

#include <optional>

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/row_statistics.cuh"
#include "kernels/generation/decode_step.h"
#include "kernels/generation/kv_rotate.cuh"
#include "kernels/kv_page.cuh"
#include "runtime/model/activation_config.h"
#include "runtime/model/packed_weight.h"

namespace fused_decode {

constexpr int WARPS = 8, THREADS = WARPS * WARP;  // that compute
// And a warp that loads weights; with weights in T one that ends matmuls. (Packed weights take the computing warps more
// instructions, and a warp beside them slows them down: LLaMA 1B in int8 by 3%.)
constexpr int block_threads(int bits) {
    return THREADS + (bits == 0 ? 2 : 1) * WARP;
}
constexpr int64_t MAX_HS = 128;  // attention: a warp for a row of q, k or v, 16 bytes a lane
constexpr int MIN_STAGES = 3, MAX_STAGES = 24;
constexpr int64_t MIN_STAGE_BYTES = 12 << 10;
constexpr int MAX_STAGE_ROWS = 8;  // so that at least four lanes of a warp share a row

// Bits of a weight's code. A kernel has one; 0: weights in T. Of 8 bits are fp8 and int8.
constexpr int code_bits(std::optional<Packing> packing) {
    return !packing ? 0 : *packing == Packing::Int4 ? 4 : 8;
}
// The most stages whose rows a warp multiplies side by side, in a kernel for NB sequences.
constexpr int most_at_once(int NB, int bits) {
    return bits == 0 ? 3 : bits == 4 && NB <= 2 ? 8 : 4;
}
constexpr int QUERY_TILE = 2;            // query heads of an attention task with NKV < NH
constexpr int64_t SPLIT_KEYS = KV_PAGE;  // keys of a KV split: those of a page

// The matrices, in model order. Each layer has the first four.
enum Matrix { QKV, PROJ, FC, FCPROJ, LAYER_MATRICES, HEAD = LAYER_MATRICES, MATRICES };

// A layer's pointers, in global and later in shared memory.
struct Layer {
    const void *weight[LAYER_MATRICES], *bias[LAYER_MATRICES];
    const float *norm_weight[2], *norm_bias[2];
    void *k, *v;           // [num_pages, KV_PAGE, NKV, HS]
    const int32_t* pages;  // [slots, page_columns]
    int64_t num_pages;
};

// The arguments of a layer that only the extended kernel reads (is_extended in decode_step_plan.cuh). They follow the
// array of layers.
struct LayerOptions {
    const float *qnorm, *knorm;  // weights of QK-norm; null: none
    int64_t window;              // 0: none
    int64_t rope;                // whether q and k are rotated
};
template <bool EXTENDED>
constexpr int LAYER_BYTES = int(sizeof(Layer)) + (EXTENDED ? int(sizeof(LayerOptions)) : 0);

// A warp's part of a row of K elements, in vectors of 16 bytes. Of packed weights it has whole groups.
struct Slice {
    int first, count;
};
template <typename T, bool PACKED>
__device__ __forceinline__ Slice slice_of(int K, int warp) {
    constexpr int VECTORS = PACKED ? int(PACKED_GROUP) / FULL_WIDTH<T> : 1;
    const int units = K / (VECTORS * FULL_WIDTH<T>), first = units * warp / WARPS;
    return {VECTORS * first, VECTORS * (units * (warp + 1) / WARPS - first)};
}

// How a matrix [2·pairs, K] (FC with SwiGLU: [4·pairs, K]) is divided. Output pair i needs the rows 2i and 2i + 1 of
// the weight; with SwiGLU these rows of gate and of up.
struct MatrixPlan {
    int K, pairs;          // columns of the weight; output pairs
    int log_per_stage;     // log2 of the pairs of a full stage
    int stage_rows;        // a power of two up to MAX_STAGE_ROWS
    int chunk;             // stages between two barriers
    int row_bytes, pitch;  // of a row of the weight; from one row in a stage to the next
    Packing packing;       // of packed weights
    int log_parts;         // log2 of the parts of a row (decode_step_packed_matmul.cuh)
};

template <typename T>
struct Arguments {
    T* logits;
    const int32_t *ids, *slots, *positions;
    Angles angles;
    const void *wte, *head;  // [Vp, C] T, or packed
    const T* wpe;
    const float *normf_weight, *normf_bias;
    const Layer* layers;
    uint32_t* epoch;                         // of the last exchange of the previous step
    uint64_t* matmul_words[LAYER_MATRICES];  // words of the exchange after each matmul
    uint64_t* att_words;                     // and after attention
    uint64_t* split_words;                   // [N, NH, kv_splits, HS + 2] fp32: maximum, sum, Σ p·v of KV splits
    int64_t vocab, wpe_rows, logits_stride, num_slots, capacity;
    MatrixPlan plans[MATRICES];
    int num_layers, N, C, NH, NKV, HS;
    int page_columns;
    int query_tiles;                // of the query heads of a KV head
    int kv_splits;                  // of the longest sequence
    int log_lanes;                  // log2 of the lanes that share a key
    float eps, scale, per_channel;  // per_channel: 1 / C
    bool centred;
    Activation activation;
    int stages, stage_bytes;
    int stages_at_once;  // of a matmul: fewer than `stages`, because one of those may hold a norm's weights
    int ring_offset, rows_offset, residual_offset, attention_offset, layers_offset;  // in shared memory, in bytes
    // Of the extended kernel.
    bool qk_norm;
    const T* head_bias;                                        // [Vp] or null
    const float *embedding_norm_weight, *embedding_norm_bias;  // [C] or null
};

// Rows between two barriers, of a kernel for NB sequences. One barrier for each stage that is multiplied costs 8 warps
// that finish at different times about a tenth of a step of one sequence (docs/log/generation.md). With more rows than
// these, the three stages of LLaMA 8B in bf16 would not fit.
constexpr int chunk_rows(int NB, int bits) {
    return bits > 0 ? 4 * MAX_STAGE_ROWS * (NB < 4 ? 4 / NB : 1) : 3 * MAX_STAGE_ROWS * (NB == 1 ? 2 : 1);
}

// Each warp's sums for the rows of a chunk; two chunks alternate.
template <int NB, int BITS>
using Partial = float[2][WARPS][NB][chunk_rows(NB, BITS)];

// The output pairs [first, end) of a matrix, which belong to a block.
struct PairRange {
    int first, end;
};

// An attention task: a query tile of one KV head over one KV split of one sequence, which lies in one page. The split
// is the fastest index.
struct Task {
    int n, kv, head0, heads, split;
    int splits, keys;  // splits of the sequence, 0: finished; keys of this split, 0: beyond the context
    int64_t last;      // row of the split's last key in the cache
    __device__ __forceinline__ bool has_new_key() const { return split == splits - 1; }
};

// Static shared memory of a block, for up to NB sequences.
template <int NB, bool EXTENDED, typename T>
struct Shared {
    Mbarrier full[MAX_STAGES], empty[MAX_STAGES];  // of the ring
    Mbarrier sums_full[2], sums_free[2];           // of Partial
    int64_t positions[NB], slots[NB];
    RowPart norm_parts[NB][WARPS];
    float norm_counts[WARPS], norm_shares[WARPS];  // of each warp's part of C: its elements, and one over them
    float rotations[NB][MAX_HS];                   // RoPE: (cos, sin) of each sequence
    bool has_rotation[NB];
    T biases[2][THREADS];  // of two matmuls, which alternate
    PairRange pairs[MATRICES];
    // Of the block; all zeros if there are fewer tasks than blocks. Extended: of two layers, which alternate.
    Task first_task[EXTENDED ? 2 : 1];
    uint32_t epoch;
    alignas(16) T zeros[PACKED_GROUP];  // activations of packed weights that do not exist
};

// Upper bound of `Shared`, `Partial` and the softmax statistics.
constexpr int64_t reserved_bytes(int NB, int bits) {
    constexpr int64_t OF_SEQUENCE = MAX_HS * int64_t(sizeof(float)) + 128;
    return (4 << 10) + NB * (2 * WARPS * chunk_rows(NB, bits) * int64_t(sizeof(float)) + OF_SEQUENCE);
}

// Shared memory of attention, in bytes: queries [heads, HS] and each warp's Σ p·v [WARPS, heads, HS] fp32, then as T
// the rows of q, k and v as they arrive [heads + 2, HS], and the rotated new key [HS].
__host__ __device__ constexpr int64_t attention_bytes(int64_t heads, int64_t HS, int64_t item) {
    return (1 + WARPS) * heads * HS * int64_t(sizeof(float)) + (heads + 3) * HS * item;
}

// Synchronizes the warps that compute.
__device__ __forceinline__ void sync_computing_warps() {
    named_barrier_sync(1, THREADS);
}

}  // namespace fused_decode
