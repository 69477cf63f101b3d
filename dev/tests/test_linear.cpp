// Linear layers of inference against the oracle: every norm, activation and residual, odd sizes, rows with gaps. And a
// row's result does not depend on the other rows of its batch.
#include "kernels/generation/linear.h"

#include "dev/tests/activation_oracle.h"
#include "dev/tests/packed_fixture.h"
#include "dev/tests/test_util.h"
#include "kernels/nf4.h"
#include "kernels/nf4_values.h"
#ifndef USE_CUDA
#include "kernels/generation/packed_linear.h"
#endif
#include "runtime/device/blas_stream.h"

namespace {

enum class NormKind { None, LayerNorm, RMSNorm };

struct Case {
    int64_t N, C, OC;
    NormKind norm = NormKind::None;
    Activation f = Activation::None;
    bool bias = false, residual = false;
    int64_t gap = 0;
};

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

reference::Values oracle(const Case& c, const std::vector<double>& x, const std::vector<double>& w,
                         const std::vector<double>& bias, const std::vector<double>& residual,
                         const std::vector<double>& norm_weight, const std::vector<double>& norm_bias, double eps) {
    reference::Values in(c.N * c.C);
    in.value = x;
    for (size_t i = 0; i < x.size(); i++) in.mag[i] = std::fabs(x[i]);
    if (c.norm == NormKind::LayerNorm)
        in = reference::layernorm_forward(x.data(), nullptr, norm_weight.data(), norm_bias.data(), eps, c.N, c.C).out;
    if (c.norm == NormKind::RMSNorm)
        in = reference::rmsnorm_forward(x.data(), nullptr, norm_weight.data(), eps, c.N, c.C).out;
    const int64_t columns = c.f == Activation::SwiGLU ? c.OC / 2 : c.OC;
    reference::Values y(c.N * c.OC), out(c.N * columns);
    for (int64_t n = 0; n < c.N; n++)
        for (int64_t o = 0; o < c.OC; o++) {
            reference::Value sum;
            for (int64_t i = 0; i < c.C; i++) {
                const double weight = w[size_t(o * c.C + i)];
                sum.add(in.value[size_t(n * c.C + i)] * weight, in.mag[size_t(n * c.C + i)] * std::fabs(weight));
            }
            if (c.bias) sum.add(bias[size_t(o)]);
            y.set(n * c.OC + o, sum);
        }
    const auto at = [&](int64_t i) { return reference::Value{y.value[size_t(i)], y.mag[size_t(i)]}; };
    for (int64_t n = 0; n < c.N; n++)
        for (int64_t o = 0; o < columns; o++) {
            reference::Value v = activated(c.f, at(n * c.OC + o), at(n * c.OC + o + c.OC - columns));
            if (c.residual) v.add(residual[size_t(n * columns + o)]);
            out.set(n * columns + o, v);
        }
    return out;
}

struct Arrays {
    TestArray inp, weight, bias, residual, norm_weight, norm_bias;
    int64_t columns;
    Arrays(const Case& c, DType T, double residual_mean = 0)
        : inp(TestArray::random(T, {c.N, c.C + c.gap}, 1, 1, c.norm == NormKind::None ? 0 : 0.5)),
          weight(TestArray::random(T, {c.OC, c.C + c.gap}, 2, 1 / std::sqrt(double(c.C)))),
          bias(TestArray::random(T, {c.OC}, 3)),
          residual(TestArray::random(T, {c.N, c.OC + c.gap}, 4, 1, residual_mean)),
          norm_weight(TestArray::random({c.C}, 5, 0.3, 1)),
          norm_bias(TestArray::random({c.C}, 6, 0.3)),
          columns(c.f == Activation::SwiGLU ? c.OC / 2 : c.OC) {}

