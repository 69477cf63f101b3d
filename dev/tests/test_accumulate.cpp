// Copies and sums between fp32 and bf16: exactly the fp32 sum, rounded once.
#include "kernels/accumulate.h"

#include <cmath>

#include "dev/oracle/stochastic_rounding.h"
#include "dev/tests/test_util.h"

namespace {

TestArray number(int64_t t) {
    return TestArray::bytes(&t, sizeof t);
}
Tensor as_int64(const TestArray& bytes) {
    return make_tensor(bytes.tensor().data, DType::I64, bytes.tensor().device, {1});
}

}  // namespace

TEST(Accumulate, AddsEveryPairOfDtypes) {
    for (const DType to : {DType::F32, DType::BF16}) {
        for (const DType from : {DType::F32, DType::BF16}) {
            for (const bool add : {false, true}) {
                for (const int64_t n : {0, 1, 4, 31, 1000, 20001}) {
                    SCOPED_TRACE(str(dtype_name(from), " to ", dtype_name(to), " add ", add, " n ", n));
                    const TestArray before = TestArray::random(to, {n}, 1), inp = TestArray::random(from, {n}, 2);
                    const TestArray poisoned = TestArray::poisoned(to, {n});
                    const Tensor out = add ? before : poisoned;
                    accumulate(out, inp, add, Stream{});
                    std::vector<double> expected;
                    for (int64_t i = 0; i < n; i++) {
                        const float x = float(inp.data()[i]);
                        expected.push_back(rounded(to, double(add ? float(before.data()[i]) + x : x)));
                    }
                    expect_same_bits("out", add ? before.fetch() : poisoned.fetch(), expected);
                }
            }
        }
    }
}

// By the definition of docs/understand/numerics.md, wherever out lies in its tensor.
TEST(Accumulate, StochasticRoundingUsesTheSpecifiedNoise) {
    const uint64_t seed = 1234567890123456789, key = name_hash("gradients of group 3");
    const int64_t t = 12345;
    const TestArray counter = number(t);
    for (const DType from : {DType::F32, DType::BF16}) {
        for (const bool add : {false, true}) {
            for (const int64_t n : {0, 1, 4, 31, 1000, 20001}) {
                for (const int64_t first : {int64_t(0), int64_t(3), (int64_t(1) << 38) - 20004}) {
                    SCOPED_TRACE(str(dtype_name(from), " add ", add, " n ", n, " first ", first));
                    const TestArray before = TestArray::random(DType::BF16, {n}, 1),
                                    inp = TestArray::random(from, {n}, 2, 0.01);
                    const TestArray poisoned = TestArray::poisoned(DType::BF16, {n});
                    const TestArray& out = add ? before : poisoned;
                    accumulate_stochastic(out, inp, add, {seed, key, first, as_int64(counter)}, Stream{});
                    std::vector<double> expected;
                    for (int64_t i = 0; i < n; i++) {
                        const float x = float(inp.data()[i]), sum = add ? float(before.data()[i]) + x : x;
                        expected.push_back(round_by(double(sum), noise_of(seed, t, key, first + i)));
                    }
                    expect_same_bits("out", out.fetch(), expected);
                }
            }
        }
    }
}

// 256 terms of an eighth of a unit each. Rounded to nearest the sum would stay 1. The sum's error is a random walk of
// 256 steps whose deviation is at most half a unit, 2⁻⁸: 2⁻⁴ for an element, and 2⁻¹⁰ for the mean of 4096.
TEST(Accumulate, SmallTermsAreNotLost) {
    const int64_t n = 4096;
    const TestArray out = TestArray::of(DType::BF16, std::vector<double>(size_t(n), 1), {n}),
                    term = TestArray::of(std::vector<double>(size_t(n), 0x1p-10), {n});
    for (int64_t t = 0; t < 256; t++) {
        const TestArray counter = number(t);
        accumulate_stochastic(out, term, true, {7, 8, 0, as_int64(counter)}, Stream{});
    }
    double mean = 0;
    for (const double x : out.fetch()) mean += x / double(n);
    EXPECT_NEAR(mean, 1.25, 4 * 0x1p-10);
}

TEST(Accumulate, NotANumberAndInfinityStay) {
    const TestArray out = TestArray::poisoned(DType::BF16, {4}),
                    inp = TestArray::of({INFINITY, -INFINITY, NAN, 0}, {4}), counter = number(1);
    accumulate_stochastic(out, inp, false, {7, 8, 0, as_int64(counter)}, Stream{});
    const std::vector<double> got = out.fetch();
    EXPECT_EQ(got[0], INFINITY);
    EXPECT_EQ(got[1], -INFINITY);
    EXPECT_TRUE(std::isnan(got[2])) << got[2];
    EXPECT_EQ(got[3], 0);
}

TEST(Accumulate, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({8}, 1), b = TestArray::random({9}, 2), matrix = TestArray::random({2, 4}, 3);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(8), {8});
    expect_error([&] { accumulate(a, b, true, Stream{}); }, "accumulate: inp is fp32 [9], expected fp32 [8]");
    expect_error([&] { accumulate(a, ints, true, Stream{}); },
                 "accumulate: inp is int32 [8], expected fp32 or bf16 [n]");
    expect_error([&] { accumulate(matrix, a, true, Stream{}); },
                 "accumulate: out is fp32 [2, 4], expected fp32 or bf16 [n]");
    expect_error([&] { accumulate(Tensor{}, a, true, Stream{}); }, "accumulate: out is missing");
    const TestArray half = TestArray::random(DType::BF16, {8}, 4), counter = number(1);
    const RoundingNoise noise{1, 2, 0, as_int64(counter)};
    expect_error([&] { accumulate_stochastic(a, a, true, noise, Stream{}); },
                 "accumulate_stochastic: out is fp32 [8], expected bf16 [8]");
    expect_error(
        [&] {
            accumulate_stochastic(half, a, true, {1, 2, 0, Tensor{}}, Stream{});
        },
        "accumulate_stochastic: t is missing");
    expect_error(
        [&] {
            accumulate_stochastic(half, a, true, {1, 2, int64_t(1) << 38, noise.t}, Stream{});
        },
        "accumulate_stochastic: first_element is 274877906944, expected less than 2^38 elements");
}
