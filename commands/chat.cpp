#include "commands/cli.h"

ChatCommandOptions parse_chat(const Args& args) {
    ChatCommandOptions o;
    CLI::App app(
        "Holds a conversation with a chat model. The model's chat template writes it. Each line is a user turn, and "
        "special tokens in it stay text. /reset starts a new conversation, Ctrl-C stops a response, /exit or the end "
        "of the input quits.",
        "train_gpt chat");
    add_model_options(app, o.model);
    app.add_option_function<std::string>(
        "--system",
        [&o](const std::string& text) {
            o.system = text;
            o.system_given = true;
        },
        "system message; default: what the model's chat template writes without one");
    app.add_option("--max-tokens", o.max_tokens, "maximum length of a response in tokens")
        ->check(at_least(1))
        ->capture_default_str();
    add_context_options(app, o.context, o.slide, "the length that the model was trained for, at most 4096");
    add_sampling_flags(app, o.sampling);
    parse(app, args);
    return o;
}
