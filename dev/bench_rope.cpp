#include "kernels/rope.h"

#include <vector>

#include "dev/bench_util.h"

namespace {

// Reads and writes N·H·HS channels in place; the table is small.
void rotate(benchmark::State& state) {
    constexpr int64_t T = 1024;
    const int64_t N = state.range(0), H = state.range(1), HS = state.range(2);
    const BenchArray x({N, H, HS}), positions = BenchArray::ints({N}, T), table({T, HS / 2, 2});
    std::vector<float> numbers(size_t(T * HS));
    rope_table(host_tensor(numbers.data(), {T, HS / 2, 2}), 10000, {});
    copy_to_device(table.tensor().data, numbers.data(), numbers.size() * sizeof(float), Stream{});
    for (auto _ : state) rope(x, positions, table, false, Stream{});
    report_bytes(state, 8.0 * double(N * H * HS));
}

BENCH(rotate)->ArgNames({"N", "H", "HS"})->Args({256, 6, 32})->Args({4096, 16, 64})->Args({4096, 40, 128});

}  // namespace
