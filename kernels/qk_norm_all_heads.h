// QK-norm of all heads together: RMSNorm of a token's whole q, and of its whole k, and RoPE after it (OLMo2: Walsh et
// al. 2024, section 2.1).
//
//   rstd = 1/√(Σ x² / C + eps),  out = rotate(x·rstd·weight)      x: the C = heads·HS channels of q, or of k
//
//   backward: rotate⁻¹(dout) (rope.h), then the backward pass of RMSNorm (norm.h)
//
// A sum over all heads does not stay in a few lanes, as that of qk_norm.h does. So it is made of norm.h's and
// rope.h's kernels, each of which reads and writes q and k once.
//
// N tokens; q has the first Cq channels of a row, k the other Ck: the lengths of weight.q and weight.k. out, inp and d:
// [N, Cq + Ck] T with any row stride. T is fp32, on CUDA also bf16 and fp16. rstd, weights and all sums are fp32.
// Throws Error on a wrong shape or dtype; a position outside the table: as rope().
#pragma once

#include "kernels/qk_norm.h"

// Of q and of k: [N] fp32 each, or both null: not stored.
struct QkRstd {
    Tensor q, k;
};

// out, inp may be the same memory; weight: [Cq] and [Ck]; H: heads of q plus heads of k; positions [N] int32 and table
// [T, R/2, 2] fp32, or both null.
void qk_norm_all_heads_forward(Tensor out, QkRstd rstd, Tensor inp, QkWeights weight, Tensor positions, Tensor table,
                               int64_t H, float eps, Stream stream);

// d: on entry the gradient of out, on return that of inp. inp, rstd: of the forward pass. scratch:
// qk_norm_all_heads_backward_scratch bytes (U8). dweight: null: not computed. accumulate: add to it, else overwrite.
void qk_norm_all_heads_backward(Tensor d, QkWeights dweight, Tensor inp, QkRstd rstd, QkWeights weight,
                                Tensor positions, Tensor table, int64_t H, Tensor scratch, bool accumulate,
                                Stream stream);
int64_t qk_norm_all_heads_backward_scratch(int64_t N, int64_t Cq, int64_t Ck);
