// Muon against the oracle: momentum, the Newton-Schulz iteration and the update, alone and as one step; segments that
// cut matrices, wide and tall matrices, batches; on a GPU 16-bit parameters and bf16 matrices.
#include "kernels/muon.h"

#include <algorithm>
#include <array>

#include "dev/oracle/reference.h"
#include "dev/oracle/stochastic_rounding.h"
#include "dev/tests/test_util.h"
#include "runtime/device/blas_stream.h"

#ifdef USE_CUDA
#include "kernels/matmul.h"
#define UPDATE_DTYPES DType::F32, DType::BF16
#else
#define UPDATE_DTYPES DType::F32
#endif

namespace {

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

TestArray make_scalars(float lr, float momentum, float grad_scale, bool skip, int64_t t = 1) {
    const StepScalars s = {lr, 1, momentum, 0, 2, 3, grad_scale, skip, t, 0, {}, {}};
    return TestArray::bytes(&s, sizeof(s));
}

// [begin, end) at the same indices in params.
MuonSegment segment_of(int64_t begin, int64_t end, int64_t update_begin, float weight_decay = 0, float lr_scale = 1,
                       float shape_scale = 1) {
    MuonSegment s;
    s.begin = begin;
    s.end = end;
    s.weight_decay = weight_decay;
    s.fp32_begin = begin;
    s.lr_scale = lr_scale;
    s.update_begin = update_begin;
    s.shape_scale = shape_scale;
    return s;
}

void momentum(Tensor updates, Tensor m, Tensor grads, const std::vector<MuonSegment>& segments, Tensor scalars) {
    muon_momentum(updates, m, grads, segments.data(), int64_t(segments.size()), 1, scalars, Stream{});
}

void update(Tensor params, Tensor params_T, Tensor updates, const std::vector<MuonSegment>& segments, Tensor scalars,
            uint64_t seed = 0) {
    muon_update(params, params_T, updates, segments.data(), int64_t(segments.size()), seed, scalars, Stream{});
}

// Gaps, an empty segment, updates that are packed in another order and not aligned for vectors.
const std::vector<MuonSegment> SEGMENTS = {segment_of(0, 17, 40000, 0.1f, 1, 2), segment_of(20, 20, 0),
                                           segment_of(21, 500, 41001, 0, 0.5f, 0.3f),
                                           segment_of(512, 40001, 3, 0.5f, 3), segment_of(40001, 70000, 50000)};
constexpr int64_t SIZE = 70003, UPDATES_SIZE = 80001;

// The index of the updates for each element of the arenas; -1 in gaps.
std::vector<int64_t> update_indices(const std::vector<MuonSegment>& segments, int64_t n) {
    std::vector<int64_t> at(size_t(n), -1);
    for (const MuonSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++) at[size_t(i)] = s.update_begin + i - s.begin;
    return at;
}

// Expects elements outside the segments unchanged, and collects the others.
struct Collected {
    std::vector<double> got;
    reference::Values ref;
    void add(double x, reference::Value r) {
        got.push_back(x);
        ref.value.push_back(r.value);
        ref.mag.push_back(r.mag);
    }
    void expect(const char* what, DType dtype = DType::F32) const {
        expect_close(what, got, ref.value, ref.mag, 1, 1, dtype);
    }
};

}  // namespace

class MuonUpdates : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Op, MuonUpdates, testing::Values(UPDATE_DTYPES),
                         [](const auto& test) { return dtype_name(test.param); });

TEST_P(MuonUpdates, MomentumMatchesOracle) {
    for (const auto& [mu, grad_scale, size] :
         std::vector<std::array<float, 3>>{{0.95f, 1, 1e-2f}, {0.85f, 0.37f, 1e-6f}, {0, 1, 1}, {1, 2, 1}}) {
        SCOPED_TRACE(str("mu ", mu, " grad_scale ", grad_scale, " size ", size));
        const TestArray m = TestArray::random({SIZE}, 1, 0.3 * size), grads = TestArray::random({SIZE}, 2, size),
                        updates = TestArray::poisoned(GetParam(), {UPDATES_SIZE});
        momentum(updates, m, grads, SEGMENTS, make_scalars(NAN, mu, grad_scale, false));
        const std::vector<double> m1 = m.fetch(), u = updates.fetch();
        const std::vector<int64_t> at = update_indices(SEGMENTS, SIZE);
        Collected cm, cu;
        std::vector<bool> written(size_t(UPDATES_SIZE), false);
        for (size_t i = 0; i < size_t(SIZE); i++) {
            if (at[i] < 0) {
                ASSERT_EQ(m1[i], m.data()[i]) << "gap at " << i;
                continue;
            }
            const reference::Muon r = reference::muon_momentum(m.data()[i], grads.data()[i], grad_scale, mu);
            cm.add(m1[i], r.m);
            cu.add(u[size_t(at[i])], r.u);
            written[size_t(at[i])] = true;
        }
        cm.expect("m");
        cu.expect("updates", GetParam());
        for (size_t i = 0; i < u.size(); i++) ASSERT_EQ(std::isnan(u[i]), !written[i]) << "updates at " << i;
    }
}

