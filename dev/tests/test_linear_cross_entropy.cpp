// The head and its loss against the oracle, with each dtype: parts of tiles, padded vocabularies, ignored targets, gaps
// between rows, gradients added to. On Hopper also the kernel without a pass over the logits, with each size of
// cluster, and the logits that only its exponentials could overflow on.
#include "kernels/linear_cross_entropy.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/random_targets.h"
#include "dev/tests/test_util.h"
#include "dev/tests/vectors.h"
#include "kernels/cross_entropy.h"
#include "runtime/device/blas_stream.h"
#ifdef HAVE_SM90A
#include "kernels/cross_entropy_hopper.h"
#include "runtime/device/blas.h"
#endif

namespace {

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

// The RMS error of an element of a matrix: of fp32 sums of K terms with magnitude `mag`, and of `noise` times the RMS
// error of a rounding to the dtype, 2^-9/√3 = 1.13e-3 for bf16 and an eighth of it for fp16, with the margin of
// expect_close(). Rows may have three times that, so that a wrong row in a large matrix fails.
struct ErrorModel {
    std::vector<double> mag, noise;
    int64_t K;
};

void expect_rms(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                const ErrorModel& model, int64_t row_size, DType T) {
    ASSERT_EQ(got.size(), ref.size()) << what;
    const double rounding = T == DType::BF16 ? 2e-3 : T == DType::F16 ? 2.5e-4 : 0;
    const double fp32 = 4 * UNIT_ROUNDOFF * std::sqrt(1 + double(model.K) / 4096);
    double total = 0, total_limit = 0, row = 0, row_limit = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double error = got[i] - ref[i], a = fp32 * model.mag[i], b = rounding * model.noise[i];
        row += error * error;
        row_limit += a * a + b * b;
        if ((i + 1) % size_t(row_size)) continue;
        ASSERT_LE(std::sqrt(row), 3 * std::sqrt(row_limit)) << what << ", row " << i / size_t(row_size);
        total += row;
        total_limit += row_limit;
        row = row_limit = 0;
    }
    ASSERT_LE(std::sqrt(total), std::sqrt(total_limit)) << what;
}

struct Sizes {
    int64_t n, V, Vp, C;
};

struct Case {
    Sizes s;
    bool biased = false, ignored = false, accumulate = false;
    Softcap softcap;
    double scale = 1;       // of the logits
    bool by_token = false;  // a gradient for each token, in two calls
};

// A matrix with `gap` columns of NaN behind each row.
TestArray with_gaps(DType T, const std::vector<double>& values, int64_t rows, int64_t columns, int64_t gap) {
    std::vector<double> all(size_t(rows * (columns + gap)), NOT_A_NUMBER);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) all[size_t(r * (columns + gap) + c)] = values[size_t(r * columns + c)];
    return TestArray::of(T, all, {rows, columns + gap});
}

std::vector<double> absolute(std::vector<double> x) {
    for (double& v : x) v = std::fabs(v);
    return x;
}

// √(Σ (a·b)²) for each element of a·b: the RMS of a sum of independent errors.
std::vector<double> independent(const std::vector<double>& a, const std::vector<double>& b, bool transpose_a, int64_t M,
                                int64_t N, int64_t K) {
    std::vector<double> a2 = a, b2 = b;
    for (double& v : a2) v *= v;
    for (double& v : b2) v *= v;
    std::vector<double> sums =
        reference::matmul(a2.data(), b2.data(), transpose_a, false, nullptr, nullptr, M, N, K).value;
    for (double& v : sums) v = std::sqrt(v);
    return sums;
}

