// Embedding and its gradients against the oracle: repeated tokens, with and without positions, accumulation, rows
// without a token, ids outside the tables.
#include "kernels/embedding.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/generation/embedding_unscaled.h"
#include "runtime/device/convert_dtype.h"

namespace {

class Embedding : public DTypeTest {};

std::vector<int32_t> random_ids(int64_t N, int64_t rows, uint64_t seed) {
    std::vector<int32_t> ids;
    for (int64_t n = 0; n < N; n++) ids.push_back(int32_t(philox(seed, uint64_t(n), 0).v[0] % uint64_t(rows)));
    return ids;
}

void check(DType T, int64_t N, int64_t C, int64_t V, int64_t P, bool positions_given, bool accumulate, int64_t gap) {
    SCOPED_TRACE(str("N ", N, " C ", C, " V ", V, " positions ", positions_given, " accumulate ", accumulate));
    const int64_t ld = C + gap;
    const std::vector<int32_t> token_ids = random_ids(N, V, 1), position_ids = random_ids(N, P, 2);
    const TestArray tokens = TestArray::ints(token_ids, {N}), positions = TestArray::ints(position_ids, {N});
    const TestArray wte = TestArray::random(T, {V, C}, 3), wpe = TestArray::random(T, {P, C}, 4);
    const TestArray out = TestArray::poisoned(T, {N, ld});
    embedding_forward(out.tensor().columns(0, C), tokens, positions_given ? positions.tensor() : Tensor{}, wte,
                      positions_given ? wpe.tensor() : Tensor{}, Stream{});
    reference::Values ref = reference::embedding_forward(token_ids.data(), position_ids.data(), wte.data(),
                                                         positions_given ? wpe.data() : nullptr, N, C);
    expect_close("out", take_columns(out.fetch(), ld, C), ref.value, ref.mag, 1, C, T);
    expect_gaps_untouched("out", out.fetch(), ld, C);

    const TestArray dout = TestArray::random(T, {N, ld}, 5);
    const std::vector<double> d = take_columns(dout.values(), ld, C);
    const TestArray dwte = accumulate ? TestArray::random({V, C}, 6) : TestArray::poisoned({V, C});
    const TestArray dwpe = TestArray::random({P, C}, 7);  // overwritten where dwte is accumulated, and the reverse
    const TestArray scratch = TestArray::scratch(embedding_backward_scratch(N, V, C));
    embedding_backward(dwte, positions_given ? dwpe.tensor() : Tensor{}, dout.tensor().columns(0, C), tokens, positions,
                       scratch, accumulate, !accumulate, Stream{});
    ref = reference::embedding_backward(d.data(), token_ids.data(), accumulate ? dwte.data() : nullptr, N, C, V);
    expect_close("dwte", dwte.fetch(), ref.value, ref.mag, N, C);
    if (positions_given) {
        ref = reference::embedding_backward(d.data(), position_ids.data(), accumulate ? nullptr : dwpe.data(), N, C, P);
        expect_close("dwpe", dwpe.fetch(), ref.value, ref.mag, N, C);
    } else {
        expect_same_bits("dwpe", dwpe.values(), dwpe.fetch());
    }
}

}  // namespace

TEST_P(Embedding, MatchesOracle) {
    const int64_t sizes[][4] = {{1, 1, 1, 1},        {5, 3, 2, 9},      {17, 16, 300, 17}, {64, 65, 7, 16},
                                {300, 130, 50, 100}, {1000, 64, 9, 33}, {96, 16, 1, 3}};
    for (const auto& s : sizes)
        for (int options = 0; options < 4; options++)
            check(activation(), s[0], s[1], s[2], s[3], options & 1, options & 2, s[0] % 2 * 3);
}

// A rank that holds only one of the tables.
TEST_P(Embedding, GradientsAreOptional) {
    const TestArray tokens = TestArray::ints({1, 0, 1}, {3}), dout = TestArray::random(activation(), {3, 5}, 1);
    const TestArray dwpe = TestArray::poisoned({2, 5});
    const TestArray scratch = TestArray::scratch(embedding_backward_scratch(3, 2, 5));
    embedding_backward(Tensor{}, dwpe, dout, Tensor{}, tokens, scratch, false, false, Stream{});
    const int32_t ids[] = {1, 0, 1};
    const reference::Values ref = reference::embedding_backward(dout.data(), ids, nullptr, 3, 5, 2);
    expect_close("dwpe", dwpe.fetch(), ref.value, ref.mag, 3, 5);
}

