#include "kernels/activation.h"

#include "kernels/activation_check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

// σ(x) and σ(−x) = 1 − σ(x), and σ'(x), none by a subtraction: with e = exp(−|x|) they are 1/(1 + e), e/(1 + e) and
// e/(1 + e)², which don't cancel in the tails.
struct Sigmoid {
    vec16 value, complement, derivative;
};

ALWAYS_INLINE Sigmoid sigmoid(vec16 x) {
    const vec16 e = vec_exp(-vec_abs(x)), r = 1.0f / (1.0f + e), er = e * r;
    return {x < 0.0f ? er : r, x < 0.0f ? r : er, er * r};
}

constexpr float CUBIC = 0.044715f, TWO_ROOT_2_OVER_PI = 1.5957691216057308f;

// ½(1 + tanh u) is σ(2u).
ALWAYS_INLINE Sigmoid sigmoid_of_2u(vec16 x) {
    return sigmoid(TWO_ROOT_2_OVER_PI * x * (1.0f + CUBIC * x * x));
}

MULTIARCH void gelu_row(float* out, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 x = vec_load_lanes(inp + i, lanes);
        vec_store_lanes(out + i, x * sigmoid_of_2u(x).value, lanes);
    });
}

MULTIARCH void gelu_gradient_row(float* dinp, const float* dout, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 x = vec_load_lanes(inp + i, lanes);
        const Sigmoid s = sigmoid_of_2u(x);
        const vec16 slope = s.value + x * s.derivative * (TWO_ROOT_2_OVER_PI * (1.0f + 3 * CUBIC * x * x));
        vec_store_lanes(dinp + i, vec_load_lanes(dout + i, lanes) * slope, lanes);
    });
}

// Written so that a NaN stays one: max(x, 0) would hide it.
ALWAYS_INLINE vec16 positive_part(vec16 x) {
    return x < 0.0f ? vec16{} : x;
}

MULTIARCH void relu2_row(float* out, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 r = positive_part(vec_load_lanes(inp + i, lanes));
        vec_store_lanes(out + i, r * r, lanes);
    });
}

MULTIARCH void relu2_gradient_row(float* dinp, const float* dout, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 r = positive_part(vec_load_lanes(inp + i, lanes));
        vec_store_lanes(dinp + i, vec_load_lanes(dout + i, lanes) * (r + r), lanes);
    });
}

MULTIARCH void swiglu_row(float* out, const float* gate, const float* up, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(gate + i, lanes);
        vec_store_lanes(out + i, g * sigmoid(g).value * vec_load_lanes(up + i, lanes), lanes);
    });
}

// out: null, or it receives the forward pass.
MULTIARCH void swiglu_gradient_row(float* dgate, float* dup, float* out, const float* dout, const float* gate,
                                   const float* up, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(gate + i, lanes), u = vec_load_lanes(up + i, lanes);
        const vec16 d = vec_load_lanes(dout + i, lanes);
        const Sigmoid s = sigmoid(g);
        vec_store_lanes(dgate + i, d * u * s.value * (1.0f + g * s.complement), lanes);
        vec_store_lanes(dup + i, d * g * s.value, lanes);
        if (out) vec_store_lanes(out + i, g * s.value * u, lanes);
    });
}

// elementwise() for gated functions: row_function is called with the halves gate and up of a row.
template <typename RowFunction>
void gated_forward(RowFunction row_function, const Tensor& out, const Tensor& inp) {
    const Rows<float> o(out);
    const Rows<const float> x(inp);
    const int64_t I = out.shape[1];
    parallel_chunks(out.shape[0], I, false, [=](int64_t row, int64_t begin, int64_t end) {
        const float* gate = x[row] + begin;
        row_function(o[row] + begin, gate, gate + I, end - begin);
    });
}

template <typename RowFunction>
void gated_backward(RowFunction row_function, const Tensor& dinp, const Tensor& out, const Tensor& dout,
                    const Tensor& inp) {
    const Rows<float> dx(dinp), o(out);
    const Rows<const float> d(dout), x(inp);
    const int64_t I = dout.shape[1];
    parallel_chunks(dout.shape[0], I, false, [=](int64_t row, int64_t begin, int64_t end) {
        const float* gate = x[row] + begin;
        float* dgate = dx[row] + begin;
        row_function(dgate, dgate + I, o[row] ? o[row] + begin : nullptr, d[row] + begin, gate, gate + I, end - begin);
    });
}

}  // namespace

void activation_forward(Activation f, Tensor out, Tensor inp, Stream) {
    check_activation_forward("activation_forward", f, out, inp, DType::F32);
    switch (f) {
        case Activation::GELU:
            return elementwise(gelu_row, out, inp);
        case Activation::SwiGLU:
            return gated_forward(swiglu_row, out, inp);
        case Activation::ReLU2:
            return elementwise(relu2_row, out, inp);
        case Activation::None:  // an error above
            return;
    }
}

void activation_backward(Activation f, Tensor dinp, Tensor out, Tensor dout, Tensor inp, Stream) {
    check_activation_backward("activation_backward", f, dinp, out, dout, inp, DType::F32);
    switch (f) {
        case Activation::GELU:
            return elementwise(gelu_gradient_row, dinp, dout, inp);
        case Activation::SwiGLU:
            return gated_backward(swiglu_gradient_row, dinp, out, dout, inp);
        case Activation::ReLU2:
            return elementwise(relu2_gradient_row, dinp, dout, inp);
        case Activation::None:  // an error above
            return;
    }
}
