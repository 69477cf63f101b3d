// Elementwise functions, reductions and matmuls of strided tensors against the oracle: every function in every dtype,
// random layouts with permuted, repeated and reversed dimensions, edges of every kernel, and errors.
#include "tensor_library/tensor_ops.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "tensor_library/strided.h"

namespace {

using F = TensorFunction;
constexpr DType DTYPES[] = {DType::F32, DType::BF16, DType::F16};
constexpr double NaN = std::numeric_limits<double>::quiet_NaN(), INF = std::numeric_limits<double>::infinity();

std::vector<F> all_functions() {
    std::vector<F> functions;
    for (int f = 0; f < NUM_TENSOR_FUNCTIONS; f++) functions.push_back(F(f));
    return functions;
}

// Random choices that are the same in every run.
class Choices {
  public:
    explicit Choices(uint64_t seed_) : seed(seed_) {}
    int64_t below(int64_t n) { return int64_t(philox(seed, count++, 0).v[0] % uint64_t(n)); }
    bool one_in(int64_t n) { return below(n) == 0; }

  private:
    uint64_t seed, count = 0;
};

using Shape = std::vector<int64_t>;

Tensor shaped(const Tensor& memory, const Shape& shape) {
    return make_tensor(memory.data, memory.dtype, memory.device, shape.data(), int(shape.size()));
}

// The elements of the tensor in row-major order, from the values of its memory.
std::vector<double> logical(const Tensor& t, const Tensor& memory, const std::vector<double>& values) {
    std::vector<double> r;
    r.reserve(size_t(t.numel()));
    const int64_t first =
        (static_cast<const char*>(t.data) - static_cast<const char*>(memory.data)) / dtype_size(t.dtype);
    for (int64_t i = 0; i < t.numel(); i++) {
        int64_t at = first, rest = i;
        for (int d = t.rank - 1; d >= 0; d--) {
            at += rest % t.shape[d] * t.stride[d];
            rest /= t.shape[d];
        }
        r.push_back(values[size_t(at)]);
    }
    return r;
}

// A view that owns its memory.
struct View {
    TestArray memory;
    Tensor tensor;
    std::vector<double> values() const { return logical(tensor, memory, memory.values()); }
    std::vector<double> fetch() const { return logical(tensor, memory, memory.fetch()); }
    // Whether the elements of a poisoned memory that the tensor does not reach are still NaN.
    bool gaps_untouched() const {
        std::vector<double> all = memory.fetch();
        const int64_t written = std::count_if(all.begin(), all.end(), [](double x) { return !std::isnan(x); });
        return written <= tensor.numel();
    }
};

// Any layout of the shape: dimensions in any order in memory, with gaps, backwards. Inputs: dimensions may repeat one
// element.
View any_layout(Choices& choose, DType dtype, const Shape& shape, bool is_output, uint64_t seed) {
    const int rank = int(shape.size());
    std::vector<int> order(static_cast<size_t>(rank));
    for (int d = 0; d < rank; d++) order[size_t(d)] = d;
    if (choose.one_in(2))
        for (int d = rank - 1; d > 0; d--) std::swap(order[size_t(d)], order[size_t(choose.below(d + 1))]);
    int64_t size = 1, first = 0;
    int64_t stride[MAX_DIMS] = {};
    const bool gaps = choose.one_in(3);
    for (int i = rank - 1; i >= 0; i--) {
        const int d = order[size_t(i)];
        if (!is_output && choose.one_in(8)) continue;  // repeats: stride 0
        if (gaps && choose.one_in(2)) size += 1 + choose.below(3);
        stride[d] = size;
        size *= std::max<int64_t>(1, shape[size_t(d)]);
        if (choose.one_in(8) && shape[size_t(d)] > 0) {
            first += (shape[size_t(d)] - 1) * stride[d];
            stride[d] = -stride[d];
        }
    }
    first += choose.below(3);  // not aligned
    View view{is_output ? TestArray::poisoned(dtype, {size + 3}) : TestArray::random(dtype, {size + 3}, seed), {}};
    view.tensor = shaped(view.memory, shape);
    view.tensor.data = static_cast<char*>(view.memory.tensor().data) + first * dtype_size(dtype);
    std::copy_n(stride, rank, view.tensor.stride);
    return view;
}

// A shape that broadcasts to `shape`.
Shape narrower(Choices& choose, Shape shape) {
    for (int64_t& n : shape)
        if (choose.one_in(4)) n = 1;
    while (!shape.empty() && choose.one_in(6)) shape.erase(shape.begin());
    return shape;
}

Shape any_shape(Choices& choose, int64_t rank) {
    static constexpr int64_t SIZES[] = {1, 2, 3, 4, 5, 8, 16, 17, 31, 64, 257, 2100};
    Shape shape;
    int64_t room = 60000;
    for (int64_t d = 0; d < rank; d++) {
        const int64_t n = choose.one_in(40) ? 0 : SIZES[choose.below(12)];
        shape.push_back(n <= room ? n : 1);
        room /= std::max<int64_t>(1, shape.back());
    }
    std::rotate(shape.begin(), shape.begin() + (rank ? choose.below(rank) : 0), shape.end());
    return shape;
}

// Element i of a view's values once it is broadcast to a shape.
std::vector<double> broadcast(const View& view, const Shape& shape) {
    const Tensor to = make_tensor(nullptr, DType::F32, Device::CPU, shape.data(), int(shape.size()));
    return logical(broadcast_to("test", "t", view.tensor, to), view.memory, view.memory.values());
}

void expect_equal(const std::vector<double>& got, const std::vector<double>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_TRUE(got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i])))
            << "element " << i << " is " << got[i] << ", expected " << expected[i];
}

