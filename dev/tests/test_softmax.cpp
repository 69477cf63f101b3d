// Standalone softmax against the oracle: every length, causal offsets, masks, rows that see nothing.
#include "kernels/softmax.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class Softmax : public DTypeTest {};

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

// Every third key masked, so that some rows see only a few keys.
std::vector<uint8_t> make_mask(int64_t Q, int64_t K) {
    std::vector<uint8_t> mask(size_t(Q * K));
    for (size_t i = 0; i < mask.size(); i++) mask[i] = uint8_t(i * 7 % 3 != 0 ? 1 + i % 255 : 0);
    return mask;
}

Tensor reshape(Tensor t, int64_t rows, int64_t columns) {
    return make_tensor(t.data, t.dtype, t.device, {rows, columns});
}

void check_rows(DType T, int64_t batch, int64_t Q, int64_t K, double scale, bool causal, bool masked, double inp_scale,
                double shift, int64_t gap) {
    SCOPED_TRACE(str("batch ", batch, " Q ", Q, " K ", K, " gap ", gap, " scale ", scale, causal ? " causal" : "",
                     masked ? " masked" : ""));
    const int64_t R = batch * Q, stride = K + gap;
    const float fscale = float(scale);
    const TestArray inp = TestArray::random(T, {R, stride}, 1, inp_scale, shift),
                    dout = TestArray::random(T, {R, stride}, 2);
    const TestArray out = TestArray::poisoned(T, {R, stride}), dinp = TestArray::poisoned(T, {R, stride});
    const std::vector<uint8_t> mask = make_mask(Q, K);
    const TestArray device_mask = TestArray::bytes(mask.data(), Q * K);
    auto view = [&](const TestArray& a) { return a.tensor().columns(0, K); };
    softmax_forward(view(out), view(inp), masked ? reshape(device_mask, Q, K) : Tensor{}, Q, fscale, causal, Stream{});
    const std::vector<double> x = take_columns(inp.values(), stride, K), p = take_columns(out.fetch(), stride, K);
    const reference::Values ref =
        reference::softmax_forward(x.data(), masked ? mask.data() : nullptr, R, Q, K, double(fscale), causal);
    expect_close("out", p, ref.value, ref.mag, K, K, T);
    for (size_t i = 0; i < p.size(); i++) ASSERT_TRUE(ref.value[i] != 0 || p[i] == 0) << i;
    expect_gaps_untouched("out", out.fetch(), stride, K);

    softmax_backward(view(dinp), view(dout), view(out), fscale, Stream{});
    const std::vector<double> g = take_columns(dout.values(), stride, K), d = take_columns(dinp.fetch(), stride, K);
    const reference::Values grad = reference::softmax_backward(g.data(), p.data(), R, K, double(fscale));
    expect_close("dinp", d, grad.value, grad.mag, K, K, T);
    expect_gaps_untouched("dinp", dinp.fetch(), stride, K);

    // In place: the same bits.
    softmax_forward(view(inp), view(inp), masked ? reshape(device_mask, Q, K) : Tensor{}, Q, fscale, causal, Stream{});
    softmax_backward(view(dout), view(dout), view(inp), fscale, Stream{});
    expect_same_bits("out in place", p, take_columns(inp.fetch(), stride, K));
    expect_same_bits("dinp in place", d, take_columns(dout.fetch(), stride, K));
}

// Rows that are aligned for vectors (if K is a multiple of 8) and rows that are not: CUDA has a kernel for each.
void check(DType T, int64_t batch, int64_t Q, int64_t K, double scale, bool causal, bool masked, double inp_scale = 1,
           double shift = 0) {
    for (const int64_t gap : {3, 8}) check_rows(T, batch, Q, K, scale, causal, masked, inp_scale, shift, gap);
}

TEST_P(Softmax, Lengths) {
    for (const int64_t K : {1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1023, 1536, 5000, 9000}) {
        check(activation(), 2, 3, K, 1, false, false);
        check(activation(), 1, 3, K, -0.3, false, true);
    }
}

TEST_P(Softmax, CausalOffset) {
    for (const int64_t Q : {1, 2, 16, 33}) {
        for (const int64_t past : {-20, -1, 0, 1, 17}) {
            if (Q + past <= 0) continue;
            check(activation(), 3, Q, Q + past, 0.125, true, false);
            check(activation(), 3, Q, Q + past, 0.125, true, true);
        }
    }
    check(activation(), 2, 1, 1000, 1, true, false);  // the first token after a long past
}

