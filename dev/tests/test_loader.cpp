// data/loader.h: every training sequence once per epoch, for any ranks, micro-steps and first step.
#include "data/loader.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "kernels/cross_entropy.h"
#include "runtime/error.h"

namespace {

static_assert(Batch::NO_TARGET == IGNORE_TARGET, "targets without a loss must be those that cross-entropy ignores");

class LoaderTest : public testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = testing::TempDir() + "loader_XXXXXX";
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        folder = pattern;
    }
    void TearDown() override { std::filesystem::remove_all(folder); }

    // Tokens cut into shards of the given size.
    TokenFiles make(const std::vector<int32_t>& tokens, size_t shard_size) const {
        for (size_t begin = 0, shard = 0; begin < tokens.size(); begin += shard_size, shard++) {
            const size_t n = std::min(shard_size, tokens.size() - begin);
            std::vector<uint32_t> header(256, 0);
            header[0] = 20240801;
            header[1] = 7;
            header[2] = uint32_t(n);
            std::ofstream out(folder + "/" + std::to_string(1000 + shard) + ".bin", std::ios::binary);
            out.write(reinterpret_cast<const char*>(header.data()), 1024);
            out.write(reinterpret_cast<const char*>(tokens.data() + begin), std::streamsize(n * 4));
        }
        return TokenFiles(folder + "/*.bin");
    }

    // Writes masks for the shards: token i is a loss token if is_loss_token(i).
    template <typename IsLossToken>
    TokenFiles mask(const TokenFiles& files, const IsLossToken& is_loss_token) const {
        int64_t token = 0;
        for (const std::string& path : files.paths()) {
            const int64_t n = int64_t(std::filesystem::file_size(path) - 1024) / 4;
            std::vector<uint32_t> header(256, 0);
            header[0] = 20261121;
            header[1] = 1;
            header[2] = uint32_t(n);
            std::ofstream out(path.substr(0, path.size() - 4) + ".mask", std::ios::binary);
            out.write(reinterpret_cast<const char*>(header.data()), 1024);
            for (int64_t i = 0; i < n; i++) out.put(char(is_loss_token(token++)));
        }
        return TokenFiles(files.pattern());
    }

    // 0, 1, 2, …: a token is its own place in the split.
    TokenFiles make_counting(int64_t n, size_t shard_size = 50) const {
        std::vector<int32_t> tokens;
        for (int64_t i = 0; i < n; i++) tokens.push_back(int32_t(i));
        return make(tokens, shard_size);
    }

    std::string folder;
};

LoaderOptions options(int64_t B, int64_t T) {
    LoaderOptions o;
    o.B = B;
    o.T = T;
    o.seed = 42;
    o.vocab_size = 1 << 30;
    return o;
}

// Indices of the training sequences of the next micro-batch, for counting tokens. Checks the rows.
std::vector<int64_t> take_sequences(Loader& loader, int64_t B, int64_t T) {
    const Batch& batch = loader.next();
    EXPECT_EQ(batch.tokens.size(), size_t(B * T));
    EXPECT_EQ(batch.targets.size(), size_t(B * T));
    std::vector<int64_t> sequences;
    for (int64_t b = 0; b < B; b++) {
        const int64_t begin = batch.tokens[size_t(b * T)];
        EXPECT_EQ(begin % T, 0);
        for (int64_t t = 0; t < T; t++) {
            EXPECT_EQ(batch.tokens[size_t(b * T + t)], begin + t);
            EXPECT_EQ(batch.targets[size_t(b * T + t)], begin + t + 1);
            EXPECT_EQ(batch.positions[size_t(b * T + t)], t);
        }
        EXPECT_EQ(batch.cum_seqlens[size_t(b)], b * T);
        sequences.push_back(begin / T);
    }
    EXPECT_EQ(batch.cum_seqlens.size(), size_t(B + 1));
    EXPECT_EQ(batch.cum_seqlens.back(), B * T);
    EXPECT_EQ(batch.max_seqlen, T);
    return sequences;
}

}  // namespace

TEST(Permute, IsABijection) {
    for (const uint64_t n :
         {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 97, 255, 256, 257, 1000, 4096, 65537, 1000000}) {
        std::vector<bool> hit(n, false);
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t p = permute(1, 2, i, n);
            ASSERT_LT(p, n);
            ASSERT_FALSE(hit[p]) << "n " << n << ": " << p << " twice";
            hit[p] = true;
        }
    }
    EXPECT_THROW(permute(1, 2, 5, 5), Error);
    EXPECT_THROW(permute(1, 2, 0, 0), Error);
}

