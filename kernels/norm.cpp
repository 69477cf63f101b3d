#include "kernels/norm.h"

#include <cmath>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/norm_check.h"
#include "kernels/norm_partials.h"

namespace {

struct RowStatistics {
    float mean, rstd;
};

struct ForwardRow {
    float *out, *sum;
    const float *inp, *residual, *weight, *bias;
    int64_t C;
    float eps;
};

struct BackwardRow {
    float* dinp;
    float *dweight, *dbias, *dsum;  // this partition's partial sums; dsum: null if not wanted
    const float *dout, *dresidual, *inp, *weight;
    float mean, rstd;
    int64_t C;
};

template <bool CENTRED>
ALWAYS_INLINE vec16 load_centred(const float* x, float mean, int64_t lanes) {
    const vec16 v = vec_load_lanes(x, lanes);
    if constexpr (CENTRED)
        return v - mean;
    else
        return v;
}

// LayerNorm (CENTRED) takes another pass over the row, which is in L1 after the first: the variance from x − mean and
// not from Σx² − (Σx)²/C, which cancels where the mean is large. ADD_AFTER: the residual is added behind the norm.
template <bool CENTRED, bool ADD_AFTER>
ALWAYS_INLINE RowStatistics forward_row(ForwardRow row) {
    const float* x = row.inp;
    vec16 total = {}, squares = {};
    const auto add = [&](vec16 v) INLINE_LAMBDA {
        if constexpr (CENTRED)
            total += v;
        else
            squares += v * v;
    };
    if (row.residual && !ADD_AFTER) {
        // Without `sum`, x is stored in out, where the passes below read it.
        float* stored = row.sum ? row.sum : row.out;
        for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(row.inp + c, lanes) + vec_load_lanes(row.residual + c, lanes);
            vec_store_lanes(stored + c, v, lanes);
            add(v);
        });
        x = stored;
    } else {
        for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            const vec16 v = vec_load_lanes(row.inp + c, lanes);
            if (row.sum) vec_store_lanes(row.sum + c, v, lanes);
            add(v);
        });
    }
    float mean = 0;
    if constexpr (CENTRED) {
        mean = vec_sum(total) / float(row.C);
        for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
            vec16 d = vec_load_lanes(x + c, lanes) - mean;
            if (lanes < 16) d = vec_load_partial(reinterpret_cast<const float*>(&d), lanes);  // −mean in no lane
            squares += d * d;
        });
    }
    const float rstd = 1 / std::sqrt(vec_sum(squares) / float(row.C) + row.eps);
    for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec16 y = load_centred<CENTRED>(x + c, mean, lanes) * rstd * vec_load_lanes(row.weight + c, lanes);
        if (CENTRED && row.bias) y += vec_load_lanes(row.bias + c, lanes);
        if (ADD_AFTER) y = vec_load_lanes(row.residual + c, lanes) + y;
        vec_store_lanes(row.out + c, y, lanes);
    });
    return {mean, rstd};
}

template <bool CENTRED>
ALWAYS_INLINE void backward_row(BackwardRow row) {
    vec16 sum_d = {}, sum_dx = {};
    for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 d = vec_load_lanes(row.dout + c, lanes) * vec_load_lanes(row.weight + c, lanes);
        if constexpr (CENTRED) sum_d += d;
        sum_dx += d * (load_centred<CENTRED>(row.inp + c, row.mean, lanes) * row.rstd);
    });
    const float mean_d = CENTRED ? vec_sum(sum_d) / float(row.C) : 0, mean_dx = vec_sum(sum_dx) / float(row.C);
    for_each_vector(row.C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(row.dout + c, lanes);
        const vec16 x_hat = load_centred<CENTRED>(row.inp + c, row.mean, lanes) * row.rstd;
        vec16 dx = g * vec_load_lanes(row.weight + c, lanes);
        if constexpr (CENTRED) dx -= mean_d;
        dx = (dx - x_hat * mean_dx) * row.rstd;
        if (row.dresidual) dx += vec_load_lanes(row.dresidual + c, lanes);
        vec_store_lanes(row.dinp + c, dx, lanes);
        vec_store_lanes(row.dweight + c, vec_load_lanes(row.dweight + c, lanes) + g * x_hat, lanes);
        if constexpr (CENTRED) vec_store_lanes(row.dbias + c, vec_load_lanes(row.dbias + c, lanes) + g, lanes);
        if (row.dsum) vec_store_lanes(row.dsum + c, vec_load_lanes(row.dsum + c, lanes) + dx, lanes);
    });
}

