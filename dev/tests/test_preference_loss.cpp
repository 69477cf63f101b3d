// Preference losses against the oracle: every method, sides of 1 to thousands of tokens, saturated sigmoids, responses
// that are certain or impossible, absent pairs and ranges of pairs.
#include "kernels/preference_loss.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/global_norm.h"

namespace {

using Method = PreferenceMethod;
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

const PreferenceOptions ALL[] = {{Method::DPO, 0.1f},       {Method::DPO, 1, 0.1f},         {Method::DPO, 0.01f, 0.45f},
                                 {Method::IPO, 0.1f},       {Method::IPO, 0.001f},          {Method::SimPO, 2, 0, 1},
                                 {Method::SimPO, 10, 0, 3}, {Method::SimPO, 2.5f, 0.2f, 0}, {Method::ORPO, 0.1f},
                                 {Method::ORPO, 1}};

// The losses of a side's tokens, and ℓ_ref.
struct Side {
    std::vector<double> losses;
    double reference = 0;
};
struct Pair {
    Side chosen, rejected;
};

// `tokens` losses with a mean of about `mean`, none negative.
Side random_side(int64_t tokens, double mean, uint64_t seed) {
    Side side;
    double sum = 0;
    for (int64_t i = 0; i < tokens; i++) {
        side.losses.push_back(mean * std::fabs(normal01(seed, 0, uint64_t(i))) * 1.25);
        sum += side.losses.back();
    }
    side.reference = -sum * (1 + 0.1 * normal01(seed, 1, 0));
    return side;
}

std::vector<Pair> random_pairs(double mean, uint64_t seed) {
    const int64_t tokens[][2] = {{1, 1}, {1, 2}, {3, 1}, {31, 65}, {255, 256}, {257, 400}, {1000, 4100}};
    std::vector<Pair> pairs;
    for (const auto& t : tokens) {
        pairs.push_back(
            {random_side(t[0], mean, seed + 2 * pairs.size()), random_side(t[1], mean, seed + 2 * pairs.size() + 1)});
    }
    return pairs;
}

// Pairs as the op gets them: `gap` tokens, whose losses are NaN, before each pair and at the end; after each pair an
// absent one.
struct Batch {
    std::vector<double> loss_values, reference_values;
    std::vector<int32_t> row_values;

