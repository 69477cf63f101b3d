// `train --sample-prompts`: the prompts that a run answers while it trains.
#pragma once

#include "data/token_files.h"
#include "infer/generate.h"
#include "models/model_source.h"

struct SamplePrompts {
    struct Prompt {
        std::string text;
        std::vector<int32_t> tokens;
    };
    std::vector<Prompt> prompts;
    CompletionOptions completion;
};

// The prompts of a file, separated by lines of ---. If the data was made with a chat template, each is a user turn, and
// the model's template writes it; else it is continued as it stands. Without a file: one sample without a prompt, which
// does not end early. Throws Error for a prompt of more than seq_len tokens, a model without the template, or a turn
// that the template refuses. data must have a tokenizer.
SamplePrompts read_sample_prompts(const std::string& path, const DataDirectory& data, const ModelSource& source,
                                  int64_t seq_len);