    InputNorm norm(const Case& c) const {
        InputNorm n;
        if (c.norm == NormKind::None) return n;
        n.weight = norm_weight;
        n.centred = c.norm == NormKind::LayerNorm;
        if (n.centred) n.bias = norm_bias;
        return n;
    }
    LinearWeights weights(const Case& c) const {
        return {weight.tensor().columns(0, c.C), c.bias ? bias.tensor() : Tensor{}};
    }
    void run(const Case& c, const TestArray& out, DType T, bool batch_invariant = false, int64_t first = 0,
             int64_t count = -1) const {
        const int64_t end = count < 0 ? c.N : first + count;
        const TestArray scratch = TestArray::scratch(linear_scratch(c.N, c.C, c.OC, T));
        linear({out.tensor().columns(0, columns).rows(first, end), c.f,
                c.residual ? residual.tensor().columns(0, columns).rows(first, end) : Tensor{}},
               inp.tensor().columns(0, c.C).rows(first, end), norm(c), weights(c), scratch, batch_invariant, stream());
        synchronize(stream());
    }
};

void check(const Case& c, DType T) {
    SCOPED_TRACE(str("N ", c.N, " C ", c.C, " OC ", c.OC, " norm ", int(c.norm), " f ", int(c.f), " gap ", c.gap));
    const Arrays a(c, T);
    const int64_t ld = a.columns + c.gap;
    const reference::Values ref =
        oracle(c, take_columns(a.inp.values(), c.C + c.gap, c.C), take_columns(a.weight.values(), c.C + c.gap, c.C),
               a.bias.values(), take_columns(a.residual.values(), c.OC + c.gap, a.columns), a.norm_weight.values(),
               a.norm_bias.values(), double(1e-5f));
    std::vector<double> got;
    // With batch_invariant a GPU computes up to 8 rows by the GEMV, which it otherwise uses for fewer rows.
    for (const bool batch_invariant : {true, false}) {
        if (batch_invariant && (T == DType::F32 || c.N > LINEAR_SMALL_N)) continue;
        const TestArray out = TestArray::poisoned(T, {c.N, ld});
        a.run(c, out, T, batch_invariant);
        got = take_columns(out.fetch(), ld, a.columns);
        expect_close("out", got, ref.value, ref.mag, c.C, a.columns, T, 3);
        expect_gaps_untouched("out", out.fetch(), ld, a.columns);
    }
    if (c.residual) {  // where it may lie
        const Tensor in_place = a.residual.tensor().columns(0, a.columns);
        linear({in_place, c.f, in_place}, a.inp.tensor().columns(0, c.C), a.norm(c), a.weights(c),
               TestArray::scratch(linear_scratch(c.N, c.C, c.OC, T)), false, stream());
        synchronize(stream());
        expect_same_bits("in place", got, take_columns(a.residual.fetch(), c.OC + c.gap, a.columns));
    }
}

class Linear : public DTypeTest {};

TEST_P(Linear, Sizes) {
    for (const int64_t N : {1, 2, 3, 7, 8, 9, 20})
        for (const auto& [C, OC] :
             {std::pair<int64_t, int64_t>{1, 1}, {15, 5}, {16, 48}, {33, 50}, {64, 97}, {768, 40}, {1000, 12}})
            for (const int64_t gap : {0, 3})
                check({N, C, OC, NormKind::None, Activation::None, true, false, gap}, activation());
}

TEST_P(Linear, NormsActivationsResiduals) {
    for (const int64_t N : {1, 4, 9})
        for (const int64_t C : {24, 50, 320}) {
            for (const NormKind norm : {NormKind::None, NormKind::LayerNorm, NormKind::RMSNorm})
                for (const Activation f : {Activation::None, Activation::GELU, Activation::SwiGLU, Activation::ReLU2})
                    for (const bool bias : {false, true}) check({N, C, 34, norm, f, bias, false, C % 3}, activation());
            check({N, C, 34, NormKind::None, Activation::None, true, true}, activation());
            check({N, C, 34, NormKind::None, Activation::None, false, true, 8}, activation());
        }
}

// The rows of a large model, longer than what a block of a GPU stages at once for all rows of a batch.
TEST_P(Linear, LongRows) {
    check({8, 14336, 20, NormKind::None, Activation::None, false, true}, activation());
    check({3, 8192, 64, NormKind::RMSNorm, Activation::SwiGLU}, activation());
}

// The small-batch GEMM kernels: more rows than the GEMV takes, fewer than the library is good at. Lengths of rows that
// the blocks of a cluster do not divide, and outputs that do not fill a tile.
//
// Rows of one or two outputs are tested without a norm and without SwiGLU's multiplication of outputs. Rounding before
// the sum gives errors of the size of the sum's terms, which expect_close() estimates from all outputs of the row. A
// row with a single sum that cancels would be allowed no error.
TEST_P(Linear, SmallBatch) {
    check({64, 768, 100, NormKind::LayerNorm, Activation::GELU, true}, activation());
    check({33, 1152, 40, NormKind::None, Activation::None, true, true, 8}, activation());
    check({65, 64, 72, NormKind::RMSNorm, Activation::SwiGLU}, activation());
    check({40, 576, 4400, NormKind::None, Activation::ReLU2}, activation());
    check({64, 3072, 70, NormKind::None, Activation::None, true, true}, activation());
    check({63, 2048, 66, NormKind::RMSNorm, Activation::None, false, true}, activation());
    check({12, 4096, 33, NormKind::None, Activation::GELU}, activation());
    check({61, 768, 2304, NormKind::LayerNorm, Activation::None, true}, activation());
    check({20, 1024, 2200, NormKind::RMSNorm, Activation::SwiGLU}, activation());
    for (const int64_t N : {9, 12, 33, 63, 64})
        for (const int64_t C : {8, 64, 72, 776})
            for (const int64_t OC : {2, 50, 74, 2310}) {
                if (OC > 100 && (N != 33 || C > 72)) continue;
                check({N, C, OC, NormKind::None, Activation::SwiGLU}, activation());
                check({N, C, OC - 1, NormKind::None, Activation::GELU, true}, activation());
                if (OC == 2) continue;
                check({N, C, OC - 1, NormKind::LayerNorm, Activation::None, true, true, 8}, activation());
                check({N, C, OC, NormKind::RMSNorm, Activation::SwiGLU, true}, activation());
                check({N, C, OC, NormKind::RMSNorm, Activation::ReLU2}, activation());
            }
}

// Matrices whose rows are too long for the blocks of a cluster, or which have too many: on Hopper GPUs a kernel that
// streams them, one to eight blocks a tile, with sums in a place of their own and in that of the weights. Outputs that
// do not fill a tile, rows that do not fill a stage.
TEST_P(Linear, LargeMatrices) {
    for (const int64_t N : {3, 9, 33, 64}) {
        check({N, 4096, 96, NormKind::None, Activation::SwiGLU, true}, activation());
        check({N, 3144, 144, NormKind::None, Activation::GELU, true}, activation());
        check({N, 8192, 48, NormKind::None, Activation::None, true, true, 8}, activation());
        check({N, 4608, 176, NormKind::RMSNorm, Activation::SwiGLU}, activation());
    }
    check({20, 72, 16896, NormKind::None, Activation::SwiGLU, true}, activation());
    check({17, 200, 25616, NormKind::LayerNorm, Activation::ReLU2}, activation());
    check({5, 8, 33776, NormKind::None, Activation::None, false, true}, activation());
}

// The sizes of two layers with a norm between them, as linear_unscaled() takes them: x = residual + inp·W1ᵀ + bias,
// then f(norm(x)·W2ᵀ + bias).
struct TwoLayers {
    int64_t N, C, middle, OC;
    NormKind norm = NormKind::RMSNorm;
    Activation f = Activation::None;
};

// packing: of W1 and W2, or null. The rows of x have a mean of one and about their standard deviation, 1.7.
void check_unscaled(const TwoLayers& z, const Packing* packing = nullptr) {
    const auto& [N, C, middle, OC, norm, f] = z;
    SCOPED_TRACE(str("N ", N, " C ", C, " middle ", middle, " OC ", OC, " norm ", int(norm), " f ", int(f),
                     packing ? " packed" : ""));
    const DType T = DType::BF16;
    const Case first{N, C, middle, NormKind::None, Activation::None, true, true}, second{N, middle, OC, norm, f, true};
    const Arrays a(first, T, 1), b(second, T);
    std::unique_ptr<HostPacked> host[2];
    std::unique_ptr<DevicePacked> packed[2];
    LinearWeights weights[2] = {a.weights(first), b.weights(second)};
    std::vector<double> decoded[2] = {a.weight.values(), b.weight.values()};
    for (int i = 0; packing && i < 2; i++) {
        const Case& c = i ? second : first;
        host[i] = std::make_unique<HostPacked>(*packing, decoded[i], c.OC, c.C);
        packed[i] = std::make_unique<DevicePacked>(*host[i]);
        weights[i].weight = {};
        weights[i].packed = &*packed[i];
        decoded[i] = host[i]->decoded();
    }
    const TestArray x = TestArray::poisoned(T, {N, middle}), rows = TestArray::poisoned(T, {N, middle}),
                    parts = TestArray::poisoned({unscaled_parts(middle), UNSCALED_MAX_ROWS, 2}),
                    out = TestArray::poisoned(T, {N, b.columns});
    const UnscaledRows between{rows, parts, b.norm(second)};
    ASSERT_TRUE(linear_takes_unscaled(N, weights[1], between.norm, T));
    ASSERT_TRUE(linear_unscaled({x, Activation::None, a.residual}, {a.inp}, weights[0], between, stream()));
    ASSERT_TRUE(linear_unscaled({out, f}, between, weights[1], {}, stream()));
    synchronize(stream());
    const reference::Values ref_x =
        oracle(first, a.inp.values(), decoded[0], a.bias.values(), a.residual.values(), {}, {}, 0);
    expect_close("x", x.fetch(), ref_x.value, ref_x.mag, C, middle, T, packing ? 4 : 3);
    const reference::Values ref = oracle(second, x.fetch(), decoded[1], b.bias.values(), {}, b.norm_weight.values(),
                                         b.norm_bias.values(), double(1e-5f));
    expect_close("out", out.fetch(), ref.value, ref.mag, middle, b.columns, T, 4);
}

// Blocks that have the outputs of all rows and of eight; columns that do not fill a tile; more rows than 32.
TEST_P(Linear, NormsBetweenLayers) {
    if (activation() != DType::BF16) GTEST_SKIP() << "in bf16 only";
    const TestArray weight = TestArray::random(DType::BF16, {64, 64}, 1);
    if (!linear_takes_unscaled(64, {weight}, {}, DType::BF16)) GTEST_SKIP() << "for Hopper GPUs";
    constexpr NormKind LN = NormKind::LayerNorm, RMS = NormKind::RMSNorm;
    for (const int64_t N : {9, 33, 64}) {
        check_unscaled({N, 2048, 2048, 3072});
        check_unscaled({N, 3200, 2112, 2208, RMS, Activation::SwiGLU});
        for (const Packing& packing : ALL_PACKINGS)
            check_unscaled({N, 2048, 1088, 800, RMS, Activation::SwiGLU}, &packing);
    }
    check_unscaled({3, 4096, 2064, 4096, RMS, Activation::GELU});
    check_unscaled({17, 256, 17024, 64});
    for (const NormKind norm : {LN, RMS})
        for (const int64_t N : {3, 12, 33, 64}) {
            check_unscaled({N, 768, 768, 2304, norm});
            check_unscaled({N, 3072, 584, 3072, norm, Activation::GELU});
            check_unscaled({N, 72, 776, 66, norm, Activation::SwiGLU});
            check_unscaled({N, 2048, 40, 130, norm});
        }
}

// What linear_unscaled() does not take, so that linear() is to be called.
TEST_P(Linear, NormsBetweenLayersThatStayApart) {
    if (activation() != DType::BF16) GTEST_SKIP() << "in bf16 only";
    const Case c{16, 4096, 16384, NormKind::LayerNorm};
    const Arrays a(c, DType::BF16);
    EXPECT_FALSE(linear_takes_unscaled(c.N, a.weights(c), a.norm(c), DType::BF16));
    const TestArray out = TestArray::poisoned(DType::BF16, {c.N, c.OC}),
                    parts = TestArray::poisoned({unscaled_parts(c.C), UNSCALED_MAX_ROWS, 2});
    EXPECT_FALSE(linear_unscaled({out}, {a.inp, parts, a.norm(c)}, a.weights(c), {}, stream()));
    expect_error(
        [&] {
            linear_unscaled({out}, {a.inp, {}, a.norm(c)}, a.weights(c), {}, stream());
        },
        "linear_unscaled: inp has a norm, but no parts");
}

// A sequence's bits stay the same while others of the batch end, as long as the same kernel runs. In fp32 that is the
// library, which does not promise it.
TEST_P(Linear, SmallBatchRowsAreIndependent) {
    if (activation() == DType::F32) return;
    for (const Case& c : {Case{64, 768, 70, NormKind::LayerNorm, Activation::GELU, true},
                          Case{64, 768, 2304, NormKind::RMSNorm, Activation::None},
                          Case{64, 3072, 52, NormKind::None, Activation::None, true, true},
                          Case{64, 4096, 416, NormKind::RMSNorm, Activation::SwiGLU}}) {
        const Arrays a(c, activation());
        const TestArray together = TestArray::poisoned(activation(), {c.N, a.columns});
        a.run(c, together, activation());
        for (const int64_t step : {9, 16, 40}) {
            const TestArray apart = TestArray::poisoned(activation(), {c.N, a.columns});
            for (int64_t n = 0; n < c.N; n += step) {
                const int64_t first = std::min(n, c.N - step);
                a.run(c, apart, activation(), false, first, step);
            }
            expect_same_bits(str(step, " rows at a time").c_str(), together.fetch(), apart.fetch());
        }
    }
}

// A row alone has the same bits as in a batch: always on the CPU, with batch_invariant on a GPU.
TEST_P(Linear, RowsAreIndependent) {
    for (const Case& c : {Case{29, 200, 70, NormKind::LayerNorm, Activation::GELU, true},
                          Case{29, 768, 52, NormKind::None, Activation::None, true, true},
                          Case{13, 96, 70, NormKind::RMSNorm, Activation::SwiGLU}}) {
        const Arrays a(c, activation());
        const TestArray together = TestArray::poisoned(activation(), {c.N, a.columns});
        a.run(c, together, activation(), true);
        for (const int64_t step : {1, 2, 5, 11}) {
            const TestArray apart = TestArray::poisoned(activation(), {c.N, a.columns});
            for (int64_t n = 0; n < c.N; n += step) a.run(c, apart, activation(), true, n, std::min(step, c.N - n));
            expect_same_bits(str(step, " rows at a time").c_str(), together.fetch(), apart.fetch());
        }
    }
}

TEST_P(Linear, BitsDoNotDependOnThreads) {
    const Case c{5, 300, 500, NormKind::LayerNorm, Activation::GELU, true};
    const Arrays a(c, activation());
    expect_deterministic("linear", [&] {
        const TestArray out = TestArray::poisoned(activation(), {c.N, a.columns});
        a.run(c, out, activation());
        return out.fetch();
    });
}

// Weights of a Case that are not in T, with all that surrounds a layer, against the oracle on the dequantised weights.
void check_converted(const Case& c, DType T, LinearWeights weights, const std::vector<double>& decoded) {
    SCOPED_TRACE(str("N ", c.N, " C ", c.C, " OC ", c.OC, " norm ", int(c.norm), " f ", int(c.f), " gap ", c.gap));
    const Arrays a(c, T);
    const int64_t ld = a.columns + c.gap;
    const TestArray out = TestArray::poisoned(T, {c.N, ld});
    if (c.bias) weights.bias = a.bias;
    const int64_t bytes = weights.nf4 ? linear_nf4_scratch(c.N, c.C, c.OC, T) : linear_scratch(c.N, c.C, c.OC, T, true);
    linear({out.tensor().columns(0, a.columns), c.f, c.residual ? a.residual.tensor().columns(0, a.columns) : Tensor{}},
           a.inp.tensor().columns(0, c.C), a.norm(c), weights, TestArray::scratch(bytes), false, stream());
    synchronize(stream());
    const reference::Values ref = oracle(c, take_columns(a.inp.values(), c.C + c.gap, c.C), decoded, a.bias.values(),
                                         take_columns(a.residual.values(), c.OC + c.gap, a.columns),
                                         a.norm_weight.values(), a.norm_bias.values(), double(1e-5f));
    // The weights are rounded to T, too. Where x, weights, y and out are rounded, the squared error of a SwiGLU layer
    // is 3.8 times that of one rounding: 0.7 of out, 0.8 of x, 0.8 of the weights, 1.6 of gate and up.
    expect_close("out", take_columns(out.fetch(), ld, a.columns), ref.value, ref.mag, c.C, a.columns, T, 4);
    expect_gaps_untouched("out", out.fetch(), ld, a.columns);
}

// Every kernel of a GPU: GEMV, small batches with and without clusters, and the library.
const std::vector<Case> CONVERTED = [] {
    std::vector<Case> cases;
    for (const int64_t N : {1, 3, 8, 9, 17, 40, 64, 66})
        for (const int64_t C : {64, 448}) {
            for (const NormKind norm : {NormKind::None, NormKind::LayerNorm, NormKind::RMSNorm})
                for (const Activation f : {Activation::None, Activation::GELU, Activation::SwiGLU})
                    cases.push_back({N, C, 70, norm, f, N % 2 == 0});
            cases.push_back({N, C, 50, NormKind::None, Activation::None, true, true});
            cases.push_back({N, C, 50, NormKind::RMSNorm, Activation::None, true, true, 3});
        }
    for (const int64_t N : {1, 12, 64, 65}) {
        cases.push_back({N, 128, 13000, NormKind::RMSNorm, Activation::SwiGLU, true});
        cases.push_back({N, 4096, 96, NormKind::None, Activation::None, true, true, 8});
    }
    return cases;
}();

TEST_P(Linear, PackedWeightsWithNormsActivationsResiduals) {
    for (const Packing packing : ALL_PACKINGS) {
        if (backend_device() == Device::CPU && packing != Packing::Fp8) continue;  // x is quantised: see below
        for (const Case& c : CONVERTED) {
            const HostPacked host(packing, TestArray::random({c.OC, c.C}, 7, 1 / std::sqrt(double(c.C))).values(), c.OC,
                                  c.C);
            const DevicePacked device(host);
            LinearWeights weights;
            weights.packed = &device;
            check_converted(c, activation(), weights, host.decoded());
        }
    }
}

// A weight of NF4 matrices below each other, on the device, and dequantised in fp32.
struct Nf4Arrays {
    std::vector<std::unique_ptr<TestArray>> arrays;
    Nf4Matrix matrix;
    std::vector<double> decoded;

