#include "kernels/rmsnorm.h"

#include "dev/bench_util.h"

namespace {

// With residual and everything stored, as in a transformer's block: reads 2 matrices, writes 2.
void forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out({N, C}), sum({N, C}), rstd({N}), inp({N, C}), residual({N, C}), weight({C});
    for (auto _ : state) rmsnorm_forward(out, sum, rstd, inp, residual, weight, 1e-5f, Stream{});
    report_bytes(state, 16.0 * double(N * C));
}

// In place on the residual's gradient: reads 3 matrices, writes 1.
void backward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dinp({N, C}), dweight({C}), dout({N, C}), inp({N, C}), weight({C}), rstd({N});
    const BenchArray scratch = BenchArray::bytes(rmsnorm_backward_scratch(N, C));
    for (auto _ : state) rmsnorm_backward(dinp, dweight, dout, dinp, inp, weight, rstd, scratch, false, Stream{});
    report_bytes(state, 16.0 * double(N * C));
}

BENCH(forward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768})->Args({16384, 2048});
BENCH(backward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768})->Args({16384, 2048});

}  // namespace
