#include "kernels/linear_attention/decay_gate.h"

#include "dev/bench/bench_util.h"

namespace {

void forward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1), H = state.range(2);
    const BenchArray gate({N, H}), inp(T, {N, C}), weight(T, {H, C}, 0.02f), bias({H}, 1, 5);
    run_bench(state, [&] { decay_gate_forward(gate, inp, weight, bias, Stream{}); });
    report_bytes(state, gate.bytes() + inp.bytes());
}

void backward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), H = state.range(2);
    const BenchArray dx(T, {N, H}), dgate({N, H}), gate({N, H}, 0.01f, -0.05f);
    run_bench(state, [&] { decay_gate_backward(dx, dgate, gate, Stream{}); });
    report_bytes(state, dx.bytes() + dgate.bytes() + gate.bytes());
}

const Sizes CPU = {{4096, 768, 12}}, GPU = {{65536, 768, 12}};
BENCH(forward, {"N", "C", "H"}, CPU, GPU);
BENCH(backward, {"N", "C", "H"}, CPU, GPU);

}  // namespace
