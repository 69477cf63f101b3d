#include "kernels/relu2.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

// Written so that a NaN stays one: max(x, 0) would hide it.
ALWAYS_INLINE vec16 positive_part(vec16 x) {
    return x < 0.0f ? vec16{} : x;
}

MULTIARCH void forward_row(float* out, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 r = positive_part(vec_load_lanes(inp + i, lanes));
        vec_store_lanes(out + i, r * r, lanes);
    });
}

MULTIARCH void backward_row(float* dinp, const float* dout, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 r = positive_part(vec_load_lanes(inp + i, lanes));
        vec_store_lanes(dinp + i, vec_load_lanes(dout + i, lanes) * (r + r), lanes);
    });
}

}  // namespace

void relu2_forward(Tensor out, Tensor inp, Stream) {
    const char* op = "relu2_forward";
    check_matrix(op, "inp", inp);
    check_matrix(op, "out", out, inp.shape[0], inp.shape[1]);
    elementwise(forward_row, out, inp);
}

void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream) {
    const char* op = "relu2_backward";
    check_matrix(op, "inp", inp);
    check_matrix(op, "dinp", dinp, inp.shape[0], inp.shape[1]);
    check_matrix(op, "dout", dout, inp.shape[0], inp.shape[1]);
    elementwise(backward_row, dinp, dout, inp);
}
