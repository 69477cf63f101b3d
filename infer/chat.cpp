#include "infer/chat.h"

#include <algorithm>
#include <memory>

#include "infer/prompts.h"

namespace {

void append(std::vector<int32_t>& tokens, const std::vector<int32_t>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
}

}  // namespace

GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& format,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const std::function<bool()>& interrupted, const std::function<void()>& begin_response,
                        const std::function<void()>& end_response) {
    GenerateStatistics sum;
    CompletionOptions response_options = options.response;
    append(response_options.eos, ChatWriter(format.format, tokenizer).end_tokens());
    std::vector<int32_t> conversation, cached;  // cached: the tokens that the KV cache holds
    int64_t keep_tokens = 0, turn = 0;          // keep_tokens: those of the system message
    std::unique_ptr<ChatWriter> writer;
    const auto reset = [&] {
        writer = std::make_unique<ChatWriter>(format.format, tokenizer);
        conversation = writer->begin(options.system);
        keep_tokens = int64_t(conversation.size());
    };
    reset();
    for (std::string line;;) {
        if (options.prompts) out << "> " << std::flush;
        if (!std::getline(in, line)) {
            if (options.prompts) out << "\n";
            break;
        }
        if (line == "/exit") break;
        if (line == "/reset") reset();
        if (line == "/reset" || line.find_first_not_of(" \t\r") == std::string::npos) continue;
        append(conversation, writer->user_turn(line));
        const std::string lost = lost_bytes_note(line, tokenizer);
        if (!lost.empty()) out << "(" << lost << ")\n";
        const auto start_again = [&] {
            out << "(the context is full; the conversation starts again)\n";
            reset();
        };
        if (!options.slide && int64_t(conversation.size()) >= engine.options.context) {
            start_again();
            continue;
        }

        Completion response(&tokenizer, response_options, [&](std::string_view text) { out << text << std::flush; });
        const auto common = std::mismatch(cached.begin(), cached.end(), conversation.begin(), conversation.end()).first;
        std::vector<Request> requests{{conversation, common - cached.begin(), turn++, &response, {}}};
        begin_response();
        const GenerateStatistics s = generate(engine, requests, {options.slide, keep_tokens}, interrupted);
        end_response();
        out << "\n" << std::flush;
        sum.add(s);
        // If the context window slid, the conversation continues from what is left in it.
        cached = conversation = requests[0].context;
        if (requests[0].end >= 0) cached.push_back(requests[0].end);
        if (int64_t(cached.size()) > engine.length(0)) cached.resize(size_t(engine.length(0)));
        if (response.finish() == std::string("context")) {
            start_again();
            continue;
        }
        append(conversation, writer->end_of_assistant_turn());
    }
    return sum;
}