TEST_P(Embedding, BackwardIsDeterministic) {
    const int64_t N = 700, C = 200, V = 13;
    const TestArray tokens = TestArray::ints(random_ids(N, V, 1), {N}),
                    dout = TestArray::random(activation(), {N, C}, 2);
    expect_deterministic("dwte", [&] {
        const TestArray dwte = TestArray::poisoned({V, C}),
                        scratch = TestArray::scratch(embedding_backward_scratch(N, V, C));
        embedding_backward(dwte, Tensor{}, dout, tokens, Tensor{}, scratch, false, false, Stream{});
        return dwte.fetch();
    });
}

INSTANTIATE_DTYPES(Embedding);

TEST(EmbeddingArguments, InvalidArgumentsAreErrors) {
    const TestArray out = TestArray::poisoned({2, 4}), wte = TestArray::random({10, 4}, 1),
                    narrow = TestArray::random({10, 3}, 2);
    const TestArray tokens = TestArray::ints({1, 9}, {2}), three = TestArray::ints({1, 2, 3}, {3});
    const Tensor none;
    expect_error([&] { embedding_forward(out, tokens, none, narrow, none, Stream{}); },
                 "embedding_forward: wte is fp32 [10, 3], expected fp32 [10, 4]");
    expect_error([&] { embedding_forward(out, three, none, wte, none, Stream{}); },
                 "embedding_forward: tokens is int32 [3], expected int32 [2]");
    expect_error([&] { embedding_forward(out, tokens, none, wte, wte, Stream{}); },
                 "embedding_forward: positions is missing");
    expect_error([&] { embedding_backward(wte, none, out, out, none, none, false, false, Stream{}); },
                 "embedding_backward: tokens is fp32 [2, 4], expected int32 [2]");
}

#ifdef USE_CUDA  // the launch does not wait for the kernel: a row of zeros, and no gradient
TEST(EmbeddingArguments, IdsOutsideTheTableGiveZeros) {
    const TestArray table = TestArray::random({10, 4}, 1), dout = TestArray::random({3, 4}, 4);
    const TestArray tokens = TestArray::ints({10, -1, 9}, {3}), positions = TestArray::ints({2, 1 << 30, -7}, {3});
    const TestArray out = TestArray::poisoned({3, 4});
    embedding_forward(out, tokens, positions, table, table, Stream{});
    const TestArray dwte = TestArray::poisoned({10, 4}), dwpe = TestArray::poisoned({10, 4});
    const TestArray scratch = TestArray::scratch(embedding_backward_scratch(3, 10, 4));
    embedding_backward(dwte, dwpe, dout, tokens, positions, scratch, false, false, Stream{});
    for (int64_t c = 0; c < 4; c++) {
        EXPECT_EQ(out.fetch()[size_t(c)], table.data()[2 * 4 + c]);
        EXPECT_EQ(out.fetch()[size_t(4 + c)], 0);
        EXPECT_EQ(out.fetch()[size_t(8 + c)], table.data()[9 * 4 + c]);
    }
    for (int64_t i = 0; i < 40; i++) {
        EXPECT_EQ(dwte.fetch()[size_t(i)], i / 4 == 9 ? dout.data()[8 + i % 4] : 0) << i;
        EXPECT_EQ(dwpe.fetch()[size_t(i)], i / 4 == 2 ? dout.data()[i % 4] : 0) << i;
    }
}

