#include "commands/cli.h"

#include <algorithm>
#include <iostream>
#include <new>

#include "runtime/device/device.h"

namespace {

std::string overview(const std::vector<Command>& commands) {
    std::string text =
        "train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA\n\nUsage: train_gpt COMMAND "
        "[OPTIONS]\n\nCommands:\n";
    for (const Command& c : commands)
        text += str("  ", c.name, std::string(10 - std::string(c.name).size(), ' '), c.summary, "\n");
    return text + "\n'train_gpt COMMAND --help' lists a command's options.\n";
}

// One line, whatever a library put into its message.
std::string one_line(std::string text) {
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}

int fail(const std::string& message, int status) {
    std::cout.flush();
    std::cerr << "train_gpt: " << one_line(message) << std::endl;
    return status;
}

}  // namespace

int run_program(int argc, char** argv, const std::vector<Command>& commands) {
    const Args args(argv + std::min(argc, 1), argv + argc);
    if (args.empty()) return fail("no command given; 'train_gpt --help' lists them", 2);
    if (args[0] == "--help" || args[0] == "-h" || args[0] == "help") {
        std::cout << overview(commands);
        return 0;
    }
    const auto command =
        std::find_if(commands.begin(), commands.end(), [&](const Command& c) { return args[0] == c.name; });
    if (command == commands.end()) return fail("unknown command '" + args[0] + "'; 'train_gpt --help' lists them", 2);
    try {
        command->run(Args(args.begin() + 1, args.end()));
        std::cout.flush();
        if (!std::cout) return fail("standard output: cannot write; is the disk full or the reader gone?", 1);
        return 0;
    } catch (const RanksFailed& failure) {
        return failure.status;
    } catch (const HelpRequested& help) {
        std::cout << help.text;
        return 0;
    } catch (const UsageError& e) {
        return fail(str(command->name, ": ", e.what(), "; see 'train_gpt ", command->name, " --help'"), 2);
    } catch (const std::bad_alloc&) {
        return fail(str(command->name, ": out of memory; 'train_gpt plan' shows what a run needs"), 1);
    } catch (const std::exception& e) {
        return fail(str(command->name, ": ", e.what()), 1);
    }
}

void parse(CLI::App& app, const Args& args) {
    try {
        app.parse(Args(args.rbegin(), args.rend()));  // CLI11 takes them last first
    } catch (const CLI::CallForHelp&) {
        throw HelpRequested{app.help()};
    } catch (const CLI::ParseError& e) {
        throw UsageError(one_line(e.what()));
    }
}

CLI::Validator at_least(int64_t least) {
    // 2^40 of anything is absurd; refusing it here keeps every product of three sizes from being formed unchecked.
    auto check = [least](const std::string& text) {
        int64_t value;
        const bool ok = CLI::detail::lexical_cast(text, value) && value >= least && value <= int64_t(1) << 40;
        return ok ? std::string() : str(text, " is not a whole number of at least ", least, " (and at most 2^40)");
    };
    return CLI::Validator(check, "");
}

CLI::Validator number_in(double low, double high) {
    auto check = [low, high](const std::string& text) {
        double value;
        const bool ok = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
        return ok ? std::string() : str(text, " is not a number from ", low, " to ", high);
    };
    return CLI::Validator(check, "");
}

void add_model_options(CLI::App& app, ModelOptions& o) {
    const CLI::Validator size = at_least(1);
    app.add_option("--model", o.model, "a preset, a model directory in Hugging Face layout, or a run directory")
        ->required();
    app.add_option("--dtype", o.dtype, "what weights and activations are computed in; not fp16 in training")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
        ->capture_default_str();
    const std::string knobs = "ModelOptions of a preset";
    app.add_option("--layers", o.layers, "transformer blocks")->check(size)->group(knobs);
    app.add_option("--channels", o.channels, "width of the residual stream")->check(size)->group(knobs);
    app.add_option("--heads", o.heads, "query heads")->check(size)->group(knobs);
    app.add_option("--kv-heads", o.kv_heads, "key and value heads; must divide the heads")->check(size)->group(knobs);
    app.add_option("--head-size", o.head_size, "channels of a head; channels/heads if not given")
        ->check(size)
        ->group(knobs);
    app.add_option("--ffn", o.ffn, "inner width of the MLP")->check(size)->group(knobs);
    app.add_option("--max-positions", o.max_positions, "rows of the position table, or the length RoPE is meant for")
        ->check(size)
        ->group(knobs);
    app.add_option("--vocab-size", o.vocab_size, "tokens of the vocabulary; that of the data if not given")
        ->check(size)
        ->group(knobs);
    app.add_option("--norm", o.norm, "normalisation")->check(CLI::IsMember({"layernorm", "rmsnorm"}))->group(knobs);
    app.add_option("--positions", o.positions, "how positions enter")
        ->check(CLI::IsMember({"learned", "rope"}))
        ->group(knobs);
    app.add_option("--mlp", o.mlp, "activation of the MLP")
        ->check(CLI::IsMember({"gelu", "swiglu", "relu2"}))
        ->group(knobs);
    app.add_option("--bias", o.bias, "biases in the linear layers")->check(CLI::IsMember({"yes", "no"}))->group(knobs);
    app.add_option("--tied", o.tied, "the head is the token embedding")
        ->check(CLI::IsMember({"yes", "no"}))
        ->group(knobs);
    app.add_option("--attention", o.attention,
                   "attention kind, one letter or one per layer: S softmax, L linear, G gated linear")
        ->group(knobs);
    app.add_option("--linear-rope", o.linear_rope, "RoPE in layers of kinds L and G too; yes if not given")
        ->check(CLI::IsMember({"yes", "no"}))
        ->group(knobs);
}

