// Evaluations during and after training: the loss of a split, answers to multiple-choice questions, and preference
// pairs.
#pragma once

#include <functional>

#include "data/multiple_choice.h"
#include "driver/sequence_loss.h"
#include "model.h"
#include "parallel/distributed_evaluation.h"

struct EvalSplit {
    const TokenFiles& files;
    const ExamplePacking* packing;  // of its examples; null: fixed sequences
    int32_t end_of_text;
    int64_t limit, bytes;  // the first so many tokens are read, 0: all; bytes of its text, 0: unknown
};
// The loss of a split. Each rank takes its share of the batches. before_batch: called before each batch.
Evaluation evaluate(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split,
                    const std::function<void()>& before_batch = {});
// The model's results on questions (data/multiple_choice.h). choices: make_choices() of them. Each rank takes its share
// of the passes; all get the same results.
QuestionResults answer_questions(const Context& ctx, const Model& model, const Activations& acts,
                                 const std::vector<Question>& questions, const std::vector<Choice>& choices,
                                 const Tokenizer& tokenizer, const std::function<void()>& before_batch = {});

// Preference pairs: what pair_metrics() takes (driver/sequence_loss.h).
struct PairEvaluation {
    PairSums sums{};
    int64_t pairs = 0;
    double loss() const { return sums[PAIR_LOSS] / double(pairs); }
};
// Of a split in training. Each rank takes its share. set_reference: makes acts.pair_reference that of a batch that was
// uploaded; null: the loss has none.
using SetReference = std::function<void(const Batch& batch, const Input& in)>;
PairEvaluation evaluate_pairs(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split,
                              const SetReference& set_reference, const std::function<void()>& before_batch = {});

// What a model that only evaluates makes of the pairs of a split. ℓ: the log-probability of a response.
struct PairScores {
    int64_t pairs = 0;
    double accurate = 0, accurate_per_token = 0;  // pairs whose chosen response has the greater ℓ, or ℓ per token
    double chosen_nats = 0, rejected_nats = 0;    // −ℓ, summed
    int64_t chosen_tokens = 0, rejected_tokens = 0;
};
PairScores score_pairs(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split);
