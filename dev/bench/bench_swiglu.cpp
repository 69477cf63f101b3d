#include "kernels/swiglu.h"

#include "dev/bench/bench_util.h"

namespace {

void forward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray out(T, {N, I}), gate_up(T, {N, 2 * I}, 2);
    run_bench(state, [&] { swiglu_forward(out, gate_up, Stream{}); });
    report_bytes(state, out.bytes() + gate_up.bytes());
}

// In place, as the driver runs it: reads 3 matrices, writes 2.
void backward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray gate_up(T, {N, 2 * I}), dout(T, {N, I});
    run_bench(state, [&] { swiglu_backward(gate_up, {}, dout, gate_up, Stream{}); });
    report_bytes(state, 2 * gate_up.bytes() + dout.bytes());
}

const Sizes CPU = {{256, 2048}, {4096, 2048}}, GPU = {{65536, 2048}, {16384, 8192}};
BENCH(forward, {"N", "I"}, CPU, GPU);
BENCH(backward, {"N", "I"}, CPU, GPU);

}  // namespace
