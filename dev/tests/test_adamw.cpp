// AdamW against the oracle over several steps: segments with and without decay, gaps between them, clipping, skipping;
// on a GPU the 16-bit copy of the parameters and stochastic rounding.
#include "kernels/adamw.h"

#include <array>

#include "dev/oracle/reference.h"
#include "dev/oracle/stochastic_rounding.h"
#include "dev/tests/test_util.h"

namespace {

TestArray make_scalars(float lr, float grad_scale, bool skip, int64_t t) {
    const StepScalars s = {lr, 1, 0, 0, 2, 3, grad_scale, skip, t, 0, {}, {}};
    return TestArray::bytes(&s, sizeof(s));
}

// The segment has the same indices in params.
ParamSegment in_fp32(int64_t begin, int64_t end, float weight_decay, float lr_scale = 1) {
    ParamSegment segment{};
    segment.begin = begin;
    segment.end = end;
    segment.weight_decay = weight_decay;
    segment.fp32_begin = begin;
    segment.lr_scale = lr_scale;
    return segment;
}

// v is a mean of squares, so never negative.
TestArray squares(int64_t n, uint64_t seed, double scale) {
    std::vector<double> values;
    for (int64_t i = 0; i < n; i++) values.push_back(std::pow(normal01(seed, 0, uint64_t(i)) * scale, 2));
    return TestArray::of(values, {n});
}

void check(int64_t n, const std::vector<ParamSegment>& segments, const AdamWOptions& options, float lr,
           float grad_scale, int64_t t, double grad_size) {
    SCOPED_TRACE(str("n ", n, " t ", t, " grad_size ", grad_size, " grad_scale ", grad_scale));
    const TestArray params = TestArray::random({n}, 1, 0.02), grads = TestArray::random({n}, 4, grad_size);
    const TestArray m = TestArray::random({n}, 2, 0.3 * grad_size), v = squares(n, 3, grad_size);
    adamw_update(params, Tensor{}, m, v, grads, segments.data(), int64_t(segments.size()), options,
                 make_scalars(lr, grad_scale, false, t), Stream{});
    const std::vector<double> p1 = params.fetch(), m1 = m.fetch(), v1 = v.fetch();
    std::vector<bool> covered(size_t(n), false);
    for (const ParamSegment& segment : segments) {
        reference::Values p, rm, rv;
        std::vector<double> gp, gm, gv;
        for (int64_t i = segment.begin; i < segment.end; i++) {
            covered[size_t(i)] = true;
            const reference::AdamW r = reference::adamw(params.data()[i], m.data()[i], v.data()[i], grads.data()[i],
                                                        grad_scale, double(lr) * segment.lr_scale, options.beta1,
                                                        options.beta2, options.eps, segment.weight_decay, t);
            p.value.push_back(r.param.value);
            p.mag.push_back(r.param.mag);
            gp.push_back(p1[size_t(i)]);
            rm.value.push_back(r.m.value);
            rm.mag.push_back(r.m.mag);
            gm.push_back(m1[size_t(i)]);
            rv.value.push_back(r.v.value);
            rv.mag.push_back(r.v.mag);
            gv.push_back(v1[size_t(i)]);
        }
        expect_close("params", gp, p.value, p.mag, 1, 1);
        expect_close("m", gm, rm.value, rm.mag, 1, 1);
        expect_close("v", gv, rv.value, rv.mag, 1, 1);
        // A small change of a large parameter is only as precise as the last digit of p. The change itself takes about
        // ten roundings: 6e-7 of it.
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
        check(1, {in_fp32(0, 1, 0.1f)}, defaults, 3e-4f, 1, t, 1e-2);
        check(1000, {in_fp32(0, 1000, 0)}, defaults, 3e-4f, 0.25f, t, 1e-2);
        check(70003,
              {in_fp32(0, 17, 0.1f), in_fp32(20, 20, 0.1f), in_fp32(21, 500, 0), in_fp32(512, 40001, 0.5f),
               in_fp32(40001, 70000, 0)},
              defaults, 1e-2f, 0.7f, t, 1e-3);
    }
    // Each segment has a learning rate of its own.
    check(900, {in_fp32(0, 300, 0.1f, 0.25f), in_fp32(300, 600, 0.1f, 3), in_fp32(600, 900, 0, 0)}, defaults, 1e-2f, 1,
          5, 1e-2);
    check(500, {in_fp32(0, 500, 0.1f)}, {0.5f, 0.999f, 1e-3f}, 1, 1, 3, 10);
    check(500, {in_fp32(0, 500, 0)}, defaults, 1e-3f, 1, 5, 1e-9);  // eps of the size of √v
}

TEST(AdamW, TenStepsMatchOracle) {
    // Kernel and oracle each continue from their own state: errors may add up over the steps but not grow.
    const int64_t n = 300;
    const AdamWOptions options;
    const std::vector<ParamSegment> segments = {in_fp32(0, n, 0.1f)};
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
            p[i] = r.param.value;
            rm[i] = r.m.value;
            rv[i] = r.v.value;
        }
    }
    const std::vector<double> got = params.fetch();
    // Each of the 10 steps rounds p once, and a change of at most 1e-2 about ten times.
    for (size_t i = 0; i < size_t(n); i++)
        ASSERT_NEAR(got[i], p[i], 10 * 4 * UNIT_ROUNDOFF * (std::fabs(p[i]) + 1e-2)) << i;
}

