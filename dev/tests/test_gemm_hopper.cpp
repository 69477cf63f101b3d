// kernels/gemm_hopper.h with each size of cluster, through the matmuls that call it: against the oracle at the edges of
// tiles, with more tiles than blocks, and bit by bit against the separate kernels of activation functions.
#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/low_rank_layer.h"
#include "dev/tests/test_util.h"
#include "kernels/activation.h"
#include "kernels/matmul.h"
#include "runtime/device/blas_stream.h"
#ifdef HAVE_SM90A
#include "kernels/gemm_hopper.h"
#include "runtime/device/blas.h"
#include "runtime/device/target.h"

namespace {

constexpr DType T = DType::BF16;

// Tiles have 128 x 192 sums and steps of 64: parts of tiles, of steps and of clusters, and at the end more tiles than
// an H100 has warpgroups (33·9 > 2·132).
constexpr int64_t SIZES[][3] = {{1, 8, 8},      {130, 200, 136}, {128, 192, 64},
                                {257, 392, 72}, {300, 776, 264}, {4100, 1544, 8}};

struct ClusterStream {
    Stream stream = create_blas_stream();
    explicit ClusterStream(GemmKernel kernel) { blas_of("test", stream).only_kernel = kernel; }
    ClusterStream(const ClusterStream&) = delete;
    ~ClusterStream() { destroy_stream(stream); }
    operator Stream() const { return stream; }
};

class HopperGemm : public testing::TestWithParam<GemmKernel> {
  protected:
    void SetUp() override {
        GemmKey key;
        key.M = key.N = key.K = key.ld_out = key.ld_a = key.ld_b = 64;
        key.align_out = key.align_a = key.align_b = 16;
        key.dtype = key.out_dtype = T;
        if (!hopper_gemm_takes(key)) GTEST_SKIP() << "not a Hopper GPU";
    }
    // Every GEMM that the test ran was one for hopper_gemm(), so that none fell back to the library.
    void TearDown() override {
        if (IsSkipped()) return;
        const Blas& blas = blas_of("test", stream);
        EXPECT_FALSE(blas.plans.empty());
        for (const auto& [key, plan] : blas.plans)
            EXPECT_TRUE(hopper_gemm_takes(key)) << "M " << key.M << " N " << key.N << " K " << key.K;
    }
    const ClusterStream stream{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Clusters, HopperGemm, testing::Values(GemmKernel::Hopper1, GemmKernel::Hopper2),
                         [](const auto& test) { return test.param == GemmKernel::Hopper1 ? "One" : "Two"; });

// A matrix whose rows are 8 columns further apart than they are long.
struct Gapped {
    int64_t rows, columns;
    TestArray array;
    Gapped(int64_t N, int64_t C) : rows(N), columns(C), array(TestArray::poisoned(T, {N, C + 8})) {}
    Gapped(int64_t N, int64_t C, uint64_t seed, double scale)
        : rows(N), columns(C), array(TestArray::of(T, with_gaps(N, C, seed, scale), {N, C + 8})) {}
    static std::vector<double> with_gaps(int64_t N, int64_t C, uint64_t seed, double scale) {
        std::vector<double> values = TestArray::random(T, {N, C + 8}, seed, scale).values();
        for (size_t i = 0; i < values.size(); i++)
            if (int64_t(i) % (C + 8) >= C) values[i] = std::numeric_limits<double>::quiet_NaN();
        return values;
    }
    Tensor view() const { return array.tensor().columns(0, columns); }
    std::vector<double> fetch() const {
        const std::vector<double> all = array.fetch();
        expect_gaps_untouched("rows", all, columns + 8, columns);
        return take_columns(all, columns + 8, columns);
    }
    std::vector<double> values() const { return take_columns(array.values(), columns + 8, columns); }
};

double weight_scale(int64_t K) {
    return 2 / std::sqrt(double(K));
}

constexpr Activation ACTIVATIONS[] = {Activation::GELU, Activation::ReLU2, Activation::SwiGLU};

}  // namespace

TEST_P(HopperGemm, LinearLayersMatchOracle) {
    for (const auto& s : SIZES)
        for (const bool biased : {false, true}) {
            const int64_t N = s[0], OC = s[1], C = s[2];
            SCOPED_TRACE(str("N ", N, " OC ", OC, " C ", C, " bias ", biased));
            const TestArray inp = TestArray::random(T, {N, C}, 1), bias = TestArray::random(T, {OC}, 3);
            const TestArray weight = TestArray::random(T, {OC, C}, 2, weight_scale(C));
            const Gapped out(N, OC), dinp(N, C);
            matmul_forward(out.view(), inp, weight, biased ? bias.tensor() : Tensor{}, stream);
            reference::Values ref =
                reference::matmul_forward(inp.data(), weight.data(), biased ? bias.data() : nullptr, N, C, OC);
            expect_close("out", out.fetch(), ref.value, ref.mag, C, OC, T);

            const Gapped added(N, OC, 5, 1), sum(N, OC);
            const std::vector<double> earlier = added.values();
            const Tensor b = biased ? bias.tensor() : Tensor{};
            matmul_forward_add(sum.view(), inp, weight, b, added.view(), stream);
            ref = reference::matmul(inp.data(), weight.data(), false, true, earlier.data(),
                                    biased ? bias.data() : nullptr, N, OC, C);
            expect_close("sum", sum.fetch(), ref.value, ref.mag, C, OC, T);
            matmul_forward_add(added.view(), inp, weight, b, added.view(), stream);
            expect_same_bits("sum in place", added.fetch(), sum.fetch());
            if (biased) continue;
            const TestArray dout = TestArray::random(T, {N, OC}, 4);
            matmul_backward_input(dinp.view(), dout, weight, false, stream);
            ref = reference::matmul_backward_input(dout.data(), weight.data(), nullptr, N, C, OC);
            expect_close("dinp", dinp.fetch(), ref.value, ref.mag, OC, C, T);
            const Gapped total(N, C, 6, 1);
            const std::vector<double> before = total.values();
            matmul_backward_input(total.view(), dout, weight, true, stream);
            ref = reference::matmul_backward_input(dout.data(), weight.data(), before.data(), N, C, OC);
            expect_close("dinp added to", total.fetch(), ref.value, ref.mag, OC, C, T);
        }
}

// pre against the oracle, the activation function against its own kernel, and pre alone.
TEST_P(HopperGemm, ActivationsHaveTheBitsOfTheirKernels) {
    for (const auto& s : SIZES)
        for (const Activation f : ACTIVATIONS)
            for (const bool biased : {false, true}) {
                const int64_t N = s[0], I = s[1], C = s[2], OC = activation_inputs(f, I);
                SCOPED_TRACE(str("N ", N, " I ", I, " C ", C, " activation ", int(f), " bias ", biased));
                const TestArray inp = TestArray::random(T, {N, C}, 1), bias = TestArray::random(T, {OC}, 3);
                const TestArray weight = TestArray::random(T, {OC, C}, 2, weight_scale(C));
                const Tensor b = biased ? bias.tensor() : Tensor{};
                const Gapped out(N, I), pre(N, OC);
                matmul_forward_activation(f, out.view(), pre.view(), inp, weight, b, stream);
                const reference::Values ref =
                    reference::matmul_forward(inp.data(), weight.data(), biased ? bias.data() : nullptr, N, C, OC);
                expect_close("pre", pre.fetch(), ref.value, ref.mag, C, OC, T);
                const TestArray expected = TestArray::poisoned(T, {N, I});
                activation_forward(f, expected, pre.view(), stream);
                expect_same_bits("out", out.fetch(), expected.fetch());
                const Gapped without(N, I), scratch(N, OC);
                matmul_forward_activation(f, without.view(), scratch.view(), inp, weight, b, stream, false);
                expect_same_bits("out without pre", without.fetch(), out.fetch());
                if (f == Activation::GELU) continue;
                const TestArray alone = TestArray::poisoned(T, {N, OC});
                matmul_forward_activation(f, {}, alone, inp, weight, b, stream);
                expect_same_bits("pre alone", alone.fetch(), pre.fetch());
            }
}

TEST_P(HopperGemm, ActivationGradientsMatchOracle) {
    for (const auto& s : SIZES)
        for (const Activation f : ACTIVATIONS)
            for (const bool accumulate : {false, true}) {
                const int64_t N = s[0], I = s[1], OC = s[2], C = activation_inputs(f, I);
                SCOPED_TRACE(str("N ", N, " I ", I, " OC ", OC, " activation ", int(f), " accumulate ", accumulate));
                const TestArray dout = TestArray::random(T, {N, OC}, 1);
                const TestArray weight = TestArray::random(T, {OC, I}, 2, weight_scale(OC));
                const Gapped pre(N, C, 3, 2), dpre(N, C);
                const TestArray dact = TestArray::poisoned(T, {N, I}), act = TestArray::poisoned(T, {N, I});
                const TestArray dbias = accumulate ? TestArray::random({C}, 5) : TestArray::poisoned({C});
                const bool gated = is_gated(f), keeps = gated && accumulate;
                matmul_backward_activation(
                    f, {dpre.view(), dact, keeps ? act.tensor() : Tensor{}, dbias.tensor(), accumulate}, dout, weight,
                    pre.view(), stream);

                // |f'(pre)| times the error of dact, and the error of f' itself.
                const reference::Values d =
                    reference::matmul_backward_input(dout.data(), weight.data(), nullptr, N, I, OC);
                const std::vector<double> x = pre.values();
                const auto gradient = [&](const std::vector<double>& of) {
                    return reference::activation_backward(f, of.data(), x.data(), N, I);
                };
                const reference::Values ref = gradient(d.value), of_errors = gradient(d.mag);
                expect_close("dpre", dpre.fetch(), ref.value, of_errors.mag, OC, C, T);

                std::vector<double> sum(static_cast<size_t>(C)), mag(sum.size());
                for (size_t i = 0; i < sum.size(); i++) {
                    if (accumulate) {
                        sum[i] = dbias.values()[i];
                        mag[i] = std::fabs(sum[i]);
                    }
                    for (size_t n = 0; n < size_t(N); n++) {
                        sum[i] += ref.value[n * sum.size() + i];
                        mag[i] += of_errors.mag[n * sum.size() + i];
                    }
                }
                if (gated)  // a kernel of its own, which sums what is stored
                    expect_sum_of_rows("dbias", dbias, dpre.fetch(), accumulate, N, C);
                else
                    expect_close("dbias", dbias.fetch(), sum, mag, N + OC, C);
                if (!keeps) continue;
                const TestArray expected = TestArray::poisoned(T, {N, I});
                activation_forward(Activation::SwiGLU, expected, pre.view(), stream);
                expect_same_bits("act", act.fetch(), expected.fetch());
            }
}

// As training calls it: SwiGLU's gradient overwrites its input, and act overwrites dact.
TEST_P(HopperGemm, SwigluGradientInPlaceHasTheSameBits) {
    const int64_t N = 4100, I = 1544, OC = 72;
    const TestArray dout = TestArray::random(T, {N, OC}, 1),
                    weight = TestArray::random(T, {OC, I}, 2, weight_scale(OC));
    const TestArray pre = TestArray::random(T, {N, 2 * I}, 3, 2), dpre = TestArray::poisoned(T, {N, 2 * I});
    const TestArray dact = TestArray::poisoned(T, {N, I}), act = TestArray::poisoned(T, {N, I});
    matmul_backward_activation(Activation::SwiGLU, {dpre, dact, {}, {}, false}, dout, weight, pre, stream);
    const std::vector<double> expected = dpre.fetch();
    matmul_backward_activation(Activation::SwiGLU, {dpre, dact, act, {}, false}, dout, weight, pre, stream);
    expect_same_bits("dpre with act", dpre.fetch(), expected);
    matmul_backward_activation(Activation::SwiGLU, {pre, dact, dact, {}, false}, dout, weight, pre, stream);
    expect_same_bits("dpre in place", pre.fetch(), expected);
    expect_same_bits("act over dact", dact.fetch(), act.fetch());
}

// hopper_gemm() stores act in contiguous rows only: others are left to two kernels.
TEST(HopperGemmClusters, ActWithGapsHasTheSameBits) {
    const int64_t N = 130, I = 200, OC = 136;
    const ClusterStream on{GemmKernel::Hopper1};
    const TestArray dout = TestArray::random(T, {N, OC}, 1),
                    weight = TestArray::random(T, {OC, I}, 2, weight_scale(OC));
    const TestArray pre = TestArray::random(T, {N, 2 * I}, 3, 2), dpre = TestArray::poisoned(T, {N, 2 * I});
    const TestArray dact = TestArray::poisoned(T, {N, I}), expected = TestArray::poisoned(T, {N, I});
    const Gapped act(N, I);
    matmul_backward_activation(Activation::SwiGLU, {dpre, dact, act.view(), {}, false}, dout, weight, pre, on);
    activation_forward(Activation::SwiGLU, expected, pre, on);
    expect_same_bits("act", act.fetch(), expected.fetch());
}

// alpha belongs to the epilogue.
TEST(HopperGemmClusters, ScaleTheSum) {
    const int64_t M = 130, N = 200, K = 72;
    const ClusterStream on{GemmKernel::Hopper2};
    const TestArray a = TestArray::random(T, {M, K}, 1), b = TestArray::random(T, {N, K}, 2);
    const TestArray out = TestArray::poisoned(T, {M, N});
    matmul(out, a, b, false, true, false, on, 0.25f);
    reference::Values ref = reference::matmul_forward(a.data(), b.data(), nullptr, M, K, N);
    for (double& v : ref.value) v *= 0.25;
    for (double& m : ref.mag) m *= 0.25;
    expect_close("out", out.fetch(), ref.value, ref.mag, K, N, T);
}

namespace {

// Adapters whose ranks are parts of a step, steps, and more than one: {parts, R}.
constexpr int64_t RANKS[][2] = {{1, 8}, {1, 16}, {3, 16}, {1, 64}, {3, 32}};

// Layers with `factor` times the outputs of SIZES.
template <typename F>
void for_each_layer(int64_t factor, F f) {
    for (const auto& s : SIZES)
        for (const auto& [P, R] : RANKS) {
            if (s[0] > 1000 && P * R != 48) continue;  // the oracle takes a second
            const int64_t OC = factor * s[1];
            SCOPED_TRACE(str("N ", s[0], " OC ", OC, " C ", s[2], " parts ", P, " R ", R));
            f(LowRankLayer(T, s[0], s[2], OC, R, whole_parts(OC, P)));
        }
}

// All that a stream ran were GEMMs with the adapters inside.
void expect_extended(Stream stream) {
    for (const auto& [key, plan] : blas_of("test", stream).plans) EXPECT_GT(key.K2, 0) << "M " << key.M;
}

}  // namespace

// Summed in fp32 with the product of the weight, and rounded once.
TEST_P(HopperGemm, AdaptersContinueTheInnerDimension) {
    for_each_layer(1, [&](const LowRankLayer& x) {
        for (const bool biased : {false, true}) {
            const Gapped out(x.N, x.OC);
            matmul_low_rank_forward(out.view(), x.inp, x.weight, biased ? x.bias.tensor() : Tensor{}, x.low_rank(),
                                    stream);
            const reference::Values ref = x.forward(biased);
            expect_close("out", out.fetch(), ref.value, ref.mag, x.C + x.ranks, x.OC, T);
        }
        for (const bool accumulate : {false, true}) {
            const Gapped dinp = accumulate ? Gapped(x.N, x.C, 9, 1) : Gapped(x.N, x.C);
            const std::vector<double> before = accumulate ? dinp.values() : std::vector<double>{};
            matmul_low_rank_backward_input(dinp.view(), x.dout, x.weight, x.gradient(), accumulate, stream);
            const reference::Values ref = x.backward_input(accumulate ? before.data() : nullptr);
            expect_close("dinp", dinp.fetch(), ref.value, ref.mag, x.OC + x.ranks, x.C, T);
        }
    });
    expect_extended(stream);
}

TEST_P(HopperGemm, AdaptersBesideActivations) {
    for (const Activation f : ACTIVATIONS)
        for_each_layer(activation_inputs(f, 1), [&, f = f](const LowRankLayer& x) {
            SCOPED_TRACE(str("activation ", int(f)));
            const int64_t I = x.OC / activation_inputs(f, 1), columns = activation_inputs(f, x.C);
            const Gapped out(x.N, I), pre(x.N, x.OC);
            matmul_low_rank_forward_activation(f, out.view(), pre.view(), x.inp, x.weight, x.bias, x.low_rank(),
                                               stream);
            const reference::Values ref = x.forward(true);
            expect_close("pre", pre.fetch(), ref.value, ref.mag, x.C + x.ranks, x.OC, T);
            const TestArray expected = TestArray::poisoned(T, {x.N, I});
            activation_forward(f, expected, pre.view(), stream);
            expect_same_bits("out", out.fetch(), expected.fetch());

            const Gapped before(x.N, columns, 8, 2), dpre(x.N, columns);
            const TestArray dact = TestArray::poisoned(T, {x.N, x.C});
            matmul_low_rank_backward_activation(f, {dpre.view(), dact, {}, {}, false}, x.dout, x.weight, before.view(),
                                                x.gradient(), stream);
            const reference::Values d = x.backward_input(nullptr);
            const std::vector<double> values = before.values();
            const auto gradient = [&](const std::vector<double>& of) {
                return reference::activation_backward(f, of.data(), values.data(), x.N, x.C);
            };
            expect_close("dpre", dpre.fetch(), gradient(d.value).value, gradient(d.mag).mag, x.OC + x.ranks, columns,
                         T);
        });
    expect_extended(stream);
}

// Rows that TMA does not take, a block-diagonal B without memory, or rows that must not depend on tuning: several
// kernels compute it. Adapters of a part of out are a block-diagonal B with rows of zeros.
TEST(HopperGemmClusters, AdaptersThatAreLeftOut) {
    const auto ranks_inside = [](const LowRankLayer& x, bool scratch, bool invariant) {
        const ClusterStream on{GemmKernel::Hopper1};
        if (invariant) matmul_batch_invariant(true, on);
        const TestArray out = TestArray::poisoned(T, {x.N, x.OC});
        LowRank low_rank = x.low_rank();
        if (!scratch) low_rank.scratch = {};
        matmul_low_rank_forward(out, x.inp, x.weight, x.bias, low_rank, on);
        const reference::Values ref = x.forward(true);
        expect_close("out", out.fetch(), ref.value, ref.mag, x.C + x.ranks, x.OC, T, 3);
        int64_t ranks = 0;
        for (const auto& [key, plan] : blas_of("test", on).plans) ranks += key.K2;
        return ranks;
    };
    if (!this_target().hopper) GTEST_SKIP() << "not a Hopper GPU";
    const LowRankParts fused = whole_parts(192, 3);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, fused}, true, false), 48);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, fused}, false, false), 0);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, fused}, true, true), 0);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, {{128, 64}}}, true, false), 16);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, {{0, 64}, {128, 64}}}, true, false), 32);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, whole_parts(192, 1)}, false, false), 16);
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 4, fused}, true, false), 0);      // 12 columns
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 16, fused, 4}, true, false), 0);  // 52 elements between rows
    EXPECT_EQ(ranks_inside({T, 130, 136, 192, 20, whole_parts(192, 1)}, true, false), 0);
}

