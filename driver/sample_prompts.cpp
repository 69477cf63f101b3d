#include "driver/sample_prompts.h"

#include <memory>

#include "data/chat_template.h"
#include "infer/prompts.h"
#include "runtime/files/files.h"

SamplePrompts read_sample_prompts(const std::string& path, const DataDirectory& data, const ModelSource& source,
                                  int64_t seq_len) {
    SamplePrompts result;
    result.completion.max_tokens = 64;
    const Tokenizer tokenizer(data.tokenizer_path());
    if (path.empty()) {
        result.prompts = {{"", {start_token(source.config, &tokenizer)}}};
        return result;
    }
    result.completion.eos = end_tokens(source, &tokenizer);
    std::unique_ptr<ChatTemplate> chat;
    if (data.chat_template) {
        require(ChatTemplate::exists(source.files), "--sample-prompts: ", data.path,
                " was made with a chat template, but ", source.name,
                " has none; start from a model directory that has one, or leave the option out");
        chat = std::make_unique<ChatTemplate>(source.files);
        for (const int32_t id : chat->end_tokens(tokenizer)) result.completion.eos.push_back(id);
    }
    for (std::string& text : read_prompts(path)) {
        std::vector<int32_t> tokens = chat ? chat->tokens({{"user", text}}, true, local_time_now(), tokenizer)
                                           : prompt_tokens(text, source, &tokenizer);
        require(int64_t(tokens.size()) <= seq_len, "--sample-prompts: prompt ", result.prompts.size() + 1, " of ", path,
                " has ", tokens.size(), " tokens, more than --seq-len ", seq_len, "; shorten it");
        result.prompts.push_back({std::move(text), std::move(tokens)});
    }
    return result;
}
