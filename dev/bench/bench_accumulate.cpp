#include "kernels/accumulate.h"

#include "dev/bench/bench_util.h"

namespace {

void add(benchmark::State& state, DType T) {
    const int64_t n = state.range(0);
    const BenchArray out(DType::F32, {n}), inp(T, {n}, 2);
    run_bench(state, [&] { accumulate(out, inp, true, Stream{}); });
    report_bytes(state, 2 * out.bytes() + inp.bytes());
}

void convert(benchmark::State& state, DType T) {
    const int64_t n = state.range(0);
    const BenchArray out(T, {n}), inp(DType::F32, {n}, 2);
    run_bench(state, [&] { accumulate(out, inp, false, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

const Sizes CPU = {{7000000}}, GPU = {{7000000}, {124000000}};
BENCH(add, {"n"}, CPU, GPU);
BENCH(convert, {"n"}, CPU, GPU);

}  // namespace
