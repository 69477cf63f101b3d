// Shared by the op tests: arrays of random inputs with float64 copies, and the error bounds of
// docs/understand/numerics.md.
#pragma once

#include <gtest/gtest.h>

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/rng.h"

constexpr double UNIT_ROUNDOFF = 0x1p-24;  // fp32

// Test suites of ops with activations of more than one dtype derive from this, use TEST_P and activation(), and are
// instantiated by INSTANTIATE_DTYPES(Suite): with fp32 on the CPU, with fp32, bf16 and fp16 on a GPU.
class DTypeTest : public testing::TestWithParam<DType> {
  public:
    static DType activation() { return GetParam(); }
};

#ifdef USE_CUDA
#define TEST_DTYPES DType::F32, DType::BF16, DType::F16
constexpr const char* ACTIVATION_MATRIX = "fp32, bf16 or fp16";  // in errors about dtypes
#else
#define TEST_DTYPES DType::F32
constexpr const char* ACTIVATION_MATRIX = "a fp32 matrix";
#endif
#define INSTANTIATE_DTYPES(Suite)                                     \
    INSTANTIATE_TEST_SUITE_P(Op, Suite, testing::Values(TEST_DTYPES), \
                             [](const auto& test) { return dtype_name(test.param); })

// x rounded to fp32 and then to the dtype, as a kernel stores it.
double rounded(DType dtype, double x);

// A tensor's memory on the backend's device with a float64 copy on the host. Inputs are random and rounded once, so
// that kernel and oracle get the same numbers. Outputs are poisoned with NaN, so that an unwritten element fails.
class TestArray {
  public:
    // F32, BF16 or F16; without a dtype F32.
    static TestArray random(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed, double scale = 1,
                            double shift = 0);
    static TestArray poisoned(DType dtype, std::initializer_list<int64_t> shape);
    static TestArray of(DType dtype, const std::vector<double>& values, std::initializer_list<int64_t> shape);
    static TestArray random(std::initializer_list<int64_t> shape, uint64_t seed, double scale = 1, double shift = 0) {
        return random(DType::F32, shape, seed, scale, shift);
    }
    static TestArray poisoned(std::initializer_list<int64_t> shape) { return poisoned(DType::F32, shape); }
    static TestArray of(const std::vector<double>& values, std::initializer_list<int64_t> shape) {
        return of(DType::F32, values, shape);
    }
    static TestArray ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
    static TestArray doubles(const std::vector<double>& values, std::initializer_list<int64_t> shape);  // F64
    static TestArray bytes(const void* data, int64_t n);                                                // U8
    static TestArray scratch(int64_t bytes);                                                            // U8, poisoned

    TestArray(TestArray&& other) noexcept;
    TestArray(const TestArray&) = delete;
    ~TestArray();

    Tensor tensor() const { return view; }
    operator Tensor() const { return view; }
    const std::vector<double>& values() const { return host; }  // the kernel's input
    const double* data() const { return host.data(); }
    std::vector<double> fetch() const;  // the present values on the device; F32, BF16, F16, F64
    std::vector<int32_t> fetch_ints() const;
    void fetch_bytes(void* to) const;

  private:
    TestArray(DType dtype, std::initializer_list<int64_t> shape);
    void upload(const void* from);
    Tensor view;
    std::vector<double> host;
};

// fp32 sums of length K: RMS(got − ref) ≤ 4u·√(1 + K/4096)·RMS(mag) over the whole tensor, and for each row of row_size
// elements the same with a factor for the row's smaller sample. mag: the formula with absolute values. NaN never
// passes. docs/understand/numerics.md derives both bounds.
void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size);

// The same for results of a given dtype, reached over `roundings` roundings to it. F32: the bound above. BF16 and F16:
// RMS ≤ 2e-3·√roundings·RMS(ref) (fp16: an eighth), whole tensor and rows, and |got − ref| ≤ roundings·2⁻⁸·mag (2⁻¹¹)
// for each element, beside what fp32 sums may add to both.
void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size, DType dtype, int roundings = 1);

// Expects sum[c] = Σ_n rows[n, c] in fp32, plus its initial value if `accumulate`. rows [N, C]: fetched values.
void expect_sum_of_rows(const char* what, const TestArray& sum, const std::vector<double>& rows, bool accumulate,
                        int64_t N, int64_t C);

// Expects the same bits, NaN included.
void expect_same_bits(const char* what, const std::vector<double>& a, const std::vector<double>& b);
// op(begin, end) returns what an op makes of rows [begin, end) of N x C: a row's bits are the same alone, among as many
// rows as a decode step has, and among more, for which a GPU may have other kernels.
template <typename Op>
void expect_same_bits_among_any_rows(int64_t N, int64_t C, Op op) {
    const std::vector<double> all = op(0, N);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {17, 81}, {88, N}})
        expect_same_bits("rows", op(begin, end), {all.begin() + begin * C, all.begin() + end * C});
}

// Expects f() to throw Error with exactly this message.
template <typename F>
void expect_error(F f, const std::string& message) {
    try {
        f();
        ADD_FAILURE() << "no Error; expected: " << message;
    } catch (const Error& error) {
        EXPECT_EQ(error.what(), message);
    }
}

// f() returns fetched results. Expects the same bits in a second run, and with 1, 2, 3 and 7 threads.
template <typename F>
void expect_deterministic(const char* what, F f) {
    const int threads = omp_get_max_threads();
    const std::vector<double> first = f();
    expect_same_bits(what, first, f());
    for (const int n : {1, 2, 3, 7}) {
        omp_set_num_threads(n);
        expect_same_bits(what, first, f());
    }
    omp_set_num_threads(threads);
}

// Matrices with gaps between rows: a [N, stride] array is used through columns(0, C).
// take_columns returns columns [0, C) of its values; expect_gaps_untouched expects NaN in all others.
std::vector<double> take_columns(const std::vector<double>& values, int64_t stride, int64_t C);
void expect_gaps_untouched(const char* what, const std::vector<double>& values, int64_t stride, int64_t C);
