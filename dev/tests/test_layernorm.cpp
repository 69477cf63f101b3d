// LayerNorm and its gradients against the oracle, with and without residuals, bias and stored statistics; rows with
// gaps; the in-place uses that the header allows; a mean far larger than the deviation.
#include "kernels/norm.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

class LayerNorm : public DTypeTest {};

constexpr float EPS = 1e-5f;
constexpr int64_t SIZES[][2] = {{1, 1},     {1, 16},   {2, 3},    {7, 17},   {5, 31},   {33, 64},
                                {100, 100}, {3, 768},  {70, 129}, {2, 5000}, {12, 768}, {4, 1024},
                                {6, 1600},  {4, 4096}, {2, 9000}, {515, 768}};

// Gaps between rows, of a length that keeps them aligned to 16 bytes or not.
int64_t gap_of(int64_t N) {
    return N % 2 ? 5 : N % 4 ? 8 : 0;
}

Tensor given(const TestArray& t, bool is_given) {
    return is_given ? t.tensor() : Tensor{};
}

// The norm is that of inp + residual as stored. In fp32 that rounding is part of the error of the op.
void round_sum(DType T, bool residual_given, std::vector<double>& x, std::vector<double>& residual) {
    if (T == DType::F32 || !residual_given) return;
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = rounded(T, x[i] + residual[i]);
        residual[i] = 0;
    }
}

void check_forward(DType T, int64_t N, int64_t C, bool residual_given, bool bias_given, bool stored, int64_t gap,
                   double shift) {
    SCOPED_TRACE(str("N ", N, " C ", C, " residual ", residual_given, " bias ", bias_given, " stored ", stored,
                     " shift ", shift));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random(T, {N, ld}, 1, 1.5, shift), residual = TestArray::random(T, {N, ld}, 2);
    const TestArray weight = TestArray::random({C}, 3, 0.2, 1), bias = TestArray::random({C}, 4);
    const TestArray out = TestArray::poisoned(T, {N, ld}), sum = TestArray::poisoned(T, {N, ld});
    const TestArray mean = TestArray::poisoned({N}), rstd = TestArray::poisoned({N});
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    layernorm_forward({.out = view(out),
                       .sum = stored ? view(sum) : Tensor{},
                       .mean = given(mean, stored),
                       .rstd = given(rstd, stored),
                       .inp = view(inp),
                       .residual = residual_given ? view(residual) : Tensor{},
                       .weight = weight,
                       .bias = given(bias, bias_given),
                       .eps = EPS},
                      Stream{});
    std::vector<double> x = take_columns(inp.values(), ld, C), r = take_columns(residual.values(), ld, C);
    const reference::Values exact_sum =
        reference::layernorm_forward(x.data(), residual_given ? r.data() : nullptr, weight.data(),
                                     bias_given ? bias.data() : nullptr, EPS, N, C)
            .sum;
    round_sum(T, residual_given, x, r);
    const reference::Norm ref = reference::layernorm_forward(
        x.data(), residual_given ? r.data() : nullptr, weight.data(), bias_given ? bias.data() : nullptr, EPS, N, C);
    expect_close("out", take_columns(out.fetch(), ld, C), ref.out.value, ref.out.mag, C, C, T);
    expect_gaps_untouched("out", out.fetch(), ld, C);
    if (!stored) return;
    expect_close("sum", take_columns(sum.fetch(), ld, C), exact_sum.value, exact_sum.mag, 1, C, T);
    expect_gaps_untouched("sum", sum.fetch(), ld, C);
    expect_close("mean", mean.fetch(), ref.mean.value, ref.mean.mag, C, 1);
    expect_close("rstd", rstd.fetch(), ref.rstd.value, ref.rstd.mag, C, 1);
}