TEST(Permute, WorksAtTheLimitsOf64Bits) {
    for (const uint64_t n : {(uint64_t(1) << 32) + 1, (uint64_t(1) << 62) + 3, ~uint64_t(0)}) {
        std::set<uint64_t> seen;
        for (uint64_t i = 0; i < 1000; i++) {
            for (const uint64_t at : {i, n - 1 - i}) {
                const uint64_t p = permute(9, 0, at, n);
                ASSERT_LT(p, n);
                ASSERT_TRUE(seen.insert(p).second);
            }
        }
    }
}

TEST(Permute, KeysAndEpochsGiveDifferentOrders) {
    const uint64_t n = 1000;
    int fixed = 0, same_epoch = 0, same_key = 0, neighbours = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t p = permute(1, 0, i, n);
        EXPECT_EQ(p, permute(1, 0, i, n));
        fixed += p == i;
        same_epoch += p == permute(1, 1, i, n);
        same_key += p == permute(2, 0, i, n);
        neighbours += i + 1 < n && permute(1, 0, i + 1, n) == p + 1;
    }
    for (const int count : {fixed, same_epoch, same_key, neighbours}) EXPECT_LE(count, 8);  // 1 each is expected
    // Small n too: 24 orders of 4 sequences, of which 200 epochs must show a good part.
    std::set<std::vector<uint64_t>> orders;
    for (uint64_t epoch = 0; epoch < 200; epoch++) {
        std::vector<uint64_t> order;
        for (uint64_t i = 0; i < 4; i++) order.push_back(permute(3, epoch, i, 4));
        orders.insert(order);
    }
    EXPECT_GE(orders.size(), 12u);
}

TEST(Permute, EveryPositionIsEquallyLikely) {
    // Where sequence 0 lands over 10000 epochs, n = 10: 1000 each, standard deviation 30.
    std::vector<int> counts(10, 0);
    for (uint64_t epoch = 0; epoch < 10000; epoch++) counts[permute(5, epoch, 0, 10)]++;
    for (const int count : counts) EXPECT_NEAR(count, 1000, 150);
}

TEST_F(LoaderTest, EachSequenceOncePerEpoch) {
    const int64_t T = 7, B = 3;
    const TokenFiles files =
        make_counting(7 * 26 + 1 + 4, 31);  // 26 sequences; sequences lie across shards; a tail of 4
    Loader loader({files}, options(B, T), 0);
    EXPECT_EQ(loader.num_training_sequences(), 26);
    EXPECT_EQ(loader.dropped_tokens(), 4);
    std::vector<int64_t> order;
    while (order.size() < 4 * 26)
        for (const int64_t w : take_sequences(loader, B, T)) order.push_back(w);
    std::set<std::vector<int64_t>> epochs;
    for (int64_t epoch = 0; epoch < 4; epoch++) {  // 26 isn't a multiple of 3: batches straddle the epochs
        const std::vector<int64_t> one(order.begin() + epoch * 26, order.begin() + (epoch + 1) * 26);
        EXPECT_EQ(std::set<int64_t>(one.begin(), one.end()).size(), 26u);
        epochs.insert(one);
    }
    EXPECT_EQ(epochs.size(), 4u);
    for (size_t i = 0; i < order.size(); i++) EXPECT_EQ(order[i], loader.sample(i).sequence);
}

TEST_F(LoaderTest, UnshuffledIsInOrder) {
    const TokenFiles files = make_counting(41);
    LoaderOptions o = options(3, 10);
    o.shuffle = false;
    Loader loader({files}, o, 0);
    EXPECT_EQ(loader.dropped_tokens(), 0);
    EXPECT_EQ(take_sequences(loader, 3, 10), (std::vector<int64_t>{0, 1, 2}));
    EXPECT_EQ(take_sequences(loader, 3, 10), (std::vector<int64_t>{3, 0, 1}));
}

TEST_F(LoaderTest, RanksAndMicroStepsSliceTheSameBatch) {
    const int64_t T = 4, G = 8, steps = 9;  // 72 samples of 27 sequences: more than two epochs
    const TokenFiles files = make_counting(27 * T + 3);
    std::vector<int64_t> expected;
    {
        Loader whole({files}, options(G, T), 0);
        for (int64_t s = 0; s < steps; s++)
            for (const int64_t w : take_sequences(whole, G, T)) expected.push_back(w);
    }
    for (const int64_t world : {1, 2, 4}) {
        for (const int64_t B : {1, 2}) {
            LoaderOptions o = options(B, T);
            o.world = world;
            o.micro_steps = G / (world * B);
            std::vector<std::unique_ptr<Loader>> ranks;
            for (o.rank = 0; o.rank < world; o.rank++)
                ranks.push_back(std::make_unique<Loader>(std::vector<TrainingSource>{files}, o, 0));
            std::vector<int64_t> order;
            for (int64_t micro = 0; micro < steps * o.micro_steps; micro++)
                for (auto& rank : ranks)
                    for (const int64_t w : take_sequences(*rank, B, T)) order.push_back(w);
            EXPECT_EQ(order, expected) << "world " << world << ", B " << B;
        }
    }
}

