// AdamW against the oracle over several steps: segments with and without decay, gaps between them, clipping, skipping.
#include "kernels/adamw.h"

#include "dev/reference.h"
#include "dev/test_util.h"

namespace {

TestArray make_scalars(float lr, float grad_scale, bool skip, int64_t t) {
    const StepScalars s = {lr, 1, 2, 3, grad_scale, skip, t};
    return TestArray::bytes(&s, sizeof(s));
}

// v is a mean of squares: never negative.
TestArray squares(int64_t n, uint64_t seed, double scale) {
    std::vector<double> values;
    for (int64_t i = 0; i < n; i++) values.push_back(std::pow(normal01(seed, 0, uint64_t(i)) * scale, 2));
    return TestArray::of(values, {n});
}

void check(int64_t n, const std::vector<AdamWSegment>& segments, const AdamWOptions& options, float lr,
           float grad_scale, int64_t t, double grad_size) {
    SCOPED_TRACE(str("n ", n, " t ", t, " grad_size ", grad_size, " grad_scale ", grad_scale));
    const TestArray params = TestArray::random({n}, 1, 0.02), grads = TestArray::random({n}, 4, grad_size);
    const TestArray m = TestArray::random({n}, 2, 0.3 * grad_size), v = squares(n, 3, grad_size);
    adamw_update(params, Tensor{}, m, v, grads, segments.data(), int64_t(segments.size()), options,
                 make_scalars(lr, grad_scale, false, t), Stream{});
    const std::vector<double> p1 = params.fetch(), m1 = m.fetch(), v1 = v.fetch();
    std::vector<bool> covered(size_t(n), false);
    for (const AdamWSegment& segment : segments) {
        reference::Values p, rm, rv;
        std::vector<double> gp, gm, gv;
        for (int64_t i = segment.begin; i < segment.end; i++) {
            covered[size_t(i)] = true;
            const reference::AdamW r =
                reference::adamw(params.data()[i], m.data()[i], v.data()[i], grads.data()[i], grad_scale, lr,
                                 options.beta1, options.beta2, options.eps, segment.weight_decay, t);
            p.value.push_back(r.param.value), p.mag.push_back(r.param.mag), gp.push_back(p1[size_t(i)]);
            rm.value.push_back(r.m.value), rm.mag.push_back(r.m.mag), gm.push_back(m1[size_t(i)]);
            rv.value.push_back(r.v.value), rv.mag.push_back(r.v.mag), gv.push_back(v1[size_t(i)]);
        }
        expect_close("params", gp, p.value, p.mag, 1, 1);
        expect_close("m", gm, rm.value, rm.mag, 1, 1);
        expect_close("v", gv, rv.value, rv.mag, 1, 1);
        // The parameter hides its small change; the change itself is right to what p's last digit leaves of it.
        for (size_t i = 0; i < gp.size(); i++) {
            const double change = gp[i] - params.data()[segment.begin + int64_t(i)];
            const double expected = p.value[i] - params.data()[segment.begin + int64_t(i)];
            ASSERT_NEAR(change, expected, 1e-5 * std::fabs(expected) + 2 * UNIT_ROUNDOFF * std::fabs(p.mag[i])) << i;
        }
    }
    for (int64_t i = 0; i < n; i++)
        if (!covered[size_t(i)]) {
            ASSERT_EQ(p1[size_t(i)], params.data()[i]) << "gap at " << i;
            ASSERT_EQ(m1[size_t(i)], m.data()[i]) << "gap at " << i;
            ASSERT_EQ(v1[size_t(i)], v.data()[i]) << "gap at " << i;
        }
}

}  // namespace

TEST(AdamW, MatchesOracle) {
    const AdamWOptions defaults;
    for (const int64_t t : {1, 2, 10, 1000, 1000000}) {
        check(1, {{0, 1, 0.1f}}, defaults, 3e-4f, 1, t, 1e-2);
        check(1000, {{0, 1000, 0}}, defaults, 3e-4f, 0.25f, t, 1e-2);
        check(70003, {{0, 17, 0.1f}, {20, 20, 0.1f}, {21, 500, 0}, {512, 40001, 0.5f}, {40001, 70000, 0}}, defaults,
              1e-2f, 0.7f, t, 1e-3);
    }
    check(500, {{0, 500, 0.1f}}, {0.5f, 0.999f, 1e-3f}, 1, 1, 3, 10);
    check(500, {{0, 500, 0}}, defaults, 1e-3f, 1, 5, 1e-9);  // eps of the size of √v
}

TEST(AdamW, TenStepsFollowTheOracle) {
    // Errors may add up from step to step but not grow: both sides run on from their own state.
    const int64_t n = 300;
    const AdamWOptions options;
    const std::vector<AdamWSegment> segments = {{0, n, 0.1f}};
    const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::of(std::vector<double>(n, 0), {n});
    const TestArray v = TestArray::of(std::vector<double>(n, 0), {n});
    std::vector<double> p = params.values(), rm(n, 0), rv(n, 0);
    for (int64_t t = 1; t <= 10; t++) {
        const TestArray grads = TestArray::random({n}, uint64_t(10 + t), 1e-2);
        adamw_update(params, Tensor{}, m, v, grads, segments.data(), 1, options, make_scalars(1e-3f, 1, false, t),
                     Stream{});
        for (size_t i = 0; i < size_t(n); i++) {
            const reference::AdamW r = reference::adamw(p[i], rm[i], rv[i], grads.data()[i], 1, 1e-3f, options.beta1,
                                                        options.beta2, options.eps, segments[0].weight_decay, t);
            p[i] = r.param.value, rm[i] = r.m.value, rv[i] = r.v.value;
        }
    }
    const std::vector<double> got = params.fetch();
    for (size_t i = 0; i < size_t(n); i++)
        ASSERT_NEAR(got[i], p[i], 10 * 4 * UNIT_ROUNDOFF * (std::fabs(p[i]) + 1e-2)) << i;
}

