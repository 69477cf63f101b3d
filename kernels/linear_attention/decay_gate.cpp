#include "kernels/linear_attention/decay_gate.h"

#include <cmath>

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"

namespace {

MULTIARCH float dot(const float* a, const float* b, int64_t n) {
    return vec_dot(a, b, n);
}

}  // namespace

void decay_gate_forward(Tensor gate, Tensor inp, Tensor weight, Tensor bias, Stream) {
    const char* op = "decay_gate_forward";
    check_matrix(op, "inp", inp);
    check_matrix(op, "weight", weight);
    const int64_t N = inp.shape[0], C = inp.shape[1], H = weight.shape[0];
    check_matrix(op, "weight", weight, H, C);
    check_tensor(op, "bias", bias, DType::F32, {H});
    check_matrix(op, "gate", gate, N, H);
    const Rows<float> to(gate), x(inp), w(weight);
    const float* b = bias.as<float>();
#pragma omp parallel for schedule(static) if (N * C * H > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t h = 0; h < H; h++) {
            const float y = dot(x[n], w[h], C) + b[h];
            to[n][h] = std::min(y, 0.0f) - std::log1p(std::exp(-std::fabs(y)));
        }
    }
}

void decay_gate_backward(Tensor dx, Tensor dgate, Tensor gate, Stream) {
    const char* op = "decay_gate_backward";
    check_matrix(op, "gate", gate);
    const int64_t N = gate.shape[0], H = gate.shape[1];
    check_matrix(op, "dx", dx, N, H);
    check_matrix(op, "dgate", dgate, N, H);
    const Rows<float> to(dx), d(dgate), g(gate);
#pragma omp parallel for schedule(static) if (N * H > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < H; h++) to[n][h] = -d[n][h] * std::expm1(g[n][h]);
}
