// Adapters of rows against the oracle: several adapters and rows without one, parts, ranks, odd sizes, rows with gaps.
// And a row's result does not depend on the other rows of its batch.
#include "kernels/generation/lora_rows.h"

#include <cmath>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

struct Case {
    int64_t N, C, adapters, R;
    std::vector<int64_t> part_rows;
    std::vector<int32_t> adapter_of_row;  // of row n: [n % size]
    int64_t gap = 0;

    int64_t OC() const {
        int64_t sum = 0;
        for (const int64_t rows : part_rows) sum += rows;
        return sum;
    }
    int32_t adapter(int64_t n) const { return adapter_of_row[size_t(n) % adapter_of_row.size()]; }
};

struct Arrays {
    TestArray x, y, a, b;
    AdapterWeights weights;
    Arrays(const Case& c, DType T)
        : x(TestArray::random(T, {c.N, c.C + c.gap}, 1)),
          y(TestArray::random(T, {c.N, c.OC() + c.gap}, 2)),
          a(TestArray::random(T, {c.adapters, int64_t(c.part_rows.size()) * c.R, c.C}, 3, 1 / std::sqrt(double(c.C)))),
          b(TestArray::random(T, {c.adapters, c.OC(), c.R}, 4, 1 / std::sqrt(double(c.R)))),
          weights{a, b, {}} {
        int64_t end = 0;
        for (size_t p = 0; p < c.part_rows.size(); p++) weights.part_ends[p] = end += c.part_rows[p];
    }
};

// Both products, of rows [first, end) alone. Returns y.
std::vector<double> run(const Case& c, DType T, int64_t first, int64_t end) {
    const Arrays arrays(c, T);
    std::vector<int32_t> adapter_of_row;
    for (int64_t n = first; n < end; n++) adapter_of_row.push_back(c.adapter(n));
    const HostAdapterTiles host = tiles_of_adapters(adapter_of_row, c.adapters);
    const int64_t count = int64_t(host.adapters.size());
    const TestArray rows = TestArray::ints(host.rows, {count * LORA_TILE}),
                    adapters = TestArray::ints(host.adapters, {count}),
                    low_rank =
                        TestArray::poisoned({adapter_splits(c.C), end - first, int64_t(c.part_rows.size()) * c.R});
    const Tensor y = arrays.y.tensor().columns(0, c.OC()).rows(first, end);
    adapters_shrink(low_rank, arrays.x.tensor().columns(0, c.C).rows(first, end), arrays.weights, {rows, adapters}, {});
    adapters_expand(y, low_rank, arrays.weights, {rows, adapters}, {});
    synchronize({});
    const std::vector<double> all = arrays.y.fetch();
    const int64_t stride = c.OC() + c.gap;
    return {all.begin() + first * stride, all.begin() + end * stride};
}

void check(const Case& c, DType T) {
    SCOPED_TRACE(str("N ", c.N, " C ", c.C, " adapters ", c.adapters, " R ", c.R, " OC ", c.OC()));
    const Arrays arrays(c, T);
    const std::vector<double> x = arrays.x.values(), y = arrays.y.values(), a = arrays.a.values(),
                              b = arrays.b.values();
    const int64_t OC = c.OC(), parts = int64_t(c.part_rows.size());
    reference::Values ref(c.N * (OC + c.gap));
    for (int64_t n = 0; n < c.N; n++) {
        for (int64_t o = 0, part = 0, end = c.part_rows[0]; o < OC + c.gap; o++) {
            reference::Value sum;
            sum.add(y[size_t(n * (OC + c.gap) + o)]);
            if (o < OC && c.adapter(n) >= 0) {
                if (o == end) end += c.part_rows[size_t(++part)];
                for (int64_t r = 0; r < c.R; r++) {
                    double h = 0, mag = 0;
                    const size_t row = size_t((c.adapter(n) * parts + part) * c.R + r);
                    for (int64_t i = 0; i < c.C; i++) {
                        const double term = a[row * size_t(c.C) + size_t(i)] * x[size_t(n * (c.C + c.gap) + i)];
                        h += term;
                        mag += std::fabs(term);
                    }
                    const double weight = b[size_t((c.adapter(n) * OC + o) * c.R + r)];
                    sum.add(weight * h, std::fabs(weight) * mag);
                }
            }
            ref.set(n * (OC + c.gap) + o, sum);
        }
    }
    const std::vector<double> got = run(c, T, 0, c.N);
    expect_close("y", got, ref.value, ref.mag, c.C + c.R, OC + c.gap, T);
    for (int64_t n = 0; n < c.N; n++) {
        const int64_t stride = OC + c.gap;
        const std::vector<double> row(got.begin() + n * stride, got.begin() + (n + 1) * stride);
        if (c.adapter(n) < 0)
            expect_same_bits("a row without an adapter", row,
                             {&y[size_t(n * stride)], &y[size_t(n * stride)] + stride});
        if (n % 5 == 0) expect_same_bits("a row alone", row, run(c, T, n, n + 1));
    }
}