std::vector<double> run(F f, DType out_dtype, const TestArray& x, const TestArray& y) {
    const TestArray out = TestArray::poisoned(out_dtype, {x.tensor().numel()});
    if (info_of(f).arguments == 1)
        tensor_map(out, f, x, Stream{});
    else
        tensor_zip(out, f, x, y, Stream{});
    return out.fetch();
}

void check_function(F f, DType out, DType x_dtype, DType y_dtype, int64_t n, double scale) {
    SCOPED_TRACE(str(info_of(f).name, " ", dtype_name(out), " of ", dtype_name(x_dtype), ", ", dtype_name(y_dtype),
                     " n ", n, " scale ", scale));
    const auto numbers = [&](DType dtype, uint64_t seed) {
        std::vector<double> values;
        for (int64_t i = 0; i < n; i++) {
            double v = normal01(seed, 0, uint64_t(i)) * scale;
            // Domains: ln and the base of a power are of positive numbers; a quotient's divisor is not tiny.
            if (f == F::Log || (f == F::Pow && seed == 1)) v = std::fabs(v) + 1e-3;
            if (f == F::Pow && seed == 2) v = std::fmod(v, 3.0);
            const bool divisor = f == F::Div ? seed == 2 : f == F::Inv || f == F::InvBack || f == F::LogBack;
            if (divisor && std::fabs(v) < 0.05 && (f == F::Div || seed == 1)) v = 0.05;
            if ((f == F::Eq || f == F::IsClose || f == F::Lt) && i % 3 == 0) v = double(i % 7) * 0.125;
            values.push_back(v);
        }
        return TestArray::of(dtype, values, {n});
    };
    const TestArray x = numbers(x_dtype, 1), y = numbers(y_dtype, 2);
    reference::Values ref(n);
    for (int64_t i = 0; i < n; i++)
        ref.set(i, reference::tensor_function(f, x.values()[size_t(i)], y.values()[size_t(i)]));
    expect_close("out", run(f, out, x, y), ref.value, ref.mag, 1, n, out);
}

}  // namespace

TEST(TensorFunctions, MatchTheOracleInEveryDType) {
    for (const F f : all_functions()) {
        for (const int64_t n : {1, 15, 16, 1023, 2051, 20000})
            check_function(f, DType::F32, DType::F32, DType::F32, n, 1);
        for (const DType out : DTYPES)
            for (const DType x : DTYPES)
                for (const DType y : DTYPES) check_function(f, out, x, y, 1016, 1);
        if (f != F::Exp && f != F::Pow) check_function(f, DType::F32, DType::F32, DType::F32, 5000, 300);
        check_function(f, DType::F32, DType::F32, DType::F32, 5000, 1e-3);
    }
}

// Each point is a row of its own, so that no error hides behind a larger value.
TEST(TensorFunctions, AccurateAtEveryMagnitude) {
    std::vector<double> points;
    for (double x = 1e-37; x < 1e37; x *= 1.37) points.insert(points.end(), {x, -x});
    for (double x = -95; x < 95; x += 0.173) points.push_back(x);
    for (double x = 0.4; x < 2.5; x += 0.0101) points.insert(points.end(), {x, 1 + (x - 1) * 1e-4});
    const int64_t n = int64_t(points.size());
    for (const F f : {F::Neg, F::Inv, F::Exp, F::Log, F::Sigmoid, F::Tanh, F::Relu}) {
        SCOPED_TRACE(info_of(f).name);
        std::vector<double> kept;
        for (double x = 1e-44; f == F::Log && x < 1e-37; x *= 1.7) kept.push_back(x);  // subnormal
        for (const double x : points)
            if ((f != F::Log || x > 0) && (f != F::Exp || x < 88)) kept.push_back(x);
        const TestArray x = TestArray::of(kept, {int64_t(kept.size())});
        reference::Values ref(int64_t(kept.size()));
        for (size_t i = 0; i < kept.size(); i++) ref.set(int64_t(i), reference::tensor_function(f, x.values()[i], 0));
        expect_close("out", run(f, DType::F32, x, x), ref.value, ref.mag, 1, 1);
    }
    const TestArray x = TestArray::of(points, {n});
    std::vector<double> powers;
    for (int64_t i = 0; i < n; i++) powers.push_back(double(i % 9 - 4) * 0.25);
    std::vector<double> bases = points;
    for (double& b : bases) b = std::min(std::max(std::fabs(b), 1e-20), 1e20);
    const TestArray base = TestArray::of(bases, {n}), power = TestArray::of(powers, {n});
    reference::Values ref(n);
    for (int64_t i = 0; i < n; i++)
        ref.set(i, reference::tensor_function(F::Pow, base.values()[size_t(i)], power.values()[size_t(i)]));
    expect_close("pow", run(F::Pow, DType::F32, base, power), ref.value, ref.mag, 1, 1);
}

