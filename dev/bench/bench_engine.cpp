// Many requests on one engine, with random weights in 16 bits (on the CPU a tiny model in fp32). Times are those of the
// host that reads the tokens.
//
//   poisson   requests arrive at random times (a Poisson process), half of them with prompts of 128 tokens and half
//             with 2,000; each generates 256. Counters: tokens/s, time to first token of the short and of the long
//             prompts and gap between the tokens of a sequence, at the 50th and 99th percentile, and sequences per step
//   together  N sequences from the start, prompts of 128 tokens, or of 128 and 2,000: the gap to compare poisson's with
//   adapters  the same with 128 tokens, each row with one of several LoRA adapters of rank 16, or all without one
//   group     N completions of one prompt: the time until all have their first token
//   many      N sequences of 300 tokens in the KV memory of 64 sequences of 2,048: how many run at once
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "dev/bench/bench_util.h"
#include "driver/inference.h"
#include "infer/scheduler.h"
#include "runtime/rng.h"

namespace {

using Clock = std::chrono::steady_clock;

bool on_gpu() {
    return backend_device() != Device::CPU;
}

double milliseconds(Clock::duration d) {
    return std::chrono::duration<double, std::milli>(d).count();
}

// A request, and when its tokens came.
struct Timed {
    CompletionOptions options;
    std::unique_ptr<Completion> completion;
    Request request;
    Clock::time_point arrival, last;
    double first_token_ms = -1;
};

struct Run {
    std::vector<std::unique_ptr<Timed>> requests;
    std::vector<double> gaps;

    // Tokens that are never equal in two requests, unless `same`.
    void add(int64_t prompt, int64_t tokens, int64_t vocabulary, bool same = false) {
        auto t = std::make_unique<Timed>();
        t->options.max_tokens = tokens;
        t->completion = std::make_unique<Completion>(nullptr, t->options);
        t->request.sequence = int64_t(requests.size());
        t->request.completion = t->completion.get();
        for (int64_t i = 0; i < prompt; i++)
            t->request.tokens.push_back(
                int32_t(philox(7, same ? 0 : uint64_t(requests.size()), uint64_t(i)).v[0] % uint32_t(vocabulary)));
        requests.push_back(std::move(t));
    }
    // Looks at the clock whenever a token comes.
    void watch(Scheduler& scheduler) {
        scheduler.on_token = [this](const Request& r) {
            Timed& t = *requests[size_t(r.sequence)];
            const Clock::time_point now = Clock::now();
            if (t.first_token_ms < 0)
                t.first_token_ms = milliseconds(now - t.arrival);
            else
                gaps.push_back(milliseconds(now - t.last));
            t.last = now;
        };
    }
    std::vector<double> first_tokens(size_t prompt) const {
        std::vector<double> values;
        for (const auto& t : requests)
            if (t->request.tokens.size() == prompt) values.push_back(t->first_token_ms);
        return values;
    }
};

// The model is kept from one benchmark to the next.
LoadedEngine& engine_of(int64_t slots, int64_t context, int64_t pages, int64_t adapters = 0) {
    static std::unique_ptr<Context> ctx;
    static std::unique_ptr<LoadedEngine> loaded;
    if (!ctx) ctx = std::make_unique<Context>();
    if (!loaded || loaded->engine.options.slots != slots || loaded->engine.options.context != context ||
        loaded->engine.options.cache_pages != pages || loaded->engine.options.adapters != adapters) {
        EngineOptions o;
        o.slots = slots;
        o.context = context;
        o.cache_pages = pages;
        o.adapters = adapters;
        o.adapter_rank = 16;
        o.all_batch_sizes = true;
        o.dtype = on_gpu() ? DType::BF16 : DType::F32;
        loaded.reset();  // before the next one takes its memory
        loaded = std::make_unique<LoadedEngine>(*ctx, find_model(on_gpu() ? "llama-1B" : "llama-tiny"), o, true);
    }
    return *loaded;
}

void report(benchmark::State& state, const Run& run, const GenerateStatistics& s, double seconds) {
    state.SetIterationTime(seconds);
    state.counters["tokens/s"] = double(s.completion_tokens) / seconds;
    state.counters["gap p50 ms"] = percentile(run.gaps, 0.5);
    state.counters["gap p99 ms"] = percentile(run.gaps, 0.99);
    state.counters["step rows"] = double(s.step_sequences) / double(std::max<int64_t>(s.steps, 1));
}

// range: requests per second, requests, tokens of a chunk (0: the default).
void poisson(benchmark::State& state) {
    const double rate = double(state.range(0));
    const int64_t count = state.range(1), context = 2000 + 256;
    static int32_t runs = 0;
    for (auto _ : state) {
        LoadedEngine& m = engine_of(64, context, 0);
        runs++;
        Run run;
        const std::vector<double> arrivals = poisson_arrivals(rate, count);
        for (int64_t i = 0; i < count; i++) {
            run.add(i % 2 ? 2000 : 128, 256, m.engine.config.vocab_size);
            run.requests.back()->request.tokens[0] = runs;  // no prompt is in the cache from an earlier run
        }
        Scheduler scheduler(m.engine, {}, {}, state.range(2));
        run.watch(scheduler);
        const Clock::time_point begin = Clock::now();
        size_t next = 0;
        for (bool more = true; more || next < run.requests.size();) {
            for (; next < run.requests.size(); next++) {
                Timed& t = *run.requests[next];
                t.arrival =
                    begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(arrivals[next]));
                if (t.arrival > Clock::now()) break;
                scheduler.add(t.request);
            }
            more = scheduler.step();
        }
        report(state, run, scheduler.statistics, milliseconds(Clock::now() - begin) / 1000);
        for (const auto& [name, prompt] :
             {std::pair<const char*, size_t>{"first token of 128", 128}, {"of 2000", 2000}}) {
            state.counters[str(name, " p50 ms")] = percentile(run.first_tokens(prompt), 0.5);
            state.counters[str(name, " p99 ms")] = percentile(run.first_tokens(prompt), 0.99);
        }
    }
}

