// Matmuls against the oracle: every transpose, sizes around the edges of the register tiles and cache blocks, row
// strides, accumulation; for the library and for the built-in GEMM.
#include "kernels/matmul.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "driver/matmul_cache.h"
#include "kernels/activation.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/target.h"
#ifdef USE_CUDA
#include <sstream>
#else
#include "kernels/cpu/gemm_blocked.h"
#endif

namespace {

using Matmul = void (*)(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate);

// Matmuls need a stream with a cuBLASLt handle: one for the whole binary. Copies on the default stream keep their order
// with it.
Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

void library(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate) {
    matmul(out, a, b, transpose_a, transpose_b, accumulate, stream());
}

struct DTypes {
    DType inp = DType::F32, out = DType::F32;
};

void check_matmul(Matmul multiply, DTypes dtypes, int64_t M, int64_t N, int64_t K, bool transpose_a, bool transpose_b,
                  bool accumulate, int64_t gap, double shift = 0) {
    SCOPED_TRACE(str("M ", M, " N ", N, " K ", K, transpose_a ? " T" : " N", transpose_b ? "T" : "N",
                     accumulate ? " accumulate" : "", " gap ", gap, " shift ", shift));
    const int64_t rows_a = transpose_a ? K : M, columns_a = transpose_a ? M : K;
    const int64_t rows_b = transpose_b ? N : K, columns_b = transpose_b ? K : N;
    const TestArray a = TestArray::random(dtypes.inp, {rows_a, columns_a + gap}, 1, 1, shift);
    const TestArray b = TestArray::random(dtypes.inp, {rows_b, columns_b + gap}, 2, 1, shift);
    std::vector<double> initial(size_t(M * (N + gap)), std::numeric_limits<double>::quiet_NaN());
    for (int64_t i = 0; accumulate && i < M; i++)
        for (int64_t j = 0; j < N; j++) initial[size_t(i * (N + gap) + j)] = normal01(3, 0, uint64_t(i * N + j));
    const TestArray out = TestArray::of(dtypes.out, initial, {M, N + gap});
    multiply(out.tensor().columns(0, N), a.tensor().columns(0, columns_a), b.tensor().columns(0, columns_b),
             transpose_a, transpose_b, accumulate);
    const std::vector<double> before = take_columns(out.values(), N + gap, N), got = out.fetch();
    reference::Values ref = reference::matmul(take_columns(a.values(), columns_a + gap, columns_a).data(),
                                              take_columns(b.values(), columns_b + gap, columns_b).data(), transpose_a,
                                              transpose_b, accumulate ? before.data() : nullptr, nullptr, M, N, K);
    // Tensor cores truncate the terms that they add, 16 at a time, at the 24th bit of the largest part: an error of up
    // to 2u each time, always in one direction. It shows in an fp32 result if all terms have one sign.
    if (dtypes.out != dtypes.inp && shift != 0)
        for (double& m : ref.mag) m *= 1 + double(K) / 32;
    // The library's Hopper kernels round the sum to 16 bits before they add it to out.
    const int roundings = accumulate && dtypes.out != DType::F32 ? 2 : 1;
    expect_close("matmul", take_columns(got, N + gap, N), ref.value, ref.mag, K, N, dtypes.out, roundings);
    expect_gaps_untouched("matmul", got, N + gap, N);
}

void check_many(Matmul multiply, DTypes dtypes) {
    const int64_t sizes[][3] = {{1, 1, 1},     {1, 17, 5},    {6, 16, 4},    {7, 15, 33},
                                {12, 32, 256}, {13, 33, 257}, {37, 45, 300}, {121, 31, 64},
                                {1, 200, 511}, {130, 1, 100}, {64, 1030, 9}, {125, 70, 520}};
    for (const auto& s : sizes)
        for (int transposes = 0; transposes < 4; transposes++)
            for (const bool accumulate : {false, true})
                check_matmul(multiply, dtypes, s[0], s[1], s[2], transposes & 1, transposes & 2, accumulate,
                             (s[0] + s[1]) % 3 * 2);
    check_matmul(multiply, dtypes, 5, 7, 5000, false, true, false, 0);  // long sums
    // All terms of one sign: rounding errors add up and do not average out.
    check_matmul(multiply, dtypes, 20, 40, 200, false, false, false, 0, 3);
    check_matmul(multiply, dtypes, 20, 40, 4096, false, true, false, 0, 3);
    // No terms: zeros, or out unchanged.
    for (const bool accumulate : {false, true}) check_matmul(multiply, dtypes, 3, 5, 0, false, false, accumulate, 2);
}

}  // namespace

class MatmulDTypes : public DTypeTest {};
INSTANTIATE_DTYPES(MatmulDTypes);

TEST_P(MatmulDTypes, LibraryMatchesOracle) {
    check_many(library, {activation(), activation()});
    if (activation() != DType::F32) check_many(library, {activation(), DType::F32});
}

TEST_P(MatmulDTypes, LargeMatmulMatchesOracleInSamples) {
    // Beyond 1e9 multiply-adds: random outputs, and the first and last rows and columns.
    const int64_t M = 515, N = 1027, K = 2051;
    const TestArray a = TestArray::random(activation(), {M, K}, 1), b = TestArray::random(activation(), {N, K}, 2);
    const TestArray out = TestArray::poisoned(activation(), {M, N});
    matmul(out, a, b, false, true, false, stream());
    const std::vector<double> all = out.fetch();
    std::vector<double> got, ref, mag;
    for (int64_t s = 0; s < 6000; s++) {
        const Philox4 r = philox(4, uint64_t(s), 0);
        int64_t i = r.v[0] % M, j = r.v[1] % N;
        if (s % 6 == 0) i = r.v[2] % 2 ? M - 1 : 0;
        if (s % 6 == 1) j = r.v[2] % 2 ? N - 1 : 0;
        const reference::Value v = reference::dot(a.data() + i * K, 1, b.data() + j * K, 1, K);
        got.push_back(all[size_t(i * N + j)]);
        ref.push_back(v.value);
        mag.push_back(v.mag);
    }
    expect_close("matmul", got, ref, mag, K, 1, activation());
}

