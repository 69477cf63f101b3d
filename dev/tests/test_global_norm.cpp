// The global gradient norm and the step's scalars: the norm against float64, clipping, skipping, and the step count.
#include "kernels/global_norm.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

// One number of an array of doubles.
Tensor element(const TestArray& array, int64_t i) {
    Tensor t = array;
    t.data = t.as<double>() + i;
    t.rank = 1;
    t.shape[0] = t.stride[0] = 1;
    return t;
}

// A rank's row of sums; its gradients are added later.
std::vector<double> row_of_sums(double loss_sum) {
    std::vector<double> row(NUM_STEP_SUMS);
    row[SUM_SQUARES] = NAN;
    row[SUM_LOSS] = loss_sum;
    return row;
}

// Runs one step's control over the gradients and returns the scalars afterwards.
StepScalars control(const TestArray& grads, double loss_sum, double loss_scale, StepScalars before,
                    double grad_unit = 1) {
    const TestArray scalars = TestArray::bytes(&before, sizeof(before));
    const TestArray sums = TestArray::doubles(row_of_sums(loss_sum), {1, NUM_STEP_SUMS});
    const TestArray scratch = TestArray::scratch(sum_squares_scratch(grads.tensor().numel()));
    sum_squares(element(sums, SUM_SQUARES), grads, false, scratch, Stream{});
    step_control(scalars, sums, loss_scale, grad_unit, Stream{});
    StepScalars after;
    scalars.fetch_bytes(&after);
    return after;
}

StepScalars fresh(float grad_clip, int64_t t = 0) {
    const float unset = std::numeric_limits<float>::quiet_NaN();
    return {3e-4f, grad_clip, 0.95f, 0, unset, unset, unset, -1, t, 0, {}, {}};
}

// The sum runs in double: what is left is rounding the result to fp32.
void expect_rounded(double got, double ref) {
    EXPECT_NEAR(got, ref, std::fabs(ref) * 1.0001 * UNIT_ROUNDOFF);
}

}  // namespace

TEST(StepControl, NormMatchesFloat64) {
    for (const int64_t n : {0, 1, 7, 31, 32, 33, 32768, 32769, 100003})
        for (const double scale : {1e-30, 1e-3, 1.0, 1e30}) {  // squares of the first and last leave fp32
            SCOPED_TRACE(str("n ", n, " scale ", scale));
            const TestArray grads = TestArray::random({n}, 1, scale);
            const StepScalars s = control(grads, 6, 0.5, fresh(0));
            expect_rounded(s.grad_norm, reference::global_norm(grads.data(), n));
            EXPECT_EQ(s.loss, 3);
            EXPECT_EQ(s.grad_scale, 1);
            EXPECT_EQ(s.skip, 0);
            EXPECT_EQ(s.t, 1);
            EXPECT_EQ(s.lr, 3e-4f);
            EXPECT_EQ(s.momentum, 0.95f);
        }
}

TEST(StepControl, NormOfGradientsInBf16) {
    for (const int64_t n : {1, 1023, 1025, 100003}) {
        const TestArray grads = TestArray::random(DType::BF16, {n}, 1);
        expect_rounded(control(grads, 6, 0.5, fresh(0)).grad_norm, reference::global_norm(grads.data(), n));
    }
}

TEST(StepControl, ClipsOnlyAboveTheGivenNorm) {
    const TestArray grads = TestArray::of({3, 4}, {2});  // norm 5
    EXPECT_EQ(control(grads, 1, 1, fresh(2.5f)).grad_scale, 0.5f);
    EXPECT_EQ(control(grads, 1, 1, fresh(2.5f)).grad_norm, 5);
    EXPECT_EQ(control(grads, 1, 1, fresh(5)).grad_scale, 1);
    EXPECT_EQ(control(grads, 1, 1, fresh(100)).grad_scale, 1);
    EXPECT_EQ(control(grads, 1, 1, fresh(0)).grad_scale, 1);
    EXPECT_EQ(control(grads, 1, 1, fresh(-1)).grad_scale, 1);
    EXPECT_EQ(control(TestArray::of({0, 0}, {2}), 1, 1, fresh(1)).grad_scale, 1);
}

