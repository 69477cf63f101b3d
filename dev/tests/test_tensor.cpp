// runtime/device/tensor.h: views, and the errors of invalid views and dtypes.
#include "runtime/device/tensor.h"

#include <gtest/gtest.h>

#include <vector>

#include "dev/tests/test_util.h"

namespace {

constexpr int64_t LARGE = int64_t(1) << 40;

TEST(Tensor, RejectsAccessAsAnotherType) {
    std::vector<float> x(6);
    const Tensor t = host_tensor(x.data(), {2, 3});
    EXPECT_EQ(t.as<float>(), x.data());
    expect_error([&] { t.as<double>(); }, "tensor holds fp32, asked for as fp64");
    expect_error([&] { t.as<int32_t>(); }, "tensor holds fp32, asked for as int32");
    const Tensor half = make_tensor(x.data(), DType::BF16, Device::CPU, {12});
    expect_error([&] { half.as<fp16>(); }, "tensor holds bf16, asked for as fp16");
    expect_error([&] { half.as<uint16_t>(); }, "tensor holds bf16, asked for as uint16");
}

// Without memory, so any size works.
TEST(Tensor, SizesHave64Bits) {
    const Tensor t = make_tensor(nullptr, DType::F32, Device::CPU, {LARGE, 1 << 20});
    EXPECT_EQ(t.numel(), int64_t(1) << 60);
    EXPECT_EQ(t.bytes(), int64_t(1) << 62);
    EXPECT_EQ(t.stride[0], 1 << 20);
    const Tensor last = make_tensor(nullptr, DType::BF16, Device::CPU, {LARGE, 3}).rows(LARGE - 1, LARGE);
    EXPECT_EQ(reinterpret_cast<intptr_t>(last.data), (LARGE - 1) * 3 * 2);
    expect_error(
        [] {
            make_tensor(nullptr, DType::U8, Device::CPU, {LARGE, 1 << 23});
        },
        "tensor size overflows 64 bits");
    expect_error(
        [] {
            make_tensor(nullptr, DType::U8, Device::CPU, {0, LARGE, LARGE});
        },
        "tensor size overflows 64 bits");
    expect_error(
        [] {
            make_tensor(nullptr, DType::U8, Device::CPU, {2, -1});
        },
        "tensor dimension 1 is -1; it must not be negative");
    expect_error(
        [] {
            make_tensor(nullptr, DType::U8, Device::CPU, {1, 1, 1, 1, 1, 1, 1, 1, 1});
        },
        "tensor of rank 9: at most 8 dimensions are supported");
}

TEST(Tensor, ViewsStayInBounds) {
    std::vector<float> x(20);
    const Tensor t = host_tensor(x.data(), {4, 5});
    const Tensor part = t.rows(1, 3).columns(2, 5);
    EXPECT_EQ(shape_string(part), "[2, 3]");
    EXPECT_EQ(part.as<float>(), x.data() + 7);
    EXPECT_EQ(part.stride[0], 5);
    EXPECT_TRUE(t.contiguous() && t.rows(1, 3).contiguous());
    EXPECT_FALSE(part.contiguous());
    EXPECT_TRUE(part.rows(0, 1).contiguous());  // the stride of a dimension of size 1 does not matter
    EXPECT_EQ(t.rows(4, 4).numel(), 0);
    expect_error([&] { t.rows(1, 5); }, "tensor rows [1, 5) lie outside [0, 4)");
    expect_error([&] { t.rows(-1, 2); }, "tensor rows [-1, 2) lie outside [0, 4)");
    expect_error([&] { t.rows(3, 2); }, "tensor rows [3, 2) lie outside [0, 4)");
    expect_error([&] { t.columns(0, 6); }, "tensor columns [0, 6) lie outside [0, 5)");
    expect_error([] { Tensor{}.rows(0, 0); }, "tensor rows [0, 0) lie outside [0, 0)");
    expect_error([] { Tensor{}.columns(0, 0); }, "tensor columns [0, 0) lie outside [0, 0)");
}

TEST(Tensor, HeadsOfPackedRows) {
    std::vector<float> x(2 * 14);
    const Tensor rows = host_tensor(x.data(), {2, 14}).columns(2, 14), heads = split_heads(rows, 3);
    EXPECT_EQ(shape_string(heads), "[2, 3, 4]");
    EXPECT_EQ(heads.as<float>(), x.data() + 2);
    EXPECT_EQ(heads.stride[0], 14);
    EXPECT_EQ(heads.stride[1], 4);
    EXPECT_EQ(heads.stride[2], 1);
    expect_error([&] { split_heads(rows, 5); }, "split_heads: 5 heads do not divide a row of 12");
    expect_error([&] { split_heads(rows, 0); }, "split_heads: 0 heads do not divide a row of 12");
    expect_error([&] { split_heads(heads, 3); }, "split_heads: 3 heads do not divide a row of -1");
}

}  // namespace
