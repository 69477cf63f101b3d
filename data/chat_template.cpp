#include "data/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/declared_tokens.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

// `chat_template` as transformers reads it: text; or several templates by name, as an object or as a list of {"name",
// "template"}, of which conversations use the one named default. Null if there is none.
json default_template(const json& config, const std::string& path) {
    const json found = config.is_object() ? config.value("chat_template", json()) : json();
    if (found.is_null() || found.is_string()) return found;
    const std::string where = path + ": chat_template";
    require(found.is_array() || found.is_object(), where, " is ", found.dump(),
            "; it must be a template, or an object of templates by name");
    json by_name = found.is_object() ? found : json::object();
    for (const json& one : found.is_array() ? found : json::array()) {
        require(one.is_object() && one.value("name", json()).is_string(), where, " is a list with ", one.dump(),
                "; its elements must be {\"name\": ..., \"template\": ...}");
        by_name[one["name"].get<std::string>()] = one.value("template", json());
    }
    std::string names;
    for (const auto& [name, _] : by_name.items()) names += (names.empty() ? "" : ", ") + name;
    require(by_name.contains("default"), where, " has several templates (", names,
            ") and none named default; write the one to use to chat_template.jinja");
    require(by_name["default"].is_string(), where, ": the template 'default' is ", by_name["default"].dump(),
            ", not text");
    return by_name["default"];
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
    for (const auto& [name, token] : read_declared_tokens(directory).named)
        out.special_tokens.emplace_back(name, jinja::Text(token));
    out.path = join_path(directory, "chat_template.jinja");
    if (path_exists(out.path)) {
        out.text = read_file(out.path, int64_t(1) << 24);
        return out;
    }
    const json found = default_template(config, config_path);
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
    return render(messages, add_generation_prompt, now, nullptr);
}

jinja::Text ChatTemplate::render(const std::vector<Message>& messages, bool add_generation_prompt, const std::tm& now,
                                 jinja::Growth& growth) const {
    return render(messages, add_generation_prompt, now, &growth);
}

jinja::Text ChatTemplate::render(const std::vector<Message>& messages, bool add_generation_prompt, const std::tm& now,
                                 jinja::Growth* growth) const {
    jinja::Items list;
    for (const Message& message : messages) {
        jinja::Dict one;
        one.set("role", jinja::Text(message.role));
        one.set("content", jinja::Text(message.content, jinja::CONTENT));
        list.add(std::move(one));
    }
    jinja::Template::Variables variables = special_tokens;
    const jinja::Value conversation(std::move(list), jinja::Kind::List);
    variables.emplace_back("messages", conversation);
    variables.emplace_back("add_generation_prompt", add_generation_prompt);
    variables.emplace_back("tools", jinja::None{});
    variables.emplace_back("documents", jinja::None{});
    try {
        return growth ? program.render(variables, now, conversation, *growth) : program.render(variables, now);
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
    const int32_t turn = end_of_turn(tokenizer);
    if (turn >= 0 && std::find(out.begin(), out.end(), turn) == out.end()) out.push_back(turn);
    return out;
}

int32_t ChatTemplate::end_of_turn(const Tokenizer& tokenizer) const {
    const jinja::Text text = render({{"user", "x"}, {"assistant", "x"}}, false, local_time_now());
    const size_t last = text.marks.find_last_of(std::string{jinja::CONTENT, jinja::CONTENT | jinja::GENERATION});
    const std::vector<int32_t> ending =
        encode_from(text, last == std::string::npos ? text.size() : last + 1, tokenizer);
    const auto is_special = [&](int32_t id) { return tokenizer.is_special(id); };
    const auto found = std::find_if(ending.begin(), ending.end(), is_special);
    return found == ending.end() ? -1 : *found;
}
