#include "rl/completion_batches.h"

#include <algorithm>

#include "data/packing.h"

namespace {

constexpr Batch::PolicyTerms NONE = {0, 0, 0, 0, 0};

// Adds an attention sequence of n positions, without targets; returns where it starts.
size_t add_positions(Batch& batch, int64_t n) {
    const size_t begin = batch.tokens.size();
    batch.tokens.resize(begin + size_t(n), 0);
    batch.targets.resize(begin + size_t(n), Batch::NO_TARGET);
    batch.policy.resize(begin + size_t(n), NONE);
    for (int64_t t = 0; t < n; t++) batch.positions.push_back(int32_t(t));
    batch.cum_seqlens.push_back(int32_t(batch.tokens.size()));
    batch.max_seqlen = std::max(batch.max_seqlen, n);
    return begin;
}

int64_t positions_of(const PolicyExample& e) {
    return int64_t(e.prompt->size() + e.tokens.size()) - 1;
}

// Inputs are all tokens but the last one, targets the sampled ones.
void add_example(Batch& batch, const PolicyExample& e) {
    size_t at = add_positions(batch, positions_of(e));
    std::copy(e.prompt->begin(), e.prompt->end(), batch.tokens.begin() + long(at));
    at += e.prompt->size() - 1;
    for (size_t i = 0; i < e.tokens.size(); i++, at++) {
        if (i > 0) batch.tokens[at] = e.tokens[i - 1];
        batch.targets[at] = e.tokens[i];
        batch.policy[at] = {e.advantage, e.weight, e.sampler_logps[i], 0, e.sampler_logps[i]};
    }
}

// Padding up to B·T positions, in sequences of at most T.
void fill_up(Batch& batch, int64_t B, int64_t T, int64_t max_sequences) {
    while (int64_t(batch.tokens.size()) < B * T)
        add_positions(batch, std::min(T, B * T - int64_t(batch.tokens.size())));
    add_room(batch, max_sequences, T);
}

}  // namespace

std::vector<Batch> completion_batches(const std::vector<PolicyExample>& examples, int64_t B, int64_t T,
                                      int64_t max_sequences) {
    std::vector<int64_t> lengths;
    for (const PolicyExample& e : examples) {
        require(!e.prompt->empty() && !e.tokens.empty() && positions_of(e) <= T, "a completion of ", e.tokens.size(),
                " tokens after a prompt of ", e.prompt->size(), " does not fit into ", T, " positions");
        lengths.push_back(positions_of(e));
    }
    const std::vector<int64_t> bin_of = best_fit_decreasing(lengths, B * T);
    std::vector<Batch> batches;
    for (size_t i = 0; i < examples.size(); i++)
        if (bin_of[i] >= int64_t(batches.size())) batches.resize(size_t(bin_of[i]) + 1);
    for (Batch& batch : batches) batch.cum_seqlens = {0};
    for (size_t i = 0; i < examples.size(); i++) add_example(batches[size_t(bin_of[i])], examples[i]);
    for (Batch& batch : batches) fill_up(batch, B, T, max_sequences);
    return batches;
}

Batch empty_batch(int64_t B, int64_t T, int64_t max_sequences) {
    Batch batch;
    batch.cum_seqlens = {0};
    fill_up(batch, B, T, max_sequences);
    return batch;
}
