// ReLU² and its gradient against the oracle; both sides of zero and zero itself; in place; rows with gaps.
#include "kernels/relu2.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class Relu2 : public DTypeTest {};

constexpr int64_t SIZES[][2] = {{1, 1}, {1, 15}, {3, 16}, {7, 33}, {5, 8193}, {64, 500}};

void check(DType T, int64_t N, int64_t C, int64_t gap, double scale) {
    SCOPED_TRACE(str("N ", N, " C ", C, " gap ", gap, " scale ", scale));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random(T, {N, ld}, 1, scale), dout = TestArray::random(T, {N, ld}, 2);
    const TestArray out = TestArray::poisoned(T, {N, ld}), dinp = TestArray::poisoned(T, {N, ld});
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    const std::vector<double> x = take_columns(inp.values(), ld, C), d = take_columns(dout.values(), ld, C);

    relu2_forward(view(out), view(inp), Stream{});
    reference::Values ref = reference::relu2_forward(x.data(), N * C);
    expect_close("out", take_columns(out.fetch(), ld, C), ref.value, ref.mag, 1, C, T);
    expect_gaps_untouched("out", out.fetch(), ld, C);

    relu2_backward(view(dinp), view(dout), view(inp), Stream{});
    ref = reference::relu2_backward(d.data(), x.data(), N * C);
    expect_close("dinp", take_columns(dinp.fetch(), ld, C), ref.value, ref.mag, 1, C, T);
    expect_gaps_untouched("dinp", dinp.fetch(), ld, C);

    // In place, as the header allows: the same bits.
    relu2_backward(view(dout), view(dout), view(inp), Stream{});
    expect_same_bits("dinp in place", take_columns(dinp.fetch(), ld, C), take_columns(dout.fetch(), ld, C));
    relu2_forward(view(inp), view(inp), Stream{});
    expect_same_bits("out in place", take_columns(out.fetch(), ld, C), take_columns(inp.fetch(), ld, C));
}

}  // namespace

TEST_P(Relu2, MatchesOracle) {
    for (const auto& s : SIZES)
        for (const int64_t gap : {0, 3})
            for (const double scale : {0.1, 2.0, 10.0}) check(activation(), s[0], s[1], gap, scale);
}

// Each point is a row of its own, so that no error hides behind a larger value.
TEST_P(Relu2, AccurateAtEveryMagnitude) {
    const DType T = activation();
    std::vector<double> points = {0, -0.0, 1e-30, -1e-30, 1e-5, -1e-5, 3, -3, 100, -100};
    if (T != DType::F16) points.insert(points.end(), {1e6, -1e6});  // fp16 ends at 65504
    const int64_t n = int64_t(points.size());
    const TestArray inp = TestArray::of(T, points, {n, 1}),
                    ones = TestArray::of(T, std::vector<double>(points.size(), 1.0), {n, 1});
    const TestArray out = TestArray::poisoned(T, {n, 1}), dinp = TestArray::poisoned(T, {n, 1});
    relu2_forward(out, inp, Stream{});
    relu2_backward(dinp, ones, inp, Stream{});
    reference::Values ref = reference::relu2_forward(inp.data(), n);
    expect_close("out", out.fetch(), ref.value, ref.mag, 1, 1, T);
    ref = reference::relu2_backward(ones.data(), inp.data(), n);
    expect_close("dinp", dinp.fetch(), ref.value, ref.mag, 1, 1, T);
}

TEST_P(Relu2, NaNPropagates) {
    const TestArray inp = TestArray::poisoned(activation(), {1, 17}), out = TestArray::random(activation(), {1, 17}, 1),
                    dinp = TestArray::random(activation(), {1, 17}, 2);
    relu2_forward(out, inp, Stream{});
    relu2_backward(dinp, dinp, inp, Stream{});
    for (const double x : out.fetch()) EXPECT_TRUE(std::isnan(x));
    for (const double x : dinp.fetch()) EXPECT_TRUE(std::isnan(x));
}

TEST_P(Relu2, BitsDoNotDependOnThreads) {
    const TestArray inp = TestArray::random(activation(), {67, 1001}, 1);
    expect_deterministic("relu2", [&] {
        const TestArray out = TestArray::poisoned(activation(), {67, 1001});
        relu2_forward(out, inp, Stream{});
        return out.fetch();
    });
}

INSTANTIATE_DTYPES(Relu2);

TEST(Relu2Arguments, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({2, 8}, 1), b = TestArray::random({2, 9}, 2);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(16), {2, 8});
    expect_error([&] { relu2_forward(b, a, Stream{}); }, "relu2_forward: out is fp32 [2, 9], expected fp32 [2, 8]");
    expect_error([&] { relu2_forward(a, ints, Stream{}); },
                 str("relu2_forward: inp is int32 [2, 8], expected ", ACTIVATION_MATRIX));
    expect_error([&] { relu2_backward(a, b, a, Stream{}); },
                 "relu2_backward: dout is fp32 [2, 9], expected fp32 [2, 8]");
    expect_error([&] { relu2_backward(Tensor{}, a, a, Stream{}); }, "relu2_backward: dinp is missing");
}
