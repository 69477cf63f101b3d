// Causal linear attention with grouped-query heads over packed sequences of unequal length: forward, backward and the
// decode step.
//
// φ is the feature map: the identity, or elu(x) + 1, which is x + 1 for x > 0 and eˣ otherwise. g ≤ 0 is a log decay
// for each token and KV head, 0 where no gate is given. For each sequence and KV head (query head h reads KV head h /
// (NH/NKV)):
//
//   S_t = exp(g_t)·S_t−1 + φ(k_t) v_tᵀ    [E, M]        z_t = exp(g_t)·z_t−1 + φ(k_t)    [E]
//   out_t = S_tᵀ φ(q_t)                                 or, normalised,
//   out_t = S_tᵀ φ(q_t) / d_t,   d_t = φ(q_t)·z_t + ε,  ε = 1e-6
//
//   backward, with ĝ_t = dout_t/d_t and δ_t = −ĝ_t·out_t (not normalised: ĝ = dout, δ = 0), from the last token to
//   the first; R and r are summed over the query heads of the KV head:
//   R_t = exp(g_t+1)·R_t+1 + φ(q_t) ĝ_tᵀ                r_t = exp(g_t+1)·r_t+1 + δ_t φ(q_t)
//   dφ(q_t) = S_t ĝ_t + δ_t z_t,   dφ(k_t) = R_t v_t + r_t,   dv_t = R_tᵀ φ(k_t)
//   dg_t = ⟨exp(g_t)·S_t−1, R_t⟩ + exp(g_t)·z_t−1·r_t
//        = Σ_s≥t (φ(q_s)·dφ(q_s) − φ(k_s)·dφ(k_s)) + ⟨S_T, dS_T⟩ + z_T·dz_T
//   T is the last token; dS_T and dz_T are the gradients of the final state, 0 if they are not given.
//
// Sources. Normalised, with elu + 1: Katharopoulos et al. 2020, "Transformers are RNNs", equations 8 to 12. Not
// normalised, without features: the causal numerator of that paper. A constant decay: RetNet (Sun et al. 2023). A decay
// that depends on the token: Mamba-2's scalar decay (Dao, Gu 2024), and the gated linear attention of Yang et al. 2023
// with one decay for each head.
//
// docs/understand/linear_attention.md explains the chunked form, which training uses, and its cost. The kernels use no
// float atomics: the same input gives the same bits, on the CPU with any number of threads. A finite token never
// changes the results of earlier tokens. Sequences do not affect each other.
//
// q, k, v, out and their gradients are [N, heads, size] with any row and head strides, so they can be views into packed
// rows (split_heads in runtime/device/tensor.h). E and M may differ. q, k, v, out and their gradients have dtype T:
// fp32, on CUDA also bf16 (fp16 cannot hold the sums in the state). gate, norm, the states and their gradients are
// fp32. Tensor cores read φ, ĝ, the scores of a chunk and the state rounded to T; sums, z, d, δ and the state carried
// from chunk to chunk are fp32. Tokens after the last sequence get zeros.
//
// Errors: wrong shapes or dtypes; NKV does not divide NH; E or M above 512, or above 256 with Form::Chunked; a
// normaliser without elu + 1. The CPU also checks cum: it must not decrease, must end within the tensors, and no
// sequence may be longer than max_length. CUDA does not read cum on the host: the kernels never access memory outside
// the tensors, but the results of a wrong cum are undefined.
#pragma once

#include "kernels/linear_attention/linear_attention_types.h"
#include "runtime/device/device.h"

// Bytes of scratch for a pass of these sizes; enough also for fewer or shorter sequences. Depends on the GPU. Without
// states it does not grow with the number of sequences.
int64_t linear_attention_forward_scratch(const LinearAttentionSizes& sizes);
int64_t linear_attention_backward_scratch(const LinearAttentionSizes& sizes);

// out [N, NH, M]. norm [NH, N] fp32: d, which the backward pass reads (null: not stored; unused if not normalised).
// final: the state after each sequence, or null. q [N, NH, E]; k [N, NKV, E]; v [N, NKV, M]; gate [N, NKV] fp32 or
// null.
void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                              Tensor scratch, Stream stream);

// dq, dk, dv like q, k, v. dgate [N, NKV] fp32, given exactly where gate is. dinitial: the gradient of the initial
// state, or null. These outputs are overwritten. dout, out [N, NH, M]. out and norm [NH, N] come from the forward pass
// and may be null if not normalised. dfinal: the gradient of the final state, or null.
void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                               Tensor scratch, Stream stream);

// Adds one token to each of S sequences and updates `state` in place, in fp32 for any T. out [S, NH, M]; q [S, NH, E];
// k [S, NKV, E]; v [S, NKV, M]; gate [S, NKV] fp32 or null.
void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttentionType& type, Stream stream);
