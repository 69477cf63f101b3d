// How a conversation is written for a model that was trained on conversations. Three formats are known:
//
//   ChatML   <|im_start|>role\ncontent<|im_end|>\n …
//   LLaMA-2  <s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser [/INST] answer </s><s>[INST] user [/INST] …
//   LLaMA-3  <|begin_of_text|><|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|> …
//
// Which one a model wants is recognised by the marks that its template (Jinja, in tokenizer_config.json or
// chat_template.jinja) contains; the template itself is not run. Of what a template may add by itself, the system
// message that many ChatML templates begin with is taken over; dates and tool descriptions are not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"

enum class ChatFormat : uint8_t { ChatML, Llama2, Llama3 };

struct ChatTemplate {
    ChatFormat format = ChatFormat::ChatML;
    std::string default_system;  // the system message that the template itself begins with; empty: none
};

// The template of a model directory. Throws Error where there is none or it is of none of the three formats.
ChatTemplate find_chat_template(const std::string& model_directory);

// The format of a template's text; where names it in errors.
ChatTemplate recognise_chat_template(const std::string& text, const std::string& where);

const char* chat_format_name(ChatFormat format);

// The tokens of a conversation, turn by turn. Only the format's own marks become special tokens: the same characters in
// what somebody wrote stay text.
class ChatWriter {
  public:
    // Throws Error where the tokenizer lacks one of the format's marks.
    ChatWriter(ChatFormat format, const Tokenizer& tokenizer);

    // What a conversation begins with; system may be empty. LLaMA-2 writes it into the first question.
    std::vector<int32_t> begin(const std::string& system);
    // A question, up to where the answer begins.
    std::vector<int32_t> question(const std::string& text);
    // What follows an answer, with the token that ends a turn, which is no part of the answer's tokens.
    std::vector<int32_t> end_of_answer() const;

    // The tokens with which a model ends its turn.
    const std::vector<int32_t>& end_tokens() const { return ends; }

  private:
    int32_t mark(const char* text) const;
    void text(std::vector<int32_t>& tokens, const std::string& content) const;

    const ChatFormat format;
    const Tokenizer& tokenizer;
    std::vector<int32_t> ends;
    std::string system_of_first_question;
    bool first_question = true;
};
