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
// shows where it was read; 0 is padding. Every third token of an example is a loss token, and its last one. With pairs
// every second example is a rejected one.
class Examples {
  public:
    explicit Examples(const std::vector<int64_t>& lengths, bool pairs = false) {
        std::vector<int32_t> tokens;
        for (const int64_t n : lengths) {
            begins.push_back(int64_t(tokens.size()));
            for (int64_t i = 0; i < n; i++) {
                tokens.push_back(int32_t(tokens.size()) + 1);
                flags.push_back(i == 0 ? TokenFiles::EXAMPLE_START : i % 3 == 0 || i == n - 1);
            }
            if (pairs && begins.size() % 2 == 0) flags[size_t(begins.back())] |= TokenFiles::REJECTED;
        }
        for (size_t begin = 0, shard = 0; begin < tokens.size(); begin += 1000, shard++) {
            const size_t n = std::min<size_t>(1000, tokens.size() - begin);
            const std::string path = dir.file(std::to_string(100000 + shard));
            write(path + ".bin", 20240801, 7, tokens.data() + begin, n, 4);
            write(path + ".mask", 20261121, pairs ? 3 : 2, flags.data() + begin, n, 1);
        }
    }
    TokenFiles open() const { return TokenFiles(dir.file("*.bin")); }
    bool is_loss_token(int64_t token) const { return flags[size_t(token)] == TokenFiles::LOSS; }
    const std::vector<int64_t>& starts() const { return begins; }
    int64_t begin_of(int64_t token) const { return *(std::upper_bound(begins.begin(), begins.end(), token) - 1); }
    int64_t loss_tokens() const { return std::count(flags.begin(), flags.end(), TokenFiles::LOSS); }

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

