// Sampling: exact against the oracle token by token, the distribution by a χ² test, ties, independence of the batch.
#include "kernels/generation/sampling.h"

#include <algorithm>
#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/generation/exp2_product.h"

namespace {

class SamplingDTypes : public DTypeTest {};

constexpr double INF = std::numeric_limits<double>::infinity();

SamplingOptions options(float temperature, int64_t top_k = 0, uint64_t seed = 1) {
    SamplingOptions o;
    o.temperature = temperature;
    o.top_k = top_k;
    o.seed = seed;
    return o;
}

Tensor as_int64(const TestArray& bytes) {
    const Tensor t = bytes;
    return make_tensor(t.data, DType::I64, t.device, {t.shape[0] / 8});
}

// What rows with penalties and masks read and write, by slot.
struct Slots {
    Tensor seen, counts, masks;
};

std::vector<int32_t> sample(const TestArray& logits, int64_t V, const std::vector<int64_t>& sequences,
                            const std::vector<int64_t>& steps, const std::vector<SamplingRow>& rows,
                            const Slots& slots = {}) {
    constexpr int64_t SIZE = sizeof(SamplingRow);
    const int64_t B = int64_t(sequences.size());
    const TestArray ids = TestArray::ints(std::vector<int32_t>(sequences.size(), -7), {B});
    const TestArray s = TestArray::bytes(sequences.data(), B * 8), t = TestArray::bytes(steps.data(), B * 8),
                    r = TestArray::bytes(rows.data(), int64_t(rows.size()) * SIZE);
    SamplingBatch batch;
    batch.rows = make_tensor(r.tensor().data, DType::U8, r.tensor().device, {int64_t(rows.size()), SIZE});
    batch.sequences = as_int64(s);
    batch.steps = as_int64(t);
    for (const SamplingRow& row : rows) batch.classes |= row.classes;
    batch.seen = slots.seen;
    batch.counts = slots.counts;
    batch.masks = slots.masks;
    const TestArray scratch = TestArray::scratch(sampling_scratch(B, V, batch.classes));
    sample_tokens(ids, logits, V, batch, scratch, Stream{});
    return ids.fetch_ints();
}

// All rows with the same options, each with a slot of its own.
std::vector<int32_t> sample(const TestArray& logits, int64_t V, const std::vector<int64_t>& sequences,
                            const std::vector<int64_t>& steps, const SamplingOptions& o, const Tensor& seen = {}) {
    std::vector<SamplingRow> rows;
    for (size_t b = 0; b < sequences.size(); b++) rows.push_back(sampling_row(o, V, int64_t(b)));
    return sample(logits, V, sequences, steps, rows, {seen, {}, {}});
}

std::vector<int32_t> sample_row(const std::vector<double>& logits, const SamplingOptions& o, int64_t count = 1) {
    std::vector<double> rows;
    std::vector<int64_t> sequences, steps;
    for (int64_t i = 0; i < count; i++) {
        rows.insert(rows.end(), logits.begin(), logits.end());
        sequences.push_back(0);
        steps.push_back(i);
    }
    const int64_t V = int64_t(logits.size());
    return sample(TestArray::of(rows, {count, V}), V, sequences, steps, o);
}

TEST(Sampling, ArgmaxTakesTheLowestIdOfTies) {
    EXPECT_EQ(sample_row({1, 5, 5, 2}, options(0))[0], 1);
    EXPECT_EQ(sample_row({-3, -1, -2, -1}, options(0))[0], 1);
    EXPECT_EQ(sample_row({-INF, -1e30, -INF}, options(0))[0], 1);
    EXPECT_EQ(sample_row({0, 0, 0}, options(0))[0], 0);
    EXPECT_EQ(sample_row({7}, options(0))[0], 0);
    EXPECT_EQ(sample_row({1, 2, 3}, options(0, 1))[0], 2);
}

TEST(Sampling, TopOneIsArgmaxAtAnyTemperature) {
    for (const float temperature : {0.1f, 1.0f, 100.0f}) {
        for (const int32_t id : sample_row({-9, -4, -8, -4}, options(temperature, 1), 50)) EXPECT_EQ(id, 1);
    }
    for (const int32_t id : sample_row({1, 2, 3}, options(1e-30f), 50)) EXPECT_EQ(id, 2);
}

// Equal logits at the threshold of top-k: the lower ids are kept. −0 equals 0.
TEST(Sampling, TopKTies) {
    auto sampled_tokens = [](const std::vector<double>& logits, int64_t k) {
        std::vector<bool> seen(logits.size());
        for (const int32_t id : sample_row(logits, options(3, k), 400)) seen[size_t(id)] = true;
        return seen;
    };
    EXPECT_EQ(sampled_tokens({1, 2, 1, 1, 2}, 3), (std::vector<bool>{true, true, false, false, true}));
    EXPECT_EQ(sampled_tokens({-1, -1, -1, -1}, 2), (std::vector<bool>{true, true, false, false}));
    EXPECT_EQ(sampled_tokens({-0.0, 0.0, 0.0}, 2), (std::vector<bool>{true, true, false}));
    EXPECT_EQ(sampled_tokens({-INF, 0, -INF, 0}, 3),
              (std::vector<bool>{false, true, false, true}));  // e^−∞ is never sampled
    EXPECT_EQ(sampled_tokens({1, 2, 3}, 3), (std::vector<bool>{true, true, true}));
    EXPECT_EQ(sampled_tokens({1, 2, 3}, 1000), (std::vector<bool>{true, true, true}));
}

// Each token is the one that the oracle samples with the same uniform number.
TEST_P(SamplingDTypes, MatchesOracle) {
    constexpr int64_t B = 300, V = 101, Vp = 128;
    std::vector<double> rows = TestArray::random({B, Vp}, 5, 2, -30).values();
    for (int64_t b = 0; b < B; b++) {
        std::fill(rows.begin() + b * Vp + V, rows.begin() + (b + 1) * Vp, 1e30);  // padded columns never count
    }
    const TestArray logits = TestArray::of(activation(), rows, {B, Vp});
    std::vector<int64_t> sequences, steps;
    for (int64_t b = 0; b < B; b++) {
        sequences.push_back(b * 3);
        steps.push_back(1000 - b);
    }
    for (const float temperature : {0.0f, 0.7f, 1.0f, 2.5f}) {
        for (const int64_t k : {0, 1, 5, 100, 101, 500}) {
            const std::vector<int32_t> got = sample(logits, V, sequences, steps, options(temperature, k, 42));
            for (int64_t b = 0; b < B; b++) {
                const Philox4 r = philox(42, uint64_t(sequences[size_t(b)]), uint64_t(steps[size_t(b)]));
                const std::vector<double> p =
                    reference::sampling_probabilities(logits.data() + b * Vp, V, double(temperature), k);
                ASSERT_EQ(got[size_t(b)], reference::sample(p, uniform01(r.v[0], r.v[1])))
                    << "row " << b << " temperature " << temperature << " top_k " << k;
            }
        }
    }
}

// A vocabulary of a real size: every thread has many logits, and most ties are far from the threshold.
TEST_P(SamplingDTypes, LargeVocabulary) {
    constexpr int64_t B = 24, V = 50257, Vp = 50304;
    const TestArray logits = TestArray::random(activation(), {B, Vp}, 6, 3);
    std::vector<int64_t> sequences, steps;
    for (int64_t b = 0; b < B; b++) {
        sequences.push_back(b);
        steps.push_back(5);
    }
    for (const int64_t k : {0, 40, 20000}) {
        const std::vector<int32_t> got = sample(logits, V, sequences, steps, options(0.9f, k, 7));
        for (int64_t b = 0; b < B; b++) {
            const Philox4 r = philox(7, uint64_t(b), 5);
            const std::vector<double> p = reference::sampling_probabilities(logits.data() + b * Vp, V, double(0.9f), k);
            ASSERT_EQ(got[size_t(b)], reference::sample(p, uniform01(r.v[0], r.v[1]))) << "row " << b << " top_k " << k;
        }
    }
}

// Filters one by one and together, over vocabularies smaller and larger than one chunk of the CUDA kernels.
TEST_P(SamplingDTypes, FiltersMatchOracle) {
    for (const auto& [V, B] : {std::pair<int64_t, int64_t>{37, 60}, {9000, 12}}) {
        const int64_t Vp = (V + 127) / 128 * 128;
        const TestArray logits = TestArray::random(activation(), {B, Vp}, 8, 2.5);
        std::vector<int64_t> sequences, steps(size_t(B), 3);
        for (int64_t b = 0; b < B; b++) sequences.push_back(b);
        for (const float temperature : {0.6f, 1.3f})
            for (const int64_t k : {0, 20, 1024, 3000})
                for (const float p : {1.0f, 0.9f, 0.3f, 0.001f})
                    for (const float min_p : {0.0f, 0.05f, 1.0f}) {
                        SamplingOptions o = options(temperature, k, 11);
                        o.top_p = p;
                        o.min_p = min_p;
                        const std::vector<int32_t> got = sample(logits, V, sequences, steps, o);
                        for (int64_t b = 0; b < B; b++) {
                            const Philox4 r = philox(11, uint64_t(b), 3);
                            const std::vector<double> probabilities = reference::sampling_probabilities(
                                logits.data() + b * Vp, V, double(temperature), k, double(p), double(min_p));
                            ASSERT_EQ(got[size_t(b)], reference::sample(probabilities, uniform01(r.v[0], r.v[1])))
                                << "V " << V << " row " << b << " temperature " << temperature << " top_k " << k
                                << " top_p " << p << " min_p " << min_p;
                        }
                    }
    }
}

// Half of four equal tokens are two: the lower ids. A single token may have more than top_p.
TEST(Sampling, TopPTies) {
    auto sampled_tokens = [](const std::vector<double>& logits, float p, float min_p, int64_t k = 0) {
        SamplingOptions o = options(1, k);
        o.top_p = p;
        o.min_p = min_p;
        std::vector<bool> seen(logits.size());
        for (const int32_t id : sample_row(logits, o, 400)) seen[size_t(id)] = true;
        return seen;
    };
    EXPECT_EQ(sampled_tokens({2, 2, 2, 2}, 0.5f, 0), (std::vector<bool>{true, true, false, false}));
    EXPECT_EQ(sampled_tokens({2, 2, 2, 2}, 0.51f, 0), (std::vector<bool>{true, true, true, false}));
    EXPECT_EQ(sampled_tokens({-1, 3, -1, -1}, 0.5f, 0), (std::vector<bool>{false, true, false, false}));
    EXPECT_EQ(sampled_tokens({2, 2, 2, 2}, 1, 1),
              (std::vector<bool>{true, true, true, true}));  // all as likely as the most likely one
    EXPECT_EQ(sampled_tokens({0, 2, 1, 2}, 1, 1), (std::vector<bool>{false, true, false, true}));
    EXPECT_EQ(sampled_tokens({2, 2, 2, 2}, 0.5f, 0, 3), (std::vector<bool>{true, true, false, false}));
}

// Sampled tokens are marked; a penalty lowers positive and negative logits, for argmax too.
TEST_P(SamplingDTypes, RepeatPenalty) {
    constexpr int64_t B = 40, V = 70, Vp = 128, words = (V + 31) / 32;
    const TestArray logits = TestArray::random(activation(), {B, Vp}, 21, 2);
    std::vector<int32_t> marks(B * words);
    for (size_t i = 0; i < marks.size(); i++) marks[i] = int32_t(philox(5, i, 0).v[0]);
    std::vector<int64_t> sequences, steps(size_t(B), 9);
    for (int64_t b = 0; b < B; b++) sequences.push_back(b);
    for (const float temperature : {0.0f, 0.9f})
        for (const auto& [k, p] : {std::pair<int64_t, float>{0, 1.0f}, {10, 1.0f}, {0, 0.8f}, {30, 0.8f}}) {
            SamplingOptions o = options(temperature, k, 4);
            o.repeat_penalty = 1.7f;
            o.top_p = p;
            const TestArray seen = TestArray::ints(marks, {B, words});
            const std::vector<int32_t> got = sample(logits, V, sequences, steps, o, seen);
            std::vector<int32_t> expected_marks = marks;
            for (int64_t b = 0; b < B; b++) {
                std::vector<bool> of_row(static_cast<size_t>(V));
                for (int64_t v = 0; v < V; v++)
                    of_row[size_t(v)] = uint32_t(marks[size_t(b * words + v / 32)]) >> (v % 32) & 1;
                const std::vector<double> l = reference::penalised(logits.data() + b * Vp, V, of_row, double(1.7f));
                const Philox4 r = philox(4, uint64_t(b), 9);
                const std::vector<double> probabilities =
                    reference::sampling_probabilities(l.data(), V, double(temperature), k, double(p));
                const int32_t id = got[size_t(b)];
                ASSERT_EQ(id, reference::sample(probabilities, uniform01(r.v[0], r.v[1])))
                    << "row " << b << " top_k " << k;
                expected_marks[size_t(b * words + id / 32)] |= int32_t(1u << (id % 32));
            }
            EXPECT_EQ(seen.fetch_ints(), expected_marks);
        }
}

// χ² of 100,000 samples over 8 tokens, for each filter: below the 1 − 1e-6 quantile of 7 degrees of freedom, 40.5.
TEST(Sampling, Distribution) {
    const std::vector<double> logits{-1, 0.5, -2, 1.5, 0, -0.5, -1.5, 1};
    struct Filter {
        int64_t k;
        float p, min_p;
    };
    for (const auto& [k, top_p, min_p] : {Filter{0, 1, 0}, {5, 1, 0}, {0, 0.85f, 0}, {0, 1, 0.2f}, {6, 0.9f, 0.15f}}) {
        const std::vector<double> p =
            reference::sampling_probabilities(logits.data(), 8, double(0.8f), k, double(top_p), double(min_p));
        constexpr int64_t samples = 100000;
        SamplingOptions o = options(0.8f, k, 77);
        o.top_p = top_p;
        o.min_p = min_p;
        std::vector<int64_t> counts(8);
        for (const int32_t id : sample_row(logits, o, samples)) counts[size_t(id)]++;
        double chi2 = 0;
        for (size_t v = 0; v < 8; v++) {
            if (p[v] == 0) {
                EXPECT_EQ(counts[v], 0);
                continue;
            }
            const double expected = p[v] * samples, difference = double(counts[v]) - expected;
            chi2 += difference * difference / expected;
        }
        EXPECT_LT(chi2, 40.5) << "top_k " << k << " top_p " << top_p << " min_p " << min_p;
    }
}

// The sampled token depends on seed, sequence and step, not on its row or the other rows of the batch.
TEST(Sampling, DoesNotDependOnTheBatch) {
    constexpr int64_t B = 64, V = 50;
    const TestArray logits = TestArray::random({B, V}, 9, 0.1);
    std::vector<int64_t> sequences, steps(size_t(B), 12);
    for (int64_t b = 0; b < B; b++) sequences.push_back(b);
    const std::vector<int32_t> together = sample(logits, V, sequences, steps, options(1));
    EXPECT_EQ(together, sample(logits, V, sequences, steps, options(1)));
    for (int64_t b = B - 1; b >= 0; b--) {
        const std::vector<double> row(logits.data() + b * V, logits.data() + (b + 1) * V);
        EXPECT_EQ(sample(TestArray::of(row, {1, V}), V, {b}, {12}, options(1))[0], together[size_t(b)]) << b;
    }
    auto differing = [&](const std::vector<int32_t>& other) {
        int64_t n = 0;
        for (size_t b = 0; b < together.size(); b++) n += other[b] != together[b];
        return n;
    };
    EXPECT_GT(differing(sample(logits, V, sequences, std::vector<int64_t>(size_t(B), 13), options(1))), B / 2);
    EXPECT_GT(
        differing(sample(logits, V, std::vector<int64_t>(sequences.rbegin(), sequences.rend()), steps, options(1))),
        B / 2);
    EXPECT_GT(differing(sample(logits, V, sequences, steps, options(1, 0, 2))), B / 2);
}

// Thousands of consecutive tokens that can't be sampled, as where a grammar or a mask rules them out.
TEST(Sampling, NeverSamplesZeroProbabilityRuns) {
    constexpr int64_t V = 50000;
    std::vector<double> logits(size_t(V), -INF);
    logits[20000] = 1;
    logits[49000] = 1;
    for (const int64_t k : {0, 5, 1000, 2000})
        for (const float p : {1.0f, 0.9f}) {
            SamplingOptions o = options(0.7f, k);
            o.top_p = p;
            int64_t first = 0, second = 0;
            for (const int32_t id : sample_row(logits, o, 100)) {
                first += id == 20000;
                second += id == 49000;
            }
            EXPECT_EQ(first + second, 100) << "top_k " << k << " top_p " << p;
            EXPECT_GT(first, 20) << "top_k " << k << " top_p " << p;
            EXPECT_GT(second, 20) << "top_k " << k << " top_p " << p;
        }
}

// The CUDA kernels process a row in chunks and read aligned rows in vectors: vocabularies around the sizes of both, and
// rows with any alignment. The token is that of the oracle, for a row alone and for one of 64 and of 70.
TEST_P(SamplingDTypes, ChunksAndAlignment) {
    for (const int64_t V : {1, 15, 31, 33, 511, 512, 513, 1025, 5001, 50257})
        for (const int64_t padding : {0, 1, 16}) {
            const int64_t B = V > 10000 ? 6 : 70, Vp = V % 2 + V + padding;
            std::vector<double> rows = TestArray::random({B, Vp}, uint64_t(V), 2.5).values();
            for (int64_t b = 0; b < B; b++) std::fill(rows.begin() + b * Vp + V, rows.begin() + (b + 1) * Vp, 1e30);
            const TestArray logits = TestArray::of(activation(), rows, {B, Vp});
            for (const float temperature : {0.0f, 1.0f}) {
                std::vector<int64_t> sequences, steps(size_t(B), 8);
                for (int64_t b = 0; b < B; b++) sequences.push_back(b);
                const std::vector<int32_t> got = sample(logits, V, sequences, steps, options(temperature, 0, 5));
                for (int64_t b = 0; b < B; b++) {
                    const Philox4 r = philox(5, uint64_t(b), 8);
                    const std::vector<double> p =
                        reference::sampling_probabilities(logits.data() + b * Vp, V, double(temperature), 0);
                    ASSERT_EQ(got[size_t(b)], reference::sample(p, uniform01(r.v[0], r.v[1])))
                        << "V " << V << " Vp " << Vp << " row " << b << " temperature " << temperature;
                }
                for (const int64_t few : {int64_t(1), std::min(B, int64_t(64))}) {
                    const std::vector<double> some(rows.begin() + (B - few) * Vp, rows.end());
                    const std::vector<int64_t> last(sequences.end() - few, sequences.end());
                    const std::vector<int64_t> same(size_t(few), 8);
                    EXPECT_EQ(
                        sample(TestArray::of(activation(), some, {few, Vp}), V, last, same, options(temperature, 0, 5)),
                        std::vector<int32_t>(got.end() - few, got.end()))
                        << "V " << V << " Vp " << Vp << " " << few << " rows";
                }
            }
        }
}

// More chunks than the last CUDA kernel has threads. One chunk has no weight; the others have the same.
TEST(Sampling, ManyChunks) {
    constexpr int64_t V = 300007, B = 12;
    std::vector<double> row(size_t(V), 2.0);
    std::fill(row.begin() + 100 * 512, row.begin() + 101 * 512, -INF);
    const std::vector<int32_t> got = sample_row(row, options(1, 0, 3), B);
    const std::vector<double> p = reference::sampling_probabilities(row.data(), V, 1, 0);
    for (int64_t b = 0; b < B; b++) {
        const Philox4 r = philox(3, 0, uint64_t(b));
        EXPECT_EQ(got[size_t(b)], reference::sample(p, uniform01(r.v[0], r.v[1])));
    }
}

// The header's bound, over temperatures from 1/100 to 100, and the ends of its range.
TEST(Sampling, Exp2Product) {
    for (uint64_t i = 0; i < 1000000; i++) {
        const Philox4 r = philox(3, i, 0);
        const double u = uniform01(r.v[0], r.v[1]), rate = std::pow(100, 2 * uniform01(r.v[2], r.v[3]) - 1);
        const double x = -(i % 2 ? 1020 * u : 3 * u) / rate;
        const long double exact = exp2l(static_cast<long double>(x) * static_cast<long double>(rate));
        ASSERT_LT(std::abs(double((static_cast<long double>(exp2_product(x, rate)) - exact) / exact)), 5e-16)
            << "x " << x << " rate " << rate;
    }
    EXPECT_EQ(exp2_product(0, 1e45), 1);
    EXPECT_EQ(exp2_product(-1, 1), 0.5);
    EXPECT_EQ(exp2_product(-1021, 1), 0x1p-1021);
    for (const double x : {-1022.0, -1e5, -0x1p52, -1e16, -3 * 0x1p52, -1e18, -1e300, -INF})
        for (const double rate : {1.0, 1.25, 1e30}) EXPECT_EQ(exp2_product(x, rate), 0) << x << " " << rate;
}

// A batch in which each row has options, penalties and a mask of its own, and a slot anywhere.
struct Mix {
    int64_t B, V, Vp, S, words;
    std::vector<SamplingOptions> options;
    std::vector<bool> masked;
    std::vector<SamplingRow> rows;
    std::vector<int64_t> sequences, steps;
    std::vector<int32_t> seen, counts, masks;

