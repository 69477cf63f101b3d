// Cross-entropy and its gradient against the oracle, with and without a softcap: padded vocabularies, ignored targets,
// logits so large that exp overflows without the maximum subtracted, logits of −∞.
#include "kernels/cross_entropy.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/random_targets.h"
#include "dev/tests/test_util.h"

namespace {

class CrossEntropy : public DTypeTest {};

constexpr double INF = std::numeric_limits<double>::infinity();

std::vector<double> absolute(std::vector<double> x) {
    for (double& v : x) v = std::fabs(v);
    return x;
}

// logits [N, Vp] with gaps of `gap` columns; padded columns hold huge values that must not matter.
void check(DType T, int64_t N, int64_t V, int64_t Vp, int64_t gap, double scale, double shift, bool some_ignored,
           Softcap softcap = {}) {
    SCOPED_TRACE(str("N ", N, " V ", V, " Vp ", Vp, " scale ", scale, " shift ", shift, " ignored ", some_ignored,
                     " softcap ", int(softcap.function), " ", softcap.cap));
    const int64_t ld = Vp + gap;
    std::vector<double> values(size_t(N * ld), std::numeric_limits<double>::quiet_NaN());
    for (int64_t n = 0; n < N; n++)
        for (int64_t v = 0; v < Vp; v++)
            values[size_t(n * ld + v)] = v < V ? normal01(1, 0, uint64_t(n * Vp + v)) * scale + shift : 1e30;
    const std::vector<int32_t> target_ids = random_targets(N, V, some_ignored);
    const TestArray logits = TestArray::of(T, values, {N, ld}), targets = TestArray::ints(target_ids, {N});
    const TestArray losses = TestArray::poisoned({N}), same_losses = TestArray::poisoned({N});
    const Tensor view = logits.tensor().columns(0, Vp);
    const float dloss = 0.37f;
    const reference::CrossEntropy ref = reference::cross_entropy(
        take_columns(logits.values(), ld, Vp).data(), target_ids.data(), IGNORE_TARGET, dloss, N, V, Vp, softcap);
    cross_entropy_forward(losses, view, targets, V, softcap, Stream{});
    expect_close("losses", losses.fetch(), ref.losses.value, ref.losses.mag, V, 1);
    expect_same_bits("logits", logits.values(), logits.fetch());

    cross_entropy_forward_backward(same_losses, view, targets, V, dloss, softcap, Stream{});
    expect_same_bits("losses", losses.fetch(), same_losses.fetch());
    const std::vector<double> d = take_columns(logits.fetch(), ld, Vp);
    expect_close("dlogits", d, ref.dlogits.value, ref.dlogits.mag, V, Vp, T);
    expect_gaps_untouched("dlogits", logits.fetch(), ld, Vp);
    const auto expect_zeros = [&](const std::vector<double>& gradient) {
        for (int64_t n = 0; n < N; n++)
            for (int64_t v = 0; v < Vp; v++)
                if (v >= V || target_ids[size_t(n)] == IGNORE_TARGET) {
                    ASSERT_EQ(gradient[size_t(n * Vp + v)], 0) << n << " " << v;
                }
    };
    expect_zeros(d);

    // From the losses, with a gradient for each token.
    const std::vector<double> dlosses = random_dlosses(target_ids);
    const TestArray again = TestArray::of(T, values, {N, ld});
    cross_entropy_backward(again.tensor().columns(0, Vp), losses, TestArray::of(dlosses, {N}), targets, V, softcap,
                           Stream{});
    const std::vector<double> by_token = take_columns(again.fetch(), ld, Vp);
    const reference::CrossEntropy unit = reference::cross_entropy(
        take_columns(again.values(), ld, Vp).data(), target_ids.data(), IGNORE_TARGET, 1, N, V, Vp, softcap);
    std::vector<double> mag = scaled_rows(unit.mag_from_losses, absolute(dlosses));
    for (double& m : mag) m += 0x1p-102;
    expect_close("dlogits from losses", by_token, scaled_rows(unit.dlogits.value, dlosses), mag, V, Vp, T);
    expect_gaps_untouched("dlogits from losses", again.fetch(), ld, Vp);
    expect_zeros(by_token);
    expect_same_bits("losses", losses.fetch(), same_losses.fetch());
}

}  // namespace

