// The options of commands that complete prompts on their own: `sample`, and `eval --answers`.
#pragma once

#include "commands/cli.h"
#include "data/tokenizer.h"

struct GenerationFlags {
    SamplingFlags sampling;
    int64_t max_tokens = 256, num_samples = 1, batch_size = 64;
    int64_t context = 0;  // 0: the longest prompt with its completion, at most the rows of the position table
    ContextPolicy policy;
    std::vector<std::string> stop;
    bool ignore_eos = false, batch_invariant = false;
};

// All but --batch-size.
void add_generation_options(CLI::App& app, GenerationFlags& options);

// The number of completions of so many prompts. of: what the error says of them. Throws Error for too many for one run.
int64_t completion_count(int64_t num_samples, int64_t prompts, const char* of = "");
// What an engine needs for so many completions of prompts of at most `longest` tokens. tokenizer may be null. Throws
// the Error of ContextPolicy::check().
EngineOptions generation_engine(const GenerationFlags& flags, const ModelOptions& model, const ModelSource& source,
                                const Tokenizer* tokenizer, int64_t count, int64_t longest, const Args& args);
// When completions end.
CompletionOptions completion_options(const GenerationFlags& flags, const ModelSource& source,
                                     const Tokenizer* tokenizer);
