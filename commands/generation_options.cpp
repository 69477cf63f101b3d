#include "commands/generation_options.h"

#include <algorithm>

#include "driver/inference.h"
#include "infer/prompts.h"

void add_generation_options(CLI::App& app, GenerationFlags& o) {
    app.add_option("--max-tokens", o.max_tokens, "maximum length of a completion in tokens")
        ->check(at_least(1))
        ->capture_default_str();
    add_sampling_flags(app, o.sampling);
    app.add_option("--num-samples", o.num_samples, "completions per prompt")->check(at_least(1))->capture_default_str();
    add_context_options(app, o.context, o.policy, "as many as needed, at most the rows of the position table");
    app.add_option("--keep-tokens", o.policy.keep_tokens,
                   "tokens of the beginning that stay when the context window slides")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--stop", o.stop, "end a completion before this string; may be given several times")
        ->allow_extra_args(false);
    app.add_flag("--ignore-eos", o.ignore_eos, "continue past the end-of-text token");
    app.add_flag("--batch-invariant", o.batch_invariant,
                 "on a GPU: a completion has the same bits whatever the rest of its batch is; slower");
}

int64_t completion_count(int64_t num_samples, int64_t prompts, const char* of) {
    // Each has a state of its own while the program runs, so a number without a limit would use up the memory.
    constexpr int64_t MOST = 1000000;
    require(num_samples <= MOST / prompts, "--num-samples ", num_samples, " for ", prompts, " prompts", of,
            ": at most ", MOST, " completions in one run; run it several times, each with another --seed");
    return num_samples * prompts;
}

EngineOptions generation_engine(const GenerationFlags& o, const ModelOptions& model, const ModelSource& source,
                                const Tokenizer* tokenizer, int64_t count, int64_t longest, const Args& args) {
    EngineOptions out;
    out.slots = std::min(count, o.batch_size);
    out.context = o.context ? o.context : longest + o.max_tokens;
    if (!o.context && source.config.positions == Positions::Learned)
        out.context = std::min(out.context, source.config.max_positions);
    o.policy.check(out.context, longest);
    out.dtype = model.type();
    take_weights(out, source, model.weights);
    out.sampling = sampling_options(o.sampling, source, args);
    out.sampled_vocab = sampled_vocab(source.config, tokenizer);
    out.batch_invariant = o.batch_invariant;
    return out;
}

CompletionOptions completion_options(const GenerationFlags& o, const ModelSource& source, const Tokenizer* tokenizer) {
    CompletionOptions out;
    out.max_tokens = o.max_tokens;
    out.stop = o.stop;
    if (!o.ignore_eos) out.eos = end_tokens(source, tokenizer);
    return out;
}
