// RoPE: the table against the oracle and against transformers' numbers, the rotation against the oracle.
#include "kernels/rope.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

using Kind = RopeScaling::Kind;

class Rope : public DTypeTest {};

std::vector<float> make_table(int64_t T, int64_t R, double theta, const RopeScaling& scaling) {
    std::vector<float> table(size_t(T * R));
    rope_table(host_tensor(table.data(), {T, R / 2, 2}), theta, scaling);
    return table;
}

RopeScaling scaled(Kind kind, double factor, int64_t original = 0) {
    RopeScaling s;
    s.kind = kind;
    s.factor = factor;
    s.original_max_position = original;
    return s;
}

RopeScaling truncated(double fraction) {
    RopeScaling s;
    s.kind = Kind::Truncated;
    s.fraction = fraction;
    return s;
}

// One rounding from the exact value: the tables are computed in double.
TEST(RopeTable, MatchesOracle) {
    for (const RopeScaling& s :
         {RopeScaling{}, scaled(Kind::Linear, 4), scaled(Kind::Llama3, 8, 64), scaled(Kind::Dynamic, 2, 64),
          scaled(Kind::Dynamic, 2, 400), truncated(0.5), truncated(0.25), truncated(1)}) {
        for (const int64_t R : {4, 6, 64, 128}) {
            const std::vector<float> got = make_table(300, R, 10000, s);
            const std::vector<double> ref = reference::rope_table(300, R, 10000, s);
            for (size_t i = 0; i < ref.size(); i++) {
                ASSERT_NEAR(double(got[i]), ref[i], 0x1.001p-25) << "kind " << int(s.kind) << " R " << R << " at " << i;
            }
        }
    }
}

// Frequencies as transformers 5.23.0 computes them (modeling_rope_utils.ROPE_INIT_FUNCTIONS, float32). At position 1
// the angle of a pair is its frequency. Their fp32 power rounds the exponent of e, of up to ln 500000 = 13: 13·2⁻²⁴ =
// 8e-7. Inverting it and the table's own rounding add 2e-7.
void expect_frequencies(int64_t T, double theta, const RopeScaling& scaling, const std::vector<double>& expected) {
    const std::vector<float> table = make_table(T, 2 * int64_t(expected.size()), theta, scaling);
    for (size_t i = 0; i < expected.size(); i++) {
        const size_t at = (expected.size() + i) * 2;
        const double frequency = std::atan2(double(table[at + 1]), double(table[at]));
        EXPECT_NEAR(frequency / expected[i], 1, 2e-6) << "kind " << int(scaling.kind) << " pair " << i;
    }
}

TEST(RopeTable, FrequenciesMatchTransformers) {
    // head_dim 8, rope_theta 10000, factor 4
    expect_frequencies(2, 10000, scaled(Kind::Linear, 4),
                       {0.25, 0.02500000037252903, 0.0024999999441206455, 0.0002500000118743628});
    // head_dim 16, rope_theta 500000, factor 8, low_freq_factor 1, high_freq_factor 4, original 8192
    expect_frequencies(2, 500000, scaled(Kind::Llama3, 8, 8192),
                       {1.0, 0.193922758102417, 0.03760603070259094, 0.00729266507551074, 0.0005248460220173001,
                        3.428102354519069e-05, 6.647869668086059e-06, 1.289173155782919e-06});
    // head_dim 8, rope_theta 10000, factor 2, max_position_embeddings 64, seq_len 100 and 50
    expect_frequencies(100, 10000, scaled(Kind::Dynamic, 2, 64),
                       {1.0, 0.07778222113847733, 0.006050074007362127, 0.00047058824566192925});
    expect_frequencies(50, 10000, scaled(Kind::Dynamic, 2, 64),
                       {1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513});
}

// modded-nanogpt's (1/1024)^linspace(0, 1, 4) and as many zeros, as torch computes them in float32: within
// ln 1024·2⁻²⁴ = 4e-7 of a frequency of at most 1.
TEST(RopeTable, TruncatedFrequencies) {
    const std::vector<float> table = make_table(2, 16, 1024, truncated(0.5));
    const double expected[8] = {1, 0.0992125657480125, 0.009843133202303695, 0.0009765625, 0, 0, 0, 0};
    for (size_t i = 0; i < 8; i++) {
        const size_t at = (8 + i) * 2;
        EXPECT_NEAR(std::atan2(double(table[at + 1]), double(table[at])), expected[i], 1e-6) << i;
        if (i >= 4) {
            EXPECT_EQ(table[at], 1) << "pair " << i << " must not rotate";
        }
    }
}

// In place on the q and k part of packed rows: the rest of the row stays as it was.
void check_rotation(DType D, int64_t N, int64_t H, int64_t HS, int64_t R, bool backward, int64_t rest = 3) {
    SCOPED_TRACE(str("N ", N, " H ", H, " HS ", HS, " R ", R, backward ? " backward" : ""));
    constexpr int64_t T = 50;
    const std::vector<float> floats = make_table(T, R, 10000, {});
    const std::vector<double> table(floats.begin(), floats.end());
    std::vector<int32_t> positions;
    for (int64_t n = 0; n < N; n++) positions.push_back(int32_t((n * 7 + 49) % T));  // not in order; the last row too
    const TestArray rows = TestArray::random(D, {N, H * HS + rest}, 3), position = TestArray::ints(positions, {N});
    const TestArray device_table = TestArray::of(table, {T, R / 2, 2});
    rope(split_heads(rows.tensor().columns(0, H * HS), H), position, device_table, backward, Stream{});

    const std::vector<double> before = take_columns(rows.values(), H * HS + rest, H * HS), after = rows.fetch();
    const reference::Values ref = reference::rope(before.data(), positions.data(), table.data(), N, H, HS, R, backward);
    const std::vector<double> got = take_columns(after, H * HS + rest, H * HS);
    expect_close("x", got, ref.value, ref.mag, 2, HS, D);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < H * HS + rest; c++) {
            if (c < H * HS && c % HS < R) continue;
            ASSERT_EQ(after[size_t(n * (H * HS + rest) + c)], rows.values()[size_t(n * (H * HS + rest) + c)])
                << n << " " << c;
        }
}

