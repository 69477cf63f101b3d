#include "kernels/gelu.h"

#include "dev/bench/bench_util.h"

namespace {

void forward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out(T, {N, C}), inp(T, {N, C}, 2);
    run_bench(state, [&] { gelu_forward(out, inp, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

// In place, as the driver runs it: reads 2 matrices, writes 1.
void backward(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dinp(T, {N, C}), inp(T, {N, C}, 2);
    run_bench(state, [&] { gelu_backward(dinp, dinp, inp, Stream{}); });
    report_bytes(state, 2 * dinp.bytes() + inp.bytes());
}

const Sizes CPU = {{256, 3072}, {4096, 3072}}, GPU = {{65536, 3072}};
BENCH(forward, {"N", "C"}, CPU, GPU);
BENCH(backward, {"N", "C"}, CPU, GPU);

}  // namespace
