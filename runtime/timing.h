// Times: of the host's clock, and of work on a device.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include "runtime/device/device.h"

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Milliseconds per run, averaged over `runs` consecutive runs. Blocks until they finish.
inline double timed_ms(const std::function<void()>& work, int runs, Stream stream) {
    Event begin, end;
    begin.record(stream);
    for (int i = 0; i < runs; i++) work();
    end.record(stream);
    end.wait();
    return elapsed_ms(begin, end) / runs;
}

// Lengths of a sample. At its power limit a GPU lowers its clocks after some ten milliseconds. The more energy a kernel
// takes, the lower the clocks. So only long samples rank kernels as training does.
constexpr double SHORT_SAMPLE_MS = 1, LONG_SAMPLE_MS = 25;
// Shorter kernels are bound by launches and latency.
inline bool draws_full_power(double milliseconds) {
    return milliseconds >= 0.05;
}

// Milliseconds of each candidate, all of which must have run once before: medians of interleaved samples, five short
// ones or three long ones. Long ones take the time of starting a model: a candidate that is CLEARLY_SLOWER than the
// fastest in the first turn has no others, and infinity.
inline std::vector<double> time_in_turns(const std::vector<std::function<void()>>& work, Stream stream,
                                         double sample_ms) {
    constexpr double CLEARLY_SLOWER = 1.04;  // so in one turn, no candidate was the fastest of two (docs/log/matmul.md)
    const bool long_samples = sample_ms > SHORT_SAMPLE_MS;
    const int num_samples = long_samples ? 3 : 5;
    const double max_runs = 20 * sample_ms;
    std::vector<int> runs;
    for (const auto& f : work) runs.push_back(int(std::clamp<double>(sample_ms / timed_ms(f, 1, stream), 1, max_runs)));
    std::vector<std::vector<double>> samples(work.size());
    double fastest = std::numeric_limits<double>::max();
    for (size_t i = 0; i < work.size(); i++) {
        samples[i].push_back(timed_ms(work[i], runs[i], stream));
        fastest = std::min(fastest, samples[i][0]);
    }
    const auto is_slower = [&](const std::vector<double>& of_one) { return of_one[0] > CLEARLY_SLOWER * fastest; };
    const bool decided =
        long_samples && std::count_if(samples.begin(), samples.end(), is_slower) + 1 == int64_t(samples.size());
    for (int s = 1; s < num_samples && !decided; s++)
        for (size_t i = 0; i < work.size(); i++)
            if (!long_samples || !is_slower(samples[i])) samples[i].push_back(timed_ms(work[i], runs[i], stream));
    std::vector<double> medians;
    for (std::vector<double>& of_one : samples) {
        const auto middle = of_one.begin() + std::ptrdiff_t(of_one.size() / 2);
        const bool dropped = long_samples && is_slower(of_one);
        std::nth_element(of_one.begin(), middle, of_one.end());
        medians.push_back(dropped ? std::numeric_limits<double>::infinity() : *middle);
    }
    return medians;
}

// The index of the fastest candidate. A later one replaces an earlier one only if it is faster by more than 1%: smaller
// differences are noise.
inline size_t fastest_of(const std::vector<double>& milliseconds) {
    size_t best = 0;
    for (size_t i = 1; i < milliseconds.size(); i++)
        if (milliseconds[i] < 0.99 * milliseconds[best]) best = i;
    return best;
}
