#include "dev/test_util.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

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

TestArray TestArray::of(const std::vector<double>& values, std::initializer_list<int64_t> shape) {
    TestArray a(DType::F32, shape);
    require(int64_t(values.size()) == a.view.numel(), "TestArray: ", values.size(), " values for shape ",
            shape_string(a.view));
    std::vector<float> rounded(values.begin(), values.end());
    a.upload(rounded.data());
    a.host.assign(rounded.begin(), rounded.end());
    return a;
}

TestArray TestArray::random(std::initializer_list<int64_t> shape, uint64_t seed, double scale, double shift) {
    std::vector<double> values(size_t(make_tensor(nullptr, DType::F32, Device::CPU, shape).numel()));
    for (size_t i = 0; i < values.size(); i++) values[i] = normal01(seed, 0, i) * scale + shift;
    return of(values, shape);
}

TestArray TestArray::poisoned(std::initializer_list<int64_t> shape) {
    const int64_t n = make_tensor(nullptr, DType::F32, Device::CPU, shape).numel();
    return of(std::vector<double>(size_t(n), std::numeric_limits<double>::quiet_NaN()), shape);
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
    device_fill(a.view.data, 0xFF, size_t(bytes), Stream{});  // NaN to whoever reads before writing, fp32 or fp64
    return a;
}

std::vector<double> TestArray::fetch() const {
    synchronize(Stream{});
    std::vector<double> values(size_t(view.numel()));
    if (view.dtype == DType::F64) {
        copy_to_host(values.data(), view.as<double>(), size_t(view.bytes()), Stream{});
    } else {
        std::vector<float> floats(values.size());
        copy_to_host(floats.data(), view.as<float>(), size_t(view.bytes()), Stream{});
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

void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size) {
    ASSERT_EQ(got.size(), ref.size()) << what;
    ASSERT_EQ(got.size(), mag.size()) << what;
    if (got.empty()) return;
    ASSERT_GT(row_size, 0) << what;
    ASSERT_EQ(got.size() % size_t(row_size), 0u) << what << ": rows of " << row_size << " elements";
    const double bound = 4 * UNIT_ROUNDOFF * std::sqrt(1 + double(K) / 4096);

    // Row: were the errors independent and normal with the deviation that the bound on the whole tensor allows them,
    // bound·mag, then Σ error² of a row would pass this limit with probability e^−x (Laurent, Massart 2000, lemma 1).
    // x is such that in a tensor of this many rows one does so once in a thousand draws.
    const size_t rows = got.size() / size_t(row_size);
    const double x = std::log(1000.0 * double(rows));
    double total_error = 0, total_mag = 0;
    for (size_t row = 0; row < rows; row++) {
        double error2 = 0, mag2 = 0, mag4 = 0, max_mag2 = 0, worst = -1;
        size_t at = 0;
        for (size_t i = row * size_t(row_size); i < (row + 1) * size_t(row_size); i++) {
            ASSERT_TRUE(std::isfinite(ref[i]) && std::isfinite(mag[i]) && mag[i] >= std::fabs(ref[i]) * (1 - 1e-9))
                << what << ": the oracle gives " << ref[i] << " with mag " << mag[i] << " at " << i;
            const double e = got[i] - ref[i], m2 = mag[i] * mag[i];
            error2 += e * e;
            mag2 += m2;
            mag4 += m2 * m2;
            max_mag2 = std::max(max_mag2, m2);
            if (!(e * e <= worst)) worst = e * e, at = i;
        }
        const double limit2 = bound * bound * (mag2 + 2 * std::sqrt(x * mag4) + 2 * x * max_mag2);
        ASSERT_TRUE(error2 <= limit2) << what << ", row " << row << " of " << rows << ": RMS error "
                                      << std::sqrt(error2 / double(row_size)) << ", limit "
                                      << std::sqrt(limit2 / double(row_size)) << "; worst at column "
                                      << at % size_t(row_size) << ": got " << got[at] << ", expected " << ref[at];
        total_error += error2;
        total_mag += mag2;
    }
    EXPECT_TRUE(total_error <= bound * bound * total_mag)
        << what << ": RMS error " << std::sqrt(total_error / double(got.size())) << ", limit "
        << bound * std::sqrt(total_mag / double(got.size()));
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