// In place: dinp is written over dresidual.
void check_backward(DType T, int64_t N, int64_t C, bool residual_given, bool bias_given, bool sum_given,
                    bool accumulate, int64_t gap, bool in_place) {
    SCOPED_TRACE(str("N ", N, " C ", C, " residual ", residual_given, " bias ", bias_given, " sum ", sum_given,
                     " accumulate ", accumulate, " in place ", in_place));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random(T, {N, ld}, 1, 1.5, 0.5), dout = TestArray::random(T, {N, ld}, 2);
    const TestArray dresidual = TestArray::random(T, {N, ld}, 3), weight = TestArray::random({C}, 4, 0.2, 1);
    const std::vector<double> x = take_columns(inp.values(), ld, C), d = take_columns(dout.values(), ld, C);
    const std::vector<double> dr = take_columns(dresidual.values(), ld, C);
    const reference::Norm forward = reference::layernorm_forward(x.data(), nullptr, weight.data(), nullptr, EPS, N, C);
    const TestArray mean = TestArray::of(forward.mean.value, {N}), rstd = TestArray::of(forward.rstd.value, {N});
    const TestArray separate = TestArray::poisoned(T, {N, ld});
    const TestArray dweight = accumulate ? TestArray::random({C}, 5) : TestArray::poisoned({C});
    const TestArray dbias = accumulate ? TestArray::random({C}, 6) : TestArray::poisoned({C});
    const TestArray dsum = accumulate ? TestArray::random({C}, 7) : TestArray::poisoned({C});
    const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(N, C));
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    const TestArray& dinp = in_place ? dresidual : separate;
    layernorm_backward({.dinp = view(dinp),
                        .dweight = dweight,
                        .dbias = given(dbias, bias_given),
                        .dsum = given(dsum, sum_given),
                        .dout = view(dout),
                        .dresidual = residual_given ? view(dresidual) : Tensor{},
                        .inp = view(inp),
                        .weight = weight,
                        .mean = mean,
                        .rstd = rstd,
                        .scratch = scratch,
                        .accumulate = accumulate},
                       Stream{});
    const reference::NormGradients ref = reference::norm_backward(
        d.data(), residual_given ? dr.data() : nullptr, x.data(), weight.data(), mean.data(), rstd.data(),
        accumulate ? dweight.data() : nullptr, accumulate ? dbias.data() : nullptr, N, C);
    expect_close("dinp", take_columns(dinp.fetch(), ld, C), ref.dinp.value, ref.dinp.mag, C, C, T);
    if (!in_place) expect_gaps_untouched("dinp", dinp.fetch(), ld, C);
    expect_close("dweight", dweight.fetch(), ref.dweight.value, ref.dweight.mag, N, C);
    if (bias_given)
        expect_close("dbias", dbias.fetch(), ref.dbias.value, ref.dbias.mag, N, C);
    else
        expect_same_bits("dbias", dbias.values(), dbias.fetch());
    if (sum_given)
        expect_sum_of_rows("dsum", dsum, take_columns(dinp.fetch(), ld, C), accumulate, N, C);
    else
        expect_same_bits("dsum", dsum.values(), dsum.fetch());
}

}  // namespace

TEST_P(LayerNorm, ForwardMatchesOracle) {
    for (const auto& s : SIZES)
        for (int options = 0; options < 8; options++)
            check_forward(activation(), s[0], s[1], options & 1, options & 2, options & 4, gap_of(s[0]), 0.5);
}

TEST_P(LayerNorm, LargeMeanKeepsPrecision) {
    for (const bool residual : {false, true}) check_forward(activation(), 9, 300, residual, true, true, 0, 1000);
}

TEST_P(LayerNorm, ARowHasTheSameBitsAmongAnyRows) {
    const DType T = activation();
    const int64_t N = 520;
    for (const int64_t C : {24, 768, 2560}) {
        const TestArray inp = TestArray::random(T, {N, C}, 1, 1.5, 0.5), residual = TestArray::random(T, {N, C}, 2),
                        weight = TestArray::random({C}, 3, 0.2, 1), bias = TestArray::random({C}, 4);
        expect_same_bits_among_any_rows(N, C, [&](int64_t begin, int64_t end) {
            const TestArray out = TestArray::poisoned(T, {end - begin, C}),
                            sum = TestArray::poisoned(T, {end - begin, C});
            layernorm_forward({.out = out,
                               .sum = sum,
                               .inp = inp.tensor().rows(begin, end),
                               .residual = residual.tensor().rows(begin, end),
                               .weight = weight,
                               .bias = bias,
                               .eps = EPS},
                              Stream{});
            return out.fetch();
        });
    }
}