TEST(TensorFunctions, SpecialValuesMatchNumPy) {
    const std::vector<double> xs = {0, -0.0, INF, -INF, NaN, 200, -200}, ys = {NaN, 0, -0.0, 2, 3, INF, -INF};
    const int64_t n = int64_t(xs.size());
    const TestArray x = TestArray::of(xs, {n}), y = TestArray::of(ys, {n});
    const auto expect = [&](F f, const std::vector<double>& expected) {
        SCOPED_TRACE(info_of(f).name);
        const std::vector<double> got = run(f, DType::F32, x, y);
        for (size_t i = 0; i < got.size(); i++) {
            if (std::isnan(expected[i])) {
                EXPECT_TRUE(std::isnan(got[i])) << "element " << i << " is " << got[i];
                continue;
            }
            EXPECT_FLOAT_EQ(float(got[i]), float(expected[i])) << "element " << i;  // to 4 ulp: ln 200
            EXPECT_EQ(std::signbit(got[i]), std::signbit(expected[i])) << "element " << i;
        }
    };
    expect(F::Id, {0, -0.0, INF, -INF, NaN, 200, -200});
    expect(F::Neg, {-0.0, 0, -INF, INF, NaN, -200, 200});
    expect(F::Inv, {INF, -INF, 0, -0.0, NaN, float(0.005), float(-0.005)});
    expect(F::Exp, {1, 1, INF, 0, NaN, INF, 0});
    expect(F::Log, {-INF, -INF, INF, NaN, NaN, float(std::log(200.0)), NaN});
    expect(F::Sigmoid, {0.5, 0.5, 1, 0, NaN, 1, 0});
    expect(F::Tanh, {0, -0.0, 1, -1, NaN, 1, -1});
    expect(F::Relu, {0, 0, INF, 0, NaN, 200, 0});
    expect(F::Add, {NaN, 0, INF, -INF, NaN, INF, -INF});
    expect(F::Max, {NaN, 0, INF, 2, NaN, INF, -200});
    expect(F::Lt, {0, 0, 0, 1, 0, 1, 0});
    expect(F::Eq, {0, 1, 0, 0, 0, 0, 0});
    expect(F::IsClose, {0, 1, 0, 0, 0, 0, 0});
    expect(F::ReluBack, {0, 0, -0.0, 0, 0, INF, 0});
}

// Of every positive number of bf16, subnormal ones too: to 0.6 units in the last place.
TEST(TensorFunctions, LogOfEveryBf16) {
    std::vector<double> xs;
    for (uint32_t bits = 1; bits < 0x7f80; bits++) {
        const uint32_t word = bits << 16;
        float x;
        std::memcpy(&x, &word, sizeof(x));
        xs.push_back(double(x));
    }
    const TestArray x = TestArray::of(DType::BF16, xs, {int64_t(xs.size())});
    const std::vector<double> got = run(F::Log, DType::BF16, x, x);
    for (size_t i = 0; i < xs.size(); i++) {
        const double exact = std::log(xs[i]), unit = exact == 0 ? 0 : std::ldexp(1.0, std::ilogb(exact) - 7);
        ASSERT_LE(std::fabs(got[i] - exact), 0.6 * unit) << "ln " << xs[i] << " is " << got[i] << ", not " << exact;
    }
}

// is_close has no tolerance of its own: the difference is exact.
TEST(TensorFunctions, IsCloseIsExactAtTheEdge) {
    std::vector<double> xs, ys;
    for (int i = -40; i <= 40; i++) {
        xs.push_back(double(0.01f) + i * 0x1p-31);
        ys.push_back(double(i % 5) * 0x1p-33);
    }
    const int64_t n = int64_t(xs.size());
    const TestArray x = TestArray::of(xs, {n}), y = TestArray::of(ys, {n});
    std::vector<double> expected;
    for (int64_t i = 0; i < n; i++) expected.push_back(std::fabs(x.values()[size_t(i)] - y.values()[size_t(i)]) < 1e-2);
    expect_equal(run(F::IsClose, DType::F32, x, y), expected);
    EXPECT_NE(std::count(expected.begin(), expected.end(), 1.0), 0);
    EXPECT_NE(std::count(expected.begin(), expected.end(), 0.0), 0);
}

TEST(TensorZip, AnyLayoutOfUpToEightDimensions) {
    Choices choose(11);
    for (int i = 0; i < 200; i++) {
        const Shape shape = any_shape(choose, i % 9);
        const DType out_dtype = DTYPES[i % 7 ? 0 : choose.below(3)], x_dtype = DTYPES[i % 5 ? 0 : choose.below(3)],
                    y_dtype = DTYPES[i % 6 ? 0 : choose.below(3)];
        const View x = any_layout(choose, x_dtype, narrower(choose, shape), false, 1),
                   y = any_layout(choose, y_dtype, narrower(choose, shape), false, 2),
                   out = any_layout(choose, out_dtype, shape, true, 0);
        SCOPED_TRACE(str("case ", i, ": ", shape_string(out.tensor), " of ", shape_string(x.tensor), " and ",
                         shape_string(y.tensor)));
        tensor_zip(out.tensor, F::Sub, x.tensor, y.tensor, Stream{});
        const std::vector<double> a = broadcast(x, shape), b = broadcast(y, shape);
        std::vector<double> expected;
        for (size_t k = 0; k < a.size(); k++) expected.push_back(rounded(out_dtype, a[k] - b[k]));
        expect_equal(out.fetch(), expected);
        EXPECT_TRUE(out.gaps_untouched());

        tensor_map(out.tensor, F::Neg, x.tensor, Stream{});
        for (size_t k = 0; k < a.size(); k++) expected[k] = rounded(out_dtype, -a[k]);
        expect_equal(out.fetch(), expected);
        if (HasFailure()) return;
    }
}

