#include "kernels/generation/sampling.h"

#include "dev/bench/bench_util.h"

namespace {

// Reads the logits once, from rows padded as a model's are. temperature is in tenths, top_p in hundredths.
void sample(benchmark::State& state, DType T) {
    const int64_t B = state.range(0), V = state.range(1), Vp = (V + 127) / 128 * 128;
    const BenchArray ids = BenchArray::ints({B}, 1), logits(T, {B, Vp}, 3), keys = BenchArray::bytes(B * 8);
    const Tensor zeros = make_tensor(keys.tensor().data, DType::I64, keys.tensor().device, {B});
    SamplingOptions options;
    options.temperature = float(state.range(2)) / 10;
    options.top_k = state.range(3);
    options.top_p = float(state.range(4)) / 100;
    const std::vector<SamplingRow> host(size_t(B), sampling_row(options, V));
    const BenchArray rows = BenchArray::bytes(B * int64_t(sizeof(SamplingRow)));
    copy_to_device(rows.tensor().data, host.data(), size_t(rows.bytes()), Stream{});
    SamplingBatch batch;
    batch.rows = make_tensor(rows.tensor().data, DType::U8, rows.tensor().device, {B, int64_t(sizeof(SamplingRow))});
    batch.sequences = batch.steps = zeros;
    batch.classes = host[0].classes;
    const BenchArray scratch = BenchArray::bytes(sampling_scratch(B, V, batch.classes));
    run_bench(state, [&] { sample_tokens(ids, logits, V, batch, scratch, Stream{}); });
    report_bytes(state, logits.bytes());
}

const Sizes SETTINGS = {{1, 50257, 0, 0, 100},     {1, 50257, 10, 0, 100},  {1, 50257, 10, 40, 100},
                        {1, 50257, 10, 1024, 100}, {1, 50257, 10, 40, 90},  {1, 50257, 10, 0, 90},
                        {16, 50257, 0, 0, 100},    {16, 50257, 10, 0, 100}, {16, 50257, 10, 40, 100},
                        {64, 50257, 10, 0, 100},   {64, 50257, 10, 0, 90}};
BENCH(sample, {"B", "V", "temperature", "top_k", "top_p"}, SETTINGS, SETTINGS);

}  // namespace