// exact: the logits are not rounded to T on the way to the losses.
void check_calls(DType T, const Case& c, bool exact, Stream stream) {
    const auto [n, V, Vp, C] = c.s;
    SCOPED_TRACE(str("n ", n, " V ", V, " Vp ", Vp, " C ", C, " bias ", c.biased, " ignored ", c.ignored,
                     " accumulate ", c.accumulate, " softcap ", int(c.softcap.function), " scale ", c.scale,
                     " by token ", c.by_token));
    constexpr int64_t GAP = 8;
    const std::vector<double> x = TestArray::random(T, {n, C}, 1).values();
    std::vector<double> w = TestArray::random(T, {Vp, C}, 2, c.scale / std::sqrt(double(C))).values();
    std::fill(w.begin() + V * C, w.end(), rounded(T, 1e3));  // padding, which must not matter
    const TestArray inp = with_gaps(T, x, n, C, GAP), weight = TestArray::of(T, w, {Vp, C});
    const TestArray bias = TestArray::random(T, {Vp}, 3), losses = TestArray::poisoned({n});
    const TestArray dinp = TestArray::poisoned(T, {n, C + GAP}), logits = TestArray::poisoned(T, {n, Vp + GAP});
    const TestArray dweight = c.accumulate ? TestArray::random({Vp, C}, 5, 1e-2) : TestArray::poisoned({Vp, C});
    const TestArray dbias = c.accumulate ? TestArray::random({Vp}, 6, 1e-2) : TestArray::poisoned({Vp});
    const std::vector<int32_t> target_ids = random_targets(n, V, c.ignored);
    const TestArray targets = TestArray::ints(target_ids, {n});

    LinearCrossEntropy head;
    head.losses = losses;
    head.dinp = dinp.tensor().columns(0, C);
    head.dweight = dweight;
    head.inp = inp.tensor().columns(0, C);
    head.weight = weight;
    head.targets = targets;
    head.logits = logits.tensor().columns(0, Vp);
    head.V = V;
    head.dloss = c.by_token ? NOT_A_NUMBER : 0.37f;
    const std::vector<double> dloss = c.by_token ? random_dlosses(target_ids) : std::vector<double>(size_t(n), 0.37f);
    const TestArray dlosses = TestArray::of(dloss, {n});
    if (c.by_token) head.dlosses = dlosses;
    head.softcap = c.softcap;
    head.accumulate = c.accumulate;
    if (c.biased) {
        head.bias = bias;
        head.dbias = dbias;
    }
    linear_cross_entropy_forward(head, stream);
    const std::vector<double> losses_alone = losses.fetch();
    expect_same_bits("inp", inp.fetch(), inp.values());
    if (c.by_token) {
        linear_cross_entropy_losses(head, stream);
        expect_same_bits("losses", losses_alone, losses.fetch());
        expect_same_bits("inp", inp.fetch(), inp.values());
        linear_cross_entropy_gradient(head, stream);
    } else {
        linear_cross_entropy(head, stream);
    }
    expect_same_bits("losses alone", losses_alone, losses.fetch());

    const reference::Values z =
        reference::matmul_forward(x.data(), w.data(), c.biased ? bias.data() : nullptr, n, C, Vp);
    const reference::CrossEntropy ce =
        reference::cross_entropy(z.value.data(), target_ids.data(), IGNORE_TARGET, 1, n, V, Vp, c.softcap);
    const std::vector<double> d = scaled_rows(ce.dlogits.value, dloss);
    // An error of a logit moves the loss by p·error and its own error, a gradient by p·(that and its own error).
    std::vector<double> loss_mag = ce.losses.mag, loss_noise(size_t(n), 0.0);
    std::vector<double> d_mag = scaled_rows(c.by_token ? ce.mag_from_losses : ce.dlogits.mag, absolute(dloss));
    // The largest error of a rounding, 2^-8 in bf16, is twice the allowed RMS: of few tokens one number may dominate.
    const double small_sample = n < 32 ? 2 : 1;
    std::vector<double> d_noise = absolute(d);
    for (double& v : d_noise) v *= small_sample;
    for (int64_t i = 0; i < n; i++) {
        if (target_ids[size_t(i)] == IGNORE_TARGET) continue;
        const double* const row = &z.value[size_t(i * Vp)];
        const double largest = *std::max_element(row, row + V);
        double sum = 0, mag = 0, noise2 = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(row[v] - largest);
        const auto p = [&](int64_t v) { return std::exp(row[v] - largest) / sum; };
        for (int64_t v = 0; v < V; v++) {
            mag += p(v) * z.mag[size_t(i * Vp + v)];
            noise2 += p(v) * row[v] * p(v) * row[v];
        }
        const size_t target = size_t(i * Vp + target_ids[size_t(i)]);
        loss_mag[size_t(i)] += mag + z.mag[target];
        if (!exact) loss_noise[size_t(i)] = std::sqrt(noise2) + std::fabs(z.value[target]);
        for (int64_t v = 0; v < V; v++) {
            const size_t at = size_t(i * Vp + v);
            d_mag[at] += std::fabs(dloss[size_t(i)]) * p(v) * (z.mag[at] + mag);
            if (!exact) d_noise[at] += std::fabs(dloss[size_t(i)]) * p(v) * (std::fabs(row[v]) + std::sqrt(noise2));
        }
    }
    expect_rms("losses", losses.fetch(), ce.losses.value, {loss_mag, loss_noise, V + C}, n, T);

    const std::vector<double> w_abs = absolute(w), x_abs = absolute(x);
    // dinp is rounded twice, dlogits and, for dweight, inp once.
    const reference::Values dx = reference::matmul_backward_input(d.data(), w.data(), nullptr, n, C, Vp);
    ErrorModel model{reference::matmul_backward_input(d_mag.data(), w_abs.data(), nullptr, n, C, Vp).value,
                     independent(d_noise, w, false, n, C, Vp), Vp};
    for (size_t i = 0; i < dx.value.size(); i++) model.noise[i] += std::sqrt(2.0) * std::fabs(dx.value[i]);
    expect_rms("dinp", take_columns(dinp.fetch(), C + GAP, C), dx.value, model, C, T);
    expect_gaps_untouched("dinp", dinp.fetch(), C + GAP, C);
    expect_gaps_untouched("inp", inp.fetch(), C + GAP, C);

    const reference::Values dw =
        reference::matmul_backward_weight(d.data(), x.data(), c.accumulate ? dweight.data() : nullptr, n, C, Vp);
    model = {reference::matmul_backward_weight(d_mag.data(), x_abs.data(),
                                               c.accumulate ? absolute(dweight.values()).data() : nullptr, n, C, Vp)
                 .value,
             independent(d_noise, x, true, Vp, C, n), n};
    for (double& v : model.noise) v *= std::sqrt(2.0);
    for (double& v : model.mag) v += 1e-12;  // of rows without a gradient
    expect_rms("dweight", dweight.fetch(), dw.value, model, C, T);
    if (!c.biased) return;
    const reference::Values db =
        reference::matmul_backward_bias(d.data(), c.accumulate ? dbias.data() : nullptr, n, Vp);
    model = {
        reference::matmul_backward_bias(d_mag.data(), c.accumulate ? absolute(dbias.values()).data() : nullptr, n, Vp)
            .value,
        independent(d_noise, std::vector<double>(size_t(n), 1.0), true, Vp, 1, n), n};
    expect_rms("dbias", dbias.fetch(), db.value, model, Vp, T);
}