// Templates have no clones, so each instance has a function that has them. The row is passed by reference, because
// copying it took 15% of the time of RMSNorm with 768 channels.
MULTIARCH RowStatistics layernorm_row(const ForwardRow& row) {
    return forward_row<true, false>(row);
}
MULTIARCH RowStatistics rmsnorm_row(const ForwardRow& row) {
    return forward_row<false, false>(row);
}
MULTIARCH RowStatistics rmsnorm_add_row(const ForwardRow& row) {
    return forward_row<false, true>(row);
}
MULTIARCH void layernorm_backward_row(const BackwardRow& row) {
    backward_row<true>(row);
}
MULTIARCH void rmsnorm_backward_row(const BackwardRow& row) {
    backward_row<false>(row);
}

void forward(const NormForward& a, NormSizes z, RowStatistics (*row_function)(const ForwardRow&)) {
    const Rows<float> out(a.out), sum(a.sum);
    const Rows<const float> inp(a.inp), residual(a.residual);
    float *mean = a.mean.as<float>(), *rstd = a.rstd.as<float>();
    const float *weight = a.weight.as<float>(), *bias = a.bias.as<float>();
#pragma omp parallel for schedule(static) if (z.N * z.C > PARALLEL_MIN)
    for (int64_t n = 0; n < z.N; n++) {
        const RowStatistics statistics = row_function({out[n], sum[n], inp[n], residual[n], weight, bias, z.C, a.eps});
        if (mean) mean[n] = statistics.mean;
        if (rstd) rstd[n] = statistics.rstd;
    }
}

void backward(const NormBackward& a, NormSizes z, bool centred, void (*row_function)(const BackwardRow&)) {
    const Rows<float> dinp(a.dinp);
    const Rows<const float> dout(a.dout), dresidual(a.dresidual), inp(a.inp);
    const float *weight = a.weight.as<float>(), *mean = a.mean.as<float>(), *rstd = a.rstd.as<float>();
    float* partials = reinterpret_cast<float*>(a.scratch.as<uint8_t>());
    // A partial: dweight, dbias if centred, dsum if wanted.
    const bool with_sum = bool(a.dsum);
    const int64_t C = z.C, at_sum = (centred ? 2 : 1) * C, width = at_sum + (with_sum ? C : 0);
    norm_partials(partials, z.N, width, [=](int64_t n, float* partial) {
        row_function({.dinp = dinp[n],
                      .dweight = partial,
                      .dbias = centred ? partial + C : nullptr,
                      .dsum = with_sum ? partial + at_sum : nullptr,
                      .dout = dout[n],
                      .dresidual = dresidual[n],
                      .inp = inp[n],
                      .weight = weight,
                      .mean = centred ? mean[n] : 0,
                      .rstd = rstd[n],
                      .C = C});
    });
    if (a.dweight) norm_partials_sum(a.dweight.as<float>(), partials, z.N, width, 0, C, a.accumulate);
    if (a.dbias) norm_partials_sum(a.dbias.as<float>(), partials, z.N, width, C, C, a.accumulate);
    if (a.dsum) norm_partials_sum(a.dsum.as<float>(), partials, z.N, width, at_sum, C, a.accumulate);
}

}  // namespace

void layernorm_forward(const NormForward& a, Stream) {
    forward(a, check_norm("layernorm_forward", a, DType::F32, true, false), layernorm_row);
}

void rmsnorm_forward(const NormForward& a, Stream) {
    forward(a, check_norm("rmsnorm_forward", a, DType::F32, false, false), rmsnorm_row);
}

void rmsnorm_add_forward(const NormForward& a, Stream) {
    forward(a, check_norm("rmsnorm_add_forward", a, DType::F32, false, true), rmsnorm_add_row);
}

void layernorm_backward(const NormBackward& a, Stream) {
    backward(a, check_norm("layernorm_backward", a, DType::F32, true), true, layernorm_backward_row);
}

void rmsnorm_backward(const NormBackward& a, Stream) {
    backward(a, check_norm("rmsnorm_backward", a, DType::F32, false), false, rmsnorm_backward_row);
}
