// NF4 against bitsandbytes (dev/peers/make_nf4_fixture.py), and its dequantisation against float64.
#include "kernels/nf4.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dev/tests/test_util.h"
#include "kernels/nf4_values.h"
#include "runtime/files/json_keys.h"

namespace {

// Those of dev/peers/make_nf4_fixture.py.
std::vector<float> fixture_weights(int64_t n) {
    std::vector<float> w;
    for (uint32_t i = 0; i < uint32_t(n); i++) {
        uint32_t h = i * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u;
        h ^= h >> 13;
        w.push_back(std::ldexp((float(h >> 22) - 512) / 512, -int(i / NF4_BLOCK % 4)));
    }
    return w;
}

struct HostNf4 {
    std::vector<uint8_t> codes, absmax_codes;
    std::vector<float> group_absmax;
    std::vector<float> mean = {NAN};
    float amax = 0;

    explicit HostNf4(int64_t n)
        : codes(size_t(n / 2)), absmax_codes(size_t(nf4_blocks(n))), group_absmax(size_t(nf4_groups(n)), NAN) {}
    explicit HostNf4(const std::vector<float>& w) : HostNf4(int64_t(w.size())) {
        amax = nf4_quantise(tensors(), host_tensor(w.data(), {int64_t(w.size())}));
    }
    Nf4Weights tensors() {
        return {host_tensor(codes.data(), {int64_t(codes.size())}),
                host_tensor(absmax_codes.data(), {int64_t(absmax_codes.size())}),
                host_tensor(group_absmax.data(), {int64_t(group_absmax.size())}), host_tensor(mean.data(), {1})};
    }
};

// The same on the device.
struct DeviceNf4 {
    TestArray codes, absmax_codes, group_absmax, mean;

    explicit DeviceNf4(const HostNf4& h)
        : codes(TestArray::bytes(h.codes.data(), int64_t(h.codes.size()))),
          absmax_codes(TestArray::bytes(h.absmax_codes.data(), int64_t(h.absmax_codes.size()))),
          group_absmax(TestArray::of({h.group_absmax.begin(), h.group_absmax.end()}, {int64_t(h.group_absmax.size())})),
          mean(TestArray::of({h.mean[0]}, {1})) {}
    operator Nf4Weights() const { return {codes, absmax_codes, group_absmax, mean}; }
};

std::string hex(const std::vector<uint8_t>& bytes) {
    std::string text;
    for (const uint8_t byte : bytes) text += {"0123456789abcdef"[byte / 16], "0123456789abcdef"[byte % 16]};
    return text;
}

// The formula of nf4.h in fp32, which every backend follows operation by operation.
std::vector<double> decoded(const HostNf4& h) {
    const std::array<float, 256> values = nf4_absmax_values();
    std::vector<double> w;
    for (size_t i = 0; i < 2 * h.codes.size(); i++) {
        const size_t block = i / NF4_BLOCK;
        const float absmax = std::fma(values[h.absmax_codes[block]], h.group_absmax[block / NF4_GROUP], h.mean[0]);
        const int code = i % 2 ? h.codes[i / 2] & 15 : h.codes[i / 2] >> 4;
        w.push_back(double(NF4_VALUES[code] * absmax));
    }
    return w;
}

}  // namespace

// A weight of SmolLM2-135M whose quotient is the rounded middle of two values. bitsandbytes takes the smaller.
TEST(Nf4, TheMiddleOfTwoValuesIsTheSmaller) {
    std::vector<float> w(size_t(NF4_BLOCK), 0.0f);
    w[0] = 0x1.0e04p-1f;
    w[1] = -0x1.6eep-3f;
    const int code = HostNf4(w).codes[0] & 15;
    EXPECT_EQ(code, 3);
    const float quotient = w[1] * (1 / w[0]);
    EXPECT_EQ(quotient, (NF4_VALUES[3] + NF4_VALUES[4]) / 2);
    EXPECT_LT(NF4_VALUES[4] - quotient, quotient - NF4_VALUES[3]);  // not the nearer one in fp32
}

