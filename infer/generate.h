// Generates completions of prompts: decides what ends a completion, which part of its text can be shown already, and
// what happens when a sequence reaches the context limit.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "infer/engine.h"

struct CompletionOptions {
    int64_t max_tokens = 256;
    std::vector<std::string> stop;  // the completion ends before the first of these strings
    std::vector<int32_t> eos;       // tokens that end the completion
};

// A completion as it grows, token by token.
class Completion {
  public:
    // show receives the text in parts, each as soon as it is final: whole UTF-8 characters that cannot be the start of
    // a stop string. tokenizer may be null: then there must be no stop strings, and the completion has tokens but no
    // text.
    Completion(const Tokenizer* tokenizer, const CompletionOptions& options,
               std::function<void(std::string_view)> show = {});

    // Adds a token. Returns whether it ends the completion. A token of `eos` is not part of it.
    bool add(int32_t token, float logprob = 0, const std::vector<TokenLogprob>& top = {});
    // Ends the completion for another reason: "context" or "interrupted".
    void end(const char* reason);

    const std::vector<int32_t>& tokens() const { return ids; }
    const std::vector<float>& logprobs() const { return probabilities; }  // of tokens
    // The most likely tokens where each token was sampled; empty where they were not asked for.
    const std::vector<std::vector<TokenLogprob>>& top_logprobs() const { return most_likely; }
    const std::string& text() const { return shown_text; }  // cut before a stop string
    const char* finish() const { return reason; }           // "length", "eos", "stop", …; null until it ends

  private:
    void show_up_to(size_t end);

    std::optional<TextStream> stream;  // holds back the bytes of an incomplete character
    const CompletionOptions& options;
    std::function<void(std::string_view)> show;
    std::vector<int32_t> ids;
    std::vector<float> probabilities;
    std::vector<std::vector<TokenLogprob>> most_likely;
    std::string shown_text;
    size_t shown = 0;
    const char* reason = nullptr;
};

// The behaviour of a sequence that reaches the context limit.
struct ContextPolicy {
    bool slide = true;         // the context window slides; else the completion ends
    int64_t keep_tokens = 0;   // a slide keeps this many tokens of the beginning and the later half of the rest
    bool cut_prompts = false;  // a prompt longer than the context slides before generation starts; else it is an error

    // Throws Error if a context has no room to keep keep_tokens and slide, or if the longest prompt does not fit.
    void check(int64_t context, int64_t longest_prompt) const;
    // How many of the last tokens a slide keeps.
    int64_t tail(int64_t context) const { return std::max<int64_t>(1, (context - keep_tokens) / 2); }
    // A note for the user on a prompt that is cut; "" if it fits.
    std::string cut_note(int64_t context, int64_t prompt) const;
};

struct Request {
    std::vector<int32_t> tokens;  // the prompt
    int64_t cached = 0;           // how many of them are in the cache already (of an engine with one slot)
    int64_t sequence = 0;         // keys the random numbers that sample its tokens
    Completion* completion = nullptr;
    std::vector<int32_t> context;  // the tokens in the context window: prompt and completion so far. After the end the
                                   // cache holds at most engine.length() tokens of context followed by `end`
    int32_t end = -1;              // the token that ended the completion and is not part of it; -1: none
    float end_logprob = 0;         // its, and the most likely tokens in its place
    std::vector<TokenLogprob> end_top_logprobs = {};
    int64_t name_space = 0;  // requests of another one do not share pages with it (Engine::remember)
    int32_t adapter = -1;    // as in Prompt; nor do requests that use another one
    // As in Prompt.
    std::optional<SamplingOptions> sampling = {};
    std::vector<int32_t> mask = {};
    bool logprobs = false;
    int64_t top_logprobs = 0;
    bool prompt_logprobs = false;
    // Filled where prompt_logprobs is set, as in Engine::Step.
    std::vector<float> prompt_token_logprobs = {};
    std::vector<TokenLogprob> prompt_token_top_logprobs = {};
};

struct GenerateStatistics {
    int64_t prompt_tokens = 0;  // that were computed: not those that the cache had
    int64_t completion_tokens = 0;
    int64_t decode_tokens = 0;  // that decode steps sampled; an end token is in no completion
    int64_t steps = 0, step_sequences = 0, step_bytes = 0;  // decode steps; sequences and bytes summed over them
    // A step that computes prompts, too, counts as prefill: its time, and what it samples.
    double prefill_seconds = 0, decode_seconds = 0;

    void add(const GenerateStatistics& other);
};

// Completes all requests (infer/scheduler.h). When interrupted() returns true, all completions end at the next step.
// done is called for each request that ends. Throws the Error of ContextPolicy::check() before it starts.
GenerateStatistics generate(Engine& engine, std::vector<Request>& requests, const ContextPolicy& policy,
                            const std::function<bool()>& interrupted = {},
                            const std::function<void(const Request&)>& done = {});
