#include "kernels/rope.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/rotate_head.h"

namespace {

MULTIARCH void rotate(float* x, const float* pairs, int64_t half, float sign) {
    rotate_head(x, pairs, half, sign);
}

}  // namespace

void rope(Tensor x, Tensor positions, Tensor table, bool backward, Stream) {
    const char* op = "rope";
    require(x && x.rank == 3, op, ": x is ", shape_string(x), ", expected [N, H, HS]");
    require(table && table.rank == 3, op, ": table is ", shape_string(table), ", expected [T, R/2, 2]");
    const int64_t N = x.shape[0], H = x.shape[1], HS = x.shape[2], T = table.shape[0], half = table.shape[1];
    check_tensor(op, "x", x, DType::F32, {N, H, HS});
    check_tensor(op, "positions", positions, DType::I32, {N});
    check_tensor(op, "table", table, DType::F32, {T, half, 2});
    check_contiguous(op, "table", table);
    require(2 * half <= HS, op, ": the table rotates ", 2 * half, " channels, the head has ", HS);
    check_positions(op, positions, T);
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
