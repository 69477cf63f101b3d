// Reinforcement learning from verifiable rewards: the batches of a run are completions that its own model has sampled.
// GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1 and algorithm 1) and what came after it (rl/advantages.h,
// kernels/policy_loss.h).
//
//   rollout  prompts → completions by the engine → rewards by the verifiers → advantages → packed batches
//   update   a step of the training loop over these batches; --updates-per-rollout of them, then the next rollout
//
// The engine reads the weights that the run trains: nothing is copied but adapters, which it wants in another form, and
// with a temperature the final norm's weights. --kl keeps a second model, the one that the run started from, where
// there are no adapters that a pass could leave out. The engine's cache and buffers lie in the memory of the
// activations (HeadActs::rollout), which are needed at another time. Each rollout starts with an empty cache.
//
// A token is sampled by the engine's kernels, and learnt from by training's, whose log-probabilities differ in the last
// bits: kernels/policy_loss.h weighs tokens by the ratio. With several updates, π_old comes from a forward pass of
// training's kernels before the first of them. With exact rollouts training's kernels sample, too (rl/exact_forward.h):
// the ratio is 1, and π_old what was recorded.
//
// What a rollout samples depends on the run's seed, the rollout's number and the weights, so that a resumed run repeats
// it. Each rank samples for its own part of the prompts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/scorer.h"
#include "driver/adapter_bank.h"
#include "driver/batch_source.h"
#include "driver/trainer.h"
#include "infer/engine.h"
#include "rl/completion_batches.h"
#include "rl/exact_forward.h"

class Rollouts : public BatchSource {
  public:
    // Throws Error if a verifier's command cannot be started.
    explicit Rollouts(Trainer& trainer);
    std::string describe() const override;
    int64_t begin_step(int64_t step) override;
    const Batch& next() override { return batches[next_batch++]; }
    bool may_stop() const override { return update == 0; }
    int64_t tokens() const override { return trained_tokens; }
    std::vector<std::pair<std::string, double>> log_entries() const override { return entries; }

  private:
    // A completion that was sampled and scored.
    struct Sampled {
        size_t problem;
        Completion completion;
        std::vector<int32_t> tokens;  // the end token included
        std::vector<float> logps;
        std::vector<double> scores;  // by the problem's verifiers
        double reward = 0;
        bool truncated = false;
    };
    // What all ranks know of a completion.
    struct Summary {
        double reward;
        int64_t length, truncated;
    };

    void allocate_engine();
    void load_weights();
    size_t problem_of(int64_t prompt) const;  // prompts are counted from the start of the run
    bool sample(int64_t rollout);             // false: the run was asked to stop
    void score();
    void log_verifier_errors(int64_t own);
    void learn_from(const std::vector<Summary>& all);
    void add_log_probabilities();
    void log_rewards(const std::vector<Summary>& all);
    void log_verifiers();
    void write_completions(int64_t rollout);
    bool idle_too_long(bool differs, int64_t step);

    Trainer& trainer;
    const RolloutFlags& options;
    const RolloutData& data;
    const int64_t own_prompts;  // of this rank
    Scorer scorer;
    std::optional<AdapterBank> bank;
    Arena scaled_norm;  // the final norm's weights divided by the temperature
    std::optional<ExactForward> exact;
    std::optional<Model> reference;  // keeps_reference()
    Engine engine;
    InferenceWeights weights;
    std::unique_ptr<RunLog> completions_log;  // of rank 0

    int64_t update = 0;  // of the rollout
    std::vector<Sampled> sampled;
    std::vector<Batch> batches;
    size_t next_batch = 0;
    int64_t trained_tokens = 0;
    bool told_of_error = false;  // of a verifier
    std::vector<std::pair<std::string, double>> entries;
};
