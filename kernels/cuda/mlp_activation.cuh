// The activation functions of the MLP and their gradients, of one element in fp32: the formulas of activation.h. First
// those of training, then those of generation. T is the dtype that results are rounded to.
#pragma once

#include <type_traits>

#include "kernels/activation.h"
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

// NaN stays NaN, which fmaxf(x, 0) would drop.
__device__ __forceinline__ float relu(float x) {
    return x < 0 ? 0 : x;
}

struct Relu2Forward {
    __device__ float operator()(float x) const { return relu(x) * relu(x); }
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

template <typename ForwardFunction, typename BackwardFunction>
struct Functions {
    using Forward = ForwardFunction;
    using Backward = BackwardFunction;
};

// Calls run(Functions<...>{}) with those of f, which is not None: the caller has checked it.
template <typename T, typename Run>
void dispatch(Activation f, Run run) {
    switch (f) {
        case Activation::GELU:
            return run(Functions<GeluForward<T>, GeluBackward<T>>{});
        case Activation::SwiGLU:
            return run(Functions<SwigluForward<T>, SwigluBackward<T>>{});
        case Activation::ReLU2:
            return run(Functions<Relu2Forward, Relu2Backward>{});
        case Activation::None:
            return;
    }
}

// Whether Forward takes gate and up.
template <typename Forward>
constexpr bool GATED = std::is_invocable_v<Forward, float, float>;

}  // namespace mlp_activation

// How the functions of generation compute exp and the division.
enum class Math {
    Exact,  // to about one unit in the last place of fp32
    Fast,   // by the special function unit, to a few units: for results that are rounded to 16 bits
};

// x·σ(z)
template <Math MATH>
__device__ __forceinline__ float times_sigmoid(float x, float z) {
    if constexpr (MATH == Math::Exact) return x / (1 + expf(-z));
    return x * __fdividef(1.0f, 1.0f + exp2_for<bf16>(-LOG2E * z));
}

// -Wswitch is the host compiler's, and nvcc has no such warning: count the cases of device code.
static_assert(size_t(Activation::None) == 3, "a new activation function needs a case of both activate()");

// f(x), if f is not gated; x for None.
template <Math MATH = Math::Exact>
__device__ __forceinline__ float activate(Activation f, float x) {
    switch (f) {
        case Activation::GELU:  // ½x(1 + tanh u) = x·σ(2u)
            return times_sigmoid<MATH>(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
        case Activation::ReLU2:
            return mlp_activation::Relu2Forward{}(x);
        case Activation::SwiGLU:
        case Activation::None:
            break;
    }
    return x;
}

// f(gate, up), if f is gated.
template <Math MATH = Math::Exact>
__device__ __forceinline__ float activate(Activation f, float gate, float up) {
    switch (f) {
        case Activation::SwiGLU:
            return times_sigmoid<MATH>(gate, gate) * up;
        case Activation::GELU:
        case Activation::ReLU2:
        case Activation::None:
            break;
    }
    return up;
}
