#include "data/example.h"

#include <algorithm>

namespace {

void check_content(const std::string& content, const Tokenizer& tokenizer) {
    const std::string token = tokenizer.find_special(content);
    require(token.empty(), "a message holds the special token ", token, " as text; remove it");
}

template <typename T>
size_t shared_prefix(const T& a, const T& b) {
    const size_t n = std::min(a.size(), b.size());
    return size_t(std::mismatch(a.begin(), a.begin() + int64_t(n), b.begin()).first - a.begin());
}

// The end of the loss tokens of a turn that has the tokens [begin, end): after the special token that ends it.
size_t turn_end(const std::vector<int32_t>& tokens, size_t begin, size_t end, const Tokenizer& tokenizer) {
    const auto is_special = [&](int32_t id) { return tokenizer.is_special(id); };
    const auto first = tokens.begin() + int64_t(begin), last = tokens.begin() + int64_t(end);
    // A template that ignores add_generation_prompt starts the turn here, possibly with a special token.
    const auto response = std::find_if_not(first, last, is_special);
    const auto found = std::find_if(response, last, is_special);
    return size_t((found == last ? last : found + 1) - tokens.begin());
}

}  // namespace

Example encode_conversation(const std::vector<Message>& messages, const ChatTemplate& chat_template, const std::tm& now,
                            const Tokenizer& tokenizer) {
    for (const Message& message : messages) check_content(message.content, tokenizer);
    const jinja::Text whole = chat_template.render(messages, false, now);
    Example example;
    example.tokens = ChatTemplate::encode(whole, tokenizer);
    example.loss.assign(example.tokens.size(), 0);
    for (size_t i = 0; i < messages.size(); i++) {
        if (messages[i].role != "assistant") continue;
        const auto first_messages = [&](size_t n) {
            return std::vector<Message>(messages.begin(), messages.begin() + int64_t(n));
        };
        const bool last = i + 1 == messages.size();
        const jinja::Text prompt = chat_template.render(first_messages(i), true, now);
        const jinja::Text turn = last ? whole : chat_template.render(first_messages(i + 1), false, now);
        // Only what the template writes after the content may differ when more turns follow (Phi-3's end of the text).
        const size_t shared = shared_prefix(turn.chars, whole.chars);
        const bool content_follows = std::any_of(turn.marks.begin() + int64_t(shared), turn.marks.end(),
                                                 [](char mark) { return mark & jinja::CONTENT; });
        require(shared_prefix(prompt.chars, turn.chars) == prompt.size() && prompt.size() <= shared && !content_follows,
                chat_template.file(), ": writes the assistant turn ", i + 1,
                " otherwise when the rest of the conversation follows, so its loss tokens are not defined; leave out "
                "later turns, or use a template that only appends");
        const size_t begin = shared_prefix(ChatTemplate::encode(prompt, tokenizer), example.tokens);
        const size_t end = last ? example.tokens.size()
                                : std::max(begin, shared_prefix(ChatTemplate::encode(turn, tokenizer), example.tokens));
        std::fill(example.loss.begin() + int64_t(begin),
                  example.loss.begin() + int64_t(turn_end(example.tokens, begin, end, tokenizer)), uint8_t(1));
    }
    require(std::find(example.loss.begin(), example.loss.end(), 1) != example.loss.end(),
            "the conversation has no assistant turn, so there is nothing to learn; remove it");
    return example;
}

Example encode_prompt_response(const std::string& prompt, const std::string& response, const Tokenizer& tokenizer) {
    check_content(prompt, tokenizer);
    check_content(response, tokenizer);
    const std::vector<int32_t> text = tokenizer.encode(prompt + response);
    const size_t inputs = tokenizer.start_of_text().size() + shared_prefix(tokenizer.encode(prompt), text);
    Example example;
    example.tokens = tokenizer.start_of_text();
    example.tokens.insert(example.tokens.end(), text.begin(), text.end());
    example.tokens.push_back(tokenizer.end_of_text());
    example.loss.assign(example.tokens.size(), 1);
    std::fill_n(example.loss.begin(), inputs, uint8_t(0));
    return example;
}
