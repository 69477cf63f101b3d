#include "commands/run_options.h"

#include <algorithm>
#include <iostream>
#include <sstream>
#include <tuple>

#include "commands/help.h"
#include "driver/rank_facts.h"
#include "kernels/muon.h"
#include "runtime/device/device.h"
#include "runtime/files/files.h"
#include "runtime/limits.h"
#include "runtime/text.h"

void add_learning_options(CLI::App& app, TrainOptions& o) {
    const InGroup group(app, help_group::LEARNING);
    const auto add_rate = [&](const char* name, auto& value, const std::string& description) {
        return app.add_option(name, value, description)->check(number_in(0.0, 1e6));
    };
    const auto add_fraction = [&](const char* name, auto& value, double largest, const char* description) {
        app.add_option(name, value, description)->check(number_in(0.0, largest))->capture_default_str();
    };
    add_rate("--lr", o.lr,
             "peak learning rate; default: 6e-4 from scratch, 2e-5 from a checkpoint, 2e-4 for LoRA adapters; with "
             "--optimizer muon 0.02, 6.7e-4 and 5e-3; with a --loss on pairs a twentieth");
    add_optimizer_option(app, o.optimizer);
    const std::string other = "; default: --lr, with --optimizer muon ";
    add_rate("--embedding-lr", o.embedding_lr,
             "peak learning rate of the embeddings" + other + "5e-3, or 0.1 if they start large (--init fan-in)");
    add_rate("--head-lr", o.head_lr, "peak learning rate of an output head that is not tied" + other + "5e-3");
    add_rate("--vector-lr", o.vector_lr, "peak learning rate of norms, biases and decay gates" + other + "1e-2");
    app.add_option("--schedule", "learning rate after the warmup; wsd: constant, then linear decay")
        ->type_name("TEXT")
        ->check(CLI::IsMember(SCHEDULE_NAMES))
        ->default_str(SCHEDULE_NAMES[size_t(o.schedule)])
        ->each([&o](const std::string& name) { o.schedule = enum_of<Schedule>(SCHEDULE_NAMES, name); });
    app.add_option("--warmup", o.warmup, "steps of linear warmup; default: 5% of all steps, 3% from a checkpoint")
        ->check(at_least(0));
    add_fraction("--final-lr", o.final_lr, 1, "learning rate of the last step, as a fraction of the peak");
    add_fraction("--decay-fraction", o.decay_fraction, 1,
                 "wsd: fraction of the steps after the warmup in which the learning rate decays");
    add_rate("--weight-decay", o.weight_decay,
             "decoupled weight decay of matrices (not of biases and norms); default: 0.1, 0 from a checkpoint");
    add_rate("--grad-clip", o.grad_clip, "clip the global gradient norm to this; 0: off")->capture_default_str();
    add_rate("--spike-factor", o.spike_factor,
             "skip the update of a step whose gradient norm is more than this times the median of the last 63; 0: "
             "never")
        ->capture_default_str();
    add_fraction("--beta1", o.elementwise.adamw.beta1, 0.9999999, "AdamW's decay rate of the first moment");
    add_fraction("--beta2", o.elementwise.adamw.beta2, 0.9999999, "AdamW's decay rate of the second moment");
    app.add_option("--adam-eps", o.elementwise.adamw.eps,
                   "AdamW's epsilon, which is added to the root of the second moment")
        ->check(number_in(1e-30, 1.0))
        ->capture_default_str();
}

void add_muon_options(CLI::App& app, MuonFlags& o) {
    const InGroup group(app, help_group::MUON);
    app.add_option("--momentum", o.momentum, "Muon's momentum; default: 0.95")->check(number_in(0.0, 0.9999999));
    app.add_option("--momentum-warmup", o.momentum_warmup, "steps in which the momentum grows from 0.85; default: 0")
        ->check(at_least(0));
    app.add_option("--muon-coefficients", o.coefficients,
                   "coefficients of the Newton-Schulz iteration; default: polar-express")
        ->check(CLI::IsMember(newton_schulz_names()));
    app.add_option("--muon-iterations", o.iterations,
                   "Newton-Schulz iterations; default: 5, with --muon-coefficients simple 12")
        ->check(at_least(1))
        ->check(number_in(1, 100));
    app.add_option("--muon-scale", o.scale,
                   "factor of a matrix's update: spectral: √max(1, rows/columns); rms: 0.2·√max(rows, columns), for "
                   "learning rates of AdamW, which are then the defaults; default: spectral")
        ->check(CLI::IsMember({"spectral", "rms"}));
    app.add_option("--adam-weight-decay", o.adam_weight_decay,
                   "weight decay of the matrices that AdamW updates: embeddings and head; default: --weight-decay")
        ->check(number_in(0.0, 1e6));
}