TEST_P(CrossEntropy, MatchesOracle) {
    const int64_t sizes[][3] = {{1, 1, 1},       {3, 2, 2},         {5, 17, 128},       {4, 64, 64}, {9, 100, 128},
                                {2, 1000, 1024}, {3, 50257, 50304}, {2, 128256, 128256}};  // longer than shared memory
    for (const auto& s : sizes)
        for (const bool some_ignored : {false, true})
            check(activation(), s[0], s[1], s[2], s[0] % 2 * 3, 3, 0, some_ignored);
}

TEST_P(CrossEntropy, LargeLogitsMatchOracle) {
    for (const double shift : {-3e4, 0.0, 3e4}) check(activation(), 7, 300, 384, 0, 50, shift, false);
    check(activation(), 5, 40, 40, 0, 1e4, 0, false);   // one token has probability 1
    check(activation(), 5, 40, 40, 0, 1e-6, 0, false);  // all tokens are equally likely
}

constexpr Softcap CAPS[] = {{Softcap::Function::Tanh, 15},
                            {Softcap::Function::Tanh, 30},
                            {Softcap::Function::Rsqrt, 15},
                            {Softcap::Function::Rsqrt, 0.5}};

// Logits far below the cap, around it, and far above.
TEST_P(CrossEntropy, SoftcapMatchesOracle) {
    const int64_t sizes[][3] = {{1, 1, 1}, {5, 17, 128}, {9, 100, 128}, {2, 1000, 1024}, {2, 50257, 50304}};
    for (const Softcap& softcap : CAPS)
        for (const double scale : {0.1, 3.0, 40.0})
            for (const auto& s : sizes)
                check(activation(), s[0], s[1], s[2], s[0] % 2 * 3, scale * double(softcap.cap) / 15, 0, s[0] > 5,
                      softcap);
    for (const Softcap& softcap : CAPS) check(activation(), 4, 300, 384, 0, 50, 3e4, false, softcap);  // all saturated
}

TEST_P(CrossEntropy, SoftcapBoundsInfiniteLogits) {
    for (const Softcap& softcap : CAPS) {
        const TestArray logits = TestArray::of(activation(), {INF, -INF, 0}, {1, 3}), losses = TestArray::poisoned({1});
        const TestArray targets = TestArray::ints({2}, {1});
        cross_entropy_forward_backward(losses, logits, targets, 3, 1, softcap, Stream{});
        const double c = double(softcap.cap);  // logits and loss of up to c: fp32 errs by some u·c, u = 6e-8
        EXPECT_NEAR(losses.fetch()[0], std::log(std::exp(c) + std::exp(-c) + 1), 1e-5 * c);
        EXPECT_LT(std::fabs(logits.fetch()[0]), 1e-20);
        EXPECT_LT(std::fabs(logits.fetch()[1]), 1e-20);
    }
}

TEST_P(CrossEntropy, ZeroProbabilityTokens) {
    const TestArray logits = TestArray::of(activation(), {1, -INF, 2, -INF, -INF, 3}, {2, 3}),
                    losses = TestArray::poisoned({2});
    const TestArray targets = TestArray::ints({0, 2}, {2});
    cross_entropy_forward_backward(losses, logits, targets, 3, 1, {}, Stream{});
    const double p = 1 / (1 + std::exp(1.0));
    EXPECT_NEAR(losses.fetch()[0], -std::log(p), 1e-6);  // fp32, from numbers up to 3: 5·3u = 9e-7
    EXPECT_EQ(losses.fetch()[1], 0);
    const std::vector<double> d = logits.fetch(), expected = {p - 1, 0, 1 - p, 0, 0, 0};
    for (size_t i = 0; i < d.size(); i++)  // numbers up to 3/4: 16u in fp32, rounded once to bf16 by at most 2⁻⁹
        EXPECT_NEAR(d[i], expected[i], activation() == DType::F32 ? 1e-6 : 0x1p-8) << i;
}

