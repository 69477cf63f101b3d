// The k largest elements of each row, the largest first; equal ones by ascending id, so that the result is unique.
//
//   values[b, i] = inp[b, ids[b, i]],  values descending, ids ascending among equals
//
// 0 and −0 are equal; −∞ is a value like others; NaN counts as larger than +∞. On a GPU blocks first select the k
// largest of each chunk of a row; then one block a row selects the k largest of those.
// Errors: wrong shape or dtype, k outside 1 … min(V, TOP_K_MAX), V ≥ 2³¹.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

constexpr int64_t TOP_K_MAX = 1024;

// values [B, k] T; ids [B, k] int32; inp [B, V] T, with any row stride; T: fp32, on CUDA also bf16 and fp16.
// scratch: top_k_scratch bytes (U8).
void top_k(Tensor values, Tensor ids, Tensor inp, Tensor scratch, Stream stream);
int64_t top_k_scratch(int64_t B, int64_t V, int64_t k);
