// Quantisation to fp8: the formats against an enumeration of all codes; kernels against the conversion on the host, bit
// for bit; the functions that produce operands against two kernels; scales and their history.
#include "kernels/fp8.h"

#include <algorithm>
#include <cfloat>
#include <limits>

#include "dev/tests/test_util.h"
#include "kernels/activation.h"

namespace {

#ifdef USE_CUDA
constexpr DType T = DType::BF16;
#else
constexpr DType T = DType::F32;
#endif

constexpr Fp8Format FORMATS[] = {Fp8Format::E4M3, Fp8Format::E5M2};
constexpr float INF = std::numeric_limits<float>::infinity();

// The number of a code, from the definition of a float with the format's widths: independent of fp8_decode().
double number_of(int code, Fp8Format f) {
    const int mantissa = f == Fp8Format::E4M3 ? 3 : 2, exponents = f == Fp8Format::E4M3 ? 16 : 32;
    const int exponent = code >> mantissa & (exponents - 1), fraction = code % (1 << mantissa);
    const double sign = code & 0x80 ? -1 : 1, bias = exponents / 2 - 1;
    if (f == Fp8Format::E4M3 && (code & 0x7f) == 0x7f) return NAN;
    if (f == Fp8Format::E5M2 && exponent == 31) return fraction ? NAN : sign * INFINITY;
    const double significand = (exponent ? 1.0 : 0.0) + fraction / std::pow(2, mantissa);
    return sign * significand * std::pow(2, std::max(exponent, 1) - bias);
}

// The finite numbers of a format that are not negative, ascending; index = code.
std::vector<float> numbers(Fp8Format f) {
    std::vector<float> list;
    for (int code = 0; code < 128 && std::isfinite(number_of(code, f)); code++)
        list.push_back(float(number_of(code, f)));
    return list;
}

// Numbers at which rounding changes: every code's number, the midpoints to the next, and their neighbours in fp32.
std::vector<float> edges(Fp8Format f) {
    const std::vector<float> list = numbers(f);
    std::vector<float> x = {0, FLT_MIN, 1e-45f, FLT_MAX, INF, NAN};
    for (size_t i = 0; i < list.size(); i++) {
        const float next = i + 1 < list.size() ? list[i + 1] : 2 * list[i] - list[i - 1];
        for (const float at : {list[i], (list[i] + next) / 2})
            x.insert(x.end(), {std::nextafter(at, -INF), at, std::nextafter(at, INF)});
    }
    const size_t n = x.size();
    for (size_t i = 0; i < n; i++) x.push_back(-x[i]);
    return x;
}

// The nearest code by search, ties to the even one.
uint8_t nearest(float x, Fp8Format f) {
    if (!std::isfinite(x)) return FP8_NAN;
    const std::vector<float> list = numbers(f);
    const double size = std::min(std::fabs(double(x)), 1e6);  // beyond the largest; distances are exact
    size_t best = 0;
    for (size_t i = 1; i < list.size(); i++) {
        const double now = std::fabs(list[i] - size), then = std::fabs(list[best] - size);
        if (now < then || (now == then && i % 2 == 0)) best = i;
    }
    return uint8_t(best | (std::signbit(x) ? 0x80 : 0));
}

Tensor matrix(const TestArray& bytes, int64_t rows, int64_t columns) {
    return make_tensor(bytes.tensor().data, DType::U8, backend_device(), {rows, columns});
}

std::vector<uint8_t> fetch_codes(const TestArray& bytes) {
    std::vector<uint8_t> codes(size_t(bytes.tensor().numel()));
    bytes.fetch_bytes(codes.data());
    return codes;
}

constexpr uint8_t UNWRITTEN = 0xa5;

// A record and both orientations of a quantised [N, C] tensor; rows have a gap of 16 codes.
struct Quantised {
    int64_t N, C;
    TestArray scale, amax = TestArray::of({0}, {1});
    TestArray counts = TestArray::bytes(std::vector<int64_t>(NUM_FP8_COUNTS).data(), 8 * NUM_FP8_COUNTS);
    TestArray row_codes, column_codes;
    Fp8Output out;

