// The loss of a policy gradient against the oracle: every option, with and without the arrays that may be missing,
// tokens that do not count, ratios on both sides of both clips, a capped importance weight, and NaN.
#include "kernels/policy_loss.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();
constexpr float UNLIMITED = std::numeric_limits<float>::infinity();

// Which of the arrays that may be missing are given.
struct Given3 {
    bool old, sampler, reference;
};
constexpr Given3 EVERYTHING = {true, true, true};

struct Tokens {
    std::vector<double> losses, old_logps, sampler_logps, reference_logps, advantages, weights;

    void add(double loss, double old_logp, double sampler_logp, double reference_logp, double advantage,
             double weight) {
        losses.push_back(loss);
        old_logps.push_back(old_logp);
        sampler_logps.push_back(sampler_logp);
        reference_logps.push_back(reference_logp);
        advantages.push_back(advantage);
        weights.push_back(weight);
    }
    int64_t n() const { return int64_t(losses.size()); }
    Tokens range(size_t begin, size_t end) const {
        Tokens t;
        for (size_t i = begin; i < end; i++)
            t.add(losses[i], old_logps[i], sampler_logps[i], reference_logps[i], advantages[i], weights[i]);
        return t;
    }
};

// Log-probabilities that differ by about `spread`; a third of the tokens does not count, an advantage in nine is 0.
Tokens random_tokens(int64_t n, double spread, uint64_t seed) {
    Tokens t;
    for (int64_t i = 0; i < n; i++) {
        const auto normal = [&](uint64_t what) { return normal01(seed, what, uint64_t(i)); };
        const double loss = std::fabs(normal(0)) * 1.5, old = -loss + spread * normal(1);
        t.add(loss, old, old + 0.3 * spread * normal(2), -loss + spread * normal(3), i % 9 == 4 ? 0 : 1.5 * normal(4),
              i % 3 == 1 ? 0 : 0.01 + std::fabs(normal(5)));
    }
    return t;
}

struct Result {
    std::vector<double> dlosses, stats;
};

struct Call {
    PolicyOptions options;
    Given3 given = EVERYTHING;
    float scale = 1;
    bool gradient = true;
    std::vector<double> stats_before = {};  // empty: the stats are overwritten
};

Result run(const Call& call, const Tokens& t) {
    const auto array = [&](const std::vector<double>& values) { return TestArray::of(values, {t.n()}); };
    const TestArray losses = array(t.losses), old = array(t.old_logps), sampler = array(t.sampler_logps),
                    reference = array(t.reference_logps), advantages = array(t.advantages), weights = array(t.weights),
                    dlosses = TestArray::poisoned({t.n()});
    const bool accumulate = !call.stats_before.empty();
    const TestArray stats = TestArray::doubles(
        accumulate ? call.stats_before : std::vector<double>(NUM_POLICY_STATS, NOT_A_NUMBER), {NUM_POLICY_STATS});
    PolicyLoss x;
    if (call.gradient) x.dlosses = dlosses;
    x.losses = losses;
    if (call.given.old) x.old_logps = old;
    if (call.given.sampler) x.sampler_logps = sampler;
    if (call.given.reference) x.reference_logps = reference;
    x.advantages = advantages;
    x.weights = weights;
    x.stats = stats;
    x.scale = call.scale;
    x.accumulate = accumulate;
    x.options = call.options;
    policy_loss(x, Stream{});
    return {dlosses.fetch(), stats.fetch()};
}

// What the op gets of token i: its inputs in fp32.
reference::PolicyToken token_of(const Tokens& t, const Given3& given, size_t i) {
    const float loss = float(t.losses[i]), old = given.old ? float(t.old_logps[i]) : -loss,
                sampler = given.sampler ? float(t.sampler_logps[i]) : old,
                ref = given.reference ? float(t.reference_logps[i]) : -loss;
    return {loss, old, sampler, ref, float(t.advantages[i]), float(t.weights[i])};
}

// Formulas are in fp64. A difference of log-probabilities has a relative error of 2⁻⁵³ and its exponential one of
// 2·2⁻⁵³ beside that; three products and two sums follow: together less than 10·2⁻⁵³·mag. A sum of n terms adds
// n·2⁻⁵³ of their magnitudes. A gradient is rounded to fp32.
constexpr double FORMULA_ERROR = 10 * 0x1p-53;

