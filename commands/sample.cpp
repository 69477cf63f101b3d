#include "commands/cli.h"

SampleOptions parse_sample(const Args& args) {
    SampleOptions o;
    CLI::App app(
        "Continues prompts. Prints prompt and text; samples are separated by ---. Filters apply in the order in which "
        "they are listed here.",
        "train_gpt sample");
    add_model_options(app, o.model);
    auto* prompt =
        app.add_option("--prompt", o.prompt, "text to continue; empty: start from the beginning-of-text token");
    app.add_option("--prompt-file", o.prompt_file,
                   "a file with the text to continue, or with several, between lines of ---")
        ->excludes(prompt);
    app.add_option("--max-tokens", o.max_tokens, "tokens to draw at most")->check(at_least(1))->capture_default_str();
    add_sampling_flags(app, o.draw);
    app.add_option("--num-samples", o.num_samples, "how many texts for each prompt")
        ->check(at_least(1))
        ->capture_default_str();
    app.add_option("--batch-size", o.batch_size, "texts at a time at most")->check(at_least(1))->capture_default_str();
    add_context_options(app, o.context, o.slide, "what is needed, up to the rows of a position table");
    app.add_option("--keep", o.keep, "tokens of the beginning that stay when a text slides")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--stop", o.stop, "end a text before this string; may be given several times")
        ->allow_extra_args(false);
    app.add_flag("--ignore-eos", o.ignore_eos, "go on past the end-of-text token");
    app.add_flag("--logprobs", o.logprobs,
                 "the logarithm of each token's probability by the model alone, without penalty, filters, temperature");
    app.add_flag("--batch-invariant", o.batch_invariant,
                 "on a GPU too a text does not depend, to the last bit, on the others of its batch; slower");
    app.add_flag("--random-weights", o.random_weights, "random weights, of a preset too: shows speed, not sense");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    return o;
}
