#include "commands/cli.h"

PlanOptions parse_plan(const Args& args) {
    PlanOptions o;
    CLI::App app("Prints the memory a run needs and its FLOP per token. Nothing is allocated.", "train_gpt plan");
    const CLI::Validator positive = at_least(1);
    add_model_options(app, o.model);
    app.add_option("--batch-size", o.batch_size, "sequences per micro-step")->check(positive)->capture_default_str();
    app.add_option("--seq-len", o.seq_len, "tokens per sequence")->check(positive)->capture_default_str();
    auto* recompute = add_recompute_option(app, o.recompute);
    auto* master_weights = add_master_weights_option(app, o.master_weights);
    auto* nondeterministic = add_nondeterministic_option(app, o.nondeterministic);
    auto* inference = app.add_flag("--inference", o.inference, "plan a forward pass only")
                          ->excludes(recompute)
                          ->excludes(master_weights)
                          ->excludes(nondeterministic);
    app.add_flag("--generate", o.generate, "plan 'sample' with --batch-size texts at a time, of --seq-len tokens each")
        ->excludes(recompute)
        ->excludes(master_weights)
        ->excludes(nondeterministic)
        ->excludes(inference);
    add_sharding_options(app, o.sharding);
    app.add_option("--world", o.world, "processes; the plan is that of each")
        ->check(positive)
        ->capture_default_str()
        ->excludes(inference)
        ->excludes("--generate");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    if (!o.inference && !o.generate) check_training_dtype(o.model, o.master_weights);
    return o;
}
