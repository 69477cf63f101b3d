#include "data/packing.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

ExamplePacking::ExamplePacking(const TokenFiles& files, int64_t T_, bool skip_too_long) : T(T_) {
    require(T > 0 && T < std::numeric_limits<int32_t>::max(), "packing: sequences of ", T, " tokens are out of range");
    require(files.has_examples(), files.pattern(), ": does not say where examples start; make it from conversations");
    find_examples(files);
    const int64_t all = num_examples() + too_long;
    require(skip_too_long || too_long == 0, files.pattern(), ": ", too_long, " of ", all,
            " examples are longer than --seq-len ", T, "; raise it (the longest needs ", longest - 1,
            "), or leave them out with --too-long skip");
    require(!examples.empty(), files.pattern(), ": none of ", all, " examples fits into --seq-len ", T,
            "; raise it (the longest needs ", longest - 1, ")");
    pack();
}

// Reads the flags of all tokens. An example ends where the next one starts.
void ExamplePacking::find_examples(const TokenFiles& files) {
    std::vector<uint8_t> flags(1 << 16);
    int64_t begin = -1, loss_tokens = 0;
    const auto finish = [&](int64_t end) {
        const int64_t tokens = end - begin;
        if (begin < 0 || tokens < 2) return;  // a single token has no target
        longest = std::max(longest, tokens);
        if (tokens > T + 1)
            too_long++;
        else
            examples.push_back({begin, int32_t(tokens), int32_t(loss_tokens)});
    };
    for (int64_t block = 0; block < files.size(); block += int64_t(flags.size())) {
        const int64_t n = std::min(int64_t(flags.size()), files.size() - block);
        files.read_flags(block, n, flags.data());
        for (int64_t i = 0; i < n; i++) {
            if (flags[size_t(i)] & TokenFiles::EXAMPLE_START) {
                finish(block + i);
                begin = block + i;
                loss_tokens = 0;
            } else {
                loss_tokens += flags[size_t(i)] & TokenFiles::LOSS;
            }
        }
    }
    finish(files.size());
}

void ExamplePacking::pack() {
    std::stable_sort(examples.begin(), examples.end(),
                     [](const PackedExample& a, const PackedExample& b) { return a.tokens > b.tokens; });
    std::vector<int64_t> sequence_of(examples.size()), counts;
    std::map<int64_t, std::vector<int64_t>> by_room;  // sequences by the number of free positions
    for (size_t i = 0; i < examples.size(); i++) {
        const int64_t needed = examples[i].tokens - 1;
        positions += needed;
        const auto fits = by_room.lower_bound(needed);
        int64_t sequence = int64_t(counts.size()), room = T;
        if (fits != by_room.end()) {
            room = fits->first;
            sequence = fits->second.back();
            fits->second.pop_back();
            if (fits->second.empty()) by_room.erase(fits);
        } else {
            counts.push_back(0);
        }
        sequence_of[i] = sequence;
        counts[size_t(sequence)]++;
        if (room > needed) by_room[room - needed].push_back(sequence);
    }
    most = *std::max_element(counts.begin(), counts.end());
    starts.resize(counts.size() + 1);
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
    std::vector<PackedExample> by_sequence(examples.size());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (size_t i = 0; i < examples.size(); i++) by_sequence[size_t(next[size_t(sequence_of[i])]++)] = examples[i];
    examples = std::move(by_sequence);
}