// Gradients that were divided by more tokens than have a target.
TEST(StepControl, GradUnitScalesNormAndGradients) {
    const TestArray grads = TestArray::of({3, 4}, {2});  // norm 5; the true norm is 10
    EXPECT_EQ(control(grads, 1, 1, fresh(0), 2).grad_norm, 10);
    EXPECT_EQ(control(grads, 1, 1, fresh(0), 2).grad_scale, 2);
    EXPECT_EQ(control(grads, 1, 1, fresh(10), 2).grad_scale, 2);
    EXPECT_EQ(control(grads, 1, 1, fresh(5), 2).grad_scale, 1);        // 2 · 5/10
    EXPECT_EQ(control(grads, 1, 1, fresh(2.5f), 2).grad_scale, 0.5f);  // the clipped norm doesn't depend on the unit
    EXPECT_EQ(control(grads, 1, 1, fresh(2.5f), 1).grad_scale, 0.5f);
    EXPECT_THROW(control(grads, 1, 1, fresh(1), 0), Error);
}

TEST(StepControl, NonFiniteStepsAreSkippedAndNotCounted) {
    const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    for (const double bad : {inf, -inf, nan}) {
        for (const int64_t at : {0, 31, 40000, 69999}) {
            std::vector<double> values(70000, 1e-3);
            values[size_t(at)] = bad;
            const StepScalars s = control(TestArray::of(values, {70000}), 1, 1, fresh(1, 41));
            EXPECT_EQ(s.skip, 1) << bad << " at " << at;
            EXPECT_EQ(s.t, 41);
        }
        const StepScalars s = control(TestArray::of({1}, {1}), bad, 1, fresh(1, 41));
        EXPECT_EQ(s.skip, 1) << "loss " << bad;
        EXPECT_EQ(s.t, 41);
    }
    // A norm beyond fp32 is not finite either.
    EXPECT_EQ(control(TestArray::of({3e38, 3e38}, {2}), 1, 1, fresh(1)).skip, 1);
    EXPECT_EQ(control(TestArray::of({3e38}, {1}), 1, 1, fresh(1, 41)).t, 42);
}

// A norm above spike_factor times the median of the last GRAD_NORM_WINDOW norms is skipped, as soon as there are so
// many.
TEST(StepControl, SpikesAreSkipped) {
    const auto step = [](StepScalars& s, double norm) {
        s = control(TestArray::of({norm}, {1}), 1, 1, s);
        return s.skip;
    };
    StepScalars s = fresh(1);
    s.spike_factor = 3;
    for (int i = 0; i < GRAD_NORM_WINDOW; i++) {
        SCOPED_TRACE(i);
        EXPECT_EQ(step(s, i == 7 ? 1000 : 1 + i % 2), SKIP_NONE);  // not judged yet
        EXPECT_EQ(s.norm_count, i + 1);
    }
    EXPECT_EQ(s.t, GRAD_NORM_WINDOW);
    // 32 times 1, 30 times 2, once 1000: the median is 1. Both sides, because a median that is not set may be anything.
    StepScalars copy = s;
    EXPECT_EQ(step(copy, 2.999), SKIP_NONE);
    EXPECT_EQ(step(s, 3.001), SKIP_SPIKE);
    EXPECT_EQ(s.t, GRAD_NORM_WINDOW);
    EXPECT_EQ(s.norms[0], 3.001f);  // replaces a 1: 31 times 1, 30 times 2: the median is 2
    EXPECT_EQ(step(s, 5.9), SKIP_NONE);
    EXPECT_EQ(step(s, NAN), SKIP_NOT_FINITE);
    EXPECT_EQ(s.norm_count, GRAD_NORM_WINDOW + 2);  // NaN is not counted
    EXPECT_EQ(s.t, GRAD_NORM_WINDOW + 1);
    EXPECT_EQ(step(s, 6.1), SKIP_SPIKE);
    // A new level is accepted after half a window.
    int skipped = 0;
    while (step(s, 20) == SKIP_SPIKE && skipped < 100) skipped++;
    EXPECT_EQ(skipped, GRAD_NORM_WINDOW / 2 + 1);  // then most of the window is at that level
    s.spike_factor = 0;
    EXPECT_EQ(step(s, 1e9), SKIP_NONE);
}