void add_memory_options(CLI::App& app, TrainOptions& o) {
    const InGroup group(app, help_group::MEMORY);
    add_gpu_memory_option(app, o.gpu_memory,
                          "take at most this much of the GPU's memory, the CUDA context included, as in 24GiB");
    app.add_flag("--fit", o.fit, "take the first options for memory, and a batch size, with which the run fits")
        ->configurable(false);
    add_recompute_option(app, o);
    add_master_weights_option(app, o.master_weights);
    add_optimizer_dtype_option(app, o.optimizer_dtype);
    add_grad_dtype_option(app, o.grad_dtype);
    add_grad_rounding_option(app, o.grad_rounding);
    add_offload_option(app, o.offload);
}

void add_saving_options(CLI::App& app, TrainOptions& o) {
    const CLI::Validator positive = at_least(1);
    const InGroup group(app, help_group::SAVING);
    app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: only at the end")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--keep", o.keep, "number of newest checkpoints to keep; the best one is kept too")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--save-dtype", o.save_dtype,
                   "dtype of the exported model in a checkpoint. With bf16 the fp32 weights are kept beside it")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
    app.add_option("--on-save-error", o.on_save_error,
                   "continue: if a checkpoint or the log cannot be written, print the error and go on; stop: end the "
                   "run, for the log after a checkpoint. A last checkpoint that cannot be written is always an error")
        ->check(CLI::IsMember({"continue", "stop"}))
        ->capture_default_str();
    app.add_option("--max-skips", o.max_skips,
                   "stop after this many consecutive skipped steps (loss or gradient not finite, or a spike)")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--step-timeout", o.step_timeout,
                   "end the run if a step, a batch of an evaluation or a checkpoint takes more than this many "
                   "seconds; 0: never")
        ->check(number_in(0.0, 1e9))
        ->capture_default_str();
}

void add_measuring_options(CLI::App& app, TrainOptions& o) {
    app.add_flag("--measure-peak", o.measure_peak,
                 "time a large matmul at the start and also log each step's FLOP/s as a fraction of the matmul's");
    app.add_option("--profile", o.profile,
                   "print how long each part of this step takes; nsys (-c cudaProfilerApi) and ncu "
                   "(--profile-from-start off) record only this step")
        ->check(at_least(1))
        ->configurable(false);
}

void add_speed_options(CLI::App& app, TrainOptions& o) {
    const InGroup group(app, help_group::SPEED);
    add_switch(app, "--gemm-tune", o.gemm_tune,
               "on: time the GPU library's algorithms and our own GEMMs for each matmul and use the fastest; off: use "
               "the library's default. No effect on the CPU");
    app.add_option_function<std::string>(
           "--activation-epilogue,--gelu-epilogue",
           [&o](const std::string& name) {
               o.activation_epilogue = enum_of<ActivationEpilogue>(ACTIVATION_EPILOGUE_NAMES, name);
           },
           "with --dtype bf16: fuse the MLP's activation function into the matmul before it, and its gradient into the "
           "matmul of the backward pass (both), or only the gradient (backward), where that is faster. For GELU, "
           "--recompute activation and norms turn both into backward")
        ->check(CLI::IsMember({"both", "backward", "off"}))
        ->default_str("both");
    add_nondeterministic_option(app, o.nondeterministic);
}

void add_run_options(CLI::App& app, TrainOptions& o) {
    app.add_flag(
           "--resume", o.resume,
           "continue from the newest checkpoint in --out, with its options unless others are given; needs neither "
           "--model nor --data")
        ->configurable(false);
    app.set_config("--config", "", "TOML file to read options from; the command line overrides it")
        ->configurable(false);
    app.allow_config_extras(CLI::config_extras_mode::error);
}

