// Prompts with answers, one JSON object a line:
//     {"prompt": text, "answer": text or number, "verifier": name or list of {"name", "weight", options}}
// "messages" may stand instead of "prompt": a list of {"role", "content"}, whose last one is not the assistant's.
#pragma once

#include <string>
#include <vector>

#include "data/chat_template.h"
#include "data/verifiers.h"

// The name of the verifier that --verifier starts (data/verifier_command.h).
constexpr const char* COMMAND_VERIFIER = "command";

struct WeightedVerifier {
    std::string name;
    double weight = 1;  // 0: its score is reported and not part of the reward
    Verifier score;     // null: the command's
};

struct Problem {
    std::string prompt;             // what follows is empty, or
    std::vector<Message> messages;  // the conversation, and prompt the text of its last message
    std::string answer;
    std::vector<WeightedVerifier> verifiers;

    // The sum of weights · scores.
    double reward(const std::vector<double>& scores) const;
};

// A reward of this much is a correct answer; the sum of weights may have been rounded.
constexpr double CORRECT = 1 - 1e-9;

// has_command: rows without "verifier" are the command's. Skips empty lines. Throws Error with file and line number for
// a row that is not such an object, has an unknown key or a wrong value, names the command where there is none, or has
// an answer that its verifier cannot compare with; and where no row uses a command.
std::vector<Problem> read_problems(const std::string& path, bool has_command);

// An unbiased estimate of the probability that at least one of k completions is correct, from n of which c are (Chen et
// al. 2021, "Evaluating Large Language Models Trained on Code", equation 1). k ≤ n.
double pass_at_k(int64_t n, int64_t c, int64_t k);
