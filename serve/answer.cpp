#include "serve/answer.h"

#include <algorithm>
#include <cstdio>

namespace {

std::string new_id(bool chat) {
    static std::atomic<uint64_t> count{0};
    char text[64];
    std::snprintf(text, sizeof text, "%s-%llx-%llx", chat ? "chatcmpl" : "cmpl",
                  static_cast<unsigned long long>(std::time(nullptr)), static_cast<unsigned long long>(++count));
    return text;
}

// As JSON, which has no −∞.
std::string number(float logprob) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6f", double(std::max(logprob, -9999.0f)));
    return text;
}

std::string bytes_of(const std::string& text) {
    std::string list;
    for (const unsigned char byte : text) list += (list.empty() ? "" : ",") + std::to_string(byte);
    return "[" + list + "]";
}

int64_t count_characters(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

Answer::Answer(CompletionCall c, const ServedModel& m, std::shared_ptr<http::Reply> r, int64_t name_space)
    : call(std::move(c)),
      model(m),
      reply(std::move(r)),
      id(new_id(call.chat)),
      created_and_model(str(",\"created\":", std::time(nullptr), ",\"model\":", json_string(call.model))),
      left(call.prompts.size() * size_t(call.n)) {
    for (size_t prompt = 0; prompt < call.prompts.size(); prompt++)
        for (int64_t i = 0; i < call.n; i++) {
            Sequence& s = all.emplace_back();
            s.answer = this;
            s.prompt_index = prompt;
            s.sequence = int64_t(all.size()) - 1;
            s.tokens = call.prompts[prompt];
            s.options.max_tokens = std::max<int64_t>(call.most_tokens(model, prompt), 1);
            s.options.stop = call.stop;
            if (!call.ignore_eos) s.options.eos = call.chat ? model.end_of_turn_tokens : model.end_tokens;
            s.text = std::make_unique<Completion>(&model.tokenizer, s.options,
                                                  [&s](std::string_view text) { s.new_text += text; });
            s.completion = s.text.get();
            s.adapter = call.adapter;
            s.name_space = name_space;
            s.sampling = call.sampling;
            s.logprobs = call.logprobs;
            s.top_logprobs = call.top_logprobs;
            s.prompt_logprobs = call.echo && call.logprobs;
        }
}

int64_t Answer::prompt_tokens() const {
    int64_t sum = 0;
    for (const std::vector<int32_t>& prompt : call.prompts) sum += int64_t(prompt.size());
    return sum;
}

int64_t Answer::completion_tokens() const {
    int64_t sum = 0;
    for (const Sequence& s : all)
        if (call.most_tokens(model, s.prompt_index) > 0) sum += int64_t(s.text->tokens().size());
    return sum;
}

std::string Answer::usage() const {
    const int64_t prompt = prompt_tokens(), completion = completion_tokens();
    return str("{\"prompt_tokens\":", prompt, ",\"completion_tokens\":", completion,
               ",\"total_tokens\":", prompt + completion, "}");
}

std::string Answer::head(const char* object) const {
    return "{\"id\":\"" + id + "\",\"object\":\"" + object + "\"" + created_and_model;
}

std::string Answer::finish_of(const Sequence& s) const {
    if (!s.ended) return "null";
    if (call.most_tokens(model, s.prompt_index) == 0) return "\"length\"";  // whatever token was sampled
    const std::string reason = s.text->finish();
    return reason == "eos" || reason == "stop" ? "\"stop\"" : "\"length\"";
}

// content: the members of a choice that hold its text.
std::string Answer::choice(const Sequence& s, const std::string& content, const std::string& logprobs) const {
    return str("{\"index\":", s.sequence, ",", content, ",\"logprobs\":", logprobs, ",\"finish_reason\":", finish_of(s),
               "}");
}

std::string Answer::chunk(const Sequence& s, const std::string& content, const std::string& logprobs) const {
    return "data: " + head(call.chat ? "chat.completion.chunk" : "text_completion") + ",\"choices\":[" +
           choice(s, content, logprobs) + (call.include_usage ? "],\"usage\":null}\n\n" : "]}\n\n");
}

std::string Answer::prompt_text(const Sequence& s) const {
    return model.tokenizer.decode(call.prompts[s.prompt_index]);
}

// Of the completion's tokens [first, last), and of the prompt's before them.
std::string Answer::logprobs_of(Sequence& s, size_t first, size_t last, bool with_prompt) {
    if (!call.logprobs) return "null";
    struct Entry {
        int32_t token;
        const float* logprob;  // null: none, of the first token
        const std::vector<TokenLogprob>* top;
        std::vector<TokenLogprob> own_top;
    };
    std::vector<Entry> entries;
    const std::vector<int32_t>& prompt = call.prompts[s.prompt_index];
    const size_t K = size_t(call.top_logprobs);
    for (size_t i = 0; with_prompt && i < prompt.size(); i++) {
        Entry e{prompt[i], i ? &s.prompt_token_logprobs[i - 1] : nullptr, nullptr, {}};
        if (i && K)
            e.own_top.assign(s.prompt_token_top_logprobs.begin() + long((i - 1) * K),
                             s.prompt_token_top_logprobs.begin() + long(i * K));
        entries.push_back(std::move(e));
    }
    for (size_t i = first; i < last; i++)
        entries.push_back({s.text->tokens()[i], &s.text->logprobs()[i], &s.text->top_logprobs()[i], {}});
    // lm-evaluation-harness takes the last entry for the one token that it has sampled, also where that is an end
    // token.
    if (!call.chat && s.ended && s.end >= 0 && call.most_tokens(model, s.prompt_index) > 0)
        entries.push_back({s.end, &s.end_logprob, &s.end_top_logprobs, {}});
    const auto text_of = [&](int32_t token) {
        return model.tokenizer.contains(token) ? model.tokenizer.decode(token) : std::string();
    };
    std::string content, tokens, values, tops, offsets;
    for (const Entry& e : entries) {
        const std::vector<TokenLogprob>& top = e.top ? *e.top : e.own_top;
        const std::string text = text_of(e.token), comma = tokens.empty() ? "" : ",";
        std::string list;
        for (const TokenLogprob& t : top) {
            const std::string other = text_of(t.token), separator = list.empty() ? "" : ",";
            list += call.chat ? str(separator, "{\"token\":", json_string(other), ",\"logprob\":", number(t.logprob),
                                    ",\"bytes\":", bytes_of(other), "}")
                              : str(separator, json_string(other), ":", number(t.logprob));
        }
        const std::string value = e.logprob ? number(*e.logprob) : "null";
        content += str(comma, "{\"token\":", json_string(text), ",\"logprob\":", value, ",\"bytes\":", bytes_of(text),
                       ",\"top_logprobs\":[", list, "]}");
        tokens += comma + json_string(text);
        values += comma + value;
        tops += comma + (e.logprob && K ? "{" + list + "}" : "null");
        offsets += comma + std::to_string(s.characters);
        s.characters += count_characters(text);
    }
    if (call.chat) return "{\"content\":[" + content + "]}";
    return "{\"tokens\":[" + tokens + "],\"token_logprobs\":[" + values +
           "],\"top_logprobs\":" + (K ? "[" + tops + "]" : std::string("null")) + ",\"text_offset\":[" + offsets + "]}";
}

// Sends what is new of a sequence: text, and tokens from first_token on.
void Answer::send_chunk(Sequence& s, size_t first_token) {
    if (!streaming) {
        streaming = true;
        reply->set_header("Cache-Control", "no-store");
        reply->begin("text/event-stream; charset=utf-8");
    }
    std::string events;
    const bool first = !s.begun;
    s.begun = true;
    if (first && call.chat) events += chunk(s, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}", "null");
    if (first && call.echo) s.new_text = prompt_text(s) + s.new_text;
    const size_t tokens = call.most_tokens(model, s.prompt_index) > 0 ? s.text->tokens().size() : 0;
    const bool news = !s.new_text.empty() || (call.logprobs && (first_token < tokens || (first && call.echo)));
    if (news || (s.ended && !call.chat)) {
        const std::string logprobs = logprobs_of(s, std::min(first_token, tokens), tokens, first && call.echo);
        const std::string text = json_string(s.new_text);
        const bool ended = s.ended;
        s.ended = ended && !call.chat;  // of a chat the last event has the reason
        events += chunk(s, call.chat ? "\"delta\":{\"content\":" + text + "}" : "\"text\":" + text, logprobs);
        s.ended = ended;
    }
    if (s.ended && call.chat) events += chunk(s, "\"delta\":{}", "null");
    s.new_text.clear();
    reply->write(events);
}

void Answer::token(Sequence& s) {
    if (!call.stream || call.most_tokens(model, s.prompt_index) == 0) return;
    if (s.text->finish()) return;  // end() follows
    if (!s.new_text.empty() || call.logprobs) send_chunk(s, s.text->tokens().size() - 1);
}

void Answer::end(Sequence& s) {
    s.ended = true;
    left--;
    if (call.most_tokens(model, s.prompt_index) == 0) s.new_text.clear();
    if (call.stream) {
        // The last token was not sent, unless it ended the completion without being part of it.
        const size_t tokens = s.text->tokens().size();
        const bool appended = s.end < 0 && tokens > 0;
        send_chunk(s, appended ? tokens - 1 : tokens);
    }
    if (left > 0) return;
    if (!call.stream) return send_whole();
    std::string last;
    if (call.include_usage)
        last = "data: " + head(call.chat ? "chat.completion.chunk" : "text_completion") +
               ",\"choices\":[],\"usage\":" + usage() + "}\n\n";
    reply->write(last + "data: [DONE]\n\n");
    reply->end();
}

void Answer::send_whole() {
    std::string choices;
    for (Sequence& s : all) {
        const size_t tokens = call.most_tokens(model, s.prompt_index) > 0 ? s.text->tokens().size() : 0;
        const std::string text = json_string((call.echo ? prompt_text(s) : "") + (tokens ? s.text->text() : ""));
        choices += (choices.empty() ? "" : ",") +
                   choice(s,
                          call.chat ? "\"message\":{\"role\":\"assistant\",\"content\":" + text + ",\"refusal\":null}"
                                    : "\"text\":" + text,
                          logprobs_of(s, 0, tokens, call.echo));
    }
    reply->send(200, "application/json",
                head(call.chat ? "chat.completion" : "text_completion") + ",\"choices\":[" + choices +
                    "],\"usage\":" + usage() + "}\n");
}

void Answer::fail(const ApiError& error) {
    if (!streaming) return reply->send(error.status, "application/json", error.body());
    reply->write("data: " + error.body() + "\n");
    reply->end();
}
