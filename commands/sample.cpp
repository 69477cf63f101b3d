// `sample`: completions of prompts.
#include <algorithm>
#include <iostream>
#include <memory>

#include "commands/cli.h"
#include "data/tokenizer.h"
#include "driver/inference.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"
#include "kernels/generation/read_bandwidth.h"
#include "runtime/files/files.h"

namespace {

struct SampleOptions {
    ModelOptions model;
    SamplingFlags sampling;
    std::string prompt, prompt_file;
    int64_t max_tokens = 256, num_samples = 1, batch_size = 64;
    int64_t top_logprobs = 0;
    int64_t context = 0;  // 0: the longest prompt with its completion, at most the rows of the position table
    std::vector<std::string> stop, adapters;
    ContextPolicy policy;
    bool ignore_eos = false, logprobs = false, batch_invariant = false, random_weights = false, json = false;
};

SampleOptions parse_sample(const Args& args) {
    SampleOptions o;
    CLI::App app(
        "Completes prompts. Prints each prompt with its completion; completions are separated by lines of ---.",
        "train_gpt sample");
    add_model_options(app, o.model);
    add_weights_option(app, o.model.weights, true);
    auto* prompt =
        app.add_option("--prompt", o.prompt, "text to complete; empty: start from the beginning-of-text token");
    app.add_option(
           "--prompt-file", o.prompt_file,
           "file with one prompt, or with several separated by lines of ---; its last newline is not part of a prompt")
        ->excludes(prompt);
    app.add_option("--max-tokens", o.max_tokens, "maximum length of a completion in tokens")
        ->check(at_least(1))
        ->capture_default_str();
    add_sampling_flags(app, o.sampling);
    app.add_option("--adapter", o.adapters,
                   "LoRA adapter of the model, or a run that trained one, which is applied at run time and not merged; "
                   "may be given several times: each prompt is then completed with each")
        ->allow_extra_args(false);
    app.add_option("--num-samples", o.num_samples, "completions per prompt and adapter")
        ->check(at_least(1))
        ->capture_default_str();
    app.add_option("--batch-size", o.batch_size, "maximum number of sequences that generate at the same time")
        ->check(at_least(1))
        ->capture_default_str();
    add_context_options(app, o.context, o.policy, "as many as needed, at most the rows of the position table");
    app.add_option("--keep-tokens", o.policy.keep_tokens,
                   "tokens of the beginning that stay when the context window slides")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--stop", o.stop, "end a completion before this string; may be given several times")
        ->allow_extra_args(false);
    app.add_flag("--ignore-eos", o.ignore_eos, "continue past the end-of-text token");
    app.add_flag("--logprobs", o.logprobs,
                 "also print the log-probability of each token, before the penalties, --temperature and the filters");
    auto* top_logprobs =
        app.add_option("--top-logprobs", o.top_logprobs,
                       "with --json: also print the N most likely tokens at each step with their log-probabilities; at "
                       "most 20")
            ->check(number_in(0, double(MAX_TOP_LOGPROBS)))
            ->capture_default_str();
    app.add_flag("--batch-invariant", o.batch_invariant,
                 "on a GPU: a completion has the same bits whatever the rest of its batch is; slower");
    app.add_flag("--random-weights", o.random_weights, "use random weights, also with a preset: to measure speed");
    top_logprobs->needs(app.add_flag("--json", o.json, "print one JSON object"));
    parse(app, args);
    return o;
}

}  // namespace

void run_sample(const Args& args) {
    const SampleOptions o = parse_sample(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const bool has_tokenizer = Tokenizer::exists(source.files);
    require(has_tokenizer || o.random_weights, source.adapter.empty() ? source.name : source.directory,
            " has no tokenizer.json, which reading and writing text needs; put the model's own beside config.json");
    std::unique_ptr<Tokenizer> tokenizer;
    if (has_tokenizer) tokenizer = std::make_unique<Tokenizer>(source.files);

    SampleJob job;
    job.prompts = o.prompt_file.empty() ? std::vector<std::string>{o.prompt} : read_prompts(o.prompt_file);
    // Each has a state of its own while the program runs, so a number without a limit would use up the memory.
    constexpr int64_t MOST = 1000000;
    const int64_t sets = int64_t(job.prompts.size() * std::max<size_t>(o.adapters.size(), 1));
    require(o.num_samples <= MOST / sets, "--num-samples ", o.num_samples, " for ", sets, " prompts",
            o.adapters.empty() ? "" : " with adapters", ": at most ", MOST,
            " completions in one run; run it several times, each with another --seed");
    int64_t longest = 0;
    for (const std::string& prompt : job.prompts) {
        job.tokens.push_back(prompt_tokens(prompt, source, tokenizer.get()));
        longest = std::max(longest, int64_t(job.tokens.back().size()));
        const std::string lost = tokenizer ? lost_bytes_note(prompt, *tokenizer) : "";
        if (!lost.empty()) std::cerr << "train_gpt: sample: prompt " << job.tokens.size() << ": " << lost << "\n";
    }
    EngineOptions engine_options;
    engine_options.slots = std::min(sets * o.num_samples, o.batch_size);
    engine_options.context = o.context ? o.context : longest + o.max_tokens;
    if (!o.context && source.config.positions == Positions::Learned)
        engine_options.context = std::min(engine_options.context, source.config.max_positions);
    job.policy = o.policy;
    job.policy.check(engine_options.context, longest);
    engine_options.dtype = o.model.type();
    take_weights(engine_options, source, o.model.weights);
    engine_options.sampling = sampling_options(o.sampling, source, args);
    engine_options.sampled_vocab = sampled_vocab(source.config, tokenizer.get());
    engine_options.batch_invariant = o.batch_invariant;
    engine_options.logprobs = o.logprobs || o.top_logprobs > 0;
    engine_options.top_logprobs = o.top_logprobs;
    LoadedEngine m(ctx, source, engine_options, o.random_weights, o.adapters);

    job.adapters = o.adapters;
    job.num_samples = o.num_samples;
    job.completion.max_tokens = o.max_tokens;
    job.completion.stop = o.stop;
    if (!o.ignore_eos) job.completion.eos = end_tokens(source, tokenizer.get());
    job.json = o.json;
    sample(
        m.engine, job, tokenizer.get(), [&] { return measured_read_bandwidth(ctx.stream); }, std::cout, std::cerr);
}
