// TMA: copies between global and shared memory that one thread starts and the hardware carries out [cp.async.bulk,
// cp.async.bulk.tensor] (sm_90 and later), and the tensor maps that describe tensors to it, made on the host.
#pragma once

#include <cuda.h>

#include <array>

#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/swizzled_tile.cuh"

// Loads a box [rows, 1 head, 64 columns] of a tensor [tokens, heads, columns] into a panel of a tile; zeros outside the
// tensor. Called by one thread; the mbarrier counts the bytes.
__device__ __forceinline__ void tma_load(void* panel, const CUtensorMap* map, int column, int head, int token,
                                         Mbarrier* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared_address(panel)),
        "l"(map), "r"(column), "r"(head), "r"(token), "r"(shared_address(b))
        : "memory");
}

// The same for a tensor of four dimensions.
__device__ __forceinline__ void tma_load(void* panel, const CUtensorMap* map, const int (&at)[4], Mbarrier* b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(shared_address(panel)),
        "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(b))
        : "memory");
}

// The load of three dimensions to the same offset in the shared memory of each block of the cluster whose bit is set in
// `blocks`. In each of them the mbarrier at the offset of b counts the bytes.
__device__ __forceinline__ void tma_load_multicast(void* panel, const CUtensorMap* map, int column, int head, int token,
                                                   Mbarrier* b, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, "
        "%3, %4}], [%5], %6;" ::"r"(shared_address(panel)),
        "l"(map), "r"(column), "r"(head), "r"(token), "r"(shared_address(b)), "h"(blocks)
        : "memory");
}

// Stores a panel to a box; rows and columns outside the tensor are dropped.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, int column, int head, int token, const void* panel) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(head), "r"(token), "r"(shared_address(panel))
                 : "memory");
}
// The same for results that are not read again soon: L2 evicts them before other data.
__device__ __forceinline__ void tma_store_evict_first(const CUtensorMap* map, int column, int head, int token,
                                                      const void* panel) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;" ::"l"(map),
        "r"(column), "r"(head), "r"(token), "r"(shared_address(panel)), "l"(policy)
        : "memory");
}
// The thread's stores since its last commit form a group.
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last PENDING groups of this thread's stores have read shared memory.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Loads consecutive bytes; both addresses and the length are multiples of 16. Called by one thread; the mbarrier counts
// the bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Mbarrier* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}

// Adds `bytes` (a multiple of 16) of floats in shared memory to those at `to`, both aligned to 16 bytes. The order of
// additions by different threads is not defined. Committed and waited for like a store.
__device__ __forceinline__ void bulk_reduce_add(float* to, const void* from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and TMA [async proxy].
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- on the host

inline bool is_hopper() {
    static const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                               device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    return hopper;
}

// The driver function, looked up at run time: programs need not link against the driver library.
inline auto tensor_map_encoder() {
    static const auto function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        cuda_check(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
        require(result == cudaDriverEntryPointSuccess, "the CUDA driver has no cuTensorMapEncodeTiled; update it");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    return function;
}

// A tensor of RANK dimensions, the innermost first, copied in boxes; strides in elements, from the second dimension on.
template <typename T, size_t RANK>
CUtensorMap encode_tensor_map(const char* op, const T* data, const std::array<int64_t, RANK>& shape,
                              const std::array<int64_t, RANK - 1>& strides, const std::array<int, RANK>& box,
                              CUtensorMapSwizzle swizzle) {
    cuuint64_t lengths[RANK], bytes[RANK];
    cuuint32_t boxes[RANK], steps[RANK];
    for (size_t i = 0; i < RANK; i++) {
        lengths[i] = cuuint64_t(std::max<int64_t>(1, shape[i]));
        // The stride of a dimension of length 1 is never used, but must be a multiple of 16 bytes.
        if (i > 0) bytes[i - 1] = cuuint64_t(lengths[i] > 1 ? strides[i - 1] * 2 : 16);
        boxes[i] = cuuint32_t(box[i]);
        steps[i] = 1;
    }
    constexpr CUtensorMapDataType type =
        std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMap map;
    const CUresult result = tensor_map_encoder()(&map, type, RANK, const_cast<T*>(data), lengths, bytes, boxes, steps,
                                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, op, ": no tensor map for a tensor of ", RANK, " dimensions, ", shape[RANK - 1],
            " x … x ", shape[0], " (CUDA driver error ", int(result), ")");
    return map;
}

// A tensor [tokens, heads, HS], copied in boxes of `rows` tokens of one head (or of `box_heads` heads: the rows of the
// tile are then the heads of one token after the other) and 64 columns (128-byte swizzle), 32 columns (64-byte swizzle:
// vectors are permuted by bits 1 and 2 of the row) or 8 (one vector after the other).
template <typename T>
CUtensorMap make_tensor_map(const char* op, const Heads<T>& x, int64_t tokens, int64_t heads, int64_t HS, int rows,
                            int columns = PANEL_COLUMNS, int box_heads = 1) {
    const CUtensorMapSwizzle swizzle = columns == PANEL_COLUMNS ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : columns == 8           ? CU_TENSOR_MAP_SWIZZLE_NONE
                                                                : CU_TENSOR_MAP_SWIZZLE_64B;
    return encode_tensor_map<std::remove_const_t<T>, 3>(
        op, x.data, {HS, heads, tokens}, {x.head_stride, x.token_stride}, {columns, box_heads, rows}, swizzle);
}