// The table has the second pair of operands, and the choice decides between one kernel and several.
TEST(HopperGemmClusters, ChoicesOfGemmsWithAdapters) {
    if (!this_target().hopper) GTEST_SKIP() << "not a Hopper GPU";
    const LowRankLayer x(T, 130, 136, 192, 16, whole_parts(192, 3));
    struct OwnStream {
        Stream stream = create_blas_stream();
        ~OwnStream() { destroy_stream(stream); }
    };
    const OwnStream tuned, other, untuned;
    const auto run = [&](Stream on) {
        const TestArray out = TestArray::poisoned(T, {x.N, x.OC});
        matmul_low_rank_forward(out, x.inp, x.weight, x.bias, x.low_rank(), on);
        return out.fetch();
    };
    const auto plan_of = [](Stream on) {
        for (const auto& [key, plan] : blas_of("test", on).plans)
            if (key.K2 > 0) return plan;
        return GemmPlan{};
    };
    run(untuned.stream);
    EXPECT_FALSE(plan_of(untuned.stream).compared);
    {
        const ClusterStream apart{GemmKernel::Separate};
        expect_same_bits("untuned", run(untuned.stream), run(apart));
    }
    matmul_tuning(true, tuned.stream);
    run(tuned.stream);
    matmul_tuning(false, tuned.stream);
    EXPECT_TRUE(plan_of(tuned.stream).compared);
    const std::string choices = matmul_choices(tuned.stream);
    EXPECT_NE(choices.find(" + 48 56 48 16 16\n"), std::string::npos) << choices;
    ASSERT_TRUE(matmul_use_choices(choices, other.stream));
    EXPECT_EQ(matmul_choices(other.stream), choices);
    EXPECT_EQ(plan_of(other.stream).kernel, plan_of(tuned.stream).kernel);
    expect_same_bits("adopted", run(other.stream), run(tuned.stream));
}

