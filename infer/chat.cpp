#include "infer/chat.h"

#include <algorithm>
#include <memory>

namespace {

void append(std::vector<int32_t>& tokens, const std::vector<int32_t>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
}

}  // namespace

GenerateStatistics chat(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate& format,
                        const ChatOptions& options, std::istream& in, std::ostream& out,
                        const std::function<bool()>& interrupted, const std::function<void()>& begin_answer,
                        const std::function<void()>& end_answer) {
    GenerateStatistics sum;
    CompletionOptions answer_options = options.answer;
    append(answer_options.eos, ChatWriter(format.format, tokenizer).end_tokens());
    std::vector<int32_t> said, held;  // the conversation, and what of it the cache holds
    int64_t keep = 0, round = 0;
    std::unique_ptr<ChatWriter> writer;
    const auto reset = [&] {
        writer = std::make_unique<ChatWriter>(format.format, tokenizer);
        said = writer->begin(options.system);
        keep = int64_t(said.size());
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
        append(said, writer->question(line));
        const auto give_up = [&] {
            out << "(the context is full and begins anew)\n";
            reset();
        };
        if (!options.slide && int64_t(said.size()) >= engine.options.context) {
            give_up();
            continue;
        }

        Completion answer(&tokenizer, answer_options, [&](std::string_view piece) { out << piece << std::flush; });
        const auto common = std::mismatch(held.begin(), held.end(), said.begin(), said.end()).first;
        std::vector<Request> requests{{said, common - held.begin(), round++, &answer, {}}};
        begin_answer();
        const GenerateStatistics s = generate(engine, requests, {options.slide, keep}, interrupted);
        end_answer();
        out << "\n" << std::flush;
        sum.add(s);
        // Where the context slid, so has the conversation.
        held = said = requests[0].context;
        if (requests[0].end >= 0) held.push_back(requests[0].end);
        if (int64_t(held.size()) > engine.length(0)) held.resize(size_t(engine.length(0)));
        if (answer.finish() == std::string("context")) {
            give_up();
            continue;
        }
        append(said, writer->end_of_answer());
    }
    return sum;
}
