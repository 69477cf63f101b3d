// Batches of fixed sequences, without a loader.
#pragma once

#include <cstdint>
#include <vector>

#include "data/loader.h"
#include "runtime/model/model_config.h"
#include "runtime/rng.h"

inline Batch make_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t B, int64_t T) {
    Batch batch;
    batch.tokens = tokens;
    batch.targets = targets;
    for (int64_t n = 0; n < B * T; n++) batch.positions.push_back(static_cast<int32_t>(n % T));
    for (int64_t b = 0; b <= B; b++) batch.cum_seqlens.push_back(static_cast<int32_t>(b * T));
    batch.max_seqlen = T;
    return batch;
}

// Random tokens, each followed by the next one.
inline Batch random_batch(const ModelConfig& config, int64_t B, int64_t T, uint64_t seed) {
    std::vector<int32_t> tokens, targets;
    auto token = [&](int64_t b, int64_t t) {
        return static_cast<int32_t>(philox(seed, uint64_t(t), uint64_t(b)).v[0] % uint64_t(config.vocab_size));
    };
    for (int64_t b = 0; b < B; b++) {
        for (int64_t t = 0; t < T; t++) {
            tokens.push_back(token(b, t));
            targets.push_back(token(b, t + 1));
        }
    }
    return make_batch(tokens, targets, B, T);
}

inline std::vector<int32_t> random_tokens(const ModelConfig& config, int64_t n, uint64_t seed) {
    return random_batch(config, 1, n, seed).tokens;
}

// One batch for each of B sequences.
inline std::vector<Batch> split(const Batch& batch, int64_t B, int64_t T) {
    std::vector<Batch> parts;
    for (int64_t b = 0; b < B; b++) {
        auto part = [&](const std::vector<int32_t>& x) {
            return std::vector<int32_t>(x.begin() + b * T, x.begin() + (b + 1) * T);
        };
        parts.push_back(make_batch(part(batch.tokens), part(batch.targets), 1, T));
    }
    return parts;
}