TEST_P(MuonUpdates, UpdateMatchesOracle) {
    for (const float lr : {0.02f, 1.0f}) {
        const TestArray params = TestArray::random({SIZE}, 1, 0.02),
                        updates = TestArray::random(GetParam(), {UPDATES_SIZE}, 2, 0.05);
        update(params, Tensor{}, updates, SEGMENTS, make_scalars(lr, NAN, NAN, false));
        const std::vector<double> p = params.fetch();
        Collected c;
        std::vector<bool> covered(size_t(SIZE), false);
        for (const MuonSegment& s : SEGMENTS)
            for (int64_t i = s.begin; i < s.end; i++) {
                covered[size_t(i)] = true;
                c.add(p[size_t(i)],
                      reference::muon_update(params.data()[i], updates.data()[s.update_begin + i - s.begin],
                                             double(lr) * s.lr_scale, s.shape_scale, s.weight_decay));
            }
        c.expect("params");
        for (size_t i = 0; i < size_t(SIZE); i++)
            if (!covered[i]) {
                ASSERT_EQ(p[i], params.data()[i]) << "gap at " << i;
            }
        expect_same_bits("updates", updates.values(), updates.fetch());
    }
}

TEST_P(MuonUpdates, SkippedStepChangesNothing) {
    const TestArray params = TestArray::random({SIZE}, 1), m = TestArray::random({SIZE}, 2);
    const TestArray grads = TestArray::poisoned({SIZE}), updates = TestArray::random(GetParam(), {UPDATES_SIZE}, 3);
    const TestArray scalars = make_scalars(NAN, 0.95f, 1, true);
    momentum(updates, m, grads, SEGMENTS, scalars);
    update(params, Tensor{}, updates, SEGMENTS, scalars);
    expect_same_bits("params", params.values(), params.fetch());
    expect_same_bits("m", m.values(), m.fetch());
    expect_same_bits("updates", updates.values(), updates.fetch());
}

// In one segment, in three that begin anywhere, and in more than one launch handles on a GPU.
TEST_P(MuonUpdates, ResultDoesNotDependOnSegments) {
    const int64_t n = 20011;
    const auto cut = [&](const std::vector<int64_t>& cuts) {
        std::vector<MuonSegment> segments;
        for (size_t i = 0; i + 1 < cuts.size(); i++)
            segments.push_back(segment_of(cuts[i], cuts[i + 1], cuts[i] + 5, 0.1f, 2, 0.7f));
        return segments;
    };
    std::vector<int64_t> many;
    for (int64_t i = 0; i < n; i += 13) many.push_back(i);
    many.push_back(n);
    std::vector<std::vector<double>> first;
    for (const auto& segments : {cut({0, n}), cut({0, 1, 4095, n}), cut(many)}) {
        const TestArray params = TestArray::random({n}, 1), m = TestArray::random({n}, 2),
                        grads = TestArray::random({n}, 3), updates = TestArray::poisoned(GetParam(), {n + 5});
        momentum(updates, m, grads, segments, make_scalars(NAN, 0.95f, 1, false));
        update(params, Tensor{}, updates, segments, make_scalars(0.02f, NAN, NAN, false));
        const std::vector<std::vector<double>> got = {params.fetch(), m.fetch(), updates.fetch()};
        if (first.empty()) first = got;
        for (size_t i = 0; i < got.size(); i++) expect_same_bits("result", first[i], got[i]);
    }
}

// Bitwise: u is that of an fp32 momentum, and the momentum is the fp32 one rounded with its noise, however the matrix
// is divided into segments.
TEST(Muon, MomentumInBf16IsTheRoundedFp32One) {
    const int64_t n = 20011, t = 7;
    const uint64_t key = name_hash("layers.0.fc.weight");
    const std::vector<double> m0 = TestArray::random(DType::BF16, {n}, 2).values();
    const auto run = [&](DType dtype, const std::vector<int64_t>& cuts) {
        std::vector<MuonSegment> segments;
        for (size_t i = 0; i + 1 < cuts.size(); i++) {
            segments.push_back(segment_of(cuts[i], cuts[i + 1], cuts[i] + 5));
            segments.back().key = key;
            segments.back().first_element = cuts[i] + 1001;
        }
        const TestArray m = TestArray::of(dtype, m0, {n}), grads = TestArray::random({n}, 3),
                        updates = TestArray::poisoned({n + 5});
        momentum(updates, m, grads, segments, make_scalars(NAN, 0.95f, 0.7f, false, t));  // with seed 1
        return std::make_pair(m.fetch(), updates.fetch());
    };
    const auto [m_exact, u_exact] = run(DType::F32, {0, n});
    for (const auto& cuts : {std::vector<int64_t>{0, n}, {0, 1, 4095, n}}) {
        const auto [m, u] = run(DType::BF16, cuts);
        expect_same_bits("updates", u_exact, u);
        for (int64_t i = 0; i < n; i++)
            ASSERT_EQ(m[size_t(i)], round_by(m_exact[size_t(i)], noise_of(1, t, key, i + 1001, NoiseOf::FirstMoment)))
                << i;
    }
}