void add_sampling_flags(CLI::App& app, SamplingFlags& o) {
    app.add_option("--repeat-penalty", o.repeat_penalty,
                   "divides the positive and multiplies the negative logits of tokens that the context has already; "
                   "applied first; 1: none")
        ->check(number_in(1e-3, 1e3))
        ->capture_default_str();
    app.add_option("--temperature", o.temperature, "divides the logits; 0 always takes the likeliest token")
        ->check(number_in(0.0, 1e6))
        ->capture_default_str();
    app.add_option("--top-k", o.top_k, "draw among the k likeliest tokens; 0: among all")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--top-p", o.top_p,
                   "then among as few of the likeliest as have together this probability; 1: among all")
        ->check(number_in(1e-6, 1))
        ->capture_default_str();
    app.add_option("--min-p", o.min_p, "then among those at least this fraction as likely as the likeliest; 0: all")
        ->check(number_in(0, 1))
        ->capture_default_str();
    app.add_option("--seed", o.seed, "seed of the draws")->check(at_least(0))->capture_default_str();
}

void add_context_options(CLI::App& app, int64_t& context, bool& slide, const std::string& if_not_given) {
    app.add_option("--context", context,
                   "tokens that the cache has room for, prompt and answer; if not given, " + if_not_given)
        ->check(at_least(2));
    app.add_option_function<std::string>(
           "--context-full", [&slide](const std::string& what) { slide = what == "slide"; },
           "what happens to a text that fills its context: slide: the later half of it goes on; stop: it ends")
        ->check(CLI::IsMember({"slide", "stop"}))
        ->default_str("slide");
}

void add_launch_options(CLI::App& app, LaunchOptions& o) {
    const std::string group = "Several processes (docs/multi_gpu.md)";
    app.add_option("--gpus", o.gpus, "start one process on each of this many GPUs of this machine, or on 'all'")
        ->capture_default_str()
        ->group(group)
        ->configurable(false);
    app.add_option("--rendezvous", o.rendezvous,
                   "HOST:PORT where rank 0 waits for the others, if the launcher doesn't tell or the port is taken")
        ->group(group)
        ->configurable(false);
    app.add_option("--comm-timeout", o.timeout_s, "seconds that processes wait for each other before they give up")
        ->check(number_in(0.1, 1e6))
        ->capture_default_str()
        ->group(group)
        ->configurable(false);
}

void add_sharding_options(CLI::App& app, ShardingOptions& o) {
    const std::string group = "Several processes (docs/multi_gpu.md)";
    app.add_option("--zero-stage", o.zero_stage,
                   "what each process keeps a part of: 0: nothing; 1: optimizer state and master weights; 2: gradients "
                   "too; 3: weights too (docs/sharding.md)")
        ->check(CLI::IsMember(std::vector<int64_t>{0, 1, 2, 3}))
        ->capture_default_str()
        ->group(group);
    app.add_option("--reduce-dtype", o.reduce_dtype,
                   "what gradients are summed in between processes: bf16 halves what is sent and loses digits")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str()
        ->group(group);
    app.add_option("--reduce-bucket-mib", o.bucket_mib,
                   "stages 0 and 1: gradients are summed as soon as so many MiB of them are complete")
        ->check(at_least(0))
        ->capture_default_str()
        ->group(group);
}

CLI::Option* add_recompute_option(CLI::App& app, Recompute& recompute) {
    static const std::map<std::string, Recompute> levels = {{"none", Recompute::None},
                                                            {"activation", Recompute::Activation},
                                                            {"norms", Recompute::Norms},
                                                            {"block", Recompute::Block}};
    return app
        .add_option_function<std::string>(
            "--recompute", [&recompute](const std::string& name) { recompute = levels.at(name); },
            "what the backward pass computes again instead of keeping: none, the MLP's activation, the norms too, or "
            "the whole block")
        ->check(CLI::IsMember({"none", "activation", "norms", "block"}))
        ->default_str("none");
}

