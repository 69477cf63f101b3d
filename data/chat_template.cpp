#include "data/chat_template.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "data/declared_tokens.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

constexpr int64_t LONGEST = int64_t(1) << 24;  // bytes of a file

// `chat_template` as transformers reads it: text; or several templates by name, as an object or as a list of {"name",
// "template"}, of which conversations use the one named default, and those with tools the one named tool_use. Returns
// those two; empty if there is none.
std::map<std::string, std::string> read_templates(const json& config, const std::string& path) {
    const json found = config.is_object() ? config.value("chat_template", json()) : json();
    if (found.is_null()) return {};
    if (found.is_string()) return {{"default", found.get<std::string>()}};
    const std::string where = path + ": chat_template";
    require(found.is_array() || found.is_object(), where, " is ", shown(found),
            "; it must be a template, or an object of templates by name");
    json by_name = found.is_object() ? found : json::object();
    for (const json& one : found.is_array() ? found : json::array()) {
        require(one.is_object() && one.value("name", json()).is_string(), where, " is a list with ", shown(one),
                "; its elements must be {\"name\": ..., \"template\": ...}");
        by_name[one["name"].get<std::string>()] = one.value("template", json());
    }
    std::string names;
    for (const auto& [name, _] : by_name.items()) names += (names.empty() ? "" : ", ") + name;
    require(by_name.contains("default"), where, " has several templates (", names,
            ") and none named default; write the one to use to chat_template.jinja");
    std::map<std::string, std::string> out;
    for (const char* name : {"default", "tool_use"}) {
        if (!by_name.contains(name)) continue;
        require(by_name[name].is_string(), where, ": the template '", name, "' is ", shown(by_name[name]),
                ", not text");
        out[name] = by_name[name].get<std::string>();
    }
    return out;
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

ChatTemplate::Source ChatTemplate::read(const ModelFiles& model) {
    constexpr const char *CONFIG = "tokenizer_config.json", *TEMPLATE = "chat_template.jinja",
                         *TOOL_USE = "additional_chat_templates/tool_use.jinja";
    Source out;
    const std::string config_path = model.shown_as(CONFIG);
    const json config = model.has(CONFIG) ? parse_json_object(model.read(CONFIG), config_path) : json::object();
    for (const auto& [name, token] : read_declared_tokens(model).named)
        out.special_tokens.emplace_back(name, jinja::Text(token));
    // The files win over tokenizer_config.json, also where only one of them exists.
    out.path = model.shown_as(TEMPLATE);
    out.tool_use_path = model.shown_as(TOOL_USE);
    const bool has_file = model.has(TEMPLATE), has_tool_use = model.has(TOOL_USE);
    require(has_file || !has_tool_use, out.tool_use_path, ": is a template for conversations with tools, but ",
            out.path, ", the one for the others, is missing; add it");
    if (has_tool_use) out.tool_use = model.read(TOOL_USE, LONGEST);
    if (has_file) {
        out.text = model.read(TEMPLATE, LONGEST);
        return out;
    }
    std::map<std::string, std::string> found = read_templates(config, config_path);
    out.path = found.empty() ? "" : config_path + ": chat_template";
    out.tool_use_path = out.path + ".tool_use";
    out.text = found["default"];
    out.tool_use = found["tool_use"];
    return out;
}

ChatTemplate::Source ChatTemplate::read_existing(const ModelFiles& model) {
    Source source = read(model);
    require(!source.path.empty(), model.path(),
            ": no chat template in tokenizer_config.json or chat_template.jinja, so this model was not trained for "
            "conversations; use 'sample'");
    return source;
}

ChatTemplate::ChatTemplate(const ModelFiles& model) : ChatTemplate(read_existing(model)) {}

bool ChatTemplate::exists(const ModelFiles& model) {
    return !read(model).path.empty();
}

ChatTemplate::ChatTemplate(Source source)
    : path(std::move(source.path)), program(source.text, path), special_tokens(std::move(source.special_tokens)) {
    if (!source.tool_use.empty()) tool_use.emplace(source.tool_use, source.tool_use_path);
}

jinja::Text ChatTemplate::render(const std::vector<Message>& messages, bool add_generation_prompt, const std::tm& now,
                                 const jinja::Template::Variables& more, jinja::Growth* growth) const {
    jinja::Items list;
    for (const Message& message : messages) {
        if (!message.fields.is_undefined()) {
            list.add(message.fields);
            continue;
        }
        jinja::Dict one;
        one.set("role", jinja::Text(message.role));
        one.set("content", jinja::Text(message.content, jinja::CONTENT));
        list.add(std::move(one));
    }
    jinja::Template::Variables variables = more;  // the first one of a name counts
    variables.insert(variables.end(), special_tokens.begin(), special_tokens.end());
    const jinja::Value conversation(std::move(list), jinja::Kind::List);
    variables.emplace_back("messages", conversation);
    variables.emplace_back("add_generation_prompt", add_generation_prompt);
    variables.emplace_back("tools", jinja::None{});
    variables.emplace_back("documents", jinja::None{});
    const auto is_tools = [](const auto& variable) { return variable.first == "tools" && !variable.second.is_none(); };
    const bool has_tools = std::any_of(more.begin(), more.end(), is_tools);
    const jinja::Template& used = tool_use && has_tools ? *tool_use : program;
    try {
        return growth ? used.render(variables, now, conversation, *growth) : used.render(variables, now);
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

bool ChatTemplate::reads_parts() const {
    std::vector<Message> messages;
    for (const char* role : {"user", "assistant"}) {
        jinja::Dict part;
        part.set("type", jinja::Text("text", jinja::CONTENT));
        part.set("text", jinja::Text("x", jinja::CONTENT));
        jinja::Items parts;
        parts.add(std::move(part));
        jinja::Dict fields;
        fields.set("role", jinja::Text(role));
        fields.set("content", jinja::Value(std::move(parts), jinja::Kind::List));
        messages.push_back({role, "x", std::move(fields)});
    }
    const auto reads = [&](const jinja::Template::Variables& more) {
        std::string written;
        const jinja::Text text = render(messages, false, local_time_now(), more);
        for (size_t i = 0; i < text.size(); i++)
            if (text.marks[i] & jinja::CONTENT) written += text.chars[i];
        return written == "xx";
    };
    try {
        return reads({}) && (!tool_use || reads({{"tools", jinja::Value(jinja::Items(), jinja::Kind::List)}}));
    } catch (const Error&) {
        return false;
    }
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
