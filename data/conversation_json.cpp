#include "data/conversation_json.h"

#include "runtime/files/json_keys.h"

using nlohmann::ordered_json;

namespace {

// As strings() of data/conversations.py: without words that are no text, and reasoning once.
void add_texts(const ordered_json& value, std::vector<std::string>& out) {
    if (value.is_string()) out.push_back(value.get<std::string>());
    if (!value.is_structured()) return;
    const bool has_reasoning = value.contains("reasoning_content");
    for (const auto& [key, item] : value.items()) {
        const bool is_label = key == "role" || key == "type";
        const bool again = has_reasoning && (key == "thinking" || key == "reasoning");
        if (value.is_array() || !(is_label || again)) add_texts(item, out);
    }
}

std::string joined(const ordered_json& parts) {
    std::string out;
    for (const ordered_json& part : parts) {
        if (&part != &parts.front()) out += '\n';
        out += part.at("text").get<std::string>();
    }
    return out;
}

Message read_message(ordered_json json, bool parts) {
    Message out;
    out.role = json.at("role").get<std::string>();
    if (const auto content = json.find("content"); content != json.end()) {
        out.content = content->is_array() ? joined(*content) : content->get<std::string>();
        if (!parts) *content = out.content;
    }
    for (const char* name : {"tool_calls", "function_call", "reasoning_content"})
        out.no_content |= out.content.empty() && json.contains(name);
    jinja::Dict fields = jinja::Value(json, jinja::CONTENT).dict().copy(nullptr);
    fields.set("role", jinja::Text(out.role));
    out.fields = jinja::Value(std::move(fields));
    return out;
}

}  // namespace

ConversationInput read_conversation(std::string_view json, bool parts) {
    const ordered_json root = parse_ordered_json(json);
    ConversationInput out;
    add_texts(root, out.texts);
    for (const ordered_json& message : root.at("messages")) out.messages.push_back(read_message(message, parts));
    for (const ordered_json& i : root.value("inputs", ordered_json::array()))
        out.messages.at(i.get<size_t>()).is_input = true;
    for (const char* name : {"tools", "documents"})
        if (root.contains(name)) out.variables.emplace_back(name, jinja::Value(root[name], jinja::CONTENT));
    if (root.contains("chat_template_kwargs"))
        for (const auto& [name, value] : root["chat_template_kwargs"].items())
            out.variables.emplace_back(name, jinja::Value(value, jinja::CONTENT));
    return out;
}