void check(const Call& call, const Tokens& t) {
    SCOPED_TRACE(str("n ", t.n(), " clip ", call.options.clip_low, " ", call.options.clip_high, " kl ", call.options.kl,
                     " cap ", call.options.importance_cap, " given ", call.given.old, call.given.sampler,
                     call.given.reference));
    const Result got = run(call, t);
    long double sums[NUM_POLICY_STATS] = {};
    double mags[NUM_POLICY_STATS] = {};
    const auto add = [&](PolicyStat stat, long double value, double mag) {
        sums[stat] += value;
        mags[stat] += mag;
    };
    for (size_t i = 0; i < t.losses.size(); i++) {
        if (t.weights[i] == 0) {
            EXPECT_EQ(got.dlosses[i], 0) << i;
            continue;
        }
        const reference::PolicyToken token = token_of(t, call.given, i);
        const reference::PolicyTerms ref = reference::policy_terms(call.options, token);
        const double dloss = call.scale * double(ref.dloss);
        EXPECT_NEAR(got.dlosses[i], dloss,
                    UNIT_ROUNDOFF * std::fabs(dloss) + FORMULA_ERROR * std::fabs(call.scale) * ref.dloss_mag + 0x1p-149)
            << i;
        const double gap = std::fabs(double(token.old_logp - token.sampler_logp));
        add(POLICY_LOSS, ref.loss, ref.loss_mag);
        add(POLICY_TOKENS, 1, 1);
        add(POLICY_CLIPPED, ref.clipped, ref.clipped);
        add(POLICY_KL, ref.kl, ref.kl_mag);
        add(POLICY_ENTROPY, token.loss, double(fabsl(token.loss)));
        add(POLICY_SAMPLER_GAP, gap, gap);
        sums[POLICY_LARGEST_GAP] = std::max(sums[POLICY_LARGEST_GAP], (long double)(gap));
    }
    for (int stat = 0; stat < NUM_POLICY_STATS; stat++)
        EXPECT_NEAR(got.stats[size_t(stat)], double(sums[stat]), (FORMULA_ERROR + double(t.n()) * 0x1p-53) * mags[stat])
            << "stat " << stat;
}

const PolicyOptions ALL[] = {{},
                             {0.2f, 0.28f, 0, 2},
                             {0, 0, 0, 1},
                             {0.05f, 0.3f, 0.04f, 2},
                             {UNLIMITED, UNLIMITED, 0, UNLIMITED},
                             {0.2f, 0.2f, 1, 1.25f}};

}  // namespace

// The oracle's gradient is the derivative of its loss, with the importance weight held. Central differences with a step
// s err by s²·L‴/6 < 1e-10·|L‴|, and by the rounding of L, 2⁻⁶³·L/s = 1e-14·L. The ratios are not within s of a clip.
TEST(PolicyLossOracle, GradientIsTheDerivative) {
    int clipped = 0;
    for (const PolicyOptions& options : ALL)
        for (const double advantage : {-1.5, 0.0, 0.7})
            for (const double log_ratio : {-0.6, -0.1, 0.01, 0.1, 0.6}) {
                const double loss = 1.3, old = -loss - log_ratio;
                const reference::PolicyToken token = {loss, old, old + 0.4, -1.0, advantage, 0.25};
                const long double step = 1e-5L;
                const auto loss_at = [&](long double x) {
                    reference::PolicyToken moved = token;
                    moved.loss = x;
                    return reference::policy_terms(options, moved).loss;
                };
                const reference::PolicyTerms at = reference::policy_terms(options, token);
                const long double slope = (loss_at(loss + step) - loss_at(loss - step)) / (2 * step);
                EXPECT_NEAR(double(at.dloss), double(slope), 1e-8 * (1 + std::fabs(double(slope))))
                    << advantage << " " << log_ratio;
                clipped += at.clipped;
            }
    EXPECT_GT(clipped, 10);
}

TEST(PolicyLoss, MatchesFloat64) {
    for (const int64_t n : {0, 1, 31, 64, 513, 4100})
        for (const PolicyOptions& options : ALL) check({options}, random_tokens(n, 0.3, 7));
    for (const float scale : {-0.5f, 0x1p-12f, 1000.0f}) check({ALL[3], EVERYTHING, scale}, random_tokens(100, 0.3, 8));
    for (const double spread : {0.0, 1e-6, 1e-3, 3.0, 10.0})
        for (const PolicyOptions& options : ALL) check({options}, random_tokens(700, spread, 9));
}

TEST(PolicyLoss, MissingLogProbabilities) {
    for (int given = 0; given < 8; given++)
        for (const PolicyOptions& options : ALL) {
            const Given3 arrays = {(given & 1) != 0, (given & 2) != 0, (given & 4) != 0};
            if (options.kl == 0 || arrays.reference) check({options, arrays}, random_tokens(300, 0.4, 11));
        }
}

