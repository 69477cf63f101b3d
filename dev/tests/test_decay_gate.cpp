// The decay gate of gated linear attention against the oracle: odd sizes, rows with gaps, gates from nearly none to
// nearly all; and that a row does not depend on the rows beside it.
#include "kernels/linear_attention/decay_gate.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class DecayGate : public DTypeTest {};

struct Shape {
    int64_t N, C, H, gap;
};
constexpr Shape SHAPES[] = {{1, 1, 1, 0},    {3, 17, 5, 3},   {4, 64, 4, 0},
                            {33, 128, 1, 8}, {70, 384, 6, 0}, {9, 1000, 33, 5}};

std::vector<double> gates(DType T, const Shape& s, double scale, double shift) {
    const int64_t ld = s.C + s.gap, gate_ld = s.H + s.gap;
    const TestArray inp = TestArray::random(T, {s.N, ld}, 1), weight = TestArray::random(T, {s.H, ld}, 2, scale),
                    bias = TestArray::random({s.H}, 3, 1, shift), gate = TestArray::poisoned({s.N, gate_ld});
    decay_gate_forward(gate.tensor().columns(0, s.H), inp.tensor().columns(0, s.C), weight.tensor().columns(0, s.C),
                       bias, Stream{});
    const std::vector<double> got = take_columns(gate.fetch(), gate_ld, s.H);
    const reference::Values ref =
        reference::decay_gate_forward(take_columns(inp.values(), ld, s.C).data(),
                                      take_columns(weight.values(), ld, s.C).data(), bias.data(), s.N, s.C, s.H);
    expect_close("gate", got, ref.value, ref.mag, s.C, s.H);
    expect_gaps_untouched("gate", gate.fetch(), gate_ld, s.H);
    return got;
}

TEST_P(DecayGate, MatchesOracle) {
    for (const Shape& s : SHAPES) {
        for (const double shift : {0.0, 5.0, -4.0}) {
            SCOPED_TRACE(str("N ", s.N, " C ", s.C, " H ", s.H, " shift ", shift));
            const std::vector<double> g = gates(activation(), s, 0.2, shift);
            const int64_t ld = s.H + s.gap;
            const TestArray gate = TestArray::of(g, {s.N, s.H}), dgate = TestArray::random({s.N, s.H}, 4),
                            dx = TestArray::poisoned(activation(), {s.N, ld});
            decay_gate_backward(dx.tensor().columns(0, s.H), dgate, gate, Stream{});
            const reference::Values ref = reference::decay_gate_backward(dgate.data(), gate.data(), s.N * s.H);
            expect_close("dx", take_columns(dx.fetch(), ld, s.H), ref.value, ref.mag, 1, s.H, activation());
            expect_gaps_untouched("dx", dx.fetch(), ld, s.H);
        }
    }
}

// Far from 0 on both sides: σ of a large number is 1 but for a small part, which is what the decay is made of.
TEST_P(DecayGate, AccurateAtEveryMagnitude) {
    const std::vector<double> points = {0, 1e-4, -1e-4, 3, -3, 20, -20, 80, -80, 1000, -1000};
    const int64_t n = int64_t(points.size());
    const TestArray inp = TestArray::of(activation(), points, {n, 1}), one = TestArray::of(activation(), {1}, {1, 1}),
                    zero = TestArray::of({0}, {1}), ones = TestArray::of(std::vector<double>(points.size(), 1), {n, 1});
    const TestArray gate = TestArray::poisoned({n, 1}), dx = TestArray::poisoned(activation(), {n, 1});
    decay_gate_forward(gate, inp, one, zero, Stream{});
    const reference::Values ref = reference::decay_gate_forward(inp.data(), one.data(), zero.data(), n, 1, 1);
    for (size_t i = 0; i < points.size(); i++) {
        // The matmul's own rounding moves a number x by u·|x|.
        const double allowed = 8 * UNIT_ROUNDOFF * ref.mag[i] + 0x1p-126;
        EXPECT_LE(std::fabs(gate.fetch()[i] - ref.value[i]), allowed) << points[i];
    }
    decay_gate_backward(dx, ones, gate, Stream{});
    const reference::Values gradient = reference::decay_gate_backward(ones.data(), gate.fetch().data(), n);
    expect_close("dx", dx.fetch(), gradient.value, gradient.mag, 1, 1, activation());
}

TEST_P(DecayGate, RowsDoNotDependOnBatchSize) {
    const Shape all{37, 200, 7, 0};
    const std::vector<double> whole = gates(activation(), all, 0.2, 3);
    for (const int64_t n : {1, 5, 36}) {
        Shape some = all;
        some.N = n;
        expect_same_bits("first rows", {whole.begin(), whole.begin() + n * all.H}, gates(activation(), some, 0.2, 3));
    }
    expect_deterministic("decay gate", [&] { return gates(activation(), {300, 130, 9, 0}, 0.2, 3); });
}

INSTANTIATE_DTYPES(DecayGate);

TEST(DecayGateArguments, InvalidArgumentsAreErrors) {
    const TestArray inp = TestArray::random({4, 8}, 1), weight = TestArray::random({3, 8}, 2),
                    bias = TestArray::random({3}, 3), gate = TestArray::poisoned({4, 3}),
                    wide = TestArray::random({3, 9}, 4);
    expect_error([&] { decay_gate_forward(gate, inp, wide, bias, Stream{}); },
                 "decay_gate_forward: weight is fp32 [3, 9], expected fp32 [3, 8]");
    expect_error([&] { decay_gate_forward(gate, inp, weight, Tensor{}, Stream{}); },
                 "decay_gate_forward: bias is missing");
    expect_error([&] { decay_gate_forward(inp, inp, weight, bias, Stream{}); },
                 "decay_gate_forward: gate is fp32 [4, 8], expected fp32 [4, 3]");
    expect_error([&] { decay_gate_backward(gate, wide, gate, Stream{}); },
                 "decay_gate_backward: dgate is fp32 [3, 9], expected fp32 [4, 3]");
}

}  // namespace
