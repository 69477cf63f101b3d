#include "data/packing.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>

namespace {

struct Found {
    int64_t begin, tokens, loss_tokens;  // as of a PackedExample
    bool rejected;
};

// Reads the flags of all tokens and calls found(example) for each example, which ends where the next one starts.
template <typename F>
void for_each_example(const TokenFiles& files, const F& found) {
    std::vector<uint8_t> flags(1 << 16);
    Found example{-1, 0, 0, false};
    const auto finish = [&](int64_t end) {
        example.tokens = end - example.begin;
        if (example.begin >= 0) found(example);
    };
    for (int64_t block = 0; block < files.size(); block += int64_t(flags.size())) {
        const int64_t n = std::min(int64_t(flags.size()), files.size() - block);
        files.read_flags(block, n, flags.data());
        for (int64_t i = 0; i < n; i++) {
            const uint8_t flag = flags[size_t(i)];
            if (flag & TokenFiles::EXAMPLE_START) {
                finish(block + i);
                example = {block + i, 0, 0, (flag & TokenFiles::REJECTED) != 0};
            } else {
                example.loss_tokens += flag & TokenFiles::LOSS;
            }
        }
    }
    finish(files.size());
}

std::vector<size_t> longest_first(const std::vector<int64_t>& lengths) {
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
    return order;
}

}  // namespace

std::vector<int64_t> best_fit_decreasing(const std::vector<int64_t>& lengths, int64_t capacity) {
    std::vector<int64_t> bin_of(lengths.size());
    int64_t bins = 0;
    std::map<int64_t, std::vector<int64_t>> by_room;  // bins by what they have left
    for (const size_t i : longest_first(lengths)) {
        const int64_t n = lengths[i];
        const auto found = by_room.lower_bound(n);
        int64_t bin = bins, room = capacity;
        if (found != by_room.end()) {
            room = found->first;
            bin = found->second.back();
            found->second.pop_back();
            if (found->second.empty()) by_room.erase(found);
        } else {
            bins++;
        }
        bin_of[i] = bin;
        if (room > n) by_room[room - n].push_back(bin);
    }
    return bin_of;
}

ExamplePacking::ExamplePacking(const TokenFiles& files, int64_t T_, bool skip_too_long)
    : T(T_), pairs(files.has_pairs()) {
    require(T > 0 && T < std::numeric_limits<int32_t>::max(), "packing: sequences of ", T, " tokens are out of range");
    require(files.has_examples(), files.pattern(), ": does not say where examples start; make it from conversations");
    if (pairs)
        find_pairs(files);
    else
        find_examples(files);
    const char* const what = pairs ? " pairs" : " examples";
    const int64_t all = int64_t(examples.size() / examples_of_unit()) + too_long;
    require(skip_too_long || too_long == 0, files.pattern(), ": ", too_long, " of ", all, what,
            " are longer than --seq-len ", T, "; raise it (the longest needs ", longest,
            "), or leave them out with --too-long skip");
    require(!examples.empty(), files.pattern(), ": none of ", all, what, " fits into --seq-len ", T,
            "; raise it (the longest needs ", longest, ")");
    pack();
}

void ExamplePacking::find_examples(const TokenFiles& files) {
    for_each_example(files, [&](const Found& example) {
        if (example.tokens < 2) return;  // a single token has no target
        if (!fits(example.tokens - 1)) return;
        examples.push_back({example.begin, int32_t(example.tokens), int32_t(example.loss_tokens)});
    });
}

void ExamplePacking::find_pairs(const TokenFiles& files) {
    const char* const remedy = "; make it again with `make data`";
    std::optional<Found> chosen;
    int64_t pair = 0;
    for_each_example(files, [&](const Found& example) {
        const std::string& path = files.mask_path(example.begin);
        require(example.rejected == chosen.has_value(), path, ": pair ", pair + 1, " has two ",
                example.rejected ? "rejected" : "chosen", " responses in a row", remedy);
        require(example.loss_tokens > 0, path, ": the ", example.rejected ? "rejected" : "chosen", " response of pair ",
                pair + 1, " has no loss tokens", remedy);
        if (!example.rejected) {
            chosen = example;
            return;
        }
        if (fits(chosen->tokens - 1 + example.tokens - 1))
            for (const Found& side : {*chosen, example})
                examples.push_back({side.begin, int32_t(side.tokens), int32_t(side.loss_tokens), pair});
        chosen.reset();
        pair++;
    });
    require(!chosen, files.pattern(), ": ends with the chosen response of pair ", pair + 1,
            ", without its rejected one", remedy);
}

// Counts what is too long.
bool ExamplePacking::fits(int64_t needed) {
    longest = std::max(longest, needed);
    too_long += needed > T;
    return needed <= T;
}

void ExamplePacking::pack() {
    const size_t each = examples_of_unit();
    std::vector<int64_t> needed(examples.size() / each, 0);
    for (size_t i = 0; i < examples.size(); i++) needed[i / each] += examples[i].tokens - 1;
    positions = std::accumulate(needed.begin(), needed.end(), int64_t(0));
    const std::vector<int64_t> sequence_of = best_fit_decreasing(needed, T);
    std::vector<int64_t> counts(size_t(*std::max_element(sequence_of.begin(), sequence_of.end())) + 1, 0);
    for (const int64_t sequence : sequence_of) counts[size_t(sequence)] += int64_t(each);
    most = *std::max_element(counts.begin(), counts.end());
    starts.resize(counts.size() + 1);
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
    std::vector<PackedExample> by_sequence(examples.size());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (const size_t unit : longest_first(needed))
        for (size_t i = unit * each; i < (unit + 1) * each; i++)
            by_sequence[size_t(next[size_t(sequence_of[unit])]++)] = examples[i];
    examples = std::move(by_sequence);
}
