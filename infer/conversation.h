// A conversation with a chat model: reads user turns from one stream and writes responses to another. The model's chat
// template writes the whole conversation before each response. The KV cache keeps the longest common prefix of these
// tokens and those in the cache: all earlier turns, unless the template rewrites them.
#pragma once

#include <functional>
#include <istream>
#include <optional>
#include <ostream>
#include <string>

#include "data/chat_template.h"
#include "infer/generate.h"

struct ChatOptions {
    std::optional<std::string> system;  // none: the template's own system message, if it has one
    CompletionOptions response;         // eos: the tokens that end a response
    ContextPolicy policy;               // when the context is full: slide: drop old turns; else start again
    bool prompts = true;                // show "> " before each user turn
};

// What chat() calls: after each token, where true ends the response and the conversation continues; around each
// response.
struct ChatCallbacks {
    std::function<bool()> interrupted;
    std::function<void()> begin_response, end_response;
};

// Throws Error where the template refuses a user turn with this system message, or fails.
void check_conversation(const ChatTemplate& chat_template, const ChatOptions& options);

// Reads one user turn per line, with or without a carriage return at its end, until the stream ends. Empty lines are
// skipped, /reset starts a new conversation, /exit ends. engine must have one slot. Returns the sum of the statistics.
// Throws Error before it reads if the context cannot slide with the start of every conversation in it.
GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const ChatCallbacks& callbacks);