TEST_P(LayerNorm, SumMayAliasInpOrResidual) {
    const DType T = activation();
    const int64_t N = 5;
    for (const int64_t C : {37, 64}) {
        const TestArray weight = TestArray::random({C}, 3), bias = TestArray::random({C}, 4);
        for (const bool over_inp : {false, true}) {
            const TestArray inp = TestArray::random(T, {N, C}, 1), residual = TestArray::random(T, {N, C}, 2);
            const TestArray out = TestArray::poisoned(T, {N, C});
            const TestArray& sum = over_inp ? inp : residual;
            layernorm_forward(
                {.out = out, .sum = sum, .inp = inp, .residual = residual, .weight = weight, .bias = bias, .eps = EPS},
                Stream{});
            std::vector<double> x = inp.values(), r = residual.values();
            const reference::Values exact_sum =
                reference::layernorm_forward(x.data(), r.data(), weight.data(), bias.data(), EPS, N, C).sum;
            round_sum(T, true, x, r);
            const reference::Norm ref =
                reference::layernorm_forward(x.data(), r.data(), weight.data(), bias.data(), EPS, N, C);
            expect_close("out", out.fetch(), ref.out.value, ref.out.mag, C, C, T);
            expect_close("sum", sum.fetch(), exact_sum.value, exact_sum.mag, 1, C, T);
        }
    }
}

TEST_P(LayerNorm, BackwardMatchesOracle) {
    for (const auto& s : SIZES)
        for (int options = 0; options < 32; options++)
            check_backward(activation(), s[0], s[1], options & 1, options & 2, options & 4, options & 8, gap_of(s[0]),
                           (options & 17) == 17);
    check_backward(activation(), 3000, 20, true, true, true, true, 0, false);  // more rows than partitions
    check_backward(activation(), 4000, 64, true, true, true, true, 0, false);
}

TEST_P(LayerNorm, BackwardIsDeterministic) {
    const int64_t N = 500, C = 70;
    const TestArray inp = TestArray::random(activation(), {N, C}, 1), dout = TestArray::random(activation(), {N, C}, 2),
                    weight = TestArray::random({C}, 3);
    const TestArray mean = TestArray::random({N}, 4), rstd = TestArray::random({N}, 5, 0.1, 1);
    expect_deterministic("gradients", [&] {
        const TestArray dinp = TestArray::poisoned(activation(), {N, C}), dweight = TestArray::poisoned({C}),
                        dbias = TestArray::poisoned({C}), dsum = TestArray::poisoned({C});
        const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(N, C));
        layernorm_backward({.dinp = dinp,
                            .dweight = dweight,
                            .dbias = dbias,
                            .dsum = dsum,
                            .dout = dout,
                            .inp = inp,
                            .weight = weight,
                            .mean = mean,
                            .rstd = rstd,
                            .scratch = scratch},
                           Stream{});
        std::vector<double> all = dinp.fetch();
        for (const TestArray* t : {&dweight, &dbias, &dsum})
            for (const double x : t->fetch()) all.push_back(x);
        return all;
    });
}

// A frozen weight and bias have no gradients; that of the input, and of a bias before the norm, keep their bits.
TEST_P(LayerNorm, BackwardWithoutTheWeightsGradient) {
    const DType T = activation();
    const int64_t N = 40;
    for (const int64_t C : {37, 768, 9000}) {
        const TestArray inp = TestArray::random(T, {N, C}, 1), dout = TestArray::random(T, {N, C}, 2),
                        weight = TestArray::random({C}, 3), rstd = TestArray::random({N}, 5, 0.1, 1),
                        mean = TestArray::random({N}, 6, 0.1);
        const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(N, C)),
                        dweight = TestArray::poisoned({C}), dbias = TestArray::poisoned({C});
        for (const bool sum : {false, true}) {
            std::vector<std::vector<double>> dinps, sums;
            for (const bool frozen : {false, true}) {
                const TestArray dinp = TestArray::poisoned(T, {N, C}), dsum = TestArray::poisoned({C});
                layernorm_backward({.dinp = dinp,
                                    .dweight = given(dweight, !frozen),
                                    .dbias = given(dbias, !frozen),
                                    .dsum = given(dsum, sum),
                                    .dout = dout,
                                    .inp = inp,
                                    .weight = weight,
                                    .mean = mean,
                                    .rstd = rstd,
                                    .scratch = scratch},
                                   Stream{});
                dinps.push_back(dinp.fetch());
                sums.push_back(dsum.fetch());
            }
            expect_same_bits("dinp", dinps[0], dinps[1]);
            expect_same_bits("dsum", sums[0], sums[1]);
        }
    }
}