TEST_P(Rope, ForwardMatchesOracle) {
    for (const bool backward : {false, true}) {
        check_rotation(activation(), 1, 1, 2, 2, backward);
        check_rotation(activation(), 5, 3, 6, 6, backward);
        check_rotation(activation(), 60, 2, 64, 64, backward);
        check_rotation(activation(), 17, 1, 128, 128, backward);
        check_rotation(activation(), 9, 2, 80, 32, backward);  // partial: channels 32 … 79 are copied
        check_rotation(activation(), 4, 2, 7, 4, backward);
        check_rotation(activation(), 33, 3, 64, 64, backward, 8);  // rows aligned to 16 bytes
        check_rotation(activation(), 5, 2, 96, 32, backward, 0);
    }
    check_rotation(activation(), 0, 2, 8, 8, false);
}

TEST_P(Rope, BackwardInvertsForward) {
    const std::vector<float> floats = make_table(40, 32, 10000, {});
    const TestArray table = TestArray::of(std::vector<double>(floats.begin(), floats.end()), {40, 16, 2});
    const TestArray x = TestArray::random(activation(), {40, 2, 32}, 1);
    std::vector<int32_t> positions;
    for (int32_t n = 0; n < 40; n++) positions.push_back(n);
    const TestArray position = TestArray::ints(positions, {40});
    rope(x, position, table, false, Stream{});
    const std::vector<double> rotated = x.fetch();
    for (size_t c = 0; c < 64; c++) EXPECT_EQ(rotated[c], x.values()[c]) << "position 0 must not rotate";
    EXPECT_GT(std::fabs(rotated[64] - x.values()[64]), 1e-3);
    rope(x, position, table, true, Stream{});
    const std::vector<double> back = x.fetch();
    // Each rotation of a pair of length r stores it with an error of at most unit·r in 16 bits. In fp32 its products
    // and sums err by at most 2u·r for each channel, and cos² + sin² of the table is 1 up to 2u.
    const double unit = activation() == DType::F32 ? 0 : activation() == DType::F16 ? 0x1p-11 : 0x1p-8;
    for (size_t i = 0; i < back.size(); i++) {
        const size_t partner = i % 32 < 16 ? i + 16 : i - 16;
        const double r = std::hypot(x.values()[i], x.values()[partner]);
        ASSERT_NEAR(back[i], x.values()[i], (2 * unit + 8 * UNIT_ROUNDOFF) * r) << i;
    }
}

INSTANTIATE_DTYPES(Rope);

TEST(RopeArguments, InvalidArgumentsAreErrors) {
    const TestArray x = TestArray::random({3, 2, 8}, 1), table = TestArray::random({10, 4, 2}, 2);
    auto call = [&](const std::vector<int32_t>& positions) {
        rope(x, TestArray::ints(positions, {int64_t(positions.size())}), table, false, Stream{});
    };
#ifdef USE_CUDA  // the launch does not wait for the kernel: the token is not rotated
    call({10, -1, 1 << 30});
#else
    expect_error([&] { call({0, 10, 1}); }, "rope: position 10 of token 1 lies outside the table of 10 positions");
    expect_error([&] { call({0, 1, -1}); }, "rope: position -1 of token 2 lies outside the table of 10 positions");
#endif
    expect_same_bits("x", x.values(), x.fetch());
    expect_error([&] { call({0, 1}); }, "rope: positions is int32 [2], expected int32 [3]");
    const TestArray wide = TestArray::random({10, 5, 2}, 2), position = TestArray::ints({0, 1, 2}, {3});
    expect_error([&] { rope(x, position, wide, false, Stream{}); },
                 "rope: the table rotates 10 channels, the head has 8");
    const RopeScaling flat = [] {
        RopeScaling s = scaled(Kind::Llama3, 8, 64);
        s.low_freq_factor = s.high_freq_factor = 4;
        return s;
    }();
    expect_error([] { make_table(4, 4, -1, {}); }, "rope_table: theta is -1, expected a positive number");
    expect_error([] { make_table(4, 4, 1e4, scaled(Kind::Linear, 0)); }, "rope_table: factor is 0, expected 1 or more");
    expect_error([&] { make_table(4, 4, 1e4, flat); },
                 "rope_table: low_freq_factor 4 and high_freq_factor 4, expected 0 < low < high");
    expect_error([] { make_table(4, 4, 1e4, scaled(Kind::Dynamic, 2)); },
                 "rope_table: original_max_position is 0, expected the length trained for");
    expect_error([] { make_table(4, 4, 1e4, truncated(0)); },
                 "rope_table: fraction is 0, expected more than 0 and at most 1");
    expect_error([] { make_table(4, 2, 1e4, scaled(Kind::Dynamic, 2, 8)); },
                 "rope_table: dynamic scaling needs more than 2 rotary channels");
}

}  // namespace
