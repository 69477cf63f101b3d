// The activation functions of the MLP and their gradients against the oracle: both tails, where the formulas would
// cancel; zero; NaN; in place; rows with gaps; of gated functions the forward pass recomputed beside the gradients.
#include "kernels/activation.h"

#include <cmath>
#include <iterator>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class ActivationFunction : public DTypeTest {};

constexpr Activation ALL[] = {Activation::GELU, Activation::SwiGLU, Activation::ReLU2};
static_assert(std::size(ALL) == ACTIVATION_NAMES.size());

constexpr int64_t SIZES[][2] = {{1, 1}, {1, 15}, {3, 16}, {7, 33}, {5, 8193}, {64, 300}, {64, 500}};

std::string name_of(Activation f) {
    return ACTIVATION_NAMES[size_t(f)];
}

void check(Activation f, DType T, int64_t N, int64_t I, int64_t gap, double scale) {
    SCOPED_TRACE(str(name_of(f), " N ", N, " I ", I, " gap ", gap, " scale ", scale));
    const int64_t C = activation_inputs(f, I), ld = C + gap, ld_out = I + gap;
    const TestArray inp = TestArray::random(T, {N, ld}, 1, scale), dout = TestArray::random(T, {N, ld_out}, 2);
    const TestArray out = TestArray::poisoned(T, {N, ld_out}), dinp = TestArray::poisoned(T, {N, ld});
    const Tensor x = inp.tensor().columns(0, C), d = dout.tensor().columns(0, I);
    const std::vector<double> x_values = take_columns(inp.values(), ld, C),
                              d_values = take_columns(dout.values(), ld_out, I);

    activation_forward(f, out.tensor().columns(0, I), x, Stream{});
    reference::Values ref = reference::activation_forward(f, x_values.data(), N, I);
    const std::vector<double> forward = take_columns(out.fetch(), ld_out, I);
    expect_close("out", forward, ref.value, ref.mag, 1, I, T);
    expect_gaps_untouched("out", out.fetch(), ld_out, I);

    const TestArray again = TestArray::poisoned(T, {N, ld_out});
    activation_backward(f, dinp.tensor().columns(0, C), is_gated(f) ? again.tensor().columns(0, I) : Tensor{}, d, x,
                        Stream{});
    ref = reference::activation_backward(f, d_values.data(), x_values.data(), N, I);
    const std::vector<double> gradient = take_columns(dinp.fetch(), ld, C);
    expect_close("dinp", gradient, ref.value, ref.mag, 1, I, T);  // rows: gate and up each for itself
    expect_gaps_untouched("dinp", dinp.fetch(), ld, C);

    // In place, as the header allows: the same bits.
    if (is_gated(f)) {
        expect_same_bits("out computed again", forward, take_columns(again.fetch(), ld_out, I));
        expect_gaps_untouched("out computed again", again.fetch(), ld_out, I);
        activation_backward(f, x, d, d, x, Stream{});
        expect_same_bits("dinp in place", gradient, take_columns(inp.fetch(), ld, C));
        expect_same_bits("out in place of dout", forward, take_columns(dout.fetch(), ld_out, I));
    } else {
        activation_backward(f, d, {}, d, x, Stream{});
        expect_same_bits("dinp in place", gradient, take_columns(dout.fetch(), ld_out, I));
        activation_forward(f, x, x, Stream{});
        expect_same_bits("out in place", forward, take_columns(inp.fetch(), ld, C));
    }
}

}  // namespace

TEST_P(ActivationFunction, MatchesOracle) {
    for (const Activation f : ALL)
        for (const auto& s : SIZES)
            for (const int64_t gap : {0, 3})
                for (const double scale : {0.1, 2.0, 10.0, 20.0}) check(f, activation(), s[0], s[1], gap, scale);
}

