// The activation functions of the MLP by their name; gelu.h, relu2.h and swiglu.h have formulas, shapes and errors.
#pragma once

#include "kernels/activation.h"
#include "kernels/gelu.h"
#include "kernels/relu2.h"
#include "kernels/swiglu.h"

// Columns of the input of f for I columns of its output.
constexpr int64_t activation_inputs(Activation f, int64_t I) {
    return f == Activation::SwiGLU ? 2 * I : I;
}

inline void activation_forward(Activation f, const Tensor& out, const Tensor& inp, Stream stream) {
    switch (f) {
        case Activation::GELU:
            return gelu_forward(out, inp, stream);
        case Activation::ReLU2:
            return relu2_forward(out, inp, stream);
        case Activation::SwiGLU:
            return swiglu_forward(out, inp, stream);
        case Activation::None:
            throw Error("activation_forward: no activation function is given");
    }
}

// out: only of SwiGLU, the forward pass's result; or null.
inline void activation_backward(Activation f, const Tensor& dinp, const Tensor& out, const Tensor& dout,
                                const Tensor& inp, Stream stream) {
    switch (f) {
        case Activation::GELU:
            return gelu_backward(dinp, dout, inp, stream);
        case Activation::ReLU2:
            return relu2_backward(dinp, dout, inp, stream);
        case Activation::SwiGLU:
            return swiglu_backward(dinp, out, dout, inp, stream);
        case Activation::None:
            throw Error("activation_backward: no activation function is given");
    }
}
