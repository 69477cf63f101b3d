// CUDA only, Hopper: linear_cross_entropy() without a pass over the logits between the matmuls. The forward matmul
// stores exponentials instead of logits (GemmEpilogue::Exp), the factor of each token goes into the small matrices:
//
//   e[n, v] = exp(logits[n, v] − logits[n, target[n]])         at most 2¹⁰⁰; 0 for v ≥ V and where the target is
//   ignored loss[n] = ln Σ_v e[n, v],   r[n] = dloss / Σ_v e[n, v],   e[n, target[n]] = −Σ_{v ≠ target[n]} e[n, v]
//   dlogits[n, v] = r[n]·e[n, v], so dweight (+)= eᵀ·(r·inp) and dinp = r·(e·weight)
//
// The logit of the target takes the place of the maximum of the usual softmax: it is known before the matmul. e has a
// relative error of one rounding wherever exp neither overflows nor underflows, so it needs no maximum; a logit more
// than 69 above the target's counts as 69 above it. The exponentials and their sum are computed from the matmul's sums
// in fp32, which cross_entropy.h finds rounded to bf16.
#pragma once

#include "kernels/linear_cross_entropy.h"

// Whether it takes this call: bf16, no softcap, no bias, a matmul that hopper_gemm() takes, and partial sums that fit
// into the workspace of the stream.
bool hopper_cross_entropy_takes(const LinearCrossEntropy& x, Stream stream);

// Throws Error as linear_cross_entropy().
void hopper_cross_entropy(const LinearCrossEntropy& x, Stream stream);
