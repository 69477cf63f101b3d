#include "kernels/relu2.h"

#include "dev/bench_util.h"

namespace {

void forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out({N, C}), inp({N, C}, 2);
    for (auto _ : state) relu2_forward(out, inp, Stream{});
    report_bytes(state, 8.0 * double(N * C));
}

// In place, as the driver runs it: reads 2 matrices, writes 1.
void backward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dinp({N, C}), inp({N, C}, 2);
    for (auto _ : state) relu2_backward(dinp, dinp, inp, Stream{});
    report_bytes(state, 12.0 * double(N * C));
}

BENCH(forward)->ArgNames({"N", "C"})->Args({256, 3072})->Args({4096, 3072});
BENCH(backward)->ArgNames({"N", "C"})->Args({256, 3072})->Args({4096, 3072});

}  // namespace