TEST(AdamW, SkippedStepChangesNothing) {
    const int64_t n = 100;
    const TestArray params = TestArray::random({n}, 1), m = TestArray::random({n}, 2), v = squares(n, 3, 1);
    const TestArray grads = TestArray::poisoned({n});
    const ParamSegment segment = in_fp32(0, n, 0.1f);
    adamw_update(params, Tensor{}, m, v, grads, &segment, 1, AdamWOptions{}, make_scalars(1e-3f, 1, true, 5), Stream{});
    expect_same_bits("params", params.values(), params.fetch());
    expect_same_bits("m", m.values(), m.fetch());
    expect_same_bits("v", v.values(), v.fetch());
}

TEST(AdamW, ZeroGradientAndStateOnlyDecay) {
    const TestArray params = TestArray::of({1, -2, 4}, {3}), zero = TestArray::of({0, 0, 0}, {3}),
                    m = TestArray::of({0, 0, 0}, {3});
    const TestArray v = TestArray::of({0, 0, 0}, {3});
    const ParamSegment segments[] = {in_fp32(0, 2, 0), in_fp32(2, 3, 0.5f)};
    adamw_update(params, Tensor{}, m, v, zero, segments, 2, AdamWOptions{}, make_scalars(0.5f, 1, false, 1), Stream{});
    EXPECT_EQ(params.fetch(), (std::vector<double>{1, -2, 3}));
}

TEST(AdamW, BitsDoNotDependOnThreads) {
    const int64_t n = 50001;
    const TestArray grads = TestArray::random({n}, 1);
    const ParamSegment segments[] = {in_fp32(3, 20000, 0.1f), in_fp32(20001, n, 0)};
    expect_deterministic("params", [&] {
        const TestArray params = TestArray::random({n}, 2), m = TestArray::random({n}, 3), v = squares(n, 4, 1);
        adamw_update(params, Tensor{}, m, v, grads, segments, 2, AdamWOptions{}, make_scalars(1e-3f, 1, false, 7),
                     Stream{});
        return params.fetch();
    });
}

// More segments than one launch handles on a GPU, some of them empty.
TEST(AdamW, ManySegmentsMatchOracle) {
    std::vector<ParamSegment> segments;
    for (int64_t i = 0; i < 1100; i++) segments.push_back(in_fp32(i * 50, i * 50 + i % 51, i % 3 ? 0.1f : 0));
    check(55000, segments, AdamWOptions{}, 1e-2f, 1, 3, 1e-2);
}

// Parameters may have other offsets than their moments: packed, or not aligned for vectors.
TEST(AdamW, ResultDoesNotDependOnParameterLocation) {
    const int64_t n = 5000, gap = 64;
    const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::random({n}, 2, 1e-3),
                    v = squares(n, 3, 1e-2), grads = TestArray::random({n}, 4, 1e-2),
                    scalars = make_scalars(1e-3f, 1, false, 7);
    std::vector<double> packed(size_t(n - gap + 3), 0.5);  // [3 of padding, 0 … 2000, 2000 + gap … n)
    for (int64_t i = 0; i < n; i++)
        if (i < 2000 || i >= 2000 + gap) packed[size_t(i < 2000 ? i + 3 : i + 3 - gap)] = params.data()[i];
    const TestArray elsewhere = TestArray::of(packed, {n - gap + 3});
    const TestArray m2 = TestArray::of(m.values(), {n}), v2 = TestArray::of(v.values(), {n});
    const ParamSegment same[] = {in_fp32(0, 2000, 0.1f), in_fp32(2000 + gap, n, 0)};
    const ParamSegment other[] = {{0, 2000, 0.1f, 3}, {2000 + gap, n, 0, 2003}};
    adamw_update(params, Tensor{}, m, v, grads, same, 2, AdamWOptions{}, scalars, Stream{});
    adamw_update(elsewhere, Tensor{}, m2, v2, grads, other, 2, AdamWOptions{}, scalars, Stream{});
    const std::vector<double> expected = params.fetch(), got = elsewhere.fetch();
    for (int64_t i = 0; i < n; i++)
        if (i < 2000 || i >= 2000 + gap) {
            ASSERT_EQ(got[size_t(i < 2000 ? i + 3 : i + 3 - gap)], expected[size_t(i)]) << i;
        }
    for (int64_t i = 0; i < 3; i++) EXPECT_EQ(got[size_t(i)], 0.5);
    expect_same_bits("m", m.fetch(), m2.fetch());
    expect_same_bits("v", v.fetch(), v2.fetch());
}

