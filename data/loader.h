// The order of the training data and the batches made from it.
//
// The split's tokens are cut into n = ⌊(tokens − 1)/T⌋ training sequences of T + 1 tokens at stride T (inputs are the
// first T, targets the last T; dropped_tokens() counts the rest). Sample i of a run is training sequence
// π(seed, i div n, i mod n), where π is a keyed bijection of [0, n): a four-round Feistel network over Philox with
// cycle walking (Black, Rogaway 2002), O(1) memory. A step takes the next G = total_batch/T samples; micro-batch a of
// rank r is samples [a·world·B + r·B, + B) of the step: ranks and micro-batches only slice the order.
//
// Of several data sets, a Mixture (data/mixture.h) says which one sample i comes from, and that it is the j-th of that
// one; then π(seed, j div n, j mod n) of its n sequences is the sample.
//
// With a ExamplePacking (data/packing.h) a training sequence holds whole examples instead, and padding at its end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/mixture.h"
#include "data/packing.h"
#include "data/token_files.h"

// π(key, epoch, ·): [0, n) → [0, n), a bijection for each (key, epoch).
uint64_t permute(uint64_t key, uint64_t epoch, uint64_t i, uint64_t n);

struct Batch {
    // The target of a position without a loss: cross-entropy's IGNORE_TARGET (kernels/cross_entropy.h).
    static constexpr int32_t NO_TARGET = -1;

    std::vector<int32_t> tokens, targets;  // [B·T]
    // Loss tokens in all ranks' parts of the micro-batch, so that every rank divides by the same number.
    int64_t loss_tokens = 0;
    // Attention sequences: one starts at each of cum_seqlens[0..], which ends with B·T. Without documents there is one
    // per training sequence: 0, T, 2T, … B·T. With documents one also starts after each end-of-text token. A document
    // ends with its end-of-text token as an input, whose target is the first token of the next document. With packed
    // examples there is one per example, and one for the padding of each training sequence that has some.
    std::vector<int32_t> cum_seqlens;
    std::vector<int32_t> positions;  // [B·T] counted from the start of each attention sequence
    int64_t max_seqlen = 0;
    // With LoaderOptions::max_sequences: the number of sequences. cum_seqlens has max_sequences + 1 entries, those at
    // the end repeat B·T, and max_seqlen is T. 0: cum_seqlens has all sequences and no room.
    int64_t num_sequences = 0;
    // Preference pairs (TokenFiles::has_pairs()), in the order of tokens; each lies in one training sequence. Empty:
    // the data has none.
    struct Pair {
        int32_t chosen, rejected, end;  // positions: the examples [chosen, rejected) and [rejected, end)
        int64_t index;                  // of the pair in its files, those that were left out included
        int32_t source = 0;             // of the Loader's sources
    };
    std::vector<Pair> pairs;
    int64_t pairs_of_all_ranks = 0;  // of the micro-batch, as loss_tokens
    // Reinforcement learning (rl/): what the loss of a token with a target is computed from (kernels/policy_loss.h), by
    // position. Empty: the loss is cross-entropy. Then the sum over the step's micro-batches of loss_tokens is what
    // the step's loss is divided by, and not a number of tokens.
    struct PolicyTerms {
        float advantage, weight, sampler_logp, reference_logp, old_logp;
    };
    std::vector<PolicyTerms> policy;
    bool old_policy = false;  // old_logp are known; else π_old is the model itself
    // What the step's loss is the mean over.
    int64_t loss_terms() const { return pairs_of_all_ranks ? pairs_of_all_ranks : loss_tokens; }
};

struct LoaderOptions {
    int64_t B = 0, T = 0;     // training sequences per micro-batch of this rank; tokens in each
    int64_t micro_steps = 1;  // micro-batches per step
    int64_t rank = 0, world = 1;
    uint64_t seed = 0;
    bool shuffle = true;        // false: sample i is training sequence i mod n
    bool documents = false;     // split training sequences at end-of-text tokens
    int64_t max_sequences = 0;  // batches of up to so many attention sequences get one shape; 0: none do
    int32_t end_of_text = -1;   // needed if documents
    int64_t vocab_size = 0;     // tokens are checked against it
};

// A data set of a run. What it points to must outlive the loader.
struct TrainingSource {
    const TokenFiles* files;
    const ExamplePacking* packing;  // of the files into sequences of T; null: fixed cuts
    int64_t weight;                 // of its samples among those of all sources
    TrainingSource(const TokenFiles& f, const ExamplePacking* p = nullptr, int64_t w = 1)
        : files(&f), packing(p), weight(w) {}
};

// Training sequences of T tokens in a source.
int64_t num_training_sequences(const TrainingSource& source, int64_t T);

// Gives the batch the shape that all batches of up to so many attention sequences have (Batch::num_sequences), if it
// has no more. T: the most tokens of a sequence.
void add_room(Batch& batch, int64_t max_sequences, int64_t T);

// Prepares the next batches on a separate thread.
class Loader {
  public:
    // first_step: the step that the batches start with, from 0.
    // Errors: options out of range, fewer tokens than one training sequence. next() throws the errors of reading ahead.
    Loader(std::vector<TrainingSource> sources, const LoaderOptions& options, int64_t first_step);
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    // The next micro-batch; valid until the next call.
    const Batch& next();

    int64_t num_training_sequences(size_t source = 0) const { return training_sequences[source]; }
    // Without packing: tokens of the split that are in no training sequence.
    int64_t dropped_tokens(size_t source = 0) const;
    // The training sequence that sample i of the run reads.
    struct Sample {
        size_t source;
        int64_t sequence;
    };
    Sample sample(uint64_t i) const;

  private:
    void fill(Batch& batch, int64_t micro_batch) const;
    void run();

    const std::vector<TrainingSource> sources;
    const LoaderOptions options;
    const Mixture mixture;
    std::vector<int64_t> training_sequences;  // of each source
    int64_t first_micro_batch = 0;            // micro-batches are counted from the start of the run

    // run() fills ready[filled % 2], next() swaps ready[taken % 2] with current; 0 ≤ filled − taken ≤ 2. The two
    // counters say which thread owns a batch, so the mutex guards only the counters and the two flags.
    Batch ready[2], current;
    std::mutex mutex;
    std::condition_variable changed;
    int64_t filled = 0, taken = 0;
    bool stop = false;
    std::exception_ptr failure;
    std::thread worker;
};

// The split in order, each token scored once. Batch b holds sequences b·B …; the last sequence may be short. Unused
// rows and positions and tokens that the mask of the files excludes have target NO_TARGET. The input before the first
// token is end_of_text; if that is unknown (−1), the first token of the split is only an input.
// With a packing: its training sequences in a fixed random order, so that a limit takes a sample of them.
struct EvalBatches {
    const TokenFiles& files;
    int64_t B, T, vocab_size;
    int32_t end_of_text;
    // Scores at most this many tokens; if packed, whole sequences with about so many, at least one. 0: all.
    int64_t limit;
    const ExamplePacking* packing = nullptr;
    int64_t num_tokens() const;  // targets, before the mask excludes some; throws Error if there are none
    int64_t num_batches() const;
    Batch batch(int64_t b) const;

  private:
    int64_t num_sequences() const;
};
