// Linear layers with LoRA adapters against the oracle: one adapter, several of a fused parameter, those of a part of
// the output; ranks and strides that a Hopper GPU takes and others. test_gemm_hopper.cpp has that GPU's kernel.
#include "kernels/matmul_low_rank.h"

#include "dev/tests/low_rank_layer.h"
#include "kernels/activation.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/target.h"

namespace {

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

// Adapters and the weight are multiplied by several kernels that each round to 16 bits, the library's twice.
constexpr int ROUNDINGS = 3;

struct Case {
    int64_t N, C, OC, R;
    LowRankParts parts;
};

std::vector<Case> cases() {
    return {{5, 7, 9, 3, whole_parts(9, 1)},
            {13, 40, 24, 8, whole_parts(24, 1)},
            {33, 72, 96, 16, whole_parts(96, 3)},
            {67, 136, 200, 4, whole_parts(200, 3)},  // 12 columns of h: rows that TMA does not take
            {70, 64, 128, 64, whole_parts(128, 1)},
            {130, 64, 64, 48, whole_parts(64, 2)},
            {19, 24, 40, 8, {{24, 16}}},                // v alone
            {19, 24, 40, 8, {{0, 8}, {24, 16}}},        // q and v
            {300, 264, 776, 16, whole_parts(776, 3)}};  // several tiles of every kernel
}

std::string name(const Case& c) {
    return str("N ", c.N, " C ", c.C, " OC ", c.OC, " R ", c.R, " parts ", c.parts.size(), " from row ",
               c.parts[0].row);
}

class LowRankDTypes : public DTypeTest {};
INSTANTIATE_DTYPES(LowRankDTypes);

}  // namespace

TEST_P(LowRankDTypes, ForwardMatchesOracle) {
    for (const Case& c : cases())
        for (const bool biased : {false, true}) {
            SCOPED_TRACE(str(name(c), " bias ", biased));
            const LowRankLayer x(activation(), c.N, c.C, c.OC, c.R, c.parts);
            const TestArray out = TestArray::poisoned(x.T, {c.N, c.OC + 8});
            matmul_low_rank_forward(out.tensor().columns(0, c.OC), x.inp, x.weight, biased ? x.bias.tensor() : Tensor{},
                                    x.low_rank(), stream());
            const reference::Values ref = x.forward(biased);
            const std::vector<double> got = out.fetch();
            expect_close("out", take_columns(got, c.OC + 8, c.OC), ref.value, ref.mag, c.C + x.ranks, c.OC, x.T,
                         ROUNDINGS);
            expect_gaps_untouched("out", got, c.OC + 8, c.OC);
        }
}

TEST_P(LowRankDTypes, InputGradientMatchesOracle) {
    for (const Case& c : cases())
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(str(name(c), " accumulate ", accumulate));
            const LowRankLayer x(activation(), c.N, c.C, c.OC, c.R, c.parts);
            const TestArray dinp =
                accumulate ? TestArray::random(x.T, {c.N, c.C}, 9) : TestArray::poisoned(x.T, {c.N, c.C});
            matmul_low_rank_backward_input(dinp, x.dout, x.weight, x.gradient(), accumulate, stream());
            const reference::Values ref = x.backward_input(accumulate ? dinp.data() : nullptr);
            expect_close("dinp", dinp.fetch(), ref.value, ref.mag, c.OC + x.ranks, c.C, x.T,
                         ROUNDINGS + int(accumulate));
        }
}

