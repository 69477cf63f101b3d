// Adapters of rows against the oracle: several adapters and rows without one, parts, ranks, odd sizes, rows with gaps.
// And a row's result does not depend on the other rows of its batch.
#include "kernels/generation/lora_rows.h"

#include <cmath>

#include "dev/tests/activation_oracle.h"
#include "dev/tests/test_util.h"
#include "kernels/activation.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/target.h"

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
          b(TestArray::random(T, {c.OC(), c.adapters, c.R}, 4, 1 / std::sqrt(double(c.R)))),
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
                    const double weight = b[size_t((o * c.adapters + c.adapter(n)) * c.R + r)];
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

// The second product for all rows, of a given h. Matrices begin after half of their gap: of 1 or 2 elements nothing is
// aligned. Gaps are NaN.
struct Expansion {
    Case rows;
    TestArray y, h, a, b;
    AdapterWeights weights;
    Expansion(const Case& c, DType T)
        : rows(c),
          y(with_gaps(T, c.N, c.OC(), c.gap, 2)),
          h(with_gaps(T, c.N, width(), c.gap, 5)),
          a(TestArray::poisoned(T, {1, width(), c.C})),
          b(TestArray::random(T, {c.OC(), 1, c.R}, 4, 1 / std::sqrt(double(c.R)))),
          weights{a, b, {}} {
        int64_t end = 0;
        for (size_t p = 0; p < c.part_rows.size(); p++) weights.part_ends[p] = end += c.part_rows[p];
    }
    int64_t width() const { return int64_t(rows.part_rows.size()) * rows.R; }

    static TestArray with_gaps(DType T, int64_t N, int64_t columns, int64_t gap, uint64_t seed) {
        const TestArray values = TestArray::random(T, {N, columns}, seed);
        const int64_t stride = columns + gap;
        std::vector<double> all(size_t(N * stride), NAN);
        for (int64_t i = 0; i < N * columns; i++)
            all[size_t(i / columns * stride + gap / 2 + i % columns)] = values.values()[size_t(i)];
        return TestArray::of(T, all, {N, stride});
    }
    static Tensor inside(const TestArray& t, int64_t columns, int64_t gap) {
        return t.tensor().columns(gap / 2, gap / 2 + columns);
    }
};

// Rows [first, end) alone. Returns their y, with the gaps.
std::vector<double> run_all(const Case& c, DType T, int64_t first, int64_t end) {
    const Expansion e(c, T);
    const Tensor y = e.inside(e.y, c.OC(), c.gap), h = e.inside(e.h, e.width(), c.gap);
    adapter_expand_all(y.rows(first, end), h.rows(first, end), e.weights, {});
    synchronize({});
    const std::vector<double> all = e.y.fetch();
    const int64_t stride = c.OC() + c.gap;
    expect_same_bits("rows before", {all.begin(), all.begin() + first * stride},
                     {e.y.data(), e.y.data() + first * stride});
    expect_same_bits("rows after", {all.begin() + end * stride, all.end()},
                     {e.y.data() + end * stride, e.y.data() + c.N * stride});
    return {all.begin() + first * stride, all.begin() + end * stride};
}

void check_all(const Case& c, DType T) {
    SCOPED_TRACE(str("all rows: N ", c.N, " R ", c.R, " OC ", c.OC(), " gap ", c.gap));
    const Expansion e(c, T);
    const int64_t OC = c.OC(), before = c.gap / 2, stride = OC + c.gap, h_stride = e.width() + c.gap;
    const std::vector<double> got = run_all(c, T, 0, c.N);
    std::vector<double> results;
    reference::Values ref(c.N * OC);
    for (int64_t n = 0; n < c.N; n++) {
        for (int64_t o = -before, part = 0; o < stride - before; o++) {
            const double y = got[size_t(n * stride + before + o)];
            if (o < 0 || o >= OC) {
                EXPECT_TRUE(std::isnan(y)) << "row " << n << ", output " << o << " is " << y;
                continue;
            }
            if (o == e.weights.part_ends[size_t(part)]) part++;
            reference::Value sum;
            sum.add(e.y.values()[size_t(n * stride + before + o)]);
            for (int64_t r = 0; r < c.R; r++)
                sum.add(e.b.values()[size_t(o * c.R + r)] *
                        e.h.values()[size_t(n * h_stride + before + part * c.R + r)]);
            ref.set(n * OC + o, sum);
            results.push_back(y);
        }
    }
    expect_close("y", results, ref.value, ref.mag, c.R + 1, OC, T);
    for (int64_t n = 0; n < c.N; n += 37) {
        const int64_t end = std::min(c.N, n + 1 + n % 3);
        expect_same_bits("rows alone", {got.begin() + n * stride, got.begin() + end * stride}, run_all(c, T, n, end));
    }
}