// Gradients in bf16 count as the numbers that they are.
TEST(Muon, GradientsInBf16GiveTheSameBits) {
    const int64_t n = 20011;
    const std::vector<double> g = TestArray::random(DType::BF16, {n}, 3).values();
    const std::vector<MuonSegment> segments = {segment_of(3, 9000, 0), segment_of(9001, n, 9000)};
    for (const DType moment : {DType::F32, DType::BF16}) {
        const auto run = [&](DType dtype) {
            const TestArray m = TestArray::random(moment, {n}, 2), updates = TestArray::of(std::vector<double>(n), {n});
            momentum(updates, m, TestArray::of(dtype, g, {n}), segments, make_scalars(NAN, 0.95f, 0.7f, false));
            return std::make_pair(m.fetch(), updates.fetch());
        };
        const auto [m, u] = run(DType::BF16);
        const auto [m_exact, u_exact] = run(DType::F32);
        expect_same_bits("m", m, m_exact);
        expect_same_bits("updates", u, u_exact);
    }
}

TEST(Muon, BitsDoNotDependOnThreads) {
    const int64_t n = 50001;
    const TestArray grads = TestArray::random({n}, 1);
    const std::vector<MuonSegment> segments = {segment_of(3, 20000, 0, 0.1f), segment_of(20001, n, 20000)};
    expect_deterministic("params", [&] {
        const TestArray params = TestArray::random({n}, 2), m = TestArray::random({n}, 3),
                        updates = TestArray::poisoned({n});
        momentum(updates, m, grads, segments, make_scalars(NAN, 0.95f, 0.5f, false));
        update(params, Tensor{}, updates, segments, make_scalars(0.02f, NAN, NAN, false));
        std::vector<double> both = params.fetch(), rest = m.fetch();
        both.insert(both.end(), rest.begin(), rest.end());
        return both;
    });
}

// --- the Newton-Schulz iteration

namespace {

void orthogonalise(const TestArray& x, const NewtonSchulz& coefficients) {
    const Tensor t = x;
    const TestArray scratch = TestArray::scratch(newton_schulz_scratch(t.shape[0], t.shape[1], t.shape[2], t.dtype));
    newton_schulz(x, scratch, coefficients, stream());
}

std::vector<double> matrix_of(const std::vector<double>& batch, int64_t i, int64_t size) {
    return {batch.begin() + i * size, batch.begin() + (i + 1) * size};
}

double exact(reference::Value, double, int64_t) {
    return 0;
}

// Expects the kernel's result for one matrix x.
//
// The iteration amplifies rounding errors: an error of X₀ in the direction of a small singular value grows by up to the
// product of all a (485 for "quintic"). How much depends on the matrix, so it is measured: the oracle runs again with
// random errors in X₀, A, B and X. They are normal, and their deviation is what expect_close allows the RMS of an error
// to be (docs/understand/numerics.md): 4u·√(1 + K/4096)·mag for the sum, and in bf16 2e-3 of what is rounded, which in
// B and X is the product and the sum. The kernel's own errors are smaller: a tenth in fp32, three quarters in bf16.
// Where few directions dominate, both are samples of few numbers and scatter: hence three runs, and in bf16 the
// factor 2.
void expect_newton_schulz(const std::vector<double>& got, const std::vector<double>& x, int64_t rows, int64_t columns,
                          const NewtonSchulz& coefficients, DType dtype) {
    const std::vector<double> ref = reference::newton_schulz(x.data(), rows, columns, coefficients, exact);
    const auto difference = [&](const std::vector<double>& other) {
        double sum = 0, largest = 0;
        for (size_t i = 0; i < ref.size(); i++) {
            const double e = std::fabs(other[i] - ref[i]);
            sum += e * e;
            largest = std::max(largest, e);
        }
        return std::array<double, 2>{std::sqrt(sum / double(ref.size())), largest};
    };
    double rms = 0, largest = 0;
    for (uint64_t run = 0; run < 3; run++) {
        uint64_t i = 0;
        const auto random = [&](reference::Value sum, double rounded, int64_t K) {
            const double sums = 4 * UNIT_ROUNDOFF * std::sqrt(1 + double(K) / 4096) * sum.mag;
            return normal01(100, run, i++) * (sums + (dtype == DType::F32 ? 0 : 2e-3 * rounded));
        };
        const auto [r, l] = difference(reference::newton_schulz(x.data(), rows, columns, coefficients, random));
        rms = std::max(rms, r);
        largest = std::max(largest, l);
    }
    for (const double value : got) ASSERT_TRUE(std::isfinite(value));
    const auto [error_rms, error_largest] = difference(got);
    const double factor = dtype == DType::F32 ? 1 : 2;
    EXPECT_LE(error_rms, factor * rms) << rows << " x " << columns << " " << dtype_name(dtype);
    EXPECT_LE(error_largest, factor * largest) << rows << " x " << columns << " " << dtype_name(dtype);
}

// The singular values of a matrix by Jacobi rotations of its rows until they are orthogonal (Hestenes 1958). The
// matrix has at most as many rows as columns.
std::vector<double> singular_values(std::vector<double> x, int64_t rows, int64_t columns) {
    const auto dot = [&](int64_t i, int64_t j) {
        double sum = 0;
        for (int64_t c = 0; c < columns; c++) sum += x[size_t(i * columns + c)] * x[size_t(j * columns + c)];
        return sum;
    };
    for (int sweep = 0; sweep < 12; sweep++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = i + 1; j < rows; j++) {
                const double angle = 0.5 * std::atan2(2 * dot(i, j), dot(i, i) - dot(j, j));
                const double c = std::cos(angle), s = std::sin(angle);
                for (int64_t k = 0; k < columns; k++) {
                    double &u = x[size_t(i * columns + k)], &v = x[size_t(j * columns + k)];
                    const double rotated = c * u + s * v;
                    v = c * v - s * u;
                    u = rotated;
                }
            }
    std::vector<double> values;
    for (int64_t i = 0; i < rows; i++) values.push_back(std::sqrt(dot(i, i)));
    return values;
}

// Where σ ends.
double apply(const NewtonSchulz& coefficients, double x) {
    x /= coefficients.norm_margin;
    for (const auto& [a, b, c] : coefficients.steps) x = x * (a + x * x * (b + x * x * double(c)));
    return x;
}

}  // namespace