// Pre-activations against the oracle, the function against its own kernel; the gradient against that of the rounded
// gradient of its output.
TEST_P(LowRankDTypes, ActivationsMatchOracle) {
    for (const Case& c : cases())
        for (const Activation f : {Activation::GELU, Activation::ReLU2, Activation::SwiGLU}) {
            if (is_gated(f) && c.OC % 2) continue;
            SCOPED_TRACE(str(name(c), " activation ", int(f)));
            const LowRankLayer x(activation(), c.N, c.C, c.OC, c.R, c.parts);
            const int64_t I = c.OC / activation_inputs(f, 1);
            const TestArray out = TestArray::poisoned(x.T, {c.N, I}), pre = TestArray::poisoned(x.T, {c.N, c.OC}),
                            expected = TestArray::poisoned(x.T, {c.N, I});
            matmul_low_rank_forward_activation(f, out, pre, x.inp, x.weight, x.bias, x.low_rank(), stream());
            const reference::Values ref = x.forward(true);
            expect_close("pre", pre.fetch(), ref.value, ref.mag, c.C + x.ranks, c.OC, x.T, ROUNDINGS);
            activation_forward(f, expected, pre, stream());
            expect_same_bits("out", out.fetch(), expected.fetch());

            const int64_t columns = activation_inputs(f, c.C);
            const TestArray before = TestArray::random(x.T, {c.N, columns}, 8, 2),
                            dpre = TestArray::poisoned(x.T, {c.N, columns}),
                            dact = TestArray::poisoned(x.T, {c.N, c.C});
            matmul_low_rank_backward_activation(f, {dpre, dact, {}, {}, false}, x.dout, x.weight, before, x.gradient(),
                                                stream());
            const reference::Values d = x.backward_input(nullptr);
            const auto gradient = [&, f = f](const std::vector<double>& of) {
                return reference::activation_backward(f, of.data(), before.data(), c.N, c.C);
            };
            expect_close("dpre", dpre.fetch(), gradient(d.value).value, gradient(d.mag).mag, c.OC + x.ranks, columns,
                         x.T, ROUNDINGS + 1);
        }
}

TEST_P(LowRankDTypes, BlockDiagonalHasEachPartOfBInItsColumns) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(name(c));
        const LowRankLayer x(activation(), c.N, c.C, c.OC, c.R, c.parts);
        const TestArray out = TestArray::poisoned(x.T, {c.OC, x.ranks});
        block_diagonal(out, x.low_rank().adapters, stream());
        expect_same_bits("B", out.fetch(), x.whole_b());
    }
}

// What adapters add alone: columns without an adapter keep what they held.
TEST_P(LowRankDTypes, AdaptersAloneWriteTheirColumns) {
    const LowRankLayer x(activation(), 19, 24, 40, 8, {{0, 8}, {24, 16}});
    const std::vector<double> h = take_columns(x.h.values(), x.ranks + x.gap, x.ranks), b = x.whole_b();
    for (const bool accumulate : {false, true}) {
        const TestArray out = TestArray::random(x.T, {x.N, x.OC}, 9);
        matmul_low_rank(out, x.low_rank(), accumulate, stream());
        std::vector<double> before = out.values();
        for (int64_t n = 0; n < x.N; n++)
            for (const LoraPart& part : x.parts)
                for (int64_t o = part.row; o < part.row + part.rows && !accumulate; o++)
                    before[size_t(n * x.OC + o)] = 0;
        const reference::Values ref =
            reference::matmul(h.data(), b.data(), false, true, before.data(), nullptr, x.N, x.OC, x.ranks);
        expect_close("out", out.fetch(), ref.value, ref.mag, x.ranks, x.OC, x.T, 2);
    }
}

// A row has the same bits whatever the others are, in training as where tokens are sampled: neither tuning nor the
// number of rows decides how it is computed.
TEST(LowRank, BatchInvariantRowsDoNotDependOnTheOthers) {
    const bool on_cpu = backend_device() == Device::CPU;
    if (!on_cpu && !this_target().hopper) GTEST_SKIP() << "only a Hopper GPU has such matmuls";
    const DType T = on_cpu ? DType::F32 : DType::BF16;
    const LowRankLayer x(T, 131, 296, 192, 16, whole_parts(192, 3));
    matmul_batch_invariant(true, stream());
    expect_same_bits_among_any_rows(x.N, x.OC + x.OC / 2, [&](int64_t begin, int64_t end) {
        const int64_t n = end - begin;
        LowRank low_rank = x.low_rank();
        low_rank.h = low_rank.h.rows(begin, end);
        const Tensor inp = x.inp.tensor().rows(begin, end);
        const TestArray pre = TestArray::poisoned(T, {n, x.OC}), act = TestArray::poisoned(T, {n, x.OC / 2}),
                        out = TestArray::poisoned(T, {n, x.OC});
        matmul_low_rank_forward(out, inp, x.weight, x.bias, low_rank, stream());
        matmul_low_rank_forward_activation(Activation::SwiGLU, act, pre, inp, x.weight, x.bias, low_rank, stream());
        const std::vector<double> p = pre.fetch(), o = out.fetch(), a = act.fetch();
        expect_same_bits("pre", p, o);
        std::vector<double> all;
        for (int64_t i = 0; i < n; i++) {
            all.insert(all.end(), o.begin() + i * x.OC, o.begin() + (i + 1) * x.OC);
            all.insert(all.end(), a.begin() + i * x.OC / 2, a.begin() + (i + 1) * x.OC / 2);
        }
        return all;
    });
    matmul_batch_invariant(false, stream());
}

