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
    const int64_t N = inp.shape[0], C = inp.shape[1];
    check_matrix(op, "out", out, N, C);
    float* o = out.as<float>();
    const float* x = inp.as<float>();
    const int64_t so = row_stride(out), sx = row_stride(inp);
    parallel_chunks(N, C, out.contiguous() && inp.contiguous(), [=](int64_t row, int64_t begin, int64_t end) {
        forward_row(o + row * so + begin, x + row * sx + begin, end - begin);
    });
}

void relu2_backward(Tensor dinp, Tensor dout, Tensor inp, Stream) {
    const char* op = "relu2_backward";
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
