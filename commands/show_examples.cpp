#include "commands/show_examples.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "data/tokenizer.h"
#include "runtime/console.h"
#include "runtime/files/files.h"

using nlohmann::ordered_json;

namespace {

// Where the first `count` examples start, and the end of the last of them.
std::vector<int64_t> example_starts(const TokenFiles& files, int64_t count) {
    std::vector<int64_t> starts;
    std::vector<uint8_t> flags(1 << 16);
    for (int64_t begin = 0; begin < files.size(); begin += int64_t(flags.size())) {
        const int64_t n = std::min(int64_t(flags.size()), files.size() - begin);
        files.read_flags(begin, n, flags.data());
        for (int64_t i = 0; i < n; i++) {
            if (!(flags[size_t(i)] & TokenFiles::EXAMPLE_START)) continue;
            starts.push_back(begin + i);
            if (int64_t(starts.size()) > count) return starts;
        }
    }
    starts.push_back(files.size());
    return starts;
}

// Neighbouring tokens that are all loss tokens, or none is.
struct Part {
    bool loss;
    std::string text;
};

struct ShownExample {
    int64_t tokens, loss_tokens;
    std::vector<Part> parts;
};

ShownExample read_example(const TokenFiles& files, const Tokenizer& tokenizer, int64_t begin, int64_t end) {
    const auto n = size_t(end - begin);
    std::vector<int32_t> ids(n);
    std::vector<uint8_t> loss(n);
    files.read(begin, end - begin, ids.data(), tokenizer.vocab_size());
    files.read_mask(begin, end - begin, loss.data());
    ShownExample example{end - begin, std::count(loss.begin(), loss.end(), 1), {}};
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || loss[i] != loss[i - 1]) example.parts.push_back({loss[i] == 1, ""});
        example.parts.back().text += tokenizer.decode(ids[i]);
    }
    return example;
}

void print(const ShownExample& example, const std::string& name) {
    const bool colours = isatty(STDOUT_FILENO);
    std::cout << "--- " << name << ": " << example.tokens << " tokens, " << example.loss_tokens
              << " of them loss tokens\n";
    for (const Part& part : example.parts) {
        if (part.loss) set_terminal_style("1;32");  // bold and green
        std::cout << (part.loss && !colours ? "[" + part.text + "]" : part.text);
        if (part.loss) set_terminal_style("0");
    }
    std::cout << "\n";
}

void print_json(const ShownExample& example, ordered_json object) {
    object.update({{"tokens", example.tokens}, {"loss_tokens", example.loss_tokens}});
    for (const Part& part : example.parts) object["parts"].push_back({{"loss", part.loss}, {"text", part.text}});
    std::cout << object.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << "\n";
}

}  // namespace

void show_examples(const DataDirectory& data, int64_t count, bool json) {
    const TokenFiles files = open_split(data, !glob_files(data.train_pattern()).empty());
    require(files.has_examples(), "--show: ", data.path,
            " is text, in which every token is a loss token; name data made from conversations");
    require(!data.tokenizer_path().empty(), "--show: ", data.path, " has no tokenizer.json, which printing text needs");
    const Tokenizer tokenizer(data.tokenizer_path());
    const bool pairs = files.has_pairs();
    const std::vector<int64_t> starts = example_starts(files, pairs ? 2 * count : count);
    for (size_t i = 0; i + 1 < starts.size(); i++) {
        const ShownExample example = read_example(files, tokenizer, starts[i], starts[i + 1]);
        const size_t pair = i / 2 + 1;
        const std::string response = i % 2 == 0 ? "chosen" : "rejected";
        if (json)
            print_json(example, pairs ? ordered_json{{"pair", pair}, {"response", response}} : ordered_json::object());
        else
            print(example, pairs ? str("pair ", pair, ", ", response) : str("example ", i + 1));
    }
}