TEST_F(LoaderTest, StartingAtAStepMatchesContinuing) {
    const int64_t T = 4;
    const TokenFiles files = make_counting(27 * T + 1);
    LoaderOptions o = options(2, T);
    o.micro_steps = 3;
    o.world = 2;
    o.rank = 1;
    Loader from_start({files}, o, 0);
    for (int64_t step = 0; step < 12; step++) {
        Loader resumed({files}, o, step);
        for (int64_t micro = 0; micro < 3; micro++) {
            const std::vector<int64_t> expected = take_sequences(from_start, 2, T);
            EXPECT_EQ(take_sequences(resumed, 2, T), expected) << "step " << step;
        }
    }
}

TEST_F(LoaderTest, SeedsGiveDifferentOrders) {
    const TokenFiles files = make_counting(200 * 4 + 1);
    LoaderOptions o = options(50, 4);
    Loader a({files}, o, 0);
    o.seed = 43;
    Loader b({files}, o, 0);
    EXPECT_NE(take_sequences(a, 50, 4), take_sequences(b, 50, 4));
}

// Two data sets, 3 samples of the first for 2 of the second: exact counts, each sequence once an epoch of its own set,
// and the same order for any ranks and first step.
TEST_F(LoaderTest, MixesDataSetsInExactProportions) {
    const int64_t T = 4, G = 10, steps = 9;
    const TokenFiles a = make_counting(27 * T + 1);
    std::vector<int32_t> others;
    for (int32_t i = 0; i < 8 * T + 1; i++) others.push_back(1000 + i);
    const std::string top = folder;
    folder = top + "/b";
    std::filesystem::create_directory(folder);
    const TokenFiles b = make(others, 50);
    folder = top;
    const std::vector<TrainingSource> sources = {{a, nullptr, 6}, {b, nullptr, 4}};
    const auto starts = [&](Loader& loader, int64_t B) {
        const Batch& batch = loader.next();
        std::vector<int32_t> found;
        for (int64_t row = 0; row < B; row++) found.push_back(batch.tokens[size_t(row * T)]);
        return found;
    };
    std::vector<std::vector<int32_t>> expected;
    Loader whole(sources, options(G, T), 0);
    EXPECT_EQ(whole.num_training_sequences(0), 27);
    EXPECT_EQ(whole.num_training_sequences(1), 8);
    std::vector<int32_t> of_b;
    for (int64_t s = 0; s < steps; s++) {
        expected.push_back(starts(whole, G));
        EXPECT_EQ(std::count_if(expected.back().begin(), expected.back().end(), [](int32_t t) { return t < 1000; }), 6);
        for (const int32_t t : expected.back())
            if (t >= 1000) of_b.push_back(t);
    }
    for (size_t epoch = 0; epoch + 8 <= of_b.size(); epoch += 8)
        EXPECT_EQ(std::set<int32_t>(of_b.begin() + int64_t(epoch), of_b.begin() + int64_t(epoch) + 8).size(), 8u);
    for (const int64_t first : {0, 4}) {
        LoaderOptions o = options(1, T);
        o.world = 2;
        o.micro_steps = 5;
        std::vector<std::unique_ptr<Loader>> ranks;
        for (o.rank = 0; o.rank < 2; o.rank++) ranks.push_back(std::make_unique<Loader>(sources, o, first));
        for (int64_t s = first; s < steps; s++) {
            std::vector<int32_t> found;
            for (int64_t micro = 0; micro < 5; micro++)
                for (auto& rank : ranks) found.push_back(starts(*rank, 1)[0]);
            EXPECT_EQ(found, expected[size_t(s)]) << "step " << s;
        }
    }
}

