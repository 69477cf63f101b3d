// The checks of linear's arguments, its scratch and its separate norm, for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/generation/linear.h"
#include "kernels/nf4.h"
#include "kernels/norm.h"
#include "kernels/packed_weight_check.h"

struct LinearSizes {
    int64_t N, C, OC, columns;  // columns of out
};

inline int64_t linear_outputs(const LinearWeights& w) {
    if (w.packed) return w.packed->rows.shape[0];
    return w.nf4 ? w.nf4->rows : w.weight.shape[0];
}

// All but the scratch.
inline LinearSizes check_linear(const char* op, DType dtype, const LinearOutput& output, const Tensor& inp,
                                const InputNorm& norm, const LinearWeights& weights) {
    const auto& [out, activation, residual] = output;
    const Tensor &weight = weights.weight, &bias = weights.bias;
    require(!weights.lora.a, op, ": weights with adapters; merge the adapters first");
    check_matrix(op, "inp", inp, dtype);
    const bool in_dtype = !weights.packed && !weights.nf4;
    if (in_dtype) check_matrix(op, "weight", weight, dtype);
    LinearSizes z{inp.shape[0], inp.shape[1], linear_outputs(weights), linear_outputs(weights)};
    if (is_gated(activation)) {
        require(z.OC % 2 == 0, op, ": weight has ", z.OC,
                " rows; SwiGLU needs an even number, half for gate and half for up");
        z.columns = z.OC / 2;
    }
    require(activation == Activation::None || !residual, op, ": an activation and a residual can't be combined");
    check_matrix(op, "out", out, z.N, z.columns, Given::Required, dtype);
    if (in_dtype) check_matrix(op, "weight", weight, z.OC, z.C, Given::Required, dtype);
    if (weights.packed) check_packed(op, *weights.packed, z.OC, z.C);
    if (weights.nf4)
        require(weights.nf4->cols == z.C, op, ": the NF4 weight has rows of ", weights.nf4->cols, " weights, expected ",
                z.C);
    check_tensor(op, "bias", bias, dtype, {z.OC}, Given::Optional);
    check_matrix(op, "residual", residual, z.N, z.columns, Given::Optional, dtype);
    check_tensor(op, "norm.weight", norm.weight, DType::F32, {z.C}, Given::Optional);
    check_tensor(op, "norm.bias", norm.bias, DType::F32, {z.C}, Given::Optional);
    return z;
}

inline LinearSizes check_linear(const char* op, DType dtype, const LinearOutput& output, const Tensor& inp,
                                const InputNorm& norm, const LinearWeights& weights, const Tensor& scratch) {
    const LinearSizes z = check_linear(op, dtype, output, inp, norm, weights);
    check_scratch(op, scratch,
                  weights.nf4 ? linear_nf4_scratch(z.N, z.C, z.OC, dtype)
                              : linear_scratch(z.N, z.C, z.OC, dtype, weights.packed));
    return z;
}

// scratch: the normalised input, then the layer's output before the activation, then what packed or NF4 weights need:
// on the CPU the quantised input or the dequantised weights, on a GPU a tile of dequantised weights.
inline int64_t linear_normed_bytes(int64_t N, int64_t C, DType dtype) {
    return (N * C * dtype_size(dtype) + 255) / 256 * 256;
}
inline int64_t linear_pre_activation_bytes(int64_t N, int64_t OC, DType dtype) {
    return (N * OC * dtype_size(dtype) + 255) / 256 * 256;
}
inline Tensor linear_pre_activation(const Tensor& scratch, const LinearSizes& z, const Tensor& like) {
    return make_tensor(static_cast<char*>(scratch.data) + linear_normed_bytes(z.N, z.C, like.dtype), like.dtype,
                       like.device, {z.N, z.OC});
}

inline Tensor linear_packed_scratch(const Tensor& scratch, const LinearSizes& z, DType dtype) {
    return scratch.rows(linear_scratch(z.N, z.C, z.OC, dtype), scratch.shape[0]);
}

// Normalises inp to the scratch and returns the result.
inline Tensor linear_normed(const Tensor& scratch, const LinearSizes& z, const Tensor& inp, const InputNorm& norm,
                            Stream stream) {
    const Tensor x = make_tensor(scratch.data, inp.dtype, inp.device, {z.N, z.C});
    const NormForward a{.out = x, .inp = inp, .weight = norm.weight, .bias = norm.bias, .eps = norm.eps};
    if (norm.centred)
        layernorm_forward(a, stream);
    else
        rmsnorm_forward(a, stream);
    return x;
}
