// runtime/device/gpu_fault.h with injected errors; in a CUDA build also as CUDA calls report them.
#include "runtime/device/gpu_fault.h"

#include <gtest/gtest.h>

#ifdef USE_CUDA
#include "runtime/device/cuda_check.h"
#endif

namespace {

const std::string GPU = "GPU 3 (NVIDIA H100 80GB HBM3, 0000:3b:00.0) of host node7";

TEST(GpuFault, BrokenGpusAreNamed) {
    note_gpu(GPU);
    for (const auto& [error, meaning] : {std::pair<int, std::string>{214, "uncorrectable ECC error"},
                                         {220, "NVLink"},
                                         {226, "contained"},
                                         {714, "hardware error"},
                                         {802, "not ready"},
                                         {911, "external device"},
                                         {999, "driver lost it"}}) {
        const std::string line = gpu_fault(error);
        EXPECT_EQ(line.find(GPU + ": "), 0u) << line;
        EXPECT_NE(line.find(meaning), std::string::npos) << line;
        EXPECT_NE(line.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << line;
        EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    }
}

TEST(GpuFault, ErrorsOfProgramsAreNot) {
    for (const int error : {0, 1, 2, 46, 700, 702, 710, 715, 716, 717, 718, 719})
        EXPECT_EQ(gpu_fault(error), "") << error;
}

#ifdef USE_CUDA
TEST(GpuFault, CudaCheckReportsThem) {
    note_gpu(GPU);
    const auto message = [](cudaError_t error) {
        try {
            cuda_check(error, "copy_to_host");
        } catch (const DeviceError& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    EXPECT_EQ(message(cudaErrorECCUncorrectable), "copy_to_host: " + gpu_fault(214));
    EXPECT_EQ(message(cudaErrorIllegalAddress).find("GPU 3"), std::string::npos);
}
#endif

}  // namespace
