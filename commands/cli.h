// Shared by the parsers of the commands. Only commands/*.cpp include this.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>

#include "commands/commands.h"
#include "infer/generate.h"
#include "kernels/generation/sampling.h"
#include "runtime/device/target.h"

// How tokens are sampled; kernels/generation/sampling.h has the order in which these are applied.
struct SamplingFlags {
    double temperature = 1, top_p = 1, min_p = 0, repeat_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    int64_t top_k = 0;
    uint64_t seed = 42;
};

// Parses args (without program and command name) and turns CLI11's exceptions into UsageError and HelpRequested.
// Errors in the arguments are listed in the order in which they were typed, before missing options; an unknown option
// names the one that was probably meant. short_help: as help_text() takes it (commands/help.h).
void parse(CLI::App& app, const Args& args, const std::vector<std::string>& short_help = {});
// Whether an option is among the arguments, as --name or --name=value.
bool is_typed(const std::string& name, const Args& args);
// Parses the options that app knows and ignores all others and all errors.
void parse_known(CLI::App& app, const Args& args);

// Value checks with a plain message: "--steps: 0 is not a whole number of at least 1".
CLI::Validator at_least(int64_t least);
CLI::Validator number_in(double low, double high);
// Checks attention types and turns them into letters, as ModelConfig::attention holds them: "linear,softmax" → "LS".
CLI::Validator attention_types();

// --base, for commands that read a model.
void add_base_option(CLI::App& app, std::string& base);
// --weights, for inference. nf4: it may be that too (take_weights()).
CLI::Option* add_weights_option(CLI::App& app, std::string& weights, bool nf4 = false);
// training: --dtype auto exists and is the default.
void add_model_options(CLI::App& app, ModelOptions& options, bool training = false);
void add_sampling_flags(CLI::App& app, SamplingFlags& options);
// With what the model's generation_config.json declares where no option is typed. A note on stderr says so.
SamplingOptions sampling_options(const SamplingFlags& flags, const ModelSource& source, const Args& args);
// --context and --context-full. default_context: help text for the default of --context.
void add_context_options(CLI::App& app, int64_t& context, ContextPolicy& policy, const std::string& default_context);
// --gpus, --rendezvous and --comm-timeout. They belong to the launch, not to the run, so run.toml does not hold them.
void add_launch_options(CLI::App& app, LaunchOptions& options);
// --zero-stage, --reduce-dtype and --reduce-bucket-mib.
void add_sharding_options(CLI::App& app, ShardingOptions& options);
CLI::Option* add_optimizer_option(CLI::App& app, OptimizerType& optimizer);
CLI::Option* add_optimizer_dtype_option(CLI::App& app, std::string& dtype);
CLI::Option* add_grad_dtype_option(CLI::App& app, std::string& dtype);
CLI::Option* add_grad_rounding_option(CLI::App& app, std::string& rounding);
CLI::Option* add_offload_option(CLI::App& app, std::string& offload);
CLI::Option* add_recompute_option(CLI::App& app, RunOptions& options);
CLI::Option* add_master_weights_option(CLI::App& app, bool& master_weights);
// --gpu-memory, an amount such as 24GiB.
CLI::Option* add_gpu_memory_option(CLI::App& app, int64_t& bytes, const std::string& description);
CLI::Option* add_nondeterministic_option(CLI::App& app, bool& nondeterministic);
// For commands that pack examples.
CLI::Option* add_too_long_option(CLI::App& app, std::string& too_long);
// Resolves --dtype auto for a device. Throws UsageError for a dtype that training does not support, and for --offload
// of master weights that the run does not have.
void choose_training_dtype(ModelOptions& model, bool master_weights, const std::string& offload, const Target& target);
// --matmul-dtype and --fp8-*.
std::vector<CLI::Option*> add_fp8_options(CLI::App& app, Fp8Options& options);
// --lora-*, --rslora and --qlora; returns --lora-rank. check_lora_options() throws UsageError for options that adapters
// cannot be combined with. fp32_weights: the run keeps weights in fp32.
CLI::Option* add_lora_options(CLI::App& app, LoraOptions& options);
void check_lora_options(const LoraOptions& lora, const Fp8Options& fp8, const std::string& offload, bool fp32_weights,
                        int64_t zero_stage);
// --loss and its options. check_preference_options() throws UsageError for those that have no effect, or cannot be
// combined with the run's others.
std::vector<CLI::Option*> add_preference_options(CLI::App& app, PreferenceFlags& options);
void check_preference_options(const PreferenceFlags& preference, const LoraOptions& lora, const Fp8Options& fp8);
// An option that is on or off.
CLI::Option* add_switch(CLI::App& app, const std::string& name, bool& on, const std::string& description);
// --rollout, of `rl`.
CLI::Option* add_rollout_option(CLI::App& app, Sampler& sampler);
// Throws UsageError for fp8 matmuls beside the copy of the first model that --kl needs without adapters.
void check_reference_options(const RolloutFlags& rollout, const LoraOptions& lora, const Fp8Options& fp8);

// On stdout: one "key value" a line, or a JSON object.
void print_result(const nlohmann::ordered_json& result, bool as_json);
