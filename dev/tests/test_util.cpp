#include "dev/tests/test_util.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "runtime/device/convert_dtype.h"
#include "runtime/normal.h"

double rounded(DType dtype, double x) {
    if (dtype == DType::BF16) return to_float(to_bf16(float(x)));
    if (dtype == DType::F16) return to_float(to_fp16(float(x)));
    return float(x);
}

TestArray::TestArray(DType dtype, std::initializer_list<int64_t> shape)
    : view(make_tensor(nullptr, dtype, backend_device(), shape)) {
    view.data = device_alloc(size_t(view.bytes()));
}

TestArray::TestArray(TestArray&& other) noexcept : view(other.view), host(std::move(other.host)) {
    other.view.data = nullptr;
}

TestArray::~TestArray() {
    if (view.data) device_free(view.data);
}

void TestArray::upload(const void* from) {
    copy_to_device(view.data, from, size_t(view.bytes()), Stream{});
    synchronize(Stream{});
}

TestArray TestArray::of(DType dtype, const std::vector<double>& values, std::initializer_list<int64_t> shape) {
    TestArray a(dtype, shape);
    require(int64_t(values.size()) == a.view.numel(), "TestArray: ", values.size(), " values for shape ",
            shape_string(a.view));
    const std::vector<float> floats(values.begin(), values.end());
    std::vector<char> stored(size_t(a.view.bytes()));
    convert_from_float(stored.data(), dtype, floats.data(), a.view.numel());
    a.upload(stored.data());
    std::vector<float> back(floats.size());
    convert_to_float(back.data(), stored.data(), dtype, a.view.numel());
    a.host.assign(back.begin(), back.end());
    return a;
}

namespace {

// The first n random numbers of a seed. Under a sanitizer they take longer than many a kernel, and tests ask for the
// same ones again and again.
std::vector<double> random_numbers(uint64_t seed, size_t n) {
    constexpr size_t KEPT = 8 << 20;  // numbers
    static thread_local std::map<uint64_t, std::vector<float>> known;
    static thread_local size_t kept = 0;
    std::vector<float>& numbers = known[seed];
    if (const size_t had = numbers.size(); had < n) {
        numbers.resize(n);
        normal_numbers(numbers.data() + had, seed, 0, had, int64_t(n - had));
        kept += n - had;
    }
    std::vector<double> found(numbers.begin(), numbers.begin() + int64_t(n));
    if (kept > KEPT) {
        known.clear();
        kept = 0;
    }
    return found;
}

}  // namespace

TestArray TestArray::random(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed, double scale,
                            double shift) {
    const int64_t n = make_tensor(nullptr, dtype, Device::CPU, shape).numel();
    std::vector<double> values = random_numbers(seed, size_t(n));
    for (double& value : values) value = value * scale + shift;
    return of(dtype, values, shape);
}

TestArray TestArray::poisoned(DType dtype, std::initializer_list<int64_t> shape) {
    const int64_t n = make_tensor(nullptr, dtype, Device::CPU, shape).numel();
    return of(dtype, std::vector<double>(size_t(n), std::numeric_limits<double>::quiet_NaN()), shape);
}

TestArray TestArray::ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
    TestArray a(DType::I32, shape);
    require(int64_t(values.size()) == a.view.numel(), "TestArray: ", values.size(), " values for shape ",
            shape_string(a.view));
    a.upload(values.data());
    a.host.assign(values.begin(), values.end());
    return a;
}

TestArray TestArray::doubles(const std::vector<double>& values, std::initializer_list<int64_t> shape) {
    TestArray a(DType::F64, shape);
    require(int64_t(values.size()) == a.view.numel(), "TestArray: ", values.size(), " values for shape ",
            shape_string(a.view));
    a.upload(values.data());
    a.host = values;
    return a;
}

TestArray TestArray::bytes(const void* data, int64_t n) {
    TestArray a(DType::U8, {n});
    a.upload(data);
    return a;
}

TestArray TestArray::scratch(int64_t bytes) {
    TestArray a(DType::U8, {bytes});
    device_fill(a.view.data, 0xFF, size_t(bytes),
                Stream{});  // NaN in fp32 and fp64: a read before the first write shows
    return a;
}

std::vector<double> TestArray::fetch() const {
    synchronize(Stream{});
    std::vector<double> values(size_t(view.numel()));
    if (view.dtype == DType::F64) {
        copy_to_host(values.data(), view.as<double>(), size_t(view.bytes()), Stream{});
    } else {
        std::vector<char> stored(size_t(view.bytes()));
        std::vector<float> floats(values.size());
        copy_to_host(stored.data(), view.data, size_t(view.bytes()), Stream{});
        convert_to_float(floats.data(), stored.data(), view.dtype, view.numel());
        values.assign(floats.begin(), floats.end());
    }
    return values;
}

std::vector<int32_t> TestArray::fetch_ints() const {
    synchronize(Stream{});
    std::vector<int32_t> values(size_t(view.numel()));
    copy_to_host(values.data(), view.as<int32_t>(), size_t(view.bytes()), Stream{});
    return values;
}

void TestArray::fetch_bytes(void* to) const {
    synchronize(Stream{});
    copy_to_host(to, view.data, size_t(view.bytes()), Stream{});
}

namespace {

// The error of rounding a result to its dtype, in addition to that of its sums.
struct StorageBound {
    double rms = 0;       // of the value: the deviation of one rounding is 0.4 units, averaged over mantissas
    double largest = 0;   // of the magnitude: half a unit in the last place
    double smallest = 0;  // an absolute error that is always allowed: results below the normal range lose digits
};

StorageBound storage_bound(DType dtype, int roundings) {
    const double r = roundings;
    if (dtype == DType::BF16) return {2e-3 * std::sqrt(r), 0x1p-8 * r, 0x1p-134 * r};
    if (dtype == DType::F16) return {2.5e-4 * std::sqrt(r), 0x1p-11 * r, 0x1p-25 * r};
    return {};
}

}  // namespace