TEST_P(LoraRows, AllRowsMatchOracle) {
    const auto check_rows = [](int64_t N, int64_t R, std::vector<int64_t> part_rows, int64_t gap = 0) {
        check_all({N, 4, 1, R, std::move(part_rows), {0}, gap}, activation());
    };
    check_rows(1, 8, {40});
    check_rows(17, 24, {40, 24, 8}, 16);
    check_rows(64, 16, {64, 32, 32});
    check_rows(100, 40, {200, 72}, 32);  // the last step over the rank is half a one, the last warp has 4 rows
    check_rows(256, 16, {296, 104, 104}, 48);
    check_rows(257, 64, {72});
    check_rows(72, 512, {16, 8});
    // Nothing is aligned, parts end anywhere.
    check_rows(1, 8, {5, 3}, 1);
    check_rows(17, 16, {1, 33, 31});
    check_rows(100, 24, {270, 37, 38}, 2);
    check_rows(130, 64, {35}, 7);
    check_rows(33, 512, {50, 21}, 3);
    check_rows(64, 16, {64, 32}, 2);   // rows begin in the middle of a vector
    check_rows(64, 16, {36, 32, 4});   // a part does
    check_rows(64, 16, {48, 32}, 20);  // all of that with even strides
}

INSTANTIATE_DTYPES(LoraRows);

// A whole linear layer of rows with adapters, as the engine computes it. `taken`: by linear_with_adapters(), on a
// Hopper GPU in 16 bits.
struct Layer {
    Case rows;
    Activation f = Activation::None;
    bool bias = false, residual = false, taken = true;

    int64_t columns() const { return f == Activation::SwiGLU ? rows.OC() / 2 : rows.OC(); }
};

struct LayerArrays : Arrays {
    TestArray weight, bias, residual;
    LayerArrays(const Layer& l, DType T)
        : Arrays(l.rows, T),
          weight(TestArray::random(T, {l.rows.OC(), l.rows.C + l.rows.gap}, 5, 1 / std::sqrt(double(l.rows.C)))),
          bias(TestArray::random(T, {l.rows.OC()}, 6)),
          residual(TestArray::random(T, {l.rows.N, l.columns() + l.rows.gap}, 7)) {}
};

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

// Rows `chosen` alone; a row keeps its adapter.
std::vector<double> run_layer(const Layer& l, const LayerArrays& a, DType T, const std::vector<int64_t>& chosen) {
    const Case& c = l.rows;
    const int64_t N = int64_t(chosen.size()), OC = c.OC(), columns = l.columns(), ld = columns + c.gap;
    std::vector<double> x, residual;
    std::vector<int32_t> adapter_of_row;
    for (const int64_t n : chosen) {
        const double *from = a.x.data() + n * (c.C + c.gap), *added = a.residual.data() + n * ld;
        x.insert(x.end(), from, from + c.C + c.gap);
        residual.insert(residual.end(), added, added + ld);
        adapter_of_row.push_back(c.adapter(n));
    }
    const HostAdapterTiles host = tiles_of_adapters(adapter_of_row, c.adapters);
    const int64_t tiles = int64_t(host.adapters.size()), parts = int64_t(c.part_rows.size());
    const TestArray in = TestArray::of(T, x, {N, c.C + c.gap}), added = TestArray::of(T, residual, {N, ld}),
                    out = TestArray::poisoned(T, {N, ld}), y = TestArray::poisoned(T, {N, OC}),
                    rows = TestArray::ints(host.rows, {tiles * LORA_TILE}),
                    adapters = TestArray::ints(host.adapters, {tiles}), of_row = TestArray::ints(adapter_of_row, {N}),
                    low_rank = TestArray::poisoned({adapter_splits(c.C), N, parts * c.R}),
                    scratch = TestArray::scratch(linear_scratch(N, c.C, OC, T));
    const AdapterTiles of{rows, adapters, of_row};
    const Tensor inp = in.tensor().columns(0, c.C), to = out.tensor().columns(0, columns);
    const LinearOutput output{to, l.f, l.residual ? added.tensor().columns(0, columns) : Tensor{}};
    const LinearWeights weights{a.weight.tensor().columns(0, c.C), l.bias ? a.bias.tensor() : Tensor{}};
    const bool taken = linear_with_adapters(output, inp, weights, a.weights, of, scratch, stream());
    EXPECT_EQ(taken, l.taken && N > LINEAR_SMALL_N && T != DType::F32 && this_target().hopper);
    if (!taken) {
        const Tensor sums = l.f == Activation::None ? to : y.tensor();
        linear({sums, Activation::None, output.residual}, inp, {}, weights, scratch, false, stream());
        adapters_shrink(low_rank, inp, a.weights, of, stream());
        adapters_expand(sums, low_rank, a.weights, of, stream());
        if (l.f != Activation::None) activation_forward(l.f, to, sums, stream());
    }
    synchronize(stream());
    expect_gaps_untouched("out", out.fetch(), ld, columns);
    return take_columns(out.fetch(), ld, columns);
}

