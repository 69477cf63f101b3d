// What the commands' parsers share. Only commands/*.cpp include this.
#pragma once

#include <CLI/CLI.hpp>

#include "commands/commands.h"

// Parses args (without program and command name) and turns CLI11's exceptions into UsageError and HelpRequested.
void parse(CLI::App& app, const Args& args);

// Value checks with a plain message: "--steps: 0 is not a whole number of at least 1".
CLI::Validator at_least(int64_t least);
CLI::Validator number_in(double low, double high);

void add_model_options(CLI::App& app, ModelOptions& options);
void add_sampling_flags(CLI::App& app, SamplingFlags& options);
// --context and --context-full. if_not_given: how many tokens there is room for then.
void add_context_options(CLI::App& app, int64_t& context, bool& slide, const std::string& if_not_given);
// --gpus, --rendezvous and --comm-timeout: of this launch, not of the run, so run.toml keeps none of them.
void add_launch_options(CLI::App& app, LaunchOptions& options);
// --zero-stage, --reduce-dtype and --reduce-bucket-mib.
void add_sharding_options(CLI::App& app, ShardingOptions& options);
CLI::Option* add_recompute_option(CLI::App& app, Recompute& recompute);
CLI::Option* add_master_weights_option(CLI::App& app, bool& master_weights);
CLI::Option* add_nondeterministic_option(CLI::App& app, bool& nondeterministic);
// What training can do: throws UsageError.
void check_training_dtype(const ModelOptions& model, bool master_weights);
// An option that is on or off.
CLI::Option* add_switch(CLI::App& app, const std::string& name, bool& on, const std::string& description);
