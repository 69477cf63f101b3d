// The products of GPT-2 124M at 256 and 1024 rows of tokens, forward and backward, and the built-in GEMM beside the
// library.
#include "kernels/matmul.h"

#include "dev/bench_util.h"
#ifndef USE_CUDA
#include "kernels/gemm_blocked.h"
#endif

namespace {

void forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2);
    const BenchArray out({N, OC}), inp({N, C}), weight({OC, C}), bias({OC});
    for (auto _ : state) matmul_forward(out, inp, weight, bias, Stream{});
    report_flops(state, 2.0 * double(N) * double(C) * double(OC));
}

void backward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2);
    const BenchArray dinp({N, C}), dweight({OC, C}), dbias({OC}), dout({N, OC}), inp({N, C}), weight({OC, C});
    for (auto _ : state) {
        matmul_backward_input(dinp, dout, weight, false, Stream{});
        matmul_backward_weight(dweight, dbias, dout, inp, false, Stream{});
    }
    report_flops(state, 4.0 * double(N) * double(C) * double(OC));
}

void shapes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"N", "C", "OC"})->UseRealTime()->Unit(benchmark::kMillisecond);
    for (const int64_t N : {256, 1024})
        for (const auto& s :
             {std::pair<int64_t, int64_t>{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}, {768, 50304}})
            if (N == 256 || s.second < 50000) b->Args({N, s.first, s.second});
    b->Args({768, 128, 512});
}

BENCHMARK(forward)->Apply(shapes);
BENCHMARK(backward)->Apply(shapes);

#ifndef USE_CUDA
void built_in_gemm_forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2);
    const BenchArray out({N, OC}), inp({N, C}), weight({OC, C});
    for (auto _ : state)
        gemm_blocked(false, true, N, OC, C, inp.tensor().as<float>(), C, weight.tensor().as<float>(), C, false,
                     out.tensor().as<float>(), OC);
    report_flops(state, 2.0 * double(N) * double(C) * double(OC));
}
BENCHMARK(built_in_gemm_forward)->Apply(shapes);
#endif

}  // namespace
