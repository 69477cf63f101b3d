// LayerNorm over rows, fused with the residual addition before it (forward) and the residual gradient (backward).
//
//   x = inp + residual          (x = inp when residual is null)
//   mean = Σ x / C,  rstd = 1/√(Σ (x − mean)² / C + eps),  out = (x − mean)·rstd·weight + bias
//
//   backward, with x̂ = (x − mean)·rstd and d = dout·weight:
//   dinp = dresidual + rstd·(d − Σd/C − x̂·Σ(d·x̂)/C)      (dresidual = 0 when null)
//   dweight (+)= Σ_n dout·x̂,  dbias (+)= Σ_n dout,  dsum (+)= Σ_n dinp
//
// dsum is the bias gradient of the linear layer whose output was added to the residual here. Computing it here
// saves that layer a pass over dinp. It sums dinp as rounded to T.
//
// N rows of C channels. Ba, Kiros, Hinton 2016, eq. 3-4.
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
// mean, rstd [N] (null: not stored); inp [N, C] T; residual [N, C] T or null; weight, bias [C] (bias may be null).
void layernorm_forward(Tensor out, Tensor sum, Tensor mean, Tensor rstd, Tensor inp, Tensor residual, Tensor weight,
                       Tensor bias, float eps, Stream stream);

// dinp [N, C] T (overwritten; may be the same memory as dresidual or dout); dweight, dbias, dsum [C] (null: not
// computed); dout [N, C] T; dresidual [N, C] T or null; inp [N, C] T is the x of the forward pass; mean, rstd [N].
// scratch: layernorm_backward_scratch bytes (U8). accumulate: add to dweight, dbias and dsum, else overwrite.
void layernorm_backward(Tensor dinp, Tensor dweight, Tensor dbias, Tensor dsum, Tensor dout, Tensor dresidual,
                        Tensor inp, Tensor weight, Tensor mean, Tensor rstd, Tensor scratch, bool accumulate,
                        Stream stream);
int64_t layernorm_backward_scratch(int64_t N, int64_t C);