    Batch(const std::vector<Pair>& pairs, int64_t gap) {
        const auto end = [&] { return int32_t(loss_values.size()); };
        const auto add_gap = [&] { loss_values.insert(loss_values.end(), size_t(gap), NOT_A_NUMBER); };
        for (const Pair& pair : pairs) {
            add_gap();
            row_values.push_back(end());
            for (const Side* side : {&pair.chosen, &pair.rejected}) {
                loss_values.insert(loss_values.end(), side->losses.begin(), side->losses.end());
                row_values.push_back(end());
                reference_values.push_back(side->reference);
            }
            const int32_t absent = row_values[row_values.size() - 3];
            row_values.insert(row_values.end(), {absent, absent, absent});
            reference_values.insert(reference_values.end(), {NOT_A_NUMBER, NOT_A_NUMBER});
        }
        add_gap();
    }
    int64_t P() const { return int64_t(row_values.size() / 3); }
    int64_t n() const { return int64_t(loss_values.size()); }
};

struct Result {
    std::vector<double> stats, dlosses;
};

// In one call for each of the ranges that `ends` ends.
Result run(const PreferenceOptions& options, const Batch& batch, float scale = 1, std::vector<int64_t> ends = {},
           bool gradient = true) {
    if (ends.empty()) ends = {batch.n()};
    const TestArray losses = TestArray::of(batch.loss_values, {batch.n()}),
                    reference = TestArray::of(batch.reference_values, {batch.P(), 2}),
                    rows = TestArray::ints(batch.row_values, {batch.P(), 3}),
                    stats = TestArray::poisoned({batch.P(), NUM_PAIR_STATS}),
                    dlosses = TestArray::poisoned({batch.n()});
    PreferenceLoss x;
    x.stats = stats;
    if (gradient) x.dlosses = dlosses;
    x.losses = losses;
    x.rows = rows;
    if (has_reference(options.method)) x.reference = reference;
    x.scale = scale;
    x.options = options;
    for (const int64_t end : ends) {
        x.end = end;
        preference_loss(x, Stream{});
        x.begin = end;
    }
    return {stats.fetch(), dlosses.fetch()};
}

// Sums and formulas are in fp64 and the result is rounded to fp32: an error of u. The sums of 4,100 losses have
// relative errors of at most 4100·2⁻⁵³. An error of h is a relative error of a small σ(h): for h up to 10⁴ at most
// 10⁴·4100·2⁻⁵³ = 4.6e-9, a tenth of u. In 1 − e^a the relative error of a small a stays. Together less than 2u.
void expect_rounded(const std::string& what, double got, long double ref) {
    EXPECT_NEAR(got, double(ref), 2 * UNIT_ROUNDOFF * std::fabs(double(ref)) + 0x1p-126) << what;
}

void check(const PreferenceOptions& options, const std::vector<Pair>& pairs, float scale = 1) {
    SCOPED_TRACE(str(PREFERENCE_NAMES[size_t(options.method)], " beta ", options.beta, " smoothing ",
                     options.label_smoothing, " margin ", options.margin));
    const Batch batch(pairs, 2);
    const Result got = run(options, batch, scale);
    std::vector<bool> written(size_t(batch.n()));
    for (int64_t p = 0; p < batch.P(); p++) {
        SCOPED_TRACE(str("pair ", p));
        const double* stats = &got.stats[size_t(p * NUM_PAIR_STATS)];
        const int32_t* rows = &batch.row_values[size_t(3 * p)];
        if (rows[0] == rows[2]) {
            for (int i = 0; i < NUM_PAIR_STATS; i++) EXPECT_EQ(stats[i], 0) << i;
            continue;
        }
        long double logp[2] = {}, reference[2] = {};
        int64_t tokens[2];
        for (int side = 0; side < 2; side++) {
            tokens[side] = rows[side + 1] - rows[side];
            for (int32_t i = rows[side]; i < rows[side + 1]; i++) logp[side] -= float(batch.loss_values[size_t(i)]);
            if (has_reference(options.method)) reference[side] = float(batch.reference_values[size_t(2 * p + side)]);
        }
        const reference::PreferencePair ref = reference::preference_pair(options, logp, reference, tokens);
        expect_rounded("loss", stats[PAIR_LOSS], ref.loss);
        expect_rounded("chosen reward", stats[PAIR_CHOSEN_REWARD], ref.reward[0]);
        expect_rounded("rejected reward", stats[PAIR_REJECTED_REWARD], ref.reward[1]);
        EXPECT_EQ(stats[PAIR_ACCURATE], ref.reward[0] > ref.reward[1]);
        expect_rounded("chosen logp", stats[PAIR_CHOSEN_LOGP], logp[0]);
        expect_rounded("rejected logp", stats[PAIR_REJECTED_LOGP], logp[1]);
        EXPECT_EQ(stats[PAIR_CHOSEN_TOKENS], tokens[0]);
        EXPECT_EQ(stats[PAIR_REJECTED_TOKENS], tokens[1]);
        expect_rounded("reference logp", stats[PAIR_REFERENCE_LOGP], reference[0] + reference[1]);
        for (int side = 0; side < 2; side++)
            for (int32_t i = rows[side]; i < rows[side + 1]; i++) {
                expect_rounded(str("dlosses ", i), got.dlosses[size_t(i)], scale * ref.dloss[side]);
                written[size_t(i)] = true;
            }
    }
    for (size_t i = 0; i < written.size(); i++) EXPECT_EQ(written[i], !std::isnan(got.dlosses[i])) << i;
}

}  // namespace

