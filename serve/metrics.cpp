#include "serve/metrics.h"

#include <algorithm>
#include <sstream>

namespace {

std::string line(const std::string& name, const char* type, const std::string& help) {
    return "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
}

std::string value(const std::string& name, const char* type, const std::string& help, int64_t x) {
    return line(name, type, help) + name + " " + std::to_string(x) + "\n";
}

}  // namespace

void Histogram::add(double seconds) {
    counts[size_t(std::lower_bound(BOUNDS.begin(), BOUNDS.end(), seconds) - BOUNDS.begin())]++;
    sum += seconds;
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
    std::ostringstream out;
    out << line(name, "histogram", help);
    int64_t total = 0;
    for (size_t i = 0; i < counts.size(); i++) {
        total += counts[i];
        out << name << "_bucket{le=\"";
        if (i < BOUNDS.size())
            out << BOUNDS[i];
        else
            out << "+Inf";
        out << "\"} " << total << "\n";
    }
    out << name << "_sum " << sum << "\n" << name << "_count " << total << "\n";
    return out.str();
}

void Metrics::request(const std::string& path, int status) {
    const std::lock_guard lock(mutex);
    requests[{path, status}]++;
}

void Metrics::finished(int64_t prompt, int64_t completion) {
    const std::lock_guard lock(mutex);
    prompt_tokens += prompt;
    completion_tokens += completion;
}

void Metrics::cancelled() {
    const std::lock_guard lock(mutex);
    cancellations++;
}

void Metrics::first_token(double seconds) {
    const std::lock_guard lock(mutex);
    first.add(seconds);
}

void Metrics::next_token(double seconds) {
    const std::lock_guard lock(mutex);
    next.add(seconds);
}

void Metrics::set(const Gauges& now) {
    const std::lock_guard lock(mutex);
    gauges = now;
}

std::string Metrics::text() const {
    const std::lock_guard lock(mutex);
    std::string out = line("train_gpt_requests_total", "counter", "HTTP requests that were answered.");
    for (const auto& [key, count] : requests)
        out += "train_gpt_requests_total{path=\"" + key.first + "\",status=\"" + std::to_string(key.second) + "\"} " +
               std::to_string(count) + "\n";
    out += value("train_gpt_cancelled_total", "counter", "Requests whose client went away.", cancellations);
    out += value("train_gpt_prompt_tokens_total", "counter", "Tokens of prompts of finished requests.", prompt_tokens);
    out += value("train_gpt_prefill_tokens_total", "counter",
                 "Tokens of prompts that were computed, not found in the cache.", gauges.prefill_tokens);
    out += value("train_gpt_completion_tokens_total", "counter", "Tokens of completions of finished requests.",
                 completion_tokens);
    out += value("train_gpt_sequences_running", "gauge", "Sequences with a slot.", gauges.running);
    out +=
        value("train_gpt_sequences_waiting", "gauge", "Sequences that wait for a slot or for pages.", gauges.waiting);
    out += value("train_gpt_pages_in_use", "gauge", "Pages of the KV cache that sequences hold.", gauges.pages_in_use);
    out += value("train_gpt_pages", "gauge", "Pages of the KV cache.", gauges.pages);
    out += first.text("train_gpt_time_to_first_token_seconds", "From a request's arrival to its first token.");
    out += next.text("train_gpt_time_between_tokens_seconds", "Between the tokens of a sequence.");
    return out;
}
