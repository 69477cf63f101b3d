// LayerNorm and RMSNorm over rows, fused with the residual addition before them (forward) and the residual gradient
// (backward).
//
//   x = inp + residual          (x = inp when residual is null)
//   LayerNorm: mean = Σ x / C,  rstd = 1/√(Σ (x − mean)² / C + eps),  out = (x − mean)·rstd·weight + bias
//   RMSNorm:                    rstd = 1/√(Σ x² / C + eps),           out = x·rstd·weight
//
//   backward, with d = dout·weight and x̂ = (x − mean)·rstd, or in RMSNorm x·rstd:
//   LayerNorm: dinp = dresidual + rstd·(d − Σd/C − x̂·Σ(d·x̂)/C)      (dresidual = 0 when null)
//   RMSNorm:   dinp = dresidual + rstd·(d − x̂·Σ(d·x̂)/C)
//   dweight (+)= Σ_n dout·x̂,  dbias (+)= Σ_n dout,  dsum (+)= Σ_n dinp
//
// rmsnorm_add_forward adds behind the norm instead (OLMo2): out = residual + inp·rstd·weight. Then the residual's
// gradient is dout, and inp's that of rmsnorm_backward without dresidual.
//
// dsum is the bias gradient of the linear layer whose output was added to the residual here. Computing it here
// saves that layer a pass over dinp. It sums dinp as rounded to T.
//
// N rows of C channels. LayerNorm: Ba, Kiros, Hinton 2016, eq. 3-4. RMSNorm: Zhang, Sennrich 2019, eq. 4.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Weights, statistics, gradients of
// parameters and all sums are fp32. x is rounded to T before it is normalised, stored or not, so that the forward and
// the backward pass see the same numbers.
//
// Throws Error on a wrong shape, dtype or inner stride, on an argument that the op does not have, or on too little
// scratch.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// Fields without a default must be given: GCC warns of a call that leaves one out.
struct NormForward {
    Tensor out;            // [N, C] T. Without residual and sum it may be the same memory as inp
    Tensor sum = {};       // [N, C] T, receives x. Null: not stored. May be the same memory as inp or residual
    Tensor mean = {};      // [N]. Null: not stored. RMSNorm has none
    Tensor rstd = {};      // [N]. Null: not stored
    Tensor inp;            // [N, C] T
    Tensor residual = {};  // [N, C] T, or null
    Tensor weight;         // [C]
    Tensor bias = {};      // [C], or null. RMSNorm has none
    float eps;
};

void layernorm_forward(const NormForward& a, Stream stream);
void rmsnorm_forward(const NormForward& a, Stream stream);

// Has a residual and no sum. out may be the same memory as residual, not as inp.
void rmsnorm_add_forward(const NormForward& a, Stream stream);

struct NormBackward {
    Tensor dinp;              // [N, C] T, overwritten. May be the same memory as dresidual or dout
    Tensor dweight = {};      // [C]. Null: not computed
    Tensor dbias = {};        // [C]. Null: not computed. RMSNorm has none
    Tensor dsum = {};         // [C]. Null: not computed
    Tensor dout;              // [N, C] T
    Tensor dresidual = {};    // [N, C] T, or null
    Tensor inp;               // [N, C] T, the x of the forward pass
    Tensor weight;            // [C]
    Tensor mean = {};         // [N], of the forward pass. RMSNorm has none
    Tensor rstd;              // [N], of the forward pass
    Tensor scratch;           // {layernorm,rmsnorm}_backward_scratch bytes (U8)
    bool accumulate = false;  // dweight, dbias and dsum are added to, else overwritten
};

void layernorm_backward(const NormBackward& a, Stream stream);
void rmsnorm_backward(const NormBackward& a, Stream stream);
int64_t layernorm_backward_scratch(int64_t N, int64_t C);
int64_t rmsnorm_backward_scratch(int64_t N, int64_t C);
