#include "dev/bench/bench_util.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "dev/bench/cache_flush.h"
#include "kernels/matmul.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/rng.h"
#include "runtime/text.h"

namespace {

std::shared_ptr<void> device_memory(const void* from, int64_t bytes) {
    std::shared_ptr<void> memory(device_alloc(size_t(bytes)), device_free);
    copy_to_device(memory.get(), from, size_t(bytes), Stream{});
    return memory;
}

bool on_gpu() {
    return backend_device() != Device::CPU;
}

}  // namespace

BenchArray::BenchArray(DType T, std::initializer_list<int64_t> shape, float scale, float shift)
    : view(make_tensor(nullptr, T, backend_device(), shape)) {
    // 64k different numbers, repeated in large copies: much faster than generating every element, and as good here.
    constexpr int64_t DIFFERENT = 1 << 16, REPEATS = 128;
    std::vector<float> numbers(DIFFERENT);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = float(normal01(1, 0, i)) * scale + shift;
    const int64_t period = DIFFERENT * dtype_size(T), piece = std::min(REPEATS * period, view.bytes());
    const std::shared_ptr<void> host(host_alloc(size_t(std::max(period, piece))), host_free);
    char* values = static_cast<char*>(host.get());
    convert_from_float(values, T, numbers.data(), DIFFERENT);
    for (int64_t at = period; at < piece; at += period)
        std::memcpy(values + at, values, size_t(std::min(period, piece - at)));
    memory.reset(device_alloc(size_t(view.bytes())), device_free);
    for (int64_t at = 0; at < view.bytes(); at += piece)
        copy_to_device(static_cast<char*>(memory.get()) + at, values, size_t(std::min(piece, view.bytes() - at)),
                       Stream{});
    synchronize(Stream{});
    view.data = memory.get();
}

BenchArray BenchArray::ints(const std::vector<int32_t>& values) {
    BenchArray a;
    a.view = make_tensor(nullptr, DType::I32, backend_device(), {int64_t(values.size())});
    a.memory = device_memory(values.data(), a.view.bytes());
    a.view.data = a.memory.get();
    return a;
}

BenchArray BenchArray::ints(std::initializer_list<int64_t> shape, int32_t below) {
    Tensor shaped = make_tensor(nullptr, DType::I32, backend_device(), shape);
    std::vector<int32_t> values(size_t(shaped.numel()));
    for (size_t i = 0; i < values.size(); i++) values[i] = int32_t(philox(2, i, 0).v[0] % uint32_t(below));
    BenchArray a = ints(values);
    shaped.data = a.view.data;
    a.view = shaped;
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

Stream tuned_stream() {
    static const Stream tuned = [] {
        const Stream created = create_blas_stream();
        matmul_tuning(true, created);
        return created;
    }();
    return tuned;
}

void run_bench(benchmark::State& state, const std::function<void()>& op, Stream stream) {
    if (!on_gpu()) {
        for (auto _ : state) op();
        return;
    }
    constexpr size_t WARM_UP = 3, RUNS = 21;
    CacheFlush flush;
    std::vector<Event> starts(WARM_UP + RUNS), ends(WARM_UP + RUNS);
    std::vector<double> ms;
    for (auto _ : state) {  // one iteration
        // All runs are launched before the first wait, so the device never waits for the host.
        for (size_t i = 0; i < WARM_UP + RUNS; i++) {
            flush(stream);
            starts[i].record(stream);
            op();
            ends[i].record(stream);
        }
        ends.back().wait();
        for (size_t i = WARM_UP; i < WARM_UP + RUNS; i++) ms.push_back(elapsed_ms(starts[i], ends[i]));
        std::nth_element(ms.begin(), ms.begin() + RUNS / 2, ms.end());
        state.SetIterationTime(ms[RUNS / 2] * 1e-3);
    }
}

void report_bytes(benchmark::State& state, double bytes) {
    const auto rate = benchmark::Counter::kIsIterationInvariantRate;
    state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, rate);
    state.counters["of copy"] = benchmark::Counter(bytes / machine_limits().copy, rate);
}

void report_flops(benchmark::State& state, double flops, DType T) {
    const auto rate = benchmark::Counter::kIsIterationInvariantRate;
    const MachineLimits& limits = machine_limits();
    state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, rate);
    state.counters["of peak"] = benchmark::Counter(flops / (T == DType::F32 ? limits.flops : limits.flops_bf16), rate);
}

void report_tokens(benchmark::State& state, double tokens) {
    state.counters["tokens/s"] = benchmark::Counter(tokens, benchmark::Counter::kIsIterationInvariantRate);
}

