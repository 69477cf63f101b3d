#include "infer/sample_output.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "runtime/log.h"

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

std::string logprob_lines(const Answer& answer, const Tokenizer* tokenizer) {
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

std::vector<std::string> split_prompts(const std::string& text) {
    std::vector<std::string> prompts(1);
    for (size_t begin = 0; begin < text.size();) {
        const size_t newline = text.find('\n', begin);
        const std::string line = text.substr(begin, newline - begin);
        begin = newline == std::string::npos ? text.size() : newline + 1;
        if (line == "---") {
            if (!prompts.back().empty()) prompts.back().pop_back();  // the newline before
            prompts.emplace_back();
        } else {
            prompts.back() += line;
            if (newline != std::string::npos) prompts.back() += '\n';
        }
    }
    if (prompts.size() > 1 && !prompts.back().empty() && prompts.back().back() == '\n') prompts.back().pop_back();
    return prompts;
}

std::string statistics_text(const GenerateStatistics& s, double read_bandwidth) {
    char text[256];
    std::snprintf(text, sizeof text, "prompt: %s tokens in %.3f s, %.0f tokens/s\n",
                  with_commas(s.prompt_tokens).c_str(), s.prefill_seconds,
                  double(s.prompt_tokens) / std::max(s.prefill_seconds, 1e-9));
    std::string lines = text;
    if (s.steps == 0) return lines;
    const double rate = double(s.answer_tokens) / s.decode_seconds, bytes = double(s.step_bytes) / s.decode_seconds;
    std::snprintf(text, sizeof text,
                  "answer: %s tokens in %.3f s, %.1f tokens/s, %.1f for each text, weights and cache read at %.1f GB/s",
                  with_commas(s.answer_tokens).c_str(), s.decode_seconds, rate,
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
    nlohmann::json result = {{"prompt_tokens", s.prompt_tokens}, {"prefill_seconds", s.prefill_seconds},
                             {"answer_tokens", s.answer_tokens}, {"decode_seconds", s.decode_seconds},
                             {"decode_steps", s.steps},          {"decode_bytes", s.step_bytes}};
    if (read_bandwidth > 0) result["read_bandwidth"] = read_bandwidth;
    return result;
}
