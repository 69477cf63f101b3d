// Packs whole examples into training sequences: best-fit decreasing. In order of decreasing length, each example goes
// into the training sequence with the least room that it fits into, or into a new one (Ding et al. 2024, "Fewer
// Truncations Improve Language Modeling"). The result depends on the data and the length of a sequence alone.
//
// An example of n tokens takes n − 1 positions of a training sequence: inputs are its first n − 1 tokens, targets its
// last n − 1. So no target belongs to another example, and each has its whole prompt as context.
#pragma once

#include <cstdint>
#include <vector>

#include "data/token_files.h"

struct PackedExample {
    int64_t begin;        // of its tokens in the files
    int32_t tokens;       // at least 2
    int32_t loss_tokens;  // targets with a loss
    int64_t pair = -1;    // of a preference pair: its number in the files, those that were left out included; else -1
};

class ExamplePacking {
  public:
    // Reads where examples start; T: positions of a training sequence. skip_too_long: leave out examples of more than
    // T + 1 tokens. Throws Error if there are such examples and they may not be left out, or if no example is left.
    ExamplePacking(const TokenFiles& files, int64_t T, bool skip_too_long);

    int64_t seq_len() const { return T; }
    int64_t num_sequences() const { return int64_t(starts.size()) - 1; }
    int64_t num_examples() const { return int64_t(examples.size()); }
    int64_t num_too_long() const { return too_long; }
    int64_t max_examples() const { return most; }  // in a training sequence
    int64_t padding() const { return num_sequences() * T - positions; }
    // The examples of a training sequence, as a range.
    struct Range {
        const PackedExample *first, *last;
        const PackedExample* begin() const { return first; }
        const PackedExample* end() const { return last; }
    };
    Range of_sequence(int64_t sequence) const {
        const auto at = [&](int64_t i) { return examples.data() + starts[size_t(i)]; };
        return {at(sequence), at(sequence + 1)};
    }

  private:
    void find_examples(const TokenFiles& files);
    void pack();

    const int64_t T;
    std::vector<PackedExample> examples;  // by training sequence
    std::vector<int64_t> starts{0};       // of each training sequence in examples, and the end
    int64_t too_long = 0, longest = 0, positions = 0, most = 0;
};
