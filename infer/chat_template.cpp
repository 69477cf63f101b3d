#include "infer/chat_template.h"

#include <nlohmann/json.hpp>

#include "runtime/files/checkpoint.h"
#include "runtime/files/files.h"

using nlohmann::json;

namespace {

constexpr const char *IM_START = "<|im_start|>", *IM_END = "<|im_end|>";
constexpr const char *BEGIN_OF_TEXT = "<|begin_of_text|>", *START_HEADER = "<|start_header_id|>",
                     *END_HEADER = "<|end_header_id|>", *END_OF_TURN = "<|eot_id|>";
constexpr const char *INST = "[INST]", *SYS = "<<SYS>>";

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

std::string trimmed(const std::string& text) {
    const char* spaces = " \t\r\n";
    const size_t begin = text.find_first_not_of(spaces), end = text.find_last_not_of(spaces);
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// The plain text that a ChatML template writes between "<|im_start|>system\n" and "<|im_end|>"; "" if the template
// builds it from variables. Jinja strings write a newline as a newline or as \n.
std::string default_system(const std::string& text) {
    for (const char* newline : {"\\n", "\n"}) {
        const std::string head = std::string(IM_START) + "system" + newline;
        for (size_t at = text.find(head); at != std::string::npos; at = text.find(head, at + 1)) {
            const size_t begin = at + head.size(), end = text.find(IM_END, begin);
            if (end == std::string::npos) break;
            std::string content = text.substr(begin, end - begin);
            if (content.empty() || content.find_first_of("'\"{}+") != std::string::npos) continue;
            for (size_t i; (i = content.find("\\n")) != std::string::npos;) content.replace(i, 2, "\n");
            return content;
        }
    }
    return "";
}

}  // namespace

const char* chat_format_name(ChatFormat format) {
    return format == ChatFormat::ChatML ? "ChatML" : format == ChatFormat::Llama2 ? "LLaMA-2" : "LLaMA-3";
}

ChatTemplate recognise_chat_template(const std::string& text, const std::string& where) {
    if (contains(text, IM_START)) return {ChatFormat::ChatML, default_system(text)};
    if (contains(text, START_HEADER)) return {ChatFormat::Llama3, ""};
    if (contains(text, INST) && contains(text, SYS)) return {ChatFormat::Llama2, ""};
    throw Error(str(where, ": the chat template is not in ChatML (", IM_START, "), LLaMA-2 (", INST, " and ", SYS,
                    ") or LLaMA-3 (", START_HEADER,
                    ") format; use 'sample' and write the conversation into the prompt"));
}

ChatTemplate find_chat_template(const std::string& directory) {
    const std::string file = join_path(directory, "chat_template.jinja");
    if (path_exists(file)) return recognise_chat_template(read_file(file), file);
    const std::string path = join_path(directory, "tokenizer_config.json");
    json found;
    if (path_exists(path)) found = read_json(path).value("chat_template", json());
    // Several templates of one model are a list of {"name", "template"}; conversations use the default one.
    if (found.is_array()) {
        json chosen;
        for (const json& one : found) {
            if (one.is_object() && (chosen.is_null() || one.value("name", json()) == "default"))
                chosen = one.value("template", json());
        }
        found = chosen;
    }
    require(found.is_string(), directory,
            ": no chat template in tokenizer_config.json or chat_template.jinja, so this model was not trained for "
            "conversations; use 'sample'");
    return recognise_chat_template(found.get<std::string>(), path);
}

ChatWriter::ChatWriter(ChatFormat f, const Tokenizer& t) : format(f), tokenizer(t) {
    switch (format) {
        case ChatFormat::ChatML:
            special_token(IM_START);
            ends = {special_token(IM_END)};
            break;
        case ChatFormat::Llama2:
            special_token("<s>");
            ends = {special_token("</s>")};
            break;
        case ChatFormat::Llama3:
            special_token(BEGIN_OF_TEXT), special_token(START_HEADER), special_token(END_HEADER);
            ends = {special_token(END_OF_TURN)};
            break;
    }
}

int32_t ChatWriter::special_token(const char* text) const {
    const std::vector<int32_t> ids = tokenizer.encode(text, true);
    require(ids.size() == 1, "the tokenizer has no token ", text, ", which the ", chat_format_name(format),
            " chat format needs; the chat template belongs to another model");
    return ids[0];
}

void ChatWriter::text(std::vector<int32_t>& tokens, const std::string& content) const {
    const std::vector<int32_t> ids = tokenizer.encode(content);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
}

std::vector<int32_t> ChatWriter::begin(const std::string& system) {
    std::vector<int32_t> tokens;
    switch (format) {
        case ChatFormat::ChatML:
            if (system.empty()) break;
            tokens = {special_token(IM_START)};
            text(tokens, "system\n" + system);
            tokens.push_back(special_token(IM_END));
            text(tokens, "\n");
            break;
        case ChatFormat::Llama2:
            system_of_first_turn = system;
            break;
        case ChatFormat::Llama3:
            tokens = {special_token(BEGIN_OF_TEXT)};
            if (system.empty()) break;
            tokens.push_back(special_token(START_HEADER));
            text(tokens, "system");
            tokens.push_back(special_token(END_HEADER));
            text(tokens, "\n\n" + trimmed(system));
            tokens.push_back(special_token(END_OF_TURN));
            break;
    }
    return tokens;
}

std::vector<int32_t> ChatWriter::user_turn(const std::string& content) {
    std::vector<int32_t> tokens;
    switch (format) {
        case ChatFormat::ChatML:
            tokens = {special_token(IM_START)};
            text(tokens, "user\n" + content);
            tokens.push_back(special_token(IM_END));
            text(tokens, "\n");
            tokens.push_back(special_token(IM_START));
            text(tokens, "assistant\n");
            break;
        case ChatFormat::Llama2: {
            tokens = {special_token("<s>")};
            const std::string system = first_turn && !system_of_first_turn.empty()
                                           ? str(SYS, "\n", system_of_first_turn, "\n<</SYS>>\n\n")
                                           : "";
            text(tokens, str(INST, " ", trimmed(system + content), " [/INST]"));
            break;
        }
        case ChatFormat::Llama3:
            tokens = {special_token(START_HEADER)};
            text(tokens, "user");
            tokens.push_back(special_token(END_HEADER));
            text(tokens, "\n\n" + trimmed(content));
            tokens.push_back(special_token(END_OF_TURN));
            tokens.push_back(special_token(START_HEADER));
            text(tokens, "assistant");
            tokens.push_back(special_token(END_HEADER));
            text(tokens, "\n\n");
            break;
    }
    first_turn = false;
    return tokens;
}

std::vector<int32_t> ChatWriter::end_of_assistant_turn() const {
    std::vector<int32_t> tokens = {ends[0]};
    if (format == ChatFormat::ChatML) text(tokens, "\n");
    return tokens;
}
