// The decay gate of gated linear attention (linear_attention.h): a log decay for each token and KV head, from the
// token's own channels.
//
//   x[n, h] = Σ_c inp[n, c]·weight[h, c] + bias[h]
//   gate[n, h] = log σ(x[n, h]) = min(x, 0) − log(1 + exp(−|x|))    ≤ 0, so that exp(gate) = σ(x) is a decay
//
//   backward: dx = dgate·(1 − σ(x)) = −dgate·(exp(gate) − 1); the gradients of the linear layer (matmul.h) follow from
//   dx.
//
// Yang et al. 2023, "Gated linear attention transformers", section 4.4, with one decay for a head as in Mamba-2 (Dao,
// Gu 2024). N rows of C channels, H heads. T is the dtype of inp, weight and dx: fp32; on CUDA also bf16 and fp16;
// bias, gate, dgate and all sums are fp32, because a decay acts on all earlier tokens, and its errors accumulate over
// them. The order of a row's sum does not depend on N and H. Errors: wrong shape or dtype.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// gate [N, H]; inp [N, C]; weight [H, C]; bias [H].
void decay_gate_forward(Tensor gate, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// dx [N, H] T; dgate, gate [N, H].
void decay_gate_backward(Tensor dx, Tensor dgate, Tensor gate, Stream stream);