// The oracle's gradient is the derivative of its loss. Central differences with a step s err by s²·L‴/6 < 1e-10·L‴, and
// by the rounding of L, 2⁻⁶³·L/s = 1e-14·L.
TEST(PreferenceLossOracle, GradientIsTheDerivative) {
    for (const PreferenceOptions& options : ALL)
        for (const double logp : {-0.01, -3.0, -40.0})
            for (const double other : {-0.02, -2.0, -35.0}) {
                const long double reference[2] = {-5, -6};
                const int64_t tokens[2] = {3, 4};
                const long double logps[2] = {logp, other};
                const reference::PreferencePair at = reference::preference_pair(options, logps, reference, tokens);
                for (int side = 0; side < 2; side++) {
                    const long double step = 1e-5L * std::min(1.0L, -logps[side]);
                    long double above[2] = {logp, other}, below[2] = {logp, other};
                    above[side] += step;
                    below[side] -= step;
                    const long double slope = (reference::preference_pair(options, above, reference, tokens).loss -
                                               reference::preference_pair(options, below, reference, tokens).loss) /
                                              (2 * step);
                    EXPECT_NEAR(double(-at.dloss[side]), double(slope), 1e-8 * (1 + std::fabs(double(slope))))
                        << PREFERENCE_NAMES[size_t(options.method)] << " " << logp << " " << other << " " << side;
                }
            }
}

TEST(PreferenceLoss, MatchesOracle) {
    for (const PreferenceOptions& options : ALL)
        for (const double mean : {1e-3, 1.0, 2.5}) check(options, random_pairs(mean, 7), 0.37f);
}

// The values of a trainer's first step: the model is its own reference.
TEST(PreferenceLoss, NoDifferenceToTheReference) {
    Pair pair = random_pairs(1.5, 3)[3];
    for (Side* side : {&pair.chosen, &pair.rejected}) {
        double sum = 0;
        for (double& loss : side->losses) {
            loss = std::round(loss * 1024) / 1024;  // sums are exact
            sum += loss;
        }
        side->reference = -sum;
    }
    const Result dpo = run({Method::DPO, 0.1f}, Batch({pair}, 0)), ipo = run({Method::IPO, 0.5f}, Batch({pair}, 0));
    EXPECT_EQ(dpo.stats[PAIR_LOSS], double(float(std::log(2.0))));
    EXPECT_EQ(dpo.stats[PAIR_ACCURATE], 0);  // equal rewards
    EXPECT_EQ(dpo.dlosses.front(), double(0.1f / 2));
    EXPECT_EQ(dpo.dlosses.back(), -double(0.1f / 2));
    EXPECT_EQ(ipo.stats[PAIR_LOSS], 1);  // (0 − 1/(2·0.5))²
    EXPECT_EQ(ipo.dlosses.front(), double(float(2.0 / double(pair.chosen.losses.size()))));
}

// |h| of 10⁴ in both directions, where e^|h| overflows even in fp64.
TEST(PreferenceLoss, SaturatedMargins) {
    for (PreferenceOptions options : ALL) {
        options.beta = 1;
        for (const double large : {1e2, 1e4}) {
            const Pair worse = {{{large}, 0}, {{0.5}, 0}}, better = {{{0.5}, 0}, {{large}, 0}};
            check(options, {worse, better});
            for (const double x : run(options, Batch({worse, better}, 0)).stats) EXPECT_TRUE(std::isfinite(x));
        }
    }
}

// ORPO's log odds: of a response whose probability is 1 as far as fp32 tells, near 1, and hardly above 0.
TEST(PreferenceLoss, CertainAndImpossibleResponses) {
    const double means[] = {0, 1e-9, 0x1p-24, 1.2e-7, 1e-6, 1e-3, 0.7, 30, 800, 1e4};
    for (const float beta : {0.1f, 1.0f})
        for (const double chosen : means)
            for (const double rejected : means) {
                SCOPED_TRACE(str(chosen, " ", rejected));
                const Pair pair = {{std::vector<double>(3, chosen), 0}, {std::vector<double>(5, rejected), 0}};
                check({Method::ORPO, beta}, {pair});
                for (const double x : run({Method::ORPO, beta}, Batch({pair}, 0)).dlosses)
                    EXPECT_TRUE(std::isfinite(x));
            }
}

TEST(PreferenceLoss, NaNPropagates) {
    for (const PreferenceOptions& options : ALL)
        for (const bool in_chosen : {true, false}) {
            std::vector<Pair> pairs = random_pairs(1, 5);
            (in_chosen ? pairs[2].chosen : pairs[2].rejected).losses[0] = NOT_A_NUMBER;
            const Result r = run(options, Batch(pairs, 0));
            for (size_t p = 0; p < pairs.size(); p++)
                EXPECT_EQ(std::isnan(r.stats[2 * p * NUM_PAIR_STATS]), p == 2) << p;
        }
}

