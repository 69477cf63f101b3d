// QK-norm of all heads together against the oracle: in place and not, with full, partial and no RoPE, q and k inside
// packed rows of sizes that vectors divide and others.
#include "kernels/qk_norm_all_heads.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/rope.h"

namespace {

class QkNormAllHeads : public DTypeTest {};

constexpr float EPS = 1e-6f;
constexpr int64_t POSITIONS = 50;
using Sizes = reference::QkNorm;

// R = HS: full RoPE; less: partial; 0: none. The last row is longer than a block of threads holds.
const Sizes CASES[] = {{1, 1, 1, 2, 2},   {5, 3, 1, 6, 6},     {60, 2, 2, 64, 64},   {17, 6, 2, 128, 128},
                       {9, 4, 2, 80, 32}, {33, 5, 3, 64, 64},  {7, 2, 1, 5, 0},      {8, 4, 2, 64, 0},
                       {6, 3, 3, 32, 16}, {700, 3, 1, 16, 16}, {3, 40, 8, 128, 128}, {2, 75, 1, 128, 128}};

struct Problem {
    const Sizes z;
    const DType T;
    const int64_t Q, K, ld;
    std::vector<int32_t> position_ids;
    const TestArray table, positions, weight_q, weight_k, inp, dout;

    Problem(const Sizes& sizes, DType dtype)
        : z(sizes),
          T(dtype),
          Q(z.NH * z.HS),
          K(z.NKV * z.HS),
          ld(Q + 2 * K + (z.N % 2 ? 8 : 3)),
          position_ids(ids(z.N)),
          table(z.R ? TestArray::of(reference::rope_table(POSITIONS, z.R, 10000, {}), {POSITIONS, z.R / 2, 2})
                    : TestArray::random({1, 1, 2}, 9)),
          positions(TestArray::ints(position_ids, {z.N})),
          weight_q(TestArray::random({Q}, 3, 0.3, 1)),
          weight_k(TestArray::random({K}, 4, 0.3, 1)),
          inp(TestArray::random(T, {z.N, ld}, 1, 1.5, 0.3)),
          dout(TestArray::random(T, {z.N, ld}, 2)) {}

    static std::vector<int32_t> ids(int64_t N) {
        std::vector<int32_t> p;
        for (int64_t n = 0; n < N; n++) p.push_back(int32_t((n * 7 + 49) % POSITIONS));  // not in order; the last too
        return p;
    }
    Tensor rows(const TestArray& x) const { return x.tensor().columns(0, Q + K); }
    std::vector<double> channels(const std::vector<double>& x) const { return take_columns(x, ld, Q + K); }
    QkWeights weights() const { return {weight_q, weight_k}; }
    Tensor table_or_null() const { return z.R ? table.tensor() : Tensor{}; }
    // v, and the gaps, keep their bits.
    void expect_rest_untouched(const std::vector<double>& before, const std::vector<double>& after) const {
        for (int64_t n = 0; n < z.N; n++)
            for (int64_t c = Q + K; c < ld; c++)
                ASSERT_EQ(after[size_t(n * ld + c)], before[size_t(n * ld + c)]) << n << " " << c;
    }
    reference::QkNormForward reference_forward() const {
        return reference::qk_norm_all_heads_forward(z, channels(inp.values()).data(), weight_q.data(), weight_k.data(),
                                                    position_ids.data(), table.data(), EPS);
    }
};

// The norm's output is rounded to T before it is rotated.
void check_forward(const Problem& p, bool in_place, bool stored) {
    const TestArray x = TestArray::of(p.T, p.inp.values(), {p.z.N, p.ld}),
                    separate = TestArray::random(p.T, {p.z.N, p.ld}, 5), rstd_q = TestArray::poisoned({p.z.N}),
                    rstd_k = TestArray::poisoned({p.z.N});
    const TestArray& out = in_place ? x : separate;
    qk_norm_all_heads_forward(p.rows(out), stored ? QkRstd{rstd_q, rstd_k} : QkRstd{}, p.rows(x), p.weights(),
                              p.positions, p.table_or_null(), p.z.heads(), EPS, Stream{});
    const reference::QkNormForward ref = p.reference_forward();
    expect_close("out", p.channels(out.fetch()), ref.out.value, ref.out.mag, p.Q, p.Q + p.K, p.T, p.z.R ? 2 : 1);
    p.expect_rest_untouched(out.values(), out.fetch());
    if (!stored) return;
    std::vector<double> rstd = rstd_q.fetch();
    for (const double k : rstd_k.fetch()) rstd.push_back(k);
    expect_close("rstd", rstd, ref.rstd.value, ref.rstd.mag, p.Q, 1);
}

// rope() gives what the norm's backward pass reads: dout rotated back, rounded to T.
void check_backward(const Problem& p, bool accumulate) {
    const std::vector<double> exact = p.reference_forward().rstd.value;
    const auto middle = exact.begin() + p.z.N;
    const TestArray rstd_q = TestArray::of(std::vector<double>(exact.begin(), middle), {p.z.N}),
                    rstd_k = TestArray::of(std::vector<double>(middle, exact.end()), {p.z.N});
    std::vector<double> rstd = rstd_q.values();
    for (const double k : rstd_k.values()) rstd.push_back(k);
    const TestArray dq = accumulate ? TestArray::random({p.Q}, 6) : TestArray::poisoned({p.Q});
    const TestArray dk = accumulate ? TestArray::random({p.K}, 7) : TestArray::poisoned({p.K});
    const TestArray scratch = TestArray::scratch(qk_norm_all_heads_backward_scratch(p.z.N, p.Q, p.K));
    const TestArray d = TestArray::of(p.T, p.dout.values(), {p.z.N, p.ld}),
                    g = TestArray::of(p.T, p.dout.values(), {p.z.N, p.ld});
    if (p.z.R) rope(split_heads(p.rows(g), p.z.heads()), p.positions, p.table, true, Stream{});
    const reference::QkNormBackward ref = reference::qk_norm_all_heads_backward(
        p.z, p.channels(g.fetch()).data(), p.channels(p.inp.values()).data(), rstd.data(), p.weight_q.data(),
        p.weight_k.data(), accumulate ? dq.data() : nullptr, accumulate ? dk.data() : nullptr);
    qk_norm_all_heads_backward(p.rows(d), {dq, dk}, p.rows(p.inp), {rstd_q, rstd_k}, p.weights(), p.positions,
                               p.table_or_null(), p.z.heads(), scratch, accumulate, Stream{});
    expect_close("dinp", p.channels(d.fetch()), ref.dinp.value, ref.dinp.mag, p.Q, p.Q + p.K, p.T);
    p.expect_rest_untouched(d.values(), d.fetch());
    expect_close("dweight.q", dq.fetch(), ref.dweight_q.value, ref.dweight_q.mag, p.z.N, p.Q);
    expect_close("dweight.k", dk.fetch(), ref.dweight_k.value, ref.dweight_k.mag, p.z.N, p.K);
}

template <typename F>
void for_each_case(DType T, F check) {
    for (const Sizes& z : CASES) {
        SCOPED_TRACE(str("N ", z.N, " NH ", z.NH, " NKV ", z.NKV, " HS ", z.HS, " R ", z.R));
        check(Problem(z, T));
    }
}

}  // namespace

