#include "infer/conversation.h"

#include <algorithm>

#include "infer/prompts.h"

namespace {

int64_t common_tokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    const auto size = int64_t(std::min(a.size(), b.size()));
    return std::mismatch(a.begin(), a.begin() + size, b.begin()).first - a.begin();
}

std::vector<Message> opening(const std::optional<std::string>& system) {
    return system ? std::vector<Message>{{"system", *system}} : std::vector<Message>();
}

// std::getline() of a line that may have no end.
bool read_line(std::istream& in, std::string& line) {
    constexpr size_t MOST = 1 << 20;
    line.clear();
    for (int c; (c = in.get()) != std::istream::traits_type::eof();) {
        if (c == '\n') return true;
        require(line.size() < MOST, "the input has a line of more than ", MOST,
                " bytes; a user turn is one line of text");
        line += static_cast<char>(c);
    }
    return !line.empty();
}

// The messages so far, and their tokens.
class Conversation {
  public:
    Conversation(const ChatTemplate& t, const Tokenizer& k, const std::optional<std::string>& system)
        : chat_template(t), tokenizer(k), messages(opening(system)), first_turn(messages.size()) {
        reset();
        // The beginning of every conversation: the system message and the start of the first user turn.
        std::vector<int32_t> tokens[2];
        for (size_t i = 0; i < 2; i++) {
            messages.push_back({"user", i ? "a" : "b"});
            tokens[i] = prompt();
            messages.pop_back();
        }
        start = common_tokens(tokens[0], tokens[1]);
    }

    void reset() {
        messages.resize(first_turn);
        date = local_time_now();  // the date that the template writes stays that of the beginning
    }
    void add(const char* role, const std::string& content) { messages.push_back({role, content}); }
    void drop_last() { messages.pop_back(); }
    // The user turns before the last one, each with its response.
    size_t older_turns() const { return (messages.size() - first_turn - 1) / 2; }
    void drop_oldest(size_t turns) { messages = without_oldest(turns); }
    // The tokens up to the start of the next response.
    std::vector<int32_t> prompt() const { return prompt_without(0); }
    std::vector<int32_t> prompt_without(size_t oldest_turns) const {
        return chat_template.tokens(without_oldest(oldest_turns), true, date, tokenizer);
    }
    int64_t start_tokens() const { return start; }

  private:
    std::vector<Message> without_oldest(size_t turns) const {
        std::vector<Message> out = messages;
        const auto oldest = out.begin() + int64_t(first_turn);
        out.erase(oldest, oldest + 2 * int64_t(turns));
        return out;
    }

    const ChatTemplate& chat_template;
    const Tokenizer& tokenizer;
    std::vector<Message> messages;
    const size_t first_turn;  // its index: 1 after a system message
    int64_t start = 0;
    std::tm date = {};
};

// The next prompt. If it fills the context, the oldest turns are dropped until it takes half of it, or all turns but
// this one if the context does not slide. Tells so on `out`. Throws Error for a turn that does not fit by itself.
std::vector<int32_t> fitting_prompt(Conversation& conversation, int64_t context, const ContextPolicy& policy,
                                    std::ostream& out) {
    std::vector<int32_t> tokens = conversation.prompt();
    const auto size = [&] { return int64_t(tokens.size()); };
    const int64_t whole = size(), goal = policy.slide ? context / 2 : 0;
    const int64_t most = policy.slide ? context : context - 1;  // a slide makes room for the response
    if (whole < context) return tokens;
    // The fewest turns whose absence is enough, by bisection: each attempt renders the whole conversation.
    size_t too_few = 0, dropped = conversation.older_turns();
    while (goal > 0 && dropped > too_few + 1) {
        const size_t middle = (too_few + dropped) / 2;
        (int64_t(conversation.prompt_without(middle).size()) > goal ? too_few : dropped) = middle;
    }
    tokens = conversation.prompt_without(dropped);
    require(size() <= most || policy.cut_prompts, "this turn needs a prompt of ", size(),
            " tokens and was left out, because the context has ", context, "; shorten it or raise --context");
    conversation.drop_oldest(dropped);
    if (dropped && policy.slide)
        out << "(the context is full: " << whole << " tokens do not fit into " << context << "; the oldest "
            << (dropped == 1 ? "turn is" : str(dropped, " turns are")) << " dropped)\n";
    if (dropped && !policy.slide)
        out << "(the context is full: " << whole << " tokens do not fit into " << context
            << "; the conversation starts again with this turn)\n";
    if (size() > context) out << "(" << policy.cut_note(context, size()) << ")\n";
    return tokens;
}

}  // namespace

void check_conversation(const ChatTemplate& chat_template, const ChatOptions& options) {
    std::vector<Message> messages = opening(options.system);
    messages.push_back({"user", "x"});
    chat_template.render(messages, true, local_time_now());
}

GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const ChatCallbacks& callbacks) {
    GenerateStatistics sum;
    ContextPolicy policy = options.policy;
    Conversation conversation(chat_template, tokenizer, options.system);
    const int64_t start = conversation.start_tokens(), context = engine.options.context;
    policy.keep_tokens = start;
    require(!policy.slide || start <= context - 2, "a context of ", context, " tokens has no room for the ", start,
            " that start every conversation; raise --context to at least ", start + 2);
    std::vector<int32_t> cached;  // the tokens that the KV cache holds
    int64_t turn = 0;
    for (std::string line;;) {
        if (options.prompts) out << "> " << std::flush;
        if (!read_line(in, line)) {
            if (options.prompts) out << "\n";
            break;
        }
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (line == "/exit") break;
        if (line == "/reset") conversation.reset();
        if (line == "/reset" || line.find_first_not_of(" \t\r") == std::string::npos) continue;
        const std::string lost = lost_bytes_note(line, tokenizer);
        if (!lost.empty()) out << "(" << lost << ")\n";
        conversation.add("user", line);
        std::vector<int32_t> tokens;
        try {
            tokens = fitting_prompt(conversation, context, policy, out);
        } catch (const Error& e) {  // the conversation is worth more than this turn
            out << "(" << e.what() << ")\n";
            conversation.drop_last();
            continue;
        }

        Completion response(&tokenizer, options.response, [&](std::string_view text) { out << text << std::flush; });
        const int64_t kept = common_tokens(cached, tokens);
        std::vector<Request> requests{{std::move(tokens), kept, turn++, &response, {}}};
        callbacks.begin_response();
        const GenerateStatistics s = generate(engine, requests, policy, callbacks.interrupted);
        callbacks.end_response();
        out << "\n" << std::flush;
        sum.add(s);
        cached = requests[0].context;
        if (requests[0].end >= 0) cached.push_back(requests[0].end);
        if (int64_t(cached.size()) > engine.length(0)) cached.resize(size_t(engine.length(0)));
        if (response.finish() == std::string("context")) {
            out << "(the context of " << context << " tokens is full; the conversation starts again)\n";
            conversation.reset();
        } else {
            conversation.add("assistant", response.text());
        }
    }
    return sum;
}
