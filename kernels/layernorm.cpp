#include "kernels/layernorm.h"

#include <cmath>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/norm_check.h"
#include "kernels/norm_partials.h"

namespace {

struct RowStatistics {
    float mean, rstd;
};

// Two passes over a row, which is in L1 after the first: the variance from x − mean and not from Σx² − (Σx)²/C, which
// cancels where the mean is large.
MULTIARCH RowStatistics forward_row(float* out, float* sum, const float* inp, const float* residual,
                                    const float* weight, const float* bias, int64_t C, float eps) {
    vec16 total = {};
    if (residual) {
        // Without `sum`, x is stored in out, where the passes below read it.
        float* x = sum ? sum : out;
        for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(inp + c, lanes) + vec_load_lanes(residual + c, lanes);
            vec_store_lanes(x + c, v, lanes);
            total += v;
        });
        inp = x;
    } else {
        for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(inp + c, lanes);
            if (sum) vec_store_lanes(sum + c, v, lanes);
            total += v;
        });
    }
    const float mean = vec_sum(total) / float(C);

    vec16 squares = {};
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec16 d = vec_load_lanes(inp + c, lanes) - mean;
        if (lanes < 16) d = vec_load_partial(reinterpret_cast<const float*>(&d), lanes);  // −mean in no lane
        squares += d * d;
    });
    const float rstd = 1 / std::sqrt(vec_sum(squares) / float(C) + eps);

    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec16 y = (vec_load_lanes(inp + c, lanes) - mean) * rstd * vec_load_lanes(weight + c, lanes);
        if (bias) y += vec_load_lanes(bias + c, lanes);
        vec_store_lanes(out + c, y, lanes);
    });
    return {mean, rstd};
}

// dweight, dbias and dsum (null: not wanted) are this partition's partial sums.
MULTIARCH void backward_row(float* dinp, float* dweight, float* dbias, float* dsum, const float* dout,
                            const float* dresidual, const float* inp, const float* weight, float mean, float rstd,
                            int64_t C) {
    vec16 sum_d = {}, sum_dx = {};
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 d = vec_load_lanes(dout + c, lanes) * vec_load_lanes(weight + c, lanes);
        sum_d += d;
        sum_dx += d * ((vec_load_lanes(inp + c, lanes) - mean) * rstd);
    });
    const float mean_d = vec_sum(sum_d) / float(C), mean_dx = vec_sum(sum_dx) / float(C);
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(dout + c, lanes);
        const vec16 x_hat = (vec_load_lanes(inp + c, lanes) - mean) * rstd;
        vec16 dx = (g * vec_load_lanes(weight + c, lanes) - mean_d - x_hat * mean_dx) * rstd;
        if (dresidual) dx += vec_load_lanes(dresidual + c, lanes);
        vec_store_lanes(dinp + c, dx, lanes);
        vec_store_lanes(dweight + c, vec_load_lanes(dweight + c, lanes) + g * x_hat, lanes);
        vec_store_lanes(dbias + c, vec_load_lanes(dbias + c, lanes) + g, lanes);
        if (dsum) vec_store_lanes(dsum + c, vec_load_lanes(dsum + c, lanes) + dx, lanes);
    });
}

}  // namespace

void layernorm_forward(Tensor out, Tensor sum, Tensor mean, Tensor rstd, Tensor inp, Tensor residual, Tensor weight,
                       Tensor bias, float eps, Stream) {
    const char* op = "layernorm_forward";
    const NormSizes z = check_norm_forward(op, DType::F32, out, sum, rstd, inp, residual, weight);
    const int64_t N = z.N, C = z.C;
    check_tensor(op, "mean", mean, DType::F32, {N}, Given::Optional);
    check_tensor(op, "bias", bias, DType::F32, {C}, Given::Optional);
    const Rows<float> o(out), s(sum);
    const Rows<const float> x(inp), r(residual);
    float *m = mean.as<float>(), *rs = rstd.as<float>();
    const float *w = weight.as<float>(), *b = bias.as<float>();
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        const RowStatistics statistics = forward_row(o[n], s[n], x[n], r[n], w, b, C, eps);
        if (m) m[n] = statistics.mean;
        if (rs) rs[n] = statistics.rstd;
    }
}

void layernorm_backward(Tensor dinp, Tensor dweight, Tensor dbias, Tensor dsum, Tensor dout, Tensor dresidual,
                        Tensor inp, Tensor weight, Tensor mean, Tensor rstd, Tensor scratch, bool accumulate, Stream) {
    const char* op = "layernorm_backward";
    const NormSizes z = check_norm_backward(op, DType::F32, dinp, dweight, dsum, dout, dresidual, inp, weight, rstd);
    const int64_t N = z.N, C = z.C;
    check_tensor(op, "dbias", dbias, DType::F32, {C}, Given::Optional);
    check_tensor(op, "mean", mean, DType::F32, {N});
    check_scratch(op, scratch, layernorm_backward_scratch(N, C));
    const Rows<float> dx(dinp);
    const Rows<const float> g(dout), dr(dresidual), x(inp);
    const float *w = weight.as<float>(), *m = mean.as<float>(), *rs = rstd.as<float>();
    float* partials = reinterpret_cast<float*>(scratch.as<uint8_t>());
    const bool sum = bool(dsum);
    const int64_t width = (sum ? 3 : 2) * C;
    norm_partials(partials, N, width, [=](int64_t n, float* partial) {
        backward_row(dx[n], partial, partial + C, sum ? partial + 2 * C : nullptr, g[n], dr[n], x[n], w, m[n], rs[n],
                     C);
    });
    if (dweight) norm_partials_sum(dweight.as<float>(), partials, N, width, 0, C, accumulate);
    if (dbias) norm_partials_sum(dbias.as<float>(), partials, N, width, C, C, accumulate);
    if (dsum) norm_partials_sum(dsum.as<float>(), partials, N, width, 2 * C, C, accumulate);
}