class MuonMatrices : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Op, MuonMatrices, testing::Values(UPDATE_DTYPES),
                         [](const auto& test) { return dtype_name(test.param); });

TEST_P(MuonMatrices, NewtonSchulzMatchesOracle) {
    const std::vector<std::array<int64_t, 3>> shapes = {{3, 1, 1},    {2, 1, 7},   {2, 7, 1},   {4, 5, 5},
                                                        {1, 33, 17},  {3, 16, 48}, {2, 48, 16}, {1, 64, 64},
                                                        {2, 40, 136}, {2, 97, 41}};
    for (const std::string& name : newton_schulz_names())
        for (const auto& [batch, rows, columns] : shapes) {
            SCOPED_TRACE(str(name, ", ", batch, " x ", rows, " x ", columns));
            const NewtonSchulz coefficients = newton_schulz_coefficients(name);
            const TestArray x = TestArray::random(GetParam(), {batch, rows, columns}, 7, 1e-3);
            orthogonalise(x, coefficients);
            const std::vector<double> got = x.fetch();
            for (int64_t i = 0; i < batch; i++)
                expect_newton_schulz(matrix_of(got, i, rows * columns), matrix_of(x.values(), i, rows * columns), rows,
                                     columns, coefficients, GetParam());
        }
}

// Any number of iterations, none included, ends in x.
TEST_P(MuonMatrices, AnyNumberOfIterations) {
    const TestArray x = TestArray::random(GetParam(), {2, 24, 40}, 1);
    for (const int iterations : {0, 1, 2, 3, 9}) {
        NewtonSchulz coefficients = newton_schulz_coefficients("polar-express", 9);
        coefficients.steps.resize(size_t(iterations));
        const TestArray y = TestArray::of(GetParam(), x.values(), {2, 24, 40});
        orthogonalise(y, coefficients);
        for (int64_t i = 0; i < 2; i++)
            expect_newton_schulz(matrix_of(y.fetch(), i, 960), matrix_of(x.values(), i, 960), 24, 40, coefficients,
                                 GetParam());
    }
}

// The bands that muon.h states, for a matrix whose singular values fall from 1 to 0.01, before division by the norm.
// bf16 moves singular values near 1 by about 2⁻⁸ in each of the last iterations, which don't amplify.
TEST_P(MuonMatrices, SingularValuesEndInTheBand) {
    const int64_t rows = 48, columns = 80;
    const std::vector<double> left = TestArray::random({rows, rows}, 1).values(),
                              right = TestArray::random({rows, columns}, 2).values();
    const NewtonSchulz exactly = newton_schulz_coefficients("simple", 40);  // orthogonal to fp64's precision
    const std::vector<double> U = reference::newton_schulz(left.data(), rows, rows, exactly, exact),
                              V = reference::newton_schulz(right.data(), rows, columns, exactly, exact);
    std::vector<double> scaled = V;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            scaled[size_t(i * columns + j)] *= std::pow(0.01, double(i) / double(rows - 1));
    const reference::Values x =
        reference::matmul(U.data(), scaled.data(), false, false, nullptr, nullptr, rows, columns, rows);
    const std::vector<double> before = singular_values(x.value, rows, columns);
    ASSERT_NEAR(*std::max_element(before.begin(), before.end()), 1, 1e-9);
    ASSERT_NEAR(*std::min_element(before.begin(), before.end()), 0.01, 1e-9);
    const double slack = GetParam() == DType::F32 ? 1e-5 : 0.015;
    const std::vector<std::array<double, 2>> bands = {{0.68, 1.21}, {0.84, 1.13}, {1 - 1e-5, 1 + 1e-5}};
    for (size_t k = 0; k < bands.size(); k++) {
        SCOPED_TRACE(newton_schulz_names()[k]);
        const TestArray matrix = TestArray::of(GetParam(), x.value, {1, rows, columns});
        orthogonalise(matrix, newton_schulz_coefficients(newton_schulz_names()[k]));
        for (const double sigma : singular_values(matrix.fetch(), rows, columns)) {
            EXPECT_GE(sigma, bands[k][0] - slack);
            EXPECT_LE(sigma, bands[k][1] + slack);
        }
    }
}

