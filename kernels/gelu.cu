#include "kernels/gelu.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/mlp_activation.cuh"

void gelu_forward(Tensor out, Tensor inp, Stream stream) {
    const char* op = "gelu_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_elementwise<T>(op, out, mlp_activation::GeluForward<T>{}, stream, inp);
    });
}

void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "gelu_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "dinp", dinp, inp.shape[0], inp.shape[1], Given::Required, dtype);
    check_matrix(op, "dout", dout, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_elementwise<T>(op, dinp, mlp_activation::GeluBackward<T>{}, stream, dout, inp);
    });
}
