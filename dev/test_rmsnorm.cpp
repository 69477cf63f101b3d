// RMSNorm and its gradients against the oracle, with and without residuals and stored statistics; rows with gaps; the
// aliases that the header allows.
#include "kernels/rmsnorm.h"

#include "dev/reference.h"
#include "dev/test_util.h"

namespace {

constexpr float EPS = 1e-6f;
constexpr int64_t SIZES[][2] = {{1, 1},   {1, 16},    {2, 3},   {7, 17},   {5, 31},
                                {33, 64}, {100, 100}, {3, 768}, {70, 129}, {2, 5000}};

void check_forward(int64_t N, int64_t C, bool residual_given, bool stored, int64_t gap) {
    SCOPED_TRACE(str("N ", N, " C ", C, " residual ", residual_given, " stored ", stored));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random({N, ld}, 1, 1.5, 0.5), residual = TestArray::random({N, ld}, 2);
    const TestArray weight = TestArray::random({C}, 3, 0.2, 1);
    const TestArray out = TestArray::poisoned({N, ld}), sum = TestArray::poisoned({N, ld}),
                    rstd = TestArray::poisoned({N});
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    rmsnorm_forward(view(out), stored ? view(sum) : Tensor{}, stored ? rstd.tensor() : Tensor{}, view(inp),
                    residual_given ? view(residual) : Tensor{}, weight, EPS, Stream{});
    const reference::Norm ref = reference::rmsnorm_forward(
        take_columns(inp.values(), ld, C).data(),
        residual_given ? take_columns(residual.values(), ld, C).data() : nullptr, weight.data(), EPS, N, C);
    expect_close("out", take_columns(out.fetch(), ld, C), ref.out.value, ref.out.mag, C, C);
    expect_gaps_untouched("out", out.fetch(), ld, C);
    if (!stored) return;
    expect_close("sum", take_columns(sum.fetch(), ld, C), ref.sum.value, ref.sum.mag, 1, C);
    expect_gaps_untouched("sum", sum.fetch(), ld, C);
    expect_close("rstd", rstd.fetch(), ref.rstd.value, ref.rstd.mag, C, 1);
}

// In place: dinp is written over dresidual.
void check_backward(int64_t N, int64_t C, bool residual_given, bool accumulate, int64_t gap, bool in_place) {
    SCOPED_TRACE(
        str("N ", N, " C ", C, " residual ", residual_given, " accumulate ", accumulate, " in place ", in_place));
    const int64_t ld = C + gap;
    const TestArray inp = TestArray::random({N, ld}, 1, 1.5, 0.5), dout = TestArray::random({N, ld}, 2);
    const TestArray dresidual = TestArray::random({N, ld}, 3), weight = TestArray::random({C}, 4, 0.2, 1);
    const std::vector<double> x = take_columns(inp.values(), ld, C), d = take_columns(dout.values(), ld, C);
    const std::vector<double> dr = take_columns(dresidual.values(), ld, C);
    const TestArray rstd =
        TestArray::of(reference::rmsnorm_forward(x.data(), nullptr, weight.data(), EPS, N, C).rstd.value, {N});
    const TestArray separate = TestArray::poisoned({N, ld});
    const TestArray dweight = accumulate ? TestArray::random({C}, 5) : TestArray::poisoned({C});
    const TestArray scratch = TestArray::scratch(rmsnorm_backward_scratch(N, C));
    const auto view = [&](const TestArray& t) { return t.tensor().columns(0, C); };
    const TestArray& dinp = in_place ? dresidual : separate;
    rmsnorm_backward(view(dinp), dweight, view(dout), residual_given ? view(dresidual) : Tensor{}, view(inp), weight,
                     rstd, scratch, accumulate, Stream{});
    const reference::NormGradients ref =
        reference::norm_backward(d.data(), residual_given ? dr.data() : nullptr, x.data(), weight.data(), nullptr,
                                 rstd.data(), accumulate ? dweight.data() : nullptr, nullptr, N, C);
    expect_close("dinp", take_columns(dinp.fetch(), ld, C), ref.dinp.value, ref.dinp.mag, C, C);
    if (!in_place) expect_gaps_untouched("dinp", dinp.fetch(), ld, C);
    expect_close("dweight", dweight.fetch(), ref.dweight.value, ref.dweight.mag, N, C);
}

}  // namespace

