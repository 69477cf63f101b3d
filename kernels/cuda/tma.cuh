// Descriptions of tensors for tensor copies (wgmma.cuh's tma_load and tma_store), made on the host.
#pragma once

#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/wgmma.cuh"

inline bool is_hopper() {
    static const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                               device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    return hopper;
}

// The driver's function, found by name at run time: programs need not link against the driver's library.
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

// Boxes of `rows` tokens and 64 columns of heads [tokens, heads, HS].
template <typename T>
CUtensorMap tensor_map(const char* op, const Heads<T>& x, int64_t tokens, int64_t heads, int64_t HS, int rows) {
    const cuuint64_t shape[3] = {cuuint64_t(HS), cuuint64_t(heads), cuuint64_t(std::max<int64_t>(1, tokens))};
    // Strides of dimensions of length 1 are never walked, but must be multiples of 16 bytes.
    const auto bytes = [](int64_t stride, int64_t length) { return cuuint64_t(length > 1 ? stride * 2 : 16); };
    const cuuint64_t strides[2] = {bytes(x.head_stride, heads), bytes(x.token_stride, tokens)};
    const cuuint32_t box[3] = {CHUNK, 1, cuuint32_t(rows)}, steps[3] = {1, 1, 1};
    constexpr CUtensorMapDataType type = std::is_same_v<std::remove_const_t<T>, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMap map;
    void* const data = const_cast<std::remove_const_t<T>*>(x.data);
    const CUresult result = tensor_map_encoder()(&map, type, 3, data, shape, strides, box, steps,
                                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, op, ": no tensor map for ", tokens, " tokens of ", heads, " heads of ", HS,
            " columns (CUDA driver error ", int(result), ")");
    return map;
}