// Rows whose length is not a multiple of a vector, around the sizes at which kernels split them; outputs with negative
// strides, whose elements are before the first.
TEST(TensorZip, OddRowsForwardsAndBackwards) {
    for (const int64_t C : {1, 3, 31, 63, 65, 255, 257, 511, 1023, 4099})
        for (const DType T : DTYPES)
            for (int backwards = 0; backwards < 4; backwards++) {
                const int64_t N = 13;
                SCOPED_TRACE(str(dtype_name(T), " [", N, ", ", C, "] backwards ", backwards));
                const TestArray x = TestArray::random(T, {N, C}, 1), y = TestArray::random({C}, 2);
                View out{TestArray::poisoned(T, {N * C}), {}};
                out.tensor = shaped(out.memory, {N, C});
                int64_t first = 0;
                if (backwards & 1) {
                    first += C - 1;
                    out.tensor.stride[1] = -1;
                }
                if (backwards & 2) {
                    first += (N - 1) * C;
                    out.tensor.stride[0] = -C;
                }
                out.tensor.data = static_cast<char*>(out.memory.tensor().data) + first * dtype_size(T);
                const std::vector<double> a = x.values(), b = y.values();
                std::vector<double> expected;
                for (int64_t i = 0; i < N * C; i++) expected.push_back(rounded(T, a[size_t(i)] + b[size_t(i % C)]));
                tensor_zip(out.tensor, F::Add, x, y, Stream{});
                expect_equal(out.fetch(), expected);
                tensor_map(out.tensor, F::Neg, x, Stream{});
                for (int64_t i = 0; i < N * C; i++) expected[size_t(i)] = -a[size_t(i)];
                expect_equal(out.fetch(), expected);
                if (HasFailure()) return;
            }
}

// Rows of 16-bit elements that start anywhere within 16 bytes, differently for each operand, with gaps between them;
// rows and columns that repeat.
TEST(TensorZip, RowsOfAnyAlignment) {
    for (const DType T : {DType::BF16, DType::F16})
        for (const int64_t C : {64, 65, 71, 130, 1023})
            for (int64_t offset = 0; offset < 8; offset++) {
                const int64_t N = 9;
                SCOPED_TRACE(str(dtype_name(T), " [", N, ", ", C, "] offset ", offset));
                const auto view = [&](TestArray memory, int64_t first, int64_t row, int64_t column) {
                    View v{std::move(memory), {}};
                    v.tensor = shaped(v.memory, {N, C});
                    v.tensor.data = static_cast<char*>(v.memory.tensor().data) + first * 2;
                    v.tensor.stride[0] = row;
                    v.tensor.stride[1] = column;
                    return v;
                };
                const int64_t size = N * (C + 9) + 16;
                const View x = view(TestArray::random(T, {size}, 1), offset * 3 % 8, C + 1, 1);
                for (const View& y : {view(TestArray::random(T, {size}, 2), offset * 5 % 8, C + 8, 1),
                                      view(TestArray::random(T, {size}, 2), offset, 0, 1),
                                      view(TestArray::random(T, {size}, 2), offset, 1, 0),
                                      view(TestArray::random(T, {size}, 2), offset + (N - 1) * (C + 3), -C - 3, 1)}) {
                    const View out = view(TestArray::poisoned(T, {size}), offset, C + offset % 3, 1);
                    const std::vector<double> a = x.values(), b = y.values();
                    std::vector<double> expected;
                    for (int64_t i = 0; i < N * C; i++) expected.push_back(rounded(T, a[size_t(i)] + b[size_t(i)]));
                    tensor_zip(out.tensor, F::Add, x.tensor, y.tensor, Stream{});
                    expect_equal(out.fetch(), expected);
                    EXPECT_TRUE(out.gaps_untouched());
                    if (HasFailure()) return;
                }
            }
}

// Rows of 16-bit elements, whole vectors or not, of any number, two blocks of them; y is a row, a column, a row of each
// block, or as x.
TEST(TensorZip, AnyNumberOfRows) {
    for (const DType T : {DType::BF16, DType::F16})
        for (const int64_t C : {64, 67, 136})
            for (const int64_t N : {1, 2, 7, 8, 15, 16, 17, 63, 65, 200}) {
                SCOPED_TRACE(str(dtype_name(T), " [2, ", N, ", ", C, "]"));
                const TestArray x = TestArray::random(T, {2, N, C}, 1);
                for (const Shape& of_y : {Shape{C}, Shape{2, N, 1}, Shape{2, 1, C}, Shape{2, N, C}}) {
                    View y{TestArray::random(T, {2 * N * C}, 2), {}};
                    y.tensor = shaped(y.memory, of_y);
                    const TestArray out = TestArray::poisoned(T, {2, N, C});
                    tensor_zip(out, F::Sub, x, y.tensor, Stream{});
                    const std::vector<double> b = broadcast(y, {2, N, C});
                    std::vector<double> expected;
                    for (size_t i = 0; i < b.size(); i++) expected.push_back(rounded(T, x.values()[i] - b[i]));
                    expect_equal(out.fetch(), expected);
                    if (HasFailure()) return;
                }
            }
}

// Sizes that would exceed 65,535 blocks if a dimension were the y or z of the grid.
TEST(TensorZip, EveryDimensionMayBeLong) {
    const Shape shapes[] = {{70000, 1, 3}, {3, 70000, 2}, {2, 3, 70000}, {70000, 5}, {66000, 1, 1, 4}};
    for (const Shape& shape : shapes) {
        SCOPED_TRACE(str(shape[0], " ", shape[1]));
        Choices choose(3);
        const Tensor whole = make_tensor(nullptr, DType::F32, Device::CPU, shape.data(), int(shape.size()));
        const TestArray x = TestArray::random({whole.numel()}, 1), out = TestArray::poisoned({whole.numel()});
        const int64_t last = shape.back();
        const TestArray y = TestArray::random({last}, 2);
        tensor_zip(shaped(out, shape), F::Add, shaped(x, shape), y, Stream{});
        std::vector<double> expected;
        for (int64_t i = 0; i < whole.numel(); i++)
            expected.push_back(rounded(DType::F32, x.values()[size_t(i)] + y.values()[size_t(i % last)]));
        expect_equal(out.fetch(), expected);
    }
}