std::vector<double> poisson_arrivals(double per_second, int64_t count) {
    std::vector<double> seconds;
    double at = 0;
    for (int64_t i = 0; i < count; i++)
        seconds.push_back(at -= std::log1p(-uniform01(philox(5, uint64_t(i), 0).v[0], 0)) / per_second);
    return seconds;
}

double percentile(std::vector<double> values, double p) {
    if (values.empty()) return NAN;
    std::sort(values.begin(), values.end());
    return values[size_t(std::llround(p * double(values.size() - 1)))];
}

void skip_bench(benchmark::State& state, const std::string& reason) {
    state.SetLabel(reason);
    state.SkipWithError(reason.c_str());
    for (auto _ : state) {
    }  // Google Benchmark requires the loop
}

namespace {

void configure(benchmark::internal::Benchmark* bench, const std::vector<std::string>& size_names, const Sizes& sizes) {
    bench->ArgNames(size_names)->Unit(benchmark::kMillisecond);
    for (const auto& run : sizes) bench->Args(run);
    if (on_gpu())
        bench->UseManualTime()->Iterations(1);
    else
        bench->UseRealTime();  // several threads work in each iteration
}

}  // namespace

bool register_bench(const char* name, BenchFunction function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu) {
    std::vector<DType> dtypes = {DType::F32};
    if (on_gpu()) dtypes.insert(dtypes.begin(), DType::BF16);
    const Sizes& sizes = on_gpu() ? gpu : cpu;
    if (sizes.empty()) dtypes.clear();
    for (const DType T : dtypes)
        configure(benchmark::RegisterBenchmark(str(name, "/", dtype_name(T)).c_str(), function, T), size_names, sizes);
    return true;
}

bool register_bench(const char* name, BenchFunctionFP32 function, const std::vector<std::string>& size_names,
                    const Sizes& cpu, const Sizes& gpu) {
    configure(benchmark::RegisterBenchmark(name, function), size_names, on_gpu() ? gpu : cpu);
    return true;
}

namespace {

// Google Benchmark's own table writes "/s" after every rate, even after fractions. This one has our columns.
class TableReporter : public benchmark::BenchmarkReporter {
  public:
    bool ReportContext(const Context&) override {
        const MachineLimits& limits = machine_limits();
        std::printf("limits measured now: copy %.1f GB/s, triad %.1f GB/s, %.0f GFLOP/s fp32", limits.copy * 1e-9,
                    limits.triad * 1e-9, limits.flops * 1e-9);
        if (limits.flops_bf16 > 0) std::printf(", %.0f GFLOP/s bf16", limits.flops_bf16 * 1e-9);
        std::printf(" (%s)\n", device_description().c_str());
        return true;
    }
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            // Google Benchmark appends its timing options, which are the same for all.
            const std::string title =
                run.run_name.function_name + (run.run_name.args.empty() ? "" : "/") + run.run_name.args;
            if (!run.report_label.empty()) {
                std::printf("%-56s skipped: %s\n", title.c_str(), run.report_label.c_str());
                continue;
            }
            std::printf("%-56s %10.4f ms", title.c_str(), run.GetAdjustedRealTime());
            const auto value = [&](const char* name) {
                const auto found = run.counters.find(name);
                return found == run.counters.end() ? -1.0 : double(found->second.value);
            };
            if (value("GB/s") >= 0) std::printf("%10.1f GB/s", value("GB/s"));
            if (value("MB/s") >= 0) std::printf("%10.1f MB/s", value("MB/s"));
            const double gflops = value("GFLOP/s");
            if (gflops >= 0)
                std::printf(gflops < 1e4 ? "%10.1f GFLOP/s" : "%10.1f TFLOP/s", gflops < 1e4 ? gflops : gflops * 1e-3);
            if (value("tokens/s") >= 0) std::printf("%10.1f tokens/s", value("tokens/s"));
            for (const char* limit : {"of copy", "of peak"})
                if (value(limit) >= 0) std::printf("%6.0f%% %s", 100 * value(limit), limit);
            for (const auto& [name, counter] : run.counters)
                if (ends_with(name, " ms") || ends_with(name, " rows"))
                    std::printf("  %s %.2f", name.c_str(), counter.value);
            std::printf("\n");
        }
        std::fflush(stdout);
    }
};

}  // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    try {
        TableReporter table;
        benchmark::RunSpecifiedBenchmarks(&table);
    } catch (const Error& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
