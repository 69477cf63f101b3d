#include "infer/sample_output.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/files/log.h"

SampleOutput::SampleOutput(std::ostream& o, std::vector<std::string> prompts)
    : out(o), held_back(std::move(prompts)), done(held_back.size(), false) {
    if (!held_back.empty()) start();
}

void SampleOutput::start() {
    if (current > 0) out << "---\n";
    out << held_back[current] << std::flush;
}

void SampleOutput::add(size_t completion, std::string_view text) {
    if (completion == current)
        out << text << std::flush;
    else
        held_back[completion] += text;
}

void SampleOutput::finish(size_t completion, const std::string& after) {
    add(completion, "\n" + after);
    done[completion] = true;
    while (current < done.size() && done[current]) {
        if (++current < done.size()) start();
    }
}

namespace {

std::string text_of(int32_t id, const Tokenizer* tokenizer) {
    return tokenizer && tokenizer->contains(id) ? tokenizer->decode(id) : "";
}

nlohmann::json top_logprobs_json(const Completion& completion, const Tokenizer* tokenizer) {
    nlohmann::json steps = nlohmann::json::array();
    for (const std::vector<TokenLogprob>& step : completion.top_logprobs()) {
        nlohmann::json tokens = nlohmann::json::array();
        for (const TokenLogprob& t : step)
            tokens.push_back({{"token", t.token}, {"logprob", t.logprob}, {"text", text_of(t.token, tokenizer)}});
        steps.push_back(tokens);
    }
    return steps;
}

}  // namespace

std::string logprob_lines(const Completion& completion, const Tokenizer* tokenizer) {
    std::string lines;
    for (size_t i = 0; i < completion.tokens().size(); i++) {
        const int32_t id = completion.tokens()[i];
        const std::string token = text_of(id, tokenizer);
        char number[64];
        std::snprintf(number, sizeof number, "%.6f %d ", double(completion.logprobs()[i]), id);
        lines += number + nlohmann::json(token).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    }
    return lines;
}

std::string statistics_text(const GenerateStatistics& s, double read_bandwidth) {
    char text[256];
    std::snprintf(text, sizeof text, "prompt: %s tokens in %.3f s, %.0f tokens/s\n",
                  with_commas(s.prompt_tokens).c_str(), s.prefill_seconds,
                  double(s.prompt_tokens) / std::max(s.prefill_seconds, 1e-9));
    std::string lines = text;
    if (s.steps == 0) return lines;
    const double rate = double(s.decode_tokens) / s.decode_seconds, bytes = double(s.step_bytes) / s.decode_seconds;
    std::snprintf(text, sizeof text,
                  "completion: %s tokens, %s of them by decode steps in %.3f s, %.1f tokens/s, %.1f for each sequence, "
                  "weights and cache read at %.1f GB/s",
                  with_commas(s.completion_tokens).c_str(), with_commas(s.decode_tokens).c_str(), s.decode_seconds,
                  rate, rate * double(s.steps) / double(s.step_sequences), bytes / 1e9);
    lines += text;
    if (read_bandwidth > 0) {
        std::snprintf(text, sizeof text, ", %.0f%% of the %.1f GB/s measured", 100 * bytes / read_bandwidth,
                      read_bandwidth / 1e9);
        lines += text;
    }
    return lines + "\n";
}

nlohmann::json statistics_json(const GenerateStatistics& s, double read_bandwidth) {
    nlohmann::json result = {{"prompt_tokens", s.prompt_tokens},
                             {"prefill_seconds", s.prefill_seconds},
                             {"completion_tokens", s.completion_tokens},
                             {"decode_tokens", s.decode_tokens},
                             {"decode_seconds", s.decode_seconds},
                             {"decode_steps", s.steps},
                             {"decode_bytes", s.step_bytes}};
    if (read_bandwidth > 0) result["read_bandwidth"] = read_bandwidth;
    return result;
}

double bandwidth_to_show(const GenerateStatistics& statistics, const std::function<double()>& read_bandwidth) {
    // A shorter run is not accurate enough to compare, and the measurement would take longer than the run.
    return statistics.decode_seconds > 0.5 ? read_bandwidth() : 0;
}

void sample(Engine& engine, const SampleJob& job, const Tokenizer* tokenizer,
            const std::function<double()>& read_bandwidth, std::ostream& out, std::ostream& log) {
    const bool logprobs = engine.options.logprobs;
    const int64_t variants = std::max<int64_t>(int64_t(job.adapters.size()), 1);
    const int64_t count = int64_t(job.prompts.size()) * variants * job.num_samples;
    int64_t longest = 0;
    for (const std::vector<int32_t>& tokens : job.tokens) longest = std::max(longest, int64_t(tokens.size()));
    job.policy.check(engine.options.context, longest);  // before a prompt is printed
    for (size_t i = 0; i < job.tokens.size(); i++) {
        const std::string note = job.policy.cut_note(engine.options.context, int64_t(job.tokens[i].size()));
        if (!note.empty()) log << "train_gpt: sample: prompt " << i + 1 << ": " << note << "\n";
    }
    const auto prompt_of = [&](int64_t completion) { return size_t(completion / job.num_samples / variants); };
    const auto adapter_of = [&](int64_t completion) {
        return job.adapters.empty() ? -1 : static_cast<int32_t>(completion / job.num_samples % variants);
    };
    std::ostringstream discarded;  // with json, only one object is printed, at the end
    std::vector<std::string> prompts;
    for (int64_t i = 0; i < count; i++) prompts.push_back(job.prompts[prompt_of(i)]);
    SampleOutput output(job.json ? discarded : out, prompts);
    std::vector<Completion> completions;
    std::vector<Request> requests;
    completions.reserve(size_t(count));
    for (int64_t i = 0; i < count; i++) {
        completions.emplace_back(tokenizer, job.completion,
                                 [&output, i](std::string_view text) { output.add(size_t(i), text); });
        requests.push_back({job.tokens[prompt_of(i)], 0, i, &completions.back(), {}});
        requests.back().adapter = adapter_of(i);
        requests.back().top_logprobs = engine.options.top_logprobs;
    }
    const GenerateStatistics statistics = generate(engine, requests, job.policy, {}, [&](const Request& r) {
        const Completion& completion = *r.completion;
        std::string ids;
        for (const int32_t id : completion.tokens()) ids += tokenizer ? "" : str(id, " ");
        output.add(size_t(r.sequence), ids);
        output.finish(size_t(r.sequence), logprobs ? logprob_lines(completion, tokenizer) : "");
    });
    const double bandwidth = bandwidth_to_show(statistics, read_bandwidth);
    if (!job.json) {
        log << statistics_text(statistics, bandwidth);
        return;
    }
    nlohmann::json result = {{"samples", nlohmann::json::array()},
                             {"statistics", statistics_json(statistics, bandwidth)}};
    for (int64_t i = 0; i < count; i++) {
        const Completion& c = completions[size_t(i)];
        result["samples"].push_back(
            {{"prompt", prompts[size_t(i)]}, {"text", c.text()}, {"tokens", c.tokens()}, {"finish", c.finish()}});
        if (!job.adapters.empty()) result["samples"].back()["adapter"] = job.adapters[size_t(adapter_of(i))];
        if (logprobs) result["samples"].back()["logprobs"] = c.logprobs();
        if (engine.options.top_logprobs > 0) result["samples"].back()["top_logprobs"] = top_logprobs_json(c, tokenizer);
    }
    out << result.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}
