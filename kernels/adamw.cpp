#include "kernels/adamw.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "kernels/adamw_check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

// The factors of an update, computed in double: the powers of β and 1 − β would lose digits in fp32.
struct Factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float grad_scale;
    float step_size;   // lr / (1 − β1^t)
    float root_scale;  // 1 / √(1 − β2^t)
    float decay;       // lr · weight_decay
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

void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream) {
    const char* op = "adamw_update";
    require(!params_T, op, ": params_T is given; the CPU computes with the fp32 parameters themselves");
    check_adamw(op, params, params_T, m, v, grads, segments, num_segments, scalars);
    const int64_t n = grads.shape[0];

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
    f.step_size = float(s.lr / (1 - std::pow(beta1, double(s.t))));
    f.root_scale = float(1 / std::sqrt(1 - std::pow(beta2, double(s.t))));
    f.decay = 0;

    float *p = params.as<float>(), *pm = m.as<float>(), *pv = v.as<float>();
    const float* g = grads.as<float>();
    // Each thread has an equal part of the arena and updates the elements of each segment that are in that part.
#pragma omp parallel firstprivate(f) if (n > PARALLEL_MIN)
    {
        const int64_t vectors = (n + 15) / 16, threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t low = vectors * thread / threads * 16, high = std::min(n, vectors * (thread + 1) / threads * 16);
        for (int64_t i = 0; i < num_segments; i++) {
            const int64_t begin = std::max(low, segments[i].begin), end = std::min(high, segments[i].end);
            f.decay = s.lr * segments[i].weight_decay;
            const int64_t offset = segments[i].fp32_begin - segments[i].begin;
            if (begin < end) update(p + begin + offset, pm + begin, pv + begin, g + begin, end - begin, f);
        }
    }
}
