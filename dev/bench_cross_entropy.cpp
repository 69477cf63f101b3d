#include "kernels/cross_entropy.h"

#include "dev/bench_util.h"

namespace {

void forward(benchmark::State& state) {
    const int64_t n = state.range(0), V = state.range(1), Vp = (V + 127) / 128 * 128;
    const BenchArray losses({n}), logits({n, Vp}), targets = BenchArray::ints({n}, int32_t(V));
    for (auto _ : state) cross_entropy_forward(losses, logits, targets, V, Stream{});
    report_bytes(state, 4.0 * double(n * Vp));
}

void forward_backward(benchmark::State& state) {
    const int64_t n = state.range(0), V = state.range(1), Vp = (V + 127) / 128 * 128;
    const BenchArray losses({n}), logits({n, Vp}), targets = BenchArray::ints({n}, int32_t(V));
    for (auto _ : state) cross_entropy_forward_backward(losses, logits, targets, V, 1e-3f, Stream{});
    report_bytes(state, 8.0 * double(n * Vp));
}

BENCH(forward)->ArgNames({"n", "V"})->Args({768, 4096})->Args({1024, 50257});
BENCH(forward_backward)->ArgNames({"n", "V"})->Args({768, 4096})->Args({1024, 50257});

}  // namespace
