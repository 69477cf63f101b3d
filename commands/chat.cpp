// `chat`: a conversation on the terminal.
#include <algorithm>
#include <iostream>

#include "commands/cli.h"
#include "driver/inference.h"
#include "infer/conversation.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"
#include "kernels/generation/read_bandwidth.h"
#include "runtime/files/files.h"
#include "runtime/signals.h"

namespace {

struct ChatCommandOptions {
    ModelOptions model;
    SamplingFlags sampling;
    std::string system;
    bool system_given = false;  // else the template's own system message
    int64_t max_tokens = 1024, context = 0;
    ContextPolicy policy;
};

ChatCommandOptions parse_chat(const Args& args) {
    ChatCommandOptions o;
    CLI::App app(
        "Holds a conversation with a chat model. The model's chat template writes it. Each line is a user turn, and "
        "special tokens in it stay text. /reset starts a new conversation, Ctrl-C stops a response, /exit or the end "
        "of the input quits.",
        "train_gpt chat");
    add_model_options(app, o.model);
    add_weights_option(app, o.model.weights, true);
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
    add_context_options(app, o.context, o.policy, "the length that the model was trained for, at most 4096");
    add_sampling_flags(app, o.sampling);
    parse(app, args);
    return o;
}

}  // namespace

void run_chat(const Args& args) {
    const ChatCommandOptions o = parse_chat(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    const ChatTemplate chat_template(source.files);
    const Tokenizer tokenizer(source.files);
    ChatOptions options;
    if (o.system_given) options.system = o.system;
    check_conversation(chat_template, options);
    EngineOptions engine_options;
    engine_options.context = o.context ? o.context : std::min<int64_t>(source.config.max_positions, 4096);
    engine_options.dtype = o.model.type();
    take_weights(engine_options, source, o.model.weights);
    engine_options.sampling = sampling_options(o.sampling, source, args);
    engine_options.sampled_vocab = sampled_vocab(source.config, &tokenizer);
    LoadedEngine m(ctx, source, engine_options, false);
    options.response.max_tokens = o.max_tokens;
    options.response.eos = end_tokens(source, &tokenizer);
    for (const int32_t token : chat_template.end_tokens(tokenizer)) options.response.eos.push_back(token);
    options.policy = o.policy;
    std::cerr << source.name << ", " << chat_template.file() << ", a context of " << engine_options.context
              << " tokens; /reset starts a new conversation, /exit quits, Ctrl-C stops a response\n";
    const GenerateStatistics statistics = chat(m.engine, tokenizer, chat_template, options, std::cin, std::cout,
                                               {stop_requested, catch_interrupt, release_interrupt});
    std::cerr << statistics_text(statistics,
                                 bandwidth_to_show(statistics, [&] { return measured_read_bandwidth(ctx.stream); }));
}
