// Streams for kernels that need the matrix library. runtime/device/device.h has the streams that do not.
#pragma once

#include "runtime/device/device.h"

// A new stream that owns a cuBLASLt handle and its workspace (runtime/device/blas.h), which destroy_stream() frees. On
// the CPU, whose matrix library needs neither: create_stream(). Throws DeviceError or Error if CUDA or cuBLASLt fails.
Stream create_blas_stream();
