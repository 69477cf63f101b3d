#include "serve/api.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "infer/prompts.h"
#include "runtime/files/json_keys.h"
#include "serve/http.h"

using nlohmann::json;

namespace {

using http::BAD_REQUEST, http::NOT_FOUND;
constexpr int64_t MOST_N = 128, MOST_PROMPTS = 256, MOST_STOPS = 16;

json parse_object(const std::string& body) {
    std::string fault;
    json object = parse_json(body, fault);
    if (!fault.empty()) throw ApiError(BAD_REQUEST, "the body is " + fault);
    if (!object.is_object()) throw ApiError(BAD_REQUEST, "the body is not a JSON object");
    return object;
}

// field: as the client wrote it.
[[noreturn]] void refuse(const std::string& field) {
    const std::string name = shown_text(field);
    throw ApiError(BAD_REQUEST, str("'", name, "' is not supported by this server; leave it out"), name);
}

// The fields of a request. Each is taken once; done() refuses those that nobody took.
class Fields {
  public:
    explicit Fields(json o) : object(std::move(o)) {}

    bool has(const std::string& key) {
        taken.insert(key);
        const auto found = object.find(key);
        return found != object.end() && !found->is_null();
    }
    const json& at(const std::string& key) const { return object.at(key); }
    [[noreturn]] void wrong(const std::string& key, const std::string& expected) const {
        throw ApiError(BAD_REQUEST, str("'", key, "' is ", shown(object.at(key)), "; expected ", expected), key);
    }
    bool boolean(const std::string& key) {
        if (!has(key)) return false;
        if (!at(key).is_boolean()) wrong(key, "true or false");
        return at(key).get<bool>();
    }
    int64_t whole(const std::string& key, int64_t least, int64_t most, int64_t otherwise) {
        if (!has(key)) return otherwise;
        const json& value = at(key);
        const bool fits =
            value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(INT64_MAX));
        if (!fits || value.get<int64_t>() < least || value.get<int64_t>() > most)
            wrong(key, str("a whole number from ", least, " to ", most));
        return value.get<int64_t>();
    }
    void number(const std::string& key, double least, double most, float& value, bool above = false) {
        if (!has(key)) return;
        const json& given = at(key);
        const double x = given.is_number() ? given.get<double>() : NAN;
        if (!(x >= least && x <= most) || (above && float(x) == float(least)))  // as it is used
            wrong(key, str("a number ", above ? "above " : "from ", least, " to ", most));
        value = float(x);
    }
    std::string text(const std::string& key) {
        if (!has(key)) return "";
        if (!at(key).is_string()) wrong(key, "a string");
        return at(key).get<std::string>();
    }
    // Fields without a function here may have these values, which change nothing.
    void allow(const std::string& key, const std::vector<json>& values) {
        if (!has(key) || std::find(values.begin(), values.end(), at(key)) != values.end()) return;
        refuse(key);
    }
    void done() const {
        for (const auto& [key, value] : object.items())
            if (!taken.count(key)) refuse(key);
    }

  private:
    json object;
    std::set<std::string> taken;
};

void take_model(Fields& f, const ServedModel& m, CompletionCall& call) {
    if (!f.has("model")) throw ApiError(BAD_REQUEST, "'model' is missing; GET /v1/models lists them", "model");
    call.model = f.text("model");
    const auto found = std::find(m.names.begin(), m.names.end(), call.model);
    if (found == m.names.end())
        throw ApiError(NOT_FOUND, str("there is no model '", shown_text(call.model), "'; GET /v1/models lists them"),
                       "model", "model_not_found");
    call.adapter = static_cast<int32_t>(found - m.names.begin()) - 1;
}

void take_sampling(Fields& f, const ServedModel& m, uint64_t seed, SamplingOptions& s) {
    s = m.defaults;
    s.seed = seed;
    f.number("temperature", 0, 2, s.temperature);
    f.number("top_p", 0, 1, s.top_p, true);
    f.number("min_p", 0, 1, s.min_p);
    s.top_k = f.whole("top_k", -1, INT32_MAX, s.top_k);
    if (s.top_k < 0) s.top_k = 0;                                   // as others write "off"
    f.number("repetition_penalty", 0.001, 1000, s.repeat_penalty);  // as --repeat-penalty
    f.number("presence_penalty", -2, 2, s.presence_penalty);
    f.number("frequency_penalty", -2, 2, s.frequency_penalty);
    if (f.has("seed")) s.seed = uint64_t(f.whole("seed", INT64_MIN, INT64_MAX, 0));
}

void take_stop(Fields& f, CompletionCall& call) {
    if (!f.has("stop")) return;
    const json& stop = f.at("stop");
    const json list = stop.is_array() ? stop : json::array({stop});
    if (int64_t(list.size()) > MOST_STOPS) f.wrong("stop", str("at most ", MOST_STOPS, " strings"));
    for (const json& s : list) {
        if (!s.is_string() || s.get_ref<const std::string&>().empty())
            f.wrong("stop", "a string, or strings, that are not empty");
        call.stop.push_back(s.get<std::string>());
    }
}