    Nf4Arrays(const std::vector<int64_t>& rows, int64_t C) : matrix{0, C, {}} {
        for (const int64_t part : rows) add(part, C);
    }
    void add(int64_t rows, int64_t C) {
        const int64_t n = rows * C;
        const std::vector<double> values =
            TestArray::random({rows, C}, 11 + uint64_t(matrix.rows), 1 / std::sqrt(double(C))).values();
        const std::vector<float> w(values.begin(), values.end());
        std::vector<uint8_t> codes(size_t(n / 2)), absmax_codes(size_t(nf4_blocks(n)));
        std::vector<float> group_absmax(size_t(nf4_groups(n))), mean(1);
        nf4_quantise({host_tensor(codes.data(), {n / 2}), host_tensor(absmax_codes.data(), {nf4_blocks(n)}),
                      host_tensor(group_absmax.data(), {nf4_groups(n)}), host_tensor(mean.data(), {1})},
                     host_tensor(w.data(), {n}));
        const auto keep = [&](TestArray array) {
            arrays.push_back(std::make_unique<TestArray>(std::move(array)));
            return arrays.back()->tensor();
        };
        const Nf4Weights device{keep(TestArray::bytes(codes.data(), n / 2)),
                                keep(TestArray::bytes(absmax_codes.data(), nf4_blocks(n))),
                                keep(TestArray::of({group_absmax.begin(), group_absmax.end()}, {nf4_groups(n)})),
                                keep(TestArray::of({mean[0]}, {1}))};
        matrix.parts.push_back({matrix.rows, rows, device});
        matrix.rows += rows;
        const std::array<float, 256> of_absmax = nf4_absmax_values();
        for (int64_t i = 0; i < n; i++) {
            const int64_t block = i / NF4_BLOCK;
            const double absmax =
                double(of_absmax[absmax_codes[size_t(block)]]) * double(group_absmax[size_t(block / NF4_GROUP)]) +
                double(mean[0]);
            const uint8_t pair = codes[size_t(i / 2)];
            decoded.push_back(double(NF4_VALUES[i % 2 ? pair & 15 : pair >> 4]) * absmax);
        }
    }
};

TEST_P(Linear, Nf4Weights) {
    for (const Case& c : CONVERTED) {
        const int64_t half = c.OC / 2;
        for (const std::vector<int64_t>& parts :
             {std::vector<int64_t>{c.OC}, std::vector<int64_t>{half, half - 9, c.OC - 2 * half + 9}}) {
            if (c.OC > 100 && (parts.size() > 1 || c.N > 12)) continue;
            const Nf4Arrays a(parts, c.C);
            LinearWeights weights;
            weights.nf4 = &a.matrix;
            check_converted(c, activation(), weights, a.decoded);
        }
    }
}

// More rows than are dequantised at a time.
TEST_P(Linear, WeightsOfSeveralTiles) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "a tile is what a GPU dequantises at a time";
    if (activation() != DType::BF16) GTEST_SKIP() << "36 million weights take a while, and one dtype is enough";
    const Case c{70, 8192, 4400};
    const TestArray inp = TestArray::random(activation(), {c.N, c.C}, 1);
    const HostPacked host(Packing::Int8, TestArray::random({c.OC, c.C}, 7, 0.01).values(), c.OC, c.C);
    const DevicePacked device(host);
    const Nf4Arrays nf4({c.OC}, c.C);
    for (const bool packed : {false, true}) {
        LinearWeights weights, in_dtype;
        const TestArray dense = TestArray::of(activation(), packed ? host.decoded() : nf4.decoded, {c.OC, c.C}),
                        out = TestArray::poisoned(activation(), {c.N, c.OC}),
                        expected = TestArray::poisoned(activation(), {c.N, c.OC}),
                        scratch = TestArray::scratch(linear_nf4_scratch(c.N, c.C, c.OC, activation()));
        if (packed)
            weights.packed = &device;
        else
            weights.nf4 = &nf4.matrix;
        in_dtype.weight = dense;
        linear({out}, inp, {}, weights, scratch, false, stream());
        linear({expected}, inp, {}, in_dtype, scratch, false, stream());
        synchronize(stream());
        const std::vector<double> ref = expected.fetch();
        const std::vector<double> mag(ref.size(), double(c.C) * 0.8 * 0.008);  // E|x|·E|w|
        expect_close("out", out.fetch(), ref, mag, c.C, c.OC, activation(), 2);
    }
}

