#include "data/scorer.h"

#include "runtime/error.h"

Scorer::Scorer(const Options& o) : options(o) {
    if (!options.command.command.empty()) command.emplace(options.command);
}

void Scorer::fail(const std::string& what) {
    require(options.zero_on_error, what, "; --on-verifier-error zero makes the reward 0 and goes on");
    if (failed++ == 0) first_line = what;
}

std::vector<std::vector<double>> Scorer::score(const std::vector<Attempt>& attempts) {
    std::vector<std::vector<double>> scores;
    std::vector<VerifierCommand::Item> items;
    std::vector<std::pair<size_t, size_t>> of_command;  // where their scores belong
    for (const Attempt& a : attempts) {
        scores.emplace_back();
        for (const WeightedVerifier& v : a.problem->verifiers) {
            scores.back().push_back(0);
            if (!v.score) {
                of_command.emplace_back(scores.size() - 1, scores.back().size() - 1);
                items.push_back({a.problem->prompt, std::string(a.completion), a.problem->answer});
                continue;
            }
            try {
                scores.back().back() = v.score(a.completion);
            } catch (const Error& e) {
                fail(str("verifier ", v.name, ": ", e.what()));
            }
        }
    }
    if (items.empty()) return scores;
    const std::vector<double> rewards = command->rewards(items, [this](const std::string& what) { fail(what); });
    for (size_t i = 0; i < rewards.size(); i++) scores[of_command[i].first][of_command[i].second] = rewards[i];
    return scores;
}
