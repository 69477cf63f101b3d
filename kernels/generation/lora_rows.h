// LoRA adapters of a linear layer at run time (Hu et al. 2021, "LoRA"; a batch of several adapters: Chen et al. 2023,
// "Punica", section 4): each row of a batch uses one of several adapters, or none.
//
//   h[n, p·R + r] = Σ_c A[a(n), p·R + r, c]·x[n, c]                 a(n): the adapter of row n
//   y[n, o] += Σ_r B[a(n), o, r]·h[n, p(o)·R + r]                   p(o): the part of the layer that output o is in
//
// Parts are the matrices of the model's files that a layer fuses, such as q, k and v: each has an adapter of its own.
// All adapters have the rank R here: a smaller one is filled up with zeros, and so is a part without an adapter. B
// includes the adapter's scale.
//
// Rows are taken in tiles of up to LORA_TILE that use the same adapter, so that its matrices are read once a tile. Sums
// are fp32, their order depends on C alone: a row's result does not depend on the batch, bit for bit.
//
// T is the dtype of x, y, A and B: fp32; on CUDA also bf16 and fp16. Throws Error on a wrong shape or dtype.
#pragma once

#include <array>
#include <vector>

#include "kernels/generation/linear.h"

constexpr int64_t LORA_TILE = 8;                                // rows
constexpr int64_t LORA_RANK_MULTIPLE = 8, LORA_MAX_RANK = 512;  // of R
constexpr int64_t LORA_MAX_PARTS = 3;

// The adapters of one linear layer.
struct AdapterWeights {
    Tensor a, b;  // [adapters, parts·R, C], [OC, adapters, R] T; null: the layer has none
    std::array<int64_t, LORA_MAX_PARTS> part_ends{};  // of the parts: the output after the last one; in order, to OC
};
struct BlockAdapters {
    AdapterWeights qkv, proj, fc, fcproj;
};

// The rows of a batch by adapter.
struct AdapterTiles {
    Tensor rows;      // [tiles·LORA_TILE] int32: row of the batch, −1: none
    Tensor adapters;  // [tiles] int32: of a tile's rows; −1: none
    Tensor of_row{};  // [N] int32: the adapter of each row, −1: none. Of linear_with_adapters() only
    // There is one adapter, and no row that matters is without it: then both products may be matmuls over all rows.
    bool everywhere = false;
};
// At most so many tiles hold N rows that use any of `adapters`.
constexpr int64_t max_adapter_tiles(int64_t N, int64_t adapters) {
    const int64_t full_and_rest = N / LORA_TILE + adapters;
    return N < full_and_rest ? N : full_and_rest;
}
// Fills both of AdapterTiles for rows of these adapters (−1: none), for max_adapter_tiles().
struct HostAdapterTiles {
    std::vector<int32_t> rows, adapters;
};
HostAdapterTiles tiles_of_adapters(const std::vector<int32_t>& adapter_of_row, int64_t adapters);

// The first product. Its sums over C may be split: low_rank [adapter_splits(C), N, parts·R] fp32 has a term in each.
int64_t adapter_splits(int64_t C);
void adapters_shrink(Tensor low_rank, Tensor x, const AdapterWeights& w, const AdapterTiles& tiles, Stream stream);

// The second one: y [N, OC] is changed in the rows that have an adapter.
void adapters_expand(Tensor y, Tensor low_rank, const AdapterWeights& w, const AdapterTiles& tiles, Stream stream);

// The second one for all rows, with the only adapter of w: of many rows (AdapterTiles::everywhere), whose first product
// is a matmul with all of A. h [N, parts·R] T; y is rounded once.
void adapter_expand_all(Tensor y, Tensor h, const AdapterWeights& w, Stream stream);

// linear() without a norm and both products, in two launches: out is rounded once, h[n] to T. On Hopper GPUs, for 9 to
// 64 rows of 16-bit elements, weights in T, a multiple of 8 channels and adapters·parts·R ≤ C/2; halves of 64 outputs
// (32 of small matrices) must be of one part. Otherwise, and on other GPUs and the CPU, it does nothing and returns
// false: linear() and the two products compute the same.
//
// A row's bits do not depend on the other rows, but on the number of adapters that there are and, where an adapter's
// columns are not in one block's slice of the sum, on its number: not for batch invariance. All of B must be finite,
// for a row's sum takes 0 times the columns of other adapters.
bool linear_with_adapters(const LinearOutput& output, Tensor inp, const LinearWeights& weights,
                          const AdapterWeights& adapters, const AdapterTiles& tiles, Tensor scratch, Stream stream);
