#include "kernels/norm.h"

#include "dev/bench/bench_util.h"

namespace {

void forward_of(benchmark::State& state, DType T, bool with_residual) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out(T, {N, C}), sum(T, {N, C}), rstd({N}), inp(T, {N, C}), residual(T, {N, C}), weight({C});
    const Tensor none;
    run_bench(state, [&] {
        rmsnorm_forward({.out = out,
                         .sum = with_residual ? sum.tensor() : none,
                         .rstd = rstd,
                         .inp = inp,
                         .residual = with_residual ? residual.tensor() : none,
                         .weight = weight,
                         .eps = 1e-5f},
                        Stream{});
    });
    report_bytes(state, (with_residual ? 4 : 2) * out.bytes());
}

// Reads 1 matrix, writes 1.
void forward(benchmark::State& state, DType T) {
    forward_of(state, T, false);
}

// As in a transformer block: reads 2 matrices, writes 2.
void residual_forward(benchmark::State& state, DType T) {
    forward_of(state, T, true);
}

void backward_of(benchmark::State& state, DType T, bool with_sum) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dinp(T, {N, C}), dweight({C}), dsum({C}), dout(T, {N, C}), inp(T, {N, C}), weight({C}),
        rstd({N}, 0.1f, 1);
    const BenchArray scratch = BenchArray::bytes(rmsnorm_backward_scratch(N, C));
    run_bench(state, [&] {
        rmsnorm_backward({.dinp = dinp,
                          .dweight = dweight,
                          .dsum = with_sum ? dsum.tensor() : Tensor{},
                          .dout = dout,
                          .dresidual = dinp,
                          .inp = inp,
                          .weight = weight,
                          .rstd = rstd,
                          .scratch = scratch},
                         Stream{});
    });
    report_bytes(state, 4 * dinp.bytes());
}

// In place on the gradient of the residual: reads 3 matrices, writes 1.
void backward(benchmark::State& state, DType T) {
    backward_of(state, T, false);
}

// The same with dsum, the sum over the rows of dinp.
void backward_dsum(benchmark::State& state, DType T) {
    backward_of(state, T, true);
}

const Sizes CPU = {{256, 768}, {16384, 768}, {16384, 2048}};
const Sizes GPU = {{65536, 768}, {65536, 1024}, {65536, 1600}, {65536, 2048}};
BENCH(forward, {"N", "C"}, CPU, GPU);
BENCH(residual_forward, {"N", "C"}, CPU, GPU);
BENCH(backward, {"N", "C"}, CPU, GPU);
BENCH(backward_dsum, {"N", "C"}, CPU, GPU);

}  // namespace
