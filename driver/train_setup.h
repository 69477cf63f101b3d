// Checks a training run before it starts: its options, data, model and checkpoint, and that they fit together. It holds
// no model code.
#pragma once

#include <array>
#include <memory>

#include "data/loader.h"
#include "data/multiple_choice.h"
#include "data/packing.h"
#include "data/token_files.h"
#include "driver/answer_prompts.h"
#include "driver/options.h"
#include "driver/resume_point.h"
#include "driver/sample_prompts.h"
#include "runtime/device/device.h"

struct OptimizerOptions;  // model.h

// A directory of --data.
struct TrainingData {
    DataDirectory directory;
    int64_t weight;  // of its samples among those of all directories
    TokenFiles train_files;
    std::unique_ptr<TokenFiles> val_files = {};                            // null: the data has no validation split
    std::unique_ptr<ExamplePacking> train_packing = {}, val_packing = {};  // null: fixed training sequences
};

// The inputs of a run, checked before anything is allocated or written.
struct TrainSetup {
    TrainOptions o;                  // with the defaults that depend on other options
    std::vector<TrainingData> data;  // all of one tokenizer
    ModelSource source;
    ResumePoint resume;               // its `data`: only what the run used before this data
    DataUse data_use;                 // this data, and the step that its first sample is in
    std::vector<Question> questions;  // of --eval-multiple-choice
    int64_t micro_steps = 1;
    double epochs_per_step = 0;         // of the first data directory, on average
    SamplePrompts sample_prompts = {};  // with --sample-every
    std::string notes = {};             // lines on options that were chosen and on the length and rates that follow
    std::unique_ptr<RolloutData> rollout = {};  // reinforcement learning: instead of `data`, which is empty
    std::vector<int32_t> end_of_turn = {};  // the tokens with which the model learns to end its turn in a conversation

    bool evaluates() const;  // whether there is a validation split or a question
    bool packs() const;      // whether a training split is packed
    std::vector<TrainingSource> sources() const;
    // Epochs of the first data directory, from where the run begins to use it, after a step.
    double epochs(int64_t step) const { return double(step - data_use.first_step) * epochs_per_step; }
    // Takes options that find_fit() has found, also for run.toml.
    void set_memory_options(const RunOptions& options, int64_t world);
    const DataDirectory& tokenizer_data() const;   // reinforcement learning: none, its tokenizer is the model's
    std::unique_ptr<Tokenizer> tokenizer() const;  // null: there is none
    LoraBase lora_base() const;
};

// Opens what the options name. Throws Error if the run cannot start: data or a model that cannot be read, a different
// tokenizer, a total batch that is not a multiple of the micro-step, an --out that is in use, a resumed run whose
// options changed.
TrainSetup check_training(TrainOptions options, int64_t world);

// For the line at the start of a run: the training tokens and the sequences that they make; of several directories a
// line for each, with its share.
std::string describe_training_data(const TrainSetup& s, const Loader& loader);

// Throws UsageError if --grad-rounding is not possible with the run's other options.
void check_grad_rounding(const RunOptions& o, int64_t world, Device device);

// A hash of a text, as 16 hexadecimal digits.
std::string hash_of(const std::string& text);
// A hash of tokens and their flags.
std::string fingerprint(const TokenFiles& files);

// Throws Error if the data was made with another tokenizer than the model's.
void check_same_tokenizer(const DataDirectory& data, const ModelSource& source);

// The peak learning rate of each rate group (runtime/model/params.h).
using LearningRates = std::array<double, NUM_RATE_GROUPS>;
LearningRates learning_rates(const TrainOptions& options);

// What the options say of each optimizer.
OptimizerOptions optimizer_options(const TrainOptions& options);

// Muon's momentum in a step, counted from 0.
double momentum(const TrainOptions& options, int64_t step);

// The learning rate of hidden matrices in a step, counted from 0. The schedule scales all rate groups alike.
double learning_rate(const TrainOptions& options, int64_t step);
