// Token and position embedding, forward and backward.
//
//   out[n, c] = wte[tokens[n], c] + wpe[positions[n], c]
//   dwte[v, c] (+)= Σ_{n: tokens[n] = v} dout[n, c]        dwpe[p, c] (+)= Σ_{n: positions[n] = p} dout[n, c]
//
// N = B·T tokens, C channels, V vocabulary rows held in memory (padded), P positions.
// Every launcher throws Error on a wrong shape or dtype, and on a token or position outside its table (CPU).
// Learned positions: Radford et al. 2019 (GPT-2). The backward pass sums in the order of n: deterministic, no atomics.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

// out [N, C] fp32; tokens [N] int32; positions [N] int32; wte [V, C] fp32; wpe [P, C] fp32 or null (no positions
// added).
void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream stream);

// dwte [V, C] or null, dwpe [P, C] or null; dout [N, C]; scratch of embedding_backward_scratch bytes (U8) or null if 0.
// accumulate_*: add to what is there, else overwrite all rows (rows that no token names become zero).
void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Tensor scratch,
                        bool accumulate_wte, bool accumulate_wpe, Stream stream);
int64_t embedding_backward_scratch(int64_t N, int64_t V, int64_t C);