namespace {

struct Batched {
    int64_t batch, M, N, K;
    bool transpose_a, transpose_b;
    float alpha, beta;
};

// The inputs of a batched matmul, and its result as fetched values.
struct BatchedRun {
    TestArray a, b, add, out;
    BatchedRun(DType T, const Batched& p)
        : a(TestArray::random(T, {p.batch, p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K}, 1)),
          b(TestArray::random(T, {p.batch, p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N}, 2)),
          add(TestArray::random(T, {p.batch, p.M, p.N}, 3, 5)),
          out(TestArray::poisoned(T, {p.batch, p.M, p.N})) {}
    std::vector<double> run(const Batched& p, bool in_place, Stream on) const {
        const Tensor to = in_place ? add.tensor() : out.tensor();
        matmul_batched(to, a, b, p.transpose_a, p.transpose_b, p.alpha, p.beta, p.beta != 0 ? add.tensor() : Tensor{},
                       on);
        return (in_place ? add : out).fetch();
    }
};

void check_batched(DType T, const Batched& p, bool in_place) {
    SCOPED_TRACE(str(p.batch, " x ", p.M, " x ", p.N, " x ", p.K, p.transpose_a ? " T" : " N",
                     p.transpose_b ? "T" : "N", " alpha ", p.alpha, " beta ", p.beta, " in_place ", in_place));
    const BatchedRun inputs(T, p);
    const std::vector<double> got = inputs.run(p, in_place, stream());
    reference::Values all;
    for (int64_t i = 0; i < p.batch; i++) {
        const reference::Values product =
            reference::matmul(inputs.a.data() + i * p.M * p.K, inputs.b.data() + i * p.K * p.N, p.transpose_a,
                              p.transpose_b, nullptr, nullptr, p.M, p.N, p.K);
        for (int64_t k = 0; k < p.M * p.N; k++) {
            const double added = p.beta * inputs.add.data()[i * p.M * p.N + k];
            all.value.push_back(p.alpha * product.value[size_t(k)] + added);
            all.mag.push_back(std::fabs(p.alpha) * product.mag[size_t(k)] + std::fabs(added));
        }
    }
    // The library's Hopper kernels round the product to 16 bits before they add.
    expect_close("matmul_batched", got, all.value, all.mag, p.K, p.N, T, p.beta != 0 ? 2 : 1);
}

}  // namespace

TEST_P(MatmulDTypes, BatchedMatmulMatchesOracle) {
    const int64_t sizes[][4] = {{1, 5, 7, 3}, {3, 1, 1, 1}, {4, 16, 24, 40}, {2, 33, 17, 65}, {5, 64, 64, 128}};
    const float factors[][2] = {{1, 0}, {2.03f, 0}, {1, 3.44f}, {2.03f, -4.78f}, {0, 1.5f}};
    for (const auto& s : sizes)
        for (const auto& [alpha, beta] : factors)
            for (int transposes = 0; transposes < 4; transposes++)
                for (const bool in_place : {false, true})
                    if (!in_place || beta != 0)
                        check_batched(activation(),
                                      {s[0], s[1], s[2], s[3], bool(transposes & 1), bool(transposes & 2), alpha, beta},
                                      in_place);
    check_batched(activation(), {2, 20, 24, 2050, false, true, 1, 0}, false);  // long sums
    const TestArray none = TestArray::poisoned(activation(), {0, 3, 3});
    matmul_batched(none, none, none, false, false, 1, 0, Tensor{}, stream());
}

#ifndef USE_CUDA
namespace {
void built_in(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate) {
    gemm_blocked(transpose_a, transpose_b, out.shape[0], out.shape[1], a.shape[transpose_a ? 0 : 1], a.as<float>(),
                 a.stride[0], b.as<float>(), b.stride[0], accumulate, out.as<float>(), out.stride[0]);
}
}  // namespace

TEST(GemmBlocked, MatchesOracle) {
    check_many(built_in, {});
    check_matmul(built_in, {}, 250, 1100, 300, false, true, true, 3);  // more than one block each way
}

// In whole tiles, at the edges, and over more than one block of K.
TEST(GemmBlocked, ScalesTheProduct) {
    const int64_t M = 27, N = 70, K = 300;
    const TestArray a = TestArray::random({M, K}, 1), b = TestArray::random({K, N}, 2),
                    add = TestArray::random({M, N}, 3);
    for (const bool accumulate : {false, true}) {
        const TestArray out = accumulate ? TestArray::of(add.values(), {M, N}) : TestArray::poisoned({M, N});
        gemm_blocked(false, false, M, N, K, a.tensor().as<float>(), K, b.tensor().as<float>(), N, accumulate,
                     out.tensor().as<float>(), N, -0.3f);
        reference::Values ref = reference::matmul(a.data(), b.data(), false, false, nullptr, nullptr, M, N, K);
        for (size_t i = 0; i < ref.value.size(); i++) {
            const double added = accumulate ? add.data()[i] : 0;
            ref.value[i] = double(-0.3f) * ref.value[i] + added;
            ref.mag[i] = double(0.3f) * ref.mag[i] + std::fabs(added);
        }
        expect_close("gemm_blocked", out.fetch(), ref.value, ref.mag, K, N);
    }
}

TEST(GemmBlocked, BitsDoNotDependOnThreads) {
    const TestArray a = TestArray::random({150, 300}, 1), b = TestArray::random({300, 170}, 2);
    expect_deterministic("gemm_blocked", [&] {
        const TestArray out = TestArray::poisoned({150, 170});
        built_in(out, a, b, false, false, false);
        return out.fetch();
    });
}
#endif

namespace {

struct BatchInvariant {
    BatchInvariant() { matmul_batch_invariant(true, stream()); }
    ~BatchInvariant() { matmul_batch_invariant(false, stream()); }
};

}  // namespace

