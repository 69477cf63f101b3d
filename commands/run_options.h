// What the commands that start a run share: `train`, and `rl`. Their options, and how a run is started or resumed.
#pragma once

#include <functional>
#include <memory>

#include "commands/cli.h"
#include "driver/trainer.h"

// --resume and --config.
void add_run_options(CLI::App& app, TrainOptions& options);
// Groups of options (commands/help.h).
void add_learning_options(CLI::App& app, TrainOptions& options);
void add_muon_options(CLI::App& app, MuonFlags& options);
void add_memory_options(CLI::App& app, TrainOptions& options);
void add_saving_options(CLI::App& app, TrainOptions& options);
void add_speed_options(CLI::App& app, TrainOptions& options);
// --measure-peak and --profile.
void add_measuring_options(CLI::App& app, TrainOptions& options);

// Parses the arguments, with --resume after those that the run was started with, and checks what all runs have in
// common. Sets options.toml. short_help: as parse() takes it. Throws UsageError; without arguments with this text.
void parse_run(CLI::App& app, TrainOptions& options, const Args& args, const std::vector<std::string>& short_help,
               const std::string& without_args);

// Starts or resumes the run; with several ranks on this machine, starts the others. args: as they were typed.
using MakeSource = std::function<std::unique_ptr<BatchSource>(Trainer& trainer)>;
void start_run(TrainOptions options, const Args& args, const MakeSource& make_source);
