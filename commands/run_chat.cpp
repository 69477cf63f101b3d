// `chat`: a conversation on the terminal.
#include <algorithm>
#include <iostream>

#include "commands/inference.h"
#include "commands/run.h"
#include "infer/chat.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"
#include "kernels/generation/read_bandwidth.h"
#include "runtime/files/files.h"
#include "runtime/signals.h"

void run_chat(const Args& args) {
    const ChatCommandOptions o = parse_chat(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    const ChatTemplate chat_template(source.directory);
    const Tokenizer tokenizer(join_path(source.directory, "tokenizer.json"));
    ChatOptions options;
    if (o.system_given) options.system = o.system;
    check_conversation(chat_template, options);
    EngineOptions engine_options;
    engine_options.context = o.context ? o.context : std::min<int64_t>(source.config.max_positions, 4096);
    engine_options.dtype = o.model.type();
    engine_options.sampling = sampling_options(o.sampling);
    engine_options.sampled_vocab = sampled_vocab(source.config, &tokenizer);
    LoadedEngine m(ctx, source, engine_options, false);
    options.response.max_tokens = o.max_tokens;
    options.response.eos = end_tokens(source, &tokenizer);
    for (const int32_t token : chat_template.end_tokens(tokenizer)) options.response.eos.push_back(token);
    options.slide = o.slide;
    std::cerr << source.name << ", " << chat_template.file() << ", a context of " << engine_options.context
              << " tokens; /reset starts a new conversation, /exit quits, Ctrl-C stops a response\n";
    const GenerateStatistics statistics = chat(m.engine, tokenizer, chat_template, options, std::cin, std::cout,
                                               stop_requested, catch_interrupt, release_interrupt);
    std::cerr << statistics_text(statistics,
                                 bandwidth_to_show(statistics, [&] { return measured_read_bandwidth(ctx.stream); }));
}