reference::Values layer_oracle(const Layer& l, const LayerArrays& arrays) {
    const Case& c = l.rows;
    const std::vector<double> x = take_columns(arrays.x.values(), c.C + c.gap, c.C),
                              w = take_columns(arrays.weight.values(), c.C + c.gap, c.C);
    const int64_t OC = c.OC(), columns = l.columns(), parts = int64_t(c.part_rows.size());
    const auto dot = [&](const double* row, const double* weights) {
        reference::Value sum;
        for (int64_t i = 0; i < c.C; i++) sum.add(row[i] * weights[i]);
        return sum;
    };
    reference::Values out(c.N * columns);
    std::vector<reference::Value> y(static_cast<size_t>(OC)), h(static_cast<size_t>(parts * c.R));
    for (int64_t n = 0; n < c.N; n++) {
        const double* const row = &x[size_t(n * c.C)];
        const int64_t adapter = c.adapter(n);
        for (int64_t j = 0; adapter >= 0 && j < parts * c.R; j++)
            h[size_t(j)] = dot(row, arrays.a.data() + (adapter * parts * c.R + j) * c.C);
        for (int64_t o = 0, part = 0, end = c.part_rows[0]; o < OC; o++) {
            if (o == end) end += c.part_rows[size_t(++part)];
            reference::Value& sum = y[size_t(o)] = dot(row, &w[size_t(o * c.C)]);
            if (l.bias) sum.add(arrays.bias.values()[size_t(o)]);
            for (int64_t r = 0; adapter >= 0 && r < c.R; r++) {
                const double b = arrays.b.values()[size_t((o * c.adapters + adapter) * c.R + r)];
                const reference::Value& of = h[size_t(part * c.R + r)];
                sum.add(b * of.value, std::fabs(b) * of.mag);
            }
        }
        for (int64_t o = 0; o < columns; o++) {
            reference::Value v = activated(l.f, y[size_t(o)], y[size_t(o + OC - columns)]);
            if (l.residual) v.add(arrays.residual.values()[size_t(n * (columns + c.gap) + o)]);
            out.set(n * columns + o, v);
        }
    }
    return out;
}

void check_layer(const Layer& l, DType T) {
    const Case& c = l.rows;
    SCOPED_TRACE(str("layer: N ", c.N, " C ", c.C, " adapters ", c.adapters, " R ", c.R, " OC ", c.OC()));
    const LayerArrays a(l, T);
    std::vector<int64_t> all, some;
    for (int64_t n = 0; n < c.N; n++) {
        all.push_back(n);
        if (n % 3 || c.N < 15) some.insert(some.begin(), n);
    }
    const std::vector<double> got = run_layer(l, a, T, all);
    const reference::Values ref = layer_oracle(l, a);
    const int64_t columns = l.columns();
    expect_close("out", got, ref.value, ref.mag, c.C + c.R, columns, T, 3);
    if (!l.taken || T == DType::F32 || !this_target().hopper) return;
    const std::vector<double> others = run_layer(l, a, T, some);  // in another order, too
    for (size_t i = 0; i < some.size(); i++) {
        const auto row = [&](const std::vector<double>& from, int64_t n) {
            return std::vector<double>(from.begin() + n * columns, from.begin() + (n + 1) * columns);
        };
        expect_same_bits("a row among others", row(got, some[i]), row(others, int64_t(i)));
    }
}

