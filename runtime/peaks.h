#pragma once
#include <string>
#include "runtime/tensor.h"
double dense_peak_flops(const std::string& gpu_name, DType dtype);
