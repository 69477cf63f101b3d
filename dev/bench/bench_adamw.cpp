#include "kernels/adamw.h"

#include "dev/bench/bench_util.h"

namespace {

// fp32 parameters, on a GPU in bf16 with fp32 master weights: reads parameter, m, v and gradient; writes parameter, m
// and v, and the bf16 copy.
void adamw(benchmark::State& state, DType T) {
    const int64_t n = state.range(0);
    const StepScalars s = {1e-4f, 1, 0, 0, 1, 1, 1, 0, 100, 0, {}, {}};
    const BenchArray params({n}), m({n}), v({n}, 0.1f, 1), grads({n}), scalars = BenchArray::bytes(sizeof(s));
    const BenchArray params_T(T, {T == DType::F32 ? 1 : n});
    copy_to_device(scalars.tensor().data, &s, sizeof(s), Stream{});
    const ParamSegment segments[] = {{0, n / 2, 0.1f, 0}, {n / 2, n, 0, n / 2}};
    run_bench(state, [&] {
        adamw_update(params, T == DType::F32 ? Tensor{} : params_T.tensor(), m, v, grads, segments, 2, AdamWOptions{},
                     scalars, Stream{});
    });
    report_bytes(state, (T == DType::F32 ? 28.0 : 30.0) * double(n));
}

BENCH(adamw, {"n"}, {{1000000}, {64000000}}, {{124000000}});

}  // namespace