// With π_old = π_θ nothing is clipped, however narrow the range is, and the gradient is that of −w·A·ln π_θ.
TEST(PolicyLoss, FirstUpdateIsThePolicyGradient) {
    const Tokens t = random_tokens(200, 0.2, 13);
    const Result got = run({{0, 0, 0, 1}, {false, false, false}}, t);
    for (size_t i = 0; i < t.losses.size(); i++)
        EXPECT_EQ(got.dlosses[i], double(float(double(float(t.weights[i])) * double(float(t.advantages[i]))))) << i;
    EXPECT_EQ(got.stats[POLICY_CLIPPED], 0);
    EXPECT_EQ(got.stats[POLICY_KL], 0);
    EXPECT_EQ(got.stats[POLICY_SAMPLER_GAP], 0);
}

// A token is clipped where its ratio has already moved the way its advantage pushes, and only there. The range is
// [0.6, 1.625], in logarithms [−0.511, 0.4855].
TEST(PolicyLoss, ClipsOnOneSide) {
    struct Case {
        double log_ratio, advantage;
        bool clipped;
    };
    const Case cases[] = {{0.5, 1, true},   {0.5, -1, false},  {-0.8, 1, false}, {-0.8, -1, true},
                          {0.48, 1, false}, {-0.5, -1, false}, {0.5, 0, false},  {-0.8, 0, false}};
    for (const Case& c : cases) {
        Tokens t;
        t.add(2, -2 - c.log_ratio, -2 - c.log_ratio, -2, c.advantage, 0.5);
        const Result got = run({{0.4f, 0.625f, 0, 2}}, t);
        EXPECT_EQ(got.stats[POLICY_CLIPPED], c.clipped) << c.log_ratio << " " << c.advantage;
        EXPECT_EQ(got.dlosses[0] == 0, c.clipped || c.advantage == 0) << c.log_ratio << " " << c.advantage;
        const double bound = c.log_ratio > 0 ? 1.625 : 1 - double(0.4f);
        if (c.clipped) {
            EXPECT_EQ(got.stats[POLICY_LOSS], -0.5 * c.advantage * bound) << c.log_ratio;
        }
    }
    for (const double advantage : {-1.0, 1.0}) {  // a ratio of 1 at both ends of the range
        Tokens t;
        t.add(2, -2, -2, -2, advantage, 1);
        EXPECT_EQ(run({{0, 0, 0, 2}}, t).dlosses[0], advantage);
    }
}

TEST(PolicyLoss, ImportanceWeightsAreCapped) {
    Tokens t;
    for (const double log_ratio : {-1e4, -2.0, 0.0, 0.5, 0.75, 40.0, 1e4}) t.add(3, -3, -3 - log_ratio, -3, -2, 0.25);
    check({{0.2f, 0.2f, 0, 2}}, t);
    const Result got = run({{0.2f, 0.2f, 0, 2}}, t);
    const double expected[] = {0, std::exp(-2.0), 1, std::exp(0.5), 2, 2, 2};
    for (size_t i = 0; i < 7; i++) EXPECT_FLOAT_EQ(float(got.dlosses[i]), float(-0.5 * expected[i])) << i;
    EXPECT_EQ(got.stats[POLICY_LARGEST_GAP], 1e4);
}

// Whatever a token that does not count holds.
TEST(PolicyLoss, TokensOfWeightZeroAreNothing) {
    const Tokens counted = random_tokens(40, 0.3, 17);
    Tokens with_gaps;
    for (size_t i = 0; i < counted.losses.size(); i++) {
        if (counted.weights[i] == 0) continue;
        with_gaps.add(NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, 0);
        with_gaps.add(counted.losses[i], counted.old_logps[i], counted.sampler_logps[i], counted.reference_logps[i],
                      counted.advantages[i], counted.weights[i]);
    }
    check({ALL[3]}, with_gaps);
}

TEST(PolicyLoss, NaNPropagates) {
    const PolicyOptions never_clipped = {UNLIMITED, UNLIMITED, 0.04f, 2};
    for (int which = 0; which < 5; which++) {
        Tokens t = random_tokens(600, 0.3, 19);
        const size_t at = 597;
        ASSERT_NE(t.weights[at], 0);
        (which == 0   ? t.losses
         : which == 1 ? t.old_logps
         : which == 2 ? t.sampler_logps
         : which == 3 ? t.reference_logps
                      : t.advantages)[at] = NOT_A_NUMBER;
        const Result got = run({never_clipped}, t);
        EXPECT_TRUE(std::isnan(got.stats[POLICY_LOSS])) << which;
        for (size_t i = 0; i < t.losses.size(); i++)
            EXPECT_EQ(std::isnan(got.dlosses[i]), i == at) << which << " " << i;
        EXPECT_EQ(std::isnan(got.stats[POLICY_LARGEST_GAP]), which == 1 || which == 2) << which;
    }
}

