// Matmuls of a linear layer with weight [OC, C] (PyTorch's layout), forward and backward.
//
//   out[n, o] = Σ_c inp[n, c]·weight[o, c] + bias[o]
//   dinp[n, c] = Σ_o dout[n, o]·weight[o, c]
//   dweight[o, c] (+)= Σ_n dout[n, o]·inp[n, c],   dbias[o] (+)= Σ_n dout[n, o]
//
// N rows (B·T tokens), C inputs, OC outputs. Row strides may exceed the number of columns; inner strides are 1.
// dtypes: inp, weight, bias, out, dout and dinp have one dtype, fp32, bf16 or fp16 (on the CPU fp32); dbias is fp32;
// matmul()'s out has the inputs' dtype, fp32 or, on the CPU, bf16; dweight is fp32 or bf16, on a GPU bf16 only with
// bf16 inputs. Sums are in fp32, never in TF32. Added to a bf16 dweight they are rounded to nearest, on Hopper before
// and after the addition (docs/understand/numerics.md).
//
// GPU: cuBLASLt, only with algorithms that give the same bits every time, or kernels/gemm_hopper.h where tuning found
// it faster. The stream must come from create_blas_stream() (runtime/device/blas_stream.h). CPU: oneDNN, or without it
// the blocked OpenMP GEMM of kernels/cpu/gemm_blocked.cpp.
//
// Throws Error on a wrong shape, dtype or inner stride, on a stream without a cuBLASLt handle, and if the library
// fails.
#pragma once

#include <string>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/activation_config.h"

// out [M, N] = alpha·op(a)·op(b), added to out if accumulate. op(x) is x or, if transpose_x, its transpose; op(a) is
// [M, K], op(b) is [K, N].
void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream stream,
            float alpha = 1);

// out[i] = alpha·op(a[i])·op(b[i]) + beta·add[i] for the matrices of a batch. out, add [batch, M, N]; op(a[i]) is
// [M, K], op(b[i]) is [K, N]; contiguous, of one dtype. add is not read if beta is 0, and may be out; out must not
// overlap a or b. The bits of a matrix depend on the size of the batch, but not on the position in it or on the other
// matrices.
void matmul_batched(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, float alpha, float beta,
                    Tensor add, Stream stream);

// out [N, OC]; inp [N, C]; weight [OC, C]; bias [OC] or null.
void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream);

// The same plus add [N, OC], which has the row stride of out and may be out. C > 0.
void matmul_forward_add(Tensor out, Tensor inp, Tensor weight, Tensor bias, Tensor add, Stream stream);

// A linear layer and an activation function f: pre = inp·weightᵀ + bias and out = f(pre). Both are stored, because the
// backward pass needs pre; without keeps_pre, pre is scratch, undefined afterwards, and out is given. f: activation.h.
// pre [N, OC], inp [N, C], weight [OC, C], bias [OC] or null; out [N, OC], if f is gated [N, OC/2]. Without GELU out
// may be null: only pre is computed, with the same bits.
//
// On a GPU, GEMMs of 16 bits apply f in their epilogue where tuning found that faster than two kernels, and without
// keeps_pre also where nothing was timed. out has the bits of activation_forward(f, pre), except that cuBLASLt's GELU
// is applied before pre is rounded.
void matmul_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                               Stream stream, bool keeps_pre = true);

// dinp [N, C], overwritten, or added to if accumulate; dout [N, OC]; weight [OC, C].
void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream stream);

// The backward pass of a linear layer and of the activation function f that produced its input:
// dpre = f'(pre) of dact = dout·weight. The gradients: activation.h.
// Where tuning chose one kernel, dact is not rounded before it is multiplied by f'(pre). hopper_gemm() then sums dbias
// of GELU and ReLU² before dpre is rounded; all other kernels sum what is stored.
struct ActivationGradient {
    Tensor dpre;   // [N, I]; of a gated f [N, 2·I], which may be the same memory as pre
    Tensor dact;   // [N, I], scratch: undefined afterwards, unless it is the same memory as dpre or act
    Tensor act;    // only of a gated f: [N, I], receives the bits of f(pre); or null. May be the same memory as dact
    Tensor dbias;  // fp32 [columns of dpre], or null: dpre summed over the rows
    bool accumulate = false;  // dbias is added to, else overwritten
};
// dout [N, OC]; weight [OC, I]; pre as dpre.
void matmul_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight, Tensor pre,
                                Stream stream);

// dweight [OC, C]; dbias [OC] or null; dout [N, OC]; inp [N, C]. Gradients are added to if accumulate, else
// overwritten.
void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream);

// The bias gradient alone: dbias [OC] (+)= Σ_n dout[n, o]; dout [N, OC].
void matmul_backward_bias(Tensor dbias, Tensor dout, bool accumulate, Stream stream);

// From now on, on this stream (on the CPU in this process): a row of a·bᵀ, the forward pass of a linear layer, has the
// same bits whatever the other rows are and however many. Off at first, because GEMM libraries choose how they sum by
// the number of rows. Then the blocked GEMM computes these matmuls, on a GPU hopper_gemm(): those that it does not take
// (kernels/gemm_hopper.h) throw Error, and so does turning it on where that does not run.
void matmul_batch_invariant(bool on, Stream stream);

// Tuning. cuBLASLt has tens of algorithms for a GEMM, and the one that its heuristic ranks first may be several percent
// slower than the fastest. On the CPU, which has nothing to tune, these functions do nothing and their text is empty.
//
// While tuning is on, each new GEMM (sizes, strides, dtypes, alignments, transposes, epilogue) is timed at its first
// call; one that differs from a timed one in `accumulate` alone takes its algorithm. Of the algorithms that the library
// proposes and that give the same bits twice, the one with the best median of interleaved samples is chosen. It is
// compared with kernels/gemm_hopper.h, and GEMMs with an activation function or adapters (matmul_low_rank.h) with
// several kernels. This takes about half a second per GEMM, those a second, and waits for the stream. It overwrites
// results many times: after a call with `accumulate`, or whose result overlaps an operand, they are undefined.
void matmul_tuning(bool on, Stream stream);

// The table of chosen algorithms as text: the GPU, the versions of the library and of hopper_gemm(), a line for each
// GEMM that was timed or adopted (used_only: that this stream has also run), and a checksum.
std::string matmul_choices(Stream stream, bool used_only = false);

// Adopts such a table, which replaces earlier choices for the same GEMMs. used: counts them as run by this stream, so
// that a resumed run hands on its whole table. Returns false and changes nothing if the table is another GPU's or
// another version's of the library or of hopper_gemm(). Empty text is a table without GEMMs. Throws Error if the text
// is damaged.
bool matmul_use_choices(const std::string& text, Stream stream, bool used = false);

// The library behind the matmuls: "oneDNN 2.6.3", "built-in blocked GEMM" or "cuBLASLt 13.1.0".
const char* matmul_library();

// FLOP/s of a large matmul on this device, measured now (a GPU takes about 0.1 s): the peak for MFU where the dense
// peak of the device is unknown. Allocates and frees its own matrices.
double measured_peak_flops(Stream stream, DType dtype = DType::F32);
