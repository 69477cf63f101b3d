#include "kernels/rope.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/rotate_head.h"
#include "kernels/rope_check.h"

namespace {

MULTIARCH void rotate(float* x, const float* pairs, int64_t half, float sign) {
    rotate_head(x, pairs, half, sign);
}

}  // namespace

void rope(Tensor x, Tensor positions, Tensor table, bool backward, Stream) {
    const char* op = "rope";
    const RopeSizes z = check_rope(op, DType::F32, x, positions, table);
    check_positions(op, positions, z.T);
    const int64_t N = z.N, H = z.H, half = z.pairs;
    const int32_t* position = positions.as<int32_t>();
    const float* pairs = table.as<float>();
#pragma omp parallel for schedule(static) if (N * H * half > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t h = 0; h < H; h++) {
            rotate(x.as<float>() + n * x.stride[0] + h * x.stride[1], pairs + position[n] * 2 * half, half,
                   backward ? -1.0f : 1.0f);
        }
    }
}
