// The matmuls of a linear layer of a block in fp8 (driver/linear_layer.h): its operands are quantised into scratch
// (Activations::fp8_rows, fp8_columns) with the scales of driver/fp8_state.h. cuBLASLt multiplies codes only along
// their rows, so the gradients' matmuls read weight, input and the gradient of the output transposed.
//
// Frozen weights come out of driver/fp8_base.h, or straight out of NF4 (kernels/nf4.h). They have no gradients, so
// neither the columns of the input nor those of the gradient are needed.
//
// Shapes: inp [n, inputs], out and dout [n, outputs], bias [outputs]: in the model's dtype, n the tokens of the pass.
// Codes are bytes: rows [n, inputs], columns [inputs, n].
#pragma once

#include <functional>

#include "driver/pass.h"

// Writes an operand in fp8; it may be called twice, the first time to measure (Fp8State::quantise).
using Fp8Producer = std::function<void(const Fp8Output&)>;

// Quantises the input of a linear layer [n, inputs]: its rows into acts.fp8_rows if the matmul follows (rows), and its
// columns for the backward pass where they are given.
void quantise_input(const Block& b, Role role, bool rows, Tensor columns, const Fp8Producer& produce);
void quantise_input(const Block& b, Role role, Tensor inp, bool rows, Tensor columns);
// out (+)= inp·weightᵀ (+ bias, or null), after quantise_input(); not both.
void fp8_forward(const Block& b, Role role, Into out, Tensor bias);

// Quantises the gradient of the output: its rows, and its columns where the weight is trained.
void quantise_gradient(const Block& b, Role role, const Fp8Producer& produce);
// After that: dweight = doutᵀ·inp into the gradient of the weight, with the columns of inp; dinp (+)= dout·weight.
void fp8_weight_gradient(const Block& b, Role role, Tensor inp_t);
void fp8_input_gradient(const Block& b, Role role, Into dinp);

// After trained weights were loaded; update() calls them, too. All ranks call both: new scales, from the weights that
// each rank owns (Fp8State::scale_weights); then the codes that are kept, or gathered in ZeRO stage 3
// (driver/fp8_shards.h).
void scale_weights(const Context& ctx, const Model& model, const Activations& acts);
void quantise_weights(const Context& ctx, const Model& model, const Activations& acts);