// Runs requests that all arrive at once.
void run_all(benchmark::State& state, Engine& engine, Run& run) {
    Scheduler scheduler(engine, {});
    run.watch(scheduler);
    const Clock::time_point begin = Clock::now();
    for (const auto& t : run.requests) {
        t->arrival = begin;
        scheduler.add(t->request);
    }
    int64_t most = 0;
    for (bool more = true; more;) {
        more = scheduler.step();
        most = std::max(most, engine.active());
    }
    report(state, run, scheduler.statistics, milliseconds(Clock::now() - begin) / 1000);
    double last = 0;
    for (const auto& t : run.requests) last = std::max(last, t->first_token_ms);
    state.counters["all first tokens ms"] = last;
    state.counters["most rows"] = double(most);
    state.counters["suspended rows"] = double(scheduler.suspensions());
}

void together(benchmark::State& state) {
    for (auto _ : state) {
        LoadedEngine& m = engine_of(64, 2000 + 256, 0);
        Run run;
        for (int64_t i = 0; i < state.range(0); i++)
            run.add(i % 2 ? state.range(1) : 128, 256, m.engine.config.vocab_size);
        run_all(state, m.engine, run);
    }
}

void adapters(benchmark::State& state) {
    const int64_t count = state.range(1);
    for (auto _ : state) {
        LoadedEngine& m = engine_of(state.range(0), 128 + 256, 0, std::max<int64_t>(count, 1));
        Run run;
        for (int64_t i = 0; i < state.range(0); i++) {
            run.add(128, 256, m.engine.config.vocab_size);
            run.requests.back()->request.adapter = static_cast<int32_t>(count ? i % count : -1);
        }
        run_all(state, m.engine, run);
    }
}

// The prompt is another one in each run of the benchmark, so that none is found in the cache.
void group(benchmark::State& state) {
    static uint64_t runs = 0;
    for (auto _ : state) {
        LoadedEngine& m = engine_of(64, 2000 + 256, 0);
        Run run;
        runs++;
        for (int64_t i = 0; i < state.range(0); i++) {
            run.add(2000, 2, m.engine.config.vocab_size, true);
            run.requests.back()->request.tokens[0] = int32_t(runs);
        }
        run_all(state, m.engine, run);
    }
}

void many(benchmark::State& state) {
    for (auto _ : state) {
        LoadedEngine& m = engine_of(state.range(0), 2048, 64 * 2048 / KV_PAGE);
        Run run;
        for (int64_t i = 0; i < state.range(0); i++) run.add(172, 128, m.engine.config.vocab_size);
        run_all(state, m.engine, run);
    }
}

BENCH(poisson, (std::vector<std::string>{"per_second", "requests", "chunk"}), (Sizes{{10, 10, 0}}),
      (Sizes{{10, 10, 0}, {10, 100, 0}, {10, 100, 256}, {10, 100, 128}}));
BENCH(together, (std::vector<std::string>{"N", "other_half"}), (Sizes{{4, 128}}),
      (Sizes{{2, 2000}, {4, 2000}, {6, 2000}, {8, 2000}, {10, 2000}, {16, 2000}, {16, 128}, {64, 128}}));
BENCH(adapters, (std::vector<std::string>{"N", "adapters"}), (Sizes{{4, 2}}),
      (Sizes{{64, 0}, {64, 8}, {64, 0}, {64, 8}, {1, 0}, {1, 1}}));
BENCH(group, (std::vector<std::string>{"N"}), (Sizes{{1}, {8}}), (Sizes{{1}, {1}, {64}, {64}}));
BENCH(many, (std::vector<std::string>{"N"}), (Sizes{{8}}), (Sizes{{340}}));

}  // namespace
