#include "kernels/attention.h"

#include <cmath>
#include <vector>

#include "dev/bench_util.h"

namespace {

// B sequences of T tokens in packed [B·T, (NH + 2·NKV)·HS] rows, as the driver calls it.
struct Problem {
    int64_t B, T, NH, NKV, HS, N, width;
    BenchArray qkv, dqkv, out, dout, lse, cum, scratch;

    explicit Problem(const benchmark::State& state)
        : B(state.range(0)),
          T(state.range(1)),
          NH(state.range(2)),
          NKV(state.range(3)),
          HS(state.range(4)),
          N(B * T),
          width((NH + 2 * NKV) * HS),
          qkv({N, width}),
          dqkv({N, width}),
          out({N, NH, HS}),
          dout({N, NH, HS}),
          lse({NH, N}),
          cum(BenchArray::ints({B + 1}, 1)),
          scratch(BenchArray::bytes(attention_backward_scratch(N, NH, HS))) {
        std::vector<int32_t> starts;
        for (int64_t b = 0; b <= B; b++) starts.push_back(int32_t(b * T));
        copy_to_device(cum.tensor().data, starts.data(), starts.size() * sizeof(int32_t), Stream{});
    }
    Tensor q(const Tensor& t) const { return split_heads(t.columns(0, NH * HS), NH); }
    Tensor k(const Tensor& t) const { return split_heads(t.columns(NH * HS, (NH + NKV) * HS), NKV); }
    Tensor v(const Tensor& t) const { return split_heads(t.columns((NH + NKV) * HS, width), NKV); }
    AttentionSequences sequences() const { return {cum, cum, T, T}; }
    float scale() const { return 1 / std::sqrt(float(HS)); }
    void forward() const { attention_forward(out, lse, q(qkv), k(qkv), v(qkv), sequences(), scale(), Stream{}); }
    // Pairs of a query and a key that it sees.
    double pairs() const { return double(B * NH) * double(T * (T + 1) / 2); }
};

// Two products of HS multiply-adds for each pair; the softmax is not counted.
void forward(benchmark::State& state) {
    const Problem p(state);
    for (auto _ : state) p.forward();
    report_flops(state, 4.0 * p.pairs() * double(p.HS));
}

// Five products for each pair: S, dP, dV, dK, dQ.
void backward(benchmark::State& state) {
    const Problem p(state);
    p.forward();
    for (auto _ : state)
        attention_backward(p.q(p.dqkv), p.k(p.dqkv), p.v(p.dqkv), p.dout, p.q(p.qkv), p.k(p.qkv), p.v(p.qkv), p.out,
                           p.lse, p.sequences(), p.scale(), p.scratch, Stream{});
    report_flops(state, 10.0 * p.pairs() * double(p.HS));
}

void shapes(benchmark::internal::Benchmark* bench) {
    bench->ArgNames({"B", "T", "NH", "NKV", "HS"});
    bench->Args({4, 64, 12, 12, 64})->Args({12, 64, 4, 4, 32})->Args({16, 256, 6, 6, 64})->Args({4, 1024, 12, 12, 64});
    bench->Args({4, 1024, 12, 4, 64})->Args({4, 512, 8, 8, 96})->Args({4, 512, 8, 8, 128});
}

BENCH(forward)->Apply(shapes);
BENCH(backward)->Apply(shapes);

}  // namespace