    Quantised(Fp8Format f, int64_t n, int64_t c, float factor)
        : N(n),
          C(c),
          scale(TestArray::of({1 / factor, factor, 0, 0}, {FP8_SCALE_FLOATS})),
          row_codes(TestArray::bytes(std::vector<uint8_t>(size_t(n * (c + 16)), UNWRITTEN).data(), n * (c + 16))),
          column_codes(TestArray::bytes(std::vector<uint8_t>(size_t(c * n), UNWRITTEN).data(), c * n)),
          out{f,
              {scale, amax, make_tensor(counts.tensor().data, DType::I64, backend_device(), {NUM_FP8_COUNTS})},
              matrix(row_codes, n, c + 16).columns(0, c),
              matrix(column_codes, c, n)} {}

    std::vector<int64_t> recorded() const {
        std::vector<int64_t> values(NUM_FP8_COUNTS);
        counts.fetch_bytes(values.data());
        return values;
    }
    std::vector<uint8_t> rows() const {
        const std::vector<uint8_t> all = fetch_codes(row_codes);
        std::vector<uint8_t> codes;
        for (int64_t n = 0; n < N; n++) {
            const auto row = all.begin() + n * (C + 16);
            codes.insert(codes.end(), row, row + C);
            EXPECT_TRUE(std::all_of(row + C, row + C + 16, [](uint8_t x) { return x == UNWRITTEN; })) << "row " << n;
        }
        return codes;
    }
};

// Expects the codes of x [N, C], both orientations, amax and counts.
void expect_quantised(const Quantised& q, const std::vector<double>& x) {
    const float factor = float(q.scale.values()[FP8_SCALE]), largest = fp8_max(q.out.format);
    const std::vector<uint8_t> rows = q.rows(), columns = fetch_codes(q.column_codes);
    std::vector<int64_t> counts = {q.N * q.C, 0, 0};
    double amax = 0;
    for (int64_t n = 0; n < q.N; n++)
        for (int64_t c = 0; c < q.C; c++) {
            const float value = float(x[size_t(n * q.C + c)]);
            const float scaled = std::isfinite(value) ? std::clamp(value * factor, -FLT_MAX, FLT_MAX) : value;
            const uint8_t code = fp8_encode(scaled, q.out.format);
            ASSERT_EQ(int(rows[size_t(n * q.C + c)]), int(code)) << n << ", " << c << ": " << value;
            ASSERT_EQ(int(columns[size_t(c * q.N + n)]), int(code)) << n << ", " << c << ": " << value;
            amax = std::isfinite(value) ? std::max(amax, double(std::fabs(value))) : INFINITY;
            counts[FP8_SATURATED] += std::isfinite(value) && std::fabs(scaled) > largest;
            counts[FP8_UNDERFLOWED] += value != 0 && !std::isnan(value) && (code & 0x7f) == 0;
        }
    if (std::isfinite(amax)) {
        EXPECT_EQ(q.amax.fetch()[0], amax);
    }
    EXPECT_EQ(q.recorded(), counts);
}

constexpr Activation ACTIVATIONS[] = {Activation::GELU, Activation::SwiGLU, Activation::ReLU2};

}  // namespace

TEST(Fp8Format, DecodesEveryCode) {
    for (const Fp8Format f : FORMATS)
        for (int code = 0; code < 256; code++) {
            const double expected = number_of(code, f);
            const float got = fp8_decode(uint8_t(code), f);
            EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected && std::signbit(got) == (code > 127))
                << FP8_FORMAT_NAMES[size_t(f)] << " " << code << ": " << got << ", expected " << expected;
        }
    // Micikevicius et al. 2022, table 1.
    EXPECT_EQ(numbers(Fp8Format::E4M3).back(), 448);
    EXPECT_EQ(numbers(Fp8Format::E4M3)[1], 0x1p-9f);
    EXPECT_EQ(numbers(Fp8Format::E5M2).back(), 57344);
    EXPECT_EQ(numbers(Fp8Format::E5M2)[1], 0x1p-16f);
}

TEST(Fp8Format, EncodesToTheNearestCode) {
    for (const Fp8Format f : FORMATS) {
        std::vector<float> x = edges(f);
        for (uint64_t i = 0; i < 20000; i++) x.push_back(float(normal01(1, 0, i) * std::exp(8 * normal01(2, 0, i))));
        for (const float value : x)
            ASSERT_EQ(int(fp8_encode(value, f)), int(nearest(value, f))) << FP8_FORMAT_NAMES[size_t(f)] << " " << value;
        for (int code = 0; code < 256; code++)
            if (std::isfinite(number_of(code, f))) {
                EXPECT_EQ(fp8_encode(fp8_decode(uint8_t(code), f), f), code);
            }
    }
}

