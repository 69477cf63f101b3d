#include <sstream>

#include "commands/cli.h"

LogitsOptions parse_logits(const Args& args) {
    LogitsOptions o;
    std::string tokens;
    CLI::App app("Writes the logits of a sequence of token ids as a float32 [T, V] array in NumPy's format.",
                 "train_gpt logits");
    add_model_options(app, o.model);
    app.add_option("--tokens", tokens, "token ids, separated by spaces")->required();
    app.add_option("--output", o.output, ".npy file to write")->required();
    app.add_option("--dump", o.dump, "directory to write every activation to, as <name>.npy");
    parse(app, args);

    std::istringstream words(tokens);
    for (std::string word; words >> word;) {
        size_t used = 0;
        long id = -1;
        try {
            id = std::stol(word, &used);
        } catch (const std::exception&) {
        }
        if (used != word.size() || id < 0 || id > INT32_MAX)
            throw UsageError("--tokens: '" + word + "' is not a token id; write whole numbers separated by spaces");
        o.tokens.push_back(static_cast<int32_t>(id));
    }
    if (o.tokens.empty()) throw UsageError("--tokens is empty; give at least one token id");
    return o;
}
