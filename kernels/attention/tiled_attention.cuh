// FlashAttention on tensor cores of sm_80 and later (mma.sync); fp32 by the same kernels with fused multiply-adds.
//
//   forward    a block owns BM queries of one head and walks over the keys that they see with an online softmax:
//              S = Q·Kᵀ, O += P·V.
//   backward   two kernels, so that nothing is added across blocks and no atomics are needed: seven matmuls, where one
//              pass with atomics takes five.
//     queries  a block owns queries: delta = Σ dout·out (kept for the second kernel), S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
//     keys     a block owns keys of one KV head and walks over the queries of all heads that share it:
//              Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q. With Sᵀ instead of S, the accumulators of Pᵀ and dSᵀ
//              are already laid out as operand A of the next matmul: they never leave the registers.
//
// Warps own whole rows of a tile, so that row sums need four lanes and no shared memory. P and dS are rounded to T.
// The block index gives tile, head and sequence. Sequences come from cum_q and cum_k on the device; blocks whose tile
// begins after the end of their sequence return. The sequence after the last stands for the tokens that belong to none.
// With a count of sequences on the device, blocks without a tile return, too (packed_tile() in attention.cuh).
#pragma once

#include "kernels/attention/attention.cuh"

constexpr int64_t TILED_ATTENTION_MAX_HS = 256;

template <typename T>
void tiled_attention_forward(const char* op, Attention<T> a, const AttentionSequences& sequences, Stream stream);
template <typename T>
void tiled_attention_backward(const char* op, Attention<T> a, const AttentionSequences& sequences, Stream stream);

struct BlockTask {
    int tile, tiles;         // of the sequence
    int part;                // of the tile
    int64_t head, sequence;  // sequence −1: there is nothing to do
};

// The block's task among tiles of `rows` tokens, each of which PARTS blocks share. cum, tokens: cum_q and Nq, or cum_k
// and Nk.
template <int ROWS, int PARTS, typename T>
__device__ __forceinline__ BlockTask task_of(const Attention<T>& a, const int32_t* cum, int64_t tokens, int64_t heads) {
    if (a.count) {
        const unsigned rest = blockIdx.x / unsigned(heads);
        const PackedTile t = packed_tile(a, sequences_in_use(a), cum, tokens, ROWS, rest / PARTS);
        return {t.rank, t.tiles, int(rest % PARTS), int64_t(blockIdx.x % unsigned(heads)), t.sequence};
    }
    const unsigned blocks = unsigned(a.tiles) * PARTS, block = blockIdx.x % blocks, rest = blockIdx.x / blocks;
    return {int(block / PARTS), a.tiles, int(block % PARTS), int64_t(rest % unsigned(heads)),
            int64_t(rest / unsigned(heads))};
}

// --- launch

// f(std::integral_constant<int, D>) with the smallest compiled D that holds a head; columns from HS on are zeros.
template <typename T, typename F>
void dispatch_head_size(int64_t HS, F f) {
    if constexpr (!std::is_same_v<T, float>) {
        if (HS <= 32) return f(std::integral_constant<int, 32>{});
        if (HS > 64 && HS <= 96) return f(std::integral_constant<int, 96>{});
    }
    if (HS <= 64) return f(std::integral_constant<int, 64>{});
    if (HS <= 128) return f(std::integral_constant<int, 128>{});
    f(std::integral_constant<int, 256>{});
}

// Tiles of `rows` of the tokens, each of which `parts` blocks share.
template <typename T>
void launch_tiles(const char* op, void (*kernel)(Attention<T>), const Attention<T>& a, int64_t tokens, int rows,
                  int parts, int64_t heads, int warps, int bytes, Stream stream) {
    const int64_t tiles = a.count ? packed_tiles(a.S, tokens, rows) : a.tiles * (a.S + 1);
    const int64_t blocks = tiles * parts * heads;
    require(blocks < int64_t(1) << 31, op, ": ", a.S, " sequences of up to ", a.tiles, " tiles and ", heads,
            " heads are more than one launch can hold");
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    kernel<<<unsigned(blocks), unsigned(warps * WARP), size_t(bytes), cuda_stream(stream)>>>(a);
    check_launch(op, stream);
}
