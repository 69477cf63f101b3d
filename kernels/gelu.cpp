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
    const int64_t N = inp.shape[0], C = inp.shape[1];
    check_matrix(op, "out", out, N, C);
    float* o = out.as<float>();
    const float* x = inp.as<float>();
    const int64_t so = row_stride(out), sx = row_stride(inp);
    parallel_chunks(N, C, out.contiguous() && inp.contiguous(), [=](int64_t row, int64_t begin, int64_t end) {
        forward_row(o + row * so + begin, x + row * sx + begin, end - begin);
    });
}

void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, Stream) {
    const char* op = "gelu_backward";
    check_matrix(op, "inp", inp);
    const int64_t N = inp.shape[0], C = inp.shape[1];
    check_matrix(op, "dinp", dinp, N, C);
    check_matrix(op, "dout", dout, N, C);
    float* d = dinp.as<float>();
    const float *g = dout.as<float>(), *x = inp.as<float>();
    const int64_t sd = row_stride(dinp), sg = row_stride(dout), sx = row_stride(inp);
    const bool flat = dinp.contiguous() && dout.contiguous() && inp.contiguous();
    parallel_chunks(N, C, flat, [=](int64_t row, int64_t begin, int64_t end) {
        backward_row(d + row * sd + begin, g + row * sg + begin, x + row * sx + begin, end - begin);
    });
}
