// Matmuls of fp8 codes at the sizes of LLaMA 1B (C = 2048, FFN = 8192) and Qwen2.5 7B (3584, 18944), beside those in
// bf16: dev/bench/bench_matmul.cpp has more of these.
#include "kernels/matmul_fp8.h"

#include "dev/bench/bench_util.h"
#include "kernels/matmul.h"

namespace {

// The dtype in which training stores activations.
DType activations() {
    return backend_device() == Device::CUDA ? DType::BF16 : DType::F32;
}

// M, N, K of out [M, N] = a·bᵀ in the dtype `to`. The fraction of the peak is that of bf16.
void run(benchmark::State& state, Fp8Format format, DType to, bool fast) {
    const int64_t M = state.range(0), N = state.range(1), K = state.range(2);
    const std::string unavailable = matmul_fp8_unavailable();
    if (!unavailable.empty()) return skip_bench(state, unavailable);
    const BenchArray a = BenchArray::bytes(M * K), b = BenchArray::bytes(N * K), scale({FP8_SCALE_FLOATS}, 0, 1),
                     out(to, {M, N});
    const BenchArray scratch = BenchArray::bytes(matmul_fp8_scratch(M, N, K));
    // Random codes: with zeros the GPU would draw less power and run faster than with real data.
    std::vector<uint8_t> codes(size_t(std::max(M, N) * K));
    const size_t different = 999983;  // a prime: rows of any length differ
    for (size_t i = 0; i < codes.size(); i++)
        codes[i] = i < different ? fp8_encode(float(normal01(1, 0, i)) * 16, format) : codes[i - different];
    copy_to_device(a.tensor().data, codes.data(), size_t(M * K), tuned_stream());
    copy_to_device(b.tensor().data, codes.data(), size_t(N * K), tuned_stream());
    const auto matrix = [&](const BenchArray& x, int64_t rows, Fp8Format f) {
        return Fp8Matrix{make_tensor(x.tensor().data, DType::U8, backend_device(), {rows, K}), f, scale};
    };
    const Fp8Matrix left = matrix(a, M, format), right = matrix(b, N, Fp8Format::E4M3);
    run_bench(
        state, [&] { matmul_fp8(out, left, right, {}, false, fast, scratch, tuned_stream()); }, tuned_stream());
    report_flops(state, 2.0 * double(M) * double(N) * double(K), activations());
}

void forward(benchmark::State& state) {
    run(state, Fp8Format::E4M3, activations(), true);
}
void forward_full_accumulation(benchmark::State& state) {
    run(state, Fp8Format::E4M3, activations(), false);
}
void backward_input(benchmark::State& state) {
    run(state, Fp8Format::E5M2, activations(), false);
}
void backward_weight(benchmark::State& state) {
    run(state, Fp8Format::E5M2, DType::F32, false);
}

const Sizes CPU = {{64, 512, 512}};
const Sizes GPU = {{8192, 3072, 2048}, {8192, 2048, 2048},  {8192, 16384, 2048},
                   {8192, 2048, 8192}, {8192, 37888, 3584}, {8192, 3584, 18944}};
// The weight's gradient sums over the tokens.
const Sizes GPU_WEIGHT = {{3072, 2048, 8192}, {16384, 2048, 8192}, {2048, 8192, 8192}, {37888, 3584, 8192}};
BENCH(forward, {"M", "N", "K"}, CPU, GPU);
BENCH(forward_full_accumulation, {"M", "N", "K"}, CPU, GPU);
BENCH(backward_input, {"M", "N", "K"}, CPU, GPU);
BENCH(backward_weight, {"M", "N", "K"}, CPU, GPU_WEIGHT);

}  // namespace