TEST(TensorBinBcast, RepeatsBlocksInEveryDimension) {
    Choices choose(5);
    const F functions[] = {F::Add, F::Sub, F::Mul, F::Div};
    for (int i = 0; i < 200; i++) {
        // y's sizes, and how often each repeats.
        Shape small, shape;
        const int64_t rank = choose.below(5);
        for (int64_t d = 0, room = 20000; d < rank; d++) {
            static constexpr int64_t SIZES[] = {1, 2, 3, 4, 8, 33}, REPEATS[] = {1, 1, 2, 3, 7};
            const int64_t m = SIZES[choose.below(6)], n = m * REPEATS[choose.below(5)];
            small.push_back(n <= room ? m : 1);
            shape.push_back(n <= room ? n : 1);
            room /= shape.back();
        }
        while (!small.empty() && small.front() == 1 && choose.one_in(2)) small.erase(small.begin());
        const F f = functions[choose.below(4)];
        const bool has_x = !choose.one_in(4);
        const DType out_dtype = DTYPES[choose.below(3)], x_dtype = DTYPES[choose.below(3)],
                    y_dtype = DTYPES[choose.below(3)];
        const View x = any_layout(choose, x_dtype, shape, false, 1), y = any_layout(choose, y_dtype, small, false, 2),
                   out = any_layout(choose, out_dtype, shape, true, 0);
        SCOPED_TRACE(str("case ", i, ": ", info_of(f).name, " ", shape_string(out.tensor), has_x ? "" : " alone",
                         " and ", shape_string(y.tensor)));
        tensor_bin_bcast(out.tensor, f, has_x ? x.tensor : Tensor{}, y.tensor, Stream{});
        const std::vector<double> a = x.values(), b = y.values();
        std::vector<double> expected;
        for (int64_t k = 0; k < out.tensor.numel(); k++) {
            int64_t rest = k, at = 0, step = 1;
            for (int d = int(shape.size()) - 1, from = int(small.size()) - 1; d >= 0; d--, from--) {
                const int64_t index = rest % shape[size_t(d)], m = from < 0 ? 1 : small[size_t(from)];
                at += index % m * step;
                step *= m;
                rest /= shape[size_t(d)];
            }
            const double neutral = f == F::Mul || f == F::Div ? 1 : 0;
            expected.push_back(
                rounded(out_dtype, reference::tensor_function(f, has_x ? a[size_t(k)] : neutral, b[size_t(at)]).value));
        }
        expect_equal(out.fetch(), expected);
        EXPECT_TRUE(out.gaps_untouched());
        if (HasFailure()) return;
    }
}

TEST(TensorBinBcast, RepeatKeepsNegativeZero) {
    const TestArray y = TestArray::of({-0.0, 0}, {2}), out = TestArray::poisoned({6});
    for (const F f : {F::Add, F::Mul}) {
        tensor_bin_bcast(out, f, Tensor{}, y, Stream{});
        const std::vector<double> got = out.fetch();
        for (int i = 0; i < 6; i++) EXPECT_EQ(std::signbit(got[size_t(i)]), i % 2 == 0);
    }
}

namespace {

void reduce(F f, const Tensor& out, const Tensor& inp, int axis, float start) {
    const TestArray scratch = TestArray::scratch(tensor_reduce_scratch(out, inp, axis));
    tensor_reduce(out, f, inp, axis, start, scratch, Stream{});
    synchronize(Stream{});  // before scratch is freed
}

// All axes of the view; values: its elements in row-major order.
void check_reduce(F f, const View& inp, int axis, float start, DType out_dtype, Choices& choose) {
    const Tensor& t = inp.tensor;
    SCOPED_TRACE(
        str(info_of(f).name, " of ", dtype_name(t.dtype), " ", shape_string(t), " axis ", axis, " start ", start));
    Shape shape(t.shape, t.shape + t.rank);
    const int64_t n = shape[size_t(axis)];
    int64_t inner = 1;
    for (int d = axis + 1; d < t.rank; d++) inner *= shape[size_t(d)];
    shape[size_t(axis)] = 1;
    const View out = any_layout(choose, out_dtype, shape, true, 0);
    reduce(f, out.tensor, t, axis, start);
    const std::vector<double> x = inp.values();
    reference::Values ref(out.tensor.numel());
    for (int64_t i = 0; i < out.tensor.numel(); i++)
        ref.set(i, reference::tensor_reduce(f, start, x.data() + i / inner * n * inner + i % inner, inner, n));
    if (f == F::Max && out_dtype == DType::F32)
        expect_equal(out.fetch(), ref.value);
    else if (out.tensor.numel() > 0 && !(f == F::Max && n == 0))
        expect_close("out", out.fetch(), ref.value, ref.mag, std::max<int64_t>(n, 1), out.tensor.numel(), out_dtype);
    EXPECT_TRUE(out.gaps_untouched());
}

constexpr F REDUCTIONS[] = {F::Add, F::Mul, F::Max};

View contiguous(DType dtype, const Shape& shape, uint64_t seed, double scale, double shift) {
    const int64_t n = make_tensor(nullptr, dtype, Device::CPU, shape.data(), int(shape.size())).numel();
    View view{TestArray::random(dtype, {n}, seed, scale, shift), {}};
    view.tensor = shaped(view.memory, shape);
    return view;
}

}  // namespace

