#include "kernels/layernorm.h"

#include "dev/bench_util.h"

namespace {

// With residual and everything stored, as in a transformer's block: reads 2 matrices, writes 2.
void forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out({N, C}), sum({N, C}), mean({N}), rstd({N}), inp({N, C}), residual({N, C}), weight({C}),
        bias({C});
    for (auto _ : state) layernorm_forward(out, sum, mean, rstd, inp, residual, weight, bias, 1e-5f, Stream{});
    report_bytes(state, 16.0 * double(N * C));
}

// In place on the residual's gradient: reads 3 matrices, writes 1.
void backward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dinp({N, C}), dweight({C}), dbias({C}), dout({N, C}), inp({N, C}), weight({C}), mean({N}),
        rstd({N});
    const BenchArray scratch = BenchArray::bytes(layernorm_backward_scratch(N, C));
    for (auto _ : state)
        layernorm_backward(dinp, dweight, dbias, dout, dinp, inp, weight, mean, rstd, scratch, false, Stream{});
    report_bytes(state, 16.0 * double(N * C));
}

BENCH(forward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768})->Args({16384, 1600});
BENCH(backward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768})->Args({16384, 1600});

}  // namespace
