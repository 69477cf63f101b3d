// A conversation: questions from one stream, answers to another, with the cache of what was said kept between rounds.
#pragma once

#include <functional>
#include <istream>
#include <ostream>
#include <string>

#include "infer/chat_template.h"
#include "infer/generate.h"

struct ChatOptions {
    std::string system;
    CompletionOptions answer;  // with the tokens that end an answer, beside those of the format
    bool slide = true;         // when the context is full, forget old rounds; else the conversation ends
    bool prompts = true;       // show "> " where a question is awaited
};

// Reads a question a line until the stream ends; empty lines are passed over, /reset forgets what was said, /exit ends.
// interrupted is asked after each token: true stops the answer, and the conversation goes on. begin_answer and
// end_answer are called around each. engine must have one slot. Returns what was generated, summed up.
GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& format,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const std::function<bool()>& interrupted, const std::function<void()>& begin_answer,
                        const std::function<void()>& end_answer);
