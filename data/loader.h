// The order of samples and the batches made of them.
//
// The split's tokens are cut into n = ⌊(tokens − 1)/T⌋ windows of T + 1 tokens at stride T (inputs are the first T,
// targets the last T; the dropped tail is dropped_tokens()). Sample i of a run is window π(seed, i div n, i mod n), π a
// keyed bijection of [0, n): a four-round Feistel network over Philox with cycle walking (Black, Rogaway 2002), O(1)
// memory. A step takes the next G = total_batch/T samples; micro-batch a of rank r is samples
// [a·world·B + r·B, + B) of the step: ranks and micro-batches only slice the order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/token_files.h"

// π(key, epoch, ·): [0, n) → [0, n), a bijection for each (key, epoch).
uint64_t permute(uint64_t key, uint64_t epoch, uint64_t i, uint64_t n);

struct Batch {
    // The target of a token that is not scored: cross-entropy's IGNORE_TARGET (kernels/cross_entropy.h).
    static constexpr int32_t NO_TARGET = -1;

    std::vector<int32_t> tokens, targets;  // [B·T]
    // Targets that are scored: of all ranks' parts of the micro-batch, so that every rank divides by the same number.
    int64_t scored = 0;
    // Document boundaries, if asked for: a sequence starts at each of cum_seqlens[0..], which ends with B·T. Otherwise
    // one sequence per window: 0, T, 2T, … B·T. A document ends with its end-of-text token as an input, whose target is
    // the first token of the next document; a window that starts inside a document starts a sequence too.
    std::vector<int32_t> cum_seqlens;
    std::vector<int32_t> positions;  // [B·T] from 0 at the start of each sequence
    int64_t max_seqlen = 0;
};

struct LoaderOptions {
    int64_t B = 0, T = 0;     // windows per micro-batch of this rank; tokens per window
    int64_t micro_steps = 1;  // micro-batches per step
    int64_t rank = 0, world = 1;
    uint64_t seed = 0;
    bool shuffle = true;       // false: window i mod n
    bool documents = false;    // split windows at end-of-text tokens
    int32_t end_of_text = -1;  // needed if documents
    int64_t vocab_size = 0;    // tokens are checked against it
};

// Prepares batches ahead of need on a thread of its own. files must outlive the loader.
class Loader {
  public:
    // first_step: the step whose batches come first (0-based: steps done so far).
    // Errors: options out of range, fewer than one window of tokens. Errors met while reading ahead are thrown by
    // next().
    Loader(const TokenFiles& files, const LoaderOptions& options, int64_t first_step);
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    // The next micro-batch; valid until the next call.
    const Batch& next();

    int64_t num_windows() const { return windows; }
    int64_t dropped_tokens() const;  // tokens of the split that are in no window
    // Window index that sample i of the run reads.
    int64_t window_of_sample(uint64_t i) const;

  private:
    void fill(Batch& batch, int64_t micro_batch) const;
    // Sets what the mask of the files leaves out of targets; returns how many targets of all ranks are left.
    int64_t apply_mask(std::vector<int32_t>& targets, int64_t first_sample) const;
    void run();

    const TokenFiles& files;
    const LoaderOptions options;
    int64_t windows = 0;
    int64_t first_micro_batch = 0;  // micro-batches are counted from the start of the run

    // The hand-over: run() fills ready[filled % 2], next() swaps ready[taken % 2] with current; 0 ≤ filled − taken ≤ 2.
    // Whose turn a slot is follows from the two counters, so the mutex guards only them and the two flags.
    Batch ready[2], current;
    std::mutex mutex;
    std::condition_variable changed;
    int64_t filled = 0, taken = 0;
    bool stop = false;
    std::exception_ptr failure;
    std::thread worker;
};

// The split in order, each token scored once: batch b holds windows b·B …; the last window may be short, and unused
// rows and positions have target NO_TARGET, and so have tokens that the files' mask leaves out. The token before the
// first is end_of_text; where that is unknown (−1), the split's first token is only an input.
struct EvalBatches {
    const TokenFiles& files;
    int64_t B, T, vocab_size;
    int32_t end_of_text;
    int64_t limit;               // score at most this many tokens; 0: all
    int64_t num_tokens() const;  // tokens scored; throws Error if there are none
    int64_t num_batches() const;
    Batch batch(int64_t b) const;
};
