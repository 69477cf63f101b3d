#include "dev/bench_util.h"

#include <cstdio>
#include <vector>

#include "runtime/rng.h"

namespace {

std::shared_ptr<void> device_memory(const void* from, int64_t bytes) {
    std::shared_ptr<void> memory(device_alloc(size_t(bytes)), device_free);
    copy_to_device(memory.get(), from, size_t(bytes), Stream{});
    return memory;
}

}  // namespace

BenchArray::BenchArray(std::initializer_list<int64_t> shape, float scale, float shift)
    : view(make_tensor(nullptr, DType::F32, backend_device(), shape)) {
    // 64k different numbers are as good as all different ones, and much faster to make.
    std::vector<float> numbers(1 << 16), values(size_t(view.numel()));
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = float(normal01(1, 0, i)) * scale + shift;
    for (size_t i = 0; i < values.size(); i++) values[i] = numbers[i % numbers.size()];
    memory = device_memory(values.data(), view.bytes());
    view.data = memory.get();
}

BenchArray BenchArray::ints(std::initializer_list<int64_t> shape, int32_t below) {
    BenchArray a;
    a.view = make_tensor(nullptr, DType::I32, backend_device(), shape);
    std::vector<int32_t> values(size_t(a.view.numel()));
    for (size_t i = 0; i < values.size(); i++) values[i] = int32_t(philox(2, i, 0).v[0] % uint32_t(below));
    a.memory = device_memory(values.data(), a.view.bytes());
    a.view.data = a.memory.get();
    return a;
}

BenchArray BenchArray::bytes(int64_t n) {
    BenchArray a;
    a.view = make_tensor(nullptr, DType::U8, backend_device(), {n});
    const std::vector<char> zeros(size_t(n), 0);
    a.memory = device_memory(zeros.data(), n);
    a.view.data = a.memory.get();
    return a;
}

void report_bytes(benchmark::State& state, double bytes) {
    const auto rate = benchmark::Counter::kIsIterationInvariantRate;
    state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, rate);
    state.counters["of copy"] = benchmark::Counter(bytes / machine_limits().copy, rate);
}

void report_flops(benchmark::State& state, double flops) {
    const auto rate = benchmark::Counter::kIsIterationInvariantRate;
    state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, rate);
    state.counters["of peak"] = benchmark::Counter(flops / machine_limits().flops, rate);
}

namespace {

// Google Benchmark's own table writes "/s" behind every rate, fractions too; this one has the columns asked for.
class TableReporter : public benchmark::BenchmarkReporter {
  public:
    bool ReportContext(const Context&) override {
        const MachineLimits& limits = machine_limits();
        std::printf("limits measured now: copy %.1f GB/s, triad %.1f GB/s, %.0f GFLOP/s fp32 (%s)\n",
                    limits.copy * 1e-9, limits.triad * 1e-9, limits.flops * 1e-9, device_description().c_str());
        return true;
    }
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            std::printf("%-56s %10.3f ms", run.benchmark_name().c_str(), run.GetAdjustedRealTime());
            for (const char* name : {"GB/s", "GFLOP/s"})
                if (run.counters.count(name)) std::printf("%10.1f %s", run.counters.at(name).value, name);
            for (const char* name : {"of copy", "of peak"})
                if (run.counters.count(name)) std::printf("%6.0f%% %s", 100 * run.counters.at(name).value, name);
            std::printf("\n");
        }
        std::fflush(stdout);
    }
};

}  // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    TableReporter table;
    benchmark::RunSpecifiedBenchmarks(&table);
    return 0;
}
