// Measures device time of work on a stream.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "runtime/device/device.h"

// Milliseconds per run, averaged over `runs` consecutive runs. Blocks until they finish.
inline double timed_ms(const std::function<void()>& work, int runs, Stream stream) {
    Event begin, end;
    begin.record(stream);
    for (int i = 0; i < runs; i++) work();
    end.record(stream);
    end.wait();
    return elapsed_ms(begin, end) / runs;
}

// Median milliseconds of each candidate, all of which must have run once before. Samples of about a millisecond are
// interleaved, because GPU clocks drop as the chip warms up.
inline std::vector<double> time_in_turns(const std::vector<std::function<void()>>& work, Stream stream) {
    constexpr int SAMPLES = 5, MAX_RUNS = 20;
    std::vector<int> runs;
    for (const auto& f : work) runs.push_back(int(std::clamp<double>(1 / timed_ms(f, 1, stream), 1, MAX_RUNS)));
    std::vector<std::vector<double>> samples(work.size());
    for (int s = 0; s < SAMPLES; s++)
        for (size_t i = 0; i < work.size(); i++) samples[i].push_back(timed_ms(work[i], runs[i], stream));
    std::vector<double> medians;
    for (std::vector<double>& of_one : samples) {
        std::nth_element(of_one.begin(), of_one.begin() + SAMPLES / 2, of_one.end());
        medians.push_back(of_one[SAMPLES / 2]);
    }
    return medians;
}
