// The matmuls of linear layers, forward and backward, and on the CPU the built-in GEMM beside the library. On a GPU:
// the layers of GPT-2 124M, 350M and 1558M and of a LLaMA of 1.2B parameters, heads in chunks of 8,192 tokens, with
// tuned algorithms; with activation functions in the epilogue. bench_activation times them
// alone.
#include "kernels/matmul.h"

#include <functional>

#include "dev/bench/bench_util.h"
#include "kernels/activation.h"
#ifndef USE_CUDA
#include "kernels/cpu/gemm_blocked.h"
#endif

namespace {

void run(benchmark::State& state, const std::function<void()>& matmul_call) {
    run_bench(state, matmul_call, tuned_stream());
}

// A linear layer of state's sizes.
struct Layer {
    int64_t N, C, OC;
    explicit Layer(const benchmark::State& state) : N(state.range(0)), C(state.range(1)), OC(state.range(2)) {}
    double flops() const { return 2.0 * double(N) * double(C) * double(OC); }
};

void forward(benchmark::State& state, DType T) {
    const Layer l(state);
    const BenchArray out(T, {l.N, l.OC}), inp(T, {l.N, l.C}), weight(T, {l.OC, l.C}), bias(T, {l.OC});
    run(state, [&] { matmul_forward(out, inp, weight, bias, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

void backward_input(benchmark::State& state, DType T) {
    const Layer l(state);
    const BenchArray dinp(T, {l.N, l.C}), dout(T, {l.N, l.OC}), weight(T, {l.OC, l.C});
    run(state, [&] { matmul_backward_input(dinp, dout, weight, false, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

// As in all micro-steps but the first: accumulates.
void backward_weight(benchmark::State& state, DType T) {
    const Layer l(state);
    const BenchArray dweight({l.OC, l.C}), dout(T, {l.N, l.OC}), inp(T, {l.N, l.C});
    run(state, [&] { matmul_backward_weight(dweight, Tensor{}, dout, inp, true, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

void backward_weight_and_bias(benchmark::State& state, DType T) {
    const Layer l(state);
    const BenchArray dweight({l.OC, l.C}), dbias({l.OC}), dout(T, {l.N, l.OC}), inp(T, {l.N, l.C});
    run(state, [&] { matmul_backward_weight(dweight, dbias, dout, inp, true, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

// OC: columns of the activation function's input.
void forward_activation(benchmark::State& state, DType T, Activation f) {
    const Layer l(state);
    const BenchArray out(T, {l.N, l.OC / activation_inputs(f, 1)}), pre(T, {l.N, l.OC}), inp(T, {l.N, l.C}),
        weight(T, {l.OC, l.C}, 0.05f), bias(T, {l.OC});
    run(state, [&] { matmul_forward_activation(f, out, pre, inp, weight, bias, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

// C: columns of the activation function's output.
void backward_activation(benchmark::State& state, DType T, Activation f) {
    const Layer l(state);
    const int64_t inputs = activation_inputs(f, l.C);
    const BenchArray dpre(T, {l.N, inputs}), dact(T, {l.N, l.C}), dout(T, {l.N, l.OC}), weight(T, {l.OC, l.C}),
        pre(T, {l.N, inputs}, 2);
    const ActivationGradient d{dpre, dact, {}, {}, false};
    run(state, [&] { matmul_backward_activation(f, d, dout, weight, pre, tuned_stream()); });
    report_flops(state, l.flops(), T);
}

void forward_gelu(benchmark::State& state, DType T) {
    forward_activation(state, T, Activation::GELU);
}
void forward_relu2(benchmark::State& state, DType T) {
    forward_activation(state, T, Activation::ReLU2);
}
void forward_swiglu(benchmark::State& state, DType T) {
    forward_activation(state, T, Activation::SwiGLU);
}
void backward_input_gelu(benchmark::State& state, DType T) {
    backward_activation(state, T, Activation::GELU);
}
void backward_input_relu2(benchmark::State& state, DType T) {
    backward_activation(state, T, Activation::ReLU2);
}
void backward_input_swiglu(benchmark::State& state, DType T) {
    backward_activation(state, T, Activation::SwiGLU);
}

const Sizes CPU = {{256, 768, 2304},  {256, 768, 768},  {256, 768, 3072},  {256, 3072, 768},  {256, 768, 50304},
                   {1024, 768, 2304}, {1024, 768, 768}, {1024, 768, 3072}, {1024, 3072, 768}, {768, 128, 512}};
const Sizes GPU = {{65536, 768, 2304},  {65536, 768, 768},   {65536, 768, 3072},  {65536, 3072, 768},
                   {8192, 768, 50304},  {32768, 1024, 3072}, {32768, 1024, 1024}, {32768, 1024, 4096},
                   {32768, 4096, 1024}, {8192, 1600, 4800},  {8192, 1600, 1600},  {8192, 1600, 6400},
                   {8192, 6400, 1600},  {8192, 2048, 3072},  {8192, 2048, 2048},  {8192, 2048, 16384},
                   {8192, 8192, 2048},  {8192, 2048, 128256}};
const std::vector<std::string> NAMES = {"N", "C", "OC"};
BENCH(forward, NAMES, CPU, GPU);
BENCH(backward_input, NAMES, CPU, GPU);
BENCH(backward_weight, NAMES, CPU, GPU);

const Sizes BIASED = {{65536, 768, 2304}, {65536, 768, 768}, {65536, 768, 3072}, {65536, 3072, 768}};
BENCH(backward_weight_and_bias, NAMES, (Sizes{{1024, 768, 3072}}), BIASED);

const Sizes FC = {{65536, 768, 3072}, {32768, 1024, 4096}, {8192, 1600, 6400}};
const Sizes FCPROJ = {{65536, 3072, 768}, {32768, 4096, 1024}, {8192, 6400, 1600}};
BENCH(forward_gelu, NAMES, (Sizes{{1024, 768, 3072}}), FC);
BENCH(backward_input_gelu, NAMES, (Sizes{{1024, 3072, 768}}), FCPROJ);
BENCH(forward_relu2, NAMES, (Sizes{{1024, 768, 3072}}), (Sizes{{65536, 768, 3072}}));
BENCH(backward_input_relu2, NAMES, (Sizes{{1024, 3072, 768}}), (Sizes{{65536, 3072, 768}}));

// LLaMA 1B, Qwen2.5 0.5B, 1.5B, 3B and 7B: gate-up and down.
const Sizes GATE_UP = {
    {8192, 2048, 16384}, {65536, 896, 9728}, {32768, 1536, 17920}, {16384, 2048, 22016}, {6144, 3584, 37888}};
const Sizes DOWN = {
    {8192, 8192, 2048}, {65536, 4864, 896}, {32768, 8960, 1536}, {16384, 11008, 2048}, {6144, 18944, 3584}};
BENCH(forward_swiglu, NAMES, (Sizes{{1024, 768, 4096}}), GATE_UP);
BENCH(backward_input_swiglu, NAMES, (Sizes{{1024, 2048, 768}}), DOWN);

#ifndef USE_CUDA
void built_in_gemm_forward(benchmark::State& state, DType T) {
    const Layer l(state);
    const BenchArray out(T, {l.N, l.OC}), inp(T, {l.N, l.C}), weight(T, {l.OC, l.C});
    run(state, [&] {
        gemm_blocked(false, true, l.N, l.OC, l.C, inp.tensor().as<float>(), l.C, weight.tensor().as<float>(), l.C,
                     false, out.tensor().as<float>(), l.OC);
    });
    report_flops(state, l.flops(), T);
}
BENCH(built_in_gemm_forward, NAMES, CPU, Sizes{});
#endif

}  // namespace