// Each row alone, and in matrices of several sizes, with what a linear layer, its adapters and the loss add.
TEST(Matmul, BatchInvariantRowsDoNotDependOnTheOthers) {
    const bool on_cpu = backend_device() == Device::CPU;
    if (!on_cpu && !this_target().hopper) GTEST_SKIP() << "only a Hopper GPU has such matmuls";
    const DType T = on_cpu ? DType::F32 : DType::BF16;
    const BatchInvariant on;
    using Sizes = std::vector<std::pair<int64_t, int64_t>>;
    for (const auto& [K, OC] :
         on_cpu ? Sizes{{5, 3}, {64, 70}, {300, 129}, {2100, 40}} : Sizes{{8, 8}, {16, 200}, {296, 136}, {2104, 384}}) {
        const int64_t N = on_cpu ? 67 : 131;  // more than a tile
        const TestArray inp = TestArray::random(T, {N, K}, 1), weight = TestArray::random(T, {OC, K}, 2),
                        bias = TestArray::random(T, {OC}, 3), add = TestArray::random(T, {N, OC}, 4);
        const auto rows = [&, OC = OC](int64_t begin, int64_t end) {
            const Tensor x = inp.tensor().rows(begin, end);
            const auto poisoned = [&](DType dtype) { return TestArray::poisoned(dtype, {end - begin, OC}); };
            const TestArray plain = poisoned(T), biased = poisoned(T), added = poisoned(T), scaled = poisoned(T),
                            pre = poisoned(T), activated = poisoned(T), floats = poisoned(DType::F32);
            matmul_forward(plain, x, weight, {}, stream());
            matmul_forward(biased, x, weight, bias, stream());
            matmul_forward_add(added, x, weight, bias, add.tensor().rows(begin, end), stream());
            matmul_forward(scaled, x, weight, bias, stream());
            matmul(scaled, x, weight, false, true, true, stream(), 0.3f);
            matmul_forward_activation(Activation::GELU, activated, pre, x, weight, bias, stream());
            matmul(floats, x, weight, false, true, false, stream());
            std::vector<std::vector<double>> results;
            for (const TestArray* t : {&plain, &biased, &added, &scaled, &pre, &activated, &floats})
                results.push_back(t->fetch());
            std::vector<double> all;  // row by row
            for (int64_t i = 0; i < end - begin; i++)
                for (const std::vector<double>& values : results)
                    all.insert(all.end(), values.begin() + i * OC, values.begin() + (i + 1) * OC);
            return all;
        };
        const std::vector<double> whole = rows(0, N);
        for (const int64_t n : {1, 2, 12, 13, 64}) {
            std::vector<double> parts;
            for (int64_t begin = 0; begin < N; begin += n) {
                const std::vector<double> part = rows(begin, std::min(begin + n, N));
                parts.insert(parts.end(), part.begin(), part.end());
            }
            expect_same_bits("rows", parts, whole);
        }
    }
    // Sums in fp32 are not rounded to 16 bits on their way, and a GPU has no such kernel for other sizes.
    check_matmul(library, {T, DType::F32}, 131, 208, 296, false, true, false, 8);
    if (!on_cpu) {
        const TestArray odd = TestArray::random(T, {3, 5}, 1), out = TestArray::poisoned(T, {3, 3});
        EXPECT_THROW(matmul_forward(out, odd, odd, {}, stream()), Error);
    }
    // Those of a batch are no linear layers: Muon's are of any size.
    const TestArray batch = TestArray::random(T, {2, 5, 7}, 5), gram = TestArray::poisoned(T, {2, 5, 5});
    EXPECT_NO_THROW(matmul_batched(gram, batch, batch, false, true, 1, 0, {}, stream()));
}

// alpha scales the product and not what out holds. Powers of two are exact.
TEST_P(MatmulDTypes, LibraryMatmulScalesTheProduct) {
    const DType T = activation();
    const TestArray a = TestArray::random(T, {50, 30}, 1), b = TestArray::random(T, {70, 30}, 2);
    std::vector<double> quarter;
    for (const double x : a.values()) quarter.push_back(-0.25 * x);
    const TestArray scaled = TestArray::of(T, quarter, {50, 30});
    for (const bool accumulate : {false, true}) {
        const TestArray x = TestArray::random(T, {50, 70}, 3), y = TestArray::random(T, {50, 70}, 3);
        matmul(x, a, b, false, true, accumulate, stream(), -0.25f);
        matmul(y, scaled, b, false, true, accumulate, stream());
        expect_same_bits("matmul", x.fetch(), y.fetch());
    }
}

TEST_P(MatmulDTypes, LibraryMatmulIsDeterministic) {
    const DType T = activation();
    const TestArray a = TestArray::random(T, {150, 300}, 1), b = TestArray::random(T, {300, 170}, 2);
    const TestArray x = TestArray::poisoned(T, {150, 170}), y = TestArray::poisoned(T, {150, 170});
    matmul(x, a, b, false, false, false, stream());
    matmul(y, a, b, false, false, false, stream());
    expect_same_bits("matmul", x.fetch(), y.fetch());
}

TEST_P(MatmulDTypes, LinearLayerMatchesOracle) {
    const DType T = activation();
    for (const auto& s :
         std::vector<std::vector<int64_t>>{{1, 1, 1}, {3, 5, 7}, {65, 33, 17}, {70, 64, 130}, {200, 10, 1100}})
        for (const bool bias_given : {false, true})
            for (const bool accumulate : {false, true}) {
                const int64_t N = s[0], C = s[1], OC = s[2], gap = N % 2 * 3;
                SCOPED_TRACE(str("N ", N, " C ", C, " OC ", OC, " bias ", bias_given, " accumulate ", accumulate));
                const TestArray inp = TestArray::random(T, {N, C}, 1), weight = TestArray::random(T, {OC, C}, 2);
                const TestArray bias = TestArray::random(T, {OC}, 3), dout = TestArray::random(T, {N, OC + gap}, 4);
                const Tensor dout_view = dout.tensor().columns(0, OC);
                const std::vector<double> dout_values = take_columns(dout.values(), OC + gap, OC);

                const TestArray out = TestArray::poisoned(T, {N, OC + gap});
                matmul_forward(out.tensor().columns(0, OC), inp, weight, bias_given ? bias.tensor() : Tensor{},
                               stream());
                reference::Values ref =
                    reference::matmul_forward(inp.data(), weight.data(), bias_given ? bias.data() : nullptr, N, C, OC);
                expect_close("out", take_columns(out.fetch(), OC + gap, OC), ref.value, ref.mag, C, OC, T);
                expect_gaps_untouched("out", out.fetch(), OC + gap, OC);

                const TestArray added = TestArray::random(T, {N, OC}, 6);
                const Tensor given_bias = bias_given ? bias.tensor() : Tensor{};
                const TestArray sum = TestArray::poisoned(T, {N, OC});
                matmul_forward_add(sum, inp, weight, given_bias, added, stream());
                ref = reference::matmul(inp.data(), weight.data(), false, true, added.data(),
                                        bias_given ? bias.data() : nullptr, N, OC, C);
                // If rows are not multiples of 16 bytes the library rounds the sum before it adds.
                expect_close("sum", sum.fetch(), ref.value, ref.mag, C, OC, T, 2);
                matmul_forward_add(added, inp, weight, given_bias, added, stream());
                expect_close("added to out", added.fetch(), ref.value, ref.mag, C, OC, T, 2);

                const auto start = [&](DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
                    return accumulate ? TestArray::random(dtype, shape, seed) : TestArray::poisoned(dtype, shape);
                };
                const auto earlier = [&](const TestArray& t) { return accumulate ? t.data() : nullptr; };
                const TestArray dinp = start(T, {N, C}, 5);
                matmul_backward_input(dinp, dout_view, weight, accumulate, stream());
                ref = reference::matmul_backward_input(dout_values.data(), weight.data(), earlier(dinp), N, C, OC);
                expect_close("dinp", dinp.fetch(), ref.value, ref.mag, OC, C, T);

                const TestArray dweight = start(DType::F32, {OC, C}, 6), dbias = start(DType::F32, {OC}, 7);
                matmul_backward_weight(dweight, bias_given ? dbias.tensor() : Tensor{}, dout_view, inp, accumulate,
                                       stream());
                ref = reference::matmul_backward_weight(dout_values.data(), inp.data(), earlier(dweight), N, C, OC);
                expect_close("dweight", dweight.fetch(), ref.value, ref.mag, N, C);
                if (backend_device() == Device::CPU || T == DType::BF16) {
                    const TestArray rounded = start(DType::BF16, {OC, C}, 8);
                    matmul_backward_weight(rounded, {}, dout_view, inp, accumulate, stream());
                    ref = reference::matmul_backward_weight(dout_values.data(), inp.data(), earlier(rounded), N, C, OC);
                    const int roundings = accumulate && backend_device() == Device::CUDA ? 2 : 1;
                    expect_close("dweight in bf16", rounded.fetch(), ref.value, ref.mag, N, C, DType::BF16, roundings);
                }
                if (bias_given) {
                    ref = reference::matmul_backward_bias(dout_values.data(), earlier(dbias), N, OC);
                    expect_close("dbias", dbias.fetch(), ref.value, ref.mag, N, OC);
                } else {
                    expect_same_bits("dbias", dbias.values(), dbias.fetch());
                }
            }
}