// The targets are those of the tokens that the mask says; what is left is counted over all ranks alike.
TEST_F(LoaderTest, MaskedTokensAreNotTargets) {
    const auto is_loss_token = [](int64_t token) { return token % 3 == 0 || token > 150; };
    const TokenFiles plain = make_counting(203), files = mask(plain, is_loss_token);
    for (const int64_t world : {1, 2}) {
        std::vector<int64_t> counts;
        int64_t own = 0;
        for (int64_t rank = 0; rank < world; rank++) {
            LoaderOptions o = options(4 / world, 5);
            o.rank = rank;
            o.world = world;
            Loader loader({files}, o, 0), unmasked({plain}, o, 0);
            for (int64_t i = 0; i < 3; i++) {
                const Batch& batch = loader.next();
                const Batch& all = unmasked.next();
                EXPECT_EQ(all.loss_tokens, 20);
                EXPECT_EQ(batch.tokens, all.tokens);
                for (size_t t = 0; t < all.targets.size(); t++) {
                    EXPECT_EQ(batch.targets[t], is_loss_token(all.targets[t]) ? all.targets[t] : Batch::NO_TARGET);
                    own += batch.targets[t] != Batch::NO_TARGET;
                }
                counts.push_back(batch.loss_tokens);
            }
        }
        int64_t first = counts[0] + counts[1] + counts[2];
        EXPECT_EQ(first, own);
        for (size_t i = 3; i < counts.size(); i++) EXPECT_EQ(counts[i], counts[i - 3]);
    }
    for (const int32_t end : {-1, 7}) {
        const EvalBatches all{plain, 3, 8, 1 << 30, end, 0}, batches{files, 3, 8, 1 << 30, end, 0};
        ASSERT_EQ(batches.num_batches(), all.num_batches());
        int64_t counted = 0;
        for (int64_t b = 0; b < all.num_batches(); b++) {
            const Batch x = all.batch(b), y = batches.batch(b);
            EXPECT_EQ(x.tokens, y.tokens);
            int64_t left = 0;
            for (size_t t = 0; t < x.targets.size(); t++) {
                const bool kept = x.targets[t] != Batch::NO_TARGET && is_loss_token(x.targets[t]);
                EXPECT_EQ(y.targets[t], kept ? x.targets[t] : Batch::NO_TARGET);
                left += kept;
            }
            EXPECT_EQ(y.loss_tokens, left);
            counted += x.loss_tokens;
        }
        EXPECT_EQ(counted, all.num_tokens());
    }
}

TEST_F(LoaderTest, DocumentsSplitSequences) {
    // Documents 1 2 E | 3 E | 4 5 6 7 E | E | 8 9, with E = 0; T = 4: sequences [1 2 0 3] [0 4 5 6] [7 0 0 8],
    // target 9.
    const TokenFiles files = make({1, 2, 0, 3, 0, 4, 5, 6, 7, 0, 0, 8, 9}, 5);
    LoaderOptions o = options(3, 4);
    o.shuffle = false;
    o.documents = true;
    o.end_of_text = 0;
    Loader loader({files}, o, 0);
    const Batch& batch = loader.next();
    EXPECT_EQ(batch.tokens, (std::vector<int32_t>{1, 2, 0, 3, 0, 4, 5, 6, 7, 0, 0, 8}));
    EXPECT_EQ(batch.targets, (std::vector<int32_t>{2, 0, 3, 0, 4, 5, 6, 7, 0, 0, 8, 9}));
    EXPECT_EQ(batch.cum_seqlens, (std::vector<int32_t>{0, 3, 4, 5, 8, 10, 11, 12}));
    EXPECT_EQ(batch.positions, (std::vector<int32_t>{0, 1, 2, 0, 0, 0, 1, 2, 0, 1, 0, 0}));
    EXPECT_EQ(batch.max_seqlen, 3);

    // An end-of-text at the end of a sequence makes no empty sequence.
    LoaderOptions whole = o;
    whole.B = 2;
    whole.T = 5;
    Loader other({files}, whole, 0);
    EXPECT_EQ(other.next().cum_seqlens, (std::vector<int32_t>{0, 3, 5, 10}));
    o.end_of_text = -1;
    EXPECT_THROW(Loader({files}, o, 0), Error);
}

// With room for sequences all batches have one shape, except those with more sequences.
TEST_F(LoaderTest, RoomForSequences) {
    const TokenFiles files = make({1, 2, 0, 3, 0, 4, 5, 6, 7, 0, 0, 8, 9}, 5);
    LoaderOptions o = options(3, 4);
    o.shuffle = false;
    o.documents = true;
    o.end_of_text = 0;
    for (const int64_t room : {0, 6, 7, 9}) {
        o.max_sequences = room;
        Loader loader({files}, o, 0);
        const Batch& batch = loader.next();
        std::vector<int32_t> expected{0, 3, 4, 5, 8, 10, 11, 12};
        const bool fits = room >= 7;
        if (fits) expected.resize(size_t(room) + 1, 12);
        EXPECT_EQ(batch.cum_seqlens, expected);
        EXPECT_EQ(batch.num_sequences, fits ? 7 : 0);
        EXPECT_EQ(batch.max_seqlen, fits ? 4 : 3);
    }
}