// Products of numbers near 1, which neither underflow nor overflow.
TEST(TensorReduce, EverySizeAlongEveryAxis) {
    Choices choose(7);
    const Shape shapes[] = {{1},        {31},         {32},      {33},        {1000},       {4096},       {70001},
                            {300000},   {1, 1},       {3, 7},    {7, 1024},   {1024, 7},    {65, 33},     {5, 4100},
                            {4100, 4},  {2050, 516},  {3, 5, 8}, {9, 129, 4}, {2, 300, 17}, {16, 16, 16}, {40000, 2},
                            {2, 40000}, {5000, 3, 2}, {99, 64},  {50, 128},   {9, 260},     {9, 516},     {11, 63}};
    for (const Shape& shape : shapes)
        for (const F f : REDUCTIONS) {
            const View inp = contiguous(DType::F32, shape, 1, f == F::Mul ? 0.01 : 1, f == F::Mul ? 1 : 0);
            for (int axis = 0; axis < int(shape.size()); axis++) {
                check_reduce(f, inp, axis, tensor_reduce_start(f), DType::F32, choose);
                check_reduce(f, inp, axis, 2.5f, DType::F32, choose);
            }
        }
}

TEST(TensorReduce, SumsOfOneSignAreAccurate) {
    Choices choose(8);
    for (const Shape& shape : {Shape{200000}, Shape{20000, 12}, Shape{12, 20000}, Shape{3000, 40}})
        for (int axis = 0; axis < int(shape.size()); axis++)
            check_reduce(F::Add, contiguous(DType::F32, shape, 1, 0.1, 1), axis, 0, DType::F32, choose);
}

TEST(TensorReduce, AnyLayoutAndDType) {
    Choices choose(9);
    for (int i = 0; i < 160; i++) {
        const Shape shape = any_shape(choose, 1 + i % 8);
        const F f = REDUCTIONS[i % 2 * 2];  // sums and maxima
        const View inp = any_layout(choose, DTYPES[i % 3], shape, false, 1);
        check_reduce(f, inp, int(choose.below(int64_t(shape.size()))), float(choose.below(3)),
                     DTYPES[i % 4 ? 0 : choose.below(3)], choose);
        if (HasFailure()) return;
    }
}

// Packs of 16-bit elements: rows shared by 4, 8, 16 and 32 threads, and columns.
TEST(TensorReduce, ShortRowsOf16Bits) {
    Choices choose(10);
    for (const DType T : {DType::BF16, DType::F16})
        for (const int64_t C : {8, 24, 120, 128, 136, 264, 520, 1032})
            for (const F f : {F::Add, F::Max})
                for (int axis = 0; axis < 2; axis++)
                    check_reduce(f, contiguous(T, {37, C}, 1, 1, 0), axis, 0.5f, DType::F32, choose);
}

TEST(TensorReduce, EmptyAxesGiveTheInitialValue) {
    for (const F f : REDUCTIONS)
        for (const float start : {tensor_reduce_start(f), 3.0f}) {
            const TestArray inp = TestArray::random({0}, 1), out = TestArray::poisoned({6});
            reduce(f, shaped(out, {3, 1, 2}), shaped(inp, {3, 0, 2}), 1, start);
            expect_equal(out.fetch(), std::vector<double>(6, double(start)));
        }
    const TestArray none = TestArray::random({0}, 1), out = TestArray::random({0}, 1);
    reduce(F::Add, shaped(out, {1, 0}), shaped(none, {4, 0}), 0, 0);
}

// At any index, along either axis.
TEST(TensorReduce, NaNAndInfinitiesPropagate) {
    for (const int64_t n : {3, 40, 5000}) {
        for (const int64_t at : {int64_t(0), n / 2, n - 1}) {
            std::vector<double> values(static_cast<size_t>(n) * 20, -1.0);
            values[size_t(at * 20 + 3)] = NaN;
            values[size_t(at * 20 + 4)] = INF;
            const TestArray rows = TestArray::of(values, {n, 20});
            Tensor columns = rows.tensor();  // the transpose: the axis is contiguous
            std::vector<double> transposed;
            for (int64_t c = 0; c < 20; c++)
                for (int64_t i = 0; i < n; i++) transposed.push_back(values[size_t(i * 20 + c)]);
            const TestArray along = TestArray::of(transposed, {20, n});
            for (const F f : {F::Max, F::Add}) {
                const TestArray a = TestArray::poisoned({1, 20}), b = TestArray::poisoned({20, 1});
                reduce(f, a, columns, 0, tensor_reduce_start(f));
                reduce(f, b, along, 1, tensor_reduce_start(f));
                for (const std::vector<double>& got : {a.fetch(), b.fetch()}) {
                    EXPECT_TRUE(std::isnan(got[3])) << n << " " << at;
                    EXPECT_EQ(got[4], INF);
                    EXPECT_EQ(got[5], f == F::Max ? -1 : -double(n));
                }
            }
        }
    }
}

namespace {

std::vector<double> matmul_reference(const View& out, const View& a, const View& b, std::vector<double>* mag) {
    const Tensor& o = out.tensor;
    const int64_t M = o.shape[o.rank - 2], N = o.shape[o.rank - 1], K = a.tensor.shape[a.tensor.rank - 1];
    Shape batch(o.shape, o.shape + o.rank - 2), of_a = batch, of_b = batch;
    of_a.insert(of_a.end(), {M, K});
    of_b.insert(of_b.end(), {K, N});
    const std::vector<double> x = broadcast(a, of_a), y = broadcast(b, of_b);
    std::vector<double> value;
    for (int64_t i = 0; i < o.numel(); i++) {
        const int64_t matrix = i / (M * N), m = i / N % M, n = i % N;
        const reference::Value v =
            reference::dot(x.data() + (matrix * M + m) * K, 1, y.data() + matrix * K * N + n, N, K);
        value.push_back(v.value);
        mag->push_back(v.mag);
    }
    return value;
}

void check_matmul(Choices& choose, const Shape& out_shape, const Shape& a_shape, const Shape& b_shape) {
    const View a = any_layout(choose, DType::F32, a_shape, false, 1),
               b = any_layout(choose, DType::F32, b_shape, false, 2),
               out = any_layout(choose, DType::F32, out_shape, true, 0);
    SCOPED_TRACE(str(shape_string(a.tensor), " times ", shape_string(b.tensor), "; strides of a ",
                     a.tensor.stride[a.tensor.rank - 2], " ", a.tensor.stride[a.tensor.rank - 1], " of b ",
                     b.tensor.stride[b.tensor.rank - 2], " ", b.tensor.stride[b.tensor.rank - 1], " of out ",
                     out.tensor.stride[out.tensor.rank - 2], " ", out.tensor.stride[out.tensor.rank - 1]));
    tensor_matmul(out.tensor, a.tensor, b.tensor, Stream{});
    std::vector<double> mag;
    const std::vector<double> ref = matmul_reference(out, a, b, &mag);
    if (ref.empty()) return;
    expect_close("out", out.fetch(), ref, mag, std::max<int64_t>(1, a_shape.back()), out_shape.back());
    EXPECT_TRUE(out.gaps_untouched());
}

}  // namespace