// The second moment may be packed, and each segment has a factor of the learning rate.
TEST(AdamW, PackedSecondMomentAndLearningRates) {
    const int64_t n = 3001, packed_size = 2100;
    const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::random({n}, 2, 1e-3),
                    grads = TestArray::random({n}, 4, 1e-2), packed = squares(packed_size, 3, 1e-2);
    ParamSegment segments[] = {in_fp32(5, 1005, 0.1f), in_fp32(2000, n, 0.5f)};  // in v from 3 and from 1010 on
    segments[0].v_begin = 3;
    segments[0].lr_scale = 0.25f;
    segments[1].v_begin = 1010;
    segments[1].lr_scale = 3;
    std::vector<double> whole(size_t(n), 1e-4);
    for (const ParamSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++) whole[size_t(i)] = packed.data()[s.v_begin + i - s.begin];
    const TestArray v = TestArray::of(whole, {n});
    std::vector<std::vector<double>> expected;  // of params and v, each segment with its own learning rate
    for (const ParamSegment& s : segments) {
        const TestArray p2 = TestArray::of(params.values(), {n}), m2 = TestArray::of(m.values(), {n});
        const ParamSegment alone = in_fp32(s.begin, s.end, s.weight_decay);
        adamw_update(p2, Tensor{}, m2, v, grads, &alone, 1, AdamWOptions{},
                     make_scalars(1e-3f * s.lr_scale, 1, false, 7), Stream{});
        expected.push_back(p2.fetch());
    }
    adamw_update(params, Tensor{}, m, packed, grads, segments, 2, AdamWOptions{}, make_scalars(1e-3f, 1, false, 7),
                 Stream{});
    const std::vector<double> p = params.fetch(), v1 = packed.fetch(), v2 = v.fetch();
    for (size_t k = 0; k < 2; k++)
        for (int64_t i = segments[k].begin; i < segments[k].end; i++) {
            // lr·scale is rounded once more.
            ASSERT_NEAR(p[size_t(i)], expected[k][size_t(i)], 4 * UNIT_ROUNDOFF * (std::fabs(p[size_t(i)]) + 1e-2))
                << i;
            ASSERT_EQ(v1[size_t(segments[k].v_begin + i - segments[k].begin)], v2[size_t(i)]) << i;
        }
    for (const int64_t i : {0, 2, 1003, 1009, 2011, 2099}) EXPECT_EQ(v1[size_t(i)], packed.data()[i]) << "gap at " << i;
}

namespace {

// Parameters and moments after an update of fp32 parameters.
struct Updated {
    std::vector<double> params, m, v;
};
// Moments of the given dtype, from the same bf16 numbers. v is packed without the gaps of `segments`, 3 elements later.
Updated update_moments(DType dtype, int64_t n, std::vector<ParamSegment> segments, uint64_t seed, int64_t t,
                       const std::vector<double>& m0, const std::vector<double>& v0, DType grad_dtype = DType::F32) {
    int64_t end = 3;
    std::vector<double> packed(size_t(n) + 3, 0.25);
    for (ParamSegment& s : segments) {
        s.v_begin = end;
        for (int64_t i = s.begin; i < s.end; i++) packed[size_t(end++)] = v0[size_t(i)];
    }
    const std::vector<double> g = TestArray::random(DType::BF16, {n}, 4, 1e-2).values();
    const TestArray params = TestArray::random({n}, 1, 0.02), grads = TestArray::of(grad_dtype, g, {n}),
                    m = TestArray::of(dtype, m0, {n}), v = TestArray::of(dtype, packed, {n + 3});
    AdamWOptions options;
    options.seed = seed;
    adamw_update(params, Tensor{}, m, v, grads, segments.data(), int64_t(segments.size()), options,
                 make_scalars(1e-3f, 0.7f, false, t), Stream{});
    Updated result{params.fetch(), m.fetch(), std::vector<double>(size_t(n), 0.25)};
    const std::vector<double> v1 = v.fetch();
    for (const ParamSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++) result.v[size_t(i)] = v1[size_t(s.v_begin + i - s.begin)];
    for (int64_t i = 0; i < 3; i++) EXPECT_EQ(v1[size_t(i)], 0.25);
    return result;
}

std::vector<double> bf16_moments(int64_t n, bool second) {
    std::vector<double> values;
    for (int64_t i = 0; i < n; i++) values.push_back(normal01(second ? 6 : 5, 0, uint64_t(i)) * 1e-2);
    for (double& x : values) x = rounded(DType::BF16, second ? x * x : x);
    return values;
}

std::vector<ParamSegment> with_keys(int64_t n) {
    std::vector<ParamSegment> segments = {in_fp32(0, 4000, 0.1f), in_fp32(4003, 7001, 0), in_fp32(7001, n - 6, 0.1f)};
    segments[0].key = name_hash("a");
    segments[1].key = name_hash("b");
    segments[2].key = name_hash("c");
    segments[2].first_element = 1001;
    return segments;
}

}  // namespace

