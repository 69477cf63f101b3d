// The matmuls of linear layers with LoRA adapters of rank R on all of their P parts, each after the matmul of the
// frozen weight alone (base_…): what adapters cost. Shapes of the LLaMA 8B block: qkv, proj, gate-up, down. A·inp, and
// the adapters' gradients, are not in it: they are plain matmuls.
#include "kernels/matmul_low_rank.h"

#include <algorithm>
#include <functional>

#include "dev/bench/bench_util.h"
#include "kernels/activation.h"

namespace {

constexpr Activation F = Activation::SwiGLU;

// A layer of state's sizes.
struct Layer {
    const DType T;
    const int64_t N, C, OC, P, R;
    const BenchArray inp, out, weight, h, a, b, scratch;
    std::vector<LoraPart> parts;

    Layer(const benchmark::State& state, DType dtype)
        : T(dtype),
          N(state.range(0)),
          C(state.range(1)),
          OC(state.range(2)),
          P(state.range(3)),
          R(state.range(4)),
          inp(T, {N, C}),
          out(T, {N, OC}),
          weight(T, {OC, C}, 0.05f),
          h(T, {N, P * R}),
          a(T, {P * R, C}),
          b(T, {OC, R}),
          scratch(BenchArray::bytes(std::max<int64_t>(1, matmul_low_rank_scratch(OC, P * R, T)))) {
        for (int64_t i = 0; i < P; i++) parts.push_back({OC * i / P, OC * (i + 1) / P - OC * i / P});
    }
    LowRank low_rank() const { return {h, {a, b, &parts, 1}, scratch}; }
    void run(benchmark::State& state, bool adapters, const std::function<void()>& call) const {
        run_bench(state, call, tuned_stream());
        report_flops(state, 2.0 * double(N) * double(OC) * double(C + (adapters ? R : 0)), T);
    }
};

void forward(benchmark::State& state, DType T) {
    const Layer l(state, T);
    l.run(state, true, [&] { matmul_low_rank_forward(l.out, l.inp, l.weight, {}, l.low_rank(), tuned_stream()); });
}
void base_forward(benchmark::State& state, DType T) {
    const Layer l(state, T);
    l.run(state, false, [&] { matmul_forward(l.out, l.inp, l.weight, {}, tuned_stream()); });
}

void backward_input(benchmark::State& state, DType T) {
    const Layer l(state, T);
    l.run(state, true, [&] {
        matmul_low_rank_backward_input(l.inp, l.out, l.weight, {l.h, l.a}, false, tuned_stream());
    });
}
void base_backward_input(benchmark::State& state, DType T) {
    const Layer l(state, T);
    l.run(state, false, [&] { matmul_backward_input(l.inp, l.out, l.weight, false, tuned_stream()); });
}

void forward_swiglu(benchmark::State& state, DType T) {
    const Layer l(state, T);
    const BenchArray act(T, {l.N, l.OC / 2});
    l.run(state, true, [&] {
        matmul_low_rank_forward_activation(F, act, l.out, l.inp, l.weight, {}, l.low_rank(), tuned_stream());
    });
}
void base_forward_swiglu(benchmark::State& state, DType T) {
    const Layer l(state, T);
    const BenchArray act(T, {l.N, l.OC / 2});
    l.run(state, false, [&] { matmul_forward_activation(F, act, l.out, l.inp, l.weight, {}, tuned_stream()); });
}

void backward_swiglu(benchmark::State& state, DType T) {
    const Layer l(state, T);
    const BenchArray pre(T, {l.N, 2 * l.C}, 2), dpre(T, {l.N, 2 * l.C});
    const ActivationGradient d{dpre, l.inp, {}, {}, false};
    l.run(state, true, [&] {
        matmul_low_rank_backward_activation(F, d, l.out, l.weight, pre, {l.h, l.a}, tuned_stream());
    });
}
void base_backward_swiglu(benchmark::State& state, DType T) {
    const Layer l(state, T);
    const BenchArray pre(T, {l.N, 2 * l.C}, 2), dpre(T, {l.N, 2 * l.C});
    const ActivationGradient d{dpre, l.inp, {}, {}, false};
    l.run(state, false, [&] { matmul_backward_activation(F, d, l.out, l.weight, pre, tuned_stream()); });
}

const std::vector<std::string> NAMES = {"N", "C", "OC", "P", "R"};
const Sizes LAYERS = {
    {2048, 4096, 6144, 3, 16}, {2048, 4096, 4096, 1, 16}, {2048, 4096, 28672, 2, 16}, {2048, 14336, 4096, 1, 16}};
const Sizes GATE_UP = {{2048, 4096, 28672, 2, 16}}, DOWN = {{2048, 14336, 4096, 1, 16}};
BENCH(base_forward, NAMES, (Sizes{{256, 768, 2304, 3, 16}}), LAYERS);
BENCH(forward, NAMES, (Sizes{{256, 768, 2304, 3, 16}}), LAYERS);
BENCH(base_forward_swiglu, NAMES, (Sizes{{256, 768, 4096, 2, 16}}), GATE_UP);
BENCH(forward_swiglu, NAMES, (Sizes{{256, 768, 4096, 2, 16}}), GATE_UP);
BENCH(base_backward_input, NAMES, (Sizes{{256, 768, 2304, 3, 16}}), LAYERS);
BENCH(backward_input, NAMES, (Sizes{{256, 768, 2304, 3, 16}}), LAYERS);
BENCH(base_backward_swiglu, NAMES, (Sizes{{256, 2048, 768, 1, 16}}), DOWN);
BENCH(backward_swiglu, NAMES, (Sizes{{256, 2048, 768, 1, 16}}), DOWN);

}  // namespace
