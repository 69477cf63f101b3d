// Activation functions of values that are known up to their magnitudes, for the tests of linear layers.
#pragma once

#include <cmath>

#include "dev/oracle/reference.h"
#include "runtime/model/activation_config.h"

// f(y), or f(y, up) of a gated f, where y is known up to y.mag. The slope of ReLU² is 0 below 0: it is taken at the
// largest y that a bf16 rounding may give, or else a result next to an exact 0 would be allowed no error.
inline reference::Value activated(Activation f, reference::Value y, reference::Value up) {
    if (f == Activation::None) return y;
    if (f == Activation::SwiGLU) {
        const reference::Logistic s = reference::logistic(y.value);
        const double silu = y.value * s.value.value, slope = s.value.value + y.value * s.derivative.value;
        return {silu * up.value, std::fabs(y.value * up.value) * s.value.mag + std::fabs(slope * up.value) * y.mag +
                                     std::fabs(silu) * up.mag};
    }
    const reference::Value z = f == Activation::GELU ? reference::gelu(y.value) : reference::relu2(y.value);
    const reference::Value slope =
        f == Activation::GELU ? reference::gelu_gradient(y.value) : reference::relu2_gradient(y.value + 0x1p-8 * y.mag);
    return {z.value, z.mag + std::fabs(slope.value) * y.mag};
}
