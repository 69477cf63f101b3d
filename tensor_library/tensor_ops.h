// Elementwise functions, reductions and matmuls of strided tensors: views of any layout, broadcasting, 0 to 8
// dimensions. They serve operations without a kernel of their own; training uses the fused ops of kernels/.
//
//   map        out = f(inp)
//   zip        out = f(x, y)
//   bin_bcast  out = x + y, x − y, x·y or x/y, y repeated in blocks
//   reduce     out = start ∘ inp[…, 0, …] ∘ inp[…, 1, …] ∘ …   over one axis, ∘ being +, · or max
//   matmul     out[…, i, j] = Σ_k a[…, i, k]·b[…, k, j]
//
// Any strides are allowed: zero (a repeated value), negative, column-major, with gaps. Broadcasting is NumPy's: shapes
// are aligned at the right, and a dimension of size 1 repeats. Sizes and offsets have 64 bits. Tensors may be empty.
// dtypes: fp32, bf16 and fp16, in any mixture; values are computed in fp32 and rounded once, to out's dtype. matmul
// takes fp32 only (kernels/matmul.h multiplies 16-bit matrices, on tensor cores). Sums and products have blocks of
// fixed size and order: the same bits every time, on the CPU for any number of threads (except where matmul calls the
// library for large matrices, see docs/understand/numerics.md).
//
// Throws Error on a missing tensor, a wrong dtype, shapes that do not broadcast to out's, an axis outside the tensor, a
// function of another number of arguments, and an out that overlaps an input or itself, even where that would be
// harmless.
//
// map, zip, reduce and matmul over strided storage are the operations of minitorch (Rush 2020); bin_bcast is ggml's
// binary operator.
#pragma once

#include <cmath>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// F(enumerator, name, arguments). log_back, inv_back and relu_back take x and the gradient d of the result: d/x, −d/x²
// and d where x > 0, else 0. lt, eq and is_close (|x − y| < 0.01) give 1 or 0. max gives NaN where x or y is NaN, and
// relu where x is, as NumPy's maximum does.
#define TENSOR_FUNCTIONS(F)   \
    F(Id, "id", 1)            \
    F(Neg, "neg", 1)          \
    F(Inv, "inv", 1)          \
    F(Exp, "exp", 1)          \
    F(Log, "log", 1)          \
    F(Sigmoid, "sigmoid", 1)  \
    F(Tanh, "tanh", 1)        \
    F(Relu, "relu", 1)        \
    F(Add, "add", 2)          \
    F(Sub, "sub", 2)          \
    F(Mul, "mul", 2)          \
    F(Div, "div", 2)          \
    F(Max, "max", 2)          \
    F(Pow, "pow", 2)          \
    F(Lt, "lt", 2)            \
    F(Eq, "eq", 2)            \
    F(IsClose, "is_close", 2) \
    F(InvBack, "inv_back", 2) \
    F(LogBack, "log_back", 2) \
    F(ReluBack, "relu_back", 2)

#define TENSOR_FUNCTION_ENUMERATOR(enumerator, name, arguments) enumerator,
enum class TensorFunction : uint8_t { TENSOR_FUNCTIONS(TENSOR_FUNCTION_ENUMERATOR) };
#undef TENSOR_FUNCTION_ENUMERATOR

struct TensorFunctionInfo {
    const char* name;
    int arguments;
};
#define TENSOR_FUNCTION_INFO(enumerator, name, arguments) {name, arguments},
constexpr TensorFunctionInfo TENSOR_FUNCTION_INFOS[] = {TENSOR_FUNCTIONS(TENSOR_FUNCTION_INFO)};
#undef TENSOR_FUNCTION_INFO
constexpr int NUM_TENSOR_FUNCTIONS = int(sizeof(TENSOR_FUNCTION_INFOS) / sizeof(TENSOR_FUNCTION_INFOS[0]));

constexpr const TensorFunctionInfo& info_of(TensorFunction f) {
    return TENSOR_FUNCTION_INFOS[int(f)];
}

// f of one argument. out: any shape; inp broadcasts to it.
void tensor_map(Tensor out, TensorFunction f, Tensor inp, Stream stream);

// f of two arguments. out: any shape; x and y broadcast to it.
void tensor_zip(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream stream);

// f: Add, Sub, Mul or Div. out [n3, n2, n1, n0] (or fewer dimensions); x has out's shape; y [m3, m2, m1, m0], each m a
// divisor of its n, is read at index i mod m (missing dimensions are 1). If x is null, the neutral element of f, 0 or
// 1, replaces it: Add and Mul repeat y over out, Sub gives −y and Div 1/y.
void tensor_bin_bcast(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream stream);

// f: Add, Mul or Max. out has inp's shape, with 1 in dimension `axis` (0 to rank − 1). start enters each result once;
// an empty axis gives start. scratch: tensor_reduce_scratch bytes (U8).
void tensor_reduce(Tensor out, TensorFunction f, Tensor inp, int axis, float start, Tensor scratch, Stream stream);
int64_t tensor_reduce_scratch(Tensor out, Tensor inp, int axis);

// The neutral element of f: 0, 1 or −∞.
inline float tensor_reduce_start(TensorFunction f) {
    return f == TensorFunction::Add ? 0.0f : f == TensorFunction::Mul ? 1.0f : -INFINITY;
}

// out [batch…, m, p]; a [batch…, m, n]; b [batch…, n, p]; all fp32, with two dimensions or more. The batch dimensions
// of a and b broadcast to out's.
void tensor_matmul(Tensor out, Tensor a, Tensor b, Stream stream);
