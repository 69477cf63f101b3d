// Peak FLOP/s of common GPUs from their data sheets: the denominator of model FLOP utilisation (MFU).
#pragma once

#include <string>

#include "runtime/device/tensor.h"

// gpu_name is the driver's name ("NVIDIA H100 80GB HBM3", device_name()). BF16 and F16: dense GEMM with fp32
// accumulation on tensor cores. F32: multiply-adds outside of tensor cores. Returns 0 for a name or dtype that is not
// in the table. Names must match exactly, because other cards of a family ("Laptop GPU", a MIG slice) have other rates.
double dense_peak_flops(const std::string& gpu_name, DType dtype);
