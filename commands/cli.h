// What the commands' parsers share. Only commands/*.cpp include this.
#pragma once

#include <CLI/CLI.hpp>

#include "commands/commands.h"

// Parses args (without program and command name) and turns CLI11's exceptions into UsageError and HelpRequested.
void parse(CLI::App& app, const Args& args);

void add_model_options(CLI::App& app, ModelOptions& options);
CLI::Option* add_recompute_option(CLI::App& app, Recompute& recompute);
