// Training on preference pairs: where the head's rows of a batch lie, and that losses and gradients do not depend on
// it: pairs together and alone, in chunks of the head with gaps between pairs, and in two passes over the head.
#include "driver/sequence_loss.h"

#include <numeric>
#include <random>

#include "dev/tests/model_fixture.h"

namespace {

// A batch of training sequences of T tokens with these pairs: the lengths of prompt, chosen and rejected response.
struct Lengths {
    int64_t prompt, chosen, rejected;
    int64_t positions() const { return 2 * prompt + chosen + rejected; }
};

Batch batch_of(const std::vector<std::vector<Lengths>>& sequences, int64_t T, int64_t vocab, uint64_t seed) {
    std::mt19937_64 random(seed);
    Batch batch;
    batch.cum_seqlens = {0};
    for (const std::vector<Lengths>& pairs : sequences) {
        const size_t end = batch.tokens.size() + size_t(T);
        for (const Lengths& pair : pairs) {
            const auto begin = int32_t(batch.tokens.size());
            for (const int64_t response : {pair.chosen, pair.rejected}) {
                for (int64_t t = 0; t < pair.prompt + response; t++) {
                    batch.tokens.push_back(int32_t(random() % uint64_t(vocab)));
                    batch.positions.push_back(int32_t(t));
                    batch.targets.push_back(t < pair.prompt ? Batch::NO_TARGET : int32_t(random() % uint64_t(vocab)));
                }
                batch.cum_seqlens.push_back(int32_t(batch.tokens.size()));
                batch.max_seqlen = std::max(batch.max_seqlen, pair.prompt + response);
            }
            const auto middle = begin + int32_t(pair.prompt + pair.chosen);
            batch.pairs.push_back({begin, middle, batch.cum_seqlens.back(), int64_t(batch.pairs.size()), 0});
        }
        const size_t room = end - batch.tokens.size();
        for (size_t t = 0; t < room; t++) batch.positions.push_back(int32_t(t));
        batch.tokens.resize(end, 0);
        batch.targets.resize(end, Batch::NO_TARGET);
        if (room > 0) batch.cum_seqlens.push_back(int32_t(end));
        batch.max_seqlen = std::max(batch.max_seqlen, int64_t(room));
    }
    batch.pairs_of_all_ranks = int64_t(batch.pairs.size());
    return batch;
}

std::vector<int32_t> loss_tokens(const Batch& batch, int32_t begin, int32_t end) {
    std::vector<int32_t> tokens;
    for (int32_t t = begin; t < end; t++)
        if (batch.targets[size_t(t)] != Batch::NO_TARGET) tokens.push_back(t);
    return tokens;
}

// Rows hold the loss tokens of each pair and nothing else; without two passes none goes beyond its chunk; two passes
// are taken only where a pair is longer than a chunk or the gaps have no room.
TEST(PairLayout, RowsOfRandomBatches) {
    std::mt19937 random(1);
    const auto number = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    int64_t with_gaps = 0, two_passes = 0;
    for (int i = 0; i < 3000; i++) {
        const int64_t T = number(2, 200), B = number(1, 3), chunk = std::min(number(1, 100), B * T);
        const int64_t unit = number(0, 1) ? chunk : 1;
        std::vector<std::vector<Lengths>> sequences;
        for (int64_t b = 0; b < B; b++) {
            sequences.emplace_back();
            for (int64_t room = T; room > 0;) {
                const Lengths pair = {number(0, 20), number(1, 60), number(1, 60)};
                if (pair.positions() > room) break;
                sequences.back().push_back(pair);
                room -= pair.positions();
            }
        }
        const Batch batch = batch_of(sequences, T, 10, uint64_t(i));
        const PairLayout layout = lay_out_pairs(batch, B * T, chunk, unit);
        const auto& rows = layout.loss_rows;
        ASSERT_EQ(int64_t(layout.pairs.size()), B * T);
        ASSERT_GE(rows.size(), 1u);
        ASSERT_LE(int64_t(rows.size()), B * T);
        ASSERT_TRUE(int64_t(rows.size()) % unit == 0 || int64_t(rows.size()) == B * T);
        int64_t used = 0, longest = 0;
        for (size_t k = 0; k < layout.pairs.size(); k++) {
            const PairRows& pair = layout.pairs[k];
            if (k >= batch.pairs.size()) {
                ASSERT_EQ(pair.chosen, pair.end);
                ASSERT_EQ(pair.chosen, 0);
                continue;
            }
            const Batch::Pair& in_batch = batch.pairs[k];
            const auto part = [&](int32_t begin, int32_t end) {
                return std::vector<int32_t>(rows.begin() + begin, rows.begin() + end);
            };
            ASSERT_EQ(part(pair.chosen, pair.rejected), loss_tokens(batch, in_batch.chosen, in_batch.rejected));
            ASSERT_EQ(part(pair.rejected, pair.end), loss_tokens(batch, in_batch.rejected, in_batch.end));
            used += pair.end - pair.chosen;
            longest = std::max<int64_t>(longest, pair.end - pair.chosen);
            if (!layout.two_passes) {
                ASSERT_EQ(pair.chosen / chunk, (pair.end - 1) / chunk);
            }
        }
        ASSERT_EQ(used, int64_t(rows.size()) - std::count(rows.begin(), rows.end(), -1));
        if (layout.two_passes) {
            two_passes++;
            ASSERT_TRUE(longest > chunk || used + int64_t(batch.pairs.size()) * (longest - 1) > B * T);
        } else {
            with_gaps += batch.pairs.size() > 1 && layout.pairs[batch.pairs.size() - 1].end > used;
        }
    }
    EXPECT_GT(with_gaps, 100);
    EXPECT_GT(two_passes, 100);
}

// A model whose vocabulary is so large that the head has chunks of 64 tokens on the CPU.
ModelConfig large_vocabulary(bool tied) {
    ModelConfig c = base_config();
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.activation = Activation::SwiGLU;
    c.kv_heads = 2;
    c.head_size = 16;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    c.tied = tied;
    c.vocab_size = 131073;
    c.max_positions = 256;
    return c;
}

struct Result {
    double loss;
    std::vector<double> stats;
    std::vector<float> gradients;
};

// Of batches that are micro-steps of one step. Reference: fixed numbers for each pair, counted over the batches.
Result train_step(Driver& d, const std::vector<Batch>& batches, bool two_passes = false) {
    float pairs = 0;
    for (size_t i = 0; i < batches.size(); i++) {
        Input in = upload(d.ctx, d.acts, batches[i], true);
        in.two_passes |= two_passes;
        std::vector<float> reference;
        for (size_t k = 0; k < batches[i].pairs.size(); k++, pairs++) {
            reference.push_back(-300 - 7 * pairs);
            reference.push_back(-310 + 11 * pairs);
        }
        upload_reference(d.ctx, d.acts, reference);
        forward({d.ctx, d.model, d.acts, in});
        backward({d.ctx, d.model, d.acts, in, &d.optimizer.grads}, 0.25f, i == 0, i + 1 == batches.size());
    }
    const std::vector<double> sums = fetch<double>(d.acts.pair_sums(0));
    return {sums[PAIR_LOSS], sums, d.grads()};
}

double relative_rms(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) {
        difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
        size += double(b[i]) * b[i];
    }
    return std::sqrt(difference / size);
}

