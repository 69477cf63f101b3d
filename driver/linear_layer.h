// A linear layer of a block (qkv, proj, fc, fcproj): out = inp·weightᵀ + bias, with what the run adds to that. Its
// weight is a LinearWeights (runtime/model/linear_weight.h): in the model's dtype or packed, with or without adapters.
//
//   LoRA   out += s·B·A·inp for each adapter. Only A and B have gradients; the weight is frozen (models/lora.h).
//   QLoRA  the weight comes out of NF4 at each use (driver/nf4_base.h).
//   packed for inference: kernels/generation/linear.h, as when it generates.
//   fp8    inp, weight and the gradient of out are quantised (driver/fp8_state.h). The two gradients' matmuls read them
//          transposed, because cuBLASLt multiplies fp8 codes only along their rows.
//
// Shapes: inp [n, inputs], out and dout [n, outputs], weight [outputs, inputs], bias [outputs], all in the model's
// dtype. fp8 codes are bytes: rows [n, inputs], columns [inputs, n].
#pragma once

#include <functional>

#include "driver/pass.h"

// The weight of a linear layer as a matmul in the model's dtype reads it, valid until the next call.
Tensor linear_weight(const Block& b, Role role);

// out = inp·weightᵀ + bias, plus add if that is given (only where shape.adds_in_matmul). fp8: columns receives the
// quantised input for the backward pass; without inp the rows are quantised already (quantise_input).
void linear_forward(const Block& b, Role role, Tensor out, Tensor inp, Tensor columns = {}, Tensor add = {});

// The gradients of a linear layer's weight, or its adapters, of its bias and input. fp8: inp_t, the quantised columns,
// replaces inp, and dinp is written over. dinp may be null where the weight is frozen. sums_bias: false if the caller
// computes the gradient of the bias.
void linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t,
                     bool sums_bias = true);

// The parts of linear_backward() for callers that compute the rest in other ways.

// The gradients of the weight and, unless dbias is null, of the bias; nothing if the weight is frozen.
void weight_backward(const Block& b, Role role, Tensor dout, Tensor inp, Tensor dbias);
// The gradient of the layer's bias; null if it has none. Also null for proj and fcproj: the backward pass of the next
// norm computes their bias gradients (NormGradients::dbias_before).
Tensor bias_gradient(const Block& b, Role role);

// out = inp·weightᵀ + bias + add with a packed weight (driver/packed_weights.h); add may be null.
void packed_forward(const Pass& p, Tensor out, Tensor inp, const LinearWeights& weights, Tensor add = {});

// Writes an operand in fp8; it may be called twice, the first time to measure (Fp8State::quantise).
using Fp8Producer = std::function<void(const Fp8Output&)>;
// Quantises the input of a linear layer [n, inputs]: its rows into acts.fp8_rows if the matmul follows (rows), and its
// columns for the backward pass where they are given.
void quantise_input(const Block& b, Role role, bool rows, Tensor columns, const Fp8Producer& produce);
void quantise_input(const Block& b, Role role, Tensor inp, bool rows, Tensor columns);
// fp8: the gradients of the weight and the input. produce quantises the gradient of the output.
void fp8_linear_backward(const Block& b, Role role, Tensor dinp, Tensor inp_t, const Fp8Producer& produce);
