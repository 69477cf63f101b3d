// Matrix products of a linear layer with weight [OC, C] (PyTorch's layout), forward and backward.
//
//   out[n, o] = Σ_c inp[n, c]·weight[o, c] + bias[o]
//   dinp[n, c] = Σ_o dout[n, o]·weight[o, c]
//   dweight[o, c] (+)= Σ_n dout[n, o]·inp[n, c],   dbias[o] (+)= Σ_n dout[n, o]
//
// N rows (B·T tokens), C inputs, OC outputs. Matrices may have row strides larger than their rows.
// dtypes: inp, weight, bias, out, dout and dinp are T, one of fp32, bf16 and fp16 (the CPU: fp32); dweight and dbias
// are fp32. Sums are fp32, on a GPU without TF32. matmul's out is T or fp32. On a GPU: cuBLASLt, with the handle and
// workspace of the stream, which must come from create_stream(); its algorithms are those that give the same bits every
// time. On the CPU: fp32 through oneDNN's sgemm, or through the blocked OpenMP GEMM of gemm_blocked.cpp where oneDNN is
// not there. Errors: wrong shape, dtype or inner stride; a GEMM library that reports failure.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

// out[M, N] = (or +=, if accumulate) op(a)·op(b), op being the transpose where asked; op(a) is [M, K], op(b) is [K, N].
void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream stream);

// out [N, OC]; inp [N, C]; weight [OC, C]; bias [OC] or null.
void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// dinp [N, C] (overwritten, or added to if accumulate); dout [N, OC]; weight [OC, C].
void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream stream);

// dweight [OC, C]; dbias [OC] or null; dout [N, OC]; inp [N, C]. accumulate: add, else overwrite.
void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream);

// The library behind the products: "oneDNN 2.6.3", "built-in blocked GEMM" or "cuBLASLt 13.1.0".
const char* matmul_library();

// FLOP/s of a large product on this device, timed now (about 0.1 s): the peak that MFU is a fraction of where the
// device's dense peak isn't known. Takes memory of its own for as long as it runs.
double measured_peak_flops(Stream stream, DType dtype = DType::F32);