CLI::Option* add_switch(CLI::App& app, const std::string& name, bool& on, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name, [&on](const std::string& value) { on = value == "on"; }, description)
        ->check(CLI::IsMember({"on", "off"}))
        ->default_str(on ? "on" : "off");
}

CLI::Option* add_master_weights_option(CLI::App& app, bool& master_weights) {
    return add_switch(app, "--master-weights", master_weights,
                      "with --dtype bf16: on: the optimizer updates fp32 copies of the weights; off: it updates bf16 "
                      "weights and rounds stochastically, which saves 4 bytes a weight");
}

CLI::Option* add_nondeterministic_option(CLI::App& app, bool& nondeterministic) {
    return app.add_flag("--nondeterministic", nondeterministic,
                        "with --dtype bf16 on an H100 or H200: attention's backward pass sums in the order in which "
                        "its terms come, faster, with more memory; two runs may then differ in the last bits. "
                        "Elsewhere it changes nothing");
}

void check_training_dtype(const ModelOptions& model, bool master_weights) {
    if (model.type() == DType::F16) throw UsageError("--dtype fp16 is for inference only; train with bf16");
    if (!master_weights && model.type() == DType::F32)
        throw UsageError("--master-weights off needs 16-bit weights; add --dtype bf16");
}

DType ModelOptions::type() const {
    return dtype == "bf16" ? DType::BF16 : dtype == "fp16" ? DType::F16 : DType::F32;
}

void ModelOptions::check_dtype(const ModelConfig& config) const {
    require(type() != DType::F16 || !config.has_linear_attention(),
            "--dtype fp16: the sums of linear attention (kinds L "
            "and G) are beyond its range; use bf16 or fp32");
}

ModelSource ModelOptions::resolve(int64_t data_vocab) const {
    ModelSource source = find_model(model);
    ModelConfig& c = source.config;
    require(dtype == "fp32" || backend_device() != Device::CPU, "--dtype ", dtype,
            ": the CPU backend computes in fp32; use --dtype fp32");

    const bool any_knob = layers || channels || heads || kv_heads || head_size || ffn || max_positions || vocab_size ||
                          !norm.empty() || !positions.empty() || !mlp.empty() || !bias.empty() || !tied.empty() ||
                          !attention.empty() || !linear_rope.empty();
    if (!source.directory.empty()) {
        require(!any_knob, "--model ", model,
                " is a checkpoint and fixes the shape; leave out the knobs (--layers … --linear-rope)");
        check_dtype(c);
        return source;
    }

    if (layers) c.layers = *layers;
    if (channels) c.channels = *channels;
    if (heads) c.heads = *heads;
    if (!mlp.empty()) c.mlp = mlp == "gelu" ? Mlp::GELU : mlp == "swiglu" ? Mlp::SwiGLU : Mlp::ReLU2;
    if (max_positions) c.max_positions = *max_positions;
    if (!norm.empty()) c.norm = norm == "layernorm" ? Norm::LayerNorm : Norm::RMSNorm;
    if (!positions.empty()) {
        c.positions = positions == "learned" ? Positions::Learned : Positions::RoPE;
        if (c.positions == Positions::Learned) c.rope_scaling = {};
    }
    if (!bias.empty()) c.qkv_bias = c.proj_bias = c.mlp_bias = bias == "yes";
    if (!tied.empty()) c.tied = tied == "yes";
    // What follows from a knob that was changed follows again, unless it is given too.
    if (kv_heads || heads) c.kv_heads = kv_heads.value_or(0);
    if (head_size || channels || heads) c.head_size = head_size.value_or(0);
    if (ffn || channels || !mlp.empty()) c.ffn = ffn.value_or(0);
    c.attention = attention;
    c.linear_rope = linear_rope != "no";
    fill_defaults(c, "--model " + model);
    if (vocab_size) {
        require(*vocab_size >= data_vocab, "--vocab-size ", *vocab_size, " is smaller than the data's vocabulary of ",
                data_vocab, "; leave it out or raise it");
        c.vocab_size = *vocab_size;
    } else if (data_vocab > 0) {
        c.vocab_size = data_vocab;
    }
    // A preset's special ids mean nothing in another vocabulary.
    if (c.bos >= c.vocab_size) c.bos = -1;
    if (c.eos >= c.vocab_size) c.eos = -1;
    validate(c, "--model " + model);
    require(linear_rope.empty() || (c.has_linear_attention() && c.positions == Positions::RoPE), "--linear-rope ",
            linear_rope, " needs layers of kind L or G (--attention) and --positions rope");
    check_dtype(c);
    return source;
}
