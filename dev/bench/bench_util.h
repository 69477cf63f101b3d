// Shared by the benchmarks: memory with random numbers, timing, and rates compared with the machine's limits.
// bench_util.cpp's main() measures the limits first and prints them. Each benchmark prints one line: time, GB/s or
// FLOP/s, and the fraction of that limit.
//
// A benchmark is a function of a state and a dtype that allocates, runs and reports:
//
//     void forward(benchmark::State& state, DType T) {
//         const int64_t N = state.range(0), C = state.range(1);
//         const BenchArray out(T, {N, C}), inp(T, {N, C});
//         run_bench(state, [&] { activation_forward(Activation::GELU, out, inp, Stream{}); });
//         report_bytes(state, 2.0 * out.bytes());
//     }
//     BENCH(forward, {"N", "C"}, {{256, 3072}, {4096, 3072}}, {{65536, 3072}});
//
// On the CPU it runs in fp32, with the clock and the repeats of Google Benchmark. On a GPU it runs in bf16 and in fp32
// (only in fp32 if it takes no dtype). Its time is the median of 21 runs, measured by events on the device. 256 MiB are
// read before each run, so that the L2 cache holds neither the op's data nor lines still to be written.
#pragma once

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dev/bench/machine_limits.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// A tensor's memory on the backend's device: normal random numbers of the given scale around shift. T: F32, BF16, F16.
class BenchArray {
  public:
    BenchArray(DType T, std::initializer_list<int64_t> shape, float scale = 1, float shift = 0);
    explicit BenchArray(std::initializer_list<int64_t> shape, float scale = 1, float shift = 0)
        : BenchArray(DType::F32, shape, scale, shift) {}
    static BenchArray ints(const std::vector<int32_t>& values);                   // [values.size()]
    static BenchArray ints(std::initializer_list<int64_t> shape, int32_t below);  // uniform in [0, below)
    static BenchArray bytes(int64_t n);                                           // U8, zeros
    operator Tensor() const { return view; }
    Tensor tensor() const { return view; }
    double bytes() const { return double(view.bytes()); }

  private:
    BenchArray() = default;
    std::shared_ptr<void> memory;
    Tensor view;
};

// The timed loop. stream: the stream that op uses.
void run_bench(benchmark::State& state, const std::function<void()>& op, Stream stream = {});
// One stream for all benchmarks with tuned GEMMs: a stream tunes a GEMM once.
Stream tuned_stream();

// To be called after the loop with the bytes, floating-point operations or tokens of one run. Bytes count each input
// and output once, so an op that reads its input twice gets a lower rate.
void report_bytes(benchmark::State& state, double bytes);
void report_flops(benchmark::State& state, double flops, DType T = DType::F32);
void report_tokens(benchmark::State& state, double tokens);

// Seconds from the beginning at which `count` requests arrive: a Poisson process of `per_second` requests, the same in
// each call, so that times of the engine and of the server are of one load.
std::vector<double> poisson_arrivals(double per_second, int64_t count);

// Of these values, the one with a fraction p of them below it; NaN without values.
double percentile(std::vector<double> values, double p);

// To be called instead of the loop: the line of this run prints the reason instead of numbers.
void skip_bench(benchmark::State& state, const std::string& reason);

using Sizes = std::vector<std::vector<int64_t>>;  // of each run: state.range(0), state.range(1), …
using BenchFunction = void (*)(benchmark::State&, DType);
using BenchFunctionFP32 = void (*)(benchmark::State&);

// A backend without sizes has no runs. The CPU's sizes are those of a small model, or take a laptop about a second. The
// GPU's are those of GPT-2 124M in training, 64 sequences of 1,024 tokens. Returns true, for BENCH.
bool register_bench(const char* name, BenchFunction function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu);
bool register_bench(const char* name, BenchFunctionFP32 function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu);
#define BENCH(function, ...) static const bool function##_registered = register_bench(#function, function, __VA_ARGS__)
