// Kernels that are launched before the one they depend on has ended (programmatic dependent launch, sm_90 and later):
// what they do until wait_for_previous() overlaps with its end. In a chain of short kernels that is most of a launch.
//
// A kernel launched so must call wait_for_previous(), in every thread, before it reads what an earlier kernel wrote or
// writes what an earlier one might read. Only what no kernel writes (weights) may be read before. Elsewhere both
// functions do nothing, and launches are ordinary ones.
#pragma once

#include "kernels/cuda_common.cuh"

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may start where there is room. They see nothing of this kernel's work before it
// has ended, so that the best place is the beginning.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline bool has_dependent_launch() {
    static const bool has = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
    return has;
}

// cluster: of so many blocks in z, which the grid's z is a multiple of; 1 where has_dependent_launch() is false.
template <typename... Parameters>
void launch_dependent_clusters(const char* op, void (*kernel)(Parameters...), dim3 grid, unsigned cluster,
                               unsigned threads, size_t shared_bytes, Stream stream,
                               std::common_type_t<Parameters>... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = cluster;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda_stream(stream);
    config.attrs = attributes;
    config.numAttrs = !has_dependent_launch() ? 0 : cluster == 1 ? 1 : 2;
    cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), op);
    check_launch(op, stream);
}

template <typename... Parameters>
void launch_dependent(const char* op, void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                      Stream stream, std::common_type_t<Parameters>... arguments) {
    launch_dependent_clusters(op, kernel, grid, 1, threads, shared_bytes, stream, arguments...);
}