// Packed weights against float64 on the dequantised ones.
//
// On the CPU x is quantised for Int8 and Int4: a value moves by at most half a step, |x|max/254 of its group, and by
// fp32 roundings of x/d and d that are 2⁻¹⁶ of that. So y moves by no more than
//   Σ_g |x|max(g)/254 · Σ_{c in g} |w[o, c]|                                                              (bound)
// and the roundings are independent, each of variance step²/12, so that the RMS over many outputs is
//   √(Σ_g (|x|max(g)/127)²/12 · Σ_{c in g} w²)                                                            (expected)
// which must hold to 15%: a code that is off by one, or a scale of the wrong group, gives more.
struct PackedCase {
    Packing packing;
    int64_t N, C, OC;
    bool bias = false, residual = false;
};

struct PackedArrays {
    PackedCase c;
    TestArray inp, bias, residual;
    HostPacked host;
    DevicePacked weight;

    PackedArrays(const PackedCase& which, DType T)
        : c(which),
          inp(TestArray::random(T, {c.N, c.C}, 1)),
          bias(TestArray::random(T, {c.OC}, 3)),
          residual(TestArray::random(T, {c.N, c.OC}, 4)),
          host(c.packing, TestArray::random({c.OC, c.C}, 2, 1 / std::sqrt(double(c.C))).values(), c.OC, c.C),
          weight(host) {}
    std::vector<double> run(DType T, bool batch_invariant = false, int64_t first = 0, int64_t count = -1) const {
        const int64_t N = count < 0 ? c.N : count;
        const TestArray out = TestArray::poisoned(T, {N, c.OC});
        LinearWeights weights;
        weights.packed = &weight;
        if (c.bias) weights.bias = bias;
        linear({out, Activation::None, c.residual ? residual.tensor().rows(first, first + N) : Tensor{}},
               inp.tensor().rows(first, first + N), {}, weights,
               TestArray::scratch(linear_scratch(N, c.C, c.OC, T, true)), batch_invariant, stream());
        synchronize(stream());
        return out.fetch();
    }
};

