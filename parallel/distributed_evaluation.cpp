#include "parallel/distributed_evaluation.h"

#include <algorithm>

void for_each_own_batch(const Context& ctx, const EvalBatches& batches, const std::function<void(const Batch&)>& f) {
    for (int64_t first = 0; first < batches.num_batches(); first += ctx.world) {
        Batch batch = batches.batch(std::min(first + ctx.rank, batches.num_batches() - 1));
        if (first + ctx.rank >= batches.num_batches()) {
            std::fill(batch.targets.begin(), batch.targets.end(), Batch::NO_TARGET);
            batch.pairs.clear();
            batch.pairs_of_all_ranks = 0;
            batch.loss_tokens = 0;
        }
        f(batch);
    }
}

Evaluation evaluate(const Context& ctx, const EvalBatches& batches, int64_t split_bytes, const Tensor& loss_sum,
                    const std::function<void(const Batch& batch, bool accumulate)>& score) {
    const TokenFiles& files = batches.files;
    require(batches.num_tokens() > 0, files.pattern(), ": too few tokens to score; give a longer validation text");
    Evaluation own;
    bool accumulate = false;
    for_each_own_batch(ctx, batches, [&](const Batch& batch) {
        score(batch, accumulate);
        accumulate = true;
        own.tokens += batch.loss_tokens;
    });
    ctx.wait_for_stream("evaluation");
    copy_to_host(&own.nats, loss_sum.data, sizeof own.nats, ctx.stream);
    Evaluation e;
    for (const Evaluation& part : ctx.comm->all_gather_host(own)) {
        e.tokens += part.tokens;
        e.nats += part.nats;
    }
    require(e.tokens > 0, files.pattern(), ": its mask leaves no token to score; use a split with loss tokens");
    // A part of the split is taken to have the whole's bytes per token. How much text a mask leaves is not known.
    if (!files.masked())
        e.bytes = std::llround(double(split_bytes) * std::min(1.0, double(e.tokens) / double(files.size())));
    return e;
}
