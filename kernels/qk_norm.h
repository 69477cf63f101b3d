// QK-norm: RMSNorm of each head of q and k, and RoPE after it, in one pass over both.
//
//   rstd = 1/√(Σ x² / HS + eps),  x̂ = x·rstd,  out = rotate(x̂·weight)        (rotate: rope.h; without a table nothing)
//
//   backward, with g = rotate⁻¹(dout) and d = g·weight:
//   dinp = rstd·(d − x̂·Σ(d·x̂)/HS),  dweight (+)= Σ g·x̂ over all tokens and all heads of q, or of k
//
// Henry et al. 2020; in the form of Dehghani et al. 2023, section 2. The weights, if any, are shared by the heads of q
// and by the heads of k (Qwen3).
//
// The backward pass computes x̂ from one tensor, `kept`. Without weights it is the forward pass's out, which is x̂
// rotated: the forward pass may then work in place, and only rstd has to be kept beside it. With weights it is inp.
// Dividing out by the weights would lose x̂ where a weight is 0 or small beside that of the channel it rotates with.
//
// N tokens; H = NH + NKV heads of HS ≤ QK_NORM_MAX_HEAD channels, those of q first. x is any of out, inp, dinp, dout
// and kept: [N, H, HS] T with any token and head strides and unit inner stride. T is fp32, on CUDA also bf16 and fp16.
// rstd, weights and all sums are fp32.
//
// Throws Error on a wrong shape or dtype, on one weight without the other, or on too little scratch. A position outside
// the table is an Error on the CPU; on CUDA, where the launch does not wait for the kernel, such a token is normalised
// but not rotated.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

constexpr int64_t QK_NORM_MAX_HEAD = 512;

// The norm's weights for q and for k: [HS] fp32 each, or both null. In qk_norm_all_heads.h: [Cq] and [Ck].
struct QkWeights {
    Tensor q, k;
};

// out, inp [N, H, HS] T, may be the same memory; rstd [N, H] (null: not stored); positions [N] int32 and table
// [T, R/2, 2] fp32, R ≤ HS, or both null. The first NH heads are q.
void qk_norm_forward(Tensor out, Tensor rstd, Tensor inp, QkWeights weight, Tensor positions, Tensor table, int64_t NH,
                     float eps, Stream stream);

// dinp, dout [N, H, HS] T, may be the same memory; kept [N, H, HS] T: inp of the forward pass, without weights its out;
// dweight: null without weights, or not computed. scratch: qk_norm_backward_scratch bytes (U8), without weights none.
// accumulate: add to dweight, else overwrite.
void qk_norm_backward(Tensor dinp, QkWeights dweight, Tensor dout, Tensor kept, Tensor rstd, QkWeights weight,
                      Tensor positions, Tensor table, int64_t NH, Tensor scratch, bool accumulate, Stream stream);
int64_t qk_norm_backward_scratch(int64_t N, int64_t NH, int64_t NKV, int64_t HS);
