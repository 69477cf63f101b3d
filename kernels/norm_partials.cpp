#include "kernels/norm_partials.h"

namespace {

MULTIARCH void add_row(float* out, const float* inp, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(out + i, vec_load_lanes(out + i, lanes) + vec_load_lanes(inp + i, lanes), lanes);
    });
}

}  // namespace

void norm_partials_sum(float* out, const float* partials, int64_t N, int64_t width, int64_t offset, int64_t C,
                       bool accumulate) {
    constexpr int64_t COLUMNS = 256;  // of a task: threads own columns
#pragma omp parallel for schedule(static) if (norm_partitions(N) * C > PARALLEL_MIN)
    for (int64_t c = 0; c < C; c += COLUMNS) {
        const int64_t n = std::min(COLUMNS, C - c);
        if (!accumulate) std::fill_n(out + c, n, 0.0f);
        for (int64_t p = 0; p < norm_partitions(N); p++) add_row(out + c, partials + p * width + offset + c, n);
    }
}