TEST(PreferenceLoss, RangesAreIndependent) {
    const Batch batch(random_pairs(1, 9), 3);
    for (const PreferenceOptions& options : ALL) {
        const Result whole = run(options, batch);
        const int64_t second = batch.row_values[6], last = batch.row_values[size_t(batch.row_values.size() - 6)];
        const Result parts = run(options, batch, 1, {second, last, batch.n()});
        expect_same_bits("stats", whole.stats, parts.stats);
        expect_same_bits("dlosses", whole.dlosses, parts.dlosses);
        // Pairs behind the range are not touched, nor are absent ones there.
        const Result first = run(options, batch, 1, {second});
        for (size_t i = 0; i < first.stats.size(); i++)
            EXPECT_EQ(std::isnan(first.stats[i]), i >= 2 * NUM_PAIR_STATS) << i;
        for (size_t i = size_t(second); i < first.dlosses.size(); i++) EXPECT_TRUE(std::isnan(first.dlosses[i])) << i;
        const Result without_gradient = run(options, batch, 1, {}, false);
        expect_same_bits("stats", whole.stats, without_gradient.stats);
        expect_same_bits("dlosses", without_gradient.dlosses, std::vector<double>(size_t(batch.n()), NOT_A_NUMBER));
    }
}

TEST(PreferenceLoss, BitsDependOnThePairAlone) {
    const std::vector<Pair> pairs = random_pairs(1, 11);
    for (const PreferenceOptions& options : ALL) {
        const Result together = run(options, Batch(pairs, 0));
        for (const int64_t gap : {1, 7, 33})
            expect_same_bits("stats", together.stats, run(options, Batch(pairs, gap)).stats);
        for (size_t p = 0; p < pairs.size(); p++) {
            const Result alone = run(options, Batch({pairs[p]}, 5));
            for (size_t i = 0; i < NUM_PAIR_STATS; i++)
                EXPECT_EQ(alone.stats[i], together.stats[2 * p * NUM_PAIR_STATS + i]) << p << " " << i;
        }
        expect_deterministic("stats and dlosses", [&] {
            Result r = run(options, Batch(pairs, 1));
            r.stats.insert(r.stats.end(), r.dlosses.begin(), r.dlosses.end());
            return r.stats;
        });
    }
}

TEST(PairLogps, AreSumsOfLosses) {
    const std::vector<Pair> pairs = random_pairs(2, 13);
    const Batch batch(pairs, 2);
    const TestArray logps = TestArray::poisoned({batch.P(), 2}), losses = TestArray::of(batch.loss_values, {batch.n()}),
                    rows = TestArray::ints(batch.row_values, {batch.P(), 3});
    pair_logps(logps, losses, rows, Stream{});
    const std::vector<double> got = logps.fetch(), stats = run({Method::ORPO, 1}, batch).stats;
    for (size_t p = 0; p < size_t(batch.P()); p++) {  // the same sums as those of preference_loss()
        EXPECT_EQ(got[2 * p], stats[p * NUM_PAIR_STATS + PAIR_CHOSEN_LOGP]) << p;
        EXPECT_EQ(got[2 * p + 1], stats[p * NUM_PAIR_STATS + PAIR_REJECTED_LOGP]) << p;
    }
    EXPECT_LT(got[0], 0);
}

// Into a rank's row of a step's sums.
TEST(SumPairStats, MatchesFloat64) {
    for (const int64_t P : {0, 1, 5, 1000})
        for (const bool accumulate : {false, true}) {
            const TestArray stats = TestArray::random({P, NUM_PAIR_STATS}, 1, 1, 4);
            const TestArray sums = TestArray::doubles(
                std::vector<double>(2 * NUM_STEP_SUMS, accumulate ? 2.5 : NOT_A_NUMBER), {2, NUM_STEP_SUMS});
            Tensor row = sums.tensor().rows(1, 2).columns(SUM_LOSS, NUM_STEP_SUMS);
            row.rank = 1;
            row.shape[0] = NUM_PAIR_STATS;
            row.stride[0] = 1;
            sum_pair_stats(row, stats, accumulate, Stream{});
            const std::vector<double> got = sums.fetch();
            for (int i = 0; i < NUM_PAIR_STATS; i++) {
                double ref = accumulate ? 2.5 : 0;
                for (int64_t p = 0; p < P; p++) ref += stats.values()[size_t(p * NUM_PAIR_STATS + i)];
                EXPECT_NEAR(got[size_t(NUM_STEP_SUMS + SUM_LOSS + i)], ref, 1e-12 * (1 + std::fabs(ref)))
                    << P << " " << i;
            }
            for (int i = 0; i < NUM_STEP_SUMS + SUM_LOSS; i++) {
                const double value = got[size_t(i)];
                EXPECT_TRUE(accumulate ? value == 2.5 : std::isnan(value)) << i;
            }
        }
}