// The same bits at any position of the batch, whatever the other matrices are.
TEST_P(MuonMatrices, ResultDoesNotDependOnPositionInBatch) {
    for (const auto& [rows, columns] : std::vector<std::array<int64_t, 2>>{{24, 56}, {264, 136}, {256, 384}}) {
        SCOPED_TRACE(str(rows, " x ", columns));
        const int64_t size = rows * columns, batch = 7;
        const std::vector<double> x = TestArray::random({rows, columns}, 1).values();
        std::vector<double> first;
        for (const int64_t at : {0, 3, 6}) {
            std::vector<double> values = TestArray::random({batch, rows, columns}, uint64_t(10 + at), 5).values();
            std::copy(x.begin(), x.end(), values.begin() + at * size);
            const TestArray all = TestArray::of(GetParam(), values, {batch, rows, columns});
            orthogonalise(all, newton_schulz_coefficients("quintic"));
            const std::vector<double> got = matrix_of(all.fetch(), at, size);
            if (first.empty()) first = got;
            expect_same_bits("matrix", first, got);
        }
    }
}

// Multiplying x by a power of two changes nothing, down to norms that fp32 holds only just. Zero stays zero.
TEST_P(MuonMatrices, ScaleDoesNotMatter) {
    const std::vector<double> x = TestArray::random(GetParam(), {20, 28}, 1).values();
    std::vector<double> first;
    for (const int exponent : {0, 40, -40, 110, -110}) {
        std::vector<double> values = x;
        for (double& v : values) v = std::ldexp(v, exponent);
        const TestArray scaled = TestArray::of(GetParam(), values, {1, 20, 28});
        orthogonalise(scaled, newton_schulz_coefficients("quintic"));
        if (first.empty()) first = scaled.fetch();
        expect_same_bits("scaled", first, scaled.fetch());
    }
    const TestArray zero = TestArray::of(GetParam(), std::vector<double>(560, 0), {1, 20, 28});
    orthogonalise(zero, newton_schulz_coefficients("polar-express"));
    expect_same_bits("zero", zero.values(), zero.fetch());
}

TEST_P(MuonMatrices, NewtonSchulzIsDeterministic) {
    const TestArray x = TestArray::random(GetParam(), {3, 150, 90}, 1);
    std::vector<double> first;
    for (int run = 0; run < 3; run++) {
        const TestArray y = TestArray::of(GetParam(), x.values(), {3, 150, 90});
        orthogonalise(y, newton_schulz_coefficients("quintic"));
        if (first.empty()) first = y.fetch();
        expect_same_bits("again", first, y.fetch());
    }
}

// One whole step over two fused tensors whose parts are matrices: q, k, v [3·24, 24] and gate, up [2·40, 24], divided
// among two ranks at an element within a matrix. In fp32 the sum of all errors is compared.
TEST_P(MuonMatrices, WholeStepMatchesOracle) {
    const int64_t C = 24, F = 40, qkv = 3 * C * C, n = qkv + 2 * F * C + 16;  // 16 elements of padding between
    const float lr = 0.02f, mu = 0.95f, grad_scale = 0.5f, decay = 0.1f;
    const TestArray params = TestArray::random({n}, 1, 0.02), m = TestArray::random({n}, 2, 1e-3),
                    grads = TestArray::random({n}, 3, 1e-2);
    const TestArray square = TestArray::poisoned(GetParam(), {3 * C * C}),
                    tall = TestArray::poisoned(GetParam(), {2 * F * C});
    const float scale = std::sqrt(float(F) / float(C));
    const std::vector<MuonSegment> first = {segment_of(0, 700, 0, decay), segment_of(700, qkv, 700, decay)};
    const std::vector<MuonSegment> second = {segment_of(qkv + 16, n - 100, 0, decay, 1, scale),
                                             segment_of(n - 100, n, 2 * F * C - 100, decay, 1, scale)};
    const TestArray scalars = make_scalars(lr, mu, grad_scale, false);
    const NewtonSchulz coefficients = newton_schulz_coefficients("quintic");
    const auto step = [&](const TestArray& updates, const std::vector<MuonSegment>& segments, int64_t batch,
                          int64_t rows) {
        momentum(updates, m, grads, segments, scalars);
        Tensor matrices = updates;
        matrices = make_tensor(matrices.data, matrices.dtype, matrices.device, {batch, rows, C});
        const TestArray scratch = TestArray::scratch(newton_schulz_scratch(batch, rows, C, GetParam()));
        synchronize(Stream{});
        newton_schulz(matrices, scratch, coefficients, stream());
        synchronize(stream());
        update(params, Tensor{}, updates, segments, scalars);
    };
    step(square, first, 3, C);
    step(tall, second, 2, F);

    const std::vector<double> p = params.fetch(), m1 = m.fetch();
    Collected cm;
    double change2 = 0, error2 = 0;
    const auto check = [&](int64_t begin, int64_t rows, double shape_scale) {
        std::vector<double> u;
        for (int64_t i = begin; i < begin + rows * C; i++) {
            const reference::Muon r = reference::muon_momentum(m.data()[i], grads.data()[i], grad_scale, mu);
            cm.add(m1[size_t(i)], r.m);
            u.push_back(r.u.value);
        }
        const std::vector<double> O = reference::newton_schulz(u.data(), rows, C, coefficients, exact);
        for (int64_t i = 0; i < rows * C; i++) {
            const double before = params.data()[begin + i];
            const double after = reference::muon_update(before, O[size_t(i)], lr, shape_scale, decay).value;
            change2 += std::pow(after - before, 2);
            error2 += std::pow(p[size_t(begin + i)] - after, 2);
        }
    };
    for (int64_t part = 0; part < 3; part++) check(part * C * C, C, 1);
    for (int64_t part = 0; part < 2; part++) check(qkv + 16 + part * F * C, F, std::sqrt(double(F) / double(C)));
    cm.expect("m");
    // Rounding u and X₀ errs by 0.4u·√2 of ‖X₀‖_F = 1, which grows by at most 485: to 3.3e-6 of ‖O‖_F = √24. Errors of
    // later iterations grow less. Rounding p errs by 0.4u·0.02 beside a change of 0.02/√24: 1e-7. In bf16 2⁻⁹ in place
    // of u gives 0.11.
    EXPECT_LE(std::sqrt(error2 / change2), GetParam() == DType::F32 ? 1e-5 : 0.13);
    for (int64_t i = qkv; i < qkv + 16; i++) EXPECT_EQ(p[size_t(i)], params.data()[i]) << "padding at " << i;
}