namespace {

// Sizes for which the library has a GELU epilogue, and sizes for which two kernels run.
constexpr int64_t GELU_SIZES[][3] = {{8, 8, 8},      {64, 48, 136},   {200, 96, 80}, {128, 264, 128},
                                     {130, 64, 264}, {33, 1100, 120}, {3, 5, 7},     {65, 33, 17}};

// The addition to mag for the library's 16-bit GELU: it computes ½(1 + tanh u), whose error is 2u of 1 and not of the
// result, and expect_close allows 2⁻⁸ (fp16: 2⁻¹¹) of mag for each of two roundings (docs/understand/numerics.md).
double lost_digits(DType dtype) {
    return dtype == DType::BF16 ? 4 * UNIT_ROUNDOFF / 0x1p-7 : dtype == DType::F16 ? 4 * UNIT_ROUNDOFF / 0x1p-10 : 0;
}

// gelu(pre), with mag including the effect of errors of pre.
reference::Values gelu_of(const reference::Values& pre, DType T) {
    reference::Values out(int64_t(pre.value.size()));
    for (size_t i = 0; i < pre.value.size(); i++) {
        const double x = pre.value[i];
        const reference::Value y = reference::gelu(x), slope = reference::gelu_gradient(x);
        out.set(int64_t(i), {y.value, y.mag + std::fabs(slope.value) * pre.mag[i] + lost_digits(T) * std::fabs(x)});
    }
    return out;
}

// dout·weight ⊙ gelu'(x)
reference::Values times_gelu_gradient(reference::Values matmul, const std::vector<double>& x, DType T) {
    for (size_t i = 0; i < x.size(); i++) {
        const reference::Value slope = reference::gelu_gradient(x[i]);
        const double du = 2 * reference::ROOT_2_OVER_PI * (1 + 3 * reference::GELU_CUBIC * x[i] * x[i]);
        matmul.value[i] *= slope.value;
        matmul.mag[i] *= slope.mag + lost_digits(T) * (1 + std::fabs(x[i]) * du);
    }
    return matmul;
}

}  // namespace

// 16-bit results are rounded once if GELU is in the epilogue, and twice if it is a second kernel.
TEST_P(MatmulDTypes, LinearLayerWithGeluMatchesOracle) {
    const DType T = activation();
    for (const auto& s : GELU_SIZES)
        for (const bool bias_given : {false, true})
            for (const int64_t gap : {0, 8, 3}) {
                const int64_t N = s[0], C = s[1], OC = s[2];
                SCOPED_TRACE(str("N ", N, " C ", C, " OC ", OC, " bias ", bias_given, " gap ", gap));
                const auto view = [](const TestArray& t, int64_t columns) { return t.tensor().columns(0, columns); };
                const TestArray inp = TestArray::random(T, {N, C}, 1);
                const TestArray weight = TestArray::random(T, {OC, C}, 2, 2 / std::sqrt(double(C)));
                const TestArray bias = TestArray::random(T, {OC}, 3);
                const TestArray out = TestArray::poisoned(T, {N, OC + gap}),
                                pre = TestArray::poisoned(T, {N, OC + gap});
                matmul_forward_activation(Activation::GELU, view(out, OC), view(pre, OC), inp, weight,
                                          bias_given ? bias.tensor() : Tensor{}, stream());
                reference::Values ref =
                    reference::matmul_forward(inp.data(), weight.data(), bias_given ? bias.data() : nullptr, N, C, OC);
                expect_close("pre", take_columns(pre.fetch(), OC + gap, OC), ref.value, ref.mag, C, OC, T);
                expect_gaps_untouched("pre", pre.fetch(), OC + gap, OC);
                ref = gelu_of(ref, T);
                expect_close("out", take_columns(out.fetch(), OC + gap, OC), ref.value, ref.mag, C, OC, T, 2);
                expect_gaps_untouched("out", out.fetch(), OC + gap, OC);

                const TestArray given = TestArray::random(T, {N, C + gap}, 4, 2),
                                dout = TestArray::random(T, {N, OC}, 5);
                const TestArray dinp = TestArray::poisoned(T, {N, C + gap});
                matmul_backward_activation(Activation::GELU, {view(dinp, C), view(dinp, C), {}, {}, false}, dout,
                                           weight, view(given, C), stream());
                ref =
                    times_gelu_gradient(reference::matmul_backward_input(dout.data(), weight.data(), nullptr, N, C, OC),
                                        take_columns(given.values(), C + gap, C), T);
                expect_close("dinp", take_columns(dinp.fetch(), C + gap, C), ref.value, ref.mag, OC, C, T, 2);
                expect_gaps_untouched("dinp", dinp.fetch(), C + gap, C);
            }
}

