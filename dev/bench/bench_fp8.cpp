// Quantisation to fp8 in both orientations, alone and behind the activation functions. Bytes: inputs once, each output
// once.
#include "kernels/fp8.h"

#include "dev/bench/bench_util.h"

namespace {

struct Target {
    BenchArray scale = BenchArray({FP8_SCALE_FLOATS}, 0, 1), amax = BenchArray({1}, 0), rows, columns;
    int64_t N, C;
    Target(int64_t n, int64_t c) : rows(BenchArray::bytes(n * c)), columns(BenchArray::bytes(n * c)), N(n), C(c) {}
    Fp8Output out(Fp8Format f) const {
        const auto matrix = [](const BenchArray& bytes, int64_t r, int64_t k) {
            return make_tensor(bytes.tensor().data, DType::U8, backend_device(), {r, k});
        };
        return {f, {scale, amax, {}}, matrix(rows, N, C), matrix(columns, C, N)};
    }
    double bytes() const { return double(2 * N * C); }
};

// Quantisation takes the dtype that training uses.
bool skipped(benchmark::State& state, DType T) {
    const bool wrong = backend_device() == Device::CUDA && T != DType::BF16;
    if (wrong) skip_bench(state, "fp8 is quantised from bf16");
    return wrong;
}

void quantise(benchmark::State& state, DType T) {
    if (skipped(state, T)) return;
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray inp(T, {N, C});
    const Target target(N, C);
    run_bench(state, [&] { fp8_quantise(target.out(Fp8Format::E4M3), inp, Stream{}); });
    report_bytes(state, inp.bytes() + target.bytes());
}

void swiglu_forward(benchmark::State& state, DType T) {
    if (skipped(state, T)) return;
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray inp(T, {N, 2 * I});
    const Target target(N, I);
    run_bench(state,
              [&] { fp8_activation_forward(target.out(Fp8Format::E4M3), {}, Activation::SwiGLU, inp, Stream{}); });
    report_bytes(state, inp.bytes() + target.bytes());
}

void swiglu_backward(benchmark::State& state, DType T) {
    if (skipped(state, T)) return;
    const int64_t N = state.range(0), I = state.range(1);
    const BenchArray inp(T, {N, 2 * I}), dout(T, {N, I});
    const Target target(N, 2 * I);
    run_bench(state, [&] {
        fp8_activation_backward(target.out(Fp8Format::E5M2), {}, Activation::SwiGLU, dout, inp, Stream{});
    });
    report_bytes(state, inp.bytes() + dout.bytes() + target.bytes());
}

const Sizes CPU = {{256, 2048}}, GPU = {{8192, 2048}, {8192, 8192}, {16384, 1536}};
BENCH(quantise, {"N", "C"}, CPU, GPU);
BENCH(swiglu_forward, {"N", "I"}, CPU, GPU);
BENCH(swiglu_backward, {"N", "I"}, CPU, GPU);

}  // namespace
