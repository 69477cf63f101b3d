// A training run: steps, their log, evaluations, samples and checkpoints. train_gpt.cu defines it.
#pragma once

#include <cmath>

#include "commands/training.h"
#include "data/tokenizer.h"
#include "model.h"
#include "runtime/files/log.h"

class Trainer {
  public:
    Trainer(const Context& context, TrainSetup setup);
    ~Trainer();
    void run();
    void queue_step(Loader& loader);
    LoaderOptions loader_options() const;

  private:
    // A step that the device works on. The host looks at its scalars one step later, so that it never waits for a
    // device that has nothing else to do.
    struct QueuedStep {
        int64_t step = 0;
        Event begin, end;
        HostMemory memory{host_alloc(sizeof(StepScalars)), host_free};  // that the device copies the scalars to
        StepScalars* scalars() const { return static_cast<StepScalars*>(memory.get()); }
    };

    void start();    // weights, optimizer and step: fresh, or from the checkpoint
    void warm_up();  // algorithms and graphs
    void adopt_checkpoint_choices();
    void micro_step(const Batch& batch, bool first, bool last, bool replay = true);
    bool stopping() const;
    void tell(const std::string& text) const;  // on stderr, by rank 0
    void finish_step(RunLog& log, Progress& progress);
    void evaluate_split(RunLog& log, Progress& progress);
    void sample_text(Progress& progress);
    void save(Progress& progress);

    const Context& ctx;
    const TrainSetup s;
    const TrainOptions& o;
    const DType dtype;
    std::unique_ptr<Tokenizer> tokenizer;  // null: no samples of text
    int64_t val_bytes;

    Model model;
    Activations acts;
    Optimizer optimizer;
    int64_t step = 0, saved_step = -1;
    double val_loss = NAN;         // at this step, if it was evaluated
    std::vector<Batch> one_batch;  // for --overfit-one-batch
    Graph graphs[2][2];            // a micro-step: whether it is a step's first, and of several ranks' its last
    QueuedStep queue[2];
    int64_t queued = 0, finished = 0;  // steps of this process
    int64_t skips_in_a_row = 0;
    bool stop = false;                          // a rank was asked to, before a step that is finished
    double peak_flops = 0, measured_flops = 0;  // what MFU is a fraction of; that of a matmul measured at the start
    const AbortOnFailure abort_on_failure{ctx};
};
