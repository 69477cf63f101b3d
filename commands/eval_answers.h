// `eval --answers`: completes prompts and scores the completions with verifiers.
#pragma once

#include "commands/generation_options.h"
#include "data/scorer.h"

struct AnswerOptions {
    std::string file, output;
    GenerationFlags generation;
    Scorer::Options scorer;
    bool chat_template = true;
};

// --verifier and what belongs to it.
void add_scorer_options(CLI::App& app, Scorer::Options& scorer);

// --answers, which it returns, and the options that need it.
CLI::Option* add_answer_options(CLI::App& app, AnswerOptions& options);
void run_answers(const AnswerOptions& options, const ModelOptions& model, bool json, const Args& args);
