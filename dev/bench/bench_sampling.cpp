#include "kernels/generation/sampling.h"

#include "dev/bench/bench_util.h"

namespace {

// Reads the logits once, from rows padded as a model's are. Row b has the options b mod n of n.
void run(benchmark::State& state, DType T, const std::vector<SamplingOptions>& options) {
    const int64_t B = state.range(0), V = state.range(1), Vp = (V + 127) / 128 * 128;
    const BenchArray ids = BenchArray::ints({B}, 1), logits(T, {B, Vp}, 3), keys = BenchArray::bytes(B * 8);
    const Tensor zeros = make_tensor(keys.tensor().data, DType::I64, keys.tensor().device, {B});
    SamplingBatch batch;
    std::vector<SamplingRow> host;
    for (int64_t b = 0; b < B; b++) {
        host.push_back(sampling_row(options[size_t(b) % options.size()], V, b));
        batch.classes |= host.back().classes;
    }
    const BenchArray rows = BenchArray::bytes(B * int64_t(sizeof(SamplingRow)));
    copy_to_device(rows.tensor().data, host.data(), size_t(rows.bytes()), Stream{});
    batch.rows = make_tensor(rows.tensor().data, DType::U8, rows.tensor().device, {B, int64_t(sizeof(SamplingRow))});
    batch.sequences = batch.steps = zeros;
    const BenchArray counts = BenchArray::ints({B, V}, 2),
                     scratch = BenchArray::bytes(sampling_scratch(B, V, batch.classes));
    batch.counts = counts;
    run_bench(state, [&] { sample_tokens(ids, logits, V, batch, scratch, Stream{}); });
    report_bytes(state, logits.bytes());
}

// temperature is in tenths, top_p in hundredths.
void sample(benchmark::State& state, DType T) {
    SamplingOptions options;
    options.temperature = float(state.range(2)) / 10;
    options.top_k = state.range(3);
    options.top_p = float(state.range(4)) / 100;
    run(state, T, {options});
}

// Rows that need all kernels: no filters, top_k, top_p, a frequency penalty.
void sample_mixed(benchmark::State& state, DType T) {
    std::vector<SamplingOptions> options(4);
    options[1].top_k = 40;
    options[2].top_p = 0.9f;
    options[3].frequency_penalty = 0.5f;
    run(state, T, options);
}

const Sizes SETTINGS = {{1, 50257, 0, 0, 100},     {1, 50257, 10, 0, 100},  {1, 50257, 10, 40, 100},
                        {1, 50257, 10, 1024, 100}, {1, 50257, 10, 40, 90},  {1, 50257, 10, 0, 90},
                        {16, 50257, 0, 0, 100},    {16, 50257, 10, 0, 100}, {16, 50257, 10, 40, 100},
                        {64, 50257, 10, 0, 100},   {64, 50257, 10, 0, 90}};
BENCH(sample, {"B", "V", "temperature", "top_k", "top_p"}, SETTINGS, SETTINGS);
BENCH(sample_mixed, {"B", "V"}, {{4, 50257}, {64, 50257}}, {{4, 50257}, {64, 50257}});

}  // namespace