// Gradients in bf16 count as the numbers that they are.
TEST(AdamW, GradientsInBf16GiveTheSameBits) {
    const int64_t n = 10007;
    const std::vector<double> m0 = bf16_moments(n, false), v0 = bf16_moments(n, true);
    for (const DType moments : {DType::F32, DType::BF16}) {
        const Updated exact = update_moments(moments, n, with_keys(n), 5, 7, m0, v0),
                      got = update_moments(moments, n, with_keys(n), 5, 7, m0, v0, DType::BF16);
        expect_same_bits("params", got.params, exact.params);
        expect_same_bits("m", got.m, exact.m);
        expect_same_bits("v", got.v, exact.v);
    }
}

// Bitwise: the parameters are those of fp32 moments, and the moments are the fp32 ones rounded with their noise.
TEST(AdamW, MomentsInBf16AreTheRoundedFp32Ones) {
    const int64_t n = 10007, t = 7;
    const uint64_t seed = 1234567890123456789;
    const std::vector<double> m0 = bf16_moments(n, false), v0 = bf16_moments(n, true);
    const std::vector<ParamSegment> segments = with_keys(n);
    const Updated exact = update_moments(DType::F32, n, segments, seed, t, m0, v0),
                  got = update_moments(DType::BF16, n, segments, seed, t, m0, v0);
    expect_same_bits("params", exact.params, got.params);
    for (const ParamSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++) {
            const int64_t element = i - s.begin + s.first_element;
            const size_t at = size_t(i);
            ASSERT_EQ(got.m[at], round_by(exact.m[at], noise_of(seed, t, s.key, element, NoiseOf::FirstMoment))) << i;
            ASSERT_EQ(got.v[at], round_by(exact.v[at], noise_of(seed, t, s.key, element, NoiseOf::SecondMoment))) << i;
        }
    for (const int64_t i : {4000, 4002, 10001, 10006}) EXPECT_EQ(got.m[size_t(i)], m0[size_t(i)]) << "gap at " << i;
}

// The same elements in more segments, and on other offsets, have the same noise.
TEST(AdamW, MomentsInBf16DoNotDependOnSegments) {
    const int64_t n = 10007;
    const std::vector<double> m0 = bf16_moments(n, false), v0 = bf16_moments(n, true);
    std::vector<ParamSegment> parts;
    for (const ParamSegment& s : with_keys(n))
        for (int64_t begin = s.begin; begin < s.end; begin += 1021) {
            parts.push_back(s);
            parts.back().begin = parts.back().fp32_begin = begin;
            parts.back().end = std::min(begin + 1021, s.end);
            parts.back().first_element = s.first_element + begin - s.begin;
        }
    const Updated whole = update_moments(DType::BF16, n, with_keys(n), 1, 3, m0, v0),
                  divided = update_moments(DType::BF16, n, parts, 1, 3, m0, v0);
    expect_same_bits("params", whole.params, divided.params);
    expect_same_bits("m", whole.m, divided.m);
    expect_same_bits("v", whole.v, divided.v);
}

// The mean of a moment over many draws is the fp32 moment. A draw rounds up with probability q by one unit, so the mean
// of N draws has a standard error of unit·√(q(1−q)/N) ≤ unit/(2√N). The noise of m, v and neighbours is independent:
// Σ z² of the n normal numbers z = error/standard error is n ± √(2n); small q are not quite normal, hence 5 deviations.
TEST(AdamW, MomentsInBf16AreUnbiased) {
    const int64_t n = 200, draws = 2000;
    const std::vector<double> m0 = bf16_moments(n, false), v0 = bf16_moments(n, true);
    std::vector<ParamSegment> segments = {in_fp32(0, n, 0.1f)};
    const Updated exact = update_moments(DType::F32, n, segments, 1, 9, m0, v0);
    std::vector<double> m(size_t(n), 0), v(size_t(n), 0);
    int64_t together = 0, rounded_pairs = 0;  // m and v of an element both rounded away from zero
    for (int64_t draw = 0; draw < draws; draw++) {
        segments[0].key = name_hash(str("tensor ", draw));
        const Updated got = update_moments(DType::BF16, n, segments, 1, 9, m0, v0);
        for (size_t i = 0; i < size_t(n); i++) {
            m[i] += got.m[i] / draws;
            v[i] += got.v[i] / draws;
        }
        together += (std::fabs(got.m[0]) > std::fabs(exact.m[0])) == (got.v[0] > exact.v[0]);
        rounded_pairs++;
    }
    const auto check_mean = [&](const char* what, const std::vector<double>& mean,
                                const std::vector<double>& expected) {
        double z2 = 0;
        for (size_t i = 0; i < size_t(n); i++) {
            const double unit = std::ldexp(1, std::ilogb(expected[i]) - 7), error = mean[i] - expected[i];
            const double q = std::fabs(std::fmod(expected[i], unit)) / unit;
            ASSERT_LE(std::fabs(error), 4.5 * unit / (2 * std::sqrt(double(draws)))) << what << " " << i;
            z2 += q > 0 ? error * error / (unit * unit * q * (1 - q) / draws) : 1;
        }
        EXPECT_NEAR(z2, double(n), 5 * std::sqrt(2.0 * double(n))) << what;
    };
    check_mean("m", m, exact.m);
    check_mean("v", v, exact.v);
    // With the same noise for both they would be rounded alike more often than independent ones.
    const auto up = [&](const std::vector<double>& x) {
        const double unit = std::ldexp(1, std::ilogb(x[0]) - 7);
        return std::fabs(std::fmod(x[0], unit)) / unit;
    };
    const double a = up(exact.m), b = up(exact.v), alike = a * b + (1 - a) * (1 - b);
    EXPECT_NEAR(double(together) / double(rounded_pairs), alike, 5 * std::sqrt(alike * (1 - alike) / draws));
}