TEST(TensorMatmul, SizesAroundEveryTile) {
    Choices choose(21);
    const int64_t sizes[][3] = {{1, 1, 1},     {1, 5, 1},     {3, 4, 5},      {31, 16, 33},    {32, 17, 32},
                                {64, 64, 64},  {65, 100, 66}, {128, 32, 128}, {130, 129, 127}, {256, 20, 1},
                                {1, 300, 200}, {300, 8, 4},   {4, 0, 5},      {0, 3, 4},       {136, 264, 132}};
    for (const auto& s : sizes)
        for (int layout = 0; layout < 6; layout++) {
            check_matmul(choose, {s[0], s[2]}, {s[0], s[1]}, {s[1], s[2]});
            if (HasFailure()) return;
        }
}

TEST(TensorMatmul, BatchesBroadcast) {
    Choices choose(22);
    check_matmul(choose, {5, 33, 20}, {5, 33, 17}, {1, 17, 20});
    check_matmul(choose, {5, 33, 20}, {1, 33, 17}, {5, 17, 20});
    check_matmul(choose, {5, 33, 20}, {33, 17}, {17, 20});
    check_matmul(choose, {2, 3, 4, 16, 12}, {2, 1, 4, 16, 8}, {3, 1, 8, 12});
    check_matmul(choose, {2, 1, 2, 1, 2, 2, 9, 7}, {2, 1, 1, 1, 2, 2, 9, 5}, {2, 1, 2, 1, 2, 1, 5, 7});
    check_matmul(choose, {3, 150, 140}, {3, 150, 70}, {1, 70, 140});
    check_matmul(choose, {70000, 2, 3}, {70000, 2, 4}, {1, 4, 3});
    check_matmul(choose, {0, 2, 3}, {0, 2, 4}, {1, 4, 3});
}

// Enough tiles of 128 x 128 for any GPU to take them, in every combination of layouts: contiguous along the rows, along
// the columns, or along neither.
TEST(TensorMatmul, LargeMatricesInEveryLayout) {
    constexpr int64_t M = 132, N = 136, K = 20, BATCH = 40;
    const auto layout = [](const TestArray& memory, int64_t rows, int64_t columns, int kind) {
        Tensor t = shaped(memory, {BATCH, rows, columns});
        t.stride[0] = rows * columns * 2;
        t.stride[1] = kind == 0 ? columns : kind == 1 ? 1 : columns * 2;
        t.stride[2] = kind == 0 ? 1 : kind == 1 ? rows : 2;
        return t;
    };
    for (int kind = 0; kind < 9; kind++) {
        SCOPED_TRACE(str("layout ", kind));
        View a{TestArray::random({BATCH * M * K * 2}, 1), {}}, b{TestArray::random({BATCH * K * N * 2}, 2), {}},
            out{TestArray::poisoned({BATCH * M * N}), {}};
        a.tensor = layout(a.memory, M, K, kind / 3);
        b.tensor = layout(b.memory, K, N, kind % 3);
        out.tensor = shaped(out.memory, {BATCH, M, N});
        tensor_matmul(out.tensor, a.tensor, b.tensor, Stream{});
        std::vector<double> mag;
        const std::vector<double> ref = matmul_reference(out, a, b, &mag);
        expect_close("out", out.fetch(), ref, mag, K, N);
    }
}

TEST(TensorOps, BitsDoNotDependOnThreads) {
    const TestArray x = TestArray::random({90, 1001}, 1), y = TestArray::random({1001}, 2);
    expect_deterministic("zip", [&] {
        const TestArray out = TestArray::poisoned({90, 1001});
        tensor_zip(out, F::Pow, x, y, Stream{});
        return out.fetch();
    });
    const TestArray wide = TestArray::random({300000}, 3);
    for (const Shape& shape : {Shape{300000, 1}, Shape{1, 300000}, Shape{30000, 10}, Shape{10, 30000}})
        for (int axis = 0; axis < 2; axis++)
            expect_deterministic("reduce", [&] {
                Shape to = shape;
                to[size_t(axis)] = 1;
                const TestArray out = TestArray::poisoned({to[0] * to[1]});
                reduce(F::Add, shaped(out, to), shaped(wide, shape), axis, 0);
                return out.fetch();
            });
    const TestArray a = TestArray::random({70, 20, 30}, 1), b = TestArray::random({1, 30, 25}, 2);
    expect_deterministic("matmul", [&] {
        const TestArray out = TestArray::poisoned({70, 20, 25});
        tensor_matmul(out, a, b, Stream{});
        return out.fetch();
    });
}

