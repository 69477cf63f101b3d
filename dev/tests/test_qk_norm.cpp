// QK-norm with RoPE against the oracle: with and without weights, in place and not, rotated in part or not at all;
// heads inside packed rows, of sizes that vectors divide and others.
#include "kernels/qk_norm.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/rope.h"

namespace {

class QkNorm : public DTypeTest {};

constexpr float EPS = 1e-6f;
constexpr int64_t POSITIONS = 50;

struct Case {
    int64_t N, NH, NKV, HS, R;
};
// R = HS: full RoPE; less: partial; 0: none. Heads of 96 and 80 leave lanes of a warp idle; 512 is the longest.
const Case CASES[] = {{1, 1, 1, 2, 2},    {5, 3, 1, 6, 6},      {60, 2, 2, 64, 64}, {17, 6, 6, 128, 128},
                      {9, 4, 2, 80, 32},  {4, 2, 2, 7, 4},      {33, 5, 3, 64, 64}, {5, 2, 1, 96, 96},
                      {6, 3, 3, 32, 16},  {7, 2, 1, 5, 0},      {8, 4, 2, 64, 0},   {3, 1, 1, 512, 512},
                      {3, 2, 1, 300, 20}, {11, 3, 2, 256, 128}, {700, 3, 1, 16, 16}};

// q and k inside packed rows [N, (NH + 2·NKV)·HS + gap], and what they are rotated by.
struct Problem {
    const Case z;
    const DType T;
    const int64_t H, ld;
    std::vector<int32_t> position_ids;
    std::vector<double> angles;
    const TestArray table, positions, weight_q, weight_k;
    const bool weighted;

    Problem(const Case& sizes, DType dtype, bool weights)
        : z(sizes),
          T(dtype),
          H(z.NH + z.NKV),
          ld((z.NH + 2 * z.NKV) * z.HS + (z.N % 2 ? 8 : 3)),
          position_ids(ids(z.N)),
          angles(z.R ? exact_floats(reference::rope_table(POSITIONS, z.R, 10000, {})) : std::vector<double>(2)),
          table(TestArray::of(angles, {z.R ? POSITIONS : 1, std::max<int64_t>(z.R / 2, 1), 2})),
          positions(TestArray::ints(position_ids, {z.N})),
          weight_q(TestArray::random({z.HS}, 3, 0.3, 1)),
          weight_k(TestArray::random({z.HS}, 4, 0.3, 1)),
          weighted(weights) {}

