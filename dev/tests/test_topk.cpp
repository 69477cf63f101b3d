// The k largest of rows against a sort: ties, NaN and infinities, rows of one chunk and of several.
#include "kernels/generation/topk.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "dev/tests/test_util.h"

namespace {

class TopK : public DTypeTest {};

struct Result {
    std::vector<double> values;
    std::vector<int32_t> ids;
};

Result run(const Tensor& inp, int64_t k) {
    const int64_t B = inp.shape[0];
    const TestArray values = TestArray::poisoned(inp.dtype, {B, k}),
                    ids = TestArray::ints(std::vector<int32_t>(size_t(B * k), -7), {B, k}),
                    scratch = TestArray::scratch(top_k_scratch(B, inp.shape[1], k));
    top_k(values, ids, inp, scratch, Stream{});
    return {values.fetch(), ids.fetch_ints()};
}

// Sorted by value, NaN first, then by id.
std::vector<int32_t> sorted_ids(const double* row, int64_t V, int64_t k) {
    std::vector<int32_t> ids(static_cast<size_t>(V));
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int32_t a, int32_t b) { return std::isnan(row[a]) ? !std::isnan(row[b]) : row[a] > row[b]; });
    ids.resize(size_t(k));
    return ids;
}

void check(const TestArray& inp, int64_t V, int64_t k) {
    const int64_t B = inp.tensor().shape[0], ld = inp.tensor().shape[1];
    SCOPED_TRACE(str("B ", B, " V ", V, " k ", k));
    const Result got = run(inp.tensor().columns(0, V), k);
    for (int64_t b = 0; b < B; b++) {
        const double* row = inp.data() + b * ld;
        const std::vector<int32_t> expected = sorted_ids(row, V, k);
        for (int64_t i = 0; i < k; i++) {
            const size_t at = size_t(b * k + i);
            ASSERT_EQ(got.ids[at], expected[size_t(i)]) << "row " << b << ", rank " << i;
            ASSERT_TRUE(got.values[at] == row[got.ids[at]] || std::isnan(row[got.ids[at]]));
        }
    }
}

}  // namespace

TEST_P(TopK, MatchesSort) {
    for (const int64_t V : {1, 2, 31, 256, 1000, 8191, 50257})
        for (const int64_t k : {1, 2, 5, 64, 1000, 1024})
            if (k <= V)
                for (const int64_t gap : {0, 3}) check(TestArray::random(activation(), {3, V + gap}, 1), V, k);
    check(TestArray::random(activation(), {1, 128256}, 2), 128256, 1024);
    check(TestArray::random(activation(), {1, 128256}, 2, 1, -1000), 128256, 50);  // all negative, many ties in 16 bits
    check(TestArray::random(activation(), {40, 20000}, 3), 20000, 7);
}

TEST_P(TopK, TiesAreOrderedById) {
    for (const int64_t V : {100, 40000}) {
        check(TestArray::of(activation(), std::vector<double>(size_t(2 * V), 3.0), {2, V}), V, 40);
        std::vector<double> values;
        for (int64_t i = 0; i < V; i++) values.push_back(i % 3 == 0 ? -0.0 : i % 3 == 1 ? 0.0 : -1.0);
        check(TestArray::of(activation(), values, {1, V}), V, V / 2 < 1024 ? V / 2 : 1024);
    }
}

TEST_P(TopK, InfinitiesAndNaN) {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    check(TestArray::of(activation(), {-inf, 1, -inf, inf, 0, nan, -5, inf}, {1, 8}), 8, 8);
    std::vector<double> values(30000, -inf);
    values[20000] = 1;
    values[29999] = nan;
    check(TestArray::of(activation(), values, {1, 30000}), 30000, 100);
}

INSTANTIATE_DTYPES(TopK);

TEST(TopKArguments, InvalidArgumentsAreErrors) {
    const TestArray inp = TestArray::random({2, 8}, 1), values = TestArray::poisoned({2, 3}),
                    ids = TestArray::ints({0, 0, 0, 0, 0, 0}, {2, 3}), nine = TestArray::poisoned({2, 9}),
                    scratch = TestArray::scratch(1 << 16);
    expect_error([&] { top_k(nine, ids, inp, scratch, Stream{}); }, "top_k: k is 9, expected 1 to 8");
    const TestArray row = TestArray::random({1, 2000}, 1), none = TestArray::poisoned({1, 0}),
                    many = TestArray::poisoned({1, TOP_K_MAX + 1});
    expect_error([&] { top_k(none, ids, row, scratch, Stream{}); }, "top_k: k is 0, expected 1 to 1024");
    expect_error([&] { top_k(many, ids, row, scratch, Stream{}); }, "top_k: k is 1025, expected 1 to 1024");
    expect_error([&] { top_k(values, values, inp, scratch, Stream{}); },
                 "top_k: ids is fp32 [2, 3], expected int32 [2, 3]");
    expect_error([&] { top_k(values, ids, Tensor{}, scratch, Stream{}); }, "top_k: inp is missing");
}
