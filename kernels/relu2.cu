#include "kernels/relu2.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/mlp_activation.cuh"

void relu2_forward(Tensor out, Tensor inp, Stream stream) {
    const char* op = "relu2_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) {
        launch_elementwise<decltype(zero)>(op, out, mlp_activation::Relu2Forward{}, stream, inp);
    });
}

void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "relu2_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "dinp", dinp, inp.shape[0], inp.shape[1], Given::Required, dtype);
    check_matrix(op, "dout", dout, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) {
        launch_elementwise<decltype(zero)>(op, dinp, mlp_activation::Relu2Backward{}, stream, dout, inp);
    });
}