TEST(Nf4, HasTheCodesOfBitsandbytes) {
    const nlohmann::json fixture = read_json("dev/fixtures/nf4.json");
    const HostNf4 got(fixture_weights(300 * NF4_BLOCK));
    EXPECT_EQ(hex(got.codes), fixture["codes"].get<std::string>());
    EXPECT_EQ(hex(got.absmax_codes), fixture["absmax_codes"].get<std::string>());
    EXPECT_EQ(got.group_absmax, fixture["group_absmax"].get<std::vector<float>>());
    EXPECT_EQ(got.mean[0], fixture["mean"].get<float>());
    const std::array<float, 256> values = nf4_absmax_values();
    EXPECT_EQ(std::vector<float>(values.begin(), values.end()), fixture["absmax_values"].get<std::vector<float>>());
    const std::vector<double> w = decoded(got);
    const double sum = fixture["dequantised_sum"];
    EXPECT_NEAR(std::accumulate(w.begin(), w.end(), 0.0), sum, 1e-9 * double(w.size()));
}

TEST(Nf4, DequantisesToTheSameBitsEverywhere) {
    for (const int64_t blocks : {1, 2, 255, 256, 257, 1000}) {
        std::vector<float> w(size_t(blocks * NF4_BLOCK));
        for (size_t i = 0; i < w.size(); i++) w[i] = float(normal01(1, uint64_t(blocks), i)) * 0.02f;
        const HostNf4 host(w);
        const DeviceNf4 device(host);
        const std::vector<double> expected = decoded(host);
        const TestArray out = TestArray::poisoned({int64_t(w.size())});
        nf4_dequantise(out, device, Stream{});
        expect_same_bits("fp32", out.fetch(), expected);
#ifdef USE_CUDA
        const TestArray half = TestArray::poisoned(DType::BF16, {int64_t(w.size())});
        nf4_dequantise(half, device, Stream{});
        std::vector<double> rounded_once;
        for (const double x : expected) rounded_once.push_back(rounded(DType::BF16, x));
        expect_same_bits("bf16", half.fetch(), rounded_once);
#endif
    }
}

// The codes are those of the dequantised weights in fp32, in both orientations. Two matrices one below the other, of
// which the second begins at a row that 16 does not divide.
TEST(Nf4, BecomesFp8WithoutANumberBetween) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 64}, {40, 192}, {133, 320}}) {
        SCOPED_TRACE(str(rows, " x ", cols));
        Nf4Matrix m{rows + 3, cols, {}};
        std::vector<DeviceNf4> parts;
        std::vector<double> expected;
        float amax = 0;
        for (const auto& [row, n] : {std::pair<int64_t, int64_t>{0, rows}, {rows, 3}}) {
            std::vector<float> w(size_t(n * cols));
            for (size_t i = 0; i < w.size(); i++) w[i] = float(normal01(4, uint64_t(n), i)) * (i < 64 ? 1e-5f : 0.02f);
            HostNf4 host(w);
            const std::vector<double> values = decoded(host);
            expected.insert(expected.end(), values.begin(), values.end());
            double largest = 0;
            for (const double x : values) largest = std::max(largest, std::fabs(x));
            EXPECT_EQ(double(host.amax), largest);
            amax = std::max(amax, host.amax);
            parts.emplace_back(host);
            m.parts.push_back({row, n, parts.back()});
        }
        float scale[FP8_SCALE_FLOATS];
        fp8_store_scale(scale, fp8_scale_exponent(amax, Fp8Format::E4M3, 0));
        const TestArray scales = TestArray::of({scale, scale + FP8_SCALE_FLOATS}, {FP8_SCALE_FLOATS});
        m.fp8_scale = scales;
        for (const bool transposed : {false, true}) {
            const TestArray out = TestArray::scratch(m.rows * cols);
            const Tensor codes = nf4_to_fp8(out, m, transposed, Stream{});
            EXPECT_EQ(codes.shape[0], transposed ? cols : m.rows);
            std::vector<uint8_t> got(expected.size());
            out.fetch_bytes(got.data());
            for (int64_t n = 0; n < m.rows; n++)
                for (int64_t c = 0; c < cols; c++)
                    ASSERT_EQ(
                        int(got[size_t(transposed ? c * m.rows + n : n * cols + c)]),
                        int(fp8_encode(float(expected[size_t(n * cols + c)]) * scale[FP8_SCALE], Fp8Format::E4M3)))
                        << n << ", " << c;
        }
    }
}

