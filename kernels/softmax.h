// Standalone scaled, masked softmax over rows, forward and backward: what attention does inside its tiles, in the open.
//
//   out[r, j] = exp(scale·inp[r, j] − m_r) / Σ_j' exp(scale·inp[r, j'] − m_r)   over the keys j that row r sees, else 0
//   dinp[r, j] = scale·out[r, j]·(dout[r, j] − Σ_j' dout[r, j']·out[r, j'])
//
// Row r is query i = r mod Q of a [R/Q, Q, K] batch. With causal it sees j ≤ i + K − Q; with a mask it sees j where
// mask[i, j] ≠ 0 too. m_r is the maximum over the seen keys only; a row that sees none is all zeros.
// Errors: wrong shape or dtype, R not a multiple of Q.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

// out [R, K]; inp [R, K]; mask [Q, K] uint8 or null. out may be the same memory as inp.
void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream stream);

// dinp [R, K] (overwritten; may be the same memory as dout); dout, out [R, K].
void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream stream);
