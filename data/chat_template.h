// A model's chat template: how a conversation is written for it. The template is a program in the language Jinja that
// comes with the model; data/jinja/ runs it. What came from messages stays text: a special token that somebody wrote
// into a message is encoded as its characters.
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "data/jinja/render.h"
#include "data/tokenizer.h"

struct Message {
    std::string role;  // "system", "user", "assistant"; a word of the program's, so it may be part of a special token
    std::string content;       // text
    jinja::Value fields = {};  // a dictionary of all that a template sees of the message; undefined: these two
    bool is_input = false;     // of an assistant turn: its tokens are no loss tokens
    bool no_content = false;   // of an assistant turn: it has calls of tools or reasoning, and no content
};

class ChatTemplate {
  public:
    // The template of a model: chat_template.jinja, and additional_chat_templates/tool_use.jinja for
    // conversations with tools; else `chat_template` in tokenizer_config.json (of several the ones named default and
    // tool_use). They have the tokens (bos_token, …) that data/declared_tokens.h names. Throws Error if there is none,
    // or if its syntax is wrong.
    explicit ChatTemplate(const ModelFiles& model);
    static bool exists(const ModelFiles& model);

    // The conversation as text; now: the date that a template may write. add_generation_prompt: with the start of an
    // assistant turn. more: variables besides messages, as tools and documents. growth: also finds where each message
    // begins in it. Throws Error where the template refuses the messages or fails.
    jinja::Text render(const std::vector<Message>& messages, bool add_generation_prompt, const std::tm& now,
                       const jinja::Template::Variables& more = {}, jinja::Growth* growth = nullptr) const;
    // Its tokens. Without special tokens in messages they are those of transformers' apply_chat_template().
    std::vector<int32_t> tokens(const std::vector<Message>& messages, bool add_generation_prompt, const std::tm& now,
                                const Tokenizer& tokenizer) const;

    // The tokens of what render() wrote.
    static std::vector<int32_t> encode(const jinja::Text& text, const Tokenizer& tokenizer);

    // Whether the template reads content that is a list of parts of text. Others write such a list as Python prints it,
    // or fail.
    bool reads_parts() const;

    // The first special token that the template writes after the content of an assistant turn; −1 if there is none.
    int32_t end_of_turn(const Tokenizer& tokenizer) const;
    // The tokens with which a model ends its turn: that one, and eos_token. Throws Error if eos_token is not a token.
    std::vector<int32_t> end_tokens(const Tokenizer& tokenizer) const;

    const std::string& file() const { return path; }
    // The program of the model's template for conversations without tools; "" if it has none.
    static std::string program_of(const ModelFiles& model) { return read(model).text; }

  private:
    struct Source {
        std::string path, text;
        std::string tool_use_path, tool_use;  // the template for conversations with tools; no text: there is none
        jinja::Template::Variables special_tokens;
    };
    explicit ChatTemplate(Source source);
    static Source read(const ModelFiles& model);  // without a path if there is no template
    static Source read_existing(const ModelFiles& model);

    const std::string path;
    const jinja::Template program;
    std::optional<const jinja::Template> tool_use;
    const jinja::Template::Variables special_tokens;
};

std::tm local_time_now();
