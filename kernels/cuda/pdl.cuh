// Kernels that are launched before the one they depend on has ended (programmatic dependent launch, sm_90 and later):
// what they do until pdl_wait() overlaps with its end. In a chain of short kernels that is most of a launch.
//
// A kernel launched so must call pdl_wait(), in every thread, before it reads what an earlier kernel wrote or
// writes what an earlier one might read. What no kernel writes (weights) may be read before, and what was written
// before the last ordinary launch, which waits for everything (decode_attention.h: inputs_ready). Elsewhere both
// functions do nothing, and launches are ordinary ones.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may start where there is room. They see nothing of this kernel's work before it
// has ended, so that the best place is the beginning.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline bool has_pdl() {
    static const bool has = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
    return has;
}

// cluster: blocks in a row of the grid that form a cluster; 1: none (sm_90 and later have them).
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
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& neighbours = attributes[config.numAttrs++];
        neighbours.id = cudaLaunchAttributeClusterDimension;
        neighbours.val.clusterDim.x = cluster, neighbours.val.clusterDim.y = neighbours.val.clusterDim.z = 1;
    }
    cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), op);
    check_launch(op, stream);
}

template <typename... Parameters>
void launch_pdl(const char* op, void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                Stream stream, std::common_type_t<Parameters>... arguments) {
    launch_pdl_clusters(op, kernel, grid, 1, threads, shared_bytes, stream, arguments...);
}
