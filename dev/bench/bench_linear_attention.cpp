#include "kernels/linear_attention/linear_attention.h"

#include <vector>

#include "dev/bench/bench_util.h"

namespace {

// B sequences of `length` tokens in packed [B·T, (NH + 2·NKV)·HS] rows, as the driver calls it. gated: attention
// type gated_linear (a gate, neither features nor normaliser); else linear (elu + 1, normalised).
struct Problem {
    int64_t B, length, NH, NKV, HS, N, width;
    bool gated;
    BenchArray qkv, dqkv, out, dout, norm, gate, dgate, cum, scratch;

    Problem(const benchmark::State& state, DType T, bool gated_)
        : B(state.range(0)),
          length(state.range(1)),
          NH(state.range(2)),
          NKV(state.range(3)),
          HS(state.range(4)),
          N(B * length),
          width((NH + 2 * NKV) * HS),
          gated(gated_),
          qkv(T, {N, width}),
          dqkv(T, {N, width}),
          out(T, {N, NH, HS}),
          dout(T, {N, NH, HS}),
          norm({NH, N}),
          gate({N, NKV}, 0.01f, -0.05f),
          dgate({N, NKV}),
          cum(BenchArray::ints(starts())),
          scratch(BenchArray::bytes(std::max<int64_t>(
              1, std::max(linear_attention_forward_scratch(sizes()), linear_attention_backward_scratch(sizes()))))) {}

    std::vector<int32_t> starts() const {
        std::vector<int32_t> starts;
        for (int64_t b = 0; b <= B; b++) starts.push_back(int32_t(b * length));
        return starts;
    }
    LinearAttentionSizes sizes() const { return {N, B, NH, NKV, HS, HS, length}; }
    LinearAttentionType type(LinearAttentionType::Form form) const {
        return {gated ? FeatureMap::Identity : FeatureMap::EluPlusOne, !gated, form};
    }
    Tensor q(const Tensor& t) const { return split_heads(t.columns(0, NH * HS), NH); }
    Tensor k(const Tensor& t) const { return split_heads(t.columns(NH * HS, (NH + NKV) * HS), NKV); }
    Tensor v(const Tensor& t) const { return split_heads(t.columns((NH + NKV) * HS, width), NKV); }
    void forward(LinearAttentionType::Form form = LinearAttentionType::Form::Automatic) const {
        linear_attention_forward(out, gated ? Tensor{} : norm, {}, q(qkv), k(qkv), v(qkv), gated ? gate : Tensor{}, {},
                                 {cum, length}, type(form), scratch, Stream{});
    }
    void backward() const {
        linear_attention_backward(q(dqkv), k(dqkv), v(dqkv), gated ? dgate : Tensor{}, {}, dout, {}, q(qkv), k(qkv),
                                  v(qkv), gated ? gate : Tensor{}, {}, out, gated ? Tensor{} : norm, {cum, length},
                                  type(LinearAttentionType::Form::Automatic), scratch, Stream{});
    }
    // q, k, v and out once.
    double bytes() const { return qkv.bytes() + out.bytes(); }
    // q, k, v, dout, and out where it is needed; dq, dk, dv.
    double backward_bytes() const { return qkv.bytes() + dqkv.bytes() + (gated ? 1 : 2) * out.bytes(); }
};

void bench_forward(benchmark::State& state, DType T, bool gated) {
    const Problem p(state, T, gated);
    run_bench(state, [&] { p.forward(); });
    report_bytes(state, p.bytes());
}
void bench_backward(benchmark::State& state, DType T, bool gated) {
    const Problem p(state, T, gated);
    p.forward();
    run_bench(state, [&] { p.backward(); });
    report_bytes(state, p.backward_bytes());
}

void normalised_forward(benchmark::State& state, DType T) {
    bench_forward(state, T, false);
}
void normalised_backward(benchmark::State& state, DType T) {
    bench_backward(state, T, false);
}
void gated_forward(benchmark::State& state, DType T) {
    bench_forward(state, T, true);
}
void gated_backward(benchmark::State& state, DType T) {
    bench_backward(state, T, true);
}
// Token by token, the form that the chunked one is measured against.
void recurrent_forward(benchmark::State& state, DType T) {
    const Problem p(state, T, false);
    run_bench(state, [&] { p.forward(LinearAttentionType::Form::Recurrent); });
    report_bytes(state, p.bytes());
}

const Sizes CPU = {{4, 64, 12, 12, 64}, {16, 256, 6, 6, 64}, {2, 512, 12, 12, 64}, {4, 1024, 12, 12, 64}};
const Sizes GPU = {{32, 1024, 12, 12, 64}, {8, 4096, 12, 12, 64},  {1, 32768, 12, 12, 64},
                   {4, 4096, 16, 16, 128}, {64, 1024, 12, 12, 64}, {4, 2048, 32, 8, 64}};
const std::vector<std::string> NAMES = {"B", "T", "NH", "NKV", "HS"};
BENCH(normalised_forward, NAMES, CPU, GPU);
BENCH(normalised_backward, NAMES, CPU, GPU);
BENCH(gated_forward, NAMES, CPU, GPU);
BENCH(gated_backward, NAMES, CPU, GPU);
BENCH(recurrent_forward, NAMES, {{4, 1024, 12, 12, 64}}, {{32, 1024, 12, 12, 64}});

}  // namespace
