// Completions as the training batches that a policy learns from.
#pragma once

#include <vector>

#include "data/loader.h"

// A completion with its prompt: each is an attention sequence of its own.
struct PolicyExample {
    const std::vector<int32_t>* prompt;  // at least one token
    std::vector<int32_t> tokens;         // every sampled one, the end token included
    std::vector<float> sampler_logps;    // of each of them
    float advantage = 0, weight = 0;     // of each of them
};

// Batches of B·T positions, T at least as long as each example less one token: best-fit decreasing
// (data/packing.h). Targets are the sampled tokens; nothing of a prompt is one. The rest of a batch is padding. The
// result depends on the examples and sizes alone. max_sequences: as add_room() takes it. loss_tokens stays 0.
std::vector<Batch> completion_batches(const std::vector<PolicyExample>& examples, int64_t B, int64_t T,
                                      int64_t max_sequences);
// A batch without a target.
Batch empty_batch(int64_t B, int64_t T, int64_t max_sequences);
