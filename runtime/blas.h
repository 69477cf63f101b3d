// CUDA only: the matrix library behind a stream. create_stream() (runtime/device.h) makes one with the stream, so that
// kernels/matmul.cu finds handle and workspace where it finds the queue: nothing is global, nothing is created or
// allocated inside a launcher, and two streams never share a workspace. A stream, and so its Blas, belongs to one
// thread at a time.
#pragma once

#include <cublasLt.h>

#include <array>
#include <map>

struct Blas {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;  // 256-byte aligned
    size_t workspace_bytes = 0;
    // The algorithm for each product met so far: asking cuBLASLt again takes longer than a small product.
    std::map<std::array<int64_t, 16>, cublasLtMatmulAlgo_t> algorithms;
};

Blas* create_blas();
void destroy_blas(Blas* blas);