// Each point is a row of its own, so that no error hides behind a larger value.
TEST_P(ActivationFunction, AccurateAtEveryMagnitude) {
    const DType T = activation();
    std::vector<double> points = {0, -0.0, 1e-30, -1e-30, 1e-5, -1e-5, 3, -3, 15, -15, 100, -100};
    if (T != DType::F16) points.insert(points.end(), {1e6, -1e6});  // fp16 ends at 65504
    for (double x = -14; x <= 14; x += 0.0371) points.push_back(x);
    for (double x = -95; x <= 95; x += 0.271) points.push_back(x);
    const int64_t n = int64_t(points.size());
    for (const Activation f : ALL) {
        SCOPED_TRACE(name_of(f));
        std::vector<double> rows;
        for (const double x : points) {
            rows.push_back(x);
            if (is_gated(f)) rows.push_back(0.7);
        }
        const int64_t C = activation_inputs(f, 1);
        const TestArray inp = TestArray::of(T, rows, {n, C}),
                        ones = TestArray::of(T, std::vector<double>(points.size(), 1.0), {n, 1});
        const TestArray out = TestArray::poisoned(T, {n, 1}), dinp = TestArray::poisoned(T, {n, C});
        activation_forward(f, out, inp, Stream{});
        activation_backward(f, dinp, {}, ones, inp, Stream{});
        reference::Values ref = reference::activation_forward(f, inp.data(), n, 1);
        expect_close("out", out.fetch(), ref.value, ref.mag, 1, 1, T);
        ref = reference::activation_backward(f, ones.data(), inp.data(), n, 1);
        expect_close("dinp", dinp.fetch(), ref.value, ref.mag, 1, 1, T);
    }
}

TEST_P(ActivationFunction, NaNPropagates) {
    for (const Activation f : ALL) {
        SCOPED_TRACE(name_of(f));
        const int64_t C = activation_inputs(f, 17);
        const TestArray inp = TestArray::poisoned(activation(), {1, C}),
                        out = TestArray::random(activation(), {1, 17}, 1),
                        dout = TestArray::random(activation(), {1, 17}, 2),
                        dinp = TestArray::random(activation(), {1, C}, 3);
        activation_forward(f, out, inp, Stream{});
        activation_backward(f, dinp, {}, dout, inp, Stream{});
        for (const double x : out.fetch()) EXPECT_TRUE(std::isnan(x));
        for (const double x : dinp.fetch()) EXPECT_TRUE(std::isnan(x));
    }
}

TEST_P(ActivationFunction, BitsDoNotDependOnThreads) {
    for (const Activation f : ALL) {
        const int64_t C = activation_inputs(f, 1001);
        const TestArray inp = TestArray::random(activation(), {67, C}, 1),
                        dout = TestArray::random(activation(), {67, 1001}, 2);
        expect_deterministic(name_of(f).c_str(), [&] {
            const TestArray out = TestArray::poisoned(activation(), {67, 1001}),
                            dinp = TestArray::poisoned(activation(), {67, C});
            activation_forward(f, out, inp, Stream{});
            activation_backward(f, dinp, {}, dout, inp, Stream{});
            std::vector<double> results = out.fetch();
            const std::vector<double> gradients = dinp.fetch();
            results.insert(results.end(), gradients.begin(), gradients.end());
            return results;
        });
    }
}

INSTANTIATE_DTYPES(ActivationFunction);

TEST(ActivationArguments, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({2, 8}, 1), odd = TestArray::random({2, 9}, 2),
                    packed = TestArray::random({2, 16}, 3);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(16), {2, 8});
    for (const Activation f : {Activation::GELU, Activation::ReLU2}) {
        expect_error([&] { activation_forward(f, odd, a, Stream{}); },
                     "activation_forward: out is fp32 [2, 9], expected fp32 [2, 8]");
        expect_error([&] { activation_forward(f, a, ints, Stream{}); },
                     str("activation_forward: inp is int32 [2, 8], expected ", ACTIVATION_MATRIX));
        expect_error([&] { activation_backward(f, a, {}, odd, a, Stream{}); },
                     "activation_backward: dout is fp32 [2, 9], expected fp32 [2, 8]");
        expect_error([&] { activation_backward(f, {}, {}, a, a, Stream{}); }, "activation_backward: dinp is missing");
        expect_error([&] { activation_backward(f, a, a, a, a, Stream{}); },
                     "activation_backward: out is computed for gated functions only");
    }
    const Activation f = Activation::SwiGLU;
    expect_error([&] { activation_forward(f, a, odd, Stream{}); },
                 "activation_forward: inp is fp32 [2, 9], expected an even number of columns");
    expect_error([&] { activation_forward(f, a, {}, Stream{}); }, "activation_forward: inp is missing");
    expect_error([&] { activation_backward(f, odd, {}, a, packed, Stream{}); },
                 "activation_backward: dinp is fp32 [2, 9], expected fp32 [2, 16]");
    expect_error([&] { activation_backward(f, packed, odd, a, packed, Stream{}); },
                 "activation_backward: out is fp32 [2, 9], expected fp32 [2, 8]");
    expect_error([&] { activation_forward(Activation::None, a, a, Stream{}); },
                 "activation_forward: no activation function is given");
}