// In one call, and in two with a gradient for each token.
void check(DType T, Case c, bool exact, Stream stream) {
    check_calls(T, c, exact, stream);
    c.by_token = true;
    check_calls(T, c, exact, stream);
}

// Equal gradients of all tokens, given as one number and for each token. Both forms are within the bounds of check(),
// and so their difference is within twice those: with logits of a deviation of 1 and losses of some 7, u·10 in fp32; in
// 16 bits the roundings of dlogits or of the factors, and of dinp: 2·√3 roundings.
void check_forms_agree(DType T, Stream stream) {
    const int64_t n = 60, V = 777, Vp = 832, C = 136;
    const TestArray weight = TestArray::random(T, {Vp, C}, 2, 1 / std::sqrt(double(C)));
    const TestArray targets = TestArray::ints(random_targets(n, V, true), {n}),
                    logits = TestArray::poisoned(T, {n, Vp});
    const TestArray dlosses = TestArray::of(std::vector<double>(size_t(n), 0.37), {n});
    std::vector<std::vector<double>> results[2];
    for (const bool by_token : {false, true}) {
        const TestArray inp = TestArray::random(T, {n, C}, 1), losses = TestArray::poisoned({n});
        const TestArray dinp = TestArray::poisoned(T, {n, C}), dweight = TestArray::poisoned({Vp, C});
        LinearCrossEntropy head;
        head.losses = losses;
        head.dinp = dinp;
        head.dweight = dweight;
        head.inp = inp;
        head.weight = weight;
        head.targets = targets;
        head.logits = logits;
        head.V = V;
        head.dloss = by_token ? 1e3f : 0.37f;
        if (by_token) head.dlosses = dlosses;
        linear_cross_entropy(head, stream);
        results[by_token] = {losses.fetch(), dinp.fetch(), dweight.fetch()};
    }
    expect_same_bits("losses", results[0][0], results[1][0]);
    const double limit = T == DType::F32 ? 20 * UNIT_ROUNDOFF : T == DType::BF16 ? 7e-3 : 9e-4;
    for (const size_t i : {1, 2})
        EXPECT_LE(rms(difference(results[0][i], results[1][i])), limit * rms(results[0][i]))
            << (i == 1 ? "dinp" : "dweight");
}

// Hopper's tiles have 128 x 192 logits.
constexpr Sizes SIZES[] = {{1, 1, 8, 8}, {3, 50, 64, 16}, {130, 193, 200, 72}, {257, 777, 832, 136}};

struct BlasStream {
    Stream stream = create_blas_stream();
    BlasStream() = default;
    BlasStream(const BlasStream&) = delete;
    ~BlasStream() { destroy_stream(stream); }
};