void check_packed(const PackedCase& c, DType T) {
    SCOPED_TRACE(str(name_of(c.packing), " N ", c.N, " C ", c.C, " OC ", c.OC, " bias ", c.bias));
    const PackedArrays a(c, T);
    const std::vector<double> got = a.run(T), w = a.host.decoded(), &x = a.inp.values();
    const bool quantised = backend_device() == Device::CPU && c.packing != Packing::Fp8;
    reference::Values ref(c.N * c.OC);
    double error = 0, expected = 0;
    for (int64_t n = 0; n < c.N; n++)
        for (int64_t o = 0; o < c.OC; o++) {
            reference::Value sum;
            double bound = 0, variance = 0;
            for (int64_t g = 0; g < c.C; g += PACKED_GROUP) {
                double largest = 0, magnitudes = 0, squares = 0;
                for (int64_t i = g; i < g + PACKED_GROUP; i++) {
                    const double xi = x[size_t(n * c.C + i)], wi = w[size_t(o * c.C + i)];
                    sum.add(xi * wi, std::fabs(xi * wi));
                    largest = std::max(largest, std::fabs(xi));
                    magnitudes += std::fabs(wi);
                    squares += wi * wi;
                }
                bound += largest / 254 * magnitudes;
                variance += largest / 127 * largest / 127 / 12 * squares;
            }
            if (c.bias) sum.add(a.bias.values()[size_t(o)]);
            if (c.residual) sum.add(a.residual.values()[size_t(n * c.OC + o)]);
            ref.set(n * c.OC + o, sum);
            const double off = got[size_t(n * c.OC + o)] - sum.value;
            error += off * off;
            expected += variance;
            if (quantised) {
                EXPECT_LE(std::fabs(off), bound * (1 + 0x1p-15) + 1e-6 * sum.mag) << n << ", " << o;
            }
        }
    if (!quantised) return expect_close("out", got, ref.value, ref.mag, c.C, c.OC, T, 2);
    if (c.N * c.OC >= 500) {
        EXPECT_LT(std::sqrt(error), 1.15 * std::sqrt(expected));
    }
}

