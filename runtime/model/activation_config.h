// The activation functions of the MLP (kernels/activation.h has the formulas): plain data that the config reads and
// kernels take. A new one is an enumerator before None and its name (CONTRIBUTING.md has the recipe).
#pragma once

#include <cstdint>

#include "runtime/names.h"

enum class Activation : uint8_t { GELU, SwiGLU, ReLU2, None };

// As --mlp and config.json write them. None is no choice: a matmul without an activation function.
constexpr Names<3> ACTIVATION_NAMES = {"gelu", "swiglu", "relu2"};
static_assert(ACTIVATION_NAMES.size() == size_t(Activation::None), "each activation function has a name");

// Whether f has two inputs for each output: gate and up.
constexpr bool is_gated(Activation f) {
    switch (f) {
        case Activation::SwiGLU:
            return true;
        case Activation::GELU:
        case Activation::ReLU2:
        case Activation::None:
            break;
    }
    return false;
}

// Columns of the input of f for I columns of its output.
constexpr int64_t activation_inputs(Activation f, int64_t I) {
    return is_gated(f) ? 2 * I : I;
}
