// The model that the server answers for, as the parts of serve/ read it. Nothing changes while the server runs.
#pragma once

#include <ctime>
#include <memory>

#include "data/chat_template.h"
#include "infer/engine.h"

struct ServedModel {
    std::vector<std::string> names;  // the model, then its adapters in the order of the engine's
    Tokenizer tokenizer;
    std::unique_ptr<const ChatTemplate> chat_template;  // null: the model has none
    ModelConfig config;
    SamplingOptions defaults;
    bool fixed_seed = false;            // a request without a seed has the default one; else a random one
    std::vector<int32_t> start_tokens;  // of every text; the start token where a prompt would be empty
    std::vector<int32_t> end_tokens, end_of_turn_tokens;  // that end a completion, and a response
    int64_t context = 0;                                  // of a sequence
    std::time_t created = 0;

    bool chats() const { return chat_template != nullptr; }
};