TEST_F(LoaderTest, ErrorsReachTheCaller) {
    const TokenFiles files = make_counting(101);
    LoaderOptions o = options(1, 10);
    o.shuffle = false;
    o.vocab_size = 35;  // token 35 is a target of sequence 3
    Loader loader({files}, o, 0);
    for (int64_t w = 0; w < 3; w++) EXPECT_EQ(loader.next().tokens[0], w * 10);  // those before it are still good
    for (int again = 0; again < 2; again++) {
        try {
            loader.next();
            FAIL() << "a token outside the vocabulary went through";
        } catch (const Error& e) {
            EXPECT_NE(std::string(e.what()).find("1000.bin: token 35 is 35"), std::string::npos) << e.what();
        }
    }
}

TEST_F(LoaderTest, InvalidOptionsAreErrors) {
    const TokenFiles files = make_counting(10);
    EXPECT_NO_THROW(Loader({files}, options(1, 9), 0));
    EXPECT_THROW(Loader({files}, options(1, 10), 0), Error);  // 10 tokens make a sequence of 9 + 1
    EXPECT_THROW(Loader({files}, options(0, 5), 0), Error);
    EXPECT_THROW(Loader({files}, options(1, 0), 0), Error);
    EXPECT_THROW(Loader({files}, options(int64_t(1) << 62, 5), 0), Error);
    EXPECT_THROW(Loader({files}, options(1 << 16, 1 << 16), 0), Error);
    EXPECT_THROW(Loader({files}, options(1, 5), -1), Error);
    EXPECT_THROW(Loader({files}, options(2, 5), INT64_MAX / 2), Error);
    LoaderOptions o = options(1, 5);
    o.world = 2;
    o.rank = 2;
    EXPECT_THROW(Loader({files}, o, 0), Error);
    o.rank = -1;
    EXPECT_THROW(Loader({files}, o, 0), Error);
    o = options(1, 5);
    o.micro_steps = 0;
    EXPECT_THROW(Loader({files}, o, 0), Error);
}

TEST_F(LoaderTest, EvaluationScoresEachTokenOnce) {
    const int32_t end = 999;
    for (const int64_t n : {1, 2, 5, 6, 12, 13, 24, 25, 37}) {
        std::filesystem::remove_all(folder);
        std::filesystem::create_directory(folder);
        const TokenFiles files = make_counting(n, 5);
        for (const int64_t B : {1, 2, 3}) {
            for (const int64_t T : {1, 4, 6, 50}) {
                for (const int32_t end_of_text : {end, -1}) {
                    for (const int64_t limit : {0, 3, 12, 1000}) {
                        const EvalBatches eval{files, B, T, 1000, end_of_text, limit};
                        const int64_t first = end_of_text < 0 ? 1 : 0;  // the first target
                        if (n == 1 && first == 1) {
                            EXPECT_THROW(eval.num_tokens(), Error);
                            continue;
                        }
                        const int64_t counts = limit ? std::min(limit, n - first) : n - first;
                        ASSERT_EQ(eval.num_tokens(), counts);
                        int64_t next = first;
                        for (int64_t b = 0; b < eval.num_batches(); b++) {
                            const Batch batch = eval.batch(b);
                            ASSERT_EQ(batch.tokens.size(), size_t(B * T));
                            ASSERT_EQ(batch.cum_seqlens.size(), size_t(B + 1));
                            int64_t here = 0;
                            for (size_t i = 0; i < batch.tokens.size(); i++) {
                                ASSERT_TRUE(0 <= batch.tokens[i] && batch.tokens[i] < 1000);
                                ASSERT_EQ(batch.positions[i], int64_t(i) % T);
                                if (batch.targets[i] == Batch::NO_TARGET) continue;
                                ASSERT_EQ(int64_t(i), here++);  // positions without a loss are at the end
                                ASSERT_EQ(batch.targets[i], next);
                                ASSERT_EQ(batch.tokens[i], next == 0 ? end : next - 1);
                                next++;
                            }
                            ASSERT_GT(here, 0);  // no batch for nothing
                        }
                        ASSERT_EQ(next, first + counts);
                        EXPECT_THROW(eval.batch(eval.num_batches()), Error);
                        EXPECT_THROW(eval.batch(-1), Error);
                    }
                }
            }
        }
    }
}
