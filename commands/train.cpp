// `train`: its options, and the start of a run.
#include "commands/help.h"
#include "commands/run_options.h"

namespace {

void add_length_options(CLI::App& app, TrainOptions& o) {
    const CLI::Validator positive = at_least(1);
    const InGroup group(app, help_group::LENGTH);
    app.add_option("--steps", o.steps,
                   "total number of optimizer steps; default: 1000 from scratch, 3 epochs from a checkpoint, 1 with a "
                   "--loss on pairs")
        ->check(positive);
    app.add_option("--epochs", o.epochs,
                   "instead of --steps: passes over the training sequences, of the first directory of --data")
        ->check(number_in(1e-6, 1e6));
    app.add_option("--batch-size", o.batch_size,
                   "sequences per process and micro-step; from a checkpoint 2 or 1 where a run "
                   "of --epochs would have less than 50 steps")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--seq-len", o.seq_len, "tokens per sequence")->check(positive)->capture_default_str();
    app.add_option("--total-batch-tokens", o.total_batch_tokens,
                   "tokens per optimizer step over all processes; default: batch-size x seq-len x processes")
        ->check(positive);
}

void add_report_options(CLI::App& app, TrainOptions& o) {
    const CLI::Validator count = at_least(0);
    const InGroup group(app, help_group::REPORTS);
    app.add_option("--eval-every", o.eval_every,
                   "steps between evaluations on the validation split; 0: only at the end")
        ->check(count)
        ->capture_default_str();
    app.add_option("--eval-tokens", o.eval_tokens, "validation tokens per evaluation; 0: the whole split")
        ->check(count)
        ->capture_default_str();
    app.add_option("--eval-multiple-choice", o.eval_multiple_choice,
                   "file of questions, as for eval --multiple-choice, to answer at each evaluation");
    app.add_option("--sample-every", o.sample_every, "steps between samples, which are printed and logged; 0: none")
        ->check(count)
        ->capture_default_str();
    app.add_option("--sample-prompts", o.sample_prompts,
                   "file of prompts, separated by lines of ---, that --sample-every completes; with data made by a "
                   "chat template each is a user turn");
    add_measuring_options(app, o);
}

void add_data_options(CLI::App& app, TrainOptions& o) {
    const InGroup group(app, help_group::DATA);
    app.add_option("--new-data", o.new_data,
                   "with --resume: go on with this data, in the form of --data, instead of the run's")
        ->configurable(false);
    app.add_option("--pack", o.pack,
                   "examples: training sequences hold whole examples, and attention does not cross them; none: "
                   "sequences of fixed length, which cut examples; default: examples, if the data is made from "
                   "conversations")
        ->check(CLI::IsMember({"examples", "none"}));
    add_too_long_option(app, o.too_long);
    app.add_flag("--document-mask", o.document_mask, "attention and positions do not cross end-of-text tokens");
    app.add_flag("--overfit-one-batch", o.overfit_one_batch,
                 "train on the first batch in every step: the loss of a correct model goes to 0");
}

std::unique_ptr<CLI::App> train_app(TrainOptions& o) {
    auto app = std::make_unique<CLI::App>(
        "Trains a model and writes a run directory: run.toml, log.jsonl and checkpoints.", "train_gpt train");
    add_model_options(*app, o.model, true);
    const std::string unless_resumed = "required without --resume: ";
    CLI::Option* const model = app->get_option("--model");
    model->description(unless_resumed + model->get_description());
    app->add_option(
           "--data", o.data,
           unless_resumed +
               "directory with train_*.bin and val_*.bin, as 'make data' writes it; or several directories with their "
               "shares of the training sequences, as in web:0.7,code:0.3")
        ->required();
    app->add_option("--out", o.out, "run directory to write")->required();
    add_run_options(*app, o);
    app->add_option("--seed", o.seed, "seed of the initial weights and of the order of the data")
        ->check(at_least(0))
        ->capture_default_str();
    add_length_options(*app, o);
    add_learning_options(*app, o);
    add_lora_options(*app, o.lora);
    app->add_flag("--random-weights", o.random_weights,
                  "adapters of a preset with the initial weights of --seed, which are not saved: to measure speed and "
                  "memory")
        ->group(help_group::LORA);
    add_preference_options(*app, o.preference);
    add_memory_options(*app, o);
    add_report_options(*app, o);
    add_saving_options(*app, o);
    add_launch_options(*app, o.launch);
    add_sharding_options(*app, o.sharding);
    add_data_options(*app, o);
    add_muon_options(*app, o.muon);
    add_fp8_options(*app, o.fp8);
    add_speed_options(*app, o);
    return app;
}

// What most runs need: the help without a topic.
const std::vector<std::string> SHORT_HELP = {"--model",      "--data",       "--out",
                                             "--resume",     "--steps",      "--epochs",
                                             "--batch-size", "--seq-len",    "--total-batch-tokens",
                                             "--lr",         "--optimizer",  "--lora-rank",
                                             "--qlora",      "--dtype",      "--gpu-memory",
                                             "--fit",        "--eval-every", "--sample-every",
                                             "--save-every", "--gpus"};

}  // namespace

TrainOptions parse_train(const Args& args) {
    TrainOptions o;
    auto app = train_app(o);
    parse_run(*app, o, args, SHORT_HELP,
              "name a model, data and a run directory; after 'make train' for example: ./train_gpt train "
              "--model gpt2-tiny --data data/tokens/quickstart --out runs/first --steps 200");
    check_preference_options(o.preference, o.lora, o.fp8);
    if (o.random_weights && !o.lora.on())
        throw UsageError(
            "--random-weights is for the base of LoRA adapters; add --lora-rank, or leave it out: a preset starts with "
            "random weights anyway");
    if (!o.sample_prompts.empty() && !o.sample_every)
        throw UsageError("--sample-prompts has no effect without --sample-every; add --sample-every N");
    return o;
}

void run_train(const Args& args) {
    start_run(parse_train(args), args, [](Trainer& trainer) { return std::make_unique<LoadedBatches>(trainer); });
}
