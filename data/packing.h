// Packs whole examples into training sequences: best-fit decreasing. In order of decreasing length, each example goes
// into the training sequence with the least room that it fits into, or into a new one (Ding et al. 2024, "Fewer
// Truncations Improve Language Modeling"). The result depends on the data and the length of a sequence alone.
// The two examples of a preference pair are packed as one: they lie side by side, the chosen one first.
//
// An example of n tokens takes n − 1 positions of a training sequence: inputs are its first n − 1 tokens, targets its
// last n − 1. So no target belongs to another example, and each has its whole prompt as context.
#pragma once

#include <cstdint>
#include <vector>

#include "data/token_files.h"

// The bin of each of these lengths; bins are numbered from 0 as they are opened. Of equal lengths the first goes first.
// Each bin but the last holds more than capacity less the longest length.
std::vector<int64_t> best_fit_decreasing(const std::vector<int64_t>& lengths, int64_t capacity);

struct PackedExample {
    int64_t begin;        // of its tokens in the files
    int32_t tokens;       // at least 2
    int32_t loss_tokens;  // targets with a loss
    int64_t pair = -1;    // of a preference pair: its number in the files, those that were left out included; else -1
};

class ExamplePacking {
  public:
    // Reads where examples start; T: positions of a training sequence. skip_too_long: leave out the examples or pairs
    // that need more than T. Throws Error if there are such and they may not be left out, if none is left, or if pairs
    // are not a chosen and a rejected example with loss tokens each.
    ExamplePacking(const TokenFiles& files, int64_t T, bool skip_too_long);

    int64_t seq_len() const { return T; }
    int64_t num_sequences() const { return int64_t(starts.size()) - 1; }
    int64_t num_examples() const { return int64_t(examples.size()); }
    int64_t num_too_long() const { return too_long; }  // pairs, if there are pairs
    int64_t max_examples() const { return most; }      // in a training sequence
    bool has_pairs() const { return pairs; }
    int64_t num_pairs() const { return pairs ? num_examples() / 2 : 0; }
    int64_t num_pairs_in_files() const { return pairs ? num_pairs() + too_long : 0; }  // above each PackedExample::pair
    int64_t max_pairs() const { return pairs ? most / 2 : 0; }                         // in a training sequence
    int64_t padding() const { return num_sequences() * T - positions; }
    // The examples of a training sequence, as a range; of each pair the chosen one and then the rejected one.
    struct Range {
        const PackedExample *first, *last;
        int64_t size() const { return last - first; }
        const PackedExample* begin() const { return first; }
        const PackedExample* end() const { return last; }
    };
    Range of_sequence(int64_t sequence) const {
        const auto at = [&](int64_t i) { return examples.data() + starts[size_t(i)]; };
        return {at(sequence), at(sequence + 1)};
    }

  private:
    void find_examples(const TokenFiles& files);
    void find_pairs(const TokenFiles& files);
    bool fits(int64_t needed);
    size_t examples_of_unit() const { return pairs ? 2 : 1; }  // that stay together
    void pack();

    const int64_t T;
    const bool pairs;
    std::vector<PackedExample> examples;  // by training sequence
    std::vector<int64_t> starts{0};       // of each training sequence in examples, and the end
    int64_t too_long = 0, longest = 0, positions = 0, most = 0;
};
