#include "data/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

constexpr const char* TOKEN_NAMES[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                       "sep_token", "cls_token", "mask_token"};

// The default one of a model's templates; null if it has none.
json default_template(const json& config) {
    const json found = config.is_object() ? config.value("chat_template", json()) : json();
    if (!found.is_array()) return found;
    json chosen;  // a list of {"name", "template"}
    for (const json& one : found) {
        if (one.is_object() && (chosen.is_null() || one.value("name", json()) == "default"))
            chosen = one.value("template", json());
    }
    return chosen;
}

std::vector<int32_t> encode_from(const jinja::Text& text, size_t begin, const Tokenizer& tokenizer) {
    std::vector<bool> may_be_special;
    for (size_t i = begin; i < text.size(); i++) may_be_special.push_back(!(text.marks[i] & jinja::CONTENT));
    return tokenizer.encode_marked(std::string_view(text.chars).substr(begin), std::move(may_be_special));
}

}  // namespace

std::tm local_time_now() {
    const std::time_t now = std::time(nullptr);
    std::tm out = {};
    localtime_r(&now, &out);
    return out;
}

ChatTemplate::Source ChatTemplate::read(const std::string& directory) {
    Source out;
    const std::string config_path = join_path(directory, "tokenizer_config.json");
    const json config = path_exists(config_path) ? json(read_json(config_path)) : json::object();
    for (const char* name : TOKEN_NAMES) {
        json token = config.is_object() ? config.value(name, json()) : json();
        if (token.is_object()) token = token.value("content", json());
        if (token.is_string()) out.special_tokens.emplace_back(name, jinja::Text(token.get<std::string>()));
    }
    out.path = join_path(directory, "chat_template.jinja");
    if (path_exists(out.path)) {
        out.text = read_file(out.path, int64_t(1) << 24);
        return out;
    }
    const json found = default_template(config);
    if (found.is_string()) {
        out.path = config_path + ": chat_template";
        out.text = found.get<std::string>();
    } else {
        out.path.clear();
    }
    return out;
}

ChatTemplate::Source ChatTemplate::read_existing(const std::string& directory) {
    Source source = read(directory);
    require(!source.path.empty(), directory,
            ": no chat template in tokenizer_config.json or chat_template.jinja, so this model was not trained for "
            "conversations; use 'sample'");
    return source;
}

ChatTemplate::ChatTemplate(const std::string& model_directory) : ChatTemplate(read_existing(model_directory)) {}

bool ChatTemplate::exists(const std::string& model_directory) {
    return !read(model_directory).path.empty();
}

ChatTemplate::ChatTemplate(Source source)
    : path(std::move(source.path)), program(source.text, path), special_tokens(std::move(source.special_tokens)) {}

jinja::Text ChatTemplate::render(const std::vector<Message>& messages, bool add_generation_prompt,
                                 const std::tm& now) const {
    std::vector<jinja::Value> list;
    for (const Message& message : messages) {
        jinja::Dict one;
        one.set(jinja::Text("role"), jinja::Text(message.role));
        one.set(jinja::Text("content"), jinja::Text(message.content, jinja::CONTENT));
        list.emplace_back(std::move(one));
    }
    jinja::Template::Variables variables = special_tokens;
    variables.emplace_back("messages", jinja::Value(std::move(list), jinja::Sequence::Kind::List));
    variables.emplace_back("add_generation_prompt", add_generation_prompt);
    variables.emplace_back("tools", jinja::None{});
    variables.emplace_back("documents", jinja::None{});
    try {
        return program.render(variables, now);
    } catch (const jinja::Refusal& e) {
        throw Error(str(path, " refuses the conversation: ", e.what()));
    }
}

std::vector<int32_t> ChatTemplate::tokens(const std::vector<Message>& messages, bool add_generation_prompt,
                                          const std::tm& now, const Tokenizer& tokenizer) const {
    return encode(render(messages, add_generation_prompt, now), tokenizer);
}

std::vector<int32_t> ChatTemplate::encode(const jinja::Text& text, const Tokenizer& tokenizer) {
    return encode_from(text, 0, tokenizer);
}

std::vector<int32_t> ChatTemplate::end_tokens(const Tokenizer& tokenizer) const {
    std::vector<int32_t> out;
    for (const auto& [name, value] : special_tokens) {
        const std::string& token = value.text().chars;
        if (name != "eos_token" || token.empty()) continue;
        out = tokenizer.encode(token, true);
        require(out.size() == 1, "the tokenizer has no token ", token,
                ", which tokenizer_config.json names eos_token; the two files belong to different models");
    }
    // The tokens that the template writes after the last byte of an assistant turn's content.
    const jinja::Text text = render({{"user", "x"}, {"assistant", "x"}}, false, local_time_now());
    const size_t last = text.marks.find_last_of(std::string{jinja::CONTENT, jinja::CONTENT | jinja::GENERATION});
    const std::vector<int32_t> ending =
        encode_from(text, last == std::string::npos ? text.size() : last + 1, tokenizer);
    const auto is_special = [&](int32_t id) { return tokenizer.is_special(id); };
    const auto found = std::find_if(ending.begin(), ending.end(), is_special);
    if (found != ending.end() && std::find(out.begin(), out.end(), *found) == out.end()) out.push_back(*found);
    return out;
}