TEST_P(LoraRows, LayersMatchOracle) {
    const std::vector<int32_t> three = {2, -1, 0, 1, 1}, five = {4, 0, 3, -1, 1, 2, 0};
    check_layer({{9, 128, 2, 8, {64, 32, 32}, {1, 0, -1}}}, activation());
    check_layer({{17, 256, 1, 64, {50, 50}, {0, -1}, 8}, Activation::SwiGLU}, activation());
    check_layer({{33, 1536, 5, 8, {200}, five, 24}, Activation::None, true, true}, activation());
    check_layer({{12, 320, 3, 16, {96}, three}, Activation::GELU, true}, activation());
    check_layer({{40, 72, 1, 8, {64, 7}, {0}}, Activation::ReLU2}, activation());
    check_layer({{64, 4160, 3, 8, {70}, three}}, activation());  // a block has more panels than the ring has stages
    check_layer({{64, 128, 2, 8, {64, 32, 32}, {1, 0, -1}, 8}, Activation::None, true, true}, activation());
    // Enough outputs for blocks of 128 of them.
    check_layer({{40, 512, 3, 24, {1024, 320, 320}, three, 8}, Activation::None, true}, activation());
    check_layer({{64, 1032, 5, 16, {900, 900}, five}, Activation::SwiGLU, true}, activation());
    check_layer({{24, 2048, 1, 32, {1664}, {0, -1}}, Activation::None, false, true}, activation());
    check_layer({{50, 192, 1, 16, {1792}, {-1, 0}}, Activation::None, false, true},
                activation());  // two blocks a cluster
    check_layer({{64, 256, 2, 16, {896, 896}, {0, 1, -1}}, Activation::SwiGLU}, activation());
}

TEST_P(LoraRows, OtherLayersAreNotTaken) {
    const auto other = [](Case c) { return Layer{std::move(c), Activation::None, false, false, false}; };
    check_layer(other({8, 128, 2, 8, {64}, {0, 1}}), activation());
    check_layer(other({65, 128, 2, 8, {64}, {0, 1}}), activation());
    check_layer(other({20, 128, 3, 24, {64}, {0, 2}}), activation());      // more than half as many columns as C
    check_layer(other({20, 128, 1, 8, {24, 40}, {0, -1}}), activation());  // two parts in half a block
    check_layer(other({20, 100, 2, 8, {64}, {0, -1}}), activation());      // rows that are not aligned
    Layer gated = other({20, 128, 1, 8, {40, 20, 20}, {0, -1}});
    gated.f = Activation::SwiGLU;
    check_layer(gated, activation());
}

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
                    a = TestArray::random({1, 16, 4}, 3), b = TestArray::random({6, 1, 8}, 4),
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
    const TestArray odd = TestArray::random({6, 1, 5}, 4);
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
    const auto expand_all = [&](const Tensor& to, const Tensor& h, AdapterWeights w) {
        adapter_expand_all(to, h, w, {});
    };
    const TestArray h = TestArray::random({2, 16}, 5), two_a = TestArray::random({2, 16, 4}, 3),
                    two_b = TestArray::random({6, 2, 8}, 4), bytes = TestArray::scratch(12);
    expect_error([&] { expand_all(y, h, {two_a, two_b, {3, 6}}); }, "adapter_expand_all: 2 adapters, expected 1");
    expect_error(
        [&] {
            expand_all(x, h, {a, b, {3, 6}});
        },
        "adapter_expand_all: y is fp32 [2, 4], expected fp32 [2, 6]");
    expect_error(
        [&] {
            expand_all(y, x, {a, b, {3, 6}});
        },
        "adapter_expand_all: h is fp32 [2, 4], expected fp32 [2, 16]");
    expect_error([&] { expand_all(y, {}, {a, b, {3, 6}}); }, "adapter_expand_all: h is missing");
    expect_error(
        [&] {
            expand_all(y, h, {a, b, {3, 5}});
        },
        "adapter_expand_all: the parts end at output 5, expected 6");
    expect_error(
        [&] {
            expand_all(bytes, h, {a, b, {3, 6}});
        },
        str("adapter_expand_all: y is uint8 ", shape_string(bytes), ", expected ", ACTIVATION_MATRIX));
}

}  // namespace
