// The activation functions of the MLP in kernels of their own. Gradients in place, as the driver runs them.
#include "kernels/activation.h"

#include "dev/bench/bench_util.h"

namespace {

void forward(benchmark::State& state, DType T, Activation f) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray out(T, {N, I}), inp(T, {N, activation_inputs(f, I)}, 2);
    run_bench(state, [&] { activation_forward(f, out, inp, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

// GELU and ReLU² read 2 matrices and write 1, SwiGLU reads 3 and writes 2.
void backward(benchmark::State& state, DType T, Activation f) {
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray dout(T, {N, I}), inp(T, {N, activation_inputs(f, I)}, 2);
    run_bench(state, [&] { activation_backward(f, is_gated(f) ? inp : dout, {}, dout, inp, Stream{}); });
    report_bytes(state, dout.bytes() + inp.bytes() + (is_gated(f) ? inp : dout).bytes());
}

void gelu_forward(benchmark::State& state, DType T) {
    forward(state, T, Activation::GELU);
}
void gelu_backward(benchmark::State& state, DType T) {
    backward(state, T, Activation::GELU);
}
void relu2_forward(benchmark::State& state, DType T) {
    forward(state, T, Activation::ReLU2);
}
void relu2_backward(benchmark::State& state, DType T) {
    backward(state, T, Activation::ReLU2);
}
void swiglu_forward(benchmark::State& state, DType T) {
    forward(state, T, Activation::SwiGLU);
}
void swiglu_backward(benchmark::State& state, DType T) {
    backward(state, T, Activation::SwiGLU);
}

const Sizes CPU = {{256, 3072}, {4096, 3072}}, GPU = {{65536, 3072}};
const Sizes CPU_GATED = {{256, 2048}, {4096, 2048}}, GPU_GATED = {{65536, 2048}, {16384, 8192}};
BENCH(gelu_forward, {"N", "I"}, CPU, GPU);
BENCH(gelu_backward, {"N", "I"}, CPU, GPU);
BENCH(relu2_forward, {"N", "I"}, CPU, GPU);
BENCH(relu2_backward, {"N", "I"}, CPU, GPU);
BENCH(swiglu_forward, {"N", "I"}, CPU_GATED, GPU_GATED);
BENCH(swiglu_backward, {"N", "I"}, CPU_GATED, GPU_GATED);

}  // namespace