    Mix(int64_t batch, int64_t vocab, uint64_t seed)
        : B(batch), V(vocab), Vp((vocab + 127) / 128 * 128), S(batch + 3), words((vocab + 31) / 32) {
        uint64_t drawn = 0;
        const auto below = [&](uint64_t n) { return size_t(philox(seed, drawn++, 0).v[0] % n); };
        const auto one_of = [&](auto... choices) {
            const std::vector<double> all{double(choices)...};
            return all[below(all.size())];
        };
        for (int64_t b = 0; b < B; b++) {
            SamplingOptions o;
            o.temperature = float(one_of(0, 0.6, 1, 1.3));
            o.top_k = int64_t(one_of(0, 0, 1, 20, 1024, 3000));
            o.top_p = float(one_of(1, 1, 0.9, 0.3));
            o.min_p = float(one_of(0, 0, 0.05));
            o.repeat_penalty = float(one_of(1, 1, 1.7));
            o.presence_penalty = float(one_of(0, 0, 1.25, -0.75));
            o.frequency_penalty = float(one_of(0, 0, 0.375, -0.25));
            o.seed = below(1000);
            options.push_back(o);
            masked.push_back(below(3) == 0);
            rows.push_back(sampling_row(o, V, (b * 7 + 2) % S, masked.back()));  // S is no multiple of 7
            sequences.push_back(int64_t(below(100)));
            steps.push_back(int64_t(below(100)));
        }
        for (int64_t i = 0; i < S * words; i++) {
            seen.push_back(int32_t(philox(seed, uint64_t(i), 1).v[0]));
            const Philox4 r = philox(seed, uint64_t(i), 2);
            masks.push_back(int32_t(i % 2 ? r.v[0] : r.v[0] & r.v[1] & r.v[2]));
        }
        for (int64_t i = 0; i < S * V; i++)
            counts.push_back(std::max(0, int(philox(seed, uint64_t(i), 3).v[0] % 9) - 5));
    }
    int64_t slot(int64_t b) const { return rows[size_t(b)].slot; }
    bool bit(const std::vector<int32_t>& words_of, int64_t b, int64_t v) const {
        return uint32_t(words_of[size_t(slot(b) * words + v / 32)]) >> (v % 32) & 1;
    }
    // The token that the oracle samples for row b. The kernels round to fp32 after each penalty.
    int32_t expected(const double* logits, int64_t b) const {
        const SamplingOptions& o = options[size_t(b)];
        std::vector<bool> marks(static_cast<size_t>(V));
        for (int64_t v = 0; v < V; v++) marks[size_t(v)] = bit(seen, b, v);
        std::vector<double> l = reference::penalised(logits + b * Vp, V, marks, double(o.repeat_penalty));
        for (int64_t v = 0; v < V; v++) {
            const int count = counts[size_t(slot(b) * V + v)];
            double& x = l[size_t(v)];
            x = double(float(double(float(x)) - (count > 0) * double(o.presence_penalty) -
                             double(o.frequency_penalty) * count));
            if (masked[size_t(b)] && !bit(masks, b, v)) x = -INF;
        }
        const Philox4 r = philox(o.seed, uint64_t(sequences[size_t(b)]), uint64_t(steps[size_t(b)]));
        return reference::sample(reference::sampling_probabilities(l.data(), V, double(o.temperature), o.top_k,
                                                                   double(o.top_p), double(o.min_p)),
                                 uniform01(r.v[0], r.v[1]));
    }
    // Samples with some of the rows, from the state of the beginning.
    std::vector<int32_t> run(const TestArray& logits, const std::vector<int64_t>& of, DType dtype,
                             const std::vector<SamplingRow>* same = nullptr) const {
        std::vector<SamplingRow> some;
        std::vector<int64_t> some_sequences, some_steps;
        std::vector<double> values;
        for (const int64_t b : of) {
            some.push_back(same ? (*same)[size_t(b)] : rows[size_t(b)]);
            some_sequences.push_back(sequences[size_t(b)]);
            some_steps.push_back(steps[size_t(b)]);
            values.insert(values.end(), logits.data() + b * Vp, logits.data() + (b + 1) * Vp);
        }
        const TestArray of_rows = TestArray::of(dtype, values, {int64_t(of.size()), Vp}),
                        s = TestArray::ints(seen, {S, words}), c = TestArray::ints(counts, {S, V}),
                        m = TestArray::ints(masks, {S, words});
        return sample(of_rows, V, some_sequences, some_steps, some, {s, c, m});
    }
};

// Each row's token is the oracle's for its own options; the sampled token is marked and counted in the row's slot,
// where the row has such a penalty, and nowhere else.
TEST_P(SamplingDTypes, MixedRowsMatchOracle) {
    for (const auto& [V, B] : {std::pair<int64_t, int64_t>{37, 90}, {3001, 60}, {9000, 24}}) {
        const Mix mix(B, V, uint64_t(V));
        const TestArray logits = TestArray::random(activation(), {B, mix.Vp}, 31, 2.5);
        const TestArray seen = TestArray::ints(mix.seen, {mix.S, mix.words}),
                        counts = TestArray::ints(mix.counts, {mix.S, V}),
                        masks = TestArray::ints(mix.masks, {mix.S, mix.words});
        const std::vector<int32_t> got = sample(logits, V, mix.sequences, mix.steps, mix.rows, {seen, counts, masks});
        std::vector<int32_t> marks = mix.seen, counted = mix.counts;
        for (int64_t b = 0; b < B; b++) {
            const SamplingRow& row = mix.rows[size_t(b)];
            const int32_t id = got[size_t(b)];
            ASSERT_EQ(id, mix.expected(logits.data(), b))
                << "V " << V << " row " << b << " temperature " << row.temperature << " top_k " << row.top_k
                << " top_p " << row.top_p << " min_p " << row.min_p << " classes " << row.classes;
            if (row.classes & sampling_class::REPEAT)
                marks[size_t(row.slot * mix.words + id / 32)] |= int32_t(1u << (id % 32));
            if (row.classes & sampling_class::COUNTS) counted[size_t(row.slot * V + id)]++;
        }
        EXPECT_EQ(seen.fetch_ints(), marks);
        EXPECT_EQ(counts.fetch_ints(), counted);
        EXPECT_EQ(masks.fetch_ints(), mix.masks);
    }
}

// A row gives the same token alone, among the same rows in another order, and where all rows have its options.
// Thousands of near ties of the cumulative sums would show a bit that differs.
TEST_P(SamplingDTypes, MixedRowsDoNotDependOnEachOther) {
    constexpr int64_t B = 40, V = 5003;
    const Mix mix(B, V, 77);
    const TestArray logits = TestArray::random(activation(), {B, mix.Vp}, 32, 0.5);
    std::vector<int64_t> all(size_t(B), 0);
    for (int64_t b = 0; b < B; b++) all[size_t(b)] = b;
    const std::vector<int32_t> together = mix.run(logits, all, activation());
    std::vector<int32_t> reversed = mix.run(logits, {all.rbegin(), all.rend()}, activation());
    std::reverse(reversed.begin(), reversed.end());
    EXPECT_EQ(reversed, together);
    for (int64_t b = 0; b < B; b++) {
        EXPECT_EQ(mix.run(logits, {b}, activation()), std::vector<int32_t>{together[size_t(b)]}) << b;
        if (b % 4) continue;
        std::vector<SamplingRow> same;
        for (int64_t i = 0; i < B; i++)
            same.push_back(sampling_row(mix.options[size_t(b)], V, mix.slot(i), mix.masked[size_t(b)]));
        EXPECT_EQ(mix.run(logits, all, activation(), &same)[size_t(b)], together[size_t(b)]) << b;
    }
}

// Only what the mask allows counts: NaN elsewhere does not matter, and a row without a mask does not read one. A mask
// that allows nothing, or nothing finite, is like logits that are not finite, and the other rows are sampled.
TEST(Sampling, Masks) {
    constexpr int64_t V = 2000, words = (V + 31) / 32;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<double> row(size_t(V), 3.0);
    row[1999] = nan;
    row[40] = -INF;
    row[700] = 1;
    const TestArray logits = TestArray::of(row, {1, V});
    const auto sampled = [&](const std::vector<int64_t>& allowed, const SamplingOptions& o) {
        std::vector<int32_t> bits(size_t(words), 0);
        for (const int64_t v : allowed) bits[size_t(v / 32)] |= int32_t(1u << (v % 32));
        bits.back() |= int32_t(0xFFFF0000u);  // beyond the vocabulary
        const TestArray masks = TestArray::ints(bits, {1, words});
        return sample(logits, V, {0}, {0}, {sampling_row(o, V, 0, true)}, {{}, {}, masks})[0];
    };
    SamplingOptions top_p = options(1);
    top_p.top_p = 0.5f;
    for (const SamplingOptions& o : {options(0), options(1), options(1, 50), top_p, options(1, 1500)}) {
        EXPECT_EQ(sampled({700}, o), 700);
        EXPECT_EQ(sampled({40, 700}, o), 700);
        for (const std::vector<int64_t>& none : {std::vector<int64_t>{}, {40}, {700, 1999}}) {
#ifdef USE_CUDA
            EXPECT_EQ(sampled(none, o), -1);
#else
            expect_error([&] { sampled(none, o); },
                         "sample_tokens: row 0 of the logits holds NaN, or its maximum is not finite; only the tokens "
                         "that its mask allows count");
#endif
        }
    }
    const TestArray plain = TestArray::of(std::vector<double>(size_t(V), 1.0), {1, V}),
                    nothing = TestArray::ints(std::vector<int32_t>(size_t(words), 0), {1, words});
    EXPECT_EQ(sample(plain, V, {0}, {0}, {sampling_row(options(0), V)}, {{}, {}, nothing})[0], 0);
}

// Presence counts once, frequency each time; both act after the repetition penalty, on completion tokens only.
TEST(Sampling, PresenceAndFrequencyPenalty) {
    const auto sampled = [](float presence, float frequency, float repeat = 1) {
        SamplingOptions o = options(0);
        o.presence_penalty = presence;
        o.frequency_penalty = frequency;
        o.repeat_penalty = repeat;
        const TestArray counts = TestArray::ints({0, 1, 3}, {1, 3}), seen = TestArray::ints({4}, {1, 1});
        const int32_t id =
            sample(TestArray::of({1, 1.5, 2}, {1, 3}), 3, {0}, {0}, {sampling_row(o, 3)}, {seen, counts, {}})[0];
        std::vector<int32_t> counted{0, 1, 3};
        if (presence != 0 || frequency != 0) counted[size_t(id)]++;
        EXPECT_EQ(counts.fetch_ints(), counted);
        return id;
    };
    EXPECT_EQ(sampled(0, 0), 2);
    EXPECT_EQ(sampled(0.4f, 0), 2);      // 1, 1.1, 1.6
    EXPECT_EQ(sampled(1.1f, 0), 0);      // 1, 0.4, 0.9
    EXPECT_EQ(sampled(0, 0.3f), 1);      // 1, 1.2, 1.1
    EXPECT_EQ(sampled(0, 0.6f), 0);      // 1, 0.9, 0.2
    EXPECT_EQ(sampled(-1, -1), 2);       // 1, 3.5, 6
    EXPECT_EQ(sampled(0.25f, 0, 2), 1);  // 1, 1.25, 0.75
}

INSTANTIATE_DTYPES(SamplingDTypes);

TEST(Sampling, InvalidArgumentsAreErrors) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    [[maybe_unused]] const std::string bad =
        "sample_tokens: row 0 of the logits holds NaN, or its maximum is not finite";
    SamplingOptions top_p = options(1);
    top_p.top_p = 0.5f;
    std::vector<double> late(2000, 1);
    late.back() = -nan;
    for (const std::vector<double>& row : {std::vector<double>{1, nan}, {nan, 1}, {1, INF}, {-INF, -INF}, late})
        for (const SamplingOptions& filters : {options(0), options(1), options(1, 1), top_p}) {
#ifdef USE_CUDA  // nothing waits for the kernel to end: the id is -1
            EXPECT_EQ(sample_row(row, filters)[0], -1);
#else
            expect_error([&] { sample_row(row, filters); }, bad);
#endif
        }
    expect_error([&] { sample_row({1, 2}, options(-1)); }, "sample_tokens: temperature is -1, expected 0 or more");
    expect_error([&] { sample_row({1, 2}, options(1, -2)); }, "sample_tokens: top_k is -2, expected 0 or more");
    SamplingOptions o;
    o.top_p = 0;
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: top_p is 0, expected above 0 and up to 1");
    o.top_p = 1;
    o.min_p = 1.5f;
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: min_p is 1.5, expected 0 to 1");
    o.min_p = 0;
    o.repeat_penalty = 0;
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: repeat_penalty is 0, expected more than 0");
    o.repeat_penalty = 2;
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: seen is missing");
    o.repeat_penalty = 1;
    o.presence_penalty = 1;
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: counts is missing");
    o.presence_penalty = std::numeric_limits<float>::infinity();
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: presence_penalty is inf, expected a finite number");
    o.presence_penalty = 0;
    o.frequency_penalty = std::numeric_limits<float>::quiet_NaN();
    expect_error([&] { sample_row({1, 2}, o); }, "sample_tokens: frequency_penalty is nan, expected a finite number");
    o.frequency_penalty = 0;
    const TestArray two = TestArray::of({1, 2}, {1, 2}), mask = TestArray::ints({3}, {1, 1});
    expect_error([&] { sample(two, 2, {0}, {0}, {sampling_row(o, 2, 0, true)}); }, "sample_tokens: masks is missing");
    if (backend_device() == Device::CPU)
        expect_error(
            [&] {
                sample(two, 2, {0}, {0}, {sampling_row(o, 2, 1, true)}, {{}, {}, mask});
            },
            "sample_tokens: row 0 has the slot 1; there are 1");
    const TestArray logits = TestArray::random({1, 4}, 1);
    expect_error([&] { sample(logits, 5, {0}, {0}, options(1)); }, "sample_tokens: V is 5, expected 1 to 4");
    expect_error(
        [&] {
            sample(logits, 4, {0, 1}, {0, 0}, options(1));
        },
        "sample_tokens: ids is int32 [2], expected int32 [1]");
}

}  // namespace
