#include "kernels/nf4.h"

#include "dev/bench/bench_util.h"

namespace {

// A weight of LLaMA 8B: FC has 28672 x 4096, as in QLoRA.
void dequantise(benchmark::State& state, DType T) {
    const int64_t n = state.range(0) * state.range(1);
    const BenchArray out(T, {n}), codes = BenchArray::bytes(n / 2), absmax_codes = BenchArray::bytes(nf4_blocks(n)),
                                  group_absmax({nf4_groups(n)}, 0, 1), mean({1}, 0, 1);
    run_bench(state, [&] { nf4_dequantise(out, {codes, absmax_codes, group_absmax, mean}, Stream{}); });
    report_bytes(state, out.bytes() + codes.bytes() + absmax_codes.bytes());
}
BENCH(dequantise, {"N", "C"}, {{4096, 4096}}, {{28672, 4096}});

}  // namespace
