// For .cu files: what every call of the CUDA runtime goes through, and the stream behind a Stream.
#pragma once

#include <cuda_runtime.h>

#include "runtime/device/device.h"
#include "runtime/error.h"

// Throws DeviceError with one line that names the operation and what CUDA says.
inline void cuda_check(cudaError_t status, const char* operation) {
    if (status == cudaSuccess) return;
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver)
        throw DeviceError(str(operation, ": no usable NVIDIA GPU (", cudaGetErrorString(status),
                              "); this is the CUDA build: `make BACKEND=cpu` builds the one for the CPU"));
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion)
        throw DeviceError(str(operation, ": this program was not built for this GPU (", cudaGetErrorString(status),
                              "); build it here, or name the architecture: `make BACKEND=cuda ARCH=80`"));
    throw DeviceError(str(operation, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

inline cudaStream_t cuda_stream(Stream stream) {
    return static_cast<cudaStream_t>(stream.handle);
}

// Right after every launch. A debug build (make DEBUG=1) waits for the kernel, so that what it did wrong is reported
// under its own name; otherwise that comes with some later call. What a graph records is not waited for.
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
