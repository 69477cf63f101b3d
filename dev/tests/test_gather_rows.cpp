// gather_rows and scatter_rows against loops: missing rows, repeated calls on poisoned memory, strides, bad indices.
#include "kernels/gather_rows.h"

#include "dev/tests/test_util.h"

namespace {

class GatherRows : public DTypeTest {};

// n different indices below N in ascending order, every third one replaced by −1.
std::vector<int32_t> some_rows(int64_t n, int64_t N) {
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < n; i++) rows.push_back(i % 3 == 2 ? -1 : int32_t(i * N / n));
    return rows;
}

// A scaled value is a product in fp32, rounded to T.
void check(DType T, int64_t n, int64_t N, int64_t C, int64_t gap, float scale = 1) {
    SCOPED_TRACE(str("n ", n, " N ", N, " C ", C, " gap ", gap, " scale ", scale));
    const int64_t ld = C + gap;
    const std::vector<int32_t> indices = some_rows(n, N);
    const TestArray rows = TestArray::ints(indices, {n});
    const TestArray all = TestArray::random(T, {N, ld}, 1), some = TestArray::random(T, {n, ld}, 2);
    const TestArray gathered = TestArray::poisoned(T, {n, ld}), scattered = TestArray::poisoned(T, {N, ld});
    gather_rows(gathered.tensor().columns(0, C), all.tensor().columns(0, C), rows, Stream{}, scale);
    scatter_rows(scattered.tensor().columns(0, C), some.tensor().columns(0, C), rows, Stream{}, scale);
    std::vector<double> expected_some(size_t(n * C), 0), expected_all(size_t(N * C), 0);
    const std::vector<double> all_values = take_columns(all.values(), ld, C),
                              values = take_columns(some.values(), ld, C);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = indices[size_t(i)];
        for (int64_t c = 0; row >= 0 && c < C; c++) {
            expected_some[size_t(i * C + c)] = scale * float(all_values[size_t(row * C + c)]);
            expected_all[size_t(row * C + c)] = scale * float(values[size_t(i * C + c)]);
        }
    }
    EXPECT_EQ(take_columns(gathered.fetch(), ld, C), TestArray::of(T, expected_some, {n, C}).values());
    EXPECT_EQ(take_columns(scattered.fetch(), ld, C), TestArray::of(T, expected_all, {N, C}).values());
    expect_gaps_untouched("gathered", gathered.fetch(), ld, C);
    expect_gaps_untouched("scattered", scattered.fetch(), ld, C);
}

}  // namespace

TEST_P(GatherRows, MatchesLoops) {
    const int64_t sizes[][3] = {{1, 1, 1}, {1, 40, 8}, {5, 9, 3}, {9, 9, 16}, {64, 300, 64}, {200, 333, 130}};
    for (const auto& s : sizes)
        for (const int64_t gap : {0, 3, 8}) check(activation(), s[0], s[1], s[2], gap);
}

// 1/0.7 is no number of T, so that every product is rounded.
TEST_P(GatherRows, Scaled) {
    for (const float scale : {0.5f, 1 / 0.7f, -3.0f})
        for (const int64_t gap : {0, 3}) check(activation(), 40, 77, 24, gap, scale);
}

TEST_P(GatherRows, NoRows) {
    const TestArray all = TestArray::random(activation(), {3, 4}, 1), none = TestArray::poisoned(activation(), {1, 4});
    const TestArray rows = TestArray::ints({-1}, {1});
    gather_rows(none, all, rows, Stream{});
    scatter_rows(all, none, rows, Stream{});
    EXPECT_EQ(none.fetch(), std::vector<double>(4, 0));
    EXPECT_EQ(all.fetch(), std::vector<double>(12, 0));

    const TestArray empty = TestArray::poisoned(activation(), {0, 4}),
                    zeros = TestArray::poisoned(activation(), {1, 4});
    gather_rows(zeros, empty, rows, Stream{});
    scatter_rows(empty, zeros, rows, Stream{});
    EXPECT_EQ(zeros.fetch(), std::vector<double>(4, 0));
}

INSTANTIATE_DTYPES(GatherRows);

TEST(GatherRowsArguments, ErrorsNameTheArgument) {
    const TestArray some = TestArray::poisoned({2, 4}), all = TestArray::random({5, 4}, 1),
                    narrow = TestArray::random({5, 3}, 1), rows = TestArray::ints({0, 4}, {2}),
                    long_rows = TestArray::ints({0, 1, 2}, {3});
    expect_error([&] { gather_rows(some, narrow, rows, Stream{}); },
                 "gather_rows: inp is fp32 [5, 3], expected fp32 [5, 4]");
    expect_error([&] { gather_rows(some, all, long_rows, Stream{}); },
                 "gather_rows: rows is int32 [3], expected int32 [2]");
    expect_error([&] { scatter_rows(narrow, some, rows, Stream{}); },
                 "scatter_rows: out is fp32 [5, 3], expected fp32 [5, 4]");
}

#ifdef USE_CUDA  // the launch does not wait for the kernel
TEST(GatherRowsArguments, IndicesOutsideAreMissingRows) {
    const TestArray some = TestArray::poisoned({2, 4}), all = TestArray::random({5, 4}, 1);
    gather_rows(some, all, TestArray::ints({5, 1 << 30}, {2}), Stream{});
    EXPECT_EQ(some.fetch(), std::vector<double>(8, 0));
}
#else
TEST(GatherRowsArguments, IndicesOutsideAreErrorsAndWriteNothing) {
    const TestArray some = TestArray::poisoned({2, 4}), all = TestArray::random({5, 4}, 1);
    const TestArray high = TestArray::ints({0, 5}, {2}), low = TestArray::ints({-2, 0}, {2});
    expect_error([&] { gather_rows(some, all, high, Stream{}); }, "gather_rows: rows[1] is 5, expected -1 … 4");
    expect_error([&] { scatter_rows(all, some, low, Stream{}); }, "scatter_rows: rows[0] is -2, expected -1 … 4");
    expect_same_bits("some", some.values(), some.fetch());
    expect_same_bits("all", all.values(), all.fetch());
}
#endif
