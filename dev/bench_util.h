// What the benchmarks share: memory filled with numbers, timing, and rates beside the machine's limits, which
// bench_util.cpp's main() measures first and prints. One line per benchmark: time, GB/s or FLOP/s, and the fraction of
// that limit.
//
// A benchmark is a function of a state and a dtype that allocates, runs and reports:
//
//     void forward(benchmark::State& state, DType T) {
//         const int64_t N = state.range(0), C = state.range(1);
//         const BenchArray out(T, {N, C}), inp(T, {N, C});
//         run_bench(state, [&] { gelu_forward(out, inp, Stream{}); });
//         report_bytes(state, 2.0 * out.bytes());
//     }
//     BENCH(forward, {"N", "C"}, {{256, 3072}, {4096, 3072}}, {{65536, 3072}});
//
// On the CPU it runs in fp32, with the clock and the repeats of Google Benchmark. On a GPU it runs in bf16 and in fp32
// (in fp32 alone if it does not ask for a dtype); its time is the median of 21 runs by the device's clock, before each
// of which 256 MiB are read, so that nothing is found in the L2 cache and nothing in it waits to be written.
#pragma once

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dev/machine_limits.h"
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

// The timed loop. stream: where op puts its work.
void run_bench(benchmark::State& state, const std::function<void()>& op, Stream stream = {});

// After the loop: bytes (or floating-point operations) of one run. Bytes are what the op must read and write at least
// once, so an op that reads twice from memory shows it.
void report_bytes(benchmark::State& state, double bytes);
void report_flops(benchmark::State& state, double flops, DType T = DType::F32);
void report_tokens(benchmark::State& state, double tokens);

// Instead of the loop: the line of this run gives the reason in place of numbers.
void skip_bench(benchmark::State& state, const std::string& reason);

using Sizes = std::vector<std::vector<int64_t>>;  // of each run: state.range(0), state.range(1), …
using BenchFunction = void (*)(benchmark::State&, DType);
using BenchFunctionFP32 = void (*)(benchmark::State&);

// A backend without sizes has no runs. The sizes of the CPU are those of a small model, or what a laptop does in a
// second; the GPU's are those of GPT-2 124M in training, 64 sequences of 1,024 tokens. Returns true, for BENCH.
bool register_bench(const char* name, BenchFunction function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu);
bool register_bench(const char* name, BenchFunctionFP32 function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu);
#define BENCH(function, ...) static const bool function##_registered = register_bench(#function, function, __VA_ARGS__)
