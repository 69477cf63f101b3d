// The checks of an activation function's tensors for both backends; ops that apply one inside have its input too. They
// return I, the columns of the output.
#pragma once

#include "kernels/activation.h"
#include "kernels/check.h"

inline int64_t check_activation_input(const char* op, const char* name, Activation f, const Tensor& inp, DType dtype) {
    check_matrix(op, name, inp, dtype);
    require(f != Activation::None, op, ": no activation function is given");
    const int64_t per_output = activation_inputs(f, 1);
    require(inp.shape[1] % per_output == 0, op, ": ", name, " is ", dtype_name(dtype), " ", shape_string(inp),
            ", expected an even number of columns");
    return inp.shape[1] / per_output;
}

inline int64_t check_activation_forward(const char* op, Activation f, const Tensor& out, const Tensor& inp,
                                        DType dtype) {
    const int64_t I = check_activation_input(op, "inp", f, inp, dtype);
    check_matrix(op, "out", out, inp.shape[0], I, Given::Required, dtype);
    return I;
}

inline int64_t check_activation_backward(const char* op, Activation f, const Tensor& dinp, const Tensor& out,
                                         const Tensor& dout, const Tensor& inp, DType dtype) {
    const int64_t I = check_activation_input(op, "inp", f, inp, dtype), N = inp.shape[0];
    check_matrix(op, "dinp", dinp, N, inp.shape[1], Given::Required, dtype);
    require(!out || is_gated(f), op, ": out is computed for gated functions only");
    check_matrix(op, "out", out, N, I, Given::Optional, dtype);
    check_matrix(op, "dout", dout, N, I, Given::Required, dtype);
    return I;
}
