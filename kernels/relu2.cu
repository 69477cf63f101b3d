#include "kernels/relu2.h"

#include "kernels/cuda/elementwise.cuh"

namespace {

// Written so that a NaN stays one: max(x, 0) would hide it.
__device__ float positive_part(float x) {
    return x < 0 ? 0 : x;
}

struct Forward {
    __device__ float operator()(float x) const { return positive_part(x) * positive_part(x); }
};

struct Backward {
    __device__ float operator()(float dout, float x) const { return dout * (positive_part(x) + positive_part(x)); }
};

}  // namespace

void relu2_forward(Tensor out, Tensor inp, Stream stream) {
    const char* op = "relu2_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) { launch_elementwise<decltype(zero)>(op, out, Forward{}, stream, inp); });
}

void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "relu2_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "dinp", dinp, inp.shape[0], inp.shape[1], Given::Required, dtype);
    check_matrix(op, "dout", dout, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype,
                   [&](auto zero) { launch_elementwise<decltype(zero)>(op, dinp, Backward{}, stream, dout, inp); });
}
