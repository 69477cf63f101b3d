// Chat formats: how a conversation is written for a model that was trained on conversations. Three are known:
//
//   ChatML   <|im_start|>role\ncontent<|im_end|>\n …
//   LLaMA-2  <s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser [/INST] assistant </s><s>[INST] user [/INST] …
//   LLaMA-3  <|begin_of_text|><|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|> …
//
// The format is recognised by the special tokens in the model's template (Jinja, in tokenizer_config.json or
// chat_template.jinja). The template itself is not run. Many ChatML templates begin with a default system message,
// which is used too; dates and tool descriptions that a template may add are not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"

enum class ChatFormat : uint8_t { ChatML, Llama2, Llama3 };

struct ChatTemplate {
    ChatFormat format = ChatFormat::ChatML;
    std::string default_system;  // the template's own system message; empty: none
};

// The template of a model directory. Throws Error if there is none or its format is not one of the three.
ChatTemplate find_chat_template(const std::string& model_directory);

// Recognises the format of a template's text. `where` names the template in errors.
ChatTemplate recognise_chat_template(const std::string& text, const std::string& where);

const char* chat_format_name(ChatFormat format);

// Writes the tokens of a conversation, turn by turn. Only the format itself produces special tokens: the same
// characters in a user turn stay text.
class ChatWriter {
  public:
    // Throws Error if the tokenizer lacks one of the format's special tokens.
    ChatWriter(ChatFormat format, const Tokenizer& tokenizer);

    // The start of a conversation. system may be empty. LLaMA-2 writes it into the first user turn.
    std::vector<int32_t> begin(const std::string& system);
    // A user turn, and the start of the assistant turn that follows it.
    std::vector<int32_t> user_turn(const std::string& text);
    // The end of an assistant turn, starting with its end token, which the tokens of the response do not include.
    std::vector<int32_t> end_of_assistant_turn() const;

    // The tokens with which a model ends its turn.
    const std::vector<int32_t>& end_tokens() const { return ends; }

  private:
    int32_t special_token(const char* text) const;
    void text(std::vector<int32_t>& tokens, const std::string& content) const;

    const ChatFormat format;
    const Tokenizer& tokenizer;
    std::vector<int32_t> ends;
    std::string system_of_first_turn;
    bool first_turn = true;
};