// --- coefficients

TEST(MuonCoefficients, EndInTheBand) {
    const std::vector<std::array<double, 3>> bands = {
        {0.002, 0.68, 1.21}, {0.001, 0.84, 1.13}, {0.001, 1 - 1e-5, 1 + 1e-5}};
    for (size_t k = 0; k < bands.size(); k++) {
        const auto& [smallest, low, high] = bands[k];
        const NewtonSchulz coefficients = newton_schulz_coefficients(newton_schulz_names()[k]);
        for (double sigma = smallest; sigma <= 1; sigma *= 1.0001) {
            ASSERT_GE(apply(coefficients, sigma), low) << newton_schulz_names()[k] << " " << sigma;
            ASSERT_LE(apply(coefficients, sigma), high) << newton_schulz_names()[k] << " " << sigma;
        }
    }
}

namespace {

// Solves the system of four linear equations [matrix | right side].
std::array<double, 4> solve(std::array<std::array<double, 5>, 4> rows) {
    for (size_t k = 0; k < 4; k++) {
        std::swap(rows[k], *std::max_element(rows.begin() + int64_t(k), rows.end(), [&](const auto& x, const auto& y) {
                      return std::fabs(x[k]) < std::fabs(y[k]);
                  }));
        for (size_t i = 0; i < 4; i++)
            for (size_t j = 5; i != k && j-- > k;) rows[i][j] -= rows[i][k] / rows[k][k] * rows[k][j];
    }
    return {rows[0][4] / rows[0][0], rows[1][4] / rows[1][1], rows[2][4] / rows[2][2], rows[3][4] / rows[3][3]};
}

// The odd polynomial of degree 5 closest to 1 on [low, high], by Remez' exchange: its error has the same size and
// alternating sign at both ends and at the two extrema between.
std::array<double, 3> closest_to_one(double low, double high) {
    double q = (3 * low + high) / 4, r = (low + 3 * high) / 4;
    std::array<double, 4> p{};
    for (int i = 0; i < 100; i++) {
        const auto row = [](double x, double sign) {
            return std::array<double, 5>{x, std::pow(x, 3), std::pow(x, 5), sign, 1};
        };
        p = solve({row(low, 1), row(q, -1), row(r, 1), row(high, -1)});
        const double root = std::sqrt(9 * p[1] * p[1] - 20 * p[0] * p[2]);
        q = std::sqrt((-3 * p[1] - root) / (10 * p[2]));
        r = std::sqrt((-3 * p[1] + root) / (10 * p[2]));
    }
    return {p[0], p[1], p[2]};
}

}  // namespace

