#include "kernels/softcap.h"

#include "dev/bench/bench_util.h"

namespace {

// In place: reads and writes the logits.
void forward(benchmark::State& state, DType T) {
    const BenchArray logits(T, {state.range(0), state.range(1)}, 5);
    run_bench(state, [&] { softcap_forward(logits, {Softcap::Function::Rsqrt, 15}, Stream{}); });
    report_bytes(state, 2 * logits.bytes());
}

BENCH(forward, {"N", "V"}, {{1, 50304}, {64, 50304}}, {{1, 50304}, {64, 50304}});

}  // namespace