// A KL that is only reported may overflow.
TEST(PolicyLoss, ReportedKlIsNoPartOfTheLoss) {
    Tokens t;
    t.add(2000, -2000, -2000, -1, 1, 1);
    const Result got = run({{}}, t);
    EXPECT_EQ(got.dlosses[0], 1);
    EXPECT_EQ(got.stats[POLICY_LOSS], -1);
    EXPECT_TRUE(std::isinf(got.stats[POLICY_KL]));
}

TEST(PolicyLoss, Accumulates) {
    const Tokens t = random_tokens(700, 0.3, 23);
    const Result fresh = run({ALL[3]}, t);
    const std::vector<double> before = {1, 2, 3, 4, 5, 6, 0.01}, above = {0, 0, 0, 0, 0, 0, 1e3};
    const Result added = run({ALL[3], EVERYTHING, 1, true, before}, t);
    for (size_t stat = 0; stat < NUM_POLICY_STATS; stat++)
        EXPECT_EQ(added.stats[stat], stat == POLICY_LARGEST_GAP ? fresh.stats[stat] : before[stat] + fresh.stats[stat])
            << stat;
    EXPECT_EQ(run({ALL[3], EVERYTHING, 1, true, above}, t).stats[POLICY_LARGEST_GAP], 1e3);
}

TEST(PolicyLoss, GradientsDependOnTheTokenAlone) {
    const Tokens t = random_tokens(1300, 0.3, 29);
    const Result whole = run({ALL[3]}, t);
    std::vector<double> parts;
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, 511}, {511, 512}, {512, 1300}}) {
        const Result part = run({ALL[3]}, t.range(begin, end));
        parts.insert(parts.end(), part.dlosses.begin(), part.dlosses.end());
    }
    expect_same_bits("dlosses", whole.dlosses, parts);
    const Result without = run({ALL[3], EVERYTHING, 1, false}, t);
    expect_same_bits("stats", whole.stats, without.stats);
    expect_same_bits("dlosses", without.dlosses, std::vector<double>(1300, NOT_A_NUMBER));
    expect_deterministic("stats", [&] { return run({ALL[3]}, t).stats; });
}

TEST(PolicyLossArguments, InvalidArgumentsAreErrors) {
    const Tokens t = random_tokens(4, 0.3, 31);
    const auto refused = [&](const Call& call, const std::string& why) {
        expect_error([&] { run(call, t); }, "policy_loss: " + why);
    };
    refused({{-0.5f, 0.2f, 0, 2}}, "clip_low is -0.5, expected at least 0");
    refused({{0.2f, -1, 0, 2}}, "clip_high is -1, expected at least 0");
    refused({{0.2f, 0.2f, -1, 2}}, "kl is -1, expected at least 0");
    refused({{0.2f, 0.2f, 0, 0.5f}}, "importance_cap is 0.5, expected at least 1");
    refused({{0.2f, 0.2f, 0.5f, 2}, {true, true, false}}, "reference_logps is missing with kl 0.5");

    const TestArray four = TestArray::random({4}, 1), three = TestArray::random({3}, 1),
                    stats = TestArray::doubles(std::vector<double>(NUM_POLICY_STATS), {NUM_POLICY_STATS});
    const auto with = [&](Tensor PolicyLoss::*member, const Tensor& value) {
        PolicyLoss x;
        x.losses = x.advantages = x.weights = four;
        x.stats = stats;
        x.*member = value;
        return x;
    };
    const auto wrong = [&](Tensor PolicyLoss::*member, const char* name) {
        expect_error([&] { policy_loss(with(member, three), Stream{}); },
                     str("policy_loss: ", name, " is fp32 [3], expected fp32 [4]"));
    };
    wrong(&PolicyLoss::dlosses, "dlosses");
    wrong(&PolicyLoss::old_logps, "old_logps");
    wrong(&PolicyLoss::sampler_logps, "sampler_logps");
    wrong(&PolicyLoss::reference_logps, "reference_logps");
    wrong(&PolicyLoss::advantages, "advantages");
    wrong(&PolicyLoss::weights, "weights");
    expect_error([&] { policy_loss(with(&PolicyLoss::weights, Tensor{}), Stream{}); },
                 "policy_loss: weights is missing");
    expect_error([&] { policy_loss(with(&PolicyLoss::stats, four), Stream{}); },
                 str("policy_loss: stats is fp32 [4], expected fp64 [", int(NUM_POLICY_STATS), "]"));
}