namespace {

// Throws UsageError for options that have no effect.
void check_optimizer_options(const TrainOptions& o) {
    const MuonFlags& m = o.muon;
    const std::tuple<const char*, bool, OptimizerType> of_one[] = {
        {"--momentum", m.momentum.has_value(), OptimizerType::Muon},
        {"--momentum-warmup", m.momentum_warmup.has_value(), OptimizerType::Muon},
        {"--muon-coefficients", !m.coefficients.empty(), OptimizerType::Muon},
        {"--muon-iterations", m.iterations.has_value(), OptimizerType::Muon},
        {"--muon-scale", !m.scale.empty(), OptimizerType::Muon},
        {"--adam-weight-decay", m.adam_weight_decay.has_value(), OptimizerType::Muon}};
    for (const auto& [name, given, owner] : of_one)
        if (given && o.optimizer != owner)
            throw UsageError(
                str(name, " is an option of --optimizer ", facts_of(owner).name, "; add that or leave it out"));
    const std::pair<const char*, bool> of_frozen[] = {{"--embedding-lr", o.embedding_lr.has_value()},
                                                      {"--head-lr", o.head_lr.has_value()},
                                                      {"--vector-lr", o.vector_lr.has_value()},
                                                      {"--adam-weight-decay", m.adam_weight_decay.has_value()}};
    for (const auto& [name, given] : of_frozen)
        if (given && o.lora.on()) throw UsageError(str(name, " is for weights that --lora-rank freezes; leave it out"));
    const LearningRates rates = learning_rates(o);
    if (rates[0] == 0 && std::any_of(rates.begin(), rates.end(), [](double r) { return r > 0; }))
        throw UsageError("--lr 0: the other learning rates are scaled with it; give it a positive value");
    if (o.schedule == Schedule::WSD && o.decay_fraction == 0)
        throw UsageError("--decay-fraction 0: wsd would never reach --final-lr; raise it, or use --schedule constant");
}

// --steps and --epochs say the same. What is typed wins over a configuration file, as run.toml of a resumed run.
void settle_length(TrainOptions& o, const Args& args) {
    if (!o.steps || o.epochs == 0) return;
    const bool steps_typed = is_typed("--steps", args);
    if (steps_typed == is_typed("--epochs", args))
        throw UsageError("--steps and --epochs both say how long the run is; leave one of them out");
    if (steps_typed)
        o.epochs = 0;
    else
        o.steps = 0;
}

// A run that was killed before its first checkpoint has only run.toml, and starts again.
void check_resumable(const std::string& out, bool has_options) {
    const bool exists = is_directory(out);
    require(exists && (has_options || !list_checkpoints(out).empty()), "--resume: --out ", out,
            exists ? " holds neither a checkpoint nor run.toml" : " is not a directory",
            "; check the name, or leave --resume out to start a new run");
}

// CLI11 opens the file by itself: for it a failed read is the end of the file, and it waits for ever for one without an
// end. So it opens another, and gets the text.
class ConfigText : public CLI::ConfigTOML {
  public:
    explicit ConfigText(std::string config) : text(std::move(config)) {}
    std::vector<CLI::ConfigItem> from_config(std::istream&) const override {
        std::istringstream in(text);
        return CLI::ConfigTOML::from_config(in);
    }

  private:
    const std::string text;
};

// Puts another file in the place of that of --config.
void read_config_as_text(CLI::App& app, Args& args, const std::string& path) {
    app.config_formatter(std::make_shared<ConfigText>(read_file(path, 1 << 20)));
    const std::string name = "--config", empty = "/dev/null";
    for (size_t i = 0; i < args.size(); i++) {
        if (args[i] == name && i + 1 < args.size()) args[++i] = empty;
        if (starts_with(args[i], name + "=")) args[i] = str(name, "=", empty);
    }
}

}  // namespace

