#include "runtime/device/peaks.h"

namespace {

struct Peak {
    const char* name;  // without "NVIDIA ", which older drivers leave out
    double tensor;     // TFLOP/s in bf16 and fp16, fp32 accumulation, no sparsity
    double fp32;       // TFLOP/s
};

// Datasheets print tensor rates with sparsity, which are twice these. GeForce cards accumulate in fp32 at half their
// rate for fp16; NVIDIA's architecture whitepapers print both.
constexpr Peak PEAKS[] = {
    // Blackwell: HGX B200 datasheet (an eighth of 8 GPUs), GB200 NVL72 datasheet (a 72nd).
    {"B200", 2250, 75},
    {"GB200", 2500, 80},
    // NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A.
    {"GeForce RTX 5090", 209.5, 104.8},
    // Hopper: H100, H200 and GH200 datasheets. The SXM boards' HBM3 or HBM3e tells them from the PCIe and NVL cards.
    {"H100 80GB HBM3", 989.4, 66.9},
    {"H100 PCIe", 756, 51},
    {"H100 NVL", 835.5, 60},
    {"H200", 989.4, 66.9},
    {"H200 NVL", 835.5, 60},
    {"GH200 480GB", 989.4, 66.9},
    {"GH200 120GB", 989.4, 66.9},
    {"GH200 144G HBM3e", 989.4, 66.9},
    {"H800", 989.4, 66.9},
    {"H800 PCIe", 756, 51},
    // Ada: datasheets of L4, L40, L40S, RTX 6000 and 5000 Ada; Ada GPU architecture whitepaper, appendix A.
    {"L4", 121, 30.3},
    {"L40", 181.05, 90.5},
    {"L40S", 362.05, 91.6},
    {"RTX 6000 Ada Generation", 364.2, 91.1},
    {"RTX 5000 Ada Generation", 261.1, 65.3},
    {"GeForce RTX 4090", 165.2, 82.6},
    {"GeForce RTX 4080", 97.5, 48.7},
    // Ampere: datasheets of A100, A800, A30, A10, A40; GA102 whitepaper, appendix A. A10G: the cloud's, by its
    // datasheet.
    {"A100-SXM4-40GB", 312, 19.5},
    {"A100-SXM4-80GB", 312, 19.5},
    {"A100-SXM-80GB", 312, 19.5},
    {"A100-PCIE-40GB", 312, 19.5},
    {"A100-PCIE-80GB", 312, 19.5},
    {"A100 80GB PCIe", 312, 19.5},
    {"A800-SXM4-80GB", 312, 19.5},
    {"A800-SXM4-40GB", 312, 19.5},
    {"A800 80GB PCIe", 312, 19.5},
    {"A30", 165, 10.3},
    {"A10", 125, 31.2},
    {"A10G", 70, 35},
    {"A40", 149.7, 37.4},
    {"RTX A6000", 154.8, 38.7},
    {"RTX A5000", 111.1, 27.8},
    {"GeForce RTX 3090", 71, 35.6},
};

}  // namespace

double dense_peak_flops(const std::string& gpu_name, DType dtype) {
    const std::string maker = "NVIDIA ";
    const std::string name = gpu_name.rfind(maker, 0) == 0 ? gpu_name.substr(maker.size()) : gpu_name;
    for (const Peak& peak : PEAKS) {
        if (name != peak.name) continue;
        if (dtype == DType::F32) return peak.fp32 * 1e12;
        if (dtype == DType::BF16 || dtype == DType::F16) return peak.tensor * 1e12;
    }
    return 0;
}