class PairTraining : public testing::TestWithParam<PreferenceMethod> {
  protected:
    static constexpr int64_t B = 2, T = 128;
    static RunShape shape(DType dtype, int64_t batch_size) {
        RunShape s = training_shape(batch_size, T, dtype);
        s.preference = PreferenceOptions{GetParam(), 0.05f};
        return s;
    }
    const std::vector<std::vector<Lengths>> lengths = {{{5, 10, 12}, {9, 20, 21}, {3, 4, 2}}, {{2, 31, 30}, {1, 8, 3}}};
};

// The gradient of pairs that are packed is that of each pair in a micro-step of its own. Sums of other lengths in fp32
// differ by their rounding: the bound on gradients of DESIGN section 7.
TEST_P(PairTraining, PackedPairsHaveTheGradientOfEachAlone) {
    for (const DType dtype : dtypes())
        for (const bool tied : {false, true}) {
            SCOPED_TRACE(str(dtype_name(dtype), tied ? " tied" : ""));
            const ModelConfig config = large_vocabulary(tied);
            Driver driver(config, shape(dtype, B));
            driver.randomise(3);
            const Batch together = batch_of(lengths, T, config.vocab_size, 7);
            const Result packed = train_step(driver, {together});
            EXPECT_FALSE(upload(driver.ctx, driver.acts, together, true).two_passes);

            std::vector<Batch> alone;
            for (const Batch::Pair& pair : together.pairs) {
                Batch b = batch_of({{}, {}}, T, config.vocab_size, 1);
                b.cum_seqlens = {0, pair.rejected - pair.chosen, pair.end - pair.chosen, int32_t(T), int32_t(B * T)};
                for (int32_t t = pair.chosen; t < pair.end; t++) {
                    const size_t to = size_t(t - pair.chosen);
                    b.tokens[to] = together.tokens[size_t(t)];
                    b.targets[to] = together.targets[size_t(t)];
                    b.positions[to] = together.positions[size_t(t)];
                }
                for (int64_t t = pair.end - pair.chosen; t < T; t++)
                    b.positions[size_t(t)] = int32_t(t - (pair.end - pair.chosen));
                b.pairs = {{0, b.cum_seqlens[1], b.cum_seqlens[2], 0, 0}};
                alone.push_back(std::move(b));
            }
            const Result each = train_step(driver, alone);
            const double bound = dtype == DType::F32 ? 1e-5 : 3e-2;
            EXPECT_LT(relative_rms(packed.gradients, each.gradients), bound);
            for (size_t i = 0; i < packed.stats.size(); i++)
                EXPECT_NEAR(packed.stats[i], each.stats[i],
                            (dtype == DType::F32 ? 1e-5 : 2e-2) * std::fabs(each.stats[i]) + 1e-5)
                    << i;
        }
}

