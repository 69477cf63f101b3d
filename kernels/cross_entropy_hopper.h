// CUDA only, Hopper: linear_cross_entropy() without a pass over the logits between the matmuls. The forward matmul
// stores exponentials instead of logits (GemmEpilogue::Exp), and the factor of each token goes into the small matrices:
//
//   e[n, v] = exp(logits[n, v] − logits[n, t])             t = target[n]
//   loss[n] = ln Σ_v e[n, v],   r[n] = dloss / Σ_v e[n, v]
//   e[n, t] becomes −Σ_{v ≠ t} e[n, v], so that dlogits = r·e
//   dweight (+)= eᵀ·(r·inp),   dinp = r·(e·weight)
//
// In two calls r[n] is dlosses[n]·exp(−loss[n]), which the second call applies.
//
// e is 0 for v ≥ V and where the target is ignored. Softmax usually subtracts the maximum; here the target's logit
// takes its place, because it is known before the matmul. bf16 has the exponents of fp32, so e keeps its digits unless
// exp overflows: a logit more than 69 above the target's counts as 69 above it (e = 2¹⁰⁰). Exponentials and their sum
// come from the matmul's sums in fp32, which cross_entropy.h finds rounded to bf16. docs/understand/numerics.md has the
// errors.
#pragma once

#include "kernels/linear_cross_entropy.h"

// Whether it takes this call: bf16, no softcap, no bias, a matmul that hopper_gemm() takes, and partial sums that fit
// into the workspace of the stream.
bool hopper_cross_entropy_takes(const LinearCrossEntropy& x, Stream stream);

// Throw Error as linear_cross_entropy(). The forward pass alone stores nothing but the losses.
void hopper_cross_entropy(const LinearCrossEntropy& x, Stream stream);
void hopper_cross_entropy_losses(const LinearCrossEntropy& x, Stream stream);
void hopper_cross_entropy_gradient(const LinearCrossEntropy& x, Stream stream);
void hopper_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream);
