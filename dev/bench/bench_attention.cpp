#include "kernels/attention/attention.h"

#include <cmath>
#include <vector>

#include "dev/bench/bench_util.h"
#include "kernels/kv_page.h"

namespace {

// B sequences of `length` tokens in packed [B·T, (NH + 2·NKV)·HS] rows, as in training.
struct Problem {
    int64_t B, length, NH, NKV, HS, window, N, width;
    BenchArray qkv, dqkv, out, dout, lse, cum, scratch;

    Problem(const benchmark::State& state, DType T, bool deterministic = true)
        : B(state.range(0)),
          length(state.range(1)),
          NH(state.range(2)),
          NKV(state.range(3)),
          HS(state.range(4)),
          window(state.range(5)),
          N(B * length),
          width((NH + 2 * NKV) * HS),
          qkv(T, {N, width}),
          dqkv(T, {N, width}),
          out(T, {N, NH, HS}),
          dout(T, {N, NH, HS}),
          lse({NH, N}),
          cum(BenchArray::ints({B + 1}, 1)),
          scratch(BenchArray::bytes(attention_backward_scratch(N, NH, HS, deterministic, length))) {
        std::vector<int32_t> starts;
        for (int64_t b = 0; b <= B; b++) starts.push_back(int32_t(b * length));
        copy_to_device(cum.tensor().data, starts.data(), starts.size() * sizeof(int32_t), Stream{});
    }
    Tensor q(const Tensor& t) const { return split_heads(t.columns(0, NH * HS), NH); }
    Tensor k(const Tensor& t) const { return split_heads(t.columns(NH * HS, (NH + NKV) * HS), NKV); }
    Tensor v(const Tensor& t) const { return split_heads(t.columns((NH + NKV) * HS, width), NKV); }
    AttentionSequences sequences() const {
        AttentionSequences sequences{cum, cum, length, length};
        sequences.window = window;
        return sequences;
    }
    float scale() const { return 1 / std::sqrt(float(HS)); }
    void forward() const {
        attention_forward(out, lse, q(qkv), k(qkv), v(qkv), sequences(), scale(), scratch, Stream{});
    }
    // Pairs of a query and a key that it sees.
    double pairs() const {
        const int64_t seen = window ? window : length;  // by all but the first queries
        return double(B * NH) * (0.5 * double(seen * (seen + 1)) + double((length - seen) * seen));
    }
};

// Two matmuls, of HS multiply-adds for each pair; the softmax is not counted.
void forward(benchmark::State& state, DType T) {
    const Problem p(state, T);
    run_bench(state, [&] { p.forward(); });
    report_flops(state, 4.0 * p.pairs() * double(p.HS), T);
}

// Five matmuls: S, dP, dV, dK, dQ.
void any_backward(benchmark::State& state, DType T, bool deterministic) {
    const Problem p(state, T, deterministic);
    p.forward();
    run_bench(state, [&] {
        attention_backward(p.q(p.dqkv), p.k(p.dqkv), p.v(p.dqkv), p.dout, p.q(p.qkv), p.k(p.qkv), p.v(p.qkv), p.out,
                           p.lse, p.sequences(), p.scale(), p.scratch, Stream{}, deterministic);
    });
    report_flops(state, 10.0 * p.pairs() * double(p.HS), T);
}
void backward(benchmark::State& state, DType T) {
    any_backward(state, T, true);
}
void backward_nondeterministic(benchmark::State& state, DType T) {
    any_backward(state, T, false);
}

// One query for each of B sequences after T keys (a multiple of KV_PAGE) in pages, as exact rollouts decode. The keys
// and values count that a query sees.
void lone_queries(benchmark::State& state, DType T) {
    const int64_t B = state.range(0), keys = state.range(1), NH = state.range(2), NKV = state.range(3),
                  HS = state.range(4), window = state.range(5), columns = keys / KV_PAGE;
    std::vector<int32_t> cum_q, cum_k, rows;
    for (int64_t b = 0; b <= B; b++) {
        cum_q.push_back(int32_t(b));
        cum_k.push_back(int32_t(b * keys));
        if (b < B) rows.push_back(int32_t(b));
    }
    std::vector<int32_t> order(size_t(B * columns));
    for (size_t i = 0; i < order.size(); i++) order[i] = int32_t(order.size() - 1 - i);
    const BenchArray q(T, {B, NH, HS}), out(T, {B, NH, HS}), k(T, {B * keys, NKV, HS}), v(T, {B * keys, NKV, HS}),
        starts = BenchArray::ints(cum_q), ends = BenchArray::ints(cum_k), page_rows = BenchArray::ints(rows),
        pages = BenchArray::ints({B, columns}, 1), scratch = BenchArray::bytes(attention_forward_scratch());
    copy_to_device(pages.tensor().data, order.data(), order.size() * sizeof(int32_t), Stream{});
    AttentionSequences sequences{starts, ends, 1, keys};
    sequences.window = window;
    sequences.pages = pages;
    sequences.page_rows = page_rows;
    run_bench(state,
              [&] { attention_forward(out, {}, q, k, v, sequences, 1 / std::sqrt(float(HS)), scratch, Stream{}); });
    const double seen = window ? double(window) / double(keys) : 1;
    report_bytes(state, (k.bytes() + v.bytes()) * seen + q.bytes() + out.bytes());
}

const Sizes CPU = {{4, 64, 12, 12, 64, 0},   {12, 64, 4, 4, 32, 0},   {16, 256, 6, 6, 64, 0}, {2, 512, 12, 12, 64, 0},
                   {4, 1024, 12, 12, 64, 0}, {4, 1024, 12, 4, 64, 0}, {4, 512, 8, 8, 96, 0},  {4, 512, 8, 8, 128, 0}};
const Sizes GPU = {{64, 1024, 12, 12, 64, 0}, {16, 1024, 25, 25, 64, 0},    {8, 4096, 16, 16, 64, 0},
                   {8, 4096, 16, 16, 128, 0}, {2, 16384, 16, 16, 128, 0},   {2, 16384, 16, 16, 128, 4096},
                   {2, 16384, 32, 8, 128, 0}, {2, 16384, 32, 8, 128, 4096}, {4, 2048, 32, 8, 64, 0}};
const std::vector<std::string> NAMES = {"B", "T", "NH", "NKV", "HS", "window"};
BENCH(forward, NAMES, CPU, GPU);
BENCH(backward, NAMES, CPU, GPU);
BENCH(backward_nondeterministic, NAMES, {}, GPU);  // the CPU has no such mode
const Sizes LONE_CPU = {{16, 512, 8, 2, 64, 0}};
const Sizes LONE_GPU = {{512, 512, 32, 8, 64, 0},  {512, 384, 32, 8, 64, 0},    {512, 512, 12, 12, 64, 0},
                        {256, 512, 32, 8, 128, 0}, {512, 1024, 32, 8, 64, 256}, {16, 512, 32, 8, 64, 0}};
BENCH(lone_queries, NAMES, LONE_CPU, LONE_GPU);

}  // namespace
