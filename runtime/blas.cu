#include "runtime/blas.h"

#include <memory>

#include "runtime/cuda_check.h"

// 32 MiB is what cuBLAS takes for itself on Hopper.
Blas* create_blas() {
    auto blas = std::make_unique<Blas>();
    const cublasStatus_t status = cublasLtCreate(&blas->handle);
    require(status == CUBLAS_STATUS_SUCCESS, "create_stream: cublasLtCreate: ", cublasLtGetStatusString(status));
    blas->workspace_bytes = size_t(32) << 20;
    try {
        blas->workspace = device_alloc(blas->workspace_bytes);
    } catch (...) {
        cublasLtDestroy(blas->handle);
        throw;
    }
    return blas.release();
}

void destroy_blas(Blas* blas) {
    if (!blas) return;
    device_free(blas->workspace);
    cublasLtDestroy(blas->handle);
    delete blas;
}