// Out of order, a side without tokens, beyond the range.
TEST(PreferenceLossArguments, WrongRowsAreErrors) {
    const int32_t wrong[][3] = {{0, 3, 2}, {0, 0, 2}, {0, 2, 2}, {0, 2, 7}, {0, -1, 2}, {2, 1, 0}};
    for (const auto& w : wrong) {
        Batch batch({{{{1, 1}}, {{1, 1}}}}, 1);
        std::copy(w, w + 3, batch.row_values.begin());
#ifdef USE_CUDA
        const Result r = run({Method::DPO}, batch);
        for (int i = 0; i < NUM_PAIR_STATS; i++) EXPECT_TRUE(std::isnan(r.stats[size_t(i)])) << i;
        for (const double x : r.dlosses) EXPECT_TRUE(std::isnan(x));
#else
        expect_error([&] { run({Method::DPO}, batch); }, str("preference_loss: rows[0] is ", w[0], ", ", w[1], ", ",
                                                             w[2], ", expected increasing numbers from 0 to 6"));
#endif
    }
}

TEST(PreferenceLossArguments, InvalidArgumentsAreErrors) {
    const Batch batch(random_pairs(1, 1), 0);
    const auto refused = [&](PreferenceOptions options, const std::string& why) {
        expect_error([&] { run(options, batch); }, "preference_loss: " + why);
    };
    refused({Method::DPO, 0}, "beta is 0, expected a positive number");
    refused({Method::DPO, 1, 0.5f}, "label_smoothing is 0.5, expected at least 0 and less than 0.5");
    refused({Method::IPO, 1, 0.25f}, "label_smoothing is 0.25, expected 0 with ipo");
    refused({Method::ORPO, 1, 0.25f}, "label_smoothing is 0.25, expected 0 with orpo");
    refused({Method::SimPO, 1, 0, -1}, "margin is -1, expected at least 0");
    refused({Method::DPO, 1, 0, 1}, "margin is 1, expected 0 with dpo");
    expect_error([&] { run({Method::DPO}, batch, 1, {batch.n() + 1}); },
                 str("preference_loss: [begin, end) is [0, ", batch.n() + 1, "), expected a range of the ", batch.n(),
                     " losses"));

    const TestArray losses = TestArray::random({8}, 1), rows = TestArray::ints({0, 1, 2}, {1, 3}),
                    stats = TestArray::poisoned({1, NUM_PAIR_STATS}), two = TestArray::poisoned({1, 2});
    PreferenceLoss x;
    x.stats = two;
    x.losses = losses;
    x.rows = rows;
    expect_error([&] { preference_loss(x, Stream{}); },
                 str("preference_loss: stats is fp32 [1, 2], expected fp32 [1, ", int(NUM_PAIR_STATS), "]"));
    x.stats = stats;
    expect_error([&] { preference_loss(x, Stream{}); }, "preference_loss: reference is missing with dpo");
    x.reference = two;
    x.options.method = Method::ORPO;
    expect_error([&] { preference_loss(x, Stream{}); }, "preference_loss: reference is given with orpo");
    expect_error([&] { pair_logps(stats, losses, rows, Stream{}); },
                 str("pair_logps: logps is fp32 [1, ", int(NUM_PAIR_STATS), "], expected fp32 [1, 2]"));
    expect_error([&] { sum_pair_stats(losses, stats, false, Stream{}); },
                 str("sum_pair_stats: sums is fp32 [8], expected fp64 [", int(NUM_PAIR_STATS), "]"));
}