// The 16 values are at most 0.304 apart, so a weight moves by at most 0.152 of its block's maximum; the maximum itself
// by half the distance of two 8-bit values, at most 0.0071 of the group's.
TEST(Nf4, MovesAWeightByLittle) {
    std::vector<float> w(1024 * NF4_BLOCK);
    for (size_t i = 0; i < w.size(); i++) w[i] = float(normal01(2, 0, i));
    const HostNf4 host(w);
    const std::vector<double> got = decoded(host);
    double error = 0, size = 0;
    for (size_t i = 0; i < w.size(); i++) {
        const size_t begin = i / NF4_BLOCK * NF4_BLOCK;
        float absmax = 0;
        for (size_t k = begin; k < begin + NF4_BLOCK; k++) absmax = std::max(absmax, std::fabs(w[k]));
        EXPECT_LE(std::fabs(got[i] - double(w[i])),
                  0.153 * absmax + 0.0072 * host.group_absmax[i / NF4_BLOCK / NF4_GROUP])
            << i;
        error += (got[i] - double(w[i])) * (got[i] - double(w[i]));
        size += double(w[i]) * double(w[i]);
    }
    EXPECT_LT(std::sqrt(error / size), 0.1);
}

TEST(Nf4, ZerosStayZero) {
    const std::vector<double> got = decoded(HostNf4(std::vector<float>(2 * NF4_BLOCK)));
    for (const double x : got) EXPECT_EQ(x, 0);
}

// The largest magnitude comes from the ends of each block, not from its codes. Of blocks without a weight of the first
// or the last code, it is still that of the dequantised weights: of zeros, and of weights whose reciprocal overflows.
TEST(Nf4, ReturnsTheLargestMagnitude) {
    for (const auto& [low, high] :
         {std::pair(-1.0f, 0.5f), {-0.5f, 1.0f}, {-1.0f, -0.9f}, {0.0f, 0.0f}, {-6e-39f, 5e-39f}})
        for (const bool beside_zeros : {false, true}) {
            std::vector<float> w(size_t((1 + beside_zeros) * NF4_BLOCK));
            for (size_t i = 0; i < size_t(NF4_BLOCK); i++) w[i] = i % 2 ? low : high;
            const HostNf4 host(w);
            double largest = 0;
            for (const double x : decoded(host)) largest = std::max(largest, std::fabs(x));
            EXPECT_EQ(double(host.amax), largest) << low << " " << high << " " << beside_zeros;
        }
}

// A rank that keeps a range of the codes writes no others, and has all else whole.
TEST(Nf4, WritesTheCodesOfARangeOfBlocks) {
    const int64_t n = 300 * NF4_BLOCK;
    const std::vector<float> w = fixture_weights(n);
    const HostNf4 whole(w);
    for (const auto& [first, end] :
         {std::pair<int64_t, int64_t>{0, 0}, {0, NF4_BLOCK}, {3 * NF4_BLOCK, 290 * NF4_BLOCK}, {n - NF4_BLOCK, n}}) {
        HostNf4 part(n);
        std::vector<uint8_t> expected(part.codes.size(), 0xA5);
        part.codes = expected;
        std::copy(whole.codes.begin() + first / 2, whole.codes.begin() + end / 2, expected.begin() + first / 2);
        EXPECT_EQ(nf4_quantise(part.tensors(), host_tensor(w.data(), {n}), first, end), whole.amax);
        EXPECT_EQ(part.codes, expected) << first << " to " << end;
        EXPECT_EQ(part.absmax_codes, whole.absmax_codes);
        EXPECT_EQ(part.group_absmax, whole.group_absmax);
        EXPECT_EQ(part.mean, whole.mean);
    }
}

TEST(Nf4, InvalidArgumentsAreErrors) {
    HostNf4 h(128);
    std::vector<float> w(128, 1.0f);
    expect_error([&] { nf4_quantise(h.tensors(), host_tensor(w.data(), {100})); },
                 "nf4_quantise: 100 weights, expected a multiple of 64");
    expect_error([&] { nf4_quantise(h.tensors(), host_tensor(w.data(), {64})); },
                 "nf4_quantise: codes is uint8 [64], expected uint8 [32]");
    w[5] = NAN;
    expect_error([&] { nf4_quantise(h.tensors(), host_tensor(w.data(), {128})); },
                 "nf4_quantise: a weight is not finite");
    const DeviceNf4 device{HostNf4(std::vector<float>(128))};
    const TestArray out = TestArray::poisoned({64});
    expect_error([&] { nf4_dequantise(out, device, Stream{}); },
                 "nf4_dequantise: codes is uint8 [64], expected uint8 [32]");
}
