// Tiles of packed weights (linear_packed_small_batch.cu, linear_packed_hopper.cu).
#pragma once

#include "kernels/cuda/packed_codes.cuh"
#include "kernels/generation/linear_tile.cuh"

namespace linear_tile {

template <typename T>
struct PackedParams : TileParams<T> {
    const char* rows;
    int64_t row_bytes, code_bytes;
};

template <typename T>
PackedParams<T> packed_params(const LinearParams<T>& layer, const UnscaledParams<T>& unscaled,
                              const PackedWeight& weight, int columns_of_stage, int resident) {
    return {tile_params(layer, unscaled, columns_of_stage, resident), static_cast<const char*>(weight.rows.data),
            packed_row_bytes(weight.packing, layer.C), packed_code_bytes(weight.packing, layer.C)};
}

// A thread's outputs with the scales of its rows.
template <Packing P, typename T>
__device__ __forceinline__ TileOutputs<T> packed_outputs(const PackedParams<T>& p, int first_output,
                                                         const int (&rows)[2]) {
    TileOutputs<T> outputs(p, first_output, rows);
    if constexpr (P == Packing::Fp8)
#pragma unroll
        for (int half = 0; half < 2; half++)
            outputs.scale[half] = *reinterpret_cast<const float*>(
                p.rows + weight_row(p, first_output, rows[half]) * p.row_bytes + p.code_bytes);
    return outputs;
}

}  // namespace linear_tile
