// What common GPUs can compute at most by their makers' data: the denominator of model FLOP utilisation (MFU).
#pragma once

#include <string>

#include "runtime/device/tensor.h"

// FLOP/s of the GPU whose driver calls it gpu_name ("NVIDIA H100 80GB HBM3", device_name()): for BF16 and F16 dense
// matrix products with fp32 accumulation on tensor cores, for F32 multiply-adds outside of them. 0 where the name or
// the dtype is not in the table: other cards of a family ("Laptop GPU", a MIG slice) run at other rates, so names must
// agree to the letter.
double dense_peak_flops(const std::string& gpu_name, DType dtype);