// Groups that do and don't fill blocks of 16, outputs that do and don't fill panels.
TEST_P(Linear, PackedWeights) {
    for (const Packing packing : ALL_PACKINGS) {
        for (const int64_t N : {1, 2, 5, 7, 12, 33})
            for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{32, 1},
                                        {64, 97},
                                        {288, 34},
                                        {512, 48},
                                        {576, 1536},
                                        {800, 70},
                                        {1536, 31}})
                check_packed({packing, N, C, OC, N % 2 == 1, C > 500}, activation());
        // Up to 64 rows: the columns divided by 1, 2, 4 and 8 blocks, and the last of them short.
        for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{288, 130}, {1056, 129}, {2080, 300}, {4128, 64}})
            check_packed({packing, 64, C, OC, OC % 2 == 1, C > 500}, activation());
    }
    check_packed({Packing::Int4, 3, 8192, 100}, activation());
    check_packed({Packing::Int8, 1, 14336, 60, true}, activation());
}

TEST_P(Linear, PackedRowsAreIndependent) {
    for (const Packing packing : ALL_PACKINGS)
        for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{96, 70}, {768, 52}, {1120, 33}}) {
            const PackedArrays a({packing, 29, C, OC, true, true}, activation());
            const std::vector<double> together = a.run(activation(), true);
            for (const int64_t step : {1, 2, 5, 11}) {
                std::vector<double> apart;
                for (int64_t n = 0; n < 29; n += step)
                    for (const double y : a.run(activation(), true, n, std::min(step, 29 - n))) apart.push_back(y);
                expect_same_bits(str(name_of(packing), ", ", step, " rows at a time").c_str(), together, apart);
            }
            expect_deterministic(name_of(packing), [&] { return a.run(activation()); });
        }
}

