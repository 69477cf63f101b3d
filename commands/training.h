// A training run before it starts: its options, data, model and checkpoint, all checked against each other. No model
// code: the driver takes it from here.
#pragma once

#include <functional>
#include <memory>

#include "commands/commands.h"
#include "data/token_files.h"

// What a run is made of, checked before anything is allocated or written.
struct TrainSetup {
    TrainOptions o;  // with the defaults that depend on other options filled in
    DataDirectory data;
    TokenFiles train_files;
    std::unique_ptr<TokenFiles> val_files;  // null: the data has no validation split
    ModelSource source;
    std::string data_fingerprint;
    std::string checkpoint;                  // to go on from; empty: start at step 0
    int64_t first_step = 0, adam_steps = 0;  // of its trainer.json
    std::string gemm_choices;                // likewise: the algorithms that its products used
    int64_t micro_steps = 1;
};

// Opens what the options name. Throws Error for whatever keeps the run from starting: data or model that can't be read,
// another tokenizer, a step that micro-steps don't divide, an --out that is in use, a resumed run that was changed.
TrainSetup check_training(TrainOptions options, int64_t world);

// A checkpoint reads the tokens of its own tokenizer only: else an Error.
void check_same_tokenizer(const DataDirectory& data, const ModelSource& source);

// The options that would make a run fit into so many bytes: first what costs time, then what needs more micro-steps.
// needed: bytes with another --zero-stage, --batch-size or --recompute.
std::string what_fits(const TrainOptions& options, int64_t world, int64_t available,
                      const std::function<int64_t(int64_t stage, int64_t B, Recompute level)>& needed);

// The learning rate of a step, from 0.
double learning_rate(const TrainOptions& options, int64_t step);
