// For .cu files: error checks for CUDA calls, and the cudaStream_t behind a Stream.
#pragma once

#include <cuda_runtime.h>

#include "runtime/device/device.h"
#include "runtime/device/gpu_fault.h"
#include "runtime/error.h"

static_assert(cudaErrorECCUncorrectable == 214 && cudaErrorNvlinkUncorrectable == 220 &&
                  cudaErrorHardwareStackError == 714 && cudaErrorSystemNotReady == 802 &&
                  cudaErrorExternalDevice == 911 && cudaErrorUnknown == 999,
              "gpu_fault.cpp has these numbers");

// Throws DeviceError naming the operation and CUDA's error, or the GPU if that is broken.
inline void cuda_check(cudaError_t status, const char* operation) {
    if (status == cudaSuccess) return;
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver)
        throw DeviceError(str(operation, ": no usable NVIDIA GPU (", cudaGetErrorString(status),
                              "); this is the CUDA build; `make BACKEND=cpu` builds for the CPU"));
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion)
        throw DeviceError(str(operation, ": this program was not built for this GPU (", cudaGetErrorString(status),
                              "); build it here, or name the architecture: `make BACKEND=cuda ARCH=80`"));
    const std::string fault = gpu_fault(int(status));
    if (!fault.empty()) throw DeviceError(str(operation, ": ", fault));
    throw DeviceError(str(operation, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

inline cudaStream_t cuda_stream(Stream stream) {
    return static_cast<cudaStream_t>(stream.handle);
}

// Call this right after every launch. A debug build (make DEBUG=1) waits for the kernel, so that an error is reported
// under its name; otherwise a later call reports it. Launches recorded in a graph are not waited for.
inline void check_launch(const char* op, Stream stream) {
    cuda_check(cudaGetLastError(), op);
#ifdef __CUDACC_DEBUG__
    cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(cuda_stream(stream), &recording), op);
    if (recording == cudaStreamCaptureStatusNone) cuda_check(cudaStreamSynchronize(cuda_stream(stream)), op);
#else
    (void)stream;
#endif
}