void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size) {
    expect_close(what, got, ref, mag, K, row_size, DType::F32);
}

void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size, DType dtype, int roundings) {
    ASSERT_EQ(got.size(), ref.size()) << what;
    ASSERT_EQ(got.size(), mag.size()) << what;
    if (got.empty()) return;
    ASSERT_GT(row_size, 0) << what;
    ASSERT_EQ(got.size() % size_t(row_size), 0u) << what << ": rows of " << row_size << " elements";
    const double bound = 4 * UNIT_ROUNDOFF * std::sqrt(1 + double(K) / 4096);
    const StorageBound storage = storage_bound(dtype, roundings);

    // Row: were the errors independent and normal with the deviations s_i that the bound on the whole tensor allows
    // them, then Σ error² of a row would pass this limit with probability e^−x (Laurent, Massart 2000, lemma 1). x is
    // such that in a tensor of this many rows one exceeds it once in a thousand tests.
    const auto squared_limit = [](double s2, double s4, double max_s2, double x) {
        return s2 + 2 * std::sqrt(x * s4) + 2 * x * max_s2;
    };
    const size_t rows = got.size() / size_t(row_size);
    const double x = std::log(1000.0 * double(rows));
    double total_error = 0, total_s2 = 0, total_s4 = 0, total_max = 0;
    for (size_t row = 0; row < rows; row++) {
        double error2 = 0, s2 = 0, s4 = 0, max_s2 = 0, worst = -1;
        size_t at = 0;
        for (size_t i = row * size_t(row_size); i < (row + 1) * size_t(row_size); i++) {
            ASSERT_TRUE(std::isfinite(ref[i]) && std::isfinite(mag[i]) && mag[i] >= std::fabs(ref[i]) * (1 - 1e-9))
                << what << ": the oracle gives " << ref[i] << " with mag " << mag[i] << " at " << i;
            const double e = got[i] - ref[i];
            const double s = bound * mag[i] + storage.rms * std::fabs(ref[i]) + storage.smallest;
            error2 += e * e;
            s2 += s * s;
            s4 += s * s * s * s;
            max_s2 = std::max(max_s2, s * s);
            if (!(e * e <= worst)) {
                worst = e * e;
                at = i;
            }
            if (dtype != DType::F32) {
                const double fp32 = bound * std::sqrt(squared_limit(1, 1, 1, std::log(1000.0 * double(got.size()))));
                ASSERT_LE(std::fabs(e), (storage.largest + fp32) * mag[i] + storage.smallest)
                    << what << ", row " << row << " of " << rows << ", column " << i % size_t(row_size) << ": got "
                    << got[i] << ", expected " << ref[i];
            }
        }
        const double limit2 = squared_limit(s2, s4, max_s2, x);
        ASSERT_TRUE(error2 <= limit2) << what << ", row " << row << " of " << rows << ": RMS error "
                                      << std::sqrt(error2 / double(row_size)) << ", limit "
                                      << std::sqrt(limit2 / double(row_size)) << "; worst at column "
                                      << at % size_t(row_size) << ": got " << got[at] << ", expected " << ref[at];
        total_error += error2;
        total_s2 += s2;
        total_s4 += s4;
        total_max = std::max(total_max, max_s2);
    }
    // fp32 sums stay at a tenth of their bound, so that the tensor needs no allowance for being a sample. A 16-bit
    // result's deviation is most of its bound.
    const double limit2 =
        dtype == DType::F32 ? total_s2 : squared_limit(total_s2, total_s4, total_max, std::log(1000.0));
    EXPECT_TRUE(total_error <= limit2) << what << ": RMS error " << std::sqrt(total_error / double(got.size()))
                                       << ", limit " << std::sqrt(limit2 / double(got.size()));
}

void expect_sum_of_rows(const char* what, const TestArray& sum, const std::vector<double>& rows, bool accumulate,
                        int64_t N, int64_t C) {
    std::vector<double> ref(static_cast<size_t>(C)), mag(ref.size());
    for (int64_t c = 0; c < C; c++) {
        const size_t i = size_t(c);
        if (accumulate) {
            ref[i] = sum.data()[c];
            mag[i] = std::abs(ref[i]);
        }
        for (int64_t n = 0; n < N; n++) {
            const double x = rows[size_t(n * C + c)];
            ref[i] += x;
            mag[i] += std::abs(x);
        }
    }
    expect_close(what, sum.fetch(), ref, mag, N, C);
}

void expect_same_bits(const char* what, const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); i++)
        ASSERT_EQ(std::memcmp(&a[i], &b[i], sizeof(double)), 0)
            << what << "[" << i << "]: " << a[i] << " and " << b[i] << " are not the same bits";
}

std::vector<double> take_columns(const std::vector<double>& values, int64_t stride, int64_t C) {
    std::vector<double> taken;
    for (size_t row = 0; row < values.size(); row += size_t(stride))
        taken.insert(taken.end(), values.begin() + int64_t(row), values.begin() + int64_t(row) + C);
    return taken;
}

void expect_gaps_untouched(const char* what, const std::vector<double>& values, int64_t stride, int64_t C) {
    for (size_t i = 0; i < values.size(); i++)
        if (int64_t(i) % stride >= C) {
            ASSERT_TRUE(std::isnan(values[i])) << what << ": wrote " << values[i] << " between the rows, at " << i;
        }
}
