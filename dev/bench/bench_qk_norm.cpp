#include "kernels/qk_norm.h"

#include <vector>

#include "dev/bench/bench_util.h"
#include "kernels/rope.h"

namespace {

// Queries and keys inside packed rows, as in training.
struct Problem {
    static constexpr int64_t LENGTH = 1024;
    const int64_t N, NH, NKV, HS, H = NH + NKV;
    const BenchArray qkv, dqkv, table, positions, rstd, weight_q, weight_k, dweight_q, dweight_k, scratch;

    Problem(const benchmark::State& state, DType T)
        : N(state.range(0)),
          NH(state.range(1)),
          NKV(state.range(2)),
          HS(state.range(3)),
          qkv(T, {N, (NH + 2 * NKV) * HS}),
          dqkv(T, {N, (NH + 2 * NKV) * HS}),
          table({LENGTH, HS / 2, 2}),
          positions(BenchArray::ints(ids(N))),
          rstd({N, H}, 0.1f, 1),
          weight_q({HS}, 0.1f, 1),
          weight_k({HS}, 0.1f, 1),
          dweight_q({HS}),
          dweight_k({HS}),
          scratch(BenchArray::bytes(qk_norm_backward_scratch(N, NH, NKV, HS))) {
        std::vector<float> numbers(size_t(LENGTH * HS));
        rope_table(host_tensor(numbers.data(), {LENGTH, HS / 2, 2}), 10000, {});
        copy_to_device(table.tensor().data, numbers.data(), numbers.size() * sizeof(float), Stream{});
    }
    static std::vector<int32_t> ids(int64_t N) {
        std::vector<int32_t> p;
        for (int64_t n = 0; n < N; n++) p.push_back(int32_t(n % LENGTH));
        return p;
    }
    Tensor heads(const BenchArray& rows) const { return split_heads(rows.tensor().columns(0, H * HS), H); }
    QkWeights weights(bool given) const { return given ? QkWeights{weight_q, weight_k} : QkWeights{}; }
};

// In place: reads and writes q and k.
void forward_of(benchmark::State& state, DType T, bool weights) {
    const Problem p(state, T);
    const Tensor x = p.heads(p.qkv);
    run_bench(state,
              [&] { qk_norm_forward(x, p.rstd, x, p.weights(weights), p.positions, p.table, p.NH, 1e-6f, Stream{}); });
    report_bytes(state, 2 * double(x.bytes()));
}

// In place on dout: reads dout and kept, writes dinp.
void backward_of(benchmark::State& state, DType T, bool weights) {
    const Problem p(state, T);
    const Tensor kept = p.heads(p.qkv), d = p.heads(p.dqkv);
    const QkWeights dweight = weights ? QkWeights{p.dweight_q, p.dweight_k} : QkWeights{};
    run_bench(state, [&] {
        qk_norm_backward(d, dweight, d, kept, p.rstd, p.weights(weights), p.positions, p.table, p.NH, p.scratch, false,
                         Stream{});
    });
    report_bytes(state, 3 * double(d.bytes()));
}

void forward(benchmark::State& state, DType T) {
    forward_of(state, T, false);
}
void forward_weights(benchmark::State& state, DType T) {
    forward_of(state, T, true);
}
void backward(benchmark::State& state, DType T) {
    backward_of(state, T, false);
}
void backward_weights(benchmark::State& state, DType T) {
    backward_of(state, T, true);
}

const Sizes CPU = {{256, 4, 2, 32}, {4096, 6, 6, 128}};
const Sizes GPU = {{65536, 6, 6, 128}, {65536, 12, 12, 64}, {16384, 16, 8, 128}};
BENCH(forward, {"N", "NH", "NKV", "HS"}, CPU, GPU);
BENCH(forward_weights, {"N", "NH", "NKV", "HS"}, CPU, GPU);
BENCH(backward, {"N", "NH", "NKV", "HS"}, CPU, GPU);
BENCH(backward_weights, {"N", "NH", "NKV", "HS"}, CPU, GPU);

}  // namespace