class LinearCrossEntropyTest : public DTypeTest {
  protected:
    BlasStream blas;
    void SetUp() override {
#ifdef HAVE_SM90A  // as on other GPUs
        blas_of("test", blas.stream).only_kernel = GemmKernel::Library;
#endif
    }
};

}  // namespace

TEST_P(LinearCrossEntropyTest, MatchesOracle) {
    for (const Sizes& s : SIZES)
        for (const bool ignored : {false, true})
            for (const bool biased : {false, true})
                check(activation(), {s, biased, ignored, ignored != biased, {}}, false, blas.stream);
}

TEST_P(LinearCrossEntropyTest, SoftcapMatchesOracle) {
    check(activation(), {SIZES[2], false, true, false, {Softcap::Function::Tanh, 15}}, false, blas.stream);
}

TEST_P(LinearCrossEntropyTest, FormsAgree) {
    check_forms_agree(activation(), blas.stream);
}

INSTANTIATE_DTYPES(LinearCrossEntropyTest);

TEST(LinearCrossEntropyArguments, InvalidArgumentsAreErrors) {
    const BlasStream blas;
    const TestArray inp = TestArray::random({3, 8}, 1), weight = TestArray::random({16, 8}, 2);
    const TestArray dinp = TestArray::poisoned({3, 8}), logits = TestArray::poisoned({3, 16});
    const TestArray losses = TestArray::poisoned({3}), targets = TestArray::ints({0, 1, 2}, {3});
    LinearCrossEntropy head;
    head.losses = losses;
    head.dinp = dinp;
    head.inp = inp;
    head.weight = weight;
    head.targets = targets;
    head.logits = logits;
    head.V = 17;
    expect_error([&] { linear_cross_entropy(head, blas.stream); },
                 "cross_entropy_forward_backward: V is 17, expected 1 … 16, the columns of logits");
    expect_error([&] { linear_cross_entropy_gradient(head, blas.stream); },
                 "cross_entropy_backward: V is 17, expected 1 … 16, the columns of logits");
    head.V = 16;
    expect_error([&] { linear_cross_entropy_gradient(head, blas.stream); },
                 "cross_entropy_backward: dlosses is missing");
    head.dinp = logits;
    expect_error([&] { linear_cross_entropy(head, blas.stream); },
                 "matmul_backward_input: dinp is fp32 [3, 16], expected fp32 [3, 8]");
}

#ifdef HAVE_SM90A
namespace {

// Without a pass over the logits.
class HopperCrossEntropy : public testing::TestWithParam<GemmKernel> {
  protected:
    static constexpr DType T = DType::BF16;
    BlasStream blas;
    void SetUp() override {
        blas_of("test", blas.stream).only_kernel = GetParam();
        const TestArray x = TestArray::poisoned(T, {8, 8});
        LinearCrossEntropy head;
        head.inp = head.weight = head.logits = x;
        if (!hopper_cross_entropy_takes(head, blas.stream)) GTEST_SKIP() << "not a Hopper GPU";
    }

    struct Result {
        std::vector<double> losses, dinp, dweight;
    };
    // Token i has the logits `logits[i]`, through weights that are the identity. dlosses: 1, or in two calls these.
    Result of_logits(const std::vector<std::vector<double>>& logits, const std::vector<int32_t>& target_ids, int64_t V,
                     const std::vector<double>& dlosses = {}) {
        const int64_t n = int64_t(logits.size()), C = int64_t(logits[0].size());
        std::vector<double> x, identity(size_t(C * C), 0.0);
        for (const auto& row : logits) x.insert(x.end(), row.begin(), row.end());
        for (int64_t i = 0; i < C; i++) identity[size_t(i * C + i)] = 1;
        const TestArray inp = TestArray::of(T, x, {n, C}), weight = TestArray::of(T, identity, {C, C});
        const TestArray losses = TestArray::poisoned({n}), dinp = TestArray::poisoned(T, {n, C});
        const TestArray dweight = TestArray::poisoned({C, C}), scratch = TestArray::poisoned(T, {n, C});
        const TestArray targets = TestArray::ints(target_ids, {n});
        LinearCrossEntropy head;
        head.losses = losses;
        head.dinp = dinp;
        head.dweight = dweight;
        head.inp = inp;
        head.weight = weight;
        head.targets = targets;
        head.logits = scratch;
        head.V = V;
        const TestArray by_token = TestArray::of(dlosses.empty() ? std::vector<double>(size_t(n), 1) : dlosses, {n});
        if (!dlosses.empty()) head.dlosses = by_token;
        EXPECT_TRUE(hopper_cross_entropy_takes(head, blas.stream));
        linear_cross_entropy(head, blas.stream);
        return {losses.fetch(), dinp.fetch(), dweight.fetch()};
    }
};
INSTANTIATE_TEST_SUITE_P(Clusters, HopperCrossEntropy, testing::Values(GemmKernel::Hopper1, GemmKernel::Hopper2),
                         [](const auto& test) { return test.param == GemmKernel::Hopper1 ? "One" : "Two"; });

}  // namespace