TEST(AdamW, SkippedStepChangesNothing) {
    const int64_t n = 100;
    const TestArray params = TestArray::random({n}, 1), m = TestArray::random({n}, 2), v = squares(n, 3, 1);
    const TestArray grads = TestArray::poisoned({n});
    const AdamWSegment segment = {0, n, 0.1f};
    adamw_update(params, Tensor{}, m, v, grads, &segment, 1, AdamWOptions{}, make_scalars(1e-3f, 1, true, 5), Stream{});
    expect_same_bits("params", params.values(), params.fetch());
    expect_same_bits("m", m.values(), m.fetch());
    expect_same_bits("v", v.values(), v.fetch());
}

TEST(AdamW, ZeroGradientFromZeroStateMovesNothingButDecay) {
    const TestArray params = TestArray::of({1, -2, 4}, {3}), zero = TestArray::of({0, 0, 0}, {3}),
                    m = TestArray::of({0, 0, 0}, {3});
    const TestArray v = TestArray::of({0, 0, 0}, {3});
    const AdamWSegment segments[] = {{0, 2, 0}, {2, 3, 0.5f}};
    adamw_update(params, Tensor{}, m, v, zero, segments, 2, AdamWOptions{}, make_scalars(0.5f, 1, false, 1), Stream{});
    EXPECT_EQ(params.fetch(), (std::vector<double>{1, -2, 3}));
}

TEST(AdamW, BitsDoNotDependOnThreads) {
    const int64_t n = 50001;
    const TestArray grads = TestArray::random({n}, 1);
    const AdamWSegment segments[] = {{3, 20000, 0.1f}, {20001, n, 0}};
    expect_deterministic("params", [&] {
        const TestArray params = TestArray::random({n}, 2), m = TestArray::random({n}, 3), v = squares(n, 4, 1);
        adamw_update(params, Tensor{}, m, v, grads, segments, 2, AdamWOptions{}, make_scalars(1e-3f, 1, false, 7),
                     Stream{});
        return params.fetch();
    });
}

// More segments than one launch takes on a GPU, some of them empty.
TEST(AdamW, ManySegments) {
    std::vector<AdamWSegment> segments;
    for (int64_t i = 0; i < 1100; i++) segments.push_back({i * 50, i * 50 + i % 51, i % 3 ? 0.1f : 0});
    check(55000, segments, AdamWOptions{}, 1e-2f, 1, 3, 1e-2);
}

#ifdef USE_CUDA
// What the forward pass reads: the updated parameters rounded to T, in the segments only.
TEST(AdamW, WritesTheParametersInT) {
    const int64_t n = 10007;
    for (const DType T : {TEST_DTYPES}) {
        SCOPED_TRACE(dtype_name(T));
        const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::random({n}, 2, 1e-3),
                        v = squares(n, 3, 1e-2), grads = TestArray::random({n}, 4, 1e-2);
        const TestArray params_T = TestArray::poisoned(T, {n});
        const AdamWSegment segments[] = {{3, 5000, 0.1f}, {5001, n, 0}};
        adamw_update(params, params_T, m, v, grads, segments, 2, AdamWOptions{}, make_scalars(1e-3f, 1, false, 7),
                     Stream{});
        const std::vector<double> p = params.fetch(), copy = params_T.fetch();
        for (int64_t i = 0; i < n; i++) {
            if (i < 3 || i == 5000) {
                ASSERT_TRUE(std::isnan(copy[size_t(i)])) << i;
            } else {
                ASSERT_EQ(copy[size_t(i)], rounded(T, p[size_t(i)])) << i;
            }
        }
    }
}
#endif

TEST(AdamW, WrongArgumentsAreErrors) {
    const TestArray a = TestArray::random({10}, 1), b = TestArray::random({9}, 2),
                    scalars = make_scalars(1, 1, false, 1);
    const AdamWSegment good = {0, 10, 0}, outside = {0, 11, 0}, backwards = {5, 4, 0};
    const AdamWSegment overlapping[] = {{0, 6, 0}, {5, 10, 0}};
    const AdamWOptions options;
    expect_error([&] { adamw_update(a, Tensor{}, b, a, a, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: m is fp32 [9], expected fp32 [10]");
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &good, 1, options, a, Stream{}); },
                 str("adamw_update: scalars is fp32 [10], expected uint8 [", sizeof(StepScalars), "]"));
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &outside, 1, options, scalars, Stream{}); },
                 "adamw_update: segment 0 is [0, 11), expected ascending segments within [0, 10)");
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &backwards, 1, options, scalars, Stream{}); },
                 "adamw_update: segment 0 is [5, 4), expected ascending segments within [0, 10)");
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, overlapping, 2, options, scalars, Stream{}); },
                 "adamw_update: segment 1 is [5, 10), expected ascending segments within [0, 10)");
#ifdef USE_CUDA
    expect_error([&] { adamw_update(a, b, a, a, a, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: params_T is fp32 [9], expected fp32 [10]");
#else  // where nobody would have to wait for it
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &good, 1, options, make_scalars(1, 1, false, 0), Stream{}); },
                 "adamw_update: t is 0, expected the number of this update, 1 or more");
    expect_error([&] { adamw_update(a, a, a, a, a, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: params_T is given; the CPU computes with the fp32 parameters themselves");
#endif
}