TEST_P(Softmax, NegativeAndLargeRows) {
    check(activation(), 4, 1, 50, 1, false, false, 0.1, -20);  // a maximum that starts at 0 would be 55% off
    check(activation(), 4, 1, 50, 1, false, false, 40);
    check(activation(), 4, 1, 50, 1, false, false, 1, 1e4);
    check(activation(), 1, 1, 7, 1, false, false, 0, activation() == DType::F16 ? -6e4 : -1e30);
}

TEST_P(Softmax, MaskedKeysHaveNoEffect) {
    // NaN and ∞ where the row cannot see; a fully masked row of zeros.
    const TestArray inp = TestArray::of(activation(), {1, 2, NOT_A_NUMBER, INF, 1, 2, 3, NOT_A_NUMBER}, {2, 4});
    const TestArray out = TestArray::poisoned(activation(), {2, 4});
    const uint8_t mask[] = {1, 1, 1, 1, 0, 0, 0, 0};
    const TestArray device_mask = TestArray::bytes(mask, 8);
    softmax_forward(out, inp, reshape(device_mask, 2, 4), 2, 1, true, Stream{});  // row 0 sees 3 keys, row 1 none
    const std::vector<double> r = out.fetch();
    for (size_t i = 0; i < 3; i++) EXPECT_TRUE(std::isnan(r[i])) << i;  // it sees the NaN
    for (size_t i = 3; i < 8; i++) EXPECT_EQ(r[i], 0) << i;
    // The same in a row that is read in vectors.
    std::vector<double> row(32, 1);
    row[3] = NOT_A_NUMBER;
    row[16 + 12] = INF;
    const TestArray wide = TestArray::of(activation(), row, {2, 16}),
                    wide_out = TestArray::poisoned(activation(), {2, 16});
    softmax_forward(wide_out, wide, Tensor{}, 2, 1, true, Stream{});  // row 0 sees 15 keys, row 1 all
    for (size_t i = 0; i < 15; i++) EXPECT_TRUE(std::isnan(wide_out.fetch()[i])) << i;
    EXPECT_EQ(wide_out.fetch()[15], 0);
    EXPECT_TRUE(std::isnan(wide_out.fetch()[31]));
    // A NaN beside -∞ alone.
    const TestArray lone = TestArray::of(activation(), {NOT_A_NUMBER, -INF, -INF, -INF}, {1, 4}),
                    lone_out = TestArray::poisoned(activation(), {1, 4});
    softmax_forward(lone_out, lone, Tensor{}, 1, 1, false, Stream{});
    EXPECT_TRUE(std::isnan(lone_out.fetch()[0]));
    const TestArray square = TestArray::of(activation(), {1, NOT_A_NUMBER, 1, 2}, {2, 2}),
                    result = TestArray::poisoned(activation(), {2, 2});
    softmax_forward(result, square, Tensor{}, 2, 1, true, Stream{});
    EXPECT_EQ(result.fetch()[0], 1);
    EXPECT_EQ(result.fetch()[1], 0);
    // A number in [1/2, 1): fp32 within 16 steps of 2⁻²⁴, bf16 rounded once by at most 2⁻⁹.
    EXPECT_NEAR(result.fetch()[3], 1 / (1 + std::exp(-1)), activation() == DType::F32 ? 1e-6 : 0x1p-9);
}

TEST_P(Softmax, Deterministic) {
    const TestArray inp = TestArray::random(activation(), {40, 333}, 1),
                    out = TestArray::poisoned(activation(), {40, 333});
    expect_deterministic("softmax", [&] {
        softmax_forward(out, inp, Tensor{}, 8, 0.5f, true, Stream{});
        return out.fetch();
    });
}

INSTANTIATE_DTYPES(Softmax);

TEST(SoftmaxArguments, InvalidArgumentsAreErrors) {
    const TestArray inp = TestArray::random({6, 4}, 1), out = TestArray::poisoned({6, 4}),
                    small = TestArray::poisoned({6, 3});
    expect_error([&] { softmax_forward(out, inp, Tensor{}, 4, 1, false, Stream{}); },
                 "softmax_forward: 6 rows are not a multiple of Q = 4");
    expect_error([&] { softmax_forward(out, inp, Tensor{}, 0, 1, false, Stream{}); },
                 "softmax_forward: 6 rows are not a multiple of Q = 0");
    expect_error([&] { softmax_forward(small, inp, Tensor{}, 6, 1, false, Stream{}); },
                 "softmax_forward: out is fp32 [6, 3], expected fp32 [6, 4]");
    expect_error([&] { softmax_forward(out, inp, out, 6, 1, false, Stream{}); },
                 "softmax_forward: mask is fp32 [6, 4], expected uint8 [6, 4]");
    expect_error([&] { softmax_backward(small, inp, out, 1, Stream{}); },
                 "softmax_backward: dinp is fp32 [6, 3], expected fp32 [6, 4]");
}

}  // namespace