TEST(StepControl, IsDeterministic) {
    const TestArray grads = TestArray::random({200001}, 1);
    expect_deterministic("grad_norm", [&] { return std::vector<double>{control(grads, 1, 1, fresh(1)).grad_norm}; });
}

TEST(SumLosses, MatchesFloat64) {
    for (const int64_t n : {0, 1, 5, 1000})
        for (const bool accumulate : {false, true}) {
            const TestArray losses = TestArray::random({n}, 1, 1, 4);
            const TestArray sum =
                TestArray::doubles({accumulate ? 2.5 : std::numeric_limits<double>::quiet_NaN()}, {1});
            sum_losses(sum, losses, accumulate, Stream{});
            double ref = accumulate ? 2.5 : 0;
            for (const double x : losses.values()) ref += x;
            EXPECT_NEAR(sum.fetch()[0], ref, 1e-12 * (1 + std::fabs(ref))) << n;
        }
}

// Sums over several parts, on each of three ranks, give the norm and the loss of the whole.
TEST(StepControl, AddsPartsAndRanks) {
    const TestArray grads = TestArray::random({90001}, 1), scratch = TestArray::scratch(sum_squares_scratch(90001));
    std::vector<double> rows;
    for (const double loss : {1, 2, 4}) {
        const std::vector<double> row = row_of_sums(loss);
        rows.insert(rows.end(), row.begin(), row.end());
        for (int i = SUM_LOSS + 1; i < NUM_STEP_SUMS; i++) rows[rows.size() - NUM_STEP_SUMS + size_t(i)] = i * loss;
    }
    const TestArray sums = TestArray::doubles(rows, {3, NUM_STEP_SUMS});
    const int64_t ends[] = {0, 1, 30000, 40000, 90000, 90000, 90001};  // two parts a rank
    for (int64_t part = 0; part < 6; part++) {
        sum_squares(element(sums, part / 2 * NUM_STEP_SUMS + SUM_SQUARES),
                    grads.tensor().rows(ends[part], ends[part + 1]), part % 2, scratch, Stream{});
    }
    const StepScalars before = fresh(0.5f, 41);
    const TestArray scalars = TestArray::bytes(&before, sizeof(before));
    step_control(scalars, sums, 0.5, 1, Stream{});
    StepScalars s;
    scalars.fetch_bytes(&s);
    const double norm = reference::global_norm(grads.data(), 90001);
    expect_rounded(s.grad_norm, norm);
    expect_rounded(s.grad_scale, 0.5 / norm);
    EXPECT_EQ(s.loss, 3.5f);
    EXPECT_EQ(s.t, 42);
    EXPECT_EQ(s.pair_stats[PAIR_LOSS], 7);  // not scaled
    for (int i = PAIR_LOSS + 1; i < NUM_PAIR_STATS; i++) EXPECT_EQ(s.pair_stats[i], float(7 * (SUM_LOSS + i))) << i;
}

TEST(StepControl, InvalidArgumentsAreErrors) {
    const TestArray grads = TestArray::random({40000}, 1), short_bytes = TestArray::scratch(3);
    const TestArray scalars = TestArray::scratch(sizeof(StepScalars)),
                    scratch = TestArray::scratch(sum_squares_scratch(40000)), sum = TestArray::doubles({1}, {1}),
                    sums = TestArray::doubles(row_of_sums(1), {1, NUM_STEP_SUMS});
    expect_error([&] { step_control(short_bytes, sums, 1, 1, Stream{}); },
                 str("step_control: scalars is uint8 [3], expected uint8 [", sizeof(StepScalars), "]"));
    expect_error([&] { step_control(scalars, sum, 1, 1, Stream{}); },
                 str("step_control: sums is fp64 [1], expected fp64 [ranks, ", int(NUM_STEP_SUMS), "]"));
    expect_error([&] { sum_squares(sum, sum, false, scratch, Stream{}); },
                 "sum_squares: grads is fp64 [1], expected fp32 or bf16 [n]");
    expect_error([&] { sum_squares(sum, grads, false, short_bytes, Stream{}); },
                 str("sum_squares: scratch is uint8 [3], expected uint8 [", sum_squares_scratch(40000), "] or more"));
    expect_error([&] { sum_losses(grads, grads, false, Stream{}); },
                 "sum_losses: loss_sum is fp32 [40000], expected fp64 [1]");
}
