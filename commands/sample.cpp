#include "commands/cli.h"

SampleOptions parse_sample(const Args& args) {
    SampleOptions o;
    CLI::App app("Continues a prompt. Prints prompt and text; samples are separated by ---.", "train_gpt sample");
    add_model_options(app, o.model);
    auto* prompt =
        app.add_option("--prompt", o.prompt, "text to continue; empty: start from the beginning-of-text token");
    app.add_option("--prompt-file", o.prompt_file, "a file with the text to continue")->excludes(prompt);
    app.add_option("--max-tokens", o.max_tokens, "tokens to draw at most")->check(at_least(1))->capture_default_str();
    app.add_option("--temperature", o.temperature, "divides the logits; 0 always takes the likeliest token")
        ->check(number_in(0.0, 1e6))
        ->capture_default_str();
    app.add_option("--top-k", o.top_k, "draw among the k likeliest tokens; 0: among all")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--seed", o.seed, "seed of the draws")->check(at_least(0))->capture_default_str();
    app.add_option("--num-samples", o.num_samples, "how many texts")->check(at_least(1))->capture_default_str();
    app.add_option("--stop", o.stop, "end a text before this string; may be given several times")
        ->allow_extra_args(false);
    app.add_flag("--ignore-eos", o.ignore_eos, "go on past the end-of-text token");
    app.add_flag("--random-weights", o.random_weights, "random weights, of a preset too: shows speed, not sense");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    return o;
}
