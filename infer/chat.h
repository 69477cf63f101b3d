// A conversation with a chat model: reads user turns from one stream and writes responses to another. The KV cache
// keeps the conversation between turns.
#pragma once

#include <functional>
#include <istream>
#include <ostream>
#include <string>

#include "infer/chat_template.h"
#include "infer/generate.h"

struct ChatOptions {
    std::string system;
    CompletionOptions response;  // eos: the tokens that end a response, in addition to those of the chat format
    bool slide = true;           // when the context is full, drop old turns; else the conversation starts again
    bool prompts = true;         // show "> " before each user turn
};

// Reads one user turn per line until the stream ends. Empty lines are skipped, /reset starts a new conversation, /exit
// ends. interrupted() is called after each token: true ends the response, and the conversation continues.
// begin_response and end_response are called around each response. engine must have one slot. Returns the sum of the
// statistics.
GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& format,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const std::function<bool()>& interrupted, const std::function<void()>& begin_response,
                        const std::function<void()>& end_response);