TEST_P(MatmulDTypes, GeluOfEmptyMatricesIsValid) {
    const DType T = activation();
    const TestArray inp = TestArray::poisoned(T, {3, 0}), weight = TestArray::poisoned(T, {8, 0});
    const TestArray bias = TestArray::random(T, {8}, 1), none = TestArray::poisoned(T, {0, 8});
    const TestArray out = TestArray::poisoned(T, {3, 8}), pre = TestArray::poisoned(T, {3, 8});
    matmul_forward_activation(Activation::GELU, out, pre, inp, weight, bias, stream());  // no terms: gelu(bias)
    std::vector<double> rows;
    for (int n = 0; n < 3; n++) rows.insert(rows.end(), bias.values().begin(), bias.values().end());
    expect_same_bits("pre", pre.fetch(), rows);
    const reference::Values ref = reference::gelu_forward(rows.data(), 24);
    expect_close("out", out.fetch(), ref.value, ref.mag, 1, 8, T);
    const TestArray square = TestArray::random(T, {8, 8}, 2);
    matmul_backward_activation(Activation::GELU, {none, none, {}, {}, false}, none, square, none,
                               stream());  // no rows: nothing to do
}

// Without tuning ReLU² and SwiGLU are kernels of their own, after or before the matmul.
TEST_P(MatmulDTypes, LinearLayerWithActivationIsItsParts) {
    const DType T = activation();
    const int64_t N = 33, C = 40, I = 24;
    for (const Activation f : {Activation::ReLU2, Activation::SwiGLU})
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(str("activation ", int(f), " accumulate ", accumulate));
            const int64_t OC = activation_inputs(f, I);
            const TestArray inp = TestArray::random(T, {N, C}, 1), weight = TestArray::random(T, {OC, C}, 2);
            const TestArray out = TestArray::poisoned(T, {N, I}), pre = TestArray::poisoned(T, {N, OC});
            const TestArray out2 = TestArray::poisoned(T, {N, I}), pre2 = TestArray::poisoned(T, {N, OC});
            matmul_forward_activation(f, out, pre, inp, weight, Tensor{}, stream());
            matmul_forward(pre2, inp, weight, Tensor{}, stream());
            activation_forward(f, out2, pre2, stream());
            expect_same_bits("pre", pre.fetch(), pre2.fetch());
            expect_same_bits("out", out.fetch(), out2.fetch());

            const TestArray dout = TestArray::random(T, {N, C}, 3), weight2 = TestArray::random(T, {C, I}, 4);
            const TestArray dpre = TestArray::poisoned(T, {N, OC}), dpre2 = TestArray::poisoned(T, {N, OC});
            const TestArray dact = TestArray::poisoned(T, {N, I}), act = TestArray::poisoned(T, {N, I});
            const TestArray dbias = accumulate ? TestArray::random({OC}, 5) : TestArray::poisoned({OC});
            const Tensor kept = f == Activation::SwiGLU ? act.tensor() : Tensor{};
            matmul_backward_activation(f, {dpre, dact, kept, dbias, accumulate}, dout, weight2, pre, stream());
            matmul_backward_input(dact, dout, weight2, false, stream());
            activation_backward(f, dpre2, {}, dact, pre, stream());
            expect_same_bits("dpre", dpre.fetch(), dpre2.fetch());
            expect_sum_of_rows("dbias", dbias, dpre.fetch(), accumulate, N, OC);
            if (kept) expect_same_bits("act", act.fetch(), out.fetch());
        }
}

// --- tuning

#ifdef USE_CUDA
namespace {

struct TunedMatmul {
    int64_t M, N, K;
    bool transpose_a, transpose_b, accumulate;
};

std::vector<double> matmul_bits(DType T, const TunedMatmul& p, Stream on) {
    const TestArray a = TestArray::random(T, {p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K}, 1);
    const TestArray b = TestArray::random(T, {p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N}, 2);
    const TestArray out = TestArray::random(T, {p.M, p.N}, 3);
    matmul(out, a, b, p.transpose_a, p.transpose_b, p.accumulate, on);
    return out.fetch();
}

// A stream of its own for a test, so that its choices do not affect other tests.
struct OwnStream {
    Stream stream = create_blas_stream();
    OwnStream() = default;
    OwnStream(const OwnStream&) = delete;
    ~OwnStream() { destroy_stream(stream); }
    operator Stream() const { return stream; }
};

int64_t lines(const std::string& text) {
    return std::count(text.begin(), text.end(), '\n');
}

}  // namespace

TEST_P(MatmulDTypes, TunedMatmulsMatchOracleAndRepeat) {
    const DType T = activation();
    const OwnStream tuned;
    std::vector<TunedMatmul> matmuls;
    for (int i = 0; i < 8; i++) matmuls.push_back({264, 136, 520, bool(i & 1), bool(i & 2), bool(i & 4)});
    const int64_t header = lines(matmul_choices(tuned));
    matmul_tuning(true, tuned);
    for (const TunedMatmul& p : matmuls) matmul_bits(T, p, tuned);
    matmul_tuning(false, tuned);
    const std::string choices = matmul_choices(tuned);
    EXPECT_EQ(lines(choices), header + int64_t(matmuls.size())) << choices;

    // The one that adds to its output takes the other's choice, time included. The table lists them side by side.
    std::istringstream table(choices);
    int pairs = 0;
    for (std::string line, next; std::getline(table, line);) {
        const size_t at = line.find(" 0 none ");
        if (at == std::string::npos) continue;
        ASSERT_TRUE(std::getline(table, next));
        EXPECT_EQ(next, line.replace(at, 2, " 1"));
        pairs++;
    }
    EXPECT_EQ(pairs, 4);

    // Another stream that adopts them gives the same bits, and the same table.
    const OwnStream other;
    ASSERT_TRUE(matmul_use_choices(choices, other));
    EXPECT_EQ(matmul_choices(other), choices);
    for (const TunedMatmul& p : matmuls) {
        SCOPED_TRACE(str(p.transpose_a, p.transpose_b, p.accumulate));
        const std::vector<double> bits = matmul_bits(T, p, tuned);
        expect_same_bits("again", bits, matmul_bits(T, p, tuned));
        expect_same_bits("adopted", bits, matmul_bits(T, p, other));
    }
    EXPECT_EQ(matmul_choices(tuned), choices);  // nothing was timed while tuning was off

    ASSERT_TRUE(matmul_use_choices(choices, stream()));
    for (const TunedMatmul& p : matmuls)
        check_matmul(library, {T, T}, p.M, p.N, p.K, p.transpose_a, p.transpose_b, p.accumulate, 0);
}

