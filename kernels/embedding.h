// Token and position embedding, forward and backward.
//
//   out[n, c] = wte[tokens[n], c] + wpe[positions[n], c]
//   dwte[v, c] (+)= Σ_{n: tokens[n] = v} dout[n, c]        dwpe[p, c] (+)= Σ_{n: positions[n] = p} dout[n, c]
//
// N = B·T tokens, C channels, V vocabulary rows in memory (padded), P positions. Learned positions: Radford et al. 2019
// (GPT-2). T is the dtype of activations and tables: fp32, on CUDA also bf16 and fp16. The gradients of the tables are
// fp32. The backward pass sums in an order that depends only on the indices, without atomics on floats.
//
// Throws Error on a wrong shape or dtype; embedding_backward on CUDA also on 2³⁰ tokens or more and on 2³¹ rows of
// tables or more. A token or position outside its table is an Error on the CPU; on CUDA, where the launch does not wait
// for the kernel, it counts as a row of zeros and its gradient is dropped.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [N, C] T; tokens [N] int32; positions [N] int32; wte [V, C] T; wpe [P, C] T or null (no positions added).
void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream stream);
// The same with wte packed (kernels/packed_weight.h): the rows of the tokens are dequantised to fp32, and the sum is
// rounded to T.
void embedding_forward(Tensor out, Tensor tokens, Tensor positions, const struct PackedWeight& wte, Tensor wpe,
                       Stream stream);

// dwte [V, C] fp32 or null; dwpe [P, C] fp32 or null; dout [N, C] T; scratch: embedding_backward_scratch bytes (U8),
// null if 0. accumulate_*: add to the gradient, else overwrite all its rows (rows without a token become zero).
void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Tensor scratch,
                        bool accumulate_wte, bool accumulate_wpe, Stream stream);
int64_t embedding_backward_scratch(int64_t N, int64_t V, int64_t C);
