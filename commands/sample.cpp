// `sample`: completions of prompts.
#include <algorithm>
#include <iostream>
#include <memory>

#include "commands/generation_options.h"
#include "data/tokenizer.h"
#include "driver/inference.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"
#include "kernels/generation/read_bandwidth.h"
#include "runtime/files/files.h"

namespace {

struct SampleOptions {
    ModelOptions model;
    GenerationFlags generation;
    std::string prompt, prompt_file;
    int64_t top_logprobs = 0;
    std::vector<std::string> adapters;
    bool logprobs = false, random_weights = false, json = false;
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
    add_generation_options(app, o.generation);
    app.add_option("--adapter", o.adapters,
                   "LoRA adapter of the model, or a run that trained one, which is applied at run time and not merged; "
                   "may be given several times: each prompt is then completed with each")
        ->allow_extra_args(false);
    app.add_option("--batch-size", o.generation.batch_size,
                   "maximum number of sequences that generate at the same time")
        ->check(at_least(1))
        ->capture_default_str();
    app.add_flag("--logprobs", o.logprobs,
                 "also print the log-probability of each token, before the penalties, --temperature and the filters");
    auto* top_logprobs =
        app.add_option("--top-logprobs", o.top_logprobs,
                       "with --json: also print the N most likely tokens at each step with their log-probabilities; at "
                       "most 20")
            ->check(number_in(0, double(MAX_TOP_LOGPROBS)))
            ->capture_default_str();
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
    const int64_t sets = int64_t(job.prompts.size() * std::max<size_t>(o.adapters.size(), 1));
    const int64_t count = completion_count(o.generation.num_samples, sets, o.adapters.empty() ? "" : " with adapters");
    int64_t longest = 0;
    for (const std::string& prompt : job.prompts) {
        job.tokens.push_back(prompt_tokens(prompt, source, tokenizer.get()));
        longest = std::max(longest, int64_t(job.tokens.back().size()));
        const std::string lost = tokenizer ? lost_bytes_note(prompt, *tokenizer) : "";
        if (!lost.empty()) std::cerr << "train_gpt: sample: prompt " << job.tokens.size() << ": " << lost << "\n";
    }
    job.policy = o.generation.policy;
    EngineOptions engine_options =
        generation_engine(o.generation, o.model, source, tokenizer.get(), count, longest, args);
    engine_options.logprobs = o.logprobs || o.top_logprobs > 0;
    engine_options.top_logprobs = o.top_logprobs;
    LoadedEngine m(ctx, source, engine_options, o.random_weights, o.adapters);

    job.adapters = o.adapters;
    job.num_samples = o.generation.num_samples;
    job.completion = completion_options(o.generation, source, tokenizer.get());
    job.json = o.json;
    sample(
        m.engine, job, tokenizer.get(), [&] { return measured_read_bandwidth(ctx.stream); }, std::cout, std::cerr);
}
