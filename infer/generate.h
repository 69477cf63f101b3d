// Text generation from any model that can name the next token.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "kernels/sampling.h"

// What generation asks of a model.
class LanguageModel {
  public:
    virtual ~LanguageModel() = default;
    // Draws the token that follows `tokens` (at least one; only the last of them are seen where the context is full).
    // (sequence, step) key the draw.
    virtual int32_t next_token(const std::vector<int32_t>& tokens, const SamplingOptions& sampling, int64_t sequence,
                               int64_t step) = 0;
};

struct GenerateOptions {
    int64_t max_tokens = 256;
    SamplingOptions sampling;
    int64_t sequence = 0;           // which of several samples this is
    std::vector<std::string> stop;  // the text ends before the first of these
    int32_t eos = -1;               // token that ends the text; -1: none
};

struct Generated {
    std::vector<int32_t> tokens;  // drawn after the prompt, without the end-of-text token
    std::string text;             // decoded, cut before a stop string; empty without a tokenizer
    const char* finish;           // "length", "eos" or "stop"
};

// tokenizer may be null: then stop strings must be empty and no text is made.
Generated generate(LanguageModel& model, const Tokenizer* tokenizer, const std::vector<int32_t>& prompt,
                   const GenerateOptions& options);
