// The activation functions of the MLP and their gradients, of one element in fp32: the formulas of gelu.h, relu2.h and
// swiglu.h. T is the dtype that results are rounded to.
#pragma once

#include "kernels/cuda/sigmoid.cuh"

namespace mlp_activation {

constexpr float CUBIC = 0.044715f, TWO_ROOT_2_OVER_PI = 1.5957691216057308f;

// ½(1 + tanh u) is σ(2u), with 2u = √(8/π)·(x + CUBIC·x³).
template <typename T>
__device__ Sigmoid sigmoid_of_2u(float x) {
    if constexpr (std::is_same_v<T, float>) return sigmoid<T>(TWO_ROOT_2_OVER_PI * (x * (1 + CUBIC * x * x)));
    constexpr float LINEAR = -LOG2E * TWO_ROOT_2_OVER_PI;
    return sigmoid_of_exponent(x * (LINEAR + CUBIC * LINEAR * (x * x)) - 24);
}

template <typename T>
struct GeluForward {
    __device__ float operator()(float x) const { return x * sigmoid_of_2u<T>(x).value; }
};

template <typename T>
struct GeluBackward {
    __device__ float operator()(float dout, float x) const {
        const Sigmoid s = sigmoid_of_2u<T>(x);
        const float slope = TWO_ROOT_2_OVER_PI + 3 * CUBIC * TWO_ROOT_2_OVER_PI * (x * x);  // of 2u
        return dout * (s.value + x * slope * s.derivative);
    }
};

struct Relu2Forward {
    __device__ float operator()(float x) const { return relu2(x); }
};

struct Relu2Backward {
    __device__ float operator()(float dout, float x) const { return dout * (relu(x) + relu(x)); }
};

template <typename T>
struct SwigluForward {
    __device__ float operator()(float gate, float up) const { return gate * sigmoid<T>(gate).value * up; }
};

template <typename T>
struct SwigluBackward {
    // The gradients of gate and up.
    __device__ float2 operator()(float dout, float gate, float up) const {
        const Sigmoid s = sigmoid<T>(gate);
        const float silu = gate * s.value;
        return {dout * up * (s.value + silu * s.complement), dout * silu};
    }
};

}  // namespace mlp_activation
