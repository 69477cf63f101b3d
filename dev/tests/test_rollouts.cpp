// Advantages, the weights of tokens, and completions as batches (rl/).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model.h"
#include "models/family.h"
#include "rl/advantages.h"
#include "rl/completion_batches.h"

namespace {

// Worked out by hand from the formulas of rl/advantages.h.
TEST(Advantages, FollowTheirFormulas) {
    const std::vector<double> rewards = {1, 0, 0, 1, 0.1, 0.1, 0.1, 0.1, 3, 1, 1, 1};
    // Means 0.5, 0.1 and 1.5; sums of squares 1, 0 and 3. Of all: mean 8.4/12 = 0.7, sum of squares
    // 2·0.09 + 2·0.49 + 4·0.36 + 5.29 + 3·0.09 = 8.16.
    const double of_first = std::sqrt(1.0 / 3) + 1e-4, of_third = std::sqrt(3.0 / 3) + 1e-4,
                 of_all = std::sqrt(8.16 / 11) + 1e-4;
    const auto expect = [&](Advantage method, double first, double third) {
        const std::vector<float> a = advantages(rewards, 4, method);
        for (size_t i = 0; i < 4; i++) {
            EXPECT_NEAR(a[i], (rewards[i] - 0.5) / first, 1e-6);
            EXPECT_EQ(a[4 + i], 0);  // exactly, although the mean of 0.1 is rounded
            EXPECT_NEAR(a[8 + i], (rewards[8 + i] - 1.5) / third, 1e-6);
        }
    };
    expect(Advantage::Group, of_first, of_third);
    expect(Advantage::Batch, of_all, of_all);
    expect(Advantage::MeanOnly, 1, 1);
    EXPECT_THROW(advantages(rewards, 5, Advantage::Group), Error);
    EXPECT_THROW(advantages(rewards, 1, Advantage::Group), Error);
}

TEST(Advantages, DivideByWhatTheNormSays) {
    EXPECT_EQ(token_weight(LossNorm::Sequence, 4), 0.25f);
    EXPECT_EQ(token_weight(LossNorm::Batch, 4), 1);
    EXPECT_EQ(token_weight(LossNorm::Constant, 4), 1);
    const std::vector<int64_t> lengths = {4, 1, 7};
    EXPECT_EQ(loss_divisor(LossNorm::Sequence, lengths, 10), 3);
    EXPECT_EQ(loss_divisor(LossNorm::Batch, lengths, 10), 12);
    EXPECT_EQ(loss_divisor(LossNorm::Constant, lengths, 10), 30);
}

TEST(CompletionBatches, HoldEveryExampleOnce) {
    const std::vector<int32_t> prompts[] = {{1, 2, 3}, {4}};
    std::vector<PolicyExample> examples;
    for (int32_t i = 0; i < 9; i++) {
        PolicyExample e{&prompts[i % 2], {}, {}, float(i) - 4, 1 / float(i + 1)};
        for (int32_t t = 0; t <= i % 5; t++) {
            e.tokens.push_back(100 + 10 * i + t);
            e.sampler_logps.push_back(-0.5f * float(10 * i + t));
        }
        examples.push_back(e);
    }
    constexpr int64_t B = 2, T = 7, N = B * T;
    for (const int64_t room : {0, 3, 40}) {
        const std::vector<Batch> batches = completion_batches(examples, B, T, room);
        ASSERT_GT(batches.size(), 1u);
        std::vector<int> found(examples.size(), 0);
        for (const Batch& b : batches) {
            for (const size_t n : {b.tokens.size(), b.targets.size(), b.positions.size(), b.policy.size()})
                ASSERT_EQ(n, size_t(N));
            EXPECT_EQ(b.cum_seqlens.front(), 0);
            EXPECT_EQ(b.cum_seqlens.back(), N);
            const int64_t sequences = b.num_sequences ? b.num_sequences : int64_t(b.cum_seqlens.size()) - 1;
            EXPECT_EQ(b.num_sequences > 0, sequences <= room);
            for (int64_t s = 0; s < sequences; s++) {
                const int32_t begin = b.cum_seqlens[size_t(s)], end = b.cum_seqlens[size_t(s) + 1];
                EXPECT_LE(end - begin, T);
                EXPECT_LE(end - begin, b.max_seqlen);
                for (int32_t t = begin; t < end; t++) EXPECT_EQ(b.positions[size_t(t)], t - begin);
                const int32_t last = b.targets[size_t(end) - 1];
                if (last == Batch::NO_TARGET) continue;  // padding
                const auto i = size_t(last - 100) / 10;
                const PolicyExample& e = examples[i];
                found[i]++;
                std::vector<int32_t> whole = *e.prompt;
                whole.insert(whole.end(), e.tokens.begin(), e.tokens.end());
                ASSERT_EQ(size_t(end - begin), whole.size() - 1);
                for (int32_t t = begin; t < end; t++) {
                    const size_t k = size_t(t - begin), at = size_t(t), prompt = e.prompt->size();
                    EXPECT_EQ(b.tokens[at], whole[k]);
                    const bool learnt = k + 1 >= prompt;
                    EXPECT_EQ(b.targets[at], learnt ? whole[k + 1] : Batch::NO_TARGET);
                    EXPECT_EQ(b.policy[at].weight, learnt ? e.weight : 0);
                    EXPECT_EQ(b.policy[at].advantage, learnt ? e.advantage : 0);
                    EXPECT_EQ(b.policy[at].sampler_logp, learnt ? e.sampler_logps[k + 1 - prompt] : 0);
                }
            }
        }
        EXPECT_EQ(found, std::vector<int>(examples.size(), 1));
    }
    EXPECT_TRUE(completion_batches({}, B, T, 0).empty());
    EXPECT_THROW(completion_batches(examples, 1, 6, 0), Error);  // the longest example needs seven positions
    const Batch empty = empty_batch(B, T, 0);
    EXPECT_EQ(empty.targets, std::vector<int32_t>(N, Batch::NO_TARGET));
    EXPECT_EQ(empty.cum_seqlens, (std::vector<int32_t>{0, T, N}));
}

// Rollouts use the memory of the activations, except that of what a step leaves for the next one.
TEST(Rollouts, ShareTheMemoryOfActivations) {
    ModelConfig config;
    ASSERT_TRUE(preset("llama-tiny", config));
    RunShape shape = training_shape(2, 64);
    shape.rollout.emplace();
    const int64_t alone = Activations(config, shape).plan.bytes();
    for (const int64_t bytes : {alone / 2, alone, 5 * alone}) {
        shape.rollout_bytes = bytes;
        const Activations acts(config, shape);
        const auto find = [&](const std::string& name) {
            const auto& all = acts.plan.entries();
            const auto found = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == name; });
            EXPECT_NE(found, all.end()) << name;
            return *found;
        };
        const ArenaPlan::Entry rollout = find("rollout");
        EXPECT_EQ(rollout.bytes, ArenaPlan::aligned(bytes));
        int64_t kept = 0;
        for (const char* name : {"scalars", "sums", "rope_table"}) {
            const ArenaPlan::Entry e = find(name);
            EXPECT_TRUE(e.offset + e.bytes <= rollout.offset || rollout.offset + rollout.bytes <= e.offset) << name;
            kept += e.bytes;
        }
        EXPECT_LE(acts.plan.bytes(), std::max(alone, rollout.bytes) + kept);
    }
}

}  // namespace
