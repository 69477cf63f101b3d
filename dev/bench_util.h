// What the benchmarks share: memory filled with numbers, and rates beside the machine's limits, which bench_util.cpp's
// main() measures first and prints. One line per benchmark: time, GB/s or GFLOP/s, and the fraction of that limit.
#pragma once

#include <benchmark/benchmark.h>

#include <memory>

#include "dev/machine_limits.h"
#include "runtime/device.h"
#include "runtime/tensor.h"

// A fp32 tensor's memory on the backend's device, normal random numbers of the given scale around shift.
class BenchArray {
  public:
    explicit BenchArray(std::initializer_list<int64_t> shape, float scale = 1, float shift = 0);
    static BenchArray ints(std::initializer_list<int64_t> shape, int32_t below);  // uniform in [0, below)
    static BenchArray bytes(int64_t n);                                           // U8, zeros
    operator Tensor() const { return view; }
    Tensor tensor() const { return view; }

  private:
    BenchArray() = default;
    std::shared_ptr<void> memory;
    Tensor view;
};

// After the loop: bytes (or floating-point operations) of one iteration. Bytes are what the op must read and write at
// least once, so an op that reads twice from memory shows it.
void report_bytes(benchmark::State& state, double bytes);
void report_flops(benchmark::State& state, double flops);

// Real time and milliseconds: several threads work in each iteration.
#define BENCH(function) BENCHMARK(function)->UseRealTime()->Unit(benchmark::kMillisecond)