void parse_run(CLI::App& app, TrainOptions& o, const Args& args, const std::vector<std::string>& short_help,
               const std::string& without_args) {
    // A resumed run uses the options that it was started with, so --out and --resume are enough. They are read first.
    TrainOptions first;
    CLI::App probe;
    probe.add_option("--out", first.out);
    probe.add_flag("--resume", first.resume);
    const CLI::Option* const has_data = probe.add_option("--data", first.data);
    const CLI::Option* const has_new_data = probe.add_option("--new-data", first.new_data);
    std::string config;
    const CLI::Option* const has_config = probe.add_option("--config", config);
    parse_known(probe, args);
    if (has_config->count() && config.empty()) throw UsageError("--config: the value is empty; name a file");
    if (has_new_data->count()) {
        if (!first.resume) throw UsageError("--new-data is for --resume; a new run takes --data");
        if (has_data->count()) throw UsageError("--new-data takes the place of --data; give one of them");
        if (first.new_data.empty()) throw UsageError("--new-data: the value is empty; name a directory");
    }
    if (args.empty()) throw UsageError(without_args);
    Args all = args;
    const std::string stored = join_path(first.out, "run.toml");
    if (first.resume && !first.out.empty()) check_resumable(first.out, path_exists(stored));
    if (first.resume && config.empty() && path_exists(stored)) {
        all.insert(all.begin(), {"--config", stored});
        read_config_as_text(app, all, stored);
    }
    try {
        if (!config.empty()) read_config_as_text(app, all, config);
    } catch (const Error& e) {
        throw UsageError(str("--config: ", e.what()));
    }
    parse(app, all, short_help);
    o.batch_given = app.get_option("--batch-size")->count() > 0;
    settle_length(o, args);
    if (!o.new_data.empty()) o.data = o.new_data;
    if (!o.launch.rendezvous.empty()) {  // also where one process does not use it
        try {
            parse_host_port(o.launch.rendezvous, "--rendezvous");
        } catch (const Error& e) {
            throw UsageError(e.what());
        }
    }
    choose_training_dtype(o.model, o.master_weights, o.offload, device_count() ? this_target() : Target{});
    check_optimizer_options(o);
    check_lora_options(o.lora, o.fp8, o.offload, o.model.type() == DType::F32 || o.master_weights,
                       o.sharding.zero_stage);
    if (o.gpu_memory && backend_device() == Device::CPU)
        throw UsageError("--gpu-memory is a limit of a GPU, and this is the CPU backend; leave it out");
    for (const std::string& path : {o.model.model, o.model.base, o.data, o.out, o.sample_prompts,
                                    o.eval_multiple_choice, o.scorer.command.command}) {
        if (path.find_first_of("#\"'\\\n") != std::string::npos) {
            throw UsageError(
                str("'", path, "' contains # \" ' \\ or a line break, which run.toml cannot hold; rename it"));
        }
    }
    // CLI11 writes options that were not given and have no default as `name=""`: leave them out.
    std::istringstream lines(app.config_to_str(true, false));
    for (std::string line; std::getline(lines, line);) {
        const bool of_command = starts_with(line, "verifier-") && o.scorer.command.command.empty();
        if (ends_with(line, "=\"\"") || starts_with(line, "epochs=") || of_command) continue;  // steps say it
        o.toml += line + "\n";
    }
}

void start_run(TrainOptions options, const Args& args, const MakeSource& make_source) {
    if (const int64_t ranks = ranks_to_start(options.launch)) {
        // Reports an error once, not once per rank.
        if (is_directory(options.out)) DirectoryLock(options.out, "--out");
        check_training(options, ranks);
        Args command = {options.command};
        command.insert(command.end(), args.begin(), args.end());
        return run_ranks(ranks, command);
    }
    const Context ctx(join_world(options.launch));
    check_threads();
    if (ctx.world > 1) check_equal_on_ranks(ctx, facts_of(options));
    std::unique_ptr<DirectoryLock> lock;
    claim_run_directory(ctx, options.out, lock);  // before its checkpoints are looked at
    TrainSetup setup = check_training(std::move(options), ctx.world);
    if (ctx.world > 1) check_equal_on_ranks(ctx, facts_of(setup));
    if (setup.resume.step >= setup.o.steps) {
        if (ctx.rank > 0) return;
        std::cerr << setup.o.out << " is done: step " << setup.resume.step << " of " << setup.o.steps
                  << "; raise --steps to continue\n";
        return;
    }
    if (setup.o.fit) {
        const std::string chosen = fit_run(setup, ctx);
        if (ctx.rank == 0) std::cerr << chosen;
    }
    Trainer trainer(ctx, std::move(setup), std::move(lock));
    const std::unique_ptr<BatchSource> source = make_source(trainer);
    train(trainer, *source);
}