// Two passes over the head have the losses of one, to the bit, and its gradients but for their rounding: one takes
// exponentials from the losses that it has just computed.
TEST_P(PairTraining, TwoPassesOverTheHead) {
    for (const DType dtype : dtypes()) {
        const ModelConfig config = large_vocabulary(false);
        Driver driver(config, shape(dtype, B));
        driver.randomise(3);
        const Batch batch = batch_of(lengths, T, config.vocab_size, 7);
        const Result one = train_step(driver, {batch}), two = train_step(driver, {batch}, true);
        EXPECT_EQ(one.stats, two.stats);
        EXPECT_LT(relative_rms(two.gradients, one.gradients), dtype == DType::F32 ? 1e-6 : 1e-2);
    }
    if (backend_device() == Device::CUDA) return;  // whose chunks are larger than these batches
    const ModelConfig config = large_vocabulary(false);
    Driver driver(config, shape(DType::F32, B));
    const Batch longer_than_a_chunk = batch_of({{{2, 40, 41}}, {{1, 20, 9}}}, T, config.vocab_size, 9);
    EXPECT_EQ(driver.acts.logits.shape[0], 64);
    EXPECT_TRUE(upload(driver.ctx, driver.acts, longer_than_a_chunk, true).two_passes);
}

INSTANTIATE_TEST_SUITE_P(Methods, PairTraining,
                         testing::Values(PreferenceMethod::DPO, PreferenceMethod::IPO, PreferenceMethod::SimPO,
                                         PreferenceMethod::ORPO),
                         [](const auto& test) { return PREFERENCE_NAMES[size_t(test.param)]; });

}  // namespace
