// Rotary position embedding, split-half form, in place on q and k.
//
//   for i < R/2, with (c, s) = (cos, sin)(position·inv_freq[i]):
//   x'[i] = x[i]·c − x[i + R/2]·s,   x'[i + R/2] = x[i + R/2]·c + x[i]·s,   x'[j] = x[j] for j ≥ R
//
// The backward pass is the rotation by −position. Su et al. 2021, eq. 34, in the pairing of GPT-NeoX and Hugging Face.
// Frequencies: inv_freq[i] = theta^(−2i/R), then scaled as the config of the checkpoint says:
//   linear       inv_freq / factor                                        (Chen et al. 2023)
//   llama3       by wavelength: long ones / factor, short ones unchanged, linear blend between (LLaMA 3.1)
//   dynamic NTK  theta·(factor·L/L0 − (factor − 1))^(R/(R−2)) once the context length L exceeds the original L0
//   truncated    theta^(−i/(n−1)) for the first n = fraction·R/2 pairs, 0 for the others          (modded-nanogpt)
//
// Throws Error on a wrong shape or dtype. A position outside the table is an Error on the CPU; on CUDA, where the
// launch does not wait for the kernel, such a token is not rotated.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/rope_scaling.h"

// table [T, R/2, 2] fp32 on the host: cos and sin for positions 0 … T−1. Computed in double and rounded once.
void rope_table(Tensor table, double theta, const RopeScaling& scaling);

// Fills row n of table [N, R/2, 2] fp32 on the host for a token at positions[n] of a sequence of lengths[n] tokens: row
// positions[n] of a rope_table of lengths[n] rows. positions, lengths [N]. Only dynamic scaling depends on the length.
void rope_rows(Tensor table, const int32_t* positions, const int64_t* lengths, double theta,
               const RopeScaling& scaling);

// x [N, H, HS] fp32, on CUDA also bf16 or fp16 (any row and head strides, unit inner stride), rotated in place;
// positions [N] int32; table [T, R/2, 2], R ≤ HS. backward: rotate by the negative angle.
void rope(Tensor x, Tensor positions, Tensor table, bool backward, Stream stream);
