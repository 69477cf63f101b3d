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

#include <string>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out[M, N] = (or +=, if accumulate) op(a)·op(b), op being the transpose where asked; op(a) is [M, K], op(b) is [K, N].
void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream stream);

// out [N, OC]; inp [N, C]; weight [OC, C]; bias [OC] or null.
void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// The same, added to what is in out.
void matmul_forward_add(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// A linear layer and GELU (kernels/gelu.h): pre = inp·weightᵀ + bias and out = gelu(pre), both stored. pre is what the
// backward pass needs. out, pre [N, OC]; inp [N, C]; weight [OC, C]; bias [OC] or null. On a GPU 16-bit products with
// rows of whole multiples of 16 bytes apply GELU before they are rounded, in one kernel, unless tuning found two
// faster.
void matmul_forward_gelu(Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// dinp [N, C] (overwritten, or added to if accumulate); dout [N, OC]; weight [OC, C].
void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream stream);

// Back through a linear layer and the GELU before it: dinp = (dout·weight) ⊙ gelu'(pre). dinp, pre [N, C]; dout [N,
// OC]; weight [OC, C].
void matmul_backward_input_gelu(Tensor dinp, Tensor dout, Tensor weight, Tensor pre, Stream stream);

// dweight [OC, C]; dbias [OC] or null; dout [N, OC]; inp [N, C]. accumulate: add, else overwrite.
void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream);

// Tuning. cuBLASLt has tens of algorithms for a product, and its guess at the fastest may be off by several percent. A
// stream's products take that guess, or the fastest of those that were timed. The CPU's library has nothing to choose
// from: there these functions do nothing, and texts and path are empty.
//
// While on, each new kind of product (sizes, strides, dtypes, transposes, accumulate, epilogue) is timed when it is
// met: the algorithms that the library proposes, of those that gave the same bits twice the one with the best median of
// five samples taken in turns; products with GELU also against two kernels. Takes about 0.05 s each and waits for the
// stream. out and pre are overwritten many times: what products with `accumulate` leave is undefined.
void matmul_tuning(bool on, Stream stream);

// What was chosen by timing, or adopted, as text: a line with GPU and library version, one for each product (used_only:
// of those that this stream has multiplied), a checksum.
std::string matmul_choices(Stream stream, bool used_only = false);

// Adopts such a table, in place of what was chosen for the same products before; used: as if the stream had multiplied
// them, so that a resumed run hands its table on whole. False, with nothing changed, if it is
// another GPU's or another library version's; empty text is a table without products. Error if the text is damaged.
bool matmul_use_choices(const std::string& text, Stream stream, bool used = false);

// The user's file for choices on this GPU with this library: $XDG_CACHE_HOME (~/.cache)/train_gpt/gemm/<both>.txt;
// empty without a home.
std::string matmul_cache_path(Stream stream);
// It saves the time to make the choices again, and keeps runs on one machine bitwise alike. What can't be read or
// written is left alone: then they are made again. store adds what the stream used to what is there.
void load_matmul_cache(Stream stream);
void store_matmul_cache(Stream stream);

// The library behind the products: "oneDNN 2.6.3", "built-in blocked GEMM" or "cuBLASLt 13.1.0".
const char* matmul_library();

// FLOP/s of a large product on this device, timed now (about 0.1 s): the peak that MFU is a fraction of where the
// device's dense peak isn't known. Takes memory of its own for as long as it runs.
double measured_peak_flops(Stream stream, DType dtype = DType::F32);
