#include "kernels/gelu.h"

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/elementwise.cuh"

namespace {

constexpr float CUBIC = 0.044715f, TWO_ROOT_2_OVER_PI = 1.5957691216057308f;

// ½(1 + tanh u) is σ(2u).
template <typename T>
__device__ Sigmoid sigmoid_of_2u(float x) {
    return sigmoid<T>(TWO_ROOT_2_OVER_PI * x * (1 + CUBIC * x * x));
}

template <typename T>
struct Forward {
    __device__ float operator()(float x) const { return x * sigmoid_of_2u<T>(x).value; }
};

template <typename T>
struct Backward {
    __device__ float operator()(float dout, float x) const {
        const Sigmoid s = sigmoid_of_2u<T>(x);
        return dout * (s.value + x * s.derivative * (TWO_ROOT_2_OVER_PI * (1 + 3 * CUBIC * x * x)));
    }
};

}  // namespace

void gelu_forward(Tensor out, Tensor inp, Stream stream) {
    const char* op = "gelu_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1], Given::Required, dtype);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_elementwise<T>(op, out, Forward<T>{}, stream, inp);
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
        launch_elementwise<T>(op, dinp, Backward<T>{}, stream, dout, inp);
    });
}