  private:
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

// The loaders of two ranks with two micro-steps each, from a step on.
std::vector<std::unique_ptr<Loader>> two_ranks(const TokenFiles& files, const ExamplePacking& packing, int64_t first) {
    std::vector<std::unique_ptr<Loader>> ranks;
    for (int64_t rank = 0; rank < 2; rank++) {
        LoaderOptions o = options(packing, 1);
        o.rank = rank;
        o.world = 2;
        o.micro_steps = 2;
        ranks.push_back(std::make_unique<Loader>(std::vector<TrainingSource>{{files, &packing}}, o, first));
    }
    return ranks;
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

std::string packing_error(const TokenFiles& files, int64_t T, bool skip) {
    try {
        ExamplePacking(files, T, skip);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// Pair p is examples 2·p and 2·p + 1, whatever is left out: side by side in one training sequence, each once.
TEST(Packing, PairsStayWholeAndAdjacent) {
    for (const uint64_t seed : {1, 2, 3}) {
        std::vector<int64_t> lengths;
        for (int64_t i = 0; i < 600; i++) lengths.push_back(2 + int64_t(philox(seed, uint64_t(i), 0).v[0] % 49));
        const Examples data(lengths, true);
        const TokenFiles files = data.open();
        const int64_t T = 70;
        const ExamplePacking packing(files, T, true);
        std::set<int64_t> found;
        int64_t most = 0, used = 0;
        for (int64_t s = 0; s < packing.num_sequences(); s++) {
            const ExamplePacking::Range range = packing.of_sequence(s);
            ASSERT_EQ(range.size() % 2, 0);
            most = std::max(most, range.size() / 2);
            int64_t positions = 0;
            for (const PackedExample* e = range.begin(); e != range.end(); e += 2) {
                ASSERT_EQ(e[0].pair, e[1].pair);
                EXPECT_EQ(e[0].begin, data.starts()[size_t(2 * e->pair)]);
                EXPECT_EQ(e[1].begin, data.starts()[size_t(2 * e->pair + 1)]);
                EXPECT_EQ(e[0].tokens, lengths[size_t(2 * e->pair)]);
                EXPECT_EQ(e[1].tokens, lengths[size_t(2 * e->pair + 1)]);
                EXPECT_TRUE(found.insert(e->pair).second);
                positions += e[0].tokens + e[1].tokens - 2;
            }
            EXPECT_LE(positions, T);
            used += positions;
        }
        int64_t fitting = 0;
        for (int64_t p = 0; p < 300; p++) fitting += lengths[size_t(2 * p)] + lengths[size_t(2 * p + 1)] - 2 <= T;
        EXPECT_GT(fitting, 200);
        EXPECT_LT(fitting, 300);
        EXPECT_EQ(int64_t(found.size()), fitting);
        EXPECT_TRUE(packing.has_pairs());
        EXPECT_EQ(packing.num_pairs(), fitting);
        EXPECT_EQ(packing.num_too_long(), 300 - fitting);
        EXPECT_EQ(packing.num_pairs_in_files(), 300);
        EXPECT_EQ(packing.max_pairs(), most);
        EXPECT_EQ(packing.padding(), packing.num_sequences() * T - used);
    }
}

TEST(Packing, LongPairsAreAnErrorOrLeftOut) {
    const Examples data({5, 7, 4, 2, 11, 12}, true);  // 10, 4 and 21 positions
    const TokenFiles files = data.open();
    const std::string error = packing_error(files, 9, false);
    EXPECT_NE(error.find("2 of 3 pairs are longer than --seq-len 9; raise it (the longest needs 21), or leave them out "
                         "with --too-long skip"),
              std::string::npos)
        << error;
    EXPECT_NE(packing_error(files, 3, true).find("none of 3 pairs fits into --seq-len 3"), std::string::npos);
    EXPECT_EQ(ExamplePacking(files, 10, true).num_pairs(), 2);
    EXPECT_EQ(ExamplePacking(files, 21, false).num_pairs(), 3);
}

TEST(Packing, DamagedPairsAreErrors) {
    const TempDir dir;
    const auto error = [&](const std::vector<uint8_t>& flags) {
        const std::vector<int32_t> tokens(flags.size(), 1);
        Examples::write(dir.file("a.bin"), 20240801, 7, tokens.data(), tokens.size(), 4);
        Examples::write(dir.file("a.mask"), 20261121, 3, flags.data(), flags.size(), 1);
        return packing_error(TokenFiles(dir.file("a.bin")), 8, false);
    };
    EXPECT_EQ(error({2, 1, 6, 1, 2, 0, 1, 6, 1}), "");
    const std::pair<std::vector<uint8_t>, const char*> cases[] = {
        {{2, 1, 6, 1, 2, 1, 2, 1}, "a.mask: pair 2 has two chosen responses in a row"},
        {{2, 1, 6, 1, 6, 1, 2, 1}, "a.mask: pair 2 has two rejected responses in a row"},
        {{6, 1, 2, 1}, "a.mask: pair 1 has two rejected responses in a row"},
        {{2, 1, 6, 1, 2, 1}, "a.bin: ends with the chosen response of pair 2, without its rejected one"},
        {{2, 0, 0, 6, 1}, "a.mask: the chosen response of pair 1 has no loss tokens"},
        {{2, 1, 6, 1, 2, 1, 6}, "a.mask: the rejected response of pair 2 has no loss tokens"}};
    for (const auto& [flags, expected] : cases)
        EXPECT_NE(error(flags).find(expected), std::string::npos) << error(flags) << " instead of " << expected;
}

// The pairs of a batch, which must be the examples of its attention sequences, in their order.
std::vector<int64_t> check_pairs(const Batch& batch, const Examples& data, int64_t T) {
    std::vector<int64_t> indices;
    int64_t tokens = 0;
    for (const Batch::Pair& pair : batch.pairs) {
        EXPECT_GE(pair.chosen, tokens);
        EXPECT_EQ(pair.chosen / T, (pair.end - 1) / T);  // one training sequence
        const std::pair<int64_t, int64_t> sides[] = {{pair.chosen, pair.rejected}, {pair.rejected, pair.end}};
        for (int64_t side = 0; side < 2; side++) {
            const auto [begin, end] = sides[side];
            const auto at = std::find(batch.cum_seqlens.begin(), batch.cum_seqlens.end(), begin);
            EXPECT_TRUE(at != batch.cum_seqlens.end() && at[1] == end);
            EXPECT_EQ(batch.tokens[size_t(begin)] - 1, data.starts()[size_t(2 * pair.index + side)]);
        }
        indices.push_back(pair.index);
        tokens = pair.end;
    }
    return indices;
}

TEST(Packing, BatchesNameTheirPairs) {
    const Examples data(mixture(400, 2, 60), true), others(mixture(60, 2, 30), true);
    const TokenFiles files = data.open(), other_files = others.open();
    const ExamplePacking packing(files, 64, true), other_packing(other_files, 64, true);
    EXPECT_GT(packing.num_too_long(), 0);
    Loader whole({{files, &packing}}, options(packing, 4), 0);
    std::vector<std::vector<int64_t>> steps;
    std::set<int64_t> seen;
    const size_t capacity = size_t(4 * packing.max_pairs());
    for (int64_t i = 0; 4 * i < packing.num_sequences(); i++) {
        const Batch& batch = whole.next();
        steps.push_back(check_pairs(batch, data, 64));
        EXPECT_EQ(batch.pairs_of_all_ranks, int64_t(batch.pairs.size()));
        EXPECT_GE(batch.pairs.capacity(), capacity);
        EXPECT_LE(batch.pairs.size(), capacity);
        seen.insert(steps.back().begin(), steps.back().end());
    }
    EXPECT_EQ(int64_t(seen.size()), packing.num_pairs());

    const std::vector<std::unique_ptr<Loader>> ranks = two_ranks(files, packing, 0);
    for (const std::vector<int64_t>& step : steps) {
        std::vector<int64_t> pairs;
        for (int64_t micro = 0; micro < 2; micro++) {
            const Batch *const first = &ranks[0]->next(), *const second = &ranks[1]->next();
            EXPECT_EQ(first->pairs_of_all_ranks, second->pairs_of_all_ranks);
            EXPECT_EQ(first->pairs_of_all_ranks, int64_t(first->pairs.size() + second->pairs.size()));
            for (const Batch* batch : {first, second})
                for (const int64_t pair : check_pairs(*batch, data, 64)) pairs.push_back(pair);
        }
        EXPECT_EQ(pairs, step);
    }

    // Two data sets: a pair names its own. A sequence twice in a batch: twice the pairs.
    Loader both({{files, &packing}, {other_files, &other_packing}}, options(packing, 200), 0);
    const Batch& mixed = both.next();
    int64_t from_others = 0;
    std::map<std::pair<int32_t, int64_t>, int64_t> times;
    int64_t most_times = 0;
    for (const Batch::Pair& pair : mixed.pairs) {
        const Examples& source = pair.source ? others : data;
        EXPECT_EQ(mixed.tokens[size_t(pair.chosen)] - 1, source.starts()[size_t(2 * pair.index)]);
        EXPECT_EQ(mixed.tokens[size_t(pair.rejected)] - 1, source.starts()[size_t(2 * pair.index + 1)]);
        from_others += pair.source;
        most_times = std::max(most_times, ++times[{pair.source, pair.index}]);
    }
    EXPECT_GT(from_others, 0);
    EXPECT_LT(from_others, int64_t(mixed.pairs.size()));
    EXPECT_GT(most_times, 1);
    EXPECT_EQ(mixed.pairs_of_all_ranks, int64_t(mixed.pairs.size()));
}

TEST(Packing, EvaluationHasEachPairOnce) {
    const Examples data(mixture(200, 2, 60), true);
    const TokenFiles files = data.open();
    const ExamplePacking packing(files, 128, false);
    const EvalBatches eval{files, 3, 128, 1 << 30, -1, 0, &packing};
    std::vector<int64_t> pairs;
    for (int64_t b = 0; b < eval.num_batches(); b++) {
        const Batch batch = eval.batch(b);
        EXPECT_EQ(batch.pairs_of_all_ranks, int64_t(batch.pairs.size()));
        for (const int64_t pair : check_pairs(batch, data, 128)) pairs.push_back(pair);
    }
    std::sort(pairs.begin(), pairs.end());
    std::vector<int64_t> all(100);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(pairs, all);
}

TEST(Packing, PairsAreNotMixedWithOtherData) {
    const Examples data(mixture(50, 2, 30), true), others(mixture(50, 2, 30));
    const TokenFiles files = data.open(), other_files = others.open();
    const ExamplePacking packing(files, 64, false), other_packing(other_files, 64, false);
    const auto error = [&](const std::vector<TrainingSource>& sources) {
        try {
            Loader(sources, options(packing, 1), 0);
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    for (const bool pairs_first : {true, false}) {
        const TrainingSource a(files, &packing), b(other_files, &other_packing);
        const std::string message = error(pairs_first ? std::vector{a, b} : std::vector{b, a});
        EXPECT_NE(message.find(other_files.pattern() + ": holds no preference pairs, unlike " + files.pattern()),
                  std::string::npos)
            << message;
    }
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
    const std::vector<std::unique_ptr<Loader>> ranks = two_ranks(files, packing, first);
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
