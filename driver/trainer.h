// A training run: its memory and state, its log, evaluations, samples and checkpoints. The steps and the loop are in
// train_gpt.cu.
#pragma once

#include <cmath>
#include <nlohmann/json_fwd.hpp>

#include "data/tokenizer.h"
#include "driver/batch_source.h"
#include "driver/evaluation.h"
#include "driver/pair_reference.h"
#include "driver/train_setup.h"
#include "model.h"
#include "parallel/checkpoint_saver.h"
#include "runtime/files/log.h"
#include "runtime/watchdog.h"

// A run: its state, and the work around its steps.
struct Trainer {
    // lock: rank 0's on --out; null if the directory does not exist yet.
    Trainer(const Context& context, TrainSetup run_setup, std::unique_ptr<DirectoryLock> lock = {});
    ~Trainer();

    // The attention sequences that a recorded micro-step has room for; 0: none is recorded, or it has one per training
    // sequence.
    int64_t max_sequences() const;
    std::string describe_start(const BatchSource& source) const;
    // Whether any rank was asked to stop. Every rank asks before each micro-step and gets the same answer, so all leave
    // out the same micro-steps and none waits for a collective that the others don't call. Hosts wait for each other
    // here, the devices meanwhile run what is queued.
    bool stopping();
    // The numbers of the next step that the device reads: its learning rate, clipping, momentum.
    StepScalars settings() const;
    // Waits for queued steps and reports them: for all of them, or for those that the device has done and all but one.
    void finish_steps(bool all, RunLog& log, Progress& progress);
    void evaluate_splits(RunLog& log, Progress& progress);
    void sample_text(RunLog& log, Progress& progress);
    // Starts a checkpoint of this step, or with `last` writes it.
    void save(bool last);
    // At the end of the run, when all is saved: waits for a moment until the log is whole. All ranks throw if it is
    // not, or if it was not once and --on-save-error is stop.
    void end_log(RunLog& log);

    // A step that is queued on the device. The host reads its scalars one step later, so the device always has queued
    // work.
    struct QueuedStep {
        int64_t step = 0, loss_terms = 0;  // loss tokens, or pairs, of all ranks
        int64_t tokens = 0;
        std::vector<std::pair<std::string, double>> entries;  // BatchSource::log_entries()
        Event begin, end;
        static constexpr size_t FP8_BYTES = NUM_FP8_COUNTS * sizeof(int64_t);
        HostMemory memory{host_alloc(sizeof(StepScalars)), host_free};  // pinned, for the scalars
        HostMemory counts{host_alloc(FP8_BYTES), host_free};            // pinned
        HostMemory sums{nullptr, host_free};                            // reinforcement learning: pinned, for acts.sums
        StepScalars* scalars() const { return static_cast<StepScalars*>(memory.get()); }
        int64_t* fp8_counts() const { return static_cast<int64_t*>(counts.get()); }
    };

    const Context& ctx;
    const TrainSetup setup;
    std::unique_ptr<DirectoryLock> lock;
    const TrainOptions& options;
    const DType dtype;
    std::unique_ptr<Tokenizer> tokenizer;  // null: the data has none, so --sample-every is refused
    std::vector<int64_t> val_bytes;        // of the text of each validation split; 0: unknown, or there is none

    Model model;
    Activations acts;
    Optimizer optimizer;
    CheckpointSaver checkpoints;
    int64_t step = 0, saved_step = -1;
    double val_loss = NAN;        // of this step; NAN: not evaluated
    std::vector<Choice> choices;  // of the questions of --eval-multiple-choice
    PairReference reference;      // of preference pairs, where it is computed once; empty in warm_up()
    bool stores_reference() const { return options.preference.has_reference() && !options.preference.adapters_off; }
    // Of micro-steps: [first of its step][last of its step, where that differs], by Input::head_kind().
    std::map<int64_t, Graph> graphs[2][2];
    std::vector<char> asked_to_stop;  // by rank, for stopping()
    std::string log_error;            // that ends the run
    QueuedStep queue[2];
    int64_t queued = 0, finished = 0;  // number of steps, since the process started
    int64_t skips_in_a_row = 0;
    int64_t idle_steps = 0;                          // steps in a row, up to this one, that had no loss tokens
    int64_t planned_bytes = 0;                       // of the memory plan
    std::map<std::string, std::string> base_record;  // LoRA: of the model that adapters are trained on
    std::string reference_record;                    // of the model that --kl compares with, where weights are trained
    // Of the base's weights in fp8, by layer and linear layer, 0: not in fp8; empty: no such base.
    std::vector<float> base_scales;
    Watchdog watchdog;
    double peak_flops = 0, measured_flops = 0;  // MFU's denominator; the FLOP/s of a matmul measured at the start
    const AbortOnFailure abort_on_failure{ctx};

  private:
    MemoryPlan checked_memory_plan(const GradientOptions& gradients) const;
    void print(const std::string& text) const;  // on stderr, by rank 0
    void print_setup(const MemoryPlan& plan) const;
    void find_peak_flops();
    void load_base();  // of adapters
    void check_base_scales();
    void start();    // initialises or loads weights, optimizer state and step number
    void warm_up();  // chooses GEMM algorithms, records graphs
    void adopt_checkpoint_choices();
    Batch warm_up_batch() const;
    std::string log_policy(nlohmann::ordered_json& line, const QueuedStep& q) const;
    // Of the validation split of data directory k: the loss and a text; `entry` gets what the log has of it.
    std::pair<double, std::string> evaluate_text_of(size_t k, nlohmann::ordered_json& entry);
    std::pair<double, std::string> evaluate_pairs_of(size_t k, nlohmann::ordered_json& entry);
    EvalSplit val_split(size_t k) const;
    std::function<void()> progressing();  // for evaluations
    void finish_step(RunLog& log, Progress& progress);
    void write_log(RunLog& log, const nlohmann::ordered_json& line);
};

// For --fit: changes the options of the setup to the first with which the run fits into the memory that is free on
// every rank, and returns a line on them. Throws Error if there are none.
std::string fit_run(TrainSetup& setup, const Context& ctx);

// The training loop, from the last step of the run to --steps (train_gpt.cu).
void train(Trainer& t, BatchSource& source);
// Queues one optimizer step; false: the run was asked to stop, or the source has no more.
bool queue_step(Trainer& t, BatchSource& source);
// Forward and backward over a batch. replay: as a CUDA graph, where that is possible.
void micro_step(Trainer& t, const Batch& batch, bool first, bool last, bool replay = true);
