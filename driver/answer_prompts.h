// Prompts with answers (data/answers.h) as a model reads them: for `eval --answers` and for reinforcement learning.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/answers.h"
#include "infer/generate.h"
#include "models/model_source.h"

struct AnswerPrompts {
    std::unique_ptr<ChatTemplate> chat_template;  // null: prompts are text
    std::vector<std::vector<int32_t>> tokens;
    int64_t longest = 0;
    std::string note;  // for the user, on bytes that the vocabulary lacks; "" if it lacks none

    // Adds the tokens with which the model ends its turn.
    void add_end_tokens(std::vector<int32_t>& ends, const Tokenizer& tokenizer) const;
};

// file: of the problems. use_template: each is a user turn of the model's chat template, where it has one. Throws Error
// for messages without a template, and for a prompt beyond the model's vocabulary.
AnswerPrompts answer_prompts(const std::vector<Problem>& problems, const std::string& file, bool use_template,
                             const ModelSource& source, const Tokenizer& tokenizer);

// What a run of reinforcement learning samples from.
struct RolloutData {
    std::vector<Problem> problems;
    AnswerPrompts prompts;  // in their order
    CompletionOptions completion;
};
