#include "kernels/global_norm.h"

#include "dev/bench_util.h"

namespace {

void step_control(benchmark::State& state) {
    const int64_t n = state.range(0);
    const BenchArray grads({n}), scalars = BenchArray::bytes(sizeof(StepScalars));
    const BenchArray scratch = BenchArray::bytes(step_control_scratch(n)), loss = BenchArray::bytes(8);
    Tensor loss_sum = loss;
    loss_sum.dtype = DType::F64, loss_sum.shape[0] = 1;
    run_bench(state, [&] { step_control(scalars, grads, loss_sum, 1, 1, scratch, Stream{}); });
    report_bytes(state, grads.bytes());
}

BENCH(step_control, {"n"}, {{1000000}, {124000000}}, {{124000000}});

}  // namespace
