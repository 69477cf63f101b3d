// Matmuls of fp8 codes against the oracle on the decoded numbers: formats, scales, bias, accumulation, row strides.
#include "kernels/matmul_fp8.h"

#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/matmul.h"
#include "runtime/device/blas_stream.h"

namespace {

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

// Random codes with their numbers.
struct Operand {
    TestArray codes, scale;
    std::vector<double> values;  // decoded, times the inverse scale
    Fp8Matrix matrix;
};

Operand operand(Fp8Format f, int64_t rows, int64_t K, float factor, uint64_t seed, int64_t gap) {
    std::vector<uint8_t> codes(size_t(rows * (K + gap)), FP8_NAN);  // NaN in the gaps must not be read
    std::vector<double> values;
    for (int64_t n = 0; n < rows; n++)
        for (int64_t k = 0; k < K; k++) {
            uint8_t& code = codes[size_t(n * (K + gap) + k)];
            code = fp8_encode(float(normal01(seed, uint64_t(n), uint64_t(k))) * 16, f);
            values.push_back(double(fp8_decode(code, f)) / factor);
        }
    Operand x{TestArray::bytes(codes.data(), int64_t(codes.size())),
              TestArray::of({1 / factor, factor, 0, 0}, {FP8_SCALE_FLOATS}),
              values,
              {}};
    const Tensor all = make_tensor(x.codes.tensor().data, DType::U8, backend_device(), {rows, K + gap});
    x.matrix = {all.columns(0, K), f, x.scale};
    return x;
}

struct Case {
    Fp8Format a = Fp8Format::E4M3, b = Fp8Format::E4M3;
    DType out = DType::F32;
    bool bias = false, accumulate = false, fast = false;
};

// Hopper's tensor cores align the 32 products of a step and the running sum at the exponent of the largest and keep 13
// bits behind the point (DeepSeek-V3 2024, section 3.3.2), so a step loses up to 2⁻¹³ of mag. With fast accumulation
// the running sum goes over all K/32 steps; without it at most four steps are added before the sum in fp32, which loses
// 2⁻¹¹ of mag in all.
double lost_in_sums(const Case& c, int64_t K) {
#ifdef USE_CUDA
    return c.fast ? 0x1p-13 * (1 + double(K) / 32) : 0x1p-11;
#else
    (void)c;
    (void)K;
    return 0;
#endif
}

void check(const Case& c, int64_t M, int64_t N, int64_t K) {
    SCOPED_TRACE(str(FP8_FORMAT_NAMES[size_t(c.a)], " x ", FP8_FORMAT_NAMES[size_t(c.b)], " to ", dtype_name(c.out),
                     " M ", M, " N ", N, " K ", K, c.bias ? " bias" : "", c.accumulate ? " accumulate" : "",
                     c.fast ? " fast" : ""));
    const Operand a = operand(c.a, M, K, 64, 1, 16), b = operand(c.b, N, K, 0x1p-4f, 2, 32);
    const TestArray bias = TestArray::random(c.out, {N}, 3, 10);
    const TestArray out =
        c.accumulate ? TestArray::random(c.out, {M, N + 16}, 4, 10) : TestArray::poisoned(c.out, {M, N + 16});
    const std::vector<double> before = take_columns(out.values(), N + 16, N);
    const TestArray scratch = TestArray::scratch(std::max<int64_t>(1, matmul_fp8_scratch(M, N, K)));
    matmul_fp8(out.tensor().columns(0, N), a.matrix, b.matrix, c.bias ? bias.tensor() : Tensor{}, c.accumulate, c.fast,
               scratch, stream());
    const reference::Values ref =
        reference::matmul(a.values.data(), b.values.data(), false, true, c.accumulate ? before.data() : nullptr,
                          c.bias ? bias.data() : nullptr, M, N, K);
    const std::vector<double> got = take_columns(out.fetch(), N + 16, N);
    if (lost_in_sums(c, K) == 0) {
        expect_close("matmul_fp8", got, ref.value, ref.mag, K, N, c.out);
    } else {
        for (size_t i = 0; i < got.size(); i++) {
            const double limit = lost_in_sums(c, K) + (c.out == DType::BF16 ? 0x1p-8 * (1 + c.accumulate) : 0);
            ASSERT_LE(std::fabs(got[i] - ref.value[i]), limit * ref.mag[i]) << "element " << i << " of " << got.size();
        }
    }
}

std::vector<Case> cases() {
    std::vector<Case> list;
    for (const auto& [a, b] : {std::pair(Fp8Format::E4M3, Fp8Format::E4M3),
                               {Fp8Format::E5M2, Fp8Format::E4M3},
                               {Fp8Format::E4M3, Fp8Format::E5M2}})
        for (const bool fast : {false, true}) {
            list.push_back({a, b, DType::F32, false, false, fast});
            list.push_back({a, b, DType::F32, false, true, fast});
            list.push_back({a, b, DType::BF16, false, false, fast});
            list.push_back({a, b, DType::BF16, false, true, fast});
#ifdef USE_CUDA
            list.push_back({a, b, DType::BF16, true, false, fast});
#else
            list.push_back({a, b, DType::F32, true, false, fast});
#endif
        }
    return list;
}

}  // namespace