    static std::vector<int32_t> ids(int64_t N) {
        std::vector<int32_t> p;
        for (int64_t n = 0; n < N; n++) p.push_back(int32_t((n * 7 + 49) % POSITIONS));  // not in order; the last too
        return p;
    }
    static std::vector<double> exact_floats(std::vector<double> x) {
        for (double& v : x) v = double(float(v));
        return x;
    }
    Tensor heads(const TestArray& rows) const { return split_heads(rows.tensor().columns(0, H * z.HS), H); }
    std::vector<double> channels(const std::vector<double>& rows) const { return take_columns(rows, ld, H * z.HS); }
    QkWeights weights() const { return weighted ? QkWeights{weight_q, weight_k} : QkWeights{}; }
    const double* wq() const { return weighted ? weight_q.data() : nullptr; }
    const double* wk() const { return weighted ? weight_k.data() : nullptr; }
    Tensor table_or_null() const { return z.R ? table.tensor() : Tensor{}; }
    Tensor positions_or_null() const { return z.R ? positions.tensor() : Tensor{}; }
    reference::QkNorm sizes() const { return {z.N, z.NH, z.NKV, z.HS, z.R}; }
    reference::QkNormForward reference_forward(const std::vector<double>& inp) const {
        return reference::qk_norm_forward(sizes(), inp.data(), wq(), wk(), position_ids.data(), angles.data(), EPS);
    }
};

void PrintTo(const Case& z, std::ostream* out) {
    *out << "N " << z.N << " NH " << z.NH << " NKV " << z.NKV << " HS " << z.HS << " R " << z.R;
}

// v, and the gaps, keep their bits.
void expect_rest_untouched(const Problem& p, const std::vector<double>& before, const std::vector<double>& after) {
    for (int64_t n = 0; n < p.z.N; n++)
        for (int64_t c = p.H * p.z.HS; c < p.ld; c++)
            ASSERT_EQ(after[size_t(n * p.ld + c)], before[size_t(n * p.ld + c)]) << n << " " << c;
}

void check_forward(const Problem& p, bool in_place, bool stored) {
    const TestArray inp = TestArray::random(p.T, {p.z.N, p.ld}, 1, 1.5, 0.3);
    const TestArray separate = TestArray::random(p.T, {p.z.N, p.ld}, 2), rstd = TestArray::poisoned({p.z.N, p.H});
    const TestArray& out = in_place ? inp : separate;
    qk_norm_forward(p.heads(out), stored ? rstd.tensor() : Tensor{}, p.heads(inp), p.weights(), p.positions_or_null(),
                    p.table_or_null(), p.z.NH, EPS, Stream{});
    const reference::QkNormForward ref = p.reference_forward(p.channels(inp.values()));
    expect_close("out", p.channels(out.fetch()), ref.out.value, ref.out.mag, p.z.HS, p.z.HS, p.T);
    expect_rest_untouched(p, out.values(), out.fetch());
    if (stored) expect_close("rstd", rstd.fetch(), ref.rstd.value, ref.rstd.mag, p.z.HS, 1);
}

void check_backward(const Problem& p, bool in_place, bool accumulate) {
    const TestArray inp = TestArray::random(p.T, {p.z.N, p.ld}, 1, 1.5, 0.3),
                    dout = TestArray::random(p.T, {p.z.N, p.ld}, 2);
    const reference::QkNormForward forward = p.reference_forward(p.channels(inp.values()));
    const TestArray rstd = TestArray::of(forward.rstd.value, {p.z.N, p.H});
    const TestArray out = TestArray::of(p.T, forward.out.value, {p.z.N, p.H * p.z.HS});
    const TestArray separate = TestArray::random(p.T, {p.z.N, p.ld}, 5);
    const TestArray& dinp = in_place ? dout : separate;
    const TestArray dq = accumulate ? TestArray::random({p.z.HS}, 6) : TestArray::poisoned({p.z.HS});
    const TestArray dk = accumulate ? TestArray::random({p.z.HS}, 7) : TestArray::poisoned({p.z.HS});
    const TestArray scratch = TestArray::scratch(qk_norm_backward_scratch(p.z.N, p.z.NH, p.z.NKV, p.z.HS));
    const QkWeights dweight = p.weighted ? QkWeights{dq, dk} : QkWeights{};
    const std::vector<double> kept = p.weighted ? p.channels(inp.values()) : out.values();
    const Tensor kept_heads = p.weighted ? p.heads(inp) : split_heads(out, p.H);
    const reference::QkNormBackward ref = reference::qk_norm_backward(
        p.sizes(), p.channels(dout.values()).data(), kept.data(), rstd.data(), p.wq(), p.wk(), p.position_ids.data(),
        p.angles.data(), accumulate ? dq.data() : nullptr, accumulate ? dk.data() : nullptr);
    qk_norm_backward(p.heads(dinp), dweight, p.heads(dout), kept_heads, rstd, p.weights(), p.positions_or_null(),
                     p.table_or_null(), p.z.NH, p.weighted ? scratch.tensor() : Tensor{}, accumulate, Stream{});
    expect_close("dinp", p.channels(dinp.fetch()), ref.dinp.value, ref.dinp.mag, p.z.HS, p.z.HS, p.T);
    expect_rest_untouched(p, dinp.values(), dinp.fetch());
    if (!p.weighted) return expect_same_bits("dweight", dq.values(), dq.fetch());
    if (!in_place) {  // frozen weights have no gradients
        const TestArray frozen = TestArray::random(p.T, {p.z.N, p.ld}, 5);
        qk_norm_backward(p.heads(frozen), {}, p.heads(dout), kept_heads, rstd, p.weights(), p.positions_or_null(),
                         p.table_or_null(), p.z.NH, scratch, accumulate, Stream{});
        expect_same_bits("dinp", frozen.fetch(), dinp.fetch());
    }
    expect_close("dweight.q", dq.fetch(), ref.dweight_q.value, ref.dweight_q.mag, p.z.N * p.z.NH, p.z.HS);
    expect_close("dweight.k", dk.fetch(), ref.dweight_k.value, ref.dweight_k.mag, p.z.N * p.z.NKV, p.z.HS);
}

template <typename F>
void for_each_case(DType T, F check) {
    for (const Case& z : CASES)
        for (const bool weights : {false, true}) {
            SCOPED_TRACE(testing::PrintToString(z) + (weights ? " weights" : ""));
            check(Problem(z, T, weights));
        }
}

}  // namespace

