// Standalone scaled, masked softmax over rows, forward and backward: what attention does inside its tiles, in the open.
//
//   out[r, j] = exp(scale·inp[r, j] − m_r) / Σ_j' exp(scale·inp[r, j'] − m_r)   over the keys j that row r sees, else 0
//   dinp[r, j] = scale·out[r, j]·(dout[r, j] − Σ_j' dout[r, j']·out[r, j'])
//
// Row r is query i = r mod Q of a [R/Q, Q, K] batch. With causal it sees j ≤ i + K − Q; with a mask it sees j where
// mask[i, j] ≠ 0 too. m_r is the maximum over the seen keys only; a row that sees none is all zeros.
// T is the dtype of the activations, one for all of a call: fp32; on CUDA also bf16 and fp16, computed in fp32.
// Errors: wrong shape or dtype, R not a multiple of Q.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [R, K] T; inp [R, K] T; mask [Q, K] uint8 or null. out may be the same memory as inp.
void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream stream);

// dinp [R, K] T (overwritten; may be the same memory as dout); dout, out [R, K] T.
void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream stream);
