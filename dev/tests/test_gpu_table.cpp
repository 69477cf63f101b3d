// runtime/device/gpu_table.h: the names that drivers report, and similar names of other GPUs.
#include "runtime/device/gpu_table.h"

#include <gtest/gtest.h>

#include "runtime/error.h"

namespace {

double tera(const char* name, DType dtype = DType::BF16) {
    return dense_peak_flops(name, dtype) * 1e-12;
}

}  // namespace

TEST(GpuTable, RecognisesDriverNames) {
    EXPECT_DOUBLE_EQ(tera("NVIDIA H100 80GB HBM3"), 989.4);
    EXPECT_DOUBLE_EQ(tera("NVIDIA A100-SXM4-40GB"), 312);
    EXPECT_DOUBLE_EQ(tera("A100-SXM4-40GB"), 312);  // drivers before 470
    EXPECT_DOUBLE_EQ(tera("NVIDIA A100 80GB PCIe"), 312);
    EXPECT_DOUBLE_EQ(tera("NVIDIA GeForce RTX 4090"), 165.2);
    EXPECT_DOUBLE_EQ(tera("NVIDIA RTX 6000 Ada Generation"), 364.2);
}

TEST(GpuTable, DistinguishesGpusOfOneFamily) {
    EXPECT_DOUBLE_EQ(tera("NVIDIA H100 PCIe"), 756);
    EXPECT_DOUBLE_EQ(tera("NVIDIA H100 NVL"), 835.5);
    EXPECT_DOUBLE_EQ(tera("NVIDIA H200"), 989.4);
    EXPECT_DOUBLE_EQ(tera("NVIDIA L4"), 121);
    EXPECT_DOUBLE_EQ(tera("NVIDIA L40"), 181.05);
    EXPECT_DOUBLE_EQ(tera("NVIDIA L40S"), 362.05);
    EXPECT_DOUBLE_EQ(tera("NVIDIA A10"), 125);
    EXPECT_DOUBLE_EQ(tera("NVIDIA A10G"), 70);
    EXPECT_DOUBLE_EQ(tera("NVIDIA A40"), 149.7);
}

TEST(GpuTable, PeaksDependOnDtype) {
    EXPECT_DOUBLE_EQ(tera("NVIDIA H100 80GB HBM3", DType::F16), 989.4);
    EXPECT_DOUBLE_EQ(tera("NVIDIA H100 80GB HBM3", DType::F32), 66.9);
    EXPECT_DOUBLE_EQ(tera("NVIDIA A100-SXM4-80GB", DType::F32), 19.5);
    EXPECT_EQ(tera("NVIDIA H100 80GB HBM3", DType::I32), 0);
}

// An unknown GPU has no peak, not that of another GPU.
TEST(GpuTable, OtherGpusAreUnknown) {
    for (const char* name : {"", "NVIDIA ", "H100", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100",
                             "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 Laptop GPU",
                             "NVIDIA GeForce RTX 4090 D", "NVIDIA H1000", "Tesla T4", "AMD Instinct MI300X"})
        EXPECT_EQ(tera(name), 0) << name;
}

TEST(GpuTable, FindsAGpuByAPartOfItsName) {
    EXPECT_STREQ(find_gpu("H100 80GB").name, "H100 80GB HBM3");
    EXPECT_STREQ(find_gpu("nvidia a100-sxm4-40gb").name, "A100-SXM4-40GB");
    EXPECT_STREQ(find_gpu("4090").name, "GeForce RTX 4090");
    EXPECT_STREQ(find_gpu("A10").name, "A10");  // an exact name, though A100 and A10G contain it
}

TEST(GpuTable, RefusesUnknownAndAmbiguousNames) {
    const auto message = [](const char* name) -> std::string {
        try {
            find_gpu(name);
        } catch (const Error& e) {
            return e.what();
        }
        return "found";
    };
    EXPECT_NE(message("H100").find("fits several GPUs: H100 80GB HBM3, H100 PCIe, H100 NVL"), std::string::npos);
    EXPECT_NE(message("MI300X").find("is not in the table of GPUs: B200"), std::string::npos);
    EXPECT_NE(message("").find("is not in the table of GPUs"), std::string::npos);
}

// Only Hopper runs the kernels for sm_90a.
TEST(GpuTable, Targets) {
    const Target h100 = find_gpu("H100 PCIe").target(), b200 = find_gpu("B200").target();
    EXPECT_EQ(h100.device, Device::CUDA);
    EXPECT_EQ(h100.sms, 114);
    EXPECT_TRUE(h100.hopper);
    EXPECT_FALSE(b200.hopper);
}