TEST_P(HopperCrossEntropy, MatchesOracle) {
    for (const Sizes& s : SIZES)
        for (const bool ignored : {false, true}) check(T, {s, false, ignored, ignored, {}}, true, blas.stream);
    check(T, {SIZES[3], false, true, false, {}, 8}, true, blas.stream);              // likely and unlikely targets
    check(T, {{4100, 1544, 1600, 72}, false, false, false, {}}, true, blas.stream);  // more tiles than an H100 runs
}

// dlogits = dinp here. Targets far below and far above the other logits.
TEST_P(HopperCrossEntropy, UnlikelyAndCertainTargets) {
    const std::vector<double> row = {-30, 20, 30, 0, -10, 20, 0, 1e3};  // the last is padding
    double sum = 0;
    for (size_t v = 0; v < 7; v++) sum += std::exp(row[v]);
    const size_t target[3] = {0, 2, 1};
    const std::vector<double> two_calls = {1, -0.5, 0.25};
    for (const std::vector<double>& dlosses : {std::vector<double>(), two_calls}) {
        const Result r = of_logits({row, row, row}, {0, 2, 1}, 7, dlosses);
        for (size_t i = 0; i < 3; i++) {
            // fp32 numbers up to 60, log2 of e times them and ln of 2^87: 8 roundings of 60·2^-24
            EXPECT_NEAR(r.losses[i], std::log(sum) - row[target[i]], 3e-5) << i;
            for (size_t v = 0; v < 8; v++) {
                const double p = v < 7 ? std::exp(row[v]) / sum : 0, rest = (sum - std::exp(row[v])) / sum;
                const double expected = (v == target[i] ? -rest : p) * (dlosses.empty() ? 1 : dlosses[i]);
                // Three roundings to bf16; of the certain target (p = 1 − 9e-5) fp32 leaves errors of 1e-6.
                EXPECT_NEAR(r.dinp[i * 8 + v], expected, 3 * 0x1p-9 * std::fabs(expected) + 1e-6) << i << " " << v;
            }
        }
    }
}

// Beyond 69 a loss grows no more, but stays finite, and so do the gradients.
TEST_P(HopperCrossEntropy, LossesAreBounded) {
    const Result r = of_logits({{-500, 500, 0, 0, 0, 0, 0, 0}}, {0}, 8);
    EXPECT_NEAR(r.losses[0], std::log(7.0) + 100 * std::log(2.0), 1e-4);  // seven logits are above −431
    EXPECT_NEAR(r.dinp[0], -1, 2 * 0x1p-8);
    for (size_t v = 1; v < 8; v++) EXPECT_NEAR(r.dinp[v], 1.0 / 7, 2 * 0x1p-11) << v;
}

TEST_P(HopperCrossEntropy, NaNAndBadTargetsGiveNaN) {
    for (size_t at = 0; at < 8; at++) {
        std::vector<double> row(8, 0.5);
        row[at] = NOT_A_NUMBER;
        EXPECT_TRUE(std::isnan(of_logits({row}, {3}, 8).losses[0])) << at;
    }
    const std::vector<double> row(8, 0.5);
    for (const int32_t bad : {7, -2, 8, 1 << 30}) {
        const Result r = of_logits({row, row}, {6, bad}, 7);
        EXPECT_TRUE(std::isfinite(r.losses[0]));
        EXPECT_TRUE(std::isnan(r.losses[1])) << bad;
    }
}

TEST_P(HopperCrossEntropy, IgnoredTokensGiveExactZeros) {
    const std::vector<double> row = {1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<double> two_calls = {NOT_A_NUMBER, 1};
    for (const std::vector<double>& dlosses : {std::vector<double>(), two_calls}) {
        const Result r = of_logits({row, row}, {IGNORE_TARGET, IGNORE_TARGET}, 8, dlosses);
        for (const std::vector<double>* all : {&r.losses, &r.dinp, &r.dweight})
            for (const double x : *all) EXPECT_EQ(x, 0);
    }
}

TEST_P(HopperCrossEntropy, FormsAgree) {
    check_forms_agree(T, blas.stream);
}
#endif
