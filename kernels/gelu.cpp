#include "kernels/gelu.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

constexpr float CUBIC = 0.044715f, TWO_ROOT_2_OVER_PI = 1.5957691216057308f;

// ½(1 + tanh u) is the logistic function of 2u. With e = exp(−|2u|) neither it nor its derivative cancels in the tails:
// σ = 1/(1 + e) or e/(1 + e),  σ' = σ(1 − σ) = e/(1 + e)².
struct Logistic {
    vec16 value, derivative;
};

ALWAYS_INLINE Logistic logistic_of_2u(vec16 x) {
    const vec16 z = TWO_ROOT_2_OVER_PI * x * (1.0f + CUBIC * x * x);
    const vec16 e = vec_exp(-vec_abs(z)), r = 1.0f / (1.0f + e), er = e * r;
    return {z < 0.0f ? er : r, er * r};
}

MULTIARCH void forward_row(float* out, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 x = vec_load_lanes(inp + i, lanes);
        vec_store_lanes(out + i, x * logistic_of_2u(x).value, lanes);
    });
}

MULTIARCH void backward_row(float* dinp, const float* dout, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 x = vec_load_lanes(inp + i, lanes);
        const Logistic s = logistic_of_2u(x);
        const vec16 slope = s.value + x * s.derivative * (TWO_ROOT_2_OVER_PI * (1.0f + 3 * CUBIC * x * x));
        vec_store_lanes(dinp + i, vec_load_lanes(dout + i, lanes) * slope, lanes);
    });
}

}  // namespace

void gelu_forward(Tensor out, Tensor inp, Stream) {
    const char* op = "gelu_forward";
    check_matrix(op, "inp", inp);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1]);
    elementwise(forward_row, out, inp);
}

void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, Stream) {
    const char* op = "gelu_backward";
    check_matrix(op, "inp", inp);
    check_matrix(op, "dinp", dinp, inp.shape[0], inp.shape[1]);
    check_matrix(op, "dout", dout, inp.shape[0], inp.shape[1]);
    elementwise(backward_row, dinp, dout, inp);
}