TEST(AdamW, SkippedStepKeepsBf16Moments) {
    const int64_t n = 100;
    const TestArray params = TestArray::random({n}, 1), m = TestArray::random(DType::BF16, {n}, 2),
                    v = TestArray::of(DType::BF16, squares(n, 3, 1).values(), {n}), grads = TestArray::poisoned({n});
    const ParamSegment segment = in_fp32(0, n, 0.1f);
    adamw_update(params, Tensor{}, m, v, grads, &segment, 1, AdamWOptions{}, make_scalars(1e-3f, 1, true, 5), Stream{});
    expect_same_bits("m", m.values(), m.fetch());
    expect_same_bits("v", v.values(), v.fetch());
}

#ifdef USE_CUDA
// params_T receives the updated parameters rounded to T, in the segments only.
TEST(AdamW, WritesRoundedCopyOfParameters) {
    const int64_t n = 10007;
    for (const DType T : {DType::BF16, DType::F16}) {
        SCOPED_TRACE(dtype_name(T));
        const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::random({n}, 2, 1e-3),
                        v = squares(n, 3, 1e-2), grads = TestArray::random({n}, 4, 1e-2);
        const TestArray params_T = TestArray::poisoned(T, {n});
        const ParamSegment segments[] = {in_fp32(3, 5000, 0.1f), in_fp32(5001, n, 0)};
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

namespace {

// One update of parameters without master weights; m and v start again. Returns the parameters.
std::vector<double> update_bf16(const std::vector<double>& p, const TestArray& grads,
                                const std::vector<ParamSegment>& segments, uint64_t seed, int64_t t) {
    const int64_t n = int64_t(p.size());
    const TestArray params_T = TestArray::of(DType::BF16, p, {n}), m = TestArray::random({n}, 2, 1e-3),
                    v = squares(n, 3, 1e-2);
    AdamWOptions options;
    options.seed = seed;
    adamw_update(Tensor{}, params_T, m, v, grads, segments.data(), int64_t(segments.size()), options,
                 make_scalars(1e-3f, 1, false, t), Stream{});
    return params_T.fetch();
}

// The same update in fp32 from the same bf16 numbers, before rounding.
std::vector<double> update_fp32(const std::vector<double>& p, const TestArray& grads,
                                const std::vector<ParamSegment>& segments, int64_t t) {
    const int64_t n = int64_t(p.size());
    const TestArray params = TestArray::of(p, {n}), m = TestArray::random({n}, 2, 1e-3), v = squares(n, 3, 1e-2);
    std::vector<ParamSegment> fp32 = segments;
    for (ParamSegment& s : fp32) s.fp32_begin = s.begin;
    adamw_update(params, Tensor{}, m, v, grads, fp32.data(), int64_t(fp32.size()), AdamWOptions{},
                 make_scalars(1e-3f, 1, false, t), Stream{});
    return params.fetch();
}

std::vector<double> bf16_parameters(int64_t n) {
    return TestArray::random(DType::BF16, {n}, 1, 0.02).values();
}

}  // namespace

// Bitwise: the fp32 update, rounded with the noise of (seed, t, key, element), in vectors and at ragged ends.
TEST(AdamW, StochasticRoundingUsesTheSpecifiedNoise) {
    const int64_t n = 10007, t = 7;
    const uint64_t seed = 1234567890123456789, keys[] = {name_hash("a"), name_hash("b"), name_hash("c")};
    std::vector<double> p = bf16_parameters(n);
    p[50] = 0;
    p[51] = 3e38;
    p[52] = 1e-39;
    p[53] = 1;
    p[54] = -1;
    p[5000] = INFINITY;
    p[5001] = -INFINITY;
    p[5002] = std::nan("");  // without decay, which would turn them into NaN
    p = TestArray::of(DType::BF16, p, {n}).values();
    const TestArray grads = TestArray::random({n}, 4, 1e-2);
    // b starts at an index that is not aligned for vectors; c is a part of a tensor, from its element 1001 on.
    const std::vector<ParamSegment> segments = {
        {0, 4000, 0.1f, -1, keys[0]}, {4003, 7001, 0, -1, keys[1]}, {7001, n - 6, 0.1f, -1, keys[2], 1001}};
    const std::vector<double> got = update_bf16(p, grads, segments, seed, t),
                              exact = update_fp32(p, grads, segments, t);
    int64_t up = 0, down = 0;
    for (const ParamSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++) {
            const double x = exact[size_t(i)],
                         expected = round_by(x, noise_of(seed, t, s.key, i - s.begin + s.first_element));
            if (std::isnan(x)) {
                ASSERT_TRUE(std::isnan(got[size_t(i)])) << i;
            } else {
                ASSERT_EQ(got[size_t(i)], expected) << i << ": from " << x;
            }
            if (!std::isfinite(x)) continue;
            up += std::fabs(got[size_t(i)]) > std::fabs(x);
            down += std::fabs(got[size_t(i)]) < std::fabs(x);
        }
    EXPECT_NEAR(double(up) / double(up + down), 0.5, 0.02);  // 10,000 throws: 4 deviations
    for (const int64_t i : {4000, 4002, 10001, 10006}) EXPECT_EQ(got[size_t(i)], p[size_t(i)]) << "gap at " << i;
}

// The same results at any offset of the tensor, in one segment or several.
TEST(AdamW, RoundingDoesNotDependOnLocationOrSegments) {
    const int64_t n = 3001, t = 3;
    const uint64_t seed = 5, key = name_hash("layers.3.qkv.weight");
    const std::vector<double> p = bf16_parameters(n);
    const TestArray grads = TestArray::random({n}, 4, 1e-2);
    const std::vector<double> whole = update_bf16(p, grads, {{0, n, 0.1f, -1, key}}, seed, t);
    expect_same_bits("again", whole, update_bf16(p, grads, {{0, n, 0.1f, -1, key}}, seed, t));
    expect_same_bits(
        "in three segments", whole,
        update_bf16(p, grads,
                    {{0, 1024, 0.1f, -1, key}, {1024, 1031, 0.1f, -1, key, 1024}, {1031, n, 0.1f, -1, key, 1031}}, seed,
                    t));
    for (const int64_t at : {1, 2, 3, 4, 2048, 2050}) {
        const int64_t size = n + at;
        const auto moved = [&](const std::vector<double>& values, DType dtype) {
            std::vector<double> padded(size_t(at), 0.25);
            padded.insert(padded.end(), values.begin(), values.end());
            return TestArray::of(dtype, padded, {size});
        };
        const TestArray params_T = moved(p, DType::BF16), g = moved(grads.values(), DType::F32),
                        m = moved(TestArray::random({n}, 2, 1e-3).values(), DType::F32),
                        v = moved(squares(n, 3, 1e-2).values(), DType::F32);
        const ParamSegment segment = {at, size, 0.1f, -1, key};
        AdamWOptions options;
        options.seed = seed;
        adamw_update(Tensor{}, params_T, m, v, g, &segment, 1, options, make_scalars(1e-3f, 1, false, t), Stream{});
        const std::vector<double> got = params_T.fetch();
        for (int64_t i = 0; i < at; i++) ASSERT_EQ(got[size_t(i)], 0.25) << at;
        expect_same_bits("moved", whole, {got.begin() + at, got.end()});
    }
}

// Of parameters whose update is halfway between two bf16 numbers, half are rounded differently with another seed, step
// or tensor.
TEST(AdamW, RoundingDependsOnSeedStepAndTensor) {
    const int64_t n = 20000;
    const TestArray zeros = TestArray::of(std::vector<double>(size_t(n), 0), {n});
    const auto draw = [&](uint64_t seed, int64_t t, uint64_t key) {
        // p = 1, and decay takes it to 1 − 2⁻⁹, in the middle of the bf16 numbers 1 and 1 − 2⁻⁸.
        const TestArray params_T = TestArray::of(DType::BF16, std::vector<double>(size_t(n), 1), {n}),
                        m = TestArray::of(std::vector<double>(size_t(n), 0), {n}),
                        v = TestArray::of(std::vector<double>(size_t(n), 0), {n});
        const ParamSegment segment = {0, n, 1, -1, key};
        AdamWOptions options;
        options.seed = seed;
        adamw_update(Tensor{}, params_T, m, v, zeros, &segment, 1, options, make_scalars(0x1p-9f, 1, false, t),
                     Stream{});
        return params_T.fetch();
    };
    const std::vector<double> first = draw(1, 1, 1);
    for (const auto& [seed, t, key] : std::vector<std::array<int64_t, 3>>{{2, 1, 1}, {1, 2, 1}, {1, 1, 2}}) {
        const std::vector<double> other = draw(uint64_t(seed), t, uint64_t(key));
        int64_t differ = 0;
        for (size_t i = 0; i < size_t(n); i++) {
            ASSERT_TRUE(other[i] == 1 || other[i] == 1 - 0x1p-8) << other[i];
            differ += other[i] != first[i];
        }
        // A binomial of 20,000 throws has a deviation of √n/2 = 71.
        EXPECT_NEAR(double(differ), 0.5 * double(n), 5 * std::sqrt(double(n)) / 2) << seed << " " << t << " " << key;
    }
}

// The mean over many draws is the fp32 update. A draw x rounds up with probability q to one unit, so the mean of N
// draws deviates by unit·√(q(1−q)/N) ≤ unit/(2√N).
TEST(AdamW, RoundingIsUnbiased) {
    const int64_t n = 200, draws = 2000;
    const std::vector<double> p = bf16_parameters(n);
    const TestArray grads = TestArray::random({n}, 4, 1e-2);
    std::vector<ParamSegment> segments = {{0, n, 0.1f, -1, 0}};
    const std::vector<double> exact = update_fp32(p, grads, segments, 9);
    std::vector<double> sum(size_t(n), 0);
    for (int64_t draw = 0; draw < draws; draw++) {
        segments[0].key = name_hash(str("tensor ", draw));
        const std::vector<double> got = update_bf16(p, grads, segments, 1, 9);
        for (size_t i = 0; i < size_t(n); i++) sum[i] += got[i];
    }
    double z2 = 0;
    for (size_t i = 0; i < size_t(n); i++) {
        const double unit = std::ldexp(1, std::ilogb(exact[i]) - 7);
        const double q = std::fabs(std::fmod(exact[i], unit)) / unit, error = sum[i] / draws - exact[i];
        ASSERT_LE(std::fabs(error), 4.5 * unit / (2 * std::sqrt(double(draws)))) << i;  // 200 tries: 7e-6 each
        z2 += q > 0 ? error * error / (unit * unit * q * (1 - q) / draws) : 1;
    }
    // Σ z² of n normal numbers: n ± √(2n). Small q are not quite normal, hence 5 deviations.
    EXPECT_NEAR(z2, double(n), 5 * std::sqrt(2.0 * double(n)));
}

// Steps of 1/64 of a bf16 unit, all of which rounding to nearest would lose: after 640 of them the mean has moved
// by 10 units. The norm weights beside them stay fp32, packed in an arena of their own.
TEST(AdamW, StepsBelowOneUlpMoveTheMean) {
    const int64_t n = 8192, norm = 64, steps = 640;
    const double unit = 0x1p-7, lr = unit / 64;
    const std::vector<double> ones(size_t(n), 1), zeros(size_t(n), 0);
    const TestArray params_T = TestArray::of(DType::BF16, ones, {n}), m = TestArray::of(zeros, {n}),
                    v = TestArray::of(zeros, {n}), grads = TestArray::of(std::vector<double>(size_t(n), -1), {n});
    const TestArray fp32 = TestArray::of(std::vector<double>(size_t(norm), 1), {norm});
    const ParamSegment segments[] = {
        {0, 4096, 0, -1, name_hash("weight")}, {4096, 4096 + norm, 0, 0}, {4096 + norm, n, 0, -1, name_hash("other")}};
    // With a constant gradient Adam's step is lr for every t.
    for (int64_t t = 1; t <= steps; t++)
        adamw_update(fp32, params_T, m, v, grads, segments, 3, AdamWOptions{}, make_scalars(float(lr), 1, false, t),
                     Stream{});
    const std::vector<double> got = params_T.fetch(), exact = fp32.fetch();
    double mean = 0;
    for (int64_t i = 0; i < n; i++)
        if (i < 4096 || i >= 4096 + norm) mean += got[size_t(i)] / double(n - norm);
    for (int64_t i = 0; i < norm; i++) {
        ASSERT_NEAR(exact[size_t(i)], 1 + 10 * unit, 1e-4);
        ASSERT_EQ(got[size_t(4096 + i)], rounded(DType::BF16, exact[size_t(i)]));
    }
    // Each step's rounding has a variance of at most unit²·q(1−q), q = 1/64; steps and parameters are independent.
    const double deviation = unit * std::sqrt(double(steps) / 64 / double(n - norm));
    EXPECT_NEAR(mean, 1 + 10 * unit, 5 * deviation + 1e-4);
}

TEST(AdamW, SkippedStepKeepsBf16Parameters) {
    const int64_t n = 100;
    const TestArray params_T = TestArray::random(DType::BF16, {n}, 1), m = TestArray::random({n}, 2),
                    v = squares(n, 3, 1), grads = TestArray::poisoned({n});
    const ParamSegment segment = {0, n, 0.1f, -1, 1};
    adamw_update(Tensor{}, params_T, m, v, grads, &segment, 1, AdamWOptions{}, make_scalars(1e-3f, 1, true, 5),
                 Stream{});
    expect_same_bits("params_T", params_T.values(), params_T.fetch());
    expect_same_bits("m", m.values(), m.fetch());
    expect_same_bits("v", v.values(), v.fetch());
}
#endif

TEST(AdamW, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({10}, 1), b = TestArray::random({9}, 2),
                    scalars = make_scalars(1, 1, false, 1);
    const ParamSegment good = in_fp32(0, 10, 0), outside = in_fp32(0, 11, 0), backwards = in_fp32(5, 4, 0);
    const ParamSegment overlapping[] = {in_fp32(0, 6, 0), in_fp32(5, 10, 0)};
    const ParamSegment overlapping_params[] = {in_fp32(0, 5, 0), {5, 10, 0, 4}};
    const ParamSegment beyond_params = {0, 10, 0, 1}, nowhere = {0, 10, 0};
    const AdamWOptions options;
    const TestArray half = TestArray::random(DType::F16, {10}, 4), bf16_m = TestArray::random(DType::BF16, {10}, 4);
    expect_error([&] { adamw_update(a, Tensor{}, half, a, a, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: m is fp16 [10], expected fp32 or bf16 [10]");
    expect_error([&] { adamw_update(a, Tensor{}, bf16_m, a, a, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: v is fp32 and m is bf16, expected one dtype");
    ParamSegment beyond_noise = good;
    beyond_noise.first_element = int64_t(1) << 38;
    expect_error(
        [&] { adamw_update(a, Tensor{}, bf16_m, bf16_m, a, &beyond_noise, 1, options, scalars, Stream{}); },
        "adamw_update: segment 0 begins at element 274877906944 of its tensor, expected less than 2^38 elements");
    const auto update = [&](Tensor params, Tensor params_T, Tensor m, const ParamSegment* segments, int64_t count) {
        adamw_update(params, params_T, m, a, a, segments, count, options, scalars, Stream{});
    };
    expect_error([&] { update(a, {}, b, &good, 1); }, "adamw_update: m is fp32 [9], expected fp32 [10]");
    expect_error([&] { adamw_update(a, Tensor{}, a, a, Tensor{}, &good, 1, options, scalars, Stream{}); },
                 "adamw_update: grads is fp32 [], expected fp32 or bf16 [n]");
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &good, 1, options, a, Stream{}); },
                 str("adamw_update: scalars is fp32 [10], expected uint8 [", sizeof(StepScalars), "]"));
    expect_error([&] { update(a, {}, a, &outside, 1); },
                 "adamw_update: segment 0 is [0, 11), expected ascending segments within [0, 10)");
    expect_error([&] { update(a, {}, a, &backwards, 1); },
                 "adamw_update: segment 0 is [5, 4), expected ascending segments within [0, 10)");
    expect_error([&] { update(a, {}, a, overlapping, 2); },
                 "adamw_update: segment 1 is [5, 10), expected ascending segments within [0, 10)");
    expect_error([&] { update(a, {}, a, overlapping_params, 2); },
                 "adamw_update: segment 1 lies at [4, 9) of params, expected ascending segments within [0, 10)");
    expect_error([&] { update(a, {}, a, &beyond_params, 1); },
                 "adamw_update: segment 0 lies at [1, 11) of params, expected ascending segments within [0, 10)");
    ParamSegment beyond_v = good;
    beyond_v.v_begin = 1;
    expect_error([&] { update(a, {}, a, &beyond_v, 1); },
                 "adamw_update: segment 0 lies at [1, 11) of v, expected ascending segments within [0, 10)");
    expect_error([&] { update({}, {}, a, &good, 1); },
                 "adamw_update: segment 0 lies at [0, 10) of params, expected ascending segments within [0, 0)");
    expect_error([&] { update(a, {}, a, &nowhere, 1); },
                 "adamw_update: segment 0 has no fp32 parameters, and params_T is missing");
#ifdef USE_CUDA
    const TestArray bf16_short = TestArray::random(DType::BF16, {9}, 3),
                    bf16_good = TestArray::random(DType::BF16, {10}, 3),
                    fp16_good = TestArray::random(DType::F16, {10}, 3);
    ParamSegment far = nowhere;
    far.first_element = int64_t(1) << 38;
    expect_error([&] { update(a, a, a, &good, 1); }, "adamw_update: params_T is fp32 [10], expected bf16 or fp16");
    expect_error([&] { update(a, bf16_short, a, &good, 1); }, "adamw_update: params_T is bf16 [9], expected bf16 [10]");
    expect_error([&] { update({}, fp16_good, a, &nowhere, 1); },
                 "adamw_update: segment 0 has no fp32 parameters, and params_T is fp16; only bf16 is rounded "
                 "stochastically");
    expect_error(
        [&] { update({}, bf16_good, a, &far, 1); },
        "adamw_update: segment 0 begins at element 274877906944 of its tensor, expected less than 2^38 elements");
#else  // only the CPU checks t; a GPU would have to synchronise
    expect_error([&] { adamw_update(a, Tensor{}, a, a, a, &good, 1, options, make_scalars(1, 1, false, 0), Stream{}); },
                 "adamw_update: t is 0, expected the number of this update, 1 or more");
    expect_error([&] { update(a, a, a, &good, 1); },
                 "adamw_update: params_T is given; the CPU computes with the fp32 parameters themselves");
#endif
}