TEST_P(QkNormAllHeads, ForwardMatchesOracle) {
    for_each_case(activation(), [](const Problem& p) {
        for (const bool in_place : {false, true})
            for (const bool stored : {false, true}) check_forward(p, in_place, stored);
    });
}

TEST_P(QkNormAllHeads, BackwardMatchesOracle) {
    for_each_case(activation(), [](const Problem& p) {
        for (const bool accumulate : {false, true}) check_backward(p, accumulate);
    });
}

INSTANTIATE_DTYPES(QkNormAllHeads);

TEST(QkNormAllHeadsArguments, ZeroTokens) {
    const Problem p({0, 2, 1, 8, 8}, DType::F32);
    check_forward(p, true, true);
    check_backward(p, false);
}

TEST(QkNormAllHeadsArguments, InvalidArgumentsAreErrors) {
    const Problem p({3, 2, 1, 8, 8}, DType::F32);
    const TestArray rstd = TestArray::poisoned({3}), longer = TestArray::poisoned({4});
    const auto forward = [&](QkWeights weight, const TestArray& statistics) {
        qk_norm_all_heads_forward(p.rows(p.inp), {rstd, statistics}, p.rows(p.inp), weight, p.positions, p.table, 3,
                                  EPS, Stream{});
    };
    const QkWeights without_k{p.weight_q, {}}, of_one_head{p.weight_k, p.weight_k};
    expect_error([&] { forward(without_k, rstd); },
                 "qk_norm_all_heads_forward: rows are [3, 24], weights [16] and []; expected [N, Cq + Ck], [Cq] and "
                 "[Ck]");
    expect_error([&] { forward(of_one_head, rstd); },
                 "qk_norm_all_heads_forward: rows are [3, 24], weights [8] and [8]; expected [N, Cq + Ck], [Cq] and "
                 "[Ck]");
    expect_error([&] { forward(p.weights(), longer); }, "rmsnorm_forward: rstd is fp32 [4], expected fp32 [3]");
    expect_error(
        [&] {
            qk_norm_all_heads_backward(p.rows(p.dout), p.weights(), p.rows(p.inp), {}, p.weights(), p.positions,
                                       p.table, 3, {}, false, Stream{});
        },
        "rmsnorm_backward: rstd is missing");
}
