#include "kernels/rmsnorm.h"

#include <cmath>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/norm_check.h"
#include "kernels/norm_partials.h"

namespace {

MULTIARCH float forward_row(float* out, float* sum, const float* inp, const float* residual, const float* weight,
                            int64_t C, float eps) {
    vec16 squares = {};
    if (residual) {
        // Without `sum`, x is stored in out, where the pass below reads it.
        float* x = sum ? sum : out;
        for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(inp + c, lanes) + vec_load_lanes(residual + c, lanes);
            vec_store_lanes(x + c, v, lanes);
            squares += v * v;
        });
        inp = x;
    } else {
        for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(inp + c, lanes);
            if (sum) vec_store_lanes(sum + c, v, lanes);
            squares += v * v;
        });
    }
    const float rstd = 1 / std::sqrt(vec_sum(squares) / float(C) + eps);
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(out + c, vec_load_lanes(inp + c, lanes) * rstd * vec_load_lanes(weight + c, lanes), lanes);
    });
    return rstd;
}

// out = residual + the normalised row.
MULTIARCH float add_row(float* out, const float* inp, const float* residual, const float* weight, int64_t C,
                        float eps) {
    vec16 squares = {};
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 v = vec_load_lanes(inp + c, lanes);
        squares += v * v;
    });
    const float rstd = 1 / std::sqrt(vec_sum(squares) / float(C) + eps);
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 y = vec_load_lanes(inp + c, lanes) * rstd * vec_load_lanes(weight + c, lanes);
        vec_store_lanes(out + c, vec_load_lanes(residual + c, lanes) + y, lanes);
    });
    return rstd;
}

// dweight and dsum (null: not wanted) are this partition's partial sums.
MULTIARCH void backward_row(float* dinp, float* dweight, float* dsum, const float* dout, const float* dresidual,
                            const float* inp, const float* weight, float rstd, int64_t C) {
    vec16 sum_dx = {};
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 d = vec_load_lanes(dout + c, lanes) * vec_load_lanes(weight + c, lanes);
        sum_dx += d * (vec_load_lanes(inp + c, lanes) * rstd);
    });
    const float mean_dx = vec_sum(sum_dx) / float(C);
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(dout + c, lanes), x_hat = vec_load_lanes(inp + c, lanes) * rstd;
        vec16 dx = (g * vec_load_lanes(weight + c, lanes) - x_hat * mean_dx) * rstd;
        if (dresidual) dx += vec_load_lanes(dresidual + c, lanes);
        vec_store_lanes(dinp + c, dx, lanes);
        vec_store_lanes(dweight + c, vec_load_lanes(dweight + c, lanes) + g * x_hat, lanes);
        if (dsum) vec_store_lanes(dsum + c, vec_load_lanes(dsum + c, lanes) + dx, lanes);
    });
}

}  // namespace

void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps,
                     Stream) {
    const char* op = "rmsnorm_forward";
    const NormSizes z = check_norm_forward(op, DType::F32, out, sum, rstd, inp, residual, weight);
    const int64_t N = z.N, C = z.C;
    const Rows<float> o(out), s(sum);
    const Rows<const float> x(inp), r(residual);
    float* rs = rstd.as<float>();
    const float* w = weight.as<float>();
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        const float row_rstd = forward_row(o[n], s[n], x[n], r[n], w, C, eps);
        if (rs) rs[n] = row_rstd;
    }
}

void rmsnorm_add_forward(Tensor out, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps, Stream) {
    const char* op = "rmsnorm_add_forward";
    const NormSizes z = check_norm_forward(op, DType::F32, out, {}, rstd, inp, residual, weight, Given::Required);
    const int64_t N = z.N, C = z.C;
    const Rows<float> o(out);
    const Rows<const float> x(inp), r(residual);
    float* rs = rstd.as<float>();
    const float* w = weight.as<float>();
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        const float row_rstd = add_row(o[n], x[n], r[n], w, C, eps);
        if (rs) rs[n] = row_rstd;
    }
}

void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dsum, Tensor dout, Tensor dresidual, Tensor inp,
                      Tensor weight, Tensor rstd, Tensor scratch, bool accumulate, Stream) {
    const char* op = "rmsnorm_backward";
    const NormSizes z = check_norm_backward(op, DType::F32, dinp, dweight, dsum, dout, dresidual, inp, weight, rstd);
    const int64_t N = z.N, C = z.C;
    check_scratch(op, scratch, rmsnorm_backward_scratch(N, C));
    const Rows<float> dx(dinp);
    const Rows<const float> g(dout), dr(dresidual), x(inp);
    const float *w = weight.as<float>(), *rs = rstd.as<float>();
    float* partials = reinterpret_cast<float*>(scratch.as<uint8_t>());
    const bool sum = bool(dsum);
    const int64_t width = (sum ? 2 : 1) * C;
    norm_partials(partials, N, width, [=](int64_t n, float* partial) {
        backward_row(dx[n], partial, sum ? partial + C : nullptr, g[n], dr[n], x[n], w, rs[n], C);
    });
    if (dweight) norm_partials_sum(dweight.as<float>(), partials, N, width, 0, C, accumulate);
    if (dsum) norm_partials_sum(dsum.as<float>(), partials, N, width, C, C, accumulate);
}
