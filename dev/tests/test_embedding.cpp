// Embedding and its gradients against the oracle: repeated tokens, with and without positions, accumulation, rows
// without a token, ids outside the tables.
#include "kernels/embedding.h"

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

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
