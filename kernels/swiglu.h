// SwiGLU on the packed output of the fused gate-up GEMM, forward and backward.
//
//   gate = gate_up[n, i], up = gate_up[n, I + i], σ = 1/(1 + exp(−gate)):   out[n, i] = gate·σ·up
//   dgate = dout·up·σ·(1 + gate·(1 − σ)),   dup = dout·gate·σ
//
// I inner channels. Shazeer 2020, eq. 6.
// T is the dtype of all activations of a call: fp32, on CUDA also bf16 and fp16. Kernels compute in fp32.
// Throws Error on a wrong shape, dtype or inner stride. Row strides may exceed the number of columns.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [N, I] T; gate_up [N, 2·I] T.
void swiglu_forward(Tensor out, Tensor gate_up, Stream stream);

// dgate_up [N, 2·I] T (overwritten; may be the same memory as gate_up); out [N, I] T receives the bits of
// swiglu_forward, for a pass that did not keep them (null: not computed; may be the same memory as dout); dout [N, I]
// T; gate_up [N, 2·I] T.
void swiglu_backward(Tensor dgate_up, Tensor out, Tensor dout, Tensor gate_up, Stream stream);
