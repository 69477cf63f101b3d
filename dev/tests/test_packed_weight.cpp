// Packed weights: the quantisers against llama.cpp's (dev/peers/make_packed_fixture.py), and dequantisation against
// float64.
#include "kernels/packed_weight.h"

#include <nlohmann/json.hpp>

#include "dev/tests/packed_fixture.h"
#include "kernels/embedding.h"
#include "runtime/files/json_keys.h"

namespace {

// Those of dev/peers/make_packed_fixture.py.
constexpr int64_t GROUPS = 512;
std::vector<double> fixture_weights() {
    std::vector<double> w;
    for (uint32_t i = 0; i < uint32_t(GROUPS * PACKED_GROUP); i++) {
        uint32_t h = i * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u;
        h ^= h >> 13;
        const uint32_t group = i / PACKED_GROUP, bits = 4 + group % 12;
        double value = std::ldexp(double(h >> (32 - bits)) - double(1 << (bits - 1)), -int(group / 16));
        if (group == 8) value = 0;
        if (group == 9) value = std::ldexp(value, -40);
        if (group == 10) value = i % PACKED_GROUP == 17 ? -3 : 0;
        w.push_back(value);
    }
    return w;
}

std::string hex(const uint8_t* bytes, int64_t n) {
    std::string text;
    for (int64_t i = 0; i < n; i++) text += {"0123456789abcdef"[bytes[i] / 16], "0123456789abcdef"[bytes[i] % 16]};
    return text;
}

std::vector<double> normal_weights(int64_t n, uint64_t key) {
    std::vector<double> w;
    for (uint64_t i = 0; i < uint64_t(n); i++) w.push_back(double(float(normal01(3, key, i)) * 0.02f));
    return w;
}

}  // namespace

TEST(PackedWeight, HasTheBitsOfLlamaCpp) {
    const nlohmann::json fixture = read_json("dev/fixtures/packed.json");
    for (const Packing packing : {Packing::Int8, Packing::Int4}) {
        for (const int64_t C : {int64_t(32), int64_t(64), int64_t(512)}) {  // the order of groups is the same
            const int64_t OC = GROUPS * PACKED_GROUP / C, code_bytes = packed_code_bytes(packing, C);
            const HostPacked got(packing, fixture_weights(), OC, C);
            std::string codes, scales;
            for (int64_t o = 0; o < OC; o++) {
                codes += hex(got.row(o), code_bytes);
                scales += hex(got.row(o) + code_bytes, C / PACKED_GROUP * 2);
                for (int64_t i = code_bytes + C / PACKED_GROUP * 2; i < got.row_bytes; i++)
                    EXPECT_EQ(got.row(o)[i], 0) << "padding of row " << o;
            }
            const std::string name = name_of(packing);
            EXPECT_EQ(codes, fixture[name]["codes"].get<std::string>()) << name << ", C = " << C;
            EXPECT_EQ(scales, fixture[name]["scales"].get<std::string>()) << name << ", C = " << C;
        }
    }
}

// llama.cpp's extreme is +0 unless a magnitude is larger, so d = 0 / −8.
TEST(PackedWeight, ZerosOfBothSignsHaveScaleMinusZero) {
    std::vector<double> zeros(32, 0.0);
    std::fill(zeros.begin(), zeros.begin() + 16, -0.0);
    const HostPacked got(Packing::Int4, zeros, 1, 32);
    EXPECT_EQ(hex(got.row(0), 18), "888888888888888888888888888888880080");
}

TEST(PackedWeight, Fp8RoundsToTheNearestCode) {
    std::vector<double> w;
    for (int code = 0; code < 256; code++) {  // every code, and the middle of each and the next
        const float a = fp8_decode(uint8_t(code), Fp8Format::E4M3), b = fp8_decode(uint8_t(code + 1), Fp8Format::E4M3);
        w.push_back(std::isfinite(a) ? double(a) : 0);
        w.push_back(std::isfinite(a) && std::isfinite(b) ? double((a + b) / 2) : 0);
    }
    for (const double x : normal_weights(512, 1)) w.push_back(x * 5000);
    const HostPacked got(Packing::Fp8, w, 1, int64_t(w.size()));
    EXPECT_EQ(got.scale(0, 0), 1);  // the largest is 448
    for (int64_t c = 0; c < got.C; c++)
        EXPECT_EQ(int(got.row(0)[c]), int(fp8_encode(float(w[size_t(c)]), Fp8Format::E4M3))) << w[size_t(c)];
    for (const double factor : {1e-3, 3.7, 1e30}) {
        std::vector<double> scaled;
        for (const double x : w) scaled.push_back(double(float(x * factor)));
        const HostPacked other(Packing::Fp8, scaled, 1, int64_t(w.size()));
        const float scale = float(448 * factor) / 448;
        EXPECT_EQ(other.scale(0, 0), double(scale));
        for (int64_t c = 0; c < other.C; c++)
            EXPECT_EQ(int(other.row(0)[c]), int(fp8_encode(float(scaled[size_t(c)]) / scale, Fp8Format::E4M3)));
    }
}