// Amsel et al. 2025, algorithm 1: each polynomial is the best for the interval that the previous ones leave, at least
// 0.024 of it (section 4.4: otherwise the error is concentrated at small σ), scaled so that this interval's image is
// centred at 1. All but the eighth, where the iteration has converged to fp64's precision, are shrunk by 1.01.
TEST(MuonCoefficients, PolarExpressIsTheMinimaxComposition) {
    const NewtonSchulz coefficients = newton_schulz_coefficients("polar-express", 10);
    double low = 1e-3, high = 1;
    for (size_t i = 0; i < 7; i++) {
        std::array<double, 3> p = closest_to_one(std::max(low, 0.02407327424182761 * high), high);
        const auto at = [&](double x) { return x * (p[0] + x * x * (p[1] + x * x * p[2])); };
        const double factor = 2 / (at(low) + at(high));
        for (double& x : p) x *= factor;
        low = at(low);
        high = 2 - low;
        EXPECT_NEAR(coefficients.steps[i].a, p[0] / 1.01, 1e-6) << i;
        EXPECT_NEAR(coefficients.steps[i].b, p[1] / std::pow(1.01, 3), 2e-6) << i;
        EXPECT_NEAR(coefficients.steps[i].c, p[2] / std::pow(1.01, 5), 2e-6) << i;
    }
    for (size_t i = 7; i < 10; i++)
        EXPECT_EQ(std::vector<float>({1.875f, -1.25f, 0.375f}),
                  std::vector<float>({coefficients.steps[i].a, coefficients.steps[i].b, coefficients.steps[i].c}));
}

TEST(MuonCoefficients, NamesAndIterations) {
    EXPECT_EQ(newton_schulz_names(), (std::vector<std::string>{"quintic", "polar-express", "simple"}));
    EXPECT_EQ(newton_schulz_coefficients("quintic").steps.size(), 5u);
    EXPECT_EQ(newton_schulz_coefficients("polar-express").steps.size(), 5u);
    EXPECT_EQ(newton_schulz_coefficients("simple").steps.size(), 12u);
    EXPECT_EQ(newton_schulz_coefficients("simple", 3).steps.size(), 3u);
    expect_error(
        [] { newton_schulz_coefficients("cubic"); },
        "newton_schulz_coefficients: there are no coefficients \"cubic\", only quintic, polar-express, simple");
    expect_error([] { newton_schulz_coefficients("simple", -1); },
                 "newton_schulz_coefficients: iterations are -1, expected 0 or more");
}

// --- 16-bit parameters, tuning

#ifdef USE_CUDA
TEST(Muon, WritesRoundedCopyOfParameters) {
    for (const DType T : {DType::BF16, DType::F16}) {
        const TestArray params = TestArray::random({SIZE}, 1, 0.02), params_T = TestArray::poisoned(T, {SIZE}),
                        updates = TestArray::random(DType::BF16, {UPDATES_SIZE}, 2, 0.05),
                        only = TestArray::of(params.values(), {SIZE});
        const TestArray scalars = make_scalars(0.02f, NAN, NAN, false);
        update(params, params_T, updates, SEGMENTS, scalars);
        update(only, Tensor{}, updates, SEGMENTS, scalars);
        const std::vector<double> p = params.fetch(), copy = params_T.fetch();
        expect_same_bits("params", only.fetch(), p);
        const std::vector<int64_t> at = update_indices(SEGMENTS, SIZE);
        for (size_t i = 0; i < p.size(); i++)
            if (at[i] < 0) {
                ASSERT_TRUE(std::isnan(copy[i])) << "gap at " << i;
            } else {
                ASSERT_EQ(copy[i], rounded(T, p[i])) << i;
            }
    }
}

// Bitwise: the fp32 update, rounded with the noise of (seed, t, key, element). b starts at an index that is not aligned
// for vectors; c is a part of a tensor, from its element 1001 on.
TEST(Muon, StochasticRoundingUsesTheSpecifiedNoise) {
    const int64_t n = 10007, t = 7;
    const uint64_t seed = 1234567890123456789;
    const std::vector<double> p = TestArray::random(DType::BF16, {n}, 1, 0.02).values();
    const TestArray updates = TestArray::random(DType::BF16, {n}, 2, 0.05),
                    scalars = make_scalars(0.02f, NAN, NAN, false, t);
    std::vector<MuonSegment> segments = {segment_of(0, 4000, 0, 0.1f), segment_of(4003, 7001, 4003),
                                         segment_of(7001, n - 6, 7001, 0.1f)};
    const TestArray fp32 = TestArray::of(p, {n}), bf16 = TestArray::of(DType::BF16, p, {n});
    update(fp32, Tensor{}, updates, segments, scalars);
    for (size_t i = 0; i < 3; i++) {
        segments[i].fp32_begin = -1;
        segments[i].key = name_hash(str("tensor ", i));
    }
    segments[2].first_element = 1001;
    update(Tensor{}, bf16, updates, segments, scalars, seed);
    const std::vector<double> exactly = fp32.fetch(), got = bf16.fetch();
    for (const MuonSegment& s : segments)
        for (int64_t i = s.begin; i < s.end; i++)
            ASSERT_EQ(got[size_t(i)],
                      round_by(exactly[size_t(i)], noise_of(seed, t, s.key, i - s.begin + s.first_element)))
                << i;
    for (const int64_t i : {4000, 4002, 10001, 10006}) EXPECT_EQ(got[size_t(i)], p[size_t(i)]) << "gap at " << i;
}