// The largest power of two with which amax, times 2^margin, stays within the format.
TEST(Fp8Format, ScalesAreTheLargestThatFit) {
    for (const Fp8Format f : FORMATS)
        for (const int margin : {0, 1, 3})
            for (uint64_t i = 0; i < 2000; i++) {
                const float amax = float(std::fabs(normal01(3, 0, i)) * std::exp2(20 * normal01(4, 0, i)));
                const double scale = power_of_two(fp8_scale_exponent(amax, f, margin)) * std::exp2(margin);
                EXPECT_LE(amax * scale, fp8_max(f)) << amax;
                EXPECT_GT(2 * amax * scale, fp8_max(f)) << amax;
            }
    EXPECT_EQ(fp8_scale_exponent(448, Fp8Format::E4M3, 0), 0);
    EXPECT_EQ(fp8_scale_exponent(std::nextafter(448.0f, INF), Fp8Format::E4M3, 0), -1);
    EXPECT_EQ(fp8_scale_exponent(57344, Fp8Format::E5M2, 1), -1);
    for (const float amax : {0.0f, INF, -INF, float(NAN)}) EXPECT_EQ(fp8_scale_exponent(amax, Fp8Format::E4M3, 1), 0);
    EXPECT_EQ(power_of_two(fp8_scale_exponent(1e-45f, Fp8Format::E5M2, 0)), 0x1p126f);
}

TEST(Fp8, QuantisesBothOrientations) {
    const int64_t sizes[][2] = {{1, 16}, {3, 32}, {16, 64}, {33, 80}, {128, 64}, {129, 208}, {272, 144}};
    for (const Fp8Format f : FORMATS)
        for (const auto& [N, C] : sizes)
            for (const float factor : {1.0f, 0x1p-5f, 0x1p9f}) {
                SCOPED_TRACE(str(FP8_FORMAT_NAMES[size_t(f)], " N ", N, " C ", C, " scale ", factor));
                const TestArray inp = TestArray::random(T, {N, C + 16}, 1, 3);
                const Quantised q(f, N, C, factor);
                fp8_quantise(q.out, inp.tensor().columns(0, C), Stream{});
                expect_quantised(q, take_columns(inp.values(), C + 16, C));
            }
}

#ifndef USE_CUDA
// On a GPU the sizes of quantised tensors are multiples of 16.
TEST(Fp8, QuantisesAnySize) {
    for (const auto& [N, C] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {65, 3}, {64, 33}}) {
        const TestArray inp = TestArray::random(T, {N, C}, 1);
        const Quantised q(Fp8Format::E4M3, N, C, 2);
        fp8_quantise(q.out, inp, Stream{});
        expect_quantised(q, inp.values());
    }
}
#endif

// Everything at which rounding changes, NaN and infinities among it.
TEST(Fp8, RoundsAsTheHostAtEveryEdge) {
    for (const Fp8Format f : FORMATS)
        for (const float factor : {1.0f, 0x1p-3f}) {
            std::vector<double> x;
            for (const float edge : edges(f)) x.push_back(edge / factor);
            x.resize((x.size() + 31) / 32 * 32);
            const int64_t N = int64_t(x.size()) / 32;
            const TestArray inp = TestArray::of(T, x, {N, 32});
            const Quantised q(f, N, 32, factor);
            fp8_quantise(q.out, inp, Stream{});
            expect_quantised(q, inp.values());
            EXPECT_FALSE(std::isfinite(q.amax.fetch()[0]));
        }
}

TEST(Fp8, EachOutputMayBeMissing) {
    const TestArray inp = TestArray::random(T, {48, 32}, 1);
    const Quantised all(Fp8Format::E4M3, 48, 32, 64);
    fp8_quantise(all.out, inp, Stream{});
    for (int without = 0; without < 4; without++) {
        const Quantised q(Fp8Format::E4M3, 48, 32, 64);
        Fp8Output out = q.out;
        if (without == 0) out.rows = {};
        if (without == 1) out.columns = {};
        if (without == 2) out.rows = out.columns = {};
        if (without == 3) out.record.amax = out.record.counts = {};
        fp8_quantise(out, inp, Stream{});
        if (out.rows) {
            EXPECT_EQ(q.rows(), all.rows());
        }
        if (out.columns) {
            EXPECT_EQ(fetch_codes(q.column_codes), fetch_codes(all.column_codes));
        }
        EXPECT_EQ(q.amax.fetch()[0], out.record.amax ? all.amax.fetch()[0] : 0);
        EXPECT_EQ(q.recorded()[FP8_ELEMENTS], out.record.counts ? 48 * 32 : 0);
    }
}

