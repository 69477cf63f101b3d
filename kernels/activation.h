// The activation functions of the MLP; gelu.h, swiglu.h and relu2.h have the formulas.
#pragma once

#include <cstdint>

enum class Activation : uint8_t { None, GELU, SwiGLU, ReLU2 };
