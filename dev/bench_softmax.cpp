#include "kernels/softmax.h"

#include "dev/bench_util.h"

namespace {

// Reads 1 matrix, writes 1.
void forward(benchmark::State& state) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray out({R, K}), inp({R, K});
    for (auto _ : state) softmax_forward(out, inp, Tensor{}, R, 0.125f, false, Stream{});
    report_bytes(state, 8.0 * double(R * K));
}

// Half of the scores are read; the zeros of the other half are written.
void forward_causal(benchmark::State& state) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray out({R, K}), inp({R, K});
    for (auto _ : state) softmax_forward(out, inp, Tensor{}, K, 0.125f, true, Stream{});
    report_bytes(state, 6.0 * double(R * K));
}

// Reads 2 matrices, writes 1.
void backward(benchmark::State& state) {
    const int64_t R = state.range(0), K = state.range(1);
    const BenchArray dinp({R, K}), dout({R, K}), out({R, K});
    for (auto _ : state) softmax_backward(dinp, dout, out, 0.125f, Stream{});
    report_bytes(state, 12.0 * double(R * K));
}

BENCH(forward)->ArgNames({"R", "K"})->Args({3072, 64})->Args({12288, 1024});
BENCH(forward_causal)->ArgNames({"R", "K"})->Args({3072, 64})->Args({12288, 1024});
BENCH(backward)->ArgNames({"R", "K"})->Args({3072, 64})->Args({12288, 1024});

}  // namespace
