// The reference model's log-probabilities of preference pairs: computed once, before a run, with the weights that it
// starts from, and kept beside the tokens as reference-<hash>.json. The hash is that of what they depend on: the
// model's weights and config, its adapter, dtype, and the tokens. So runs of one model and data share a file, and no
// second model is in memory.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "driver/train_setup.h"
#include "model.h"

// By data directory of the run (Batch::Pair::source): ℓ of chosen and rejected of each pair of the files, so
// [pairs, 2]; NaN for a pair that is too long for the run. Without a validation split `val` is empty there.
struct PairReference {
    std::vector<std::vector<float>> train, val;
    // Of the pairs of a batch, [pairs of the batch, 2].
    std::vector<float> of_training(const Batch& batch) const;
    std::vector<float> of_validation(const Batch& batch, size_t source) const;
};

// Reads the references of a run's data, or computes and writes those that are missing; a line on each goes to `note`.
// All ranks take part. before_batch: called before each batch. resumed: the model's weights are no longer those that
// the run started from, unless it trains adapters. Throws Error where a reference must be computed and cannot, and for
// a file that is damaged or of another model or other data.
PairReference pair_reference(const Context& ctx, const Model& model, const Activations& acts, const TrainSetup& setup,
                             bool resumed, const std::function<void()>& before_batch,
                             const std::function<void(const std::string&)>& note);
