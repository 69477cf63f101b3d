// Evaluates the loss of a data split. Batches are distributed round-robin over the ranks.
#pragma once

#include <cmath>
#include <functional>

#include "data/loader.h"
#include "runtime/context.h"

struct Evaluation {
    int64_t tokens = 0, bytes = 0;  // loss tokens, and the bytes of the text that they encode (0: unknown)
    double nats = 0;

    double loss() const { return nats / double(tokens); }
    double bits_per_byte() const { return bytes ? nats / (std::log(2.0) * double(bytes)) : NAN; }
};

// Calls f with this rank's batches. All ranks call it equally often, with a batch without targets and pairs when none
// is left, because with ZeRO stage 3 they gather weights together.
void for_each_own_batch(const Context& ctx, const EvalBatches& batches, const std::function<void(const Batch&)>& f);

// Computes the loss over all batches. score(batch, accumulate) sets loss_sum ([1] fp64 on the device) to the batch's
// loss in nats, or adds to it. split_bytes: bytes of the split's text (0: unknown). The result is the same on all
// ranks; sums are added in rank order. Throws Error if the split has no loss token.
Evaluation evaluate(const Context& ctx, const EvalBatches& batches, int64_t split_bytes, const Tensor& loss_sum,
                    const std::function<void(const Batch& batch, bool accumulate)>& score);
