// What the op tests share: arrays of random inputs with their float64 twins, and the error bounds of docs/numerics.md.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "runtime/rng.h"
#include "runtime/tensor.h"

constexpr double UNIT_ROUNDOFF = 0x1p-24;  // fp32

// A tensor's memory on the backend's device with a float64 copy on the host: inputs are random and rounded once, so that
// kernel and oracle see the same numbers; outputs are poisoned with NaN, so that an element nobody wrote fails.
class TestArray {
  public:
    static TestArray random(std::initializer_list<int64_t> shape, uint64_t seed, double scale = 1, double shift = 0);
    static TestArray poisoned(std::initializer_list<int64_t> shape);
    static TestArray of(const std::vector<double>& values, std::initializer_list<int64_t> shape);
    static TestArray ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
    static TestArray scratch(int64_t bytes);  // U8, poisoned

    TestArray(TestArray&& other) noexcept;
    TestArray(const TestArray&) = delete;
    ~TestArray();

    Tensor tensor() const { return view; }
    operator Tensor() const { return view; }
    const std::vector<double>& values() const { return host; }  // as given to the kernel
    const double* data() const { return host.data(); }
    std::vector<double> fetch() const;    // as it is on the device now
    std::vector<int32_t> fetch_ints() const;

  private:
    TestArray() = default;
    Tensor view;
    std::vector<double> host;
};

// fp32 sums of length K: RMS(got − ref) ≤ 4u·√(1 + K/4096)·RMS(mag) over the whole tensor, and for each row of row_size
// elements the same with a factor for the row's smaller sample. mag: the formula with absolute values. NaN never passes.
void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                  const std::vector<double>& mag, int64_t K, int64_t row_size);