// The embedding's bits, and what the norm behind it needs: rows times its weight, and mean and M2 of each part of a
// row. These are sums of 64 numbers around 1 in fp32, so that no more than 7·2⁻²⁴ of Σ|x| is lost in the mean; M2 loses
// as much of Σ(x − mean)² and, by the error of the mean, far less.
TEST(EmbeddingUnscaled, MakesWhatTheNormNeeds) {
    struct Case {
        int64_t N, C;
        bool positions, centred;
    };
    const DType T = DType::BF16;
    for (const auto& [N, C, positions, centred] :
         {Case{64, 768, true, true}, {1, 72, false, false}, {33, 2048, false, false}, {17, 130, true, true}}) {
        SCOPED_TRACE(str("N ", N, " C ", C, " centred ", centred));
        const int64_t V = 50, P = 20, parts_of_row = unscaled_parts(C);
        std::vector<int32_t> token_ids = random_ids(N, V, 1);
        token_ids[0] = -1;  // a row of zeros
        const TestArray tokens = TestArray::ints(token_ids, {N}), at = TestArray::ints(random_ids(N, P, 2), {N});
        const TestArray wte = TestArray::random(T, {V, C}, 3, 1, 1), wpe = TestArray::random(T, {P, C}, 4);
        const TestArray weight = TestArray::random({C}, 5), expected = TestArray::poisoned(T, {N, C});
        const TestArray out = TestArray::poisoned(T, {N, C}), rows = TestArray::poisoned(T, {N, C}),
                        parts = TestArray::poisoned({parts_of_row, UNSCALED_MAX_ROWS, 2});
        const UnscaledRows next{rows, parts, InputNorm{weight, {}, 1e-5f, centred}};
        const Tensor table = positions ? wpe.tensor() : Tensor{};
        ASSERT_TRUE(embedding_unscaled(out, next, tokens, at, wte, table, Stream{}));
        embedding_forward(expected, tokens, at, wte, table, Stream{});
        const std::vector<double> x = out.fetch(), scaled = rows.fetch(), statistics = parts.fetch();
        expect_same_bits("out", expected.fetch(), x);
        for (int64_t i = 0; i < N * C; i++)
            ASSERT_EQ(scaled[size_t(i)], to_float(to_bf16(float(x[size_t(i)]) * float(weight.data()[i % C])))) << i;
        for (int64_t n = 0; n < N; n++)
            for (int64_t part = 0; part < parts_of_row; part++) {
                const int64_t first = part * UNSCALED_COLUMNS, last = std::min(C, first + UNSCALED_COLUMNS);
                const auto begin = x.begin() + n * C + first, end = x.begin() + n * C + last;
                const auto sum = [&](auto f) {
                    return std::accumulate(begin, end, 0.0, [&](double total, double v) { return total + f(v); });
                };
                const double mean = centred ? sum([](double v) { return v; }) / double(last - first) : 0;
                const double m2 = sum([&](double v) { return (v - mean) * (v - mean); });
                const double* const got = &statistics[size_t(2 * (part * UNSCALED_MAX_ROWS + n))];
                const double magnitude = sum([](double v) { return std::abs(v); }) / double(last - first);
                EXPECT_NEAR(got[0], mean, 7 * std::ldexp(1, -24) * magnitude) << n << " " << part;
                EXPECT_NEAR(got[1], m2, 16 * std::ldexp(1, -24) * m2) << n << " " << part;
            }
    }
    const TestArray many = TestArray::poisoned(T, {65, 64}), odd = TestArray::poisoned(T, {2, 63});
    const TestArray ids = TestArray::ints(random_ids(65, 9, 1), {65}), table = TestArray::random(T, {9, 64}, 2);
    const TestArray parts = TestArray::poisoned({1, UNSCALED_MAX_ROWS, 2}), weight = TestArray::random({64}, 3);
    const UnscaledRows of_many{many, parts, InputNorm{weight, {}}},
        of_odd{odd, parts, InputNorm{weight.tensor().rows(0, 63), {}}};
    EXPECT_FALSE(embedding_unscaled(many, of_many, ids, {}, table, {}, Stream{}));
    EXPECT_FALSE(
        embedding_unscaled(odd, of_odd, ids.tensor().rows(0, 2), {}, table.tensor().columns(0, 63), {}, Stream{}));
    expect_error([&] { embedding_unscaled(many, of_many, ids, {}, odd, {}, Stream{}); },
                 "embedding_unscaled: wte is bf16 [2, 63], expected bf16 [2, 64]");
}
#else
TEST(EmbeddingArguments, IdsOutsideTheTableAreErrorsAndWriteNothing) {
    const TestArray out = TestArray::poisoned({2, 4}), table = TestArray::random({10, 4}, 1);
    const TestArray good = TestArray::ints({0, 9}, {2}), high = TestArray::ints({0, 10}, {2}),
                    low = TestArray::ints({-1, 0}, {2});
    const Tensor none;
    expect_error([&] { embedding_forward(out, high, none, table, none, Stream{}); },
                 "embedding_forward: tokens[1] is 10, expected 0 … 9");
    expect_error([&] { embedding_forward(out, low, none, table, none, Stream{}); },
                 "embedding_forward: tokens[0] is -1, expected 0 … 9");
    expect_error([&] { embedding_forward(out, good, high, table, table, Stream{}); },
                 "embedding_forward: positions[1] is 10, expected 0 … 9");
    const TestArray dwte = TestArray::random({10, 4}, 2), dwpe = TestArray::random({10, 4}, 3),
                    dout = TestArray::random({2, 4}, 4);
    expect_error([&] { embedding_backward(dwte, dwpe, dout, good, high, none, false, false, Stream{}); },
                 "embedding_backward: positions[1] is 10, expected 0 … 9");
    expect_same_bits("dwte", dwte.values(), dwte.fetch());
    expect_same_bits("out", out.values(), out.fetch());
}
#endif