TEST_P(QkNorm, ForwardMatchesOracle) {
    for_each_case(activation(), [](const Problem& p) {
        for (const bool in_place : {false, true})
            for (const bool stored : {false, true}) check_forward(p, in_place, stored);
    });
}

TEST_P(QkNorm, BackwardMatchesOracle) {
    for_each_case(activation(), [](const Problem& p) {
        for (const bool in_place : {false, true})
            for (const bool accumulate : {false, true}) check_backward(p, in_place, accumulate);
    });
}

// A weight of 0 has a gradient: it is computed from inp, not from out, where the channel is lost.
TEST_P(QkNorm, AWeightOfZeroHasAGradient) {
    const Problem p({20, 2, 2, 8, 8}, activation(), true);
    const TestArray zeros = TestArray::of(std::vector<double>(8, 0.0), {8});
    const TestArray inp = TestArray::random(p.T, {20, p.ld}, 1), dout = TestArray::random(p.T, {20, p.ld}, 2);
    const TestArray rstd = TestArray::poisoned({20, 4}), dq = TestArray::poisoned({8}), dk = TestArray::poisoned({8});
    const TestArray scratch = TestArray::scratch(qk_norm_backward_scratch(20, 2, 2, 8));
    const TestArray out = TestArray::random(p.T, {20, p.ld}, 3);
    qk_norm_forward(p.heads(out), rstd, p.heads(inp), {zeros, zeros}, p.positions, p.table, 2, EPS, Stream{});
    qk_norm_backward(p.heads(dout), {dq, dk}, p.heads(dout), p.heads(inp), rstd, {zeros, zeros}, p.positions, p.table,
                     2, scratch, false, Stream{});
    for (const double x : p.channels(out.fetch())) ASSERT_EQ(x, 0);
    for (const double x : p.channels(dout.fetch())) ASSERT_EQ(x, 0);
    for (const TestArray* d : {&dq, &dk})
        for (const double x : d->fetch()) EXPECT_GT(std::fabs(x), 1e-3);
}

TEST_P(QkNorm, BitsDoNotDependOnThreads) {
    const Problem p({300, 3, 2, 64, 64}, activation(), true);
    const TestArray inp = TestArray::random(p.T, {300, p.ld}, 1), dout = TestArray::random(p.T, {300, p.ld}, 2);
    expect_deterministic("out and gradients", [&] {
        const TestArray out = TestArray::random(p.T, {300, p.ld}, 3), dinp = TestArray::random(p.T, {300, p.ld}, 3);
        const TestArray rstd = TestArray::poisoned({300, 5}), dq = TestArray::poisoned({64}),
                        dk = TestArray::poisoned({64});
        const TestArray scratch = TestArray::scratch(qk_norm_backward_scratch(300, 3, 2, 64));
        qk_norm_forward(p.heads(out), rstd, p.heads(inp), p.weights(), p.positions, p.table, 3, EPS, Stream{});
        qk_norm_backward(p.heads(dinp), {dq, dk}, p.heads(dout), p.heads(inp), rstd, p.weights(), p.positions, p.table,
                         3, scratch, false, Stream{});
        std::vector<double> all = out.fetch();
        for (const TestArray* t : {&dinp, &rstd, &dq, &dk})
            for (const double x : t->fetch()) all.push_back(x);
        return all;
    });
}