// |w − decoded| ≤ half a step, and what rounding d to fp16 (2⁻¹¹) adds to a code: Int8 d/2 + 127·d·2⁻¹¹. Int4: the
// extreme is −8·d, so on the other side codes end at 7·d and the error is up to a whole d. Fp8: 2⁻⁴ of the weight, and
// half a subnormal step of 2⁻⁹·scale.
TEST(PackedWeight, MovesAWeightByLittle) {
    const int64_t OC = 64, C = 1024;
    const std::vector<double> w = normal_weights(OC * C, 2);
    for (const Packing packing : ALL_PACKINGS) {
        const HostPacked host(packing, w, OC, C);
        const std::vector<double> got = host.decoded();
        for (size_t i = 0; i < w.size(); i++) {
            const double s = std::fabs(host.scale(int64_t(i) / C, int64_t(i) % C));
            const double bound = packing == Packing::Fp8    ? std::fabs(w[i]) / 16 + s / 1024
                                 : packing == Packing::Int8 ? s * (0.5 + 128.0 / 2048)
                                                            : s * (1 + 8.0 / 2048);
            EXPECT_LE(std::fabs(got[i] - w[i]), bound * (1 + 1e-6)) << name_of(packing) << " " << i;
        }
        EXPECT_EQ(packed_bad_row(HostPacked(packing, w, OC, C).view()), -1);
    }
}

TEST(PackedWeight, DequantisesToTheSameBitsEverywhere) {
    for (const Packing packing : ALL_PACKINGS) {
        for (const auto& [OC, C] : {std::pair<int64_t, int64_t>{1, 32}, {7, 96}, {33, 576}, {130, 1536}}) {
            const HostPacked host(packing, normal_weights(OC * C, uint64_t(OC)), OC, C);
            const DevicePacked device(host);
            std::vector<double> expected = host.decoded();
            for (double& x : expected) x = double(float(x));
            const TestArray out = TestArray::poisoned({OC, C});
            packed_dequantise(out, device, Stream{});
            expect_same_bits(name_of(packing), out.fetch(), expected);
#ifdef USE_CUDA
            for (const DType dtype : {DType::BF16, DType::F16}) {
                const TestArray half = TestArray::poisoned(dtype, {OC, C});
                packed_dequantise(half, device, Stream{});
                std::vector<double> rounded_once;
                for (const double x : host.decoded()) rounded_once.push_back(rounded(dtype, x));
                expect_same_bits(dtype_name(dtype), half.fetch(), rounded_once);
            }
#endif
        }
    }
}

TEST(PackedWeight, TheEmbeddingIsTheDequantisedRow) {
    const int64_t V = 40, C = 64, P = 5, N = 6;
    const TestArray tokens = TestArray::ints({0, 39, 7, 7, 1, 20}, {N}),
                    positions = TestArray::ints({4, 0, 1, 2, 3, 4}, {N});
    const TestArray wpe = TestArray::random({P, C}, 4);
    for (const Packing packing : ALL_PACKINGS) {
        const HostPacked host(packing, normal_weights(V * C, 5), V, C);
        const DevicePacked wte(host);
        const std::vector<double> w = host.decoded();
        for (const bool with_positions : {false, true}) {
            std::vector<double> expected;
            for (const int64_t n : {0, 1, 2, 3, 4, 5}) {
                const int64_t token = std::vector<int64_t>{0, 39, 7, 7, 1, 20}[size_t(n)];
                const int64_t position = std::vector<int64_t>{4, 0, 1, 2, 3, 4}[size_t(n)];
                for (int64_t c = 0; c < C; c++) {
                    const float row = float(w[size_t(token * C + c)]);
                    expected.push_back(
                        double(with_positions ? row + float(wpe.values()[size_t(position * C + c)]) : row));
                }
            }
            const TestArray out = TestArray::poisoned({N, C});
            embedding_forward(out, tokens, positions, wte, with_positions ? wpe.tensor() : Tensor{}, Stream{});
            expect_same_bits(name_of(packing), out.fetch(), expected);
        }
    }
}

TEST(PackedWeight, ABadScaleIsFound) {
    for (const Packing packing : ALL_PACKINGS)
        for (const double bad : {INFINITY, -INFINITY, NAN}) {
            std::vector<double> w = normal_weights(10 * 96, 6);
            w[7 * 96 + 50] = bad;
            EXPECT_EQ(packed_bad_row(HostPacked(packing, w, 10, 96).view()), 7) << name_of(packing) << " " << bad;
            w[7 * 96 + 50] = 1e7;  // Int8's and Int4's scales are fp16
            EXPECT_EQ(packed_bad_row(HostPacked(packing, w, 10, 96).view()), packing == Packing::Fp8 ? -1 : 7);
        }
    HostPacked fp8(Packing::Fp8, normal_weights(10 * 96, 6), 10, 96);
    fp8.row(3)[95] = 0xff;
    EXPECT_EQ(packed_bad_row(fp8.view()), 3);
}

TEST(PackedWeight, TheSameBitsWithAnyNumberOfThreads) {
    const std::vector<double> w = normal_weights(64 * 256, 7);
    for (const Packing packing : ALL_PACKINGS)
        expect_deterministic(name_of(packing), [&] { return HostPacked(packing, w, 64, 256).decoded(); });
}

TEST(PackedWeight, InvalidArgumentsAreErrors) {
    std::vector<float> w(2 * 40, 1.0f);
    HostPacked h(Packing::Int4, 2, 32);
    expect_error(
        [&] {
            packed_quantise(h.view(), host_tensor(w.data(), {2, 40}));
        },
        "packed_quantise: rows of 40 weights, expected a multiple of 32");
    expect_error(
        [&] {
            packed_quantise(h.view(), host_tensor(w.data(), {1, 64}));
        },
        "packed_quantise: the packed weight has rows of 32 weights, expected 64");
    expect_error(
        [&] {
            packed_quantise(h.view(), host_tensor(w.data(), {1, 32}));
        },
        "packed_quantise: packed.rows is uint8 [2, 32], expected uint8 [1, 32]");
    const DevicePacked device(HostPacked(Packing::Int8, normal_weights(64, 8), 2, 32));
    const TestArray out = TestArray::poisoned({2, 64});
    expect_error([&] { packed_dequantise(out, device, Stream{}); },
                 "packed_dequantise: the packed weight has rows of 32 weights, expected 64");
}
