// From prompts to texts: what ends a text, what of it may be shown already, and what happens when its context is full.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "infer/engine.h"

struct CompletionOptions {
    int64_t max_tokens = 256;
    std::vector<std::string> stop;  // the text ends before the first of these
    std::vector<int32_t> eos;       // tokens that end the text
};

// A text as it grows, token by token.
class Completion {
  public:
    // show receives the text piece by piece as soon as nothing can change it any more: whole UTF-8 characters that are
    // not the beginning of a stop string. tokenizer may be null: then there must be no stop strings, and there is no
    // text.
    Completion(const Tokenizer* tokenizer, const CompletionOptions& options,
               std::function<void(std::string_view)> show = {});

    // Whether the text ends here. A token of `eos` is not part of it.
    bool add(int32_t token, float logprob = 0);
    // Ends it for another reason: "context" or "interrupted".
    void end(const char* reason);

    const std::vector<int32_t>& tokens() const { return ids; }
    const std::vector<float>& logprobs() const { return probabilities; }  // of tokens
    const std::string& text() const { return shown_text; }                // cut before a stop string
    const char* finish() const { return reason; }  // "length", "eos", "stop", …; null while it goes on

  private:
    void show_up_to(size_t end);

    std::optional<TextStream> stream;  // holds back a character until it is whole
    const CompletionOptions& options;
    std::function<void(std::string_view)> show;
    std::vector<int32_t> ids;
    std::vector<float> probabilities;
    std::string shown_text;
    size_t shown = 0;
    const char* reason = nullptr;
};

// What happens to a text that has filled its context.
struct ContextPolicy {
    bool slide = true;  // else the text ends
    int64_t keep = 0;   // sliding, this many tokens of its beginning stay, and of the rest the later half
};

struct Request {
    std::vector<int32_t> tokens;  // the text so far
    int64_t cached = 0;           // so many of them are in the cache already (of an engine with one slot)
    int64_t sequence = 0;         // keys its draws
    Completion* answer = nullptr;
    std::vector<int32_t> context;  // when it is done: the text with its answer, as far as it has not slid away. The
                                   // cache holds its first engine.length() tokens at most, `end` after them included
    int32_t end = -1;              // the token that ended it and is not part of it; -1: none
};

struct GenerateStatistics {
    int64_t prompt_tokens = 0, completion_tokens = 0;   // drawn by a step, that is all but the first of each text
    int64_t steps = 0, step_texts = 0, step_bytes = 0;  // decode steps, and texts and bytes summed over them
    double prefill_seconds = 0, decode_seconds = 0;

    void add(const GenerateStatistics& other);
};

// Answers all requests, as many at a time as the engine has slots; those that wait take the slots of finished ones.
// interrupted ends all texts at the next step; done is told of each that ends. Throws Error for a prompt that has no
// room, where it must not slide.
GenerateStatistics generate(Engine& engine, std::vector<Request>& requests, const ContextPolicy& policy,
                            const std::function<bool()>& interrupted = {},
                            const std::function<void(const Request&)>& done = {});
