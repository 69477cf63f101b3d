// Training examples: the tokens of a conversation, and which of them are loss tokens.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "data/chat_template.h"
#include "data/tokenizer.h"

struct Example {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> loss;  // 1: a loss token, 0: only an input
};

// The tokens are those of the whole conversation, as ChatTemplate::tokens() writes it. The loss tokens of the assistant
// turn messages[i] are those between the rendering of messages[0, i) with the start of an assistant turn and that of
// messages[0, i + 1), through the token that ends the turn: the first special token after all that came from the
// message, or, where several follow, the first of ChatTemplate::end_tokens(). A token that prompt and response share is
// a loss token. more: the template's variables besides messages, as tools.
// If stored turns do not begin as the generation prompt, but the only response begins with what that ends with
// ("<think>" of DeepSeek-R1, whose reasoning the template leaves out), the example is the generation prompt and the
// response. Throws Error if there is no assistant turn to learn, if a special token stands as text in what the example
// has of the messages, if the template refuses them, or if it writes a turn otherwise when more turns follow, as
// Qwen3's template does with reasoning.
Example encode_conversation(const std::vector<Message>& messages, const ChatTemplate& chat_template, const std::tm& now,
                            const Tokenizer& tokenizer, const jinja::Template::Variables& more = {});

// Without a template. The tokens are those that the tokenizer puts in front of a text, the prompt, the response, and
// end-of-text. Loss tokens are those from the first one that is not the prompt's own, end-of-text included. Throws
// Error if a message holds a special token as text.
Example encode_prompt_response(const std::string& prompt, const std::string& response, const Tokenizer& tokenizer);