TEST(Fp8, RecordsOverSeveralCalls) {
    const Quantised q(Fp8Format::E4M3, 16, 16, 1);
    std::vector<double> x(256, 1);
    x[7] = -600;
    x[9] = 1e-5;
    fp8_quantise(q.out, TestArray::of(T, x, {16, 16}), Stream{});
    fp8_quantise(q.out, TestArray::of(T, std::vector<double>(256, 2), {16, 16}), Stream{});
    EXPECT_EQ(q.amax.fetch()[0], rounded(T, 600));
    EXPECT_EQ(q.recorded(), (std::vector<int64_t>{512, 1, 1}));
}

// The functions that produce an operand give the bits of two kernels: one that stores it, one that quantises it.
TEST(Fp8, ActivationForwardIsThatOfTwoKernels) {
    for (const Activation function : ACTIVATIONS)
        for (const Fp8Format f : FORMATS)
            for (const auto& [N, I] : {std::pair<int64_t, int64_t>{5, 16}, {144, 208}}) {
                SCOPED_TRACE(str(ACTIVATION_NAMES[size_t(function)], " N ", N, " I ", I));
                const int64_t inputs = activation_inputs(function, I);
                const TestArray inp = TestArray::random(T, {N, inputs}, 1, 2), y = TestArray::poisoned(T, {N, I});
                activation_forward(function, y, inp, Stream{});
                const Quantised q(f, N, I, 16);
                fp8_activation_forward(q.out, {}, function, inp, Stream{});
                expect_quantised(q, y.fetch());
                const Quantised with_act(f, N, I, 16);
                const TestArray act = TestArray::poisoned(T, {N, I});
                fp8_activation_forward(with_act.out, act, function, inp, Stream{});
                expect_quantised(with_act, y.fetch());
                expect_same_bits("act", act.fetch(), y.fetch());
            }
}

TEST(Fp8, ActivationBackwardIsThatOfTwoKernels) {
    for (const Activation function : ACTIVATIONS)
        for (const Fp8Format f : FORMATS)
            for (const auto& [N, I] : {std::pair<int64_t, int64_t>{5, 16}, {144, 208}}) {
                SCOPED_TRACE(str(ACTIVATION_NAMES[size_t(function)], " N ", N, " I ", I));
                const int64_t C = activation_inputs(function, I);
                const TestArray inp = TestArray::random(T, {N, C}, 1, 2), dout = TestArray::random(T, {N, I}, 2);
                const TestArray dinp = TestArray::poisoned(T, {N, C}), stored = TestArray::poisoned(T, {N, C});
                activation_backward(function, dinp, {}, dout, inp, Stream{});
                const Quantised q(f, N, C, 16), with_dinp(f, N, C, 16), in_place(f, N, C, 16);
                fp8_activation_backward(q.out, {}, function, dout, inp, Stream{});
                expect_quantised(q, dinp.fetch());
                fp8_activation_backward(with_dinp.out, stored, function, dout, inp, Stream{});
                expect_quantised(with_dinp, dinp.fetch());
                expect_same_bits("dinp", stored.fetch(), dinp.fetch());
                const TestArray& over = is_gated(function) ? inp : dout;
                fp8_activation_backward(in_place.out, over, function, dout, inp, Stream{});
                expect_quantised(in_place, dinp.fetch());
                expect_same_bits("in place", over.fetch(), dinp.fetch());
            }
}

TEST(Fp8, BitsDoNotDependOnThreads) {
    const TestArray inp = TestArray::random(T, {333, 256}, 1, 2);
    expect_deterministic("fp8_activation_forward", [&] {
        const Quantised q(Fp8Format::E5M2, 333, 128, 4);
        fp8_activation_forward(q.out, {}, Activation::SwiGLU, inp, Stream{});
        const std::vector<uint8_t> codes = q.rows(), transposed = fetch_codes(q.column_codes);
        std::vector<double> all(codes.begin(), codes.end());
        all.insert(all.end(), transposed.begin(), transposed.end());
        for (const int64_t count : q.recorded()) all.push_back(double(count));
        all.push_back(q.amax.fetch()[0]);
        return all;
    });
}

