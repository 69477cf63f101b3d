#include "kernels/embedding.h"

#include "dev/bench_util.h"

namespace {

constexpr int64_t V = 50304, P = 1024;

// Reads a row of each table, writes a row.
void forward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out({N, C}), wte({V, C}), wpe({P, C});
    const BenchArray tokens = BenchArray::ints({N}, 50257), positions = BenchArray::ints({N}, P);
    for (auto _ : state) embedding_forward(out, tokens, positions, wte, wpe, Stream{});
    report_bytes(state, 12.0 * double(N * C));
}

// Accumulating into both tables, as with a tied head: for each table reads dout and a row, writes the row.
void backward(benchmark::State& state) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray dwte({V, C}), dwpe({P, C}), dout({N, C});
    const BenchArray tokens = BenchArray::ints({N}, 50257), positions = BenchArray::ints({N}, P);
    const BenchArray scratch = BenchArray::bytes(embedding_backward_scratch(N, V, C));
    for (auto _ : state) embedding_backward(dwte, dwpe, dout, tokens, positions, scratch, true, true, Stream{});
    report_bytes(state, 24.0 * double(N * C));
}

BENCH(forward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768});
BENCH(backward)->ArgNames({"N", "C"})->Args({256, 768})->Args({16384, 768});

}  // namespace
