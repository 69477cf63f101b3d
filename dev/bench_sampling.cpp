#include "kernels/sampling.h"

#include "dev/bench_util.h"

namespace {

// Reads the logits once. temperature is in tenths.
void sample(benchmark::State& state) {
    const int64_t B = state.range(0), V = state.range(1);
    const BenchArray ids = BenchArray::ints({B}, 1), logits({B, V}, 3), keys = BenchArray::bytes(B * 8);
    const Tensor zeros = make_tensor(keys.tensor().data, DType::I64, keys.tensor().device, {B});
    SamplingOptions options;
    options.temperature = float(state.range(2)) / 10;
    options.top_k = state.range(3);
    for (auto _ : state) sample_tokens(ids, logits, V, zeros, zeros, options, Stream{});
    report_bytes(state, 4.0 * double(B * V));
}

void settings(benchmark::internal::Benchmark* bench) {
    bench->ArgNames({"B", "V", "temperature", "top_k"});
    for (const int64_t B : {1, 16}) bench->Args({B, 50257, 0, 0})->Args({B, 50257, 10, 0})->Args({B, 50257, 10, 40});
}

BENCH(sample)->Apply(settings);

}  // namespace
