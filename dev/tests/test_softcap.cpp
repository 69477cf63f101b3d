// Softcap against the oracle: below the cap and far above it, rows with gaps, infinite logits.
#include "kernels/softcap.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class SoftcapOp : public DTypeTest {};

constexpr Softcap CAPS[] = {
    {Softcap::Function::Tanh, 15}, {Softcap::Function::Tanh, 50}, {Softcap::Function::Rsqrt, 15}};

}  // namespace

TEST_P(SoftcapOp, MatchesOracle) {
    const int64_t sizes[][2] = {{1, 1}, {1, 15}, {3, 16}, {7, 33}, {5, 8193}, {64, 500}};
    for (const Softcap& softcap : CAPS)
        for (const auto& [N, C] : sizes)
            for (const int64_t gap : {0, 3})
                for (const double scale : {0.01, 10.0, 1000.0}) {
                    SCOPED_TRACE(str("N ", N, " C ", C, " gap ", gap, " scale ", scale));
                    const int64_t ld = C + gap;
                    const TestArray x = TestArray::random(activation(), {N, ld}, 1, scale);
                    softcap_forward(x.tensor().columns(0, C), softcap, Stream{});
                    const std::vector<double> before = take_columns(x.values(), ld, C), after = x.fetch();
                    const reference::Values ref = reference::elementwise(
                        [&](double v) { return reference::softcap(v, softcap).value; }, before.data(), N * C);
                    expect_close("logits", take_columns(after, ld, C), ref.value, ref.mag, 1, C, activation());
                    for (int64_t n = 0; n < N; n++)
                        for (int64_t c = C; c < ld; c++)
                            ASSERT_EQ(after[size_t(n * ld + c)], x.values()[size_t(n * ld + c)]);
                }
}

TEST_P(SoftcapOp, BoundsInfinityAndKeepsNaN) {
    const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    for (const Softcap& softcap : CAPS) {
        const TestArray x = TestArray::of(activation(), {inf, -inf, nan, 0}, {1, 4});
        softcap_forward(x, softcap, Stream{});
        const std::vector<double> y = x.fetch();
        EXPECT_EQ(y[0], softcap.cap);
        EXPECT_EQ(y[1], -softcap.cap);
        EXPECT_TRUE(std::isnan(y[2]));
        EXPECT_EQ(y[3], 0);
    }
}

TEST_P(SoftcapOp, NoneChangesNothing) {
    const TestArray x = TestArray::random(activation(), {3, 20}, 1);
    softcap_forward(x, {}, Stream{});
    expect_same_bits("logits", x.values(), x.fetch());
}

INSTANTIATE_DTYPES(SoftcapOp);

TEST(SoftcapArguments, InvalidArgumentsAreErrors) {
    const TestArray x = TestArray::random({2, 8}, 1), row = TestArray::random({8}, 1);
    for (const float cap : {0.0f, -1.0f, std::numeric_limits<float>::infinity()})
        expect_error(
            [&] {
                softcap_forward(x, {Softcap::Function::Rsqrt, cap}, Stream{});
            },
            str("softcap_forward: the cap is ", cap, ", expected a positive number"));
    EXPECT_THROW(softcap_forward(row, CAPS[0], Stream{}), Error);
}
