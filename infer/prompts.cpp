#include "infer/prompts.h"

#include <algorithm>

#include "runtime/error.h"
#include "runtime/files/files.h"
#include "runtime/text.h"

int32_t start_token(const ModelConfig& config, const Tokenizer* tokenizer) {
    if (config.bos >= 0) return config.bos;
    return std::max(tokenizer ? tokenizer->end_of_text() : config.eos, 0);
}

int64_t sampled_vocab(const ModelConfig& config, const Tokenizer* tokenizer) {
    return tokenizer ? std::min(tokenizer->vocab_size(), config.vocab_size) : config.vocab_size;
}

std::vector<int32_t> end_tokens(const ModelSource& source, const Tokenizer* tokenizer) {
    std::vector<int32_t> ids;
    if (tokenizer && tokenizer->end_of_text() >= 0) ids.push_back(tokenizer->end_of_text());
    if (source.config.eos >= 0) ids.push_back(source.config.eos);
    for (const int32_t id : declared_end_tokens(source)) ids.push_back(id);
    return ids;
}

namespace {

void remove_last_newline(std::string& text) {
    if (text.empty() || text.back() != '\n') return;
    text.pop_back();
    if (!text.empty() && text.back() == '\r') text.pop_back();
}

}  // namespace

std::vector<std::string> split_prompts(const std::string& text) {
    constexpr std::string_view BYTE_ORDER_MARK = "\xEF\xBB\xBF";
    std::vector<std::string> prompts(1);
    for (size_t begin = starts_with(text, BYTE_ORDER_MARK) ? BYTE_ORDER_MARK.size() : 0; begin < text.size();) {
        const size_t newline = text.find('\n', begin);
        const std::string line = text.substr(begin, newline - begin);
        begin = newline == std::string::npos ? text.size() : newline + 1;
        if (line == "---" || line == "---\r") {
            remove_last_newline(prompts.back());
            prompts.emplace_back();
        } else {
            prompts.back() += line;
            if (newline != std::string::npos) prompts.back() += '\n';
        }
    }
    remove_last_newline(prompts.back());
    return prompts;
}

std::vector<std::string> read_prompts(const std::string& path) {
    return split_prompts(read_file(path, int64_t(1) << 26));
}

std::string lost_bytes_note(const std::string& text, const Tokenizer& tokenizer) {
    const int64_t lost = tokenizer.lost_bytes(text);
    if (lost == 0) return "";
    return str(lost, lost == 1 ? " byte is" : " bytes are",
               " not in the tokenizer's vocabulary: the model does not see ", lost == 1 ? "it" : "them");
}

std::vector<int32_t> prompt_tokens(const std::string& prompt, const ModelSource& source, const Tokenizer* tokenizer) {
    require(tokenizer || prompt.empty(), source.name,
            " has no tokenizer.json, which a prompt needs; add the file or leave the prompt out");
    std::vector<int32_t> tokens;
    if (tokenizer) {
        tokens = tokenizer->start_of_text();
        const std::vector<int32_t> text = tokenizer->encode(prompt);
        tokens.insert(tokens.end(), text.begin(), text.end());
    }
    if (tokens.empty()) tokens = {start_token(source.config, tokenizer)};
    for (const int32_t id : tokens) {
        require(id < source.config.vocab_size, source.name, ": token ", id,
                " of the prompt is beyond the model's vocabulary of ", source.config.vocab_size,
                " tokens; its tokenizer.json belongs to another model");
    }
    return tokens;
}
