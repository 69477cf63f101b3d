// The k largest of each row, the largest first; equal ones by ascending id, so that the result is one of a kind.
//
//   values[b, i] = inp[b, ids[b, i]],  values descending, ids ascending among equals
//
// Two rounds on a GPU: blocks take stretches of a row and keep k of each, then one block a row takes k of those. 0 and
// −0 are equal, −∞ is a value like others; a NaN counts as larger than +∞ (its place among NaN depends on its bits).
// Errors: wrong shape or dtype, k outside 1 … min(V, TOP_K_MAX), V ≥ 2³¹.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

constexpr int64_t TOP_K_MAX = 1024;

// values [B, k] T; ids [B, k] int32; inp [B, V] T, with any row stride; T: fp32, on CUDA also bf16 and fp16.
// scratch: top_k_scratch bytes (U8).
void top_k(Tensor values, Tensor ids, Tensor inp, Tensor scratch, Stream stream);
int64_t top_k_scratch(int64_t B, int64_t V, int64_t k);
