// The head and its loss as training calls them, a chunk of tokens at a time: GPT-2 124M and 1558M, LLaMA 1B.
#include "kernels/linear_cross_entropy.h"

#include "dev/bench/bench_util.h"

namespace {

void run(benchmark::State& state, DType T, bool by_token) {
    const Stream stream = tuned_stream();
    const int64_t n = state.range(0), C = state.range(1), V = state.range(2), Vp = (V + 127) / 128 * 128;
    const BenchArray losses({n}), dinp(T, {n, C}), dweight({Vp, C}), inp(T, {n, C}), weight(T, {Vp, C}),
        logits(T, {n, Vp}), targets(BenchArray::ints({n}, int32_t(V)));
    LinearCrossEntropy head;
    head.losses = losses;
    head.dinp = dinp;
    head.dweight = dweight;
    head.inp = inp;
    head.weight = weight;
    head.targets = targets;
    head.logits = logits;
    head.V = V;
    head.accumulate = true;
    // inp may be multiplied by dloss·p(target): so it neither vanishes nor overflows
    const BenchArray dlosses({n}, 0, float(V));
    head.dloss = float(V);
    if (by_token) head.dlosses = dlosses;
    run_bench(
        state, [&] { linear_cross_entropy(head, stream); }, stream);
    report_flops(state, 6.0 * double(n) * double(C) * double(Vp), T);
}

void forward_backward(benchmark::State& state, DType T) {
    run(state, T, false);
}
// A gradient for each token: the losses, then the gradient.
void losses_gradient(benchmark::State& state, DType T) {
    run(state, T, true);
}

const Sizes CPU = {{256, 768, 50257}}, GPU = {{8192, 768, 50257}, {8192, 1600, 50257}, {4096, 2048, 128256}};
BENCH(forward_backward, {"n", "C", "V"}, CPU, GPU);
BENCH(losses_gradient, {"n", "C", "V"}, CPU, GPU);

}  // namespace
