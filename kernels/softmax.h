// Scaled, masked softmax over rows, forward and backward, as a kernel of its own. The attention kernels compute it
// inside their tiles. The maximum is subtracted so that exp does not overflow (Goodfellow et al. 2016, section 4.1).
//
//   out[r, j] = exp(scale·inp[r, j] − m_r) / Σ_j' exp(scale·inp[r, j'] − m_r)   for keys j that row r sees, else 0
//   dinp[r, j] = scale·out[r, j]·(dout[r, j] − Σ_j' dout[r, j']·out[r, j'])
//
// Row r is query i = r mod Q of a [R/Q, Q, K] batch. If causal, it sees keys j ≤ i + K − Q; with a mask, of these
// only keys with mask[i, j] ≠ 0. m_r is the maximum over the visible keys. A row that sees no key is all zeros.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Kernels compute in fp32.
// Throws Error on a wrong shape, dtype or inner stride, and if R is not a multiple of Q.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [R, K] T; inp [R, K] T; mask [Q, K] uint8 or null. out may be the same memory as inp.
void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream stream);

// dinp [R, K] T (overwritten; may be the same memory as dout); dout, out [R, K] T.
void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream stream);