// Calls that overwrite their result are right even while they tune, epilogues included.
TEST_P(MatmulDTypes, ResultsAreRightWhileTuning) {
    const DType T = activation();
    for (const auto& s : std::vector<std::vector<int64_t>>{{64, 128, 256}, {264, 520, 136}, {33, 1100, 120}}) {
        const int64_t N = s[0], C = s[1], OC = s[2];
        SCOPED_TRACE(str("N ", N, " C ", C, " OC ", OC));
        const OwnStream tuned;
        matmul_tuning(true, tuned);
        const TestArray inp = TestArray::random(T, {N, C}, 1), dout = TestArray::random(T, {N, OC}, 4);
        const TestArray weight = TestArray::random(T, {OC, C}, 2, 2 / std::sqrt(double(C)));
        const TestArray bias = TestArray::random(T, {OC}, 3), pre = TestArray::poisoned(T, {N, OC});
        const TestArray out = TestArray::poisoned(T, {N, OC}), dinp = TestArray::poisoned(T, {N, C});
        reference::Values ref = reference::matmul_forward(inp.data(), weight.data(), bias.data(), N, C, OC);
        matmul_forward(pre, inp, weight, bias, tuned);
        expect_close("out", pre.fetch(), ref.value, ref.mag, C, OC, T);
        device_fill(pre.tensor().data, 0xFF, size_t(pre.tensor().bytes()), tuned);
        matmul_forward_activation(Activation::GELU, out, pre, inp, weight, bias, tuned);
        expect_close("pre", pre.fetch(), ref.value, ref.mag, C, OC, T);
        ref = gelu_of(ref, T);
        expect_close("gelu", out.fetch(), ref.value, ref.mag, C, OC, T, 2);
        matmul_backward_activation(Activation::GELU, {dinp, dinp, {}, {}, false}, dout, weight, inp, tuned);
        ref = times_gelu_gradient(reference::matmul_backward_input(dout.data(), weight.data(), nullptr, N, C, OC),
                                  inp.values(), T);
        expect_close("dinp", dinp.fetch(), ref.value, ref.mag, OC, C, T, 2);
        const TestArray dweight = TestArray::poisoned({OC, C}), dbias = TestArray::poisoned({OC});
        matmul_backward_weight(dweight, dbias, dout, inp, false, tuned);
        ref = reference::matmul_backward_weight(dout.data(), inp.data(), nullptr, N, C, OC);
        expect_close("dweight", dweight.fetch(), ref.value, ref.mag, N, C);
        ref = reference::matmul_backward_bias(dout.data(), nullptr, N, OC);
        expect_close("dbias", dbias.fetch(), ref.value, ref.mag, N, OC);
    }
}

