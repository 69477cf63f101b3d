// What the server counts, in the text format of Prometheus (exposition format 0.0.4).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

// Seconds, by upper bounds.
class Histogram {
  public:
    void add(double seconds);
    std::string text(const std::string& name, const std::string& help) const;

  private:
    static constexpr std::array<double, 14> BOUNDS = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                      0.25,  0.5,    1,     2.5,  5,     10,   60};
    std::array<int64_t, BOUNDS.size() + 1> counts{};
    double sum = 0;
};

struct Gauges {
    int64_t running = 0, waiting = 0, pages_in_use = 0, pages = 0;
    int64_t prefill_tokens = 0;  // so far
};

// Any thread may call these.
class Metrics {
  public:
    void request(const std::string& path, int status);  // that was answered, or whose stream began
    void finished(int64_t prompt_tokens, int64_t completion_tokens);
    void cancelled();
    void first_token(double seconds);
    void next_token(double seconds);
    void set(const Gauges& now);
    std::string text() const;

  private:
    mutable std::mutex mutex;
    std::map<std::pair<std::string, int>, int64_t> requests;
    int64_t prompt_tokens = 0, completion_tokens = 0, cancellations = 0;
    Histogram first, next;
    Gauges gauges;
};
