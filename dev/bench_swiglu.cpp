#include "kernels/swiglu.h"

#include "dev/bench_util.h"

namespace {

void forward(benchmark::State& state) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray out({N, I}), gate_up({N, 2 * I}, 2);
    for (auto _ : state) swiglu_forward(out, gate_up, Stream{});
    report_bytes(state, 12.0 * double(N * I));
}

// In place, as the driver runs it: reads 3 matrices, writes 2.
void backward(benchmark::State& state) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray gate_up({N, 2 * I}), dout({N, I});
    for (auto _ : state) swiglu_backward(gate_up, dout, gate_up, Stream{});
    report_bytes(state, 20.0 * double(N * I));
}

BENCH(forward)->ArgNames({"N", "I"})->Args({256, 2048})->Args({4096, 2048});
BENCH(backward)->ArgNames({"N", "I"})->Args({256, 2048})->Args({4096, 2048});

}  // namespace
