// data/packing.h and packed batches: whole examples, each once, with their whole prompt; in any order of ranks and
// steps.
#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "data/loader.h"
#include "dev/tests/temp_dir.h"
#include "runtime/rng.h"

namespace {

// A data set of examples of the given lengths, in shards of 1000 tokens. Token i of the files is i + 1, so that a batch
// shows where it was read; 0 is padding. Every third token of an example is a loss token, and its last one.
class Examples {
  public:
    explicit Examples(const std::vector<int64_t>& lengths) {
        std::vector<int32_t> tokens;
        for (const int64_t n : lengths) {
            begins.push_back(int64_t(tokens.size()));
            for (int64_t i = 0; i < n; i++) {
                tokens.push_back(int32_t(tokens.size()) + 1);
                flags.push_back(i == 0 ? TokenFiles::EXAMPLE_START : i % 3 == 0 || i == n - 1);
            }
        }
        for (size_t begin = 0, shard = 0; begin < tokens.size(); begin += 1000, shard++) {
            const size_t n = std::min<size_t>(1000, tokens.size() - begin);
            const std::string path = dir.file(std::to_string(100000 + shard));
            write(path + ".bin", 20240801, 7, tokens.data() + begin, n, 4);
            write(path + ".mask", 20261121, 2, flags.data() + begin, n, 1);
        }
    }
    TokenFiles open() const { return TokenFiles(dir.file("*.bin")); }
    bool is_loss_token(int64_t token) const { return flags[size_t(token)] == TokenFiles::LOSS; }
    int64_t begin_of(int64_t token) const { return *(std::upper_bound(begins.begin(), begins.end(), token) - 1); }
    int64_t loss_tokens() const { return std::count(flags.begin(), flags.end(), TokenFiles::LOSS); }

  private:
    static void write(const std::string& path, uint32_t magic, uint32_t version, const void* data, size_t n,
                      size_t size) {
        std::vector<uint32_t> header(256, 0);
        header[0] = magic;
        header[1] = version;
        header[2] = uint32_t(n);
        std::ofstream out(path, std::ios::binary);
        out.write(reinterpret_cast<const char*>(header.data()), 1024);
        out.write(static_cast<const char*>(data), std::streamsize(n * size));
    }

    const TempDir dir;
    std::vector<int64_t> begins;
    std::vector<uint8_t> flags;
};

// Lengths from `least` to `most`: short ones are more frequent, as in conversations.
std::vector<int64_t> mixture(int64_t count, int64_t least, int64_t most) {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < count; i++) {
        const double u = double(philox(7, uint64_t(i), 0).v[0]) / 4294967296.0;
        lengths.push_back(least + int64_t(u * u * double(most - least + 1)));
    }
    return lengths;
}

LoaderOptions options(const ExamplePacking& packing, int64_t B) {
    LoaderOptions o;
    o.B = B;
    o.T = packing.seq_len();
    o.seed = 42;
    o.vocab_size = 1 << 30;
    return o;
}

// The tokens of the files that are targets of the batch. Counts targets without their whole prompt, of which there must
// be none: the attention sequence has to hold the example's tokens from its first one to the target.
std::vector<int64_t> check_batch(const Batch& batch, const Examples& data) {
    std::vector<int64_t> targets;
    int64_t without_prompt = 0;
    for (size_t s = 0; s + 1 < batch.cum_seqlens.size(); s++) {
        const int64_t begin = batch.cum_seqlens[s], end = batch.cum_seqlens[s + 1];
        EXPECT_GT(end, begin);
        EXPECT_LE(end - begin, batch.max_seqlen);
        const int64_t first = batch.tokens[size_t(begin)] - 1;
        for (int64_t t = begin; t < end; t++) {
            EXPECT_EQ(batch.positions[size_t(t)], t - begin);
            const bool padding = batch.tokens[size_t(t)] == 0;
            EXPECT_EQ(padding, first < 0);
            EXPECT_TRUE(padding || batch.tokens[size_t(t)] - 1 == first + t - begin);
            const int32_t target = batch.targets[size_t(t)];
            const bool learnt = !padding && data.is_loss_token(first + t - begin + 1);
            EXPECT_EQ(target, learnt ? int32_t(first + t - begin + 2) : Batch::NO_TARGET);
            if (target == Batch::NO_TARGET) continue;
            targets.push_back(target - 1);
            without_prompt += data.begin_of(target - 1) != first;
        }
    }
    EXPECT_EQ(without_prompt, 0);
    EXPECT_EQ(batch.cum_seqlens.back(), int64_t(batch.tokens.size()));
    return targets;
}

