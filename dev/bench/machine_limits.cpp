#include "dev/bench/machine_limits.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/cpu/cpu_loops.h"
#include "runtime/device/device.h"

namespace {

template <typename F>
double best_seconds(int repeats, F f) {
    double best = 1e30;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        f();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

MULTIARCH void triad(float* a, const float* b, const float* c, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(a + i, vec_load_lanes(b + i, lanes) + 3.0f * vec_load_lanes(c + i, lanes), lanes);
    });
}

// CHAINS independent accumulators hide the latency of an FMA. The caller must use the result, or the compiler removes
// the loop.
template <int CHAINS>
ALWAYS_INLINE float multiply_add(int64_t steps, float factor, float term) {
    vec16 x[CHAINS];
    for (int k = 0; k < CHAINS; k++) x[k] = vec_set(float(k));  // all different, or the compiler keeps one
    for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 12
        for (int k = 0; k < CHAINS; k++) x[k] = x[k] * factor + term;
    vec16 sum = {};
    for (int k = 0; k < CHAINS; k++) sum += x[k];
    return vec_sum(sum);
}

float multiply_add_6(int64_t steps, float factor, float term) {
    return multiply_add<6>(steps, factor, term);
}
WITH_AVX512 float multiply_add_12(int64_t steps, float factor, float term) {
    return multiply_add<12>(steps, factor, term);
}

MachineLimits measure() {
    const int64_t n = int64_t(1) << 24, piece = n / omp_get_max_threads() / 16 * 16;  // 64 MB arrays
    float *a = static_cast<float*>(device_alloc(size_t(n) * 4)), *b = static_cast<float*>(device_alloc(size_t(n) * 4)),
          *c = static_cast<float*>(device_alloc(size_t(n) * 4));
    const int threads = omp_get_max_threads();
    const auto on_all_threads = [&](auto f) {
#pragma omp parallel for schedule(static)
        for (int t = 0; t < threads; t++) f(t * piece);
    };
    on_all_threads([&](int64_t at) {
        std::fill_n(a + at, piece, 1.0f);
        std::fill_n(b + at, piece, 1.0f);
        std::fill_n(c + at, piece, 1.0f);
    });
    const double bytes = double(piece) * threads * 4;
    MachineLimits limits{};
    limits.copy = 2 * bytes / best_seconds(5, [&] {
                      on_all_threads([&](int64_t at) { std::memcpy(a + at, b + at, size_t(piece) * 4); });
                  });
    limits.triad =
        3 * bytes / best_seconds(5, [&] { on_all_threads([&](int64_t at) { triad(a + at, b + at, c + at, piece); }); });
    const int64_t steps = 2000000;
    const int chains = has_avx512() ? 12 : 6;
    const double seconds = best_seconds(5, [&] {
        on_all_threads([&](int64_t at) {
            a[at] = (has_avx512() ? multiply_add_12 : multiply_add_6)(steps, 0.5f + b[at] * 0.1f, c[at]);
        });
    });
    limits.flops = 2.0 * 16 * chains * double(steps) * threads / seconds;
    for (float* p : {a, b, c}) device_free(p);
    return limits;
}

}  // namespace

const MachineLimits& machine_limits() {
    static const MachineLimits limits = measure();
    return limits;
}
