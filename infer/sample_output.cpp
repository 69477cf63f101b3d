#include "infer/sample_output.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/files/log.h"

SampleOutput::SampleOutput(std::ostream& o, std::vector<std::string> prompts)
    : out(o), waiting(std::move(prompts)), done(waiting.size(), false) {
    if (!waiting.empty()) start();
}

void SampleOutput::start() {
    if (turn > 0) out << "---\n";
    out << waiting[turn] << std::flush;
}

void SampleOutput::text(size_t answer, std::string_view piece) {
    if (answer == turn)
        out << piece << std::flush;
    else
        waiting[answer] += piece;
}

void SampleOutput::finish(size_t answer, const std::string& after) {
    text(answer, "\n" + after);
    done[answer] = true;
    while (turn < done.size() && done[turn]) {
        if (++turn < done.size()) start();
    }
}

std::string logprob_lines(const Completion& answer, const Tokenizer* tokenizer) {
    std::string lines;
    for (size_t i = 0; i < answer.tokens().size(); i++) {
        const int32_t id = answer.tokens()[i];
        const std::string token = tokenizer && tokenizer->contains(id) ? tokenizer->decode(id) : "";
        char number[64];
        std::snprintf(number, sizeof number, "%.6f %d ", double(answer.logprobs()[i]), id);
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
    const double rate = double(s.completion_tokens) / s.decode_seconds, bytes = double(s.step_bytes) / s.decode_seconds;
    std::snprintf(text, sizeof text,
                  "answer: %s tokens in %.3f s, %.1f tokens/s, %.1f for each text, weights and cache read at %.1f GB/s",
                  with_commas(s.completion_tokens).c_str(), s.decode_seconds, rate,
                  rate * double(s.steps) / double(s.step_texts), bytes / 1e9);
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
                             {"decode_seconds", s.decode_seconds},
                             {"decode_steps", s.steps},
                             {"decode_bytes", s.step_bytes}};
    if (read_bandwidth > 0) result["read_bandwidth"] = read_bandwidth;
    return result;
}

double bandwidth_to_show(const GenerateStatistics& statistics, const std::function<double()>& read_bandwidth) {
    // Shorter runs say little, and would wait longer for the measurement than for the text.
    return statistics.decode_seconds > 0.5 ? read_bandwidth() : 0;
}

void sample(Engine& engine, const SampleJob& job, const Tokenizer* tokenizer,
            const std::function<double()>& read_bandwidth, std::ostream& out, std::ostream& log) {
    const bool logprobs = engine.options.logprobs;
    const int64_t texts = int64_t(job.prompts.size()) * job.num_samples;
    const auto prompt_of = [&](int64_t text) { return size_t(text / job.num_samples); };
    std::ostringstream unseen;  // with json the whole is printed at the end
    std::vector<std::string> heads;
    for (int64_t i = 0; i < texts; i++) heads.push_back(job.prompts[prompt_of(i)]);
    SampleOutput output(job.json ? unseen : out, heads);
    std::vector<Completion> answers;
    std::vector<Request> requests;
    answers.reserve(size_t(texts));
    for (int64_t i = 0; i < texts; i++) {
        answers.emplace_back(tokenizer, job.answer,
                             [&output, i](std::string_view piece) { output.text(size_t(i), piece); });
        requests.push_back({job.tokens[prompt_of(i)], 0, i, &answers.back(), {}});
    }
    const GenerateStatistics statistics = generate(engine, requests, job.policy, {}, [&](const Request& r) {
        const Completion& answer = *r.answer;
        std::string ids;
        for (const int32_t id : answer.tokens()) ids += tokenizer ? "" : str(id, " ");
        output.text(size_t(r.sequence), ids);
        output.finish(size_t(r.sequence), logprobs ? logprob_lines(answer, tokenizer) : "");
    });
    const double bandwidth = bandwidth_to_show(statistics, read_bandwidth);
    if (!job.json) {
        log << statistics_text(statistics, bandwidth);
        return;
    }
    nlohmann::json result = {{"samples", nlohmann::json::array()},
                             {"statistics", statistics_json(statistics, bandwidth)}};
    for (int64_t i = 0; i < texts; i++) {
        const Completion& a = answers[size_t(i)];
        result["samples"].push_back(
            {{"prompt", heads[size_t(i)]}, {"text", a.text()}, {"tokens", a.tokens()}, {"finish", a.finish()}});
        if (logprobs) result["samples"].back()["logprobs"] = a.logprobs();
    }
    out << result.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}
