// Common code of nearly all CUDA kernels.
//
// T is the dtype of activations: float, bf16 or fp16. Kernels compute in fp32: they load T as floats and round once,
// when they store. Memory is read and written in vectors of W elements, 16 bytes or a multiple. A kernel is compiled
// for the full width and for W = 1, which serves operands that are not aligned or whose size W does not divide
// (dispatch_width).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "runtime/device/cuda_check.h"
#include "runtime/device/tensor.h"
