#include "kernels/generation/topk.h"

#include "dev/bench/bench_util.h"

namespace {

void top_k_rows(benchmark::State& state, DType T) {
    const int64_t B = state.range(0), V = state.range(1), k = state.range(2);
    const BenchArray inp(T, {B, V}), values(T, {B, k}), ids = BenchArray::ints({B, k}, 1),
                                                        scratch = BenchArray::bytes(top_k_scratch(B, V, k));
    run_bench(state, [&] { top_k(values, ids, inp, scratch, Stream{}); });
    report_bytes(state, inp.bytes() + values.bytes() + ids.tensor().bytes());
}

BENCH(top_k_rows, {"B", "V", "k"}, (Sizes{{1, 50257, 50}, {16, 50257, 50}, {16, 50257, 1024}}),
      (Sizes{{1, 50257, 50}, {64, 50257, 50}, {64, 128256, 50}, {64, 128256, 1024}}));

}  // namespace
