// GELU and its gradient against the oracle: both tails, where ½(1 + tanh u) would cancel; in place; rows with gaps.
#include "kernels/gelu.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class Gelu : public DTypeTest {};

constexpr int64_t SIZES[][2] = {{1, 1}, {1, 15}, {3, 16}, {7, 33}, {5, 8193}, {64, 500}};

void check(DType T, int64_t N, int64_t C, int64_t gap, double scale) {
    SCOPED_TRACE(str("N ", N, " C ", C, " gap ", gap, " scale ", scale));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random(T, {N, ld}, 1, scale), dout = TestArray::random(T, {N, ld}, 2);
    const TestArray out = TestArray::poisoned(T, {N, ld}), dinp = TestArray::poisoned(T, {N, ld});
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    const std::vector<double> x = take_columns(inp.values(), ld, C), d = take_columns(dout.values(), ld, C);

    gelu_forward(view(out), view(inp), Stream{});
    reference::Values ref = reference::gelu_forward(x.data(), N * C);
    expect_close("out", take_columns(out.fetch(), ld, C), ref.value, ref.mag, 1, C, T);
    expect_gaps_untouched("out", out.fetch(), ld, C);

    gelu_backward(view(dinp), view(dout), view(inp), Stream{});
    ref = reference::gelu_backward(d.data(), x.data(), N * C);
    expect_close("dinp", take_columns(dinp.fetch(), ld, C), ref.value, ref.mag, 1, C, T);
    expect_gaps_untouched("dinp", dinp.fetch(), ld, C);

    // In place, as the header allows: the same bits.
    gelu_backward(view(dout), view(dout), view(inp), Stream{});
    expect_same_bits("dinp in place", take_columns(dinp.fetch(), ld, C), take_columns(dout.fetch(), ld, C));
    gelu_forward(view(inp), view(inp), Stream{});
    expect_same_bits("out in place", take_columns(out.fetch(), ld, C), take_columns(inp.fetch(), ld, C));
}

}  // namespace

TEST_P(Gelu, MatchesOracle) {
    for (const auto& s : SIZES)
        for (const int64_t gap : {0, 3})
            for (const double scale : {0.1, 2.0, 10.0}) check(activation(), s[0], s[1], gap, scale);
}

// Each point is a row of its own, so that no error hides behind a larger value.
TEST_P(Gelu, AccurateAtEveryMagnitude) {
    const DType T = activation();
    std::vector<double> points = {0, 1e-30, -1e-30, 1e-5, -1e-5, 15, -15, 100, -100};
    if (T != DType::F16) points.insert(points.end(), {1e6, -1e6});  // fp16 ends at 65504
    for (double x = -14; x <= 14; x += 0.0371) points.push_back(x);
    const int64_t n = int64_t(points.size());
    const TestArray inp = TestArray::of(T, points, {n, 1}),
                    ones = TestArray::of(T, std::vector<double>(points.size(), 1.0), {n, 1});
    const TestArray out = TestArray::poisoned(T, {n, 1}), dinp = TestArray::poisoned(T, {n, 1});
    gelu_forward(out, inp, Stream{});
    gelu_backward(dinp, ones, inp, Stream{});
    reference::Values ref = reference::gelu_forward(inp.data(), n);
    expect_close("out", out.fetch(), ref.value, ref.mag, 1, 1, T);
    ref = reference::gelu_backward(ones.data(), inp.data(), n);
    expect_close("dinp", dinp.fetch(), ref.value, ref.mag, 1, 1, T);
}

TEST_P(Gelu, BitsDoNotDependOnThreads) {
    const TestArray inp = TestArray::random(activation(), {67, 1001}, 1);
    expect_deterministic("gelu", [&] {
        const TestArray out = TestArray::poisoned(activation(), {67, 1001});
        gelu_forward(out, inp, Stream{});
        return out.fetch();
    });
}

INSTANTIATE_DTYPES(Gelu);

TEST(GeluArguments, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({2, 8}, 1), b = TestArray::random({2, 9}, 2);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(16), {2, 8});
    expect_error([&] { gelu_forward(b, a, Stream{}); }, "gelu_forward: out is fp32 [2, 9], expected fp32 [2, 8]");
    expect_error([&] { gelu_forward(a, ints, Stream{}); },
                 str("gelu_forward: inp is int32 [2, 8], expected ", ACTIVATION_MATRIX));
    expect_error([&] { gelu_backward(a, b, a, Stream{}); }, "gelu_backward: dout is fp32 [2, 9], expected fp32 [2, 8]");
    expect_error([&] { gelu_backward(Tensor{}, a, a, Stream{}); }, "gelu_backward: dinp is missing");
}
