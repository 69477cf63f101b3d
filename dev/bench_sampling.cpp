#include "kernels/sampling.h"

#include "dev/bench_util.h"

namespace {

// Reads the logits once. temperature is in tenths.
void sample(benchmark::State& state, DType T) {
    const int64_t B = state.range(0), V = state.range(1);
    const BenchArray ids = BenchArray::ints({B}, 1), logits(T, {B, V}, 3), keys = BenchArray::bytes(B * 8);
    const Tensor zeros = make_tensor(keys.tensor().data, DType::I64, keys.tensor().device, {B});
    SamplingOptions options;
    options.temperature = float(state.range(2)) / 10;
    options.top_k = state.range(3);
    run_bench(state, [&] { sample_tokens(ids, logits, V, zeros, zeros, options, Stream{}); });
    report_bytes(state, logits.bytes());
}

const Sizes SETTINGS = {{1, 50257, 0, 0},  {1, 50257, 10, 0},  {1, 50257, 10, 40},
                        {16, 50257, 0, 0}, {16, 50257, 10, 0}, {16, 50257, 10, 40}};
BENCH(sample, {"B", "V", "temperature", "top_k"}, SETTINGS, SETTINGS);

}  // namespace
