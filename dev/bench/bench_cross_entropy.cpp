#include "kernels/cross_entropy.h"

#include "dev/bench/bench_util.h"

namespace {

// Chunks of n tokens with padded rows, as the driver calls it.
struct Problem {
    int64_t n, V, Vp;
    BenchArray losses, logits, targets;

    Problem(const benchmark::State& state, DType T)
        : n(state.range(0)),
          V(state.range(1)),
          Vp((V + 127) / 128 * 128),
          losses({n}),
          logits(T, {n, Vp}),
          targets(BenchArray::ints({n}, int32_t(V))) {}
};

void forward(benchmark::State& state, DType T) {
    const Problem p(state, T);
    run_bench(state, [&] { cross_entropy_forward(p.losses, p.logits, p.targets, p.V, {}, Stream{}); });
    report_bytes(state, p.logits.bytes());
}

void forward_backward_of(benchmark::State& state, DType T, Softcap softcap) {
    const Problem p(state, T);
    run_bench(state,
              [&] { cross_entropy_forward_backward(p.losses, p.logits, p.targets, p.V, 1e-3f, softcap, Stream{}); });
    report_bytes(state, 2 * p.logits.bytes());
}

void forward_backward(benchmark::State& state, DType T) {
    forward_backward_of(state, T, {});
}
void forward_backward_rsqrt(benchmark::State& state, DType T) {
    forward_backward_of(state, T, {Softcap::Function::Rsqrt, 15});
}
void forward_backward_tanh(benchmark::State& state, DType T) {
    forward_backward_of(state, T, {Softcap::Function::Tanh, 15});
}

// From the losses, with a gradient for each token.
void backward(benchmark::State& state, DType T) {
    const Problem p(state, T);
    const BenchArray dlosses({p.n});
    cross_entropy_forward(p.losses, p.logits, p.targets, p.V, {}, Stream{});
    run_bench(state, [&] { cross_entropy_backward(p.logits, p.losses, dlosses, p.targets, p.V, {}, Stream{}); });
    report_bytes(state, 2 * p.logits.bytes());
}

const Sizes CPU = {{768, 4096}, {1024, 50257}}, GPU = {{8192, 50257}, {4096, 128256}};
BENCH(forward, {"n", "V"}, CPU, GPU);
BENCH(forward_backward, {"n", "V"}, CPU, GPU);
BENCH(backward, {"n", "V"}, CPU, GPU);
BENCH(forward_backward_rsqrt, {"n", "V"}, CPU, GPU);
BENCH(forward_backward_tanh, {"n", "V"}, CPU, GPU);

}  // namespace
