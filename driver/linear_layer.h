// A linear layer of a block (qkv, proj, fc, fcproj): out = inp·weightᵀ + bias, with what the run adds to that. Its
// weight is a LinearWeights (runtime/model/linear_weight.h): in the model's dtype or packed, with or without adapters.
//
//   LoRA   out += s·B·A·inp for each adapter. Only A and B have gradients; the weight is frozen (models/lora.h).
//   QLoRA  the weight comes out of NF4 at each use (driver/nf4_base.h).
//   packed for inference: kernels/generation/linear.h, as when it generates.
//   fp8    inp, weight and the gradient of out are quantised (driver/fp8_layer.h); adapters stay in the model's dtype.
//
// Shapes: inp [n, inputs], out and dout [n, outputs], weight [outputs, inputs], bias [outputs], all in the model's
// dtype. fp8 codes are bytes: rows [n, inputs], columns [inputs, n].
#pragma once

#include "driver/fp8_layer.h"
#include "driver/pass.h"
#include "kernels/matmul.h"

// The weight of a linear layer as a matmul in the model's dtype reads it, valid until the next call.
Tensor linear_weight(const Block& b, Role role);

// out = inp·weightᵀ + bias, plus add if that is given (only where shape.adds_in_matmul). fp8: columns receives the
// quantised input for the backward pass. The rows of fcproj's input are quantised already (quantise_input), and inp is
// needed for adapters alone.
void linear_forward(const Block& b, Role role, Tensor out, Tensor inp, Tensor columns = {}, Tensor add = {});

// fc and the activation function: pre = inp·weightᵀ + bias, out = f(pre), in one matmul where that is faster; not in
// fp8.
void linear_forward_activation(const Block& b, Role role, Tensor out, Tensor pre, Tensor inp);

// The gradients of a linear layer's weight, or its adapters, of its bias and input. fp8: inp_t, the quantised columns,
// replaces inp where the weight is trained. dinp may be null where it is frozen. sums_bias: false if the caller
// computes the gradient of the bias.
void linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t,
                     bool sums_bias = true);

// fcproj and the activation function before it: the gradients of fcproj's weight or adapters and those in `gradient`,
// of the activation's input b.a.fc, in one matmul where that is faster; not in fp8. With adapters the forward pass, or
// the recomputation, has kept b.a.act.
void linear_backward_activation(const Block& b, Role role, const ActivationGradient& gradient, Tensor dout);

// The parts of linear_backward() for callers that compute the rest in other ways.

// The gradients of the weight and, unless dbias is null, of the bias; nothing if the weight is frozen.
void weight_backward(const Block& b, Role role, Tensor dout, Tensor inp, Tensor dbias);
// The gradient of the layer's bias; null if it has none. Also null for proj and fcproj: the backward pass of the next
// norm computes their bias gradients (NormGradients::dbias_before).
Tensor bias_gradient(const Block& b, Role role);

// out = inp·weightᵀ + bias + add with a packed weight (driver/packed_weights.h); add may be null.
void packed_forward(const Pass& p, Tensor out, Tensor inp, const LinearWeights& weights, Tensor add = {});

// fp8: the same, and the gradient of the input. produce quantises dout, which need not be given without adapters;
// inp_t: the quantised columns of inp, which are not needed where the weight is frozen.
void fp8_linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t,
                         const Fp8Producer& produce);
