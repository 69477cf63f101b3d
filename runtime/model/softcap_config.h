// A smooth bound on the logits (kernels/softcap.h has the formulas): plain data that the config reads and kernels take.
#pragma once

#include <cstdint>

#include "runtime/names.h"

struct Softcap {
    enum class Function : uint8_t { None, Tanh, Rsqrt };
    Function function = Function::None;
    float cap = 0;  // c > 0: logits stay within (−c, c)

    explicit operator bool() const { return function != Function::None; }
};

// As --softcap-function and config.json write them; none is a cap of 0.
constexpr Names<3> SOFTCAP_NAMES = {"none", "tanh", "rsqrt"};
