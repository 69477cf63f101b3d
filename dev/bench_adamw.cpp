#include "kernels/adamw.h"

#include "dev/bench_util.h"

namespace {

// Reads parameter, m, v and gradient; writes parameter, m and v.
void adamw(benchmark::State& state) {
    const int64_t n = state.range(0);
    const StepScalars s = {1e-4f, 1, 1, 1, 1, 0, 100};
    const BenchArray params({n}), m({n}), v({n}, 0.1f, 1), grads({n}), scalars = BenchArray::bytes(sizeof(s));
    copy_to_device(scalars.tensor().data, &s, sizeof(s), Stream{});
    const AdamWSegment segments[] = {{0, n / 2, 0.1f}, {n / 2, n, 0}};
    for (auto _ : state) adamw_update(params, Tensor{}, m, v, grads, segments, 2, AdamWOptions{}, scalars, Stream{});
    report_bytes(state, 28.0 * double(n));
}

BENCH(adamw)->ArgName("n")->Arg(1000000)->Arg(64000000);

}  // namespace
