// Programmatic dependent launch (sm_90 and later): a kernel starts before the previous one has ended, and what it does
// until pdl_wait() overlaps with that end. In a chain of short kernels this hides most of the launch latency.
//
// Every thread of such a kernel calls pdl_wait() before it reads what an earlier kernel wrote, and before it writes
// what an earlier kernel may still read. It may read earlier: what no kernel writes (weights), and what was written
// before the last ordinary launch, which waits for everything (decode_attention.h: inputs_ready). On other GPUs both
// functions do nothing, and launches are ordinary.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on, blocks of the next kernel may start on free SMs. Its pdl_wait() still waits for the end of this kernel,
// so this call comes first in a kernel.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline bool has_pdl() {
    static const bool has = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
    return has;
}

// cluster: consecutive blocks in x that form a cluster (sm_90 and later); 1: no clusters.
template <typename... Parameters>
void launch_pdl_clusters(const char* op, void (*kernel)(Parameters...), dim3 grid, unsigned cluster, unsigned threads,
                         size_t shared_bytes, Stream stream, std::common_type_t<Parameters>... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda_stream(stream);
    config.attrs = attributes;
    if (has_pdl()) {
        cudaLaunchAttribute& pdl = attributes[config.numAttrs++];
        pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        pdl.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
        dimension.id = cudaLaunchAttributeClusterDimension;
        dimension.val.clusterDim.x = cluster;
        dimension.val.clusterDim.y = dimension.val.clusterDim.z = 1;
    }
    cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), op);
    check_launch(op, stream);
}

template <typename... Parameters>
void launch_pdl(const char* op, void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                Stream stream, std::common_type_t<Parameters>... arguments) {
    launch_pdl_clusters(op, kernel, grid, 1, threads, shared_bytes, stream, arguments...);
}
