// Common GPUs by their data sheets: the peak FLOP/s, which are the denominator of model FLOP utilisation (MFU), and
// what `plan --gpu` needs to know of a GPU that is not here.
#pragma once

#include <string>

#include "runtime/device/target.h"
#include "runtime/device/tensor.h"

struct Gpu {
    const char* name;      // of its driver, without "NVIDIA "
    double tensor_tflops;  // bf16 and fp16, fp32 accumulation, no sparsity
    double fp32_tflops;    // multiply-adds outside of tensor cores
    int64_t sms;
    int sm;                  // compute capability times ten
    double gib;              // memory
    double context_mib = 0;  // memory of a CUDA context; 0: not measured

    Target target() const;
};

// The GPU of exactly this driver name ("NVIDIA H100 80GB HBM3", device_name()), because other cards of a family
// ("Laptop GPU", a MIG slice) differ. Null: not in the table.
const Gpu* gpu_of_driver_name(const std::string& name);

// The GPU of this driver name or of the only one that contains `name`, in any case ("h100 80gb", "4090"). Throws Error.
const Gpu& find_gpu(const std::string& name);

// Dense peak in FLOP/s of a driver name. BF16 and F16: tensor cores. Returns 0 for a name or dtype that is not in the
// table.
double dense_peak_flops(const std::string& gpu_name, DType dtype);
