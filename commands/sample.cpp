#include "commands/cli.h"

SampleOptions parse_sample(const Args& args) {
    SampleOptions o;
    CLI::App app(
        "Completes prompts. Prints each prompt with its completion; completions are separated by lines of ---.",
        "train_gpt sample");
    add_model_options(app, o.model);
    auto* prompt =
        app.add_option("--prompt", o.prompt, "text to complete; empty: start from the beginning-of-text token");
    app.add_option("--prompt-file", o.prompt_file, "file with one prompt, or with several separated by lines of ---")
        ->excludes(prompt);
    app.add_option("--max-tokens", o.max_tokens, "maximum length of a completion in tokens")
        ->check(at_least(1))
        ->capture_default_str();
    add_sampling_flags(app, o.sampling);
    app.add_option("--num-samples", o.num_samples, "completions per prompt")->check(at_least(1))->capture_default_str();
    app.add_option("--batch-size", o.batch_size, "maximum number of sequences that generate at the same time")
        ->check(at_least(1))
        ->capture_default_str();
    add_context_options(app, o.context, o.slide, "as many as needed, at most the rows of the position table");
    app.add_option("--keep-tokens", o.keep_tokens, "tokens of the beginning that stay when the context window slides")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--stop", o.stop, "end a completion before this string; may be given several times")
        ->allow_extra_args(false);
    app.add_flag("--ignore-eos", o.ignore_eos, "continue past the end-of-text token");
    app.add_flag(
        "--logprobs", o.logprobs,
        "also print the log-probability of each token, before --repeat-penalty, --temperature and the filters");
    app.add_flag("--batch-invariant", o.batch_invariant,
                 "on a GPU: a completion has the same bits whatever the rest of its batch is; slower");
    app.add_flag("--random-weights", o.random_weights, "use random weights, also with a preset: to measure speed");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    return o;
}