TEST(Packing, EachExampleOnceWithLittlePadding) {
    const std::vector<int64_t> lengths = mixture(4000, 20, 2000);
    const Examples data(lengths);
    const ExamplePacking packing(data.open(), 2048, false);
    std::vector<int64_t> found;
    int64_t longest_pack = 0, most = 0;
    for (int64_t s = 0; s < packing.num_sequences(); s++) {
        int64_t used = 0, count = 0;
        for (const PackedExample& e : packing.of_sequence(s)) {
            EXPECT_EQ(data.begin_of(e.begin), e.begin);
            found.push_back(e.begin);
            used += e.tokens - 1;
            count++;
        }
        longest_pack = std::max(longest_pack, used);
        most = std::max(most, count);
    }
    EXPECT_LE(longest_pack, 2048);
    EXPECT_EQ(packing.max_examples(), most);
    EXPECT_EQ(packing.num_examples(), 4000);
    std::sort(found.begin(), found.end());
    ASSERT_EQ(found.size(), lengths.size());
    int64_t begin = 0;
    for (size_t i = 0; i < lengths.size(); begin += lengths[i++]) ASSERT_EQ(found[i], begin);
    EXPECT_EQ(packing.padding(), packing.num_sequences() * 2048 - (begin - 4000));
    EXPECT_LT(double(packing.padding()), 0.03 * 2048 * double(packing.num_sequences()));

    const ExamplePacking again(data.open(), 2048, true);
    for (int64_t s = 0; s < packing.num_sequences(); s++)
        EXPECT_EQ(packing.of_sequence(s).begin()->begin, again.of_sequence(s).begin()->begin);
}

TEST(Packing, LongExamplesAreAnErrorOrLeftOut) {
    const Examples data({5, 12, 11, 3, 40, 1});
    const auto error = [&](int64_t T, bool skip) {
        try {
            ExamplePacking(data.open(), T, skip);
            return std::string();
        } catch (const Error& e) {
            return std::string(e.what());
        }
    };
    // The example of one token has no target.
    EXPECT_NE(
        error(10, false).find("2 of 5 examples are longer than --seq-len 10; raise it (the longest needs 39), or"),
        std::string::npos)
        << error(10, false);
    EXPECT_NE(error(1, true).find("none of 5 examples fits into --seq-len 1"), std::string::npos) << error(1, true);
    const ExamplePacking packing(data.open(), 10, true);  // 11 tokens are 10 inputs
    EXPECT_EQ(packing.num_examples(), 3);
    EXPECT_EQ(packing.num_too_long(), 2);
    EXPECT_EQ(packing.num_sequences(), 2);  // 10; 4 + 2
    EXPECT_EQ(packing.padding(), 4);
    EXPECT_EQ(ExamplePacking(data.open(), 39, false).num_too_long(), 0);
}

TEST(Packing, BatchesHaveWholePromptsInTheOrderOfAnySlicing) {
    const Examples data(mixture(300, 3, 60));
    const TokenFiles files = data.open();
    const ExamplePacking packing(files, 64, false);
    const int64_t n = packing.num_sequences();
    Loader whole({{files, &packing}}, options(packing, 4), 0);
    EXPECT_EQ(whole.num_training_sequences(), n);
    std::vector<std::vector<int64_t>> micro_batches;
    std::map<int64_t, int64_t> count;
    for (int64_t i = 0; 4 * i < n; i++) {
        const Batch& batch = whole.next();
        micro_batches.push_back(check_batch(batch, data));
        EXPECT_EQ(batch.loss_tokens, int64_t(micro_batches.back().size()));
        for (const int64_t token : micro_batches.back()) count[token]++;
    }
    // An epoch has each loss token once; the last batch has some of the next epoch.
    EXPECT_EQ(int64_t(count.size()), data.loss_tokens());

    // Two ranks of two micro-steps, from the fourth step on.
    const int64_t first = 3;
    std::vector<std::unique_ptr<Loader>> ranks;
    for (int64_t rank = 0; rank < 2; rank++) {
        LoaderOptions o = options(packing, 1);
        o.rank = rank;
        o.world = 2;
        o.micro_steps = 2;
        ranks.push_back(std::make_unique<Loader>(std::vector<TrainingSource>{{files, &packing}}, o, first));
    }
    for (int64_t step = first; step < first + 3; step++) {
        std::vector<int64_t> targets;
        int64_t loss_tokens = 0;
        for (int64_t micro = 0; micro < 2; micro++) {
            for (int64_t rank = 0; rank < 2; rank++) {
                const Batch& batch = ranks[size_t(rank)]->next();
                const std::vector<int64_t> part = check_batch(batch, data);
                targets.insert(targets.end(), part.begin(), part.end());
                if (rank == 0) loss_tokens += batch.loss_tokens;
            }
        }
        EXPECT_EQ(targets, micro_batches[size_t(step)]);
        EXPECT_EQ(loss_tokens, int64_t(targets.size()));
    }
}

TEST(Packing, EvaluationScoresEachLossTokenOnce) {
    const Examples data(mixture(100, 3, 60));
    const TokenFiles files = data.open();
    const ExamplePacking packing(files, 64, false);
    for (const int64_t B : {1, 3}) {
        for (const int64_t limit : {int64_t(0), int64_t(300), int64_t(5)}) {
            const EvalBatches eval{files, B, 64, 1 << 30, -1, limit, &packing};
            std::vector<int64_t> targets;
            int64_t positions = 0;
            for (int64_t b = 0; b < eval.num_batches(); b++) {
                const Batch batch = eval.batch(b);
                const std::vector<int64_t> part = check_batch(batch, data);
                EXPECT_EQ(batch.loss_tokens, int64_t(part.size()));
                targets.insert(targets.end(), part.begin(), part.end());
                positions += int64_t(batch.tokens.size());
            }
            EXPECT_EQ(std::set<int64_t>(targets.begin(), targets.end()).size(), targets.size());
            EXPECT_TRUE(limit || int64_t(targets.size()) == data.loss_tokens());
            EXPECT_EQ(positions, limit == 0 ? 64 * packing.num_sequences() : limit == 300 ? 256 : 64);
        }
    }
}

}  // namespace
