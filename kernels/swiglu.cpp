#include "kernels/swiglu.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

// σ(x) and σ(−x) = 1 − σ(x), neither by a subtraction: with e = exp(−|x|) they are 1/(1 + e) and e/(1 + e).
struct Sigmoid {
    vec16 value, complement;
};

ALWAYS_INLINE Sigmoid sigmoid(vec16 x) {
    const vec16 e = vec_exp(-vec_abs(x)), r = 1.0f / (1.0f + e), er = e * r;
    return {x < 0.0f ? er : r, x < 0.0f ? r : er};
}

MULTIARCH void forward_row(float* out, const float* gate, const float* up, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(gate + i, lanes);
        vec_store_lanes(out + i, g * sigmoid(g).value * vec_load_lanes(up + i, lanes), lanes);
    });
}

// out: null, or it receives the forward pass.
MULTIARCH void backward_row(float* dgate, float* dup, float* out, const float* dout, const float* gate, const float* up,
                            int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(gate + i, lanes), u = vec_load_lanes(up + i, lanes);
        const vec16 d = vec_load_lanes(dout + i, lanes);
        const Sigmoid s = sigmoid(g);
        vec_store_lanes(dgate + i, d * u * s.value * (1.0f + g * s.complement), lanes);
        vec_store_lanes(dup + i, d * g * s.value, lanes);
        if (out) vec_store_lanes(out + i, g * s.value * u, lanes);
    });
}

}  // namespace

void swiglu_forward(Tensor out, Tensor gate_up, Stream) {
    const char* op = "swiglu_forward";
    check_matrix(op, "out", out);
    const int64_t N = out.shape[0], I = out.shape[1];
    check_matrix(op, "gate_up", gate_up, N, 2 * I);
    float* o = out.as<float>();
    const float* gu = gate_up.as<float>();
    const int64_t so = row_stride(out), sg = row_stride(gate_up);
    parallel_chunks(N, I, false, [=](int64_t row, int64_t begin, int64_t end) {
        const float* gate = gu + row * sg + begin;
        forward_row(o + row * so + begin, gate, gate + I, end - begin);
    });
}

void swiglu_backward(Tensor dgate_up, Tensor out, Tensor dout, Tensor gate_up, Stream) {
    const char* op = "swiglu_backward";
    check_matrix(op, "dout", dout);
    const int64_t N = dout.shape[0], I = dout.shape[1];
    check_matrix(op, "dgate_up", dgate_up, N, 2 * I);
    check_matrix(op, "out", out, N, I, Given::Optional);
    check_matrix(op, "gate_up", gate_up, N, 2 * I);
    float *dgu = dgate_up.as<float>(), *o = out.as<float>();
    const float *g = dout.as<float>(), *gu = gate_up.as<float>();
    const int64_t sd = row_stride(dgate_up), so = row_stride(out), sg = row_stride(dout), su = row_stride(gate_up);
    parallel_chunks(N, I, false, [=](int64_t row, int64_t begin, int64_t end) {
        const float* gate = gu + row * su + begin;
        float* dgate = dgu + row * sd + begin;
        backward_row(dgate, dgate + I, o ? o + row * so + begin : nullptr, g + row * sg + begin, gate, gate + I,
                     end - begin);
    });
}
