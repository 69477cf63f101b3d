#include <sstream>

#include "commands/cli.h"
#include "runtime/files/files.h"

namespace {

std::unique_ptr<CLI::App> train_app(TrainOptions& o) {
    auto app = std::make_unique<CLI::App>(
        "Trains a model and writes a run directory: run.toml, log.jsonl and checkpoints.", "train_gpt train");
    const CLI::Validator positive = at_least(1);
    const CLI::Validator count = at_least(0);
    const CLI::Validator fraction = number_in(0.0, 1.0);
    const CLI::Validator rate = number_in(0.0, 1e6);
    add_model_options(*app, o.model);
    app->add_option("--data", o.data, "a folder with train_*.bin and val_*.bin, as 'make data' writes it")->required();
    app->add_option("--out", o.out, "the run directory to write")->required();
    app->add_option("--steps", o.steps, "optimizer steps in all")->check(positive)->capture_default_str();
    app->add_option("--batch-size", o.batch_size, "sequences per micro-step of each process")
        ->check(positive)
        ->capture_default_str();
    app->add_option("--seq-len", o.seq_len, "tokens per sequence")->check(positive)->capture_default_str();
    app->add_option("--total-batch-tokens", o.total_batch_tokens,
                    "tokens per step of all processes; batch-size x seq-len of each if not given")
        ->check(positive);
    app->add_option("--lr", o.lr, "peak learning rate")->check(rate)->capture_default_str();
    app->add_option("--schedule",
                    "learning rate after the warmup: cosine, linear, constant, or wsd (constant, then linear)")
        ->check(CLI::IsMember({"cosine", "linear", "constant", "wsd"}))
        ->default_str("cosine")
        ->each([&o](const std::string& s) {
            o.schedule = s == "cosine"   ? Schedule::Cosine
                         : s == "linear" ? Schedule::Linear
                         : s == "wsd"    ? Schedule::WSD
                                         : Schedule::Constant;
        });
    app->add_option("--warmup", o.warmup, "steps of linear warmup; a twentieth of --steps if not given")->check(count);
    app->add_option("--final-lr", o.final_lr, "learning rate at the last step, as a fraction of --lr")
        ->check(fraction)
        ->capture_default_str();
    app->add_option("--decay-fraction", o.decay_fraction, "part of the steps that wsd decays in")
        ->check(fraction)
        ->capture_default_str();
    app->add_option("--weight-decay", o.weight_decay, "decoupled decay of matrices (not of biases and norms)")
        ->check(rate)
        ->capture_default_str();
    app->add_option("--grad-clip", o.grad_clip, "clip the global gradient norm to this; 0: never")
        ->check(rate)
        ->capture_default_str();
    app->add_option("--beta1", o.beta1, "AdamW's decay of the first moment")
        ->check(number_in(0.0, 0.9999999))
        ->capture_default_str();
    app->add_option("--beta2", o.beta2, "AdamW's decay of the second moment")
        ->check(number_in(0.0, 0.9999999))
        ->capture_default_str();
    add_recompute_option(*app, o.recompute);
    add_master_weights_option(*app, o.master_weights);
    add_switch(
        *app, "--gemm-tune", o.gemm_tune,
        "time the GPU library's algorithms for each matrix product and take the fastest; off: take its guess. The "
        "CPU has none to choose from");
    app->add_option_function<std::string>(
           "--gelu-epilogue",
           [&o](const std::string& s) {
               o.gelu_epilogue = s == "both"       ? GeluEpilogue::Both
                                 : s == "backward" ? GeluEpilogue::Backward
                                                   : GeluEpilogue::Off;
           },
           "with --dtype bf16: GELU and its gradient inside the matrix products around them; --recompute activation "
           "and "
           "norms, which compute GELU alone, turn both into backward")
        ->check(CLI::IsMember({"both", "backward", "off"}))
        ->default_str("both");
    add_nondeterministic_option(*app, o.nondeterministic);
    app->add_flag("--measure-peak", o.measure_peak,
                  "time a large matrix product at the start and log each step's FLOP/s as a fraction of its too");
    app->add_option("--profile", o.profile,
                    "print where this step's time goes; nsys (-c cudaProfilerApi) and ncu (--profile-from-start off) "
                    "watch it alone")
        ->check(positive)
        ->configurable(false);
    app->add_flag("--document-mask", o.document_mask, "attention and positions don't cross end-of-text tokens");
    app->add_flag("--overfit-one-batch", o.overfit_one_batch,
                  "train on the first batch again and again: a model that learns gets its loss to 0");
    app->add_option("--eval-every", o.eval_every,
                    "steps between evaluations on the validation split; 0: at the end only")
        ->check(count)
        ->capture_default_str();
    app->add_option("--eval-tokens", o.eval_tokens, "validation tokens per evaluation; 0: the whole split")
        ->check(count)
        ->capture_default_str();
    app->add_option("--sample-every", o.sample_every, "steps between samples of text; 0: none")
        ->check(count)
        ->capture_default_str();
    app->add_option("--save-every", o.save_every, "steps between checkpoints; 0: at the end only")
        ->check(count)
        ->capture_default_str();
    app->add_option("--keep", o.keep, "checkpoints kept: the newest ones, and the best one besides")
        ->check(positive)
        ->capture_default_str();
    app->add_option("--max-skips", o.max_skips,
                    "stop after this many steps in a row whose loss or gradient is not finite")
        ->check(positive)
        ->capture_default_str();
    app->add_flag("--resume", o.resume,
                  "go on from the newest checkpoint in --out, with its options where none are given")
        ->configurable(false);
    app->add_option("--seed", o.seed, "seed of the weights and of the order of samples")
        ->check(at_least(0))
        ->capture_default_str();
    add_sharding_options(*app, o.sharding);
    add_launch_options(*app, o.launch);
    app->set_config("--config", "", "read options from a TOML file; the command line wins")->configurable(false);
    app->allow_config_extras(CLI::config_extras_mode::error);
    return app;
}

}  // namespace

TrainOptions parse_train(const Args& args) {
    TrainOptions o;
    auto app = train_app(o);
    // A resumed run takes the options it was started with, so --out and --resume are enough: read those two first.
    TrainOptions first;
    CLI::App probe;
    probe.allow_extras();
    probe.set_help_flag();
    probe.add_option("--out", first.out);
    probe.add_flag("--resume", first.resume);
    std::string config;
    probe.add_option("--config", config);
    parse(probe, args);
    Args all = args;
    const std::string stored = join_path(first.out, "run.toml");
    if (first.resume && config.empty() && path_exists(stored)) all.insert(all.begin(), {"--config", stored});
    parse(*app, all);
    check_training_dtype(o.model, o.master_weights);
    for (const std::string& path : {o.model.model, o.data, o.out}) {
        if (path.find_first_of("#\"'\\\n") != std::string::npos) {
            throw UsageError(
                str("'", path, "' holds one of # \" ' \\ or a line break, which run.toml cannot keep; rename it"));
        }
    }
    // Options that were not given and have no default come out as `name=""`: leave them out.
    std::istringstream lines(app->config_to_str(true, false));
    for (std::string line; std::getline(lines, line);) {
        if (line.size() < 3 || line.compare(line.size() - 3, 3, "=\"\"") != 0) o.toml += line + "\n";
    }
    return o;
}
