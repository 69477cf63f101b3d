// The commands by their arguments after the command's name; one .cpp each holds options, checks, help and what it runs.
// All throw UsageError for a wrong flag or value, HelpRequested (with the text) for --help, and Error for any later
// error.
#pragma once

#include <functional>
#include <string>
#include <system_error>
#include <vector>

#include "driver/options.h"

using Args = std::vector<std::string>;

struct HelpRequested {
    std::string text;
};

struct Command {
    const char* name;
    const char* summary;
    std::function<void(const Args&)> run;
};

// Finds the command, runs it and prints exceptions as one line on stderr. Returns the exit status: 0; 2 for a wrong
// option or value; 1 for any later error; 141 (128 + SIGPIPE), without a message, if the reader of stdout has gone.
// build: for --version, the lines on the commit and the architectures.
int run_program(int argc, char** argv, const std::vector<Command>& commands, const std::string& build);

// One line; of a thread that cannot be started with the remedy.
std::string describe(const std::system_error& error);

void run_train(const Args& args);
void run_rl(const Args& args);  // rl/
void run_eval(const Args& args);
void run_sample(const Args& args);
void run_chat(const Args& args);
void run_serve(const Args& args);  // serve/
void run_logits(const Args& args);
void run_plan(const Args& args);
void run_convert(const Args& args);
void run_info(const Args& args);

// What --version prints: the version, these lines, and the build as `info` shows it.
std::string version_text(const std::string& build);

// The options of `train`, for it and for tests.
TrainOptions parse_train(const Args& args);
