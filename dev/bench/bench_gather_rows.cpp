#include "kernels/gather_rows.h"

#include "dev/bench/bench_util.h"

namespace {

// Every fourth row, as of a batch with a quarter of loss tokens.
struct Problem {
    int64_t N, C, n;
    BenchArray rows;

    explicit Problem(const benchmark::State& state)
        : N(state.range(0)), C(state.range(1)), n(N / 4), rows(BenchArray::ints(indices(n))) {}

    static std::vector<int32_t> indices(int64_t n) {
        std::vector<int32_t> rows;
        for (int64_t i = 0; i < n; i++) rows.push_back(int32_t(4 * i));
        return rows;
    }
};

void gather(benchmark::State& state, DType T) {
    const Problem p(state);
    const BenchArray out(T, {p.n, p.C}), inp(T, {p.N, p.C});
    run_bench(state, [&] { gather_rows(out, inp, p.rows, Stream{}); });
    report_bytes(state, 2 * out.bytes());
}

// Zeroes out, then reads and writes the rows.
void scatter(benchmark::State& state, DType T) {
    const Problem p(state);
    const BenchArray out(T, {p.N, p.C}), inp(T, {p.n, p.C});
    run_bench(state, [&] { scatter_rows(out, inp, p.rows, Stream{}); });
    report_bytes(state, out.bytes() + 2 * inp.bytes());
}

const Sizes CPU = {{1024, 576}, {16384, 768}}, GPU = {{16384, 2048}};
BENCH(gather, {"N", "C"}, CPU, GPU);
BENCH(scatter, {"N", "C"}, CPU, GPU);

}  // namespace