TEST(MatmulFp8, MatchesOracle) {
    if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    const int64_t sizes[][3] = {{16, 16, 16}, {1, 32, 64}, {48, 80, 112}, {257, 64, 512}, {128, 272, 1040}};
    for (const Case& c : cases())
        for (const auto& [M, N, K] : sizes) check(c, M, N, K);
    check({}, 33, 48, 4096);  // long sums
}

// An infinite or NaN element was quantised to NaN: the whole row of the result is NaN, so that the step is skipped.
TEST(MatmulFp8, KeepsNaN) {
    if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    const int64_t M = 16, N = 16, K = 32;
    for (const Fp8Format f : {Fp8Format::E4M3, Fp8Format::E5M2}) {
        const Operand b = operand(Fp8Format::E4M3, N, K, 1, 2, 0);
        std::vector<uint8_t> codes(size_t(M * K), fp8_encode(1, f));
        codes[size_t(3 * K + 5)] = fp8_encode(std::numeric_limits<float>::infinity(), f);
        const TestArray bytes = TestArray::bytes(codes.data(), M * K),
                        scale = TestArray::of({1, 1, 0, 0}, {FP8_SCALE_FLOATS});
        const Fp8Matrix a{make_tensor(bytes.tensor().data, DType::U8, backend_device(), {M, K}), f, scale};
        const TestArray out = TestArray::poisoned({M, N});
        const TestArray scratch = TestArray::scratch(std::max<int64_t>(1, matmul_fp8_scratch(M, N, K)));
        matmul_fp8(out, a, b.matrix, {}, false, false, scratch, stream());
        const std::vector<double> got = out.fetch();
        for (int64_t i = 0; i < M * N; i++) EXPECT_EQ(std::isnan(got[size_t(i)]), i / N == 3) << i;
    }
}

#ifdef USE_CUDA
TEST(MatmulFp8, ChoicesAreKept) {
    if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    matmul_tuning(true, stream());
    for (const bool fast : {false, true})
        check({Fp8Format::E5M2, Fp8Format::E4M3, DType::BF16, false, false, fast}, 64, 64, 128);
    matmul_tuning(false, stream());
    const std::string table = matmul_choices(stream());
    EXPECT_NE(table.find(" e5m2,e4m3 bf16 "), std::string::npos) << table;
    EXPECT_NE(table.find(" e5m2,e4m3,fast bf16 "), std::string::npos) << table;
    const Stream other = create_blas_stream();
    EXPECT_TRUE(matmul_use_choices(table, other));
    EXPECT_EQ(matmul_choices(other), table);
    destroy_stream(other);
}
#endif

TEST(MatmulFp8Arguments, InvalidArgumentsAreErrors) {
    const Operand a = operand(Fp8Format::E4M3, 16, 32, 1, 1, 0), b = operand(Fp8Format::E4M3, 16, 32, 1, 2, 0);
    const Operand e5m2 = operand(Fp8Format::E5M2, 16, 32, 1, 2, 0), odd = operand(Fp8Format::E4M3, 16, 24, 1, 1, 0);
    const TestArray out = TestArray::poisoned({16, 16}), narrow = TestArray::poisoned({16, 8}),
                    bias = TestArray::random({16}, 1);
    const auto run = [&](Tensor to, const Operand& x, const Operand& y, Tensor with, bool accumulate) {
        matmul_fp8(to, x.matrix, y.matrix, with, accumulate, false, {}, stream());
    };
    expect_error([&] { run(narrow, a, b, {}, false); }, "matmul_fp8: out is fp32 [16, 8], expected fp32 [16, 16]");
    expect_error([&] { run(out, odd, odd, {}, false); }, "matmul_fp8: K = 24, N = 16; they must be multiples of 16");
    expect_error([&] { run(out, e5m2, e5m2, {}, false); },
                 "matmul_fp8: both operands are e5m2; at least one must be e4m3");
    expect_error([&] { run(out, a, b, bias, true); }, "matmul_fp8: a bias and accumulate can't be combined");
}