// The small-batch GEMMs of a GPU: a row has the same bits with 9 rows as with 64, divided columns or not.
TEST_P(Linear, PackedSmallBatchRowsAreIndependent) {
    if (activation() == DType::F32 && backend_device() != Device::CPU) return;  // the library
    for (const Packing packing : ALL_PACKINGS)
        for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{96, 70}, {3072, 52}, {416, 2310}}) {
            const PackedArrays a({packing, 64, C, OC, true, true}, activation());
            const std::vector<double> together = a.run(activation());
            for (const int64_t step : {9, 16, 33, 40}) {
                std::vector<double> apart(together.size());
                for (int64_t n = 0; n < 64; n += step) {
                    const int64_t first = std::min(n, 64 - step);
                    const std::vector<double> rows = a.run(activation(), false, first, step);
                    std::copy(rows.begin(), rows.end(), apart.begin() + first * OC);
                }
                expect_same_bits(str(name_of(packing), ", ", step, " rows at a time").c_str(), together, apart);
            }
        }
}

// More blocks than a GPU runs at once, and columns for more stages than a block's ring has.
TEST_P(Linear, PackedLargeMatrices) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "a GPU's kernel has blocks of 128 outputs";
    if (activation() == DType::F32) GTEST_SKIP() << "fp32 is the library's";
    for (const Packing packing : ALL_PACKINGS) {
        check_packed({packing, 12, 544, 17100, true}, activation());
        check_packed({packing, 64, 96, 34000, false, true}, activation());
        check_packed({packing, 64, 4128, 2200, true, true}, activation());
    }
}

