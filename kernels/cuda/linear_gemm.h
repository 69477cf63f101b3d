// CUDA only: the GEMMs of a linear layer, with the activation function before or after it in their epilogue, and the
// checks of their arguments.
#pragma once

#include <initializer_list>
#include <optional>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/fastest_gemm.h"
#include "kernels/matmul_check.h"

// Checks the inputs of a linear layer's forward pass and returns their dtype.
inline DType check_forward(const char* op, const Tensor& inp, const Tensor& weight, const Tensor& bias) {
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "weight", weight, dtype);
    check_matrix(op, "weight", weight, weight.shape[0], inp.shape[1], Given::Required, dtype);
    check_tensor(op, "bias", bias, dtype, {weight.shape[0]}, Given::Optional);
    return dtype;
}

inline DType check_backward_input(const char* op, const Tensor& dinp, const Tensor& dout, const Tensor& weight) {
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    check_matrix(op, "weight", weight, dtype);
    check_matrix(op, "dinp", dinp, dout.shape[0], weight.shape[1], Given::Required, dtype);
    check_matrix(op, "weight", weight, dout.shape[1], weight.shape[1], Given::Required, dtype);
    return dtype;
}

// What applies an activation function, or its gradient, to a GEMM before it is stored; None: only a kernel of its own.
struct ActivationEpilogues {
    GemmEpilogue forward, forward_bias, backward;
};

inline ActivationEpilogues epilogues_of(Activation f) {
    switch (f) {
        case Activation::GELU:
            return {GemmEpilogue::Gelu, GemmEpilogue::GeluBias, GemmEpilogue::GeluBackward};
        case Activation::SwiGLU:
            return {GemmEpilogue::Swiglu, GemmEpilogue::Swiglu, GemmEpilogue::SwigluBackward};
        case Activation::ReLU2:
            return {GemmEpilogue::Relu2, GemmEpilogue::Relu2, GemmEpilogue::Relu2Backward};
        case Activation::None:
            break;
    }
    return {GemmEpilogue::None, GemmEpilogue::None, GemmEpilogue::None};
}

// Whether one kernel may compute a GEMM with an activation function. hopper_gemm() and cuBLASLt require rows of 16
// bytes. With other rows cuBLASLt would round before GELU. Its GELU is not exact to fp32, and it rejects empty
// operands.
inline bool can_fuse(std::initializer_list<Tensor> matrices) {
    bool fusable = rows_aligned(matrices);
    for (const Tensor& t : matrices)
        fusable = fusable && t.dtype != DType::F32 && t.numel() > 0 && t.shape[1] * dtype_size(t.dtype) % 16 == 0;
    return fusable;
}

// A GEMM with an activation function, whose output has N columns. Without out the key is that of contiguous rows.
inline Gemm gemm_with_activation(GemmEpilogue epilogue, const Tensor& out, int64_t N, const Tensor& a, const Tensor& b,
                                 bool transpose_b, const Tensor& bias, const Tensor& aux) {
    Gemm gemm = make_gemm(out ? out : aux, a, b, false, transpose_b, false, epilogue, bias, aux);
    gemm.key.N = N;
    if (!out) {
        gemm.key.ld_out = N;
        gemm.key.align_out = 16;
        gemm.operands.out = nullptr;
    }
    return gemm;
}

// That of matmul_backward_activation(), or nothing where no kernel may compute the function's gradient as well.
inline std::optional<Gemm> gradient_gemm(Activation f, const ActivationGradient& d, const Tensor& dout,
                                         const Tensor& weight, const Tensor& pre) {
    const bool act_fits = !d.act || (d.act.contiguous() && rows_aligned({d.act}));
    const GemmEpilogue epilogue = epilogues_of(f).backward;
    const bool fusable = epilogue != GemmEpilogue::None && act_fits;
    if (!fusable || !can_fuse({d.dpre, d.dact, pre, dout, weight})) return {};
    Gemm gemm = gemm_with_activation(epilogue, d.dpre, d.dact.shape[1], dout, weight, false, Tensor{}, pre);
    gemm.operands.act = d.act.data;
    return gemm;
}