class LoraRows : public DTypeTest {};

TEST_P(LoraRows, MatchesOracle) {
    check({1, 64, 1, 8, {32}, {0}}, activation());
    check({19, 128, 3, 16, {64, 16, 16}, {0, -1, 2, 2, 1}}, activation());
    check({40, 1032, 2, 8, {300, 300}, {1, 1, 1, 0}, 24}, activation());  // two splits of C, two blocks of outputs
    check({9, 77, 4, 24, {5, 3}, {3, 0, -1}, 1}, activation());           // nothing is aligned
    check({8, 2048, 2, 64, {40}, {1, 0}}, activation());
    check({5, 96, 2, 8, {10}, {-1}}, activation());
}

INSTANTIATE_DTYPES(LoraRows);

TEST(LoraRowsTiles, HoldEachRowOnce) {
    for (const int64_t N : {1, 7, 8, 9, 64, 100}) {
        for (const int64_t adapters : {1, 3, 8}) {
            std::vector<int32_t> adapter_of_row;
            for (int64_t n = 0; n < N; n++) adapter_of_row.push_back(int32_t((n * 7 + n / 3) % (adapters + 1)) - 1);
            const HostAdapterTiles tiles = tiles_of_adapters(adapter_of_row, adapters);
            EXPECT_EQ(int64_t(tiles.adapters.size()), max_adapter_tiles(N, adapters));
            std::vector<int> times(size_t(N), 0);
            for (size_t i = 0; i < tiles.rows.size(); i++) {
                if (tiles.rows[i] < 0) continue;
                times[size_t(tiles.rows[i])]++;
                EXPECT_EQ(tiles.adapters[i / LORA_TILE], adapter_of_row[size_t(tiles.rows[i])]);
            }
            for (int64_t n = 0; n < N; n++) EXPECT_EQ(times[size_t(n)], adapter_of_row[size_t(n)] >= 0);
        }
    }
}

TEST(LoraRowsArguments, InvalidArgumentsAreErrors) {
    const TestArray x = TestArray::random({2, 4}, 1), y = TestArray::random({2, 6}, 2),
                    a = TestArray::random({1, 16, 4}, 3), b = TestArray::random({1, 6, 8}, 4),
                    low_rank = TestArray::poisoned({adapter_splits(4), 2, 16}),
                    rows = TestArray::ints(std::vector<int32_t>(8, -1), {8}), none = TestArray::ints({-1}, {1});
    const auto shrink = [&](AdapterWeights w, const Tensor& to) { adapters_shrink(to, x, w, {rows, none}, {}); };
    expect_error([&] { shrink({a, b, {3, 5}}, low_rank); }, "adapters_shrink: the parts end at output 5, expected 6");
    expect_error(
        [&] {
            shrink({a, b, {3, 7}}, low_rank);
        },
        "adapters_shrink: part 1 ends at output 7; it must end after 3 and by 6");
    expect_error(
        [&] {
            shrink({a, b, {6}}, low_rank);
        },
        "adapters_shrink: A is fp32 [1, 16, 4], expected fp32 [1, 8, 4]");
    expect_error(
        [&] {
            shrink({a, b, {3, 6}}, x);
        },
        str("adapters_shrink: low_rank is fp32 [2, 4], expected fp32 [", adapter_splits(4), ", 2, 16]"));
    const TestArray odd = TestArray::random({1, 6, 5}, 4);
    expect_error(
        [&] {
            shrink({a, odd, {3, 6}}, low_rank);
        },
        "adapters_shrink: a rank of 5; it must be a positive multiple of 8, at most 512");
    expect_error(
        [&] {
            adapters_expand(y, low_rank, {a, b, {3, 6}}, {none, none}, {});
        },
        "adapters_expand: tiles.rows is int32 [1], expected int32 [8]");
}

}  // namespace