TEST(Fp8Scales, OfATensor) {
    for (const auto& [amax, scale] : {std::pair<double, double>{3, 64}, {3.5, 64}, {3.51, 32}, {0, 1}, {INFINITY, 1}}) {
        const TestArray s = TestArray::poisoned({FP8_SCALE_FLOATS}), a = TestArray::of({amax}, {1});
        fp8_set_scale({s, a, {}}, Fp8Format::E4M3, 1, Stream{});
        EXPECT_EQ(s.fetch(), (std::vector<double>{1 / scale, scale, 0, 0})) << amax;
    }
}

// Record 0 grows and shrinks, record 1 is once not finite, record 2 is zero.
TEST(Fp8Scales, FollowTheLargestAmaxOfTheHistoryAndOfAllRanks) {
    const TestArray scales = TestArray::poisoned({3, FP8_SCALE_FLOATS}),
                    history = TestArray::of(std::vector<double>(9), {3, 3});
    const double steps[][3] = {{1, 4, 0}, {7, INFINITY, 0}, {2, 2, 0}, {2, NAN, 0}, {2, 1, 0}};
    const double largest[][3] = {{1, 4, 0}, {7, 4, 0}, {7, 4, 0}, {7, 4, 0}, {2, 4, 0}};
    for (size_t i = 0; i < std::size(steps); i++) {
        // The second rank has the smaller ones; a row of its own stride.
        const double* a = steps[i];
        const TestArray amaxes = TestArray::of({a[0], a[1] / 2, a[2], 99, a[0] / 2, a[1], a[2], 99}, {2, 4});
        fp8_update_scales(scales, history, amaxes.tensor().columns(0, 3), Fp8Format::E5M2, 1, Stream{});
        for (size_t s = 0; s < 3; s++) {
            const double scale =
                largest[i][s] > 0 ? power_of_two(fp8_scale_exponent(float(largest[i][s]), Fp8Format::E5M2, 1)) : 1;
            const std::vector<double> all = scales.fetch();
            const double* stored = &all[FP8_SCALE_FLOATS * s];
            EXPECT_EQ(stored[FP8_SCALE], scale) << "step " << i << " record " << s;
            EXPECT_EQ(stored[FP8_INVERSE_SCALE], 1 / scale) << "step " << i << " record " << s;
        }
    }
    EXPECT_EQ(history.fetch(), (std::vector<double>{2, 1, 0, 2, 2, 0, 2, 4, 0}));
}

// Of weights: the history of one step is the first rank's maxima.
TEST(Fp8Scales, HistoryMayBeTheFirstRowOfTheMaxima) {
    const TestArray scales = TestArray::poisoned({3, FP8_SCALE_FLOATS}),
                    amaxes = TestArray::of({1, 6, 0, 448, 0.5, 0}, {2, 3});
    fp8_update_scales(scales, amaxes.tensor().rows(0, 1), amaxes, Fp8Format::E4M3, 0, Stream{});
    EXPECT_EQ(scales.fetch(), (std::vector<double>{1, 1, 0, 0, 1 / 64.0, 64, 0, 0, 1, 1, 0, 0}));
}

TEST(Fp8Scales, HistoryWithoutRowsIsAnError) {
    const TestArray scales = TestArray::poisoned({3, FP8_SCALE_FLOATS}), history = TestArray::poisoned({0, 3}),
                    amaxes = TestArray::of({1, 2, 3}, {1, 3});
    expect_error([&] { fp8_update_scales(scales, history, amaxes, Fp8Format::E5M2, 1, Stream{}); },
                 "fp8_update_scales: history is [0, 3], expected at least one row");
}

TEST(Fp8Scales, CountsAreSummedOverSlots) {
    const std::vector<int64_t> counts = {1, 2, 3, 10, 20, 30, int64_t(1) << 40, 0, 7}, zeros(3, -1);
    const TestArray all = TestArray::bytes(counts.data(), 72), totals = TestArray::bytes(zeros.data(), 24);
    fp8_sum_counts(make_tensor(totals.tensor().data, DType::I64, backend_device(), {3}),
                   make_tensor(all.tensor().data, DType::I64, backend_device(), {3, 3}), Stream{});
    std::vector<int64_t> got(3);
    totals.fetch_bytes(got.data());
    EXPECT_EQ(got, (std::vector<int64_t>{11 + (int64_t(1) << 40), 22, 40}));
}