void take_stream(Fields& f, CompletionCall& call) {
    call.stream = f.boolean("stream");
    if (!f.has("stream_options")) return;
    if (!call.stream) throw ApiError(BAD_REQUEST, "'stream_options' needs 'stream': true", "stream_options");
    if (!f.at("stream_options").is_object()) f.wrong("stream_options", "an object");
    Fields options(f.at("stream_options"));
    call.include_usage = options.boolean("include_usage");
    options.allow("include_obfuscation", {false});
    options.done();
}

// What both kinds of requests have.
void take_common(Fields& f, const ServedModel& m, uint64_t seed, CompletionCall& call) {
    take_model(f, m, call);
    take_sampling(f, m, seed, call.sampling);
    take_stop(f, call);
    take_stream(f, call);
    call.n = f.whole("n", 1, MOST_N, 1);
    call.ignore_eos = f.boolean("ignore_eos");
    f.allow("logit_bias", {json::object()});
    f.allow("response_format", {json::object({{"type", "text"}})});
    f.text("user");  // for the caller's own records
}

// The one of two fields with the same meaning that a request has.
const char* name_of_max_tokens(Fields& f) {
    if (!f.has("max_completion_tokens")) return "max_tokens";
    if (f.has("max_tokens"))
        throw ApiError(BAD_REQUEST, "give 'max_tokens' or 'max_completion_tokens', not both", "max_tokens");
    return "max_completion_tokens";
}

void check_lengths(const ServedModel& m, const CompletionCall& call) {
    for (size_t i = 0; i < call.prompts.size(); i++) {
        const int64_t prompt = int64_t(call.prompts[i].size()), tokens = call.fills_context ? 1 : call.max_tokens;
        if (prompt + tokens <= m.context) continue;
        const std::string asked = call.fills_context ? "" : str(" and ", tokens, " more");
        throw ApiError(BAD_REQUEST,
                       str("a prompt of ", prompt, " tokens", asked, " exceeds the context of ", m.context,
                           " tokens; shorten the prompt or ask for fewer"),
                       call.chat ? "messages" : "prompt", "context_length_exceeded");
    }
}

std::vector<int32_t> tokens_of_text(const std::string& text, const ServedModel& m) {
    std::vector<int32_t> tokens = m.tokenizer.start_of_text();
    const std::vector<int32_t> own = m.tokenizer.encode(text);
    tokens.insert(tokens.end(), own.begin(), own.end());
    return tokens.empty() ? m.start_tokens : tokens;
}

std::vector<int32_t> token_ids(Fields& f, const std::string& key, const json& list, const ServedModel& m) {
    std::vector<int32_t> ids;
    for (const json& id : list) {
        if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() >= double(m.config.vocab_size))
            f.wrong(key, str("token ids from 0 to ", m.config.vocab_size - 1));
        ids.push_back(id.get<int32_t>());
    }
    if (ids.empty()) f.wrong(key, "at least one token");
    return ids;
}

// Text, token ids, or a list of either.
void take_prompts(Fields& f, const ServedModel& m, CompletionCall& call) {
    if (!f.has("prompt")) throw ApiError(BAD_REQUEST, "'prompt' is missing", "prompt");
    const json& given = f.at("prompt");
    const auto ids = [&](const json& x) { return x.is_array() && !x.empty() && x[0].is_number(); };
    const auto take = [&](const json& prompt) {
        if (prompt.is_string())
            call.prompts.push_back(tokens_of_text(prompt.get_ref<const std::string&>(), m));
        else if (ids(prompt))
            call.prompts.push_back(token_ids(f, "prompt", prompt, m));
        else
            f.wrong("prompt", "a string, token ids, or a list of either");
    };
    if (!given.is_array() || ids(given)) return take(given);
    if (given.empty() || int64_t(given.size()) > MOST_PROMPTS)
        f.wrong("prompt", str("1 to ", MOST_PROMPTS, " prompts"));
    for (const json& prompt : given) take(prompt);
}

std::string content_of(const json& message, const std::string& where) {
    const auto wrong = [&](const std::string& expected) {
        throw ApiError(BAD_REQUEST,
                       str("'", where, "' is ", shown(message.value("content", json())), "; expected ", expected),
                       where);
    };
    const json content = message.value("content", json());
    if (content.is_string()) return content.get<std::string>();
    if (!content.is_array()) wrong("a string, or parts of type text");
    std::string text;
    for (const json& part : content) {
        if (!part.is_object() || part.value("type", json()) != "text" || !part.value("text", json()).is_string())
            wrong("parts of type text; others are not supported");
        text += (text.empty() ? "" : "\n") + part["text"].get<std::string>();
    }
    return text;
}

