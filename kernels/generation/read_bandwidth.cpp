#include "kernels/generation/read_bandwidth.h"

#include <algorithm>
#include <memory>

#include "kernels/cpu/cpu_loops.h"
#include "runtime/timing.h"

namespace {

// Four sums, so that additions do not wait for each other.
MULTIARCH float sum(const float* x, int64_t n) {
    vec16 a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i + 64 <= n; i += 64) {
        a += vec_load(x + i);
        b += vec_load(x + i + 16);
        c += vec_load(x + i + 32);
        d += vec_load(x + i + 48);
    }
    return vec_sum((a + b) + (c + d));
}

}  // namespace

double measured_read_bandwidth(Stream stream) {
    constexpr int64_t n = int64_t(1) << 26, BLOCK = 1 << 18;
    const std::unique_ptr<void, void (*)(void*)> memory(device_alloc(n * sizeof(float)), device_free);
    float* x = static_cast<float*>(memory.get());
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) std::fill_n(x + i, BLOCK, 1.0f);
    double best = 1e30, total = 0;
    for (int i = 0; i < 5; i++) {
        best = std::min(best, timed_ms(
                                  [&] {
#pragma omp parallel for schedule(static) reduction(+ : total)
                                      for (int64_t j = 0; j < n; j += BLOCK) total += double(sum(x + j, BLOCK));
                                  },
                                  1, stream));
    }
    require(total == 5.0 * double(n), "measured_read_bandwidth: ", total, " was read where ", 5.0 * double(n),
            " was written");
    return double(n) * sizeof(float) / (best * 1e-3);
}