#ifndef USE_CUDA
// Weights in bf16 give the bits of their copy in fp32. Any length of rows.
TEST(PackedLinear, Bf16HasTheBitsOfItsCopyInFp32) {
    for (const int64_t N : {1, 2, 9})
        for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{1, 5}, {15, 7}, {100, 50}, {576, 97}, {1000, 3}}) {
            const PackedArrays a({Packing::Bf16, N, C, OC, true, true}, DType::F32);
            const TestArray copy = TestArray::of(a.host.decoded(), {OC, C}), out = TestArray::poisoned({N, OC});
            linear({out, Activation::None, a.residual}, a.inp, {}, {copy, a.bias},
                   TestArray::scratch(linear_scratch(N, C, OC, DType::F32)), false, stream());
            expect_same_bits(str("N ", N, " C ", C).c_str(), a.run(DType::F32), out.fetch());
        }
}

// Every instruction set that this CPU has gives the same bits.
TEST(PackedLinear, BitsDoNotDependOnTheInstructions) {
    int tried = 0;
    for (const char* instructions : {"AVX2", "AVX-512 VNNI", "AMX"}) {
        if (!packed_linear_use(instructions)) {
            std::cout << "skipped: this CPU or build has no " << instructions << "\n";
            continue;
        }
        tried++;
        for (const Packing packing : {Packing::Int8, Packing::Int4})
            for (const int64_t N : {1, 2, 6, 17, 40})
                for (const auto& [C, OC] : {std::pair<int64_t, int64_t>{32, 3}, {576, 100}, {1504, 65}}) {
                    const PackedArrays a({packing, N, C, OC, true}, DType::F32);
                    packed_linear_use(instructions);
                    const std::vector<double> got = a.run(DType::F32);
                    ASSERT_TRUE(packed_linear_use("C++"));
                    expect_same_bits(str(instructions, " ", name_of(packing), " ", N, " ", C).c_str(), got,
                                     a.run(DType::F32));
                }
    }
    packed_linear_use("");
    if (!tried) GTEST_SKIP() << "this CPU has the plain C++ kernels alone";
}

// Int8 codes of −128, which other programs may write, and inputs that are not finite.
TEST(PackedLinear, ExtremeCodes) {
    const int64_t C = 64, OC = 40;
    HostPacked host(Packing::Int8, std::vector<double>(size_t(OC * C), 1.0), OC, C);
    for (int64_t o = 0; o < OC; o++) std::fill_n(host.row(o), C, uint8_t(0x80));
    const DevicePacked weight(host);
    LinearWeights weights;
    weights.packed = &weight;
    for (const char* instructions : {"C++", "AVX2", "AVX-512 VNNI", "AMX"}) {
        if (!packed_linear_use(instructions)) continue;
        for (const int64_t N : {1, 3}) {
            for (const double x : {1.0, -1.0, 0.0, double(INFINITY), double(NAN)}) {
                const TestArray inp = TestArray::of(std::vector<double>(size_t(N * C), x), {N, C}),
                                out = TestArray::poisoned({N, OC});
                linear({out}, inp, {}, weights, TestArray::scratch(linear_scratch(N, C, OC, DType::F32, true)), false,
                       stream());
                for (const double y : out.fetch()) {
                    if (std::isfinite(x))
                        EXPECT_NEAR(y, -128 * host.scale(0, 0) * double(C) * x, 1e-4) << instructions << " " << x;
                    else
                        EXPECT_FALSE(std::isfinite(y)) << instructions << " " << x;
                }
            }
        }
    }
    packed_linear_use("");
}
#endif

INSTANTIATE_DTYPES(Linear);

TEST(LinearArguments, InvalidArgumentsAreErrors) {
    const TestArray out = TestArray::poisoned({2, 5}), inp = TestArray::random({2, 4}, 1),
                    weight = TestArray::random({5, 4}, 2), scratch = TestArray::scratch(4096);
    const auto call = [&](Activation f, Tensor residual, Tensor bias = {}) {
        linear({out, f, residual}, inp, {}, {weight, bias}, scratch, false, stream());
    };
    expect_error([&] { call(Activation::SwiGLU, {}); },
                 "linear: weight has 5 rows; SwiGLU needs an even number, half for gate and half for up");
    expect_error([&] { call(Activation::GELU, out); }, "linear: an activation and a residual can't be combined");
    expect_error([&] { call(Activation::None, {}, inp); }, "linear: bias is fp32 [2, 4], expected fp32 [5]");
    expect_error(
        [&] { linear({out}, inp, {}, {weight}, TestArray::scratch(8), false, stream()); },
        str("linear: scratch is uint8 [8], expected uint8 [", linear_scratch(2, 4, 5, DType::F32), "] or more"));
}

}  // namespace
