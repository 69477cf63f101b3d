// SwiGLU and its gradients against the oracle: both tails of the gate; in place; rows with gaps; the forward pass
// recomputed beside the gradients.
#include "kernels/swiglu.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class SwiGLU : public DTypeTest {};

constexpr int64_t SIZES[][2] = {{1, 1}, {1, 15}, {3, 16}, {7, 33}, {3, 8193}, {64, 300}};

void check(DType T, int64_t N, int64_t I, int64_t gap, double scale) {
    SCOPED_TRACE(str("N ", N, " I ", I, " gap ", gap, " scale ", scale));
    const int64_t ld = I + gap, ld2 = 2 * I + gap;
    const TestArray gate_up = TestArray::random(T, {N, ld2}, 1, scale), dout = TestArray::random(T, {N, ld}, 2);
    const TestArray out = TestArray::poisoned(T, {N, ld}), dgate_up = TestArray::poisoned(T, {N, ld2});
    const Tensor packed = gate_up.tensor().columns(0, 2 * I);
    const std::vector<double> x = take_columns(gate_up.values(), ld2, 2 * I), d = take_columns(dout.values(), ld, I);

    swiglu_forward(out.tensor().columns(0, I), packed, Stream{});
    reference::Values ref = reference::swiglu_forward(x.data(), N, I);
    expect_close("out", take_columns(out.fetch(), ld, I), ref.value, ref.mag, 1, I, T);
    expect_gaps_untouched("out", out.fetch(), ld, I);

    const TestArray recomputed = TestArray::poisoned(T, {N, ld});
    swiglu_backward(dgate_up.tensor().columns(0, 2 * I), recomputed.tensor().columns(0, I), dout.tensor().columns(0, I),
                    packed, Stream{});
    ref = reference::swiglu_backward(d.data(), x.data(), N, I);
    const std::vector<double> got = take_columns(dgate_up.fetch(), ld2, 2 * I);
    expect_close("dgate_up", got, ref.value, ref.mag, 1, I, T);  // rows: gate and up each for itself
    expect_gaps_untouched("dgate_up", dgate_up.fetch(), ld2, 2 * I);
    const std::vector<double> forward = take_columns(out.fetch(), ld, I);
    expect_same_bits("out recomputed", forward, take_columns(recomputed.fetch(), ld, I));
    expect_gaps_untouched("out recomputed", recomputed.fetch(), ld, I);

    const Tensor in_place = dout.tensor().columns(0, I);
    swiglu_backward(packed, in_place, in_place, packed, Stream{});
    expect_same_bits("in place", got, take_columns(gate_up.fetch(), ld2, 2 * I));
    expect_same_bits("out in place of dout", forward, take_columns(dout.fetch(), ld, I));
}

}  // namespace

TEST_P(SwiGLU, MatchesOracle) {
    for (const auto& s : SIZES)
        for (const int64_t gap : {0, 3})
            for (const double scale : {0.1, 2.0, 20.0}) check(activation(), s[0], s[1], gap, scale);
}

// Each point is a row of its own, so that no error hides behind a larger value.
TEST_P(SwiGLU, AccurateAtEveryMagnitude) {
    const DType T = activation();
    std::vector<double> gates = {0, 1e-30, -1e-30, 1e-5, -1e-5, 100, -100}, packed;
    if (T != DType::F16) gates.insert(gates.end(), {1e6, -1e6});  // fp16 ends at 65504
    for (double x = -95; x <= 95; x += 0.271) gates.push_back(x);
    for (const double gate : gates) packed.insert(packed.end(), {gate, 0.7});
    const int64_t n = int64_t(gates.size());
    const TestArray gate_up = TestArray::of(T, packed, {n, 2}),
                    ones = TestArray::of(T, std::vector<double>(gates.size(), 1.0), {n, 1});
    const TestArray out = TestArray::poisoned(T, {n, 1}), dgate_up = TestArray::poisoned(T, {n, 2});
    swiglu_forward(out, gate_up, Stream{});
    swiglu_backward(dgate_up, {}, ones, gate_up, Stream{});
    reference::Values ref = reference::swiglu_forward(gate_up.data(), n, 1);
    expect_close("out", out.fetch(), ref.value, ref.mag, 1, 1, T);
    ref = reference::swiglu_backward(ones.data(), gate_up.data(), n, 1);
    expect_close("dgate_up", dgate_up.fetch(), ref.value, ref.mag, 1, 1, T);
}

TEST_P(SwiGLU, BitsDoNotDependOnThreads) {
    const TestArray gate_up = TestArray::random(activation(), {67, 802}, 1),
                    dout = TestArray::random(activation(), {67, 401}, 2);
    expect_deterministic("swiglu", [&] {
        const TestArray dgate_up = TestArray::poisoned(activation(), {67, 802});
        swiglu_backward(dgate_up, {}, dout, gate_up, Stream{});
        return dgate_up.fetch();
    });
}

INSTANTIATE_DTYPES(SwiGLU);

TEST(SwiGLUArguments, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({2, 8}, 1), b = TestArray::random({2, 17}, 2);
    expect_error([&] { swiglu_forward(a, b, Stream{}); },
                 "swiglu_forward: gate_up is fp32 [2, 17], expected fp32 [2, 16]");
    expect_error([&] { swiglu_forward(a, Tensor{}, Stream{}); }, "swiglu_forward: gate_up is missing");
    expect_error([&] { swiglu_backward(b, {}, a, b, Stream{}); },
                 "swiglu_backward: dgate_up is fp32 [2, 17], expected fp32 [2, 16]");
    const TestArray c = TestArray::random({2, 16}, 3), narrow = TestArray::random({2, 7}, 4);
    expect_error([&] { swiglu_backward(c, narrow, a, c, Stream{}); },
                 "swiglu_backward: out is fp32 [2, 7], expected fp32 [2, 8]");
}
