// Matmuls of a linear layer with LoRA adapters (runtime/model/linear_weight.h), forward and backward to its input:
//
//   out[n, o] = Σ_c inp[n, c]·weight[o, c] + bias[o] + Σ_r h[n, r]·B[o, r],   h = s·inp·Aᵀ
//   dinp[n, c] (+)= Σ_o dout[n, o]·weight[o, c] + Σ_r dh[n, r]·A[r, c],       dh = s·dout·B
//
// N rows, C inputs, OC outputs, adapters of P parts of out with R rows of A each. A part's B counts for its own rows of
// out and its own R columns of h; rows of out without an adapter get nothing added. dtypes, strides and what is thrown
// as in kernels/matmul.h.
//
// GPU: on Hopper, in bf16, the adapters' products may be further steps of the inner dimension of the matmul with weight
// (GemmKey::K2), where tuning found that faster. Then all is summed in fp32 and rounded once. Otherwise, and always on
// the CPU and while matmul_batch_invariant() is on, in the forward pass, the adapters' products are stored first and
// the matmul with weight adds to them, so they are rounded by themselves. Where adapters cover a part of out only, that
// matmul is first.
#pragma once

#include "kernels/matmul.h"
#include "runtime/model/linear_weight.h"

struct LowRank {
    Tensor h;              // [N, P·R]
    LoraWeights adapters;  // b [the parts' rows, R]; a and scale are not read
    Tensor scratch;        // U8 [matmul_low_rank_scratch()]; null: several parts are always multiplied apart
};

// Whether adapters change all OC rows of a weight: their parts do not overlap.
inline bool covers(const LoraWeights& adapters, int64_t OC) {
    return adapters.b.shape[0] == OC;
}

// Bytes for a layer of OC outputs, whose adapters have ranks = P·R together: its block_diagonal(); 0 where none is
// used.
int64_t matmul_low_rank_scratch(int64_t OC, int64_t ranks, DType dtype);

// out [OC, P·R]: row o has the part's row of B in the R columns of the part that o belongs to, and zeros elsewhere, so
// that h·outᵀ is what the adapters add. In fp32 or 16 bits, contiguous; on a GPU of at most 3 parts.
void block_diagonal(Tensor out, const LoraWeights& adapters, Stream stream);

// out [N, OC] (+)= what the adapters add; without accumulate only the columns of out that have an adapter are written.
void matmul_low_rank(Tensor out, const LowRank& low_rank, bool accumulate, Stream stream);

// matmul_forward(), plus what the adapters add.
void matmul_low_rank_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, const LowRank& low_rank,
                             Stream stream);

// matmul_forward_activation() of pre = inp·weightᵀ + bias + what the adapters add, which is kept; out is given.
void matmul_low_rank_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                                        const LowRank& low_rank, Stream stream);

struct LowRankGradient {
    Tensor dh;  // [N, P·R]
    Tensor a;   // [P·R, C]
};

// matmul_backward_input(), plus dh·A.
void matmul_low_rank_backward_input(Tensor dinp, Tensor dout, Tensor weight, const LowRankGradient& low_rank,
                                    bool accumulate, Stream stream);

// matmul_backward_activation() of dact = dout·weight + dh·A. d.dbias is null.
void matmul_low_rank_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight,
                                         Tensor pre, const LowRankGradient& low_rank, Stream stream);
