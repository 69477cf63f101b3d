#include "kernels/softmax.h"

#include "dev/bench/bench_util.h"

namespace {

// Reads 1 matrix, writes 1.
void forward(benchmark::State& state, DType T) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray out(T, {R, K}), inp(T, {R, K});
    run_bench(state, [&] { softmax_forward(out, inp, Tensor{}, R, 0.125f, false, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

// Half of the scores are read; the zeros of the other half are written.
void forward_causal(benchmark::State& state, DType T) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray out(T, {R, K}), inp(T, {R, K});
    run_bench(state, [&] { softmax_forward(out, inp, Tensor{}, K, 0.125f, true, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes() / 2);
}

// Reads 2 matrices, writes 1.
void backward(benchmark::State& state, DType T) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray dinp(T, {R, K}), dout(T, {R, K}), out(T, {R, K});
    run_bench(state, [&] { softmax_backward(dinp, dout, out, 0.125f, Stream{}); });
    report_bytes(state, dinp.bytes() + dout.bytes() + out.bytes());
}

const Sizes CPU = {{3072, 64}, {12288, 1024}}, GPU = {{98304, 1024}, {49152, 4096}};  // 8 sequences of 12 heads
BENCH(forward, {"R", "K"}, CPU, GPU);
BENCH(forward_causal, {"R", "K"}, CPU, GPU);
BENCH(backward, {"R", "K"}, CPU, GPU);

}  // namespace
