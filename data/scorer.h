// Scores completions with the verifiers of their prompts.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/answers.h"
#include "data/verifier_command.h"

class Scorer {
  public:
    struct Options {
        VerifierCommand::Options command;  // none: without words
        bool zero_on_error = false;        // the score of a verifier that fails is 0; else it is an Error
    };
    struct Attempt {
        const Problem* problem;
        std::string_view completion;
    };

    // Throws Error if the command cannot be started.
    explicit Scorer(const Options& options);

    // Of each attempt, the score of each verifier of its problem.
    std::vector<std::vector<double>> score(const std::vector<Attempt>& attempts);

    int64_t failures() const { return failed; }                      // scores that are 0 because a verifier failed
    const std::string& first_failure() const { return first_line; }  // what happened at the first of them

  private:
    void fail(const std::string& what);

    const Options options;
    std::optional<VerifierCommand> command;
    int64_t failed = 0;
    std::string first_line;
};
