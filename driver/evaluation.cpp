#include "driver/evaluation.h"

#include <algorithm>

#include "driver/pass.h"
#include "driver/sequence_loss.h"
#include "infer/generate.h"
#include "infer/prompts.h"
#include "runtime/device/convert_dtype.h"

namespace {

EvalBatches batches_of(const Model& model, const Activations& acts, const EvalSplit& split) {
    return {split.files,       acts.shape.B, acts.shape.T, model.config.vocab_size,
            split.end_of_text, split.limit,  split.packing};
}

}  // namespace

Evaluation evaluate(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split,
                    const std::function<void()>& before_batch) {
    return evaluate(ctx, batches_of(model, acts, split), split.bytes, acts.loss_sum,
                    [&](const Batch& batch, bool accumulate) {
                        if (before_batch) before_batch();
                        const Input in = upload(ctx, acts, batch);
                        forward({ctx, model, acts, in});
                        evaluate_loss({ctx, model, acts, in}, accumulate);
                    });
}

namespace {

// The token with the largest logit [1, vocabulary].
int32_t most_likely(const Context& ctx, const ModelConfig& config, const Tensor& logits) {
    std::vector<char> row(size_t(logits.bytes()));
    std::vector<float> values(size_t(logits.numel()));
    ctx.wait_for_stream("evaluation");
    copy_to_host(row.data(), logits.data, row.size(), ctx.stream);
    convert_to_float(values.data(), row.data(), logits.dtype, logits.numel());
    return int32_t(std::max_element(values.begin(), values.begin() + config.vocab_size) - values.begin());
}

}  // namespace

QuestionResults answer_questions(const Context& ctx, const Model& model, const Activations& acts,
                                 const std::vector<Question>& questions, const std::vector<Choice>& choices,
                                 const Tokenizer& tokenizer, const std::function<void()>& before_batch) {
    int64_t passes = 0;
    const auto run = [&](const Batch& batch) {
        if (before_batch) before_batch();
        const Input in = upload(ctx, acts, batch);
        forward({ctx, model, acts, in});
        ChoiceScorer::TokenScores scores{std::vector<float>(batch.tokens.size()),
                                         std::vector<bool>(batch.tokens.size(), false)};
        evaluate_loss({ctx, model, acts, in}, false, [&](int64_t begin, Tensor logits) {
            for (int64_t i = 0; ask_for_last_words(questions) && i < logits.shape[0]; i++) {
                const int32_t target = batch.targets[size_t(begin + i)];
                if (target != Batch::NO_TARGET)
                    scores.missed[size_t(begin + i)] = most_likely(ctx, model.config, logits.rows(i, i + 1)) != target;
            }
        });
        ctx.wait_for_stream("evaluation");
        copy_to_host(scores.losses.data(), acts.losses.data, scores.losses.size() * sizeof(float), ctx.stream);
        return scores;
    };
    Batch last;  // with ZeRO stage 3 all ranks gather weights together, so they run equally many passes
    const auto own_scores = [&](const Batch& batch) {
        last = batch;
        return passes++ % ctx.world == ctx.rank
                   ? run(batch)
                   : ChoiceScorer::TokenScores{std::vector<float>(batch.tokens.size()), {}};
    };
    const std::vector<EndingScore> own = score_choices(
        choices,
        {tokenizer.start_of_text(), start_token(model.config, &tokenizer), acts.shape.B, acts.shape.T, own_scores});
    const int64_t in_last_round = passes % ctx.world;
    if (in_last_round && ctx.rank >= in_last_round) run(last);
    std::vector<EndingScore> all(own.size() * size_t(ctx.world)), scores(own.size());
    ctx.comm->all_gather_host(all.data(), own.data(), own.size() * sizeof(EndingScore));
    for (size_t i = 0; i < all.size(); i++) {  // all but one rank's are 0
        scores[i % scores.size()].nats += all[i].nats;
        scores[i % scores.size()].missed += all[i].missed;
    }
    return question_results(questions, choices, scores);
}

PairEvaluation evaluate_pairs(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split,
                              const SetReference& set_reference, const std::function<void()>& before_batch) {
    PairEvaluation own, all;
    bool accumulate = false;
    for_each_own_batch(ctx, batches_of(model, acts, split), [&](const Batch& batch) {
        if (before_batch) before_batch();
        const Input in = upload(ctx, acts, batch, true);
        if (set_reference) set_reference(batch, in);
        const Pass pass{ctx, model, acts, in};
        forward(pass);
        token_losses(pass);
        sum_pairs(pass, accumulate);
        accumulate = true;
        own.pairs += int64_t(batch.pairs.size());
    });
    ctx.wait_for_stream("evaluation");
    copy_to_host(own.sums.data(), acts.pair_sums(ctx.rank).data, sizeof own.sums, ctx.stream);
    for (const PairEvaluation& part : ctx.comm->all_gather_host(own)) {
        all.pairs += part.pairs;
        for (size_t i = 0; i < all.sums.size(); i++) all.sums[i] += part.sums[i];
    }
    return all;
}

PairScores score_pairs(const Context& ctx, const Model& model, const Activations& acts, const EvalSplit& split) {
    PairScores s;
    std::vector<float> losses;
    for_each_own_batch(ctx, batches_of(model, acts, split), [&](const Batch& batch) {
        const Input in = upload(ctx, acts, batch);
        forward({ctx, model, acts, in});
        token_losses({ctx, model, acts, in});
        losses.resize(batch.tokens.size());
        copy_to_host(losses.data(), acts.losses.data, losses.size() * sizeof(float), ctx.stream);
        const auto sum = [&](int32_t begin, int32_t end) {
            double nats = 0;
            int64_t tokens = 0;
            for (size_t t = size_t(begin); t < size_t(end); t++) {
                if (batch.targets[t] == Batch::NO_TARGET) continue;
                nats += losses[t];
                tokens++;
            }
            return std::pair(nats, tokens);
        };
        for (const Batch::Pair& pair : batch.pairs) {
            const auto [chosen, chosen_tokens] = sum(pair.chosen, pair.rejected);
            const auto [rejected, rejected_tokens] = sum(pair.rejected, pair.end);
            s.pairs++;
            s.accurate += chosen < rejected;
            s.accurate_per_token += chosen / double(chosen_tokens) < rejected / double(rejected_tokens);
            s.chosen_nats += chosen;
            s.rejected_nats += rejected;
            s.chosen_tokens += chosen_tokens;
            s.rejected_tokens += rejected_tokens;
        }
    });
    return s;
}
