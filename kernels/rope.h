// Rotary position embedding, split-half form, in place on q and k.
//
//   for i < R/2, with (c, s) = (cos, sin)(position·inv_freq[i]):
//   x'[i] = x[i]·c − x[i + R/2]·s,   x'[i + R/2] = x[i + R/2]·c + x[i]·s,   x'[j] = x[j] for j ≥ R
//
// The backward pass is the rotation by −position. Su et al. 2021, eq. 34, in the pairing of GPT-NeoX and Hugging Face.
// Frequencies: inv_freq[i] = theta^(−2i/R), then scaled as the checkpoint's config asks:
//   linear       inv_freq / factor                                        (Chen et al. 2023)
//   llama3       by wavelength: long ones / factor, short ones kept, a linear blend between (LLaMA 3.1)
//   dynamic NTK  theta·(factor·L/L0 − (factor − 1))^(R/(R−2)) once the context length L exceeds the original L0
// Errors: wrong shape or dtype, odd R, a position outside the table (CPU; on CUDA, where nobody waits to be told, such
// a token is not turned).
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/rope_scaling.h"

// table [T, R/2, 2] fp32 on the host: cos and sin for positions 0 … T−1. Computed in double and rounded once.
void rope_table(Tensor table, double theta, const RopeScaling& scaling);

// Row n of table [N, R/2, 2] for a token at positions[n] of a text of lengths[n] tokens (only dynamic scaling asks for
// the length): what rope_table(length)'s row of that position is.
void rope_rows(Tensor table, const int32_t* positions, const int64_t* lengths, double theta,
               const RopeScaling& scaling);

// x [N, H, HS] fp32, on CUDA also bf16 or fp16 (any row and head strides, unit inner stride), rotated in place;
// positions [N] int32; table [T, R/2, 2], R ≤ HS. backward: rotate by the negative angle.
void rope(Tensor x, Tensor positions, Tensor table, bool backward, Stream stream);