namespace {

// A table with its checksum recomputed: FNV-1a of all lines before it.
std::string without_checksum(const std::string& text) {
    return text.substr(0, text.rfind("checksum "));
}
std::string with_checksum(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
    return str(text, "checksum ", std::hex, hash, '\n');
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

}  // namespace

// A batch is a GEMM of its own, in the table too.
TEST_P(MatmulDTypes, TunedBatchesRepeat) {
    const DType T = activation();
    const OwnStream tuned, other;
    const int64_t header = lines(matmul_choices(tuned));
    std::vector<Batched> gemms;
    for (const int64_t batch : {1, 2, 5})
        for (const float beta : {0.0f, -4.78f}) gemms.push_back({batch, 136, 72, 264, false, true, 2.03f, beta});
    matmul_tuning(true, tuned);
    for (const Batched& p : gemms) BatchedRun(T, p).run(p, false, tuned);
    matmul_tuning(false, tuned);
    const std::string choices = matmul_choices(tuned);
    EXPECT_EQ(lines(choices), header + int64_t(gemms.size())) << choices;
    ASSERT_TRUE(matmul_use_choices(choices, other));
    EXPECT_EQ(matmul_choices(other), choices);
    ASSERT_TRUE(matmul_use_choices(choices, stream()));
    for (const Batched& p : gemms) {
        const BatchedRun inputs(T, p);
        expect_same_bits("adopted", inputs.run(p, false, tuned), inputs.run(p, false, other));
        check_batched(T, p, false);
    }
}

TEST(MatmulTuning, ForeignAndDamagedTablesAreRejected) {
    const OwnStream own, fresh;
    matmul_tuning(true, own);
    matmul_bits(DType::F32, {64, 64, 64, false, true, false}, own);
    const std::string choices = matmul_choices(own), empty = matmul_choices(fresh), body = without_checksum(choices);
    ASSERT_EQ(with_checksum(body), choices);

    EXPECT_TRUE(matmul_use_choices("", fresh));
    EXPECT_FALSE(matmul_use_choices(with_checksum("another " + body), fresh));
    EXPECT_FALSE(matmul_use_choices(with_checksum(replaced(body, "cuBLASLt ", "cuBLASLt 1")), fresh));
    const std::string algorithm = body.substr(body.rfind(' ') - 128, 128);
    for (const std::string& damaged :
         {body, choices.substr(0, choices.size() / 2), choices + "x", replaced(choices, "fp32 fp32", "fp32 bf16"),
          with_checksum(replaced(body, "fp32 fp32", "fp32 fp33")), with_checksum(replaced(body, "fp32 NT", "fp32 NX")),
          with_checksum(replaced(body, " none ", " some ")), with_checksum(replaced(body, "64 64 64", "64 64 x")),
          with_checksum(replaced(body, algorithm, algorithm.substr(2))),
          with_checksum(replaced(body, algorithm, std::string(128, 'f'))), with_checksum(body + "64 64\n"),
          with_checksum(body.substr(0, body.size() - 1) + " 0\n"),
          with_checksum(body.substr(0, body.size() - 1) + " x\n"),
          with_checksum(body.substr(0, body.size() - 1) + " 2 3\n"),
          with_checksum(body.substr(0, body.size() - 1) + " +\n"),
          with_checksum(body.substr(0, body.size() - 1) + " + 16 16 16 16\n"),
          with_checksum(body.substr(0, body.size() - 1) + " + 0 16 16 16 16\n"),
          with_checksum(body.substr(0, body.size() - 1) + " + 16 16 16 16 16 1\n"),
          // The library has no second pair of operands.
          with_checksum(body.substr(0, body.size() - 1) + " + 16 16 16 16 16\n")})
        expect_error([&] { matmul_use_choices(damaged, fresh); },
                     "matmul_use_choices: the table of GEMM algorithms is damaged; without it they are timed again");
    EXPECT_EQ(matmul_choices(fresh), empty);
    EXPECT_TRUE(matmul_use_choices(choices, fresh));
    EXPECT_EQ(matmul_choices(fresh), choices);
}

// GELU runs as a separate kernel if tuning found that faster.
TEST(MatmulTuning, GeluMayBeASeparateKernel) {
    const DType T = DType::BF16;
    const int64_t N = 64, C = 128, OC = 256;
    const OwnStream own, same, other;
    const TestArray inp = TestArray::random(T, {N, C}, 1), weight = TestArray::random(T, {OC, C}, 2, 0.1);
    const TestArray bias = TestArray::random(T, {OC}, 3), dout = TestArray::random(T, {N, OC}, 4);
    const TestArray out = TestArray::poisoned(T, {N, OC}), pre = TestArray::poisoned(T, {N, OC});
    const TestArray dinp = TestArray::poisoned(T, {N, C});
    matmul_tuning(true, own);
    matmul_forward_activation(Activation::GELU, out, pre, inp, weight, bias, own);
    matmul_backward_activation(Activation::GELU, {dinp, dinp, {}, {}, false}, dout, weight, inp, own);
    std::string table = without_checksum(matmul_choices(own)), apart;
    std::istringstream in(table);
    for (std::string line; std::getline(in, line); apart += line + '\n')
        if (line.find(" gelu") != std::string::npos) {  // the algorithm is the last but one word
            const size_t end = line.rfind(' '), begin = line.rfind(' ', end - 1) + 1;
            line.replace(begin, end - begin, "apart");
        }
    ASSERT_TRUE(matmul_use_choices(with_checksum(table), same));
    EXPECT_EQ(without_checksum(matmul_choices(same)), table);
    ASSERT_TRUE(matmul_use_choices(with_checksum(apart), other));
    EXPECT_EQ(without_checksum(matmul_choices(other)), apart);

    matmul_forward_activation(Activation::GELU, out, pre, inp, weight, bias, other);
    matmul_backward_activation(Activation::GELU, {dinp, dinp, {}, {}, false}, dout, weight, inp, other);
    const TestArray out2 = TestArray::poisoned(T, {N, OC}), pre2 = TestArray::poisoned(T, {N, OC});
    const TestArray dinp2 = TestArray::poisoned(T, {N, C});
    matmul_forward(pre2, inp, weight, bias, other);
    activation_forward(Activation::GELU, out2, pre2, other);
    matmul_backward_input(dinp2, dout, weight, false, other);
    activation_backward(Activation::GELU, dinp2, {}, dinp2, inp, other);
    expect_same_bits("pre", pre.fetch(), pre2.fetch());
    expect_same_bits("out", out.fetch(), out2.fetch());
    expect_same_bits("dinp", dinp.fetch(), dinp2.fetch());
}

TEST(MatmulTuning, CacheFileIsPerUser) {
    const char* variables[] = {"XDG_CACHE_HOME", "HOME"};
    std::vector<std::string> saved;
    for (const char* name : variables) saved.push_back(std::getenv(name) ? std::getenv(name) : "");
    setenv("XDG_CACHE_HOME", "/caches", 1);
    setenv("HOME", "/home/ada", 1);
    const std::string path = matmul_cache_path();
    EXPECT_EQ(path.rfind("/caches/train_gpt/gemm/", 0), 0u) << path;
    EXPECT_NE(path.find("-cuBLASLt-"), std::string::npos) << path;
    EXPECT_EQ(path.find(' '), std::string::npos) << path;
    for (const char* ignored : {"", "relative"}) {
        setenv("XDG_CACHE_HOME", ignored, 1);
        EXPECT_EQ(matmul_cache_path(), "/home/ada/.cache" + path.substr(7));
    }
    setenv("HOME", "", 1);
    EXPECT_EQ(matmul_cache_path(), "");
    for (size_t i = 0; i < saved.size(); i++)
        saved[i].empty() ? unsetenv(variables[i]) : setenv(variables[i], saved[i].c_str(), 1);
}
#else
TEST(MatmulTuning, IsEmptyOnTheCpu) {
    matmul_tuning(true, stream());
    check_matmul(library, {}, 20, 30, 40, false, true, true, 0);
    matmul_tuning(false, stream());
    EXPECT_EQ(matmul_choices(stream()), "");
    EXPECT_EQ(matmul_cache_path(), "");
    EXPECT_TRUE(matmul_use_choices("", stream()));
    EXPECT_FALSE(matmul_use_choices("NVIDIA H100 80GB HBM3 cuBLASLt 13.1.0\n", stream()));
}
#endif

TEST_P(MatmulDTypes, BiasGradientIsDeterministicAndAccurateOverManyRows) {
    const int64_t N = 5000, OC = 50;
    const TestArray dout = TestArray::random(activation(), {N, OC}, 1, 1, 3),
                    inp = TestArray::random(activation(), {N, 1}, 2);
    expect_deterministic("dbias", [&] {
        const TestArray dweight = TestArray::poisoned({OC, 1}), dbias = TestArray::poisoned({OC});
        matmul_backward_weight(dweight, dbias, dout, inp, false, stream());
        const reference::Values ref = reference::matmul_backward_bias(dout.data(), nullptr, N, OC);
        expect_close("dbias", dbias.fetch(), ref.value, ref.mag, N, OC);
        return dbias.fetch();
    });
}

TEST(Matmul, EmptyMatricesAreValid) {
    const TestArray none = TestArray::poisoned({0, 8}), weight = TestArray::random({4, 8}, 1);
    const TestArray out = TestArray::poisoned({0, 4}), dweight = TestArray::poisoned({4, 8}),
                    dbias = TestArray::poisoned({4});
    matmul_forward(out, none, weight, Tensor{}, stream());
    matmul_backward_weight(dweight, dbias, out, none, false, stream());
    expect_same_bits("dweight", dweight.fetch(), std::vector<double>(32, 0.0));
    expect_same_bits("dbias", dbias.fetch(), std::vector<double>(4, 0.0));
}

TEST(Matmul, InvalidArgumentsAreErrors) {
    const TestArray inp = TestArray::random({3, 8}, 1), weight = TestArray::random({5, 8}, 2);
    const TestArray out = TestArray::poisoned({3, 5}), bias = TestArray::random({4}, 3);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(15), {3, 5});
    const TestArray dweight = TestArray::poisoned({5, 8}), dinp = TestArray::poisoned({3, 7});
    expect_error([&] { matmul_forward(out, inp, weight, bias, stream()); },
                 "matmul_forward: bias is fp32 [4], expected fp32 [5]");
    expect_error([&] { matmul_forward(inp, inp, weight, Tensor{}, stream()); },
                 "matmul_forward: out is fp32 [3, 8], expected fp32 [3, 5]");
    expect_error([&] { matmul_forward(ints, inp, weight, Tensor{}, stream()); },
                 "matmul_forward: out is int32 [3, 5], expected fp32 [3, 5]");
    expect_error([&] { matmul_forward(out, Tensor{}, weight, Tensor{}, stream()); }, "matmul_forward: inp is missing");
    expect_error([&] { matmul_forward_add(out, inp, weight, Tensor{}, inp, stream()); },
                 "matmul_forward_add: add is fp32 [3, 8], expected fp32 [3, 5]");
    const TestArray wide = TestArray::poisoned({3, 9});
    expect_error([&] { matmul_forward_add(out, inp, weight, Tensor{}, wide.tensor().columns(0, 5), stream()); },
                 "matmul_forward_add: the rows of add are 9 elements apart, those of out 5");
    expect_error([&] { matmul_backward_input(dinp, out, weight, false, stream()); },
                 "matmul_backward_input: dinp is fp32 [3, 7], expected fp32 [3, 8]");
    expect_error([&] { matmul_backward_weight(dweight, bias, out, inp, false, stream()); },
                 "matmul_backward_weight: dbias is fp32 [4], expected fp32 [5]");
    expect_error([&] { matmul(out, inp, weight, false, false, false, stream()); },
                 "matmul: b is fp32 [5, 8], expected fp32 [8, 5]");
    expect_error([&] { matmul_forward_activation(Activation::None, out, out, inp, weight, Tensor{}, stream()); },
                 "matmul_forward_activation: no activation function is given");
    expect_error([&] { matmul_forward_activation(Activation::GELU, Tensor{}, out, inp, weight, Tensor{}, stream()); },
                 "matmul_forward_activation: out is missing");
    expect_error(
        [&] { matmul_forward_activation(Activation::ReLU2, Tensor{}, out, inp, weight, Tensor{}, stream(), false); },
        "matmul_forward_activation: out is missing");
    expect_error([&] { matmul_forward_activation(Activation::SwiGLU, out, out, inp, weight, Tensor{}, stream()); },
                 "matmul_forward_activation: pre is fp32 [3, 5], expected an even number of columns");
    const TestArray dact = TestArray::poisoned({3, 8});
    expect_error(
        [&] {
            matmul_backward_activation(Activation::ReLU2, {inp, dact, dact, {}, false}, out, weight, inp, stream());
        },
        "matmul_backward_activation: act is computed for gated functions only");
    expect_error(
        [&] {
            matmul_backward_activation(Activation::GELU, {inp, dact, {}, bias, false}, out, weight, inp, stream());
        },
        "matmul_backward_activation: dbias is fp32 [4], expected fp32 [8]");
    const TestArray fp16 = TestArray::poisoned(DType::F16, {5, 8});
    expect_error([&] { matmul_backward_weight(fp16, Tensor{}, out, inp, false, stream()); },
                 backend_device() == Device::CPU
                     ? "matmul_backward_weight: dweight is fp16 [5, 8], expected fp32 or bf16"
                     : "matmul_backward_weight: dweight is fp16 and dout fp32; a dweight in bf16 needs inputs in bf16");
    const TestArray batch = TestArray::random({2, 3, 5}, 4);
    expect_error([&] { matmul_batched(batch, batch, batch, false, false, 1, 0, Tensor{}, stream()); },
                 "matmul_batched: b is fp32 [2, 3, 5], expected fp32 [2, 5, 5]");
    expect_error([&] { matmul_batched(out, batch, batch, false, true, 1, 0, Tensor{}, stream()); },
                 "matmul_batched: out is fp32 [3, 5], expected fp32 [batch, M, N]");
    const TestArray squares = TestArray::poisoned({2, 3, 3});
    expect_error([&] { matmul_batched(squares, batch, batch, false, true, 1, 1, Tensor{}, stream()); },
                 "matmul_batched: add is missing");
    expect_error(
        [&] {
            matmul_batched(squares, batch, batch.tensor().columns(0, 5).rows(0, 1), false, true, 1, 1, Tensor{},
                           stream());
        },
        "matmul_batched: b is fp32 [1, 3, 5], expected fp32 [2, 3, 5]");
    Tensor column_major = weight;
    column_major.stride[0] = 1;
    column_major.stride[1] = 5;
    expect_error([&] { matmul_forward(out, inp, column_major, Tensor{}, stream()); },
                 "matmul_forward: weight has an inner stride of 5, expected 1");
    Tensor overlapping = weight;
    overlapping.stride[0] = 4;
    expect_error([&] { matmul_forward(out, inp, overlapping, Tensor{}, stream()); },
                 "matmul_forward: weight has a row stride of 4, expected at least 8");
#ifdef USE_CUDA
    expect_error([&] { matmul_forward(out, inp, weight, Tensor{}, Stream{}); },
                 "matmul_forward: the stream has no cuBLASLt handle; create it with create_blas_stream()");
    const TestArray half = TestArray::random(DType::BF16, {5, 8}, 2);
    expect_error([&] { matmul_forward(out, inp, half, Tensor{}, stream()); },
                 "matmul_forward: weight is bf16 [5, 8], expected a fp32 matrix");
#endif
}

#ifdef USE_CUDA
// The bias gradient's vector path, several chunks of rows.
TEST_P(MatmulDTypes, BiasGradientOfManyColumns) {
    const int64_t N = 3001, OC = 520;
    const TestArray dout = TestArray::random(activation(), {N, OC}, 1, 1, 3);
    const TestArray inp = TestArray::random(activation(), {N, 1}, 2);
    const TestArray dweight = TestArray::random({OC, 1}, 3), dbias = TestArray::random({OC}, 4);
    matmul_backward_weight(dweight, dbias, dout, inp, true, stream());
    const reference::Values ref = reference::matmul_backward_bias(dout.data(), dbias.data(), N, OC);
    expect_close("dbias", dbias.fetch(), ref.value, ref.mag, N, OC);
}
#endif
