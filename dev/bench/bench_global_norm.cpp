#include "kernels/global_norm.h"

#include "dev/bench/bench_util.h"

namespace {

void sum_squares(benchmark::State& state) {
    const int64_t n = state.range(0);
    const BenchArray grads({n}), scratch = BenchArray::bytes(sum_squares_scratch(n)), memory = BenchArray::bytes(8);
    Tensor sum = memory;
    sum.dtype = DType::F64;
    sum.shape[0] = 1;
    run_bench(state, [&] { sum_squares(sum, grads, false, scratch, Stream{}); });
    report_bytes(state, grads.bytes());
}

BENCH(sum_squares, {"n"}, {{1000000}, {124000000}}, {{124000000}});

}  // namespace