// The sums have one order, whatever the size of the clusters.
TEST(HopperGemmKernels, HaveTheSameBits) {
    const int64_t N = 1000, C = 520, OC = 776;
    const ClusterStream one{GemmKernel::Hopper1}, two{GemmKernel::Hopper2};
    const TestArray inp = TestArray::random(T, {N, C}, 1), weight = TestArray::random(T, {OC, C}, 2);
    const TestArray pre = TestArray::random(T, {N, C}, 3), dout = TestArray::random(T, {N, OC}, 4);
    const LowRankLayer layer(T, N, C, OC, 32, whole_parts(OC, 3));
    const auto run = [&](Stream on) {
        const TestArray out = TestArray::poisoned(T, {N, OC}), dpre = TestArray::poisoned(T, {N, C});
        const TestArray dbias = TestArray::poisoned({C});
        matmul_forward(out, inp, weight, {}, on);
        matmul_backward_activation(Activation::GELU, {dpre, dpre, {}, dbias, false}, dout, weight, pre, on);
        const TestArray adapted = TestArray::poisoned(T, {N, OC}), dinp = TestArray::poisoned(T, {N, C});
        matmul_low_rank_forward(adapted, layer.inp, layer.weight, {}, layer.low_rank(), on);
        matmul_low_rank_backward_input(dinp, layer.dout, layer.weight, layer.gradient(), false, on);
        std::vector<double> all = out.fetch();
        for (const TestArray* more : {&dpre, &dbias, &adapted, &dinp}) {
            const std::vector<double> values = more->fetch();
            all.insert(all.end(), values.begin(), values.end());
        }
        return all;
    };
    const std::vector<double> expected = run(one);
    expect_same_bits("two blocks", run(two), expected);
    expect_same_bits("again", run(one), expected);
}
#else
TEST(HopperGemm, IsForHopper) {
    GTEST_SKIP() << "not a build for sm_90a";
}
#endif