TEST(Fp8Arguments, InvalidArgumentsAreErrors) {
    const Quantised q(Fp8Format::E4M3, 4, 16, 1);
    const TestArray inp = TestArray::random(T, {4, 16}, 1), wide = TestArray::random(T, {4, 48}, 1);
    expect_error([&] { fp8_quantise(q.out, wide, Stream{}); },
                 "fp8_quantise: rows is uint8 [4, 16], expected uint8 [4, 48]");
    Fp8Output out = q.out;
    out.columns = out.columns.rows(0, 8);
    expect_error([&] { fp8_quantise(out, inp, Stream{}); },
                 "fp8_quantise: columns is uint8 [8, 4], expected uint8 [16, 4]");
    out = q.out;
    out.record.scale = {};
    expect_error([&] { fp8_quantise(out, inp, Stream{}); }, "fp8_quantise: scale is missing");
    expect_error([&] { fp8_activation_forward(q.out, {}, Activation::None, inp, Stream{}); },
                 "fp8_activation_forward: no activation function is given");
    expect_error(
        [&] {
            fp8_set_scale({q.scale, {}, {}}, Fp8Format::E4M3, 0, Stream{});
        },
        "fp8_set_scale: amax is missing");
}

// Frozen weights are quantised on the host, as a weight that is stored in T is on the device, and then transposed.
TEST(Fp8, WeightsAreQuantisedOnTheHost) {
    for (const auto& [N, C] : {std::pair<int64_t, int64_t>{1, 16}, {3, 48}, {133, 80}, {260, 208}}) {
        SCOPED_TRACE(str("N ", N, " C ", C));
        std::vector<float> w(size_t(N * C));
        for (size_t i = 0; i < w.size(); i++) w[i] = float(normal01(3, uint64_t(N), i)) * 0.03f;
        std::vector<uint8_t> codes(w.size());
        float scale[FP8_SCALE_FLOATS];
        const Tensor host_codes = host_tensor(codes.data(), {N, C}), host_scale = host_tensor(scale, {4});
        const float amax = fp8_quantise_on_host(host_codes, host_scale, host_tensor(w.data(), {N, C}), T);
        const Quantised q(Fp8Format::E4M3, N, C, 1);
        const TestArray inp = TestArray::of(T, {w.begin(), w.end()}, {N, C});
        Fp8Output measure = q.out;
        measure.rows = measure.columns = {};
        fp8_quantise(measure, inp, Stream{});
        fp8_set_scale(q.out.record, Fp8Format::E4M3, 0, Stream{});
        fp8_quantise(q.out, inp, Stream{});
        EXPECT_EQ(double(amax), q.amax.fetch()[0]);
        EXPECT_EQ(std::vector<double>(scale, scale + FP8_SCALE_FLOATS), q.scale.fetch());
        EXPECT_EQ(codes, q.rows());
        // A rank that keeps a range of the codes writes no others.
        const size_t first = w.size() / 3, end = w.size() - 5;
        std::vector<uint8_t> some(w.size(), 0xA5), expected = some;
        std::copy(codes.begin() + int64_t(first), codes.begin() + int64_t(end), expected.begin() + int64_t(first));
        EXPECT_EQ(fp8_quantise_on_host(host_tensor(some.data(), {N, C}), host_scale, host_tensor(w.data(), {N, C}), T,
                                       int64_t(first), int64_t(end)),
                  amax);
        EXPECT_EQ(some, expected);
        const TestArray turned = TestArray::scratch(N * C);
        fp8_transpose(matrix(turned, C, N), q.out.rows, Stream{});
        EXPECT_EQ(fetch_codes(turned), fetch_codes(q.column_codes));
    }
    std::vector<float> w(16, 1.0f);
    w[3] = -INF;
    uint8_t codes[16];
    float scale[FP8_SCALE_FLOATS];
    const Tensor host_codes = host_tensor(codes, {1, 16}), host_scale = host_tensor(scale, {4});
    EXPECT_EQ(fp8_quantise_on_host(host_codes, host_scale, host_tensor(w.data(), {1, 16}), T), INF);
}