std::vector<Message> take_messages(Fields& f) {
    if (!f.has("messages")) throw ApiError(BAD_REQUEST, "'messages' is missing", "messages");
    const json& list = f.at("messages");
    if (!list.is_array() || list.empty()) f.wrong("messages", "a list with at least one message");
    std::vector<Message> messages;
    for (size_t i = 0; i < list.size(); i++) {
        const std::string where = str("messages[", i, "]");
        if (!list[i].is_object()) throw ApiError(BAD_REQUEST, str("'", where, "' is not an object"), where);
        const json role = list[i].value("role", json());
        if (role != "system" && role != "user" && role != "assistant" && role != "developer")
            throw ApiError(BAD_REQUEST,
                           str("'", where, ".role' is ", shown(role), "; expected system, user or assistant"),
                           where + ".role");
        for (const auto& [key, value] : list[i].items())
            if (key != "role" && key != "content" && key != "name" && !value.is_null() && value != json::array())
                refuse(where + "." + key);
        messages.push_back(
            {role == "developer" ? "system" : role.get<std::string>(), content_of(list[i], where + ".content")});
    }
    return messages;
}

std::vector<int32_t> tokens_of_messages(const std::vector<Message>& messages, const ServedModel& m) {
    if (!m.chats()) throw ApiError(BAD_REQUEST, "the model has no chat template; use /v1/completions", "messages");
    try {
        return m.chat_template->tokens(messages, true, local_time_now(), m.tokenizer);
    } catch (const Error& e) {
        throw ApiError(BAD_REQUEST, e.what(), "messages");
    }
}

}  // namespace

std::string ApiError::body() const {
    const char* type = status >= 500   ? "server_error"
                       : status == 401 ? "authentication_error"
                                       : "invalid_request_error";
    const json error = {{"message", what()},
                        {"type", type},
                        {"param", param.empty() ? json() : json(param)},
                        {"code", code.empty() ? json() : json(code)}};
    return json{{"error", error}}.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string json_string(std::string_view text) {
    return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

CompletionCall parse_completion(const std::string& body, const ServedModel& m, uint64_t seed) {
    Fields f(parse_object(body));
    CompletionCall call;
    take_common(f, m, seed, call);
    call.echo = f.boolean("echo");
    call.logprobs = f.has("logprobs");
    call.top_logprobs = f.whole("logprobs", 0, MAX_TOP_LOGPROBS, 0);
    call.max_tokens = f.whole(name_of_max_tokens(f), call.echo ? 0 : 1, INT32_MAX, 16);
    f.allow("best_of", {json(call.n)});
    f.allow("suffix", {json("")});
    take_prompts(f, m, call);
    f.done();
    check_lengths(m, call);
    return call;
}

CompletionCall parse_chat(const std::string& body, const ServedModel& m, uint64_t seed) {
    Fields f(parse_object(body));
    CompletionCall call;
    call.chat = true;
    take_common(f, m, seed, call);
    call.logprobs = f.boolean("logprobs");
    call.top_logprobs = f.whole("top_logprobs", 0, MAX_TOP_LOGPROBS, 0);
    if (call.top_logprobs > 0 && !call.logprobs)
        throw ApiError(BAD_REQUEST, "'top_logprobs' needs 'logprobs': true", "top_logprobs");
    const char* const most = name_of_max_tokens(f);
    call.fills_context = !f.has(most);
    call.max_tokens = f.whole(most, 1, INT32_MAX, 0);
    f.allow("tools", {json::array()});
    f.allow("tool_choice", {json("none"), json("auto")});
    f.allow("store", {json(false)});
    f.allow("service_tier", {json("auto"), json("default")});
    call.prompts = {tokens_of_messages(take_messages(f), m)};
    f.done();
    check_lengths(m, call);
    return call;
}

std::string tokenize(const std::string& body, const ServedModel& m) {
    Fields f(parse_object(body));
    f.text("model");
    std::vector<int32_t> tokens;
    if (f.has("messages")) {
        tokens = tokens_of_messages(take_messages(f), m);
    } else {
        if (!f.has("prompt")) throw ApiError(BAD_REQUEST, "'prompt' is missing", "prompt");
        const bool special = !f.has("add_special_tokens") || f.boolean("add_special_tokens");
        tokens = special ? tokens_of_text(f.text("prompt"), m) : m.tokenizer.encode(f.text("prompt"));
    }
    f.done();
    return json{{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", m.context}}.dump() + "\n";
}

std::string detokenize(const std::string& body, const ServedModel& m) {
    Fields f(parse_object(body));
    f.text("model");
    if (!f.has("tokens") || !f.at("tokens").is_array())
        throw ApiError(BAD_REQUEST, "'tokens' is missing, or no list of token ids", "tokens");
    std::string text;
    for (const int32_t id : f.at("tokens").empty() ? std::vector<int32_t>{} : token_ids(f, "tokens", f.at("tokens"), m))
        if (m.tokenizer.contains(id)) text += m.tokenizer.decode(id);
    f.done();
    return "{\"prompt\":" + json_string(text) + "}\n";
}

std::string list_models(const ServedModel& m) {
    json list = json::array();
    for (const std::string& name : m.names)
        list.push_back({{"id", name},
                        {"object", "model"},
                        {"created", m.created},
                        {"owned_by", "train_gpt"},
                        {"max_model_len", m.context},
                        {"chat", m.chats()}});
    return json{{"object", "list"}, {"data", list}}.dump() + "\n";
}
