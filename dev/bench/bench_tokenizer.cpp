#include "data/tokenizer.h"

#include <fstream>

#include "dev/bench/bench_util.h"
#include "dev/tests/tokenizer_fixture.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

namespace {

// Text that nobody had to write for this: the project's own sources and pages.
const std::string& text() {
    static const std::string all = [] {
        std::string joined;
        for (const char* pattern : {"docs/*/*.md", "*.cu", "*/*.h", "*/*.cpp", "*/*.py"})
            for (const std::string& path : glob_files(pattern)) joined += read_file(path);
        return joined;
    }();
    return all;
}

// The fixture's tokenizers, whose vocabularies are small, and what `make data` and `make smollm2` have left here.
std::vector<std::pair<std::string, std::string>> tokenizers() {  // name, path
    std::vector<std::pair<std::string, std::string>> found;
    make_directories("build/bench");
    for (const char* name : {"gpt2", "llama3", "llama2", "llama2-across-spaces", "qwen", "tekken"}) {
        found.emplace_back(name, str("build/bench/tokenizer-", name, ".json"));
        write_file(found.back().second, tokenizer_description(name).dump());
    }
    for (const char* pattern : {"data/tokens/*/tokenizer.json", "models/*/tokenizer.json"})
        for (const std::string& path : glob_files(pattern)) found.emplace_back(path, path);
    return found;
}

void report_rate(benchmark::State& state) {
    state.counters["MB/s"] =
        benchmark::Counter(double(text().size()) * 1e-6, benchmark::Counter::kIsIterationInvariantRate);
}

// On one core, whatever the machine has.
const bool registered = [] {
    for (const auto& [name, path] : tokenizers()) {
        const auto encode = [file = path](benchmark::State& state) {
            const Tokenizer tokenizer(file);
            for (auto _ : state) benchmark::DoNotOptimize(tokenizer.encode(text()));
            report_rate(state);
        };
        const auto decode = [file = path](benchmark::State& state) {
            const Tokenizer tokenizer(file);
            const std::vector<int32_t> ids = tokenizer.encode(text());
            for (auto _ : state) benchmark::DoNotOptimize(tokenizer.decode(ids));
            report_rate(state);
        };
        benchmark::RegisterBenchmark(("encode/" + name).c_str(), encode)->Unit(benchmark::kMillisecond);
        benchmark::RegisterBenchmark(("decode/" + name).c_str(), decode)->Unit(benchmark::kMillisecond);
    }
    return true;
}();

}  // namespace
