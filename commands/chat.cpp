#include "commands/cli.h"

ChatCommandOptions parse_chat(const Args& args) {
    ChatCommandOptions o;
    CLI::App app(
        "A conversation with a model that was trained for it: a question a line, /reset begins anew, /exit or the end "
        "of input ends it, Ctrl-C stops an answer.",
        "train_gpt chat");
    add_model_options(app, o.model);
    app.add_option_function<std::string>(
        "--system",
        [&o](const std::string& text) {
            o.system = text;
            o.system_given = true;
        },
        "what the model is told before the conversation; if not given, what its chat template says");
    app.add_option("--max-tokens", o.max_tokens, "tokens of an answer at most")
        ->check(at_least(1))
        ->capture_default_str();
    add_context_options(app, o.context, o.slide, "the positions that the model was trained for, up to 4096");
    add_sampling_flags(app, o.draw);
    parse(app, args);
    return o;
}
