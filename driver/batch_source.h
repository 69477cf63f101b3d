// Where the steps of a run get their batches from: the training data (LoadedBatches), or what the model itself writes
// (rl/rollouts.h). The loop is the same for both (train() in train_gpt.cu).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "data/loader.h"

struct Trainer;

class BatchSource {
  public:
    virtual ~BatchSource() = default;
    // For the line at the start of a run.
    virtual std::string describe() const = 0;
    // Prepares a step, counted from 0. Returns the micro-batches that it has, as many on all ranks; 0: the run ends
    // before the step.
    virtual int64_t begin_step(int64_t step) = 0;
    // The step's next micro-batch; valid until the next call.
    virtual const Batch& next() = 0;
    // Whether the step that begin_step() has prepared may be left out or left unfinished: a resumed run repeats it.
    virtual bool may_stop() const { return true; }
    // Tokens that the step computes, on all ranks.
    virtual int64_t tokens() const = 0;
    // What the step adds to its line in the log, as names and values.
    virtual std::vector<std::pair<std::string, double>> log_entries() const { return {}; }

    std::function<void(const std::string&)> note;  // prints a line; the loop sets it
};

// The batches of the data directories, from the sample on where the run starts or resumes.
class LoadedBatches : public BatchSource {
  public:
    explicit LoadedBatches(const Trainer& t);
    std::string describe() const override;
    int64_t begin_step(int64_t step) override;
    const Batch& next() override;
    int64_t tokens() const override;

  private:
    const Trainer& trainer;
    Loader loader;
    int64_t micro = 0;             // of the step
    std::vector<Batch> one_batch;  // for --overfit-one-batch
};