INSTANTIATE_DTYPES(QkNorm);

TEST(QkNormArguments, ZeroTokens) {
    const Problem p({0, 2, 1, 8, 8}, DType::F32, true);
    check_forward(p, true, true);
    const TestArray rows = TestArray::random({0, p.ld}, 1), rstd = TestArray::poisoned({0, 3});
    const TestArray dq = TestArray::poisoned({8}), dk = TestArray::random({8}, 2);
    const TestArray scratch = TestArray::scratch(qk_norm_backward_scratch(0, 2, 1, 8));
    const auto backward = [&](bool accumulate) {
        qk_norm_backward(p.heads(rows), {dq, dk}, p.heads(rows), p.heads(rows), rstd, p.weights(), p.positions, p.table,
                         2, scratch, accumulate, Stream{});
    };
    backward(false);
    for (const double x : dq.fetch()) EXPECT_EQ(x, 0);
}

TEST(QkNormArguments, InvalidArgumentsAreErrors) {
    const Problem p({3, 2, 1, 8, 8}, DType::F32, true);
    const TestArray rows = TestArray::random({3, p.ld}, 1), rstd = TestArray::poisoned({3, 3}),
                    shorter = TestArray::random({3, 2}, 2), seven = TestArray::random({7}, 3);
    const auto forward = [&](QkWeights weight, Tensor r, int64_t NH) {
        qk_norm_forward(p.heads(rows), r, p.heads(rows), weight, p.positions, p.table, NH, EPS, Stream{});
    };
    expect_error([&] { forward(p.weights(), shorter, 2); },
                 "qk_norm_forward: rstd is fp32 [3, 2], expected fp32 [3, 3]");
    expect_error(
        [&] {
            forward({p.weight_q, {}}, rstd, 2);
        },
        "qk_norm_forward: weight.k is missing; give both weights or none");
    expect_error(
        [&] {
            forward({p.weight_q, seven}, rstd, 2);
        },
        "qk_norm_forward: weight.k is fp32 [7], expected fp32 [8]");
    expect_error([&] { forward(p.weights(), rstd, 4); }, "qk_norm_forward: NH is 4, expected 0 … 3, the heads of inp");
    const TestArray wide = TestArray::random({1, 513}, 4);
    expect_error([&] { qk_norm_forward(split_heads(wide, 1), {}, split_heads(wide, 1), {}, {}, {}, 1, EPS, Stream{}); },
                 "qk_norm_forward: head size 513 lies outside [1, 512]");
    expect_error(
        [&] {
            qk_norm_backward(p.heads(rows), {seven, seven}, p.heads(rows), p.heads(rows), rstd, p.weights(),
                             p.positions, p.table, 2, {}, false, Stream{});
        },
        "qk_norm_backward: dweight.q is fp32 [7], expected fp32 [8]");
    const TestArray beyond = TestArray::ints({0, 50, -1}, {3});
    const TestArray fresh = TestArray::random({3, p.ld}, 1), in_table = TestArray::random({3, p.ld}, 1);
    const auto rotate = [&](const TestArray& x, Tensor table) {
        qk_norm_forward(p.heads(x), {}, p.heads(x), {}, beyond, table, 2, EPS, Stream{});
    };
#ifdef USE_CUDA  // the launch does not wait for the kernel: the token is normalised but not rotated
    rotate(fresh, p.table);
    rotate(in_table, {});
    for (size_t i = size_t(p.ld); i < size_t(3 * p.ld); i++) EXPECT_EQ(fresh.fetch()[i], in_table.fetch()[i]) << i;
#else
    expect_error([&] { rotate(fresh, p.table); },
                 "qk_norm_forward: position 50 of token 1 lies outside the table of 50 positions");
    expect_same_bits("x", fresh.values(), fresh.fetch());
    rotate(in_table, {});  // without a table positions are not read
#endif
}