#ifndef USE_CUDA
// On the CPU two matmuls compute it.
TEST(LowRank, HasTheBitsOfTwoMatmuls) {
    const LowRankLayer x(DType::F32, 33, 72, 96, 16, whole_parts(96, 3));
    const TestArray out = TestArray::poisoned({x.N, x.OC}), expected = TestArray::poisoned({x.N, x.OC});
    matmul_low_rank_forward(out, x.inp, x.weight, x.bias, x.low_rank(), stream());
    for (int64_t i = 0; i < 3; i++)
        matmul_forward(expected.tensor().columns(i * 32, (i + 1) * 32), x.h.tensor().columns(i * 16, (i + 1) * 16),
                       x.b.tensor().rows(i * 32, (i + 1) * 32), {}, stream());
    matmul_forward_add(expected, x.inp, x.weight, x.bias, expected, stream());
    expect_same_bits("out", out.fetch(), expected.fetch());
}
#endif

TEST(LowRank, InvalidArgumentsAreErrors) {
    const LowRankLayer x(DType::F32, 5, 8, 12, 2, whole_parts(12, 3));
    const TestArray out = TestArray::poisoned({5, 12}), dinp = TestArray::poisoned({5, 8}),
                    act = TestArray::poisoned({5, 6});
    LowRank low_rank = x.low_rank();
    low_rank.h = x.h.tensor().columns(0, 4);
    expect_error([&] { matmul_low_rank_forward(out, x.inp, x.weight, {}, low_rank, stream()); },
                 "matmul_low_rank_forward: h is fp32 [5, 4], expected fp32 [5, 6]");
    low_rank = x.low_rank();
    low_rank.adapters.b = x.b.tensor().rows(0, 11);
    expect_error([&] { matmul_low_rank_forward(out, x.inp, x.weight, {}, low_rank, stream()); },
                 "matmul_low_rank_forward: b is fp32 [11, 2], expected fp32 [12, 2]");
    const LowRankParts beyond = {{0, 4}, {4, 4}, {9, 4}};
    low_rank = x.low_rank();
    low_rank.adapters.parts = &beyond;
    expect_error([&] { matmul_low_rank(out, low_rank, false, stream()); },
                 "matmul_low_rank: an adapter of rows 9 to 13 of 12");
    low_rank.adapters.parts = nullptr;
    expect_error([&] { matmul_low_rank(out, low_rank, false, stream()); },
                 "matmul_low_rank: the adapters have no parts");
    expect_error(
        [&] {
            matmul_low_rank_forward_activation(Activation::SwiGLU, {}, out, x.inp, x.weight, {}, x.low_rank(),
                                               stream());
        },
        "matmul_low_rank_forward_activation: out is missing");
    expect_error(
        [&] {
            matmul_low_rank_backward_input(dinp, x.dout, x.weight, {x.h.tensor().columns(0, 5), x.a}, false, stream());
        },
        "matmul_low_rank_backward_input: dh is fp32 [5, 5], expected fp32 [5, 6]");
    const TestArray dbias = TestArray::poisoned({8});
    expect_error(
        [&] {
            matmul_low_rank_backward_activation(Activation::GELU, {dinp, dinp, {}, dbias, false}, x.dout, x.weight,
                                                dinp, x.gradient(), stream());
        },
        "matmul_low_rank_backward_activation: dbias is not computed beside adapters");
    expect_error([&] { block_diagonal(act, x.low_rank().adapters, stream()); },
                 "block_diagonal: an adapter of rows 4 to 8 of 5");
    const TestArray wide = TestArray::poisoned({12, 7});
    expect_error([&] { block_diagonal(wide, x.low_rank().adapters, stream()); },
                 "block_diagonal: out is fp32 [12, 7], expected fp32 [12, 6]");
}