// The norm after the embedding works in place, and its gradient over that of its output: the same bits.
TEST_P(LayerNorm, InPlace) {
    const DType T = activation();
    const int64_t N = 7;
    for (const int64_t C : {37, 64, 768, 9000}) {
        const TestArray weight = TestArray::random({C}, 3, 0.2, 1), bias = TestArray::random({C}, 7);
        const TestArray x = TestArray::random(T, {N, C}, 1), out = TestArray::poisoned(T, {N, C});
        layernorm_forward({.out = out, .inp = x, .weight = weight, .bias = bias, .eps = EPS}, Stream{});
        layernorm_forward({.out = x, .inp = x, .weight = weight, .bias = bias, .eps = EPS}, Stream{});
        expect_same_bits("out", out.fetch(), x.fetch());

        const TestArray inp = TestArray::random(T, {N, C}, 2), dout = TestArray::random(T, {N, C}, 4);
        const TestArray rstd = TestArray::random({N}, 5, 0.1, 1), dinp = TestArray::poisoned(T, {N, C});
        const TestArray mean = TestArray::random({N}, 6, 0.1);
        const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(N, C));
        std::vector<std::vector<double>> sums;
        for (const TestArray* d : {&dinp, &dout}) {
            const TestArray dweight = TestArray::poisoned({C}), dbias = TestArray::poisoned({C});
            layernorm_backward({.dinp = *d,
                                .dweight = dweight,
                                .dbias = dbias,
                                .dout = dout,
                                .inp = inp,
                                .weight = weight,
                                .mean = mean.tensor(),
                                .rstd = rstd,
                                .scratch = scratch},
                               Stream{});
            sums.push_back(dweight.fetch());
        }
        expect_same_bits("dinp", dinp.fetch(), dout.fetch());
        expect_same_bits("dweight", sums[0], sums[1]);
    }
}

INSTANTIATE_DTYPES(LayerNorm);

TEST(LayerNormArguments, ZeroRowsNeedNoScratch) {
    for (const int64_t N : {0, 5}) EXPECT_EQ(layernorm_backward_scratch(N, 0), 0) << N;
}

TEST(LayerNormArguments, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({4, 128}, 1), b = TestArray::random({4, 64}, 2),
                    out = TestArray::poisoned({4, 128});
    const TestArray weight = TestArray::random({128}, 3), shorter = TestArray::random({64}, 4),
                    rows = TestArray::random({4}, 5);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(4), {4});
    const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(4, 128)), small = TestArray::scratch(100);
    const Tensor none;
    expect_error([&] { layernorm_forward({.out = out, .inp = a, .weight = shorter, .eps = EPS}, Stream{}); },
                 "layernorm_forward: weight is fp32 [64], expected fp32 [128]");
    expect_error(
        [&] { layernorm_forward({.out = out, .inp = a, .residual = b, .weight = weight, .eps = EPS}, Stream{}); },
        "layernorm_forward: residual is fp32 [4, 64], expected fp32 [4, 128]");
    expect_error(
        [&] { layernorm_forward({.out = out, .mean = ints, .inp = a, .weight = weight, .eps = EPS}, Stream{}); },
        "layernorm_forward: mean is int32 [4], expected fp32 [4]");
    expect_error([&] { layernorm_forward({.out = out, .inp = none, .weight = weight, .eps = EPS}, Stream{}); },
                 "layernorm_forward: inp is missing");
    expect_error(
        [&] {
            layernorm_backward({.dinp = out,
                                .dweight = weight,
                                .dout = b,
                                .inp = a,
                                .weight = weight,
                                .mean = rows,
                                .rstd = rows,
                                .scratch = scratch},
                               Stream{});
        },
        "layernorm_backward: dout is fp32 [4, 64], expected fp32 [4, 128]");
    expect_error(
        [&] {
            layernorm_backward({.dinp = out,
                                .dweight = weight,
                                .dout = a,
                                .inp = a,
                                .weight = weight,
                                .mean = rows,
                                .rstd = rows,
                                .scratch = small},
                               Stream{});
        },
        str("layernorm_backward: scratch is uint8 [100], expected uint8 [", layernorm_backward_scratch(4, 128),
            "] or more"));
}
