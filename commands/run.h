// What each command runs, by its arguments after the command's name. Throw UsageError, HelpRequested and Error.
#pragma once

#include "commands/commands.h"

void run_train(const Args& args);  // train_gpt.cu
void run_eval(const Args& args);
void run_sample(const Args& args);
void run_chat(const Args& args);
void run_logits(const Args& args);
void run_plan(const Args& args);
