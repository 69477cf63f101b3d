#include "kernels/adamw.h"

#include <cmath>

#include "kernels/adamw_check.h"
#include "kernels/cpu/bf16_elements.h"
#include "kernels/cpu/param_update_loop.h"

namespace {

// The factors of an update, computed in double: the powers of β and 1 − β would lose digits in fp32.
struct Factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float grad_scale;
    float root_scale;  // 1 / √(1 − β2^t)
    // of a segment
    float step_size;  // lr / (1 − β1^t)
    float decay;      // lr · weight_decay
};

// The compiler turns the loop into one vsqrtps; there is no operator for it.
ALWAYS_INLINE vec16 vec_sqrt(vec16 x) {
    vec16 root;
    for (int lane = 0; lane < 16; lane++) root[lane] = std::sqrt(x[lane]);
    return root;
}

MULTIARCH void update(float* params, float* m, float* v, const float* grads, int64_t n, Factors f) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 g = vec_load_lanes(grads + i, lanes) * f.grad_scale, p = vec_load_lanes(params + i, lanes);
        const vec16 mi = f.beta1 * vec_load_lanes(m + i, lanes) + f.one_minus_beta1 * g;
        const vec16 vi = f.beta2 * vec_load_lanes(v + i, lanes) + f.one_minus_beta2 * (g * g);
        const vec16 adam = f.step_size * mi / (vec_sqrt(vi) * f.root_scale + f.eps);
        vec_store_lanes(m + i, mi, lanes);
        vec_store_lanes(v + i, vi, lanes);
        vec_store_lanes(params + i, p - (adam + f.decay * p), lanes);
    });
}

}  // namespace

void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const ParamSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream) {
    const char* op = "adamw_update";
    require(!params_T, op, ": params_T is given; the CPU computes with the fp32 parameters themselves");
    const int64_t n = check_adamw(op, params, params_T, m, v, grads, segments, num_segments, scalars);

    const StepScalars& s = *reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>());
    if (s.skip) return;
    require(s.t >= 1, op, ": t is ", s.t, ", expected the number of this update, 1 or more");
    const double beta1 = options.beta1, beta2 = options.beta2;
    Factors f;
    f.beta1 = options.beta1;
    f.one_minus_beta1 = float(1 - beta1);
    f.beta2 = options.beta2;
    f.one_minus_beta2 = float(1 - beta2);
    f.eps = options.eps;
    f.grad_scale = s.grad_scale;
    f.root_scale = float(1 / std::sqrt(1 - std::pow(beta2, double(s.t))));
    const double step_size = s.lr / (1 - std::pow(beta1, double(s.t)));

    float* p = params.as<float>();
    parallel_segments(n, segments, num_segments, [&](const ParamSegment& segment, int64_t begin, int64_t end) {
        Factors mine = f;
        mine.step_size = float(step_size * segment.lr_scale);
        mine.decay = s.lr * segment.lr_scale * segment.weight_decay;
        const int64_t to_v = segment.v_begin < 0 ? 0 : segment.v_begin - segment.begin;
        for_rounding_chunks(m, grads, begin, end, [&](int64_t i, int64_t last) {
            float m_buffer[ROUNDING_CHUNK], v_buffer[ROUNDING_CHUNK], g_buffer[ROUNDING_CHUNK];
            const int64_t count = last - i;
            const FloatValues mi(m, i, count, m_buffer), vi(v, i + to_v, count, v_buffer), g(grads, i, count, g_buffer);
            update(p + i + segment.fp32_begin - segment.begin, mi.values(), vi.values(), g.values(), count, mine);
            mi.store(options.seed, uint64_t(s.t), segment, i, Rounded::M);
            vi.store(options.seed, uint64_t(s.t), segment, i, Rounded::V);
        });
    });
}
