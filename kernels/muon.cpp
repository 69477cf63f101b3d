#include "kernels/muon.h"

#include <cmath>

#include "kernels/cpu/bf16_elements.h"
#include "kernels/cpu/param_update_loop.h"
#include "kernels/muon_check.h"

namespace {

MULTIARCH void momentum(float* updates, float* m, const float* grads, int64_t n, float mu, float one_minus_mu,
                        float grad_scale) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = one_minus_mu * (grad_scale * vec_load_lanes(grads + i, lanes));
        const vec16 mi = mu * vec_load_lanes(m + i, lanes) + g;
        vec_store_lanes(m + i, mi, lanes);
        vec_store_lanes(updates + i, mu * mi + g, lanes);
    });
}

MULTIARCH void update(float* params, const float* updates, int64_t n, float scale, float decay) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 p = vec_load_lanes(params + i, lanes);
        vec_store_lanes(params + i, p - (scale * vec_load_lanes(updates + i, lanes) + decay * p), lanes);
    });
}

MULTIARCH void scale_by(float* out, const float* x, int64_t n, float factor) {
    for_each_vector(n, [&](int64_t i, int64_t lanes)
                           INLINE_LAMBDA { vec_store_lanes(out + i, factor * vec_load_lanes(x + i, lanes), lanes); });
}

const StepScalars& step_scalars(const Tensor& scalars) {
    return *reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>());
}

}  // namespace

void muon_momentum(Tensor updates, Tensor m, Tensor grads, const MuonSegment* segments, int64_t num_segments,
                   uint64_t seed, Tensor scalars, Stream) {
    const char* op = "muon_momentum";
    const int64_t n = check_muon_momentum(op, updates, m, grads, segments, num_segments, scalars);
    const StepScalars& s = step_scalars(scalars);
    if (s.skip) return;
    float* u = updates.as<float>();
    const float one_minus_mu = float(1 - double(s.momentum));
    parallel_segments(n, segments, num_segments, [&](const MuonSegment& segment, int64_t begin, int64_t end) {
        for_rounding_chunks(m, grads, begin, end, [&](int64_t i, int64_t last) {
            float m_buffer[ROUNDING_CHUNK], g_buffer[ROUNDING_CHUNK];
            const FloatValues mi(m, i, last - i, m_buffer), g(grads, i, last - i, g_buffer);
            momentum(u + segment.update_begin + (i - segment.begin), mi.values(), g.values(), last - i, s.momentum,
                     one_minus_mu, s.grad_scale);
            mi.store(seed, uint64_t(s.t), segment, i, Rounded::M);
        });
    });
}

void muon_update(Tensor params, Tensor params_T, Tensor updates, const MuonSegment* segments, int64_t num_segments,
                 uint64_t, Tensor scalars, Stream) {
    const char* op = "muon_update";
    require(!params_T, op, ": params_T is given; the CPU computes with the fp32 parameters themselves");
    const int64_t n = check_muon_update(op, params, params_T, updates, segments, num_segments, scalars);
    const StepScalars& s = step_scalars(scalars);
    if (s.skip) return;
    float* p = params.as<float>();
    const float* u = updates.as<float>();
    parallel_segments(n, segments, num_segments, [&](const MuonSegment& segment, int64_t begin, int64_t end) {
        const float lr = s.lr * segment.lr_scale;
        const int64_t at = begin - segment.begin;
        update(p + segment.fp32_begin + at, u + segment.update_begin + at, end - begin, lr * segment.shape_scale,
               lr * segment.weight_decay);
    });
}

void normalize_matrices(Tensor out, Tensor x, double scale, Tensor scratch, Stream stream) {
    check_normalize_matrices("normalize_matrices", out, x, scratch);
    const int64_t size = x.shape[1] * x.shape[2], sum_bytes = int64_t(sizeof(double));
    const Tensor sum = make_tensor(scratch.data, DType::F64, Device::CPU, {1});
    for (int64_t i = 0; i < x.shape[0]; i++) {
        const float* from = x.as<float>() + i * size;
        float* to = out.as<float>() + i * size;
        sum_squares(sum, host_tensor(from, {size}), false, scratch.rows(sum_bytes, scratch.shape[0]), stream);
        const double norm = std::sqrt(*sum.as<double>());
        const float factor = norm > MUON_SMALLEST_NORM ? float(scale / norm) : 0;
        parallel_chunks(1, size, true, [&](int64_t, int64_t begin, int64_t end) {
            scale_by(to + begin, from + begin, end - begin, factor);
        });
    }
}