// Tuned algorithms keep what the tests above ask of the library's first choice.
TEST_P(MuonMatrices, TunedIterationMatchesOracleAndIgnoresPosition) {
    Stream tuned = create_blas_stream();
    matmul_tuning(true, tuned);
    for (const auto& [rows, columns] : std::vector<std::array<int64_t, 2>>{{64, 128}, {136, 72}}) {
        const int64_t size = rows * columns;
        const NewtonSchulz coefficients = newton_schulz_coefficients("quintic");
        const std::vector<double> x = TestArray::random(GetParam(), {rows, columns}, 1).values();
        std::vector<double> three;
        for (int i = 0; i < 3; i++) three.insert(three.end(), x.begin(), x.end());
        const TestArray batch = TestArray::of(GetParam(), three, {3, rows, columns});
        const TestArray scratch = TestArray::scratch(newton_schulz_scratch(3, rows, columns, GetParam()));
        newton_schulz(batch, scratch, coefficients, tuned);
        synchronize(tuned);
        const std::vector<double> got = batch.fetch();
        expect_newton_schulz(matrix_of(got, 0, size), x, rows, columns, coefficients, GetParam());
        expect_same_bits("second", matrix_of(got, 0, size), matrix_of(got, 1, size));
        expect_same_bits("third", matrix_of(got, 0, size), matrix_of(got, 2, size));
    }
    destroy_stream(tuned);
}
#endif

TEST(Muon, InvalidArgumentsAreErrors) {
#ifdef USE_CUDA
    const char* dtypes = "fp32 or bf16";
#else
    const char* dtypes = "fp32";
#endif
    const TestArray a = TestArray::random({10}, 1), b = TestArray::random({9}, 2),
                    scalars = make_scalars(1, 0, 1, false);
    const std::vector<MuonSegment> good = {segment_of(0, 10, 0)}, outside = {segment_of(0, 11, 0)},
                                   overlapping = {segment_of(0, 6, 0), segment_of(5, 10, 0)},
                                   beyond = {segment_of(0, 10, 1)}, before = {segment_of(0, 10, -1)};
    std::vector<MuonSegment> nowhere = good;
    nowhere[0].fp32_begin = -1;
    expect_error([&] { momentum(a, b, a, good, scalars); }, "muon_momentum: m is fp32 [9], expected fp32 [10]");
    expect_error([&] { momentum(a, a, Tensor{}, good, scalars); },
                 "muon_momentum: grads is fp32 [], expected fp32 or bf16 [n]");
    expect_error([&] { momentum(Tensor{}, a, a, good, scalars); },
                 str("muon_momentum: updates is fp32 [], expected ", dtypes, " [any size]"));
    expect_error([&] { momentum(a, a, a, outside, scalars); },
                 "muon_momentum: segment 0 is [0, 11), expected ascending segments within [0, 10)");
    expect_error([&] { momentum(a, a, a, overlapping, scalars); },
                 "muon_momentum: segment 1 is [5, 10), expected ascending segments within [0, 10)");
    expect_error([&] { momentum(b, a, a, good, scalars); },
                 "muon_momentum: segment 0 lies at [0, 10) of updates, expected within [0, 9)");
    expect_error([&] { momentum(a, a, a, beyond, scalars); },
                 "muon_momentum: segment 0 lies at [1, 11) of updates, expected within [0, 10)");
    expect_error([&] { momentum(a, a, a, before, scalars); },
                 "muon_momentum: segment 0 lies at [-1, 9) of updates, expected within [0, 10)");
    expect_error([&] { momentum(a, a, a, good, a); },
                 str("muon_momentum: scalars is fp32 [10], expected uint8 [", sizeof(StepScalars), "]"));
    expect_error([&] { update(b, Tensor{}, a, good, scalars); },
                 "muon_update: segment 0 lies at [0, 10) of params, expected ascending segments within [0, 9)");
    expect_error([&] { update(a, Tensor{}, b, good, scalars); },
                 "muon_update: segment 0 lies at [0, 10) of updates, expected within [0, 9)");
    expect_error([&] { update(a, Tensor{}, a, nowhere, scalars); },
                 "muon_update: segment 0 has no fp32 parameters, and params_T is missing");
#ifndef USE_CUDA
    expect_error([&] { update(a, a, a, good, scalars); },
                 "muon_update: params_T is given; the CPU computes with the fp32 parameters themselves");
#endif

    const TestArray x = TestArray::random({2, 3, 5}, 1), flat = TestArray::random({30}, 1),
                    little = TestArray::scratch(8);
    const NewtonSchulz coefficients = newton_schulz_coefficients("quintic");
    const int64_t bytes = newton_schulz_scratch(2, 3, 5, DType::F32);
    expect_error([&] { newton_schulz(flat, little, coefficients, stream()); },
                 str("newton_schulz: x is fp32 [30], expected ", dtypes, " [batch, rows, columns]"));
    expect_error([&] { newton_schulz(x, little, coefficients, stream()); },
                 str("newton_schulz: scratch is uint8 [8], expected uint8 [", bytes, "] or more"));
    expect_error([&] { newton_schulz(x.tensor().columns(0, 4), little, coefficients, stream()); },
                 "newton_schulz: x [2, 3, 4] must be contiguous");
    expect_error([&] { normalize_matrices(flat, x, 1, little, Stream{}); },
                 "normalize_matrices: out is fp32 [30], expected fp32 [2, 3, 5]");
}
