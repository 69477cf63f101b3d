// The machine under the kernels: memory and streams. device.cpp is the CPU's definition, device.cu CUDA's.
// Errors: every function throws Error naming the operation; device_alloc says how many bytes were asked for.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/tensor.h"

struct Blas;  // runtime/blas.h

// An ordered queue of work. A CUDA stream on the GPU; on the CPU work is done when the call returns. Stream{} is the
// device's default queue: it can do everything but matrix products, which need the library's handle and workspace.
struct Stream {
    void* handle = nullptr;
    Blas* blas = nullptr;  // CUDA
};

Stream create_stream();              // with its matrix library; on the CPU Stream{}
void destroy_stream(Stream stream);  // waits for its work

Device backend_device();           // the device that this binary's kernels run on
const char* backend_name();        // "cpu" or "cuda"
std::string device_description();  // "2 threads, AVX-512": for logs and `info`, beside matmul_library()

void* device_alloc(size_t bytes);  // 64-byte aligned, not zeroed (pages are touched on first use)
void device_free(void* data);

// Bytes that can still be had: on the CPU the least of free memory, the control group's limit and the address-space
// limit.
int64_t device_memory_available();
// What the program itself takes beside the arenas: code, libraries and their buffers (docs/performance.md: measured).
int64_t device_overhead_bytes();

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, size_t bytes, Stream stream);  // waits until the copy is done
void device_fill(void* device, int byte, size_t bytes, Stream stream);
void synchronize(Stream stream);
