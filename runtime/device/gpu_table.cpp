#include "runtime/device/gpu_table.h"

#include <algorithm>
#include <cctype>

#include "runtime/error.h"
#include "runtime/text.h"

namespace {

// Datasheets print tensor rates with sparsity, which are twice these. GeForce cards accumulate in fp32 at half their
// rate for fp16; NVIDIA's architecture whitepapers print both. Memory: what programs can use; ECC takes 1/16 of the
// GDDR6 of data-center cards. The context was measured with CUDA 13.
constexpr Gpu GPUS[] = {
    // Blackwell: HGX B200 datasheet (an eighth of 8 GPUs), GB200 NVL72 datasheet (a 72nd).
    {"B200", 2250, 75, 148, 100, 180},
    {"GB200", 2500, 80, 152, 100, 186},
    // NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A.
    {"GeForce RTX 5090", 209.5, 104.8, 170, 120, 32},
    // Hopper: H100, H200 and GH200 datasheets. The SXM boards' HBM3 or HBM3e tells them from the PCIe and NVL cards.
    {"H100 80GB HBM3", 989.4, 66.9, 132, 90, 80, 526.8125},
    {"H100 PCIe", 756, 51, 114, 90, 80},
    {"H100 NVL", 835.5, 60, 132, 90, 94},
    {"H200", 989.4, 66.9, 132, 90, 141},
    {"H200 NVL", 835.5, 60, 132, 90, 141},
    {"GH200 480GB", 989.4, 66.9, 132, 90, 96},
    {"GH200 120GB", 989.4, 66.9, 132, 90, 96},
    {"GH200 144G HBM3e", 989.4, 66.9, 132, 90, 144},
    {"H800", 989.4, 66.9, 132, 90, 80},
    {"H800 PCIe", 756, 51, 114, 90, 80},
    // Ada: datasheets of L4, L40, L40S, RTX 6000 and 5000 Ada; Ada GPU architecture whitepaper, appendix A.
    {"L4", 121, 30.3, 58, 89, 22.5},
    {"L40", 181.05, 90.5, 142, 89, 45},
    {"L40S", 362.05, 91.6, 142, 89, 45},
    {"RTX 6000 Ada Generation", 364.2, 91.1, 142, 89, 48},
    {"RTX 5000 Ada Generation", 261.1, 65.3, 100, 89, 32},
    {"GeForce RTX 4090", 165.2, 82.6, 128, 89, 24},
    {"GeForce RTX 4080", 97.5, 48.7, 76, 89, 16},
    // Ampere: datasheets of A100, A800, A30, A10, A40; GA102 whitepaper, appendix A. A10G: the cloud's, by its
    // datasheet.
    {"A100-SXM4-40GB", 312, 19.5, 108, 80, 40},
    {"A100-SXM4-80GB", 312, 19.5, 108, 80, 80},
    {"A100-SXM-80GB", 312, 19.5, 108, 80, 80},
    {"A100-PCIE-40GB", 312, 19.5, 108, 80, 40},
    {"A100-PCIE-80GB", 312, 19.5, 108, 80, 80},
    {"A100 80GB PCIe", 312, 19.5, 108, 80, 80},
    {"A800-SXM4-80GB", 312, 19.5, 108, 80, 80},
    {"A800-SXM4-40GB", 312, 19.5, 108, 80, 40},
    {"A800 80GB PCIe", 312, 19.5, 108, 80, 80},
    {"A30", 165, 10.3, 56, 80, 24},
    {"A10", 125, 31.2, 72, 86, 22.5},
    {"A10G", 70, 35, 80, 86, 22.5},
    {"A40", 149.7, 37.4, 84, 86, 45},
    {"RTX A6000", 154.8, 38.7, 84, 86, 48},
    {"RTX A5000", 111.1, 27.8, 64, 86, 24},
    {"GeForce RTX 3090", 71, 35.6, 82, 86, 24},
};

std::string lower_case(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return char(std::tolower(c)); });
    return text;
}

}  // namespace

Target Gpu::target() const {
    return {Device::CUDA, sms, sm, sm == 90};
}

const Gpu* gpu_of_driver_name(const std::string& name) {
    for (const Gpu& gpu : GPUS)
        if (name == gpu.name || name == std::string("NVIDIA ") + gpu.name) return &gpu;
    return nullptr;
}

const Gpu& find_gpu(const std::string& name) {
    std::string wanted = lower_case(name), matches, all;
    if (starts_with(wanted, "nvidia ")) wanted = wanted.substr(7);
    const Gpu* found = nullptr;
    int count = 0;
    for (const Gpu& gpu : GPUS) {
        const std::string lower = lower_case(gpu.name);
        if (lower == wanted) return gpu;
        all += (all.empty() ? "" : ", ") + std::string(gpu.name);
        if (lower.find(wanted) == std::string::npos) continue;
        matches += (matches.empty() ? "" : ", ") + std::string(gpu.name);
        found = &gpu;
        count++;
    }
    require(!name.empty() && count > 0, "--gpu '", name, "' is not in the table of GPUs: ", all);
    require(count == 1, "--gpu '", name, "' fits several GPUs: ", matches, "; name one of them");
    return *found;
}

double dense_peak_flops(const std::string& gpu_name, DType dtype) {
    const Gpu* gpu = gpu_of_driver_name(gpu_name);
    if (gpu && dtype == DType::F32) return gpu->fp32_tflops * 1e12;
    if (gpu && (dtype == DType::BF16 || dtype == DType::F16)) return gpu->tensor_tflops * 1e12;
    return 0;
}