TEST(TensorOverlap, FindsSharedElementsExactly) {
    const TestArray memory = TestArray::random({1000}, 1);
    const auto view = [&](int64_t first, const Shape& shape, const Shape& stride) {
        Tensor t = shaped(memory, shape);
        t.data = static_cast<char*>(memory.tensor().data) + first * 4;
        std::copy(stride.begin(), stride.end(), t.stride);
        return t;
    };
    EXPECT_FALSE(tensors_overlap(view(0, {100}, {2}), view(1, {100}, {2})));            // odd and even
    EXPECT_TRUE(tensors_overlap(view(0, {100}, {2}), view(1, {100}, {3})));             // 4, 10, …
    EXPECT_FALSE(tensors_overlap(view(0, {10, 4}, {8, 1}), view(4, {10, 4}, {8, 1})));  // halves of rows
    EXPECT_TRUE(tensors_overlap(view(0, {10, 5}, {8, 1}), view(4, {10, 4}, {8, 1})));   // … that share a column
    EXPECT_FALSE(tensors_overlap(view(0, {100}, {1}), view(100, {100}, {1})));          // side by side
    EXPECT_TRUE(tensors_overlap(view(99, {100}, {-1}), view(99, {100}, {1})));          // backwards
    EXPECT_FALSE(tensors_overlap(view(98, {99}, {-1}), view(99, {100}, {1})));
    EXPECT_FALSE(tensors_overlap(view(0, {0}, {1}), view(0, {10}, {1})));          // empty
    EXPECT_TRUE(tensors_overlap(view(50, {7}, {0}), view(0, {10, 10}, {10, 1})));  // repeats one element
    EXPECT_FALSE(tensors_overlap(view(0, {3, 3}, {6, 15}), view(1, {5}, {9})));    // multiples of 3, and others
}

TEST(TensorArguments, InvalidArgumentsAreErrors) {
    const TestArray x = TestArray::random({4, 6}, 1), y = TestArray::random({6}, 2), out = TestArray::poisoned({4, 6}),
                    five = TestArray::random({5}, 3), ints = TestArray::ints({1, 2}, {2});
    const Stream s{};
    expect_error([&] { tensor_map(out, F::Add, x, s); },
                 "tensor_map: add is a function of 2 arguments, expected one of 1");
    expect_error([&] { tensor_zip(out, F::Neg, x, y, s); },
                 "tensor_zip: neg is a function of 1 argument, expected one of 2");
    expect_error([&] { tensor_map(out, F(200), x, s); }, "tensor_map: 200 is not a function");
    expect_error([&] { tensor_map(out, F::Id, Tensor{}, s); }, "tensor_map: inp is missing");
    expect_error([&] { tensor_map(ints, F::Id, x, s); }, "tensor_map: out is int32 [2], expected fp32, bf16 or fp16");
    expect_error([&] { tensor_zip(out, F::Add, x, five, s); }, "tensor_zip: y [5] does not broadcast to [4, 6]");
    expect_error([&] { tensor_zip(y, F::Add, x, y, s); }, "tensor_zip: x [4, 6] does not broadcast to [6]");
    expect_error([&] { tensor_map(x, F::Neg, x, s); }, "tensor_map: out overlaps inp; give it memory of its own");
    Tensor repeated = out;
    repeated.stride[0] = 0;
    expect_error([&] { tensor_map(repeated, F::Neg, x, s); },
                 "tensor_map: out [4, 6] has a stride of 0 in dimension 0: its elements overlap each other");

    expect_error([&] { tensor_bin_bcast(out, F::Max, x, y, s); },
                 "tensor_bin_bcast: the function is max, expected add, sub, mul or div");
    expect_error([&] { tensor_bin_bcast(out, F::Add, x, five, s); },
                 "tensor_bin_bcast: y [5] does not repeat over [4, 6]; each of its dimensions must divide out's");
    expect_error([&] { tensor_bin_bcast(out, F::Add, y, y, s); }, "tensor_bin_bcast: x is [6], expected [4, 6]");
    expect_error(
        [&] {
            tensor_bin_bcast(shaped(out, {1, 1, 1, 4, 6}), F::Add, Tensor{}, y, s);
        },
        "tensor_bin_bcast: out [1, 1, 1, 4, 6] has 5 dimensions, expected 4 at most");

    const TestArray row = TestArray::poisoned({1, 6});
    expect_error([&] { tensor_reduce(row, F::Add, x, 2, 0, Tensor{}, s); },
                 "tensor_reduce: axis 2 lies outside inp [4, 6]");
    expect_error([&] { tensor_reduce(row, F::Add, x, 1, 0, Tensor{}, s); },
                 "tensor_reduce: out is [1, 6], expected [4, 1]");
    expect_error([&] { tensor_reduce(row, F::Sub, x, 0, 0, Tensor{}, s); },
                 "tensor_reduce: the function is sub, expected add, mul or max");
    const TestArray longest = TestArray::random({1 << 20}, 1), one = TestArray::poisoned({1});
    const int64_t bytes = tensor_reduce_scratch(one, longest, 0);
    expect_error([&] { tensor_reduce(one, F::Add, longest, 0, 0, Tensor{}, s); },
                 str("tensor_reduce: scratch is missing, expected uint8 [", bytes, "]"));

    expect_error([&] { tensor_matmul(out, x, x, s); },
                 "tensor_matmul: a [4, 6] times b [4, 6] does not give out [4, 6]");
    expect_error([&] { tensor_matmul(out, x, y, s); }, "tensor_matmul: b is fp32 [6], expected fp32 matrices");
    expect_error(
        [&] {
            tensor_matmul(shaped(out, {2, 2, 6}), shaped(x, {3, 2, 4}), shaped(x, {4, 6}), s);
        },
        "tensor_matmul: the batch of a [3] does not broadcast to [2]");
}
