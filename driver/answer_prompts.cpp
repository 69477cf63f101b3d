#include "driver/answer_prompts.h"

#include <algorithm>

#include "infer/prompts.h"

void AnswerPrompts::add_end_tokens(std::vector<int32_t>& ends, const Tokenizer& tokenizer) const {
    if (!chat_template) return;
    for (const int32_t token : chat_template->end_tokens(tokenizer)) ends.push_back(token);
}

AnswerPrompts answer_prompts(const std::vector<Problem>& problems, const std::string& file, bool use_template,
                             const ModelSource& source, const Tokenizer& tokenizer) {
    AnswerPrompts out;
    if (use_template && ChatTemplate::exists(source.files))
        out.chat_template = std::make_unique<ChatTemplate>(source.files);
    const std::tm now = local_time_now();
    std::string text;
    for (const Problem& p : problems) {
        text += p.prompt;
        require(
            out.chat_template || p.messages.empty(), file, ": has messages, which need a chat template; ",
            use_template ? str(source.name, " has none, so give each line a prompt") : "leave out --chat-template off");
        const std::vector<Message> messages =
            p.messages.empty() ? std::vector<Message>{{"user", p.prompt}} : p.messages;
        out.tokens.push_back(out.chat_template ? out.chat_template->tokens(messages, true, now, tokenizer)
                                               : prompt_tokens(p.prompt, source, &tokenizer));
        out.longest = std::max(out.longest, int64_t(out.tokens.back().size()));
    }
    out.note = lost_bytes_note(text, tokenizer);
    return out;
}
