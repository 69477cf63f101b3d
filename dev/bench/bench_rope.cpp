#include "kernels/rope.h"

#include <vector>

#include "dev/bench/bench_util.h"

namespace {

// Reads and writes N·H·HS channels in place, in rows with the values behind queries and keys; the table is small.
void rotate(benchmark::State& state, DType T) {
    constexpr int64_t LENGTH = 1024;
    const int64_t N = state.range(0), H = state.range(1), H_values = state.range(2), HS = state.range(3);
    const BenchArray qkv(T, {N, (H + H_values) * HS}), table({LENGTH, HS / 2, 2});
    std::vector<int32_t> positions(static_cast<size_t>(N));
    for (size_t n = 0; n < positions.size(); n++) positions[n] = int32_t(n % LENGTH);
    const BenchArray position_ids = BenchArray::ints(positions);
    std::vector<float> numbers(size_t(LENGTH * HS));
    rope_table(host_tensor(numbers.data(), {LENGTH, HS / 2, 2}), 10000, {});
    copy_to_device(table.tensor().data, numbers.data(), numbers.size() * sizeof(float), Stream{});
    const Tensor heads = split_heads(qkv.tensor().columns(0, H * HS), H);
    run_bench(state, [&] { rope(heads, position_ids, table, false, Stream{}); });
    report_bytes(state, 2 * double(heads.bytes()));
}

// H counts the heads of queries and keys.
BENCH(rotate, {"N", "H", "H_values", "HS"}, {{256, 6, 3, 32}, {4096, 16, 8, 64}, {4096, 40, 8, 128}},
      {{65536, 24, 12, 64}, {32768, 40, 8, 64}, {16384, 40, 8, 128}});

}  // namespace