TEST_P(CrossEntropy, NaNPropagates) {
    for (int64_t at = 0; at < 40; at++) {
        std::vector<double> row(40, 0.5);
        row[size_t(at)] = std::numeric_limits<double>::quiet_NaN();
        const TestArray logits = TestArray::of(activation(), row, {1, 40}), losses = TestArray::random({1}, 1);
        for (const Softcap& softcap : {Softcap{}, CAPS[0], CAPS[2]}) {
            cross_entropy_forward(losses, logits, TestArray::ints({3}, {1}), 40, softcap, Stream{});
            EXPECT_TRUE(std::isnan(losses.fetch()[0])) << "NaN at " << at;
        }
    }
}

TEST_P(CrossEntropy, BitsDoNotDependOnThreads) {
    const int64_t N = 50, V = 500;
    const TestArray targets = TestArray::ints(random_targets(N, V, true), {N});
    expect_deterministic("losses and dlogits", [&] {
        const TestArray logits = TestArray::random(activation(), {N, V}, 1), losses = TestArray::poisoned({N});
        cross_entropy_forward_backward(losses, logits, targets, V, 0.1f, {}, Stream{});
        const TestArray again = TestArray::random(activation(), {N, V}, 1), dlosses = TestArray::random({N}, 2);
        cross_entropy_backward(again, losses, dlosses, targets, V, {}, Stream{});
        std::vector<double> all = logits.fetch();
        for (const double x : losses.fetch()) all.push_back(x);
        for (const double x : again.fetch()) all.push_back(x);
        return all;
    });
}

INSTANTIATE_DTYPES(CrossEntropy);

TEST(CrossEntropyArguments, InvalidArgumentsAreErrors) {
    const TestArray logits = TestArray::random({3, 8}, 1), losses = TestArray::poisoned({3}),
                    two = TestArray::poisoned({2});
    const TestArray targets = TestArray::ints({0, 1, 2}, {3});
    expect_error([&] { cross_entropy_forward(two, logits, targets, 8, {}, Stream{}); },
                 "cross_entropy_forward: losses is fp32 [2], expected fp32 [3]");
    expect_error([&] { cross_entropy_forward_backward(losses, logits, losses, 8, 1, {}, Stream{}); },
                 "cross_entropy_forward_backward: targets is fp32 [3], expected int32 [3]");
    expect_error([&] { cross_entropy_backward(logits, losses, two, targets, 8, {}, Stream{}); },
                 "cross_entropy_backward: dlosses is fp32 [2], expected fp32 [3]");
    expect_error([&] { cross_entropy_backward(logits, losses, {}, targets, 8, {}, Stream{}); },
                 "cross_entropy_backward: dlosses is missing");
    for (const int64_t V : {0, 9})
        expect_error([&] { cross_entropy_forward(losses, logits, targets, V, {}, Stream{}); },
                     str("cross_entropy_forward: V is ", V, ", expected 1 … 8, the columns of logits"));
    expect_error(
        [&] {
            cross_entropy_forward(losses, logits, targets, 8, {Softcap::Function::Tanh, 0}, Stream{});
        },
        "cross_entropy_forward: the cap is 0, expected a positive number");
}

TEST(CrossEntropyArguments, TargetsOutsideTheVocabularyAreErrors) {
    for (const int32_t bad : {7, -2, 8, 1 << 30}) {
        const TestArray logits = TestArray::random({2, 8}, 1), losses = TestArray::poisoned({2});
        const TestArray targets = TestArray::ints({6, bad}, {2});
        const auto call = [&] { cross_entropy_forward_backward(losses, logits, targets, 7, 1, {}, Stream{}); };
#ifdef USE_CUDA  // the launch does not wait for the kernel: the loss is NaN, which skips the step
        call();
        EXPECT_TRUE(std::isfinite(losses.fetch()[0]));
        EXPECT_TRUE(std::isnan(losses.fetch()[1]));
#else
        expect_error(call, str("cross_entropy_forward_backward: targets[1] is ", bad,
                               ", expected 0 … 6 or -1 to ignore the token"));
        expect_same_bits("logits", logits.values(), logits.fetch());
        expect_error([&] { cross_entropy_backward(logits, losses, losses, targets, 7, {}, Stream{}); },
                     str("cross_entropy_backward: targets[1] is ", bad, ", expected 0 … 6 or -1 to ignore the token"));
#endif
    }
}
