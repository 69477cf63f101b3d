// RMSNorm over rows, fused with the residual addition before it (forward) and the residual gradient (backward).
//
//   x = inp + residual          (x = inp when residual is null)
//   rstd = 1/√(Σ x² / C + eps),  out = x·rstd·weight
//
//   backward, with x̂ = x·rstd and d = dout·weight:
//   dinp = dresidual + rstd·(d − x̂·Σ(d·x̂)/C)      (dresidual = 0 when null)
//   dweight (+)= Σ_n dout·x̂,  dsum (+)= Σ_n dinp
//
// rmsnorm_add_forward adds behind the norm instead (OLMo2): out = residual + inp·rstd·weight. Then the residual's
// gradient is dout, and inp's that of rmsnorm_backward without dresidual.
//
// dsum is the bias gradient of the linear layer whose output was added to the residual here. Computing it here
// saves that layer a pass over dinp. It sums dinp as rounded to T.
//
// N rows of C channels. Zhang, Sennrich 2019, eq. 4.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Weights, statistics, gradients of
// parameters and all sums are fp32. x is rounded to T before it is normalised, stored or not, so that the forward and
// the backward pass see the same numbers.
//
// Throws Error on a wrong shape, dtype or inner stride, or on too little scratch.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [N, C] T (without residual and sum it may be the same memory as inp);
// sum [N, C] T receives x (null: not stored; may be the same memory as inp or residual);
// rstd [N] (null: not stored); inp [N, C] T; residual [N, C] T or null; weight [C].
void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps,
                     Stream stream);

// out [N, C] T (may be the same memory as residual, not as inp); rstd [N] (null: not stored); inp, residual [N, C] T;
// weight [C].
void rmsnorm_add_forward(Tensor out, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps, Stream stream);

// dinp [N, C] T (overwritten; may be the same memory as dresidual or dout); dweight, dsum [C] (null: not computed);
// dout [N, C] T; dresidual [N, C] T or null; inp [N, C] T is the x of the forward pass; rstd [N]. scratch:
// rmsnorm_backward_scratch bytes (U8). accumulate: add to dweight and dsum, else overwrite.
void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dsum, Tensor dout, Tensor dresidual, Tensor inp,
                      Tensor weight, Tensor rstd, Tensor scratch, bool accumulate, Stream stream);
int64_t rmsnorm_backward_scratch(int64_t N, int64_t C);
