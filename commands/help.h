// The help texts of the commands. Options stand in groups, whose headings begin with a word: "muon: momentum and the
// Newton-Schulz iteration". `COMMAND --help` shows the options that most people need, `COMMAND --help muon` a group and
// `COMMAND --help all` everything.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

// Headings of groups. Options without one come first, under CLI11's heading "Options".
namespace help_group {
constexpr char LENGTH[] = "length: steps and batches";
constexpr char LEARNING[] = "learning: learning rates and the optimizer";
constexpr char LORA[] = "lora: adapters instead of whole weights (docs/use/finetuning.md)";
constexpr char PREFERENCES[] = "preferences: losses on pairs of responses (docs/use/preferences.md)";
constexpr char MEMORY[] = "memory: what is kept, in which dtype, and what is computed again (docs/use/training.md)";
constexpr char REPORTS[] = "reports: evaluations, samples and measurements";
constexpr char SAVING[] = "saving: checkpoints, and when a run stops";
constexpr char GPUS[] = "gpus: several processes (docs/use/multi_gpu.md)";
constexpr char DATA[] = "data: how training sequences are made";
constexpr char ANSWERS[] = "answers: completions that verifiers score (docs/use/evaluation.md)";
constexpr char ROLLOUTS[] = "rollouts: what is sampled, and when (docs/use/rl.md)";
constexpr char POLICY[] = "policy: the loss of what was sampled (docs/use/rl.md)";
constexpr char MUON[] = "muon: momentum and the Newton-Schulz iteration (docs/use/training.md)";
constexpr char FP8[] = "fp8: matmuls in 8 bits (docs/use/low_precision.md)";
constexpr char SPEED[] = "speed: choices that change no result, or only its last bits";
constexpr char SHAPE[] = "shape: what changes in a preset's model";
}  // namespace help_group

// The options that are added to a command while it lives are in this group, unless they name another.
class InGroup {
  public:
    InGroup(CLI::App& a, const char* heading) : app(a), before(app.option_defaults()->get_group()) {
        app.option_defaults()->group(heading);
    }
    ~InGroup() { app.option_defaults()->group(before); }
    InGroup(const InGroup&) = delete;
    InGroup& operator=(const InGroup&) = delete;

  private:
    CLI::App& app;
    const std::string before;
};

// The word after --help or -h; "" if there is none. Nothing: no help is asked for.
std::optional<std::string> help_topic(const std::vector<std::string>& args);

// The help of a command on a topic. short_list: the options that the help without a topic shows; empty: all but SHAPE.
// Throws UsageError for a topic that the command does not have.
std::string help_text(const CLI::App& app, const std::string& topic, const std::vector<std::string>& short_list);
