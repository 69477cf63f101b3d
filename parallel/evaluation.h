// The loss of a split of the data, whose batches the ranks take in turns.
#pragma once

#include <cmath>
#include <functional>

#include "data/loader.h"
#include "runtime/context.h"

struct Evaluation {
    int64_t tokens = 0, bytes = 0;  // scored tokens and the bytes of text behind them (0: unknown)
    double nats = 0;

    double loss() const { return nats / double(tokens); }
    double bits_per_byte() const { return bytes ? nats / (std::log(2.0) * double(bytes)) : NAN; }
};

// score(batch, accumulate) sets loss_sum ([1] fp64 on the device) to the batch's loss in nats, or adds that to it.
// Every rank scores as many batches: where there is none left for it, one without targets, since its weights may be
// what others compute with. split_bytes: text behind the whole split (0: unknown). The same on all ranks, whose sums
// are added in the order of the ranks. Throws Error where there is no token to score.
Evaluation evaluate(const Context& ctx, const EvalBatches& batches, int64_t split_bytes, const Tensor& loss_sum,
                    const std::function<void(const Batch& batch, bool accumulate)>& score);
