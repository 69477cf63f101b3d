#include "runtime/device.h"

#include <algorithm>

#include "runtime/blas.h"
#include "runtime/cuda_check.h"

Device backend_device() {
    return Device::CUDA;
}

const char* backend_name() {
    return "cuda";
}

std::string device_description() {
    const char* op = "device_description";
    int device = 0;
    cuda_check(cudaGetDevice(&device), op);
    cudaDeviceProp p;
    cuda_check(cudaGetDeviceProperties(&p, device), op);
    return str(p.name, ", ", p.multiProcessorCount, " SMs, sm_", p.major, p.minor, ", ", p.totalGlobalMem >> 30,
               " GiB");
}

// An ordinary stream: it keeps its order with the default stream, which Stream{} stands for.
Stream create_stream() {
    cudaStream_t handle = nullptr;
    cuda_check(cudaStreamCreate(&handle), "create_stream");
    try {
        return {handle, create_blas()};
    } catch (...) {
        cudaStreamDestroy(handle);
        throw;
    }
}

void destroy_stream(Stream stream) {
    if (stream.handle) cudaStreamSynchronize(cuda_stream(stream));
    destroy_blas(stream.blas);
    if (stream.handle) cudaStreamDestroy(cuda_stream(stream));
}

int64_t device_memory_available() {
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "device_memory_available");
    return int64_t(free_bytes);
}

// By the time anybody asks for free memory the context is there (527 MiB on an H100 with CUDA 13) and no longer counted
// as free. What comes later is code that is loaded at its first launch: kernels a few MiB, libraries more.
int64_t device_overhead_bytes() {
    return int64_t(64) << 20;
}

// cudaMalloc aligns to 256 bytes.
void* device_alloc(size_t bytes) {
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, std::max<size_t>(bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // it is reported here and must not meet the next launch
        throw Error(str("device_alloc: cannot allocate ", bytes, " bytes of GPU memory (", device_memory_available(),
                        " are free); use a smaller model, batch or context"));
    }
    cuda_check(status, "device_alloc");
    return data;
}

// Called by destructors, so it reports nothing: what a failed kernel left behind is thrown where somebody waits for it.
void device_free(void* data) {
    cudaFree(data);
}

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda_stream(stream)), "copy_to_device");
}

void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda_stream(stream)), "copy_to_host");
    cuda_check(cudaStreamSynchronize(cuda_stream(stream)), "copy_to_host");
}

void device_fill(void* device, int byte, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemsetAsync(device, byte, bytes, cuda_stream(stream)), "device_fill");
}

void synchronize(Stream stream) {
    cuda_check(cudaStreamSynchronize(cuda_stream(stream)), "synchronize");
}
