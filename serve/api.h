// The requests of OpenAI's API (API reference, "Completions" and "Chat completions") that the server answers, and its
// errors. What a request holds is used, or refused by name.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "infer/generate.h"
#include "serve/served_model.h"

// Answered in OpenAI's form, {"error": {"message", "type", "param", "code"}}, with this HTTP status.
struct ApiError : Error {
    ApiError(int http_status, const std::string& message, const std::string& parameter = "",
             const std::string& error_code = "")
        : Error(message), status(http_status), param(parameter), code(error_code) {}
    int status;
    std::string param, code;
    std::string body() const;
};

// A request for completions, checked.
struct CompletionCall {
    bool chat = false;
    std::string model;
    int32_t adapter = -1;
    std::vector<std::vector<int32_t>> prompts;  // n completions of each
    int64_t n = 1;
    int64_t max_tokens = 0;  // of the first completion of each prompt: as many as fit, if the request does not say
    bool fills_context = false;
    std::vector<std::string> stop;
    SamplingOptions sampling;
    bool stream = false, include_usage = false, echo = false, logprobs = false, ignore_eos = false;
    int64_t top_logprobs = 0;

    // The most tokens of a completion of a prompt. 0: none, only the prompt is asked for.
    int64_t most_tokens(const ServedModel& served, size_t prompt) const {
        return fills_context ? served.context - int64_t(prompts[prompt].size()) : max_tokens;
    }
};

// Throws ApiError. seed: where the request has none.
CompletionCall parse_completion(const std::string& body, const ServedModel& model, uint64_t seed);
CompletionCall parse_chat(const std::string& body, const ServedModel& model, uint64_t seed);

// {"prompt": text, "add_special_tokens": true} or {"messages": …} to {"tokens", "count", "max_model_len"}, and
// {"tokens": […]} to {"prompt": text}.
std::string tokenize(const std::string& body, const ServedModel& model);
std::string detokenize(const std::string& body, const ServedModel& model);
std::string list_models(const ServedModel& model);

// A JSON string; what is not UTF-8 becomes U+FFFD.
std::string json_string(std::string_view text);