TEST(RMSNorm, ForwardMatchesOracle) {
    for (const auto& s : SIZES)
        for (int options = 0; options < 4; options++) check_forward(s[0], s[1], options & 1, options & 2, s[0] % 2 * 5);
}

TEST(RMSNorm, SumMayBeInpOrResidual) {
    const int64_t N = 5, C = 37;
    const TestArray weight = TestArray::random({C}, 3);
    for (const bool over_inp : {false, true}) {
        const TestArray inp = TestArray::random({N, C}, 1), residual = TestArray::random({N, C}, 2);
        const TestArray out = TestArray::poisoned({N, C});
        const TestArray& sum = over_inp ? inp : residual;
        rmsnorm_forward(out, sum, Tensor{}, inp, residual, weight, EPS, Stream{});
        const reference::Norm ref = reference::rmsnorm_forward(inp.data(), residual.data(), weight.data(), EPS, N, C);
        expect_close("out", out.fetch(), ref.out.value, ref.out.mag, C, C);
        expect_close("sum", sum.fetch(), ref.sum.value, ref.sum.mag, 1, C);
    }
}

TEST(RMSNorm, BackwardMatchesOracle) {
    for (const auto& s : SIZES)
        for (int options = 0; options < 8; options++)
            check_backward(s[0], s[1], options & 1, options & 2, s[0] % 2 * 5, (options & 5) == 5);
    check_backward(3000, 20, true, true, 0, false);  // more rows than partitions
}

TEST(RMSNorm, BackwardIsDeterministic) {
    const int64_t N = 500, C = 70;
    const TestArray inp = TestArray::random({N, C}, 1), dout = TestArray::random({N, C}, 2),
                    weight = TestArray::random({C}, 3);
    const TestArray rstd = TestArray::random({N}, 5, 0.1, 1);
    expect_deterministic("gradients", [&] {
        const TestArray dinp = TestArray::poisoned({N, C}), dweight = TestArray::poisoned({C});
        const TestArray scratch = TestArray::scratch(rmsnorm_backward_scratch(N, C));
        rmsnorm_backward(dinp, dweight, dout, Tensor{}, inp, weight, rstd, scratch, false, Stream{});
        std::vector<double> all = dinp.fetch();
        for (const double x : dweight.fetch()) all.push_back(x);
        return all;
    });
}

TEST(RMSNorm, WrongArgumentsAreErrors) {
    const TestArray a = TestArray::random({4, 128}, 1), b = TestArray::random({4, 64}, 2),
                    out = TestArray::poisoned({4, 128});
    const TestArray weight = TestArray::random({128}, 3), shorter = TestArray::random({64}, 4),
                    rows = TestArray::random({4}, 5);
    const TestArray scratch = TestArray::scratch(rmsnorm_backward_scratch(4, 128));
    const Tensor none;
    expect_error([&] { rmsnorm_forward(out, none, none, a, none, shorter, EPS, Stream{}); },
                 "rmsnorm_forward: weight is fp32 [64], expected fp32 [128]");
    expect_error([&] { rmsnorm_forward(out, none, none, a, b, weight, EPS, Stream{}); },
                 "rmsnorm_forward: residual is fp32 [4, 64], expected fp32 [4, 128]");
    expect_error([&] { rmsnorm_backward(out, shorter, a, none, a, weight, rows, scratch, false, Stream{}); },
                 "rmsnorm_backward: dweight is fp32 [64], expected fp32 [128]");
    expect_error([&] { rmsnorm_backward(out, weight, a, none, a, weight, rows, none, false, Stream{}); },
                 str("rmsnorm_backward: scratch is missing, expected uint8 [", rmsnorm_backward_scratch(4, 128), "]"));
}
