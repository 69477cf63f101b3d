// What the small-batch GEMMs of packed weights share (linear_packed_small_batch.cu, linear_packed_hopper.cu): tiles of
// 128 rows of weight, clusters of blocks that divide the columns, and the way of the sums through shared memory to out.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/packed_codes.cuh"
#include "kernels/generation/linear.cuh"

namespace packed_tile {

constexpr int WARPS = 8, THREADS = WARPS * WARP;   // that multiply and store
constexpr int ROWS = 16 * WARPS, HALF = ROWS / 2;  // of weight: a tile's; with SwiGLU half of gate and half of up
constexpr int MAX_CLUSTER = 8;
constexpr int PITCH = ROWS + 4;  // floats from one row of inp's sums to the next's: a warp stores them to 32 banks

template <typename T>
struct PackedParams : LinearParams<T> {
    const char* rows;
    int64_t row_bytes, code_bytes;
    int64_t tiles;
    int blocks;  // of a cluster
};

// Blocks of a cluster: as many as run at once, `resident` on an SM, with a stage of their own at least.
inline int cluster_blocks(int64_t tiles, int64_t stages, int resident) {
    int blocks = 1;
    while (has_pdl() && blocks < MAX_CLUSTER && 2 * blocks * tiles <= resident * num_sms() && 2 * blocks <= stages)
        blocks *= 2;
    return blocks;
}

template <typename T>
PackedParams<T> packed_params(const LinearParams<T>& layer, const PackedWeight& weight, int columns_of_stage,
                              int resident) {
    const int64_t tiles = ceil_div(layer.OC, ROWS);
    return {layer,
            static_cast<const char*>(weight.rows.data),
            packed_row_bytes(weight.packing, layer.C),
            packed_code_bytes(weight.packing, layer.C),
            tiles,
            cluster_blocks(tiles, ceil_div(layer.C, columns_of_stage), resident)};
}

// log₂ of the outputs of a tile. The row of weight of its row r: with SwiGLU 64 rows of gate, then the same 64 of up.
// Past the end, the last one.
template <typename T>
__device__ __forceinline__ int log_outputs(const PackedParams<T>& p) {
    static_assert(ROWS == 128 && HALF == 64);
    return is_gated(p.activation) ? 6 : 7;
}
template <typename T>
__device__ __forceinline__ int64_t weight_row(const PackedParams<T>& p, int first_output, int r) {
    const bool gated = is_gated(p.activation);
    return min(int64_t(first_output) + (gated ? r % HALF : r), p.columns - 1) + (gated && r >= HALF ? p.columns : 0);
}

// Stores the warp's sums of its 16 rows of weight: sum[j][k] as in mma.cuh.
template <int NT>
__device__ __forceinline__ void store_sums(float* sums, const float (&sum)[NT][4]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[(8 * j + 2 * t + k % 2) * PITCH + 16 * warp + 8 * (k / 2) + g] = sum[j][k];
}

// y[i]: the sums of the cluster's blocks, in order, `at[i]` floats from `sums` on.
template <int EACH>
__device__ __forceinline__ void add_blocks(float (&y)[EACH], const float* sums, const int (&at)[EACH], int blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        float part[MAX_CLUSTER][EACH];  // all loads before the first addition: they take long
#pragma unroll
        for (int b = 0; b < MAX_CLUSTER; b++) {
            const uint32_t from = map_shared_rank(sums, min(b, blocks - 1));
#pragma unroll
            for (int i = 0; i < EACH; i++) part[b][i] = load_shared_rank(from + at[i] * int(sizeof(float)));
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            y[i] = part[0][i];
#pragma unroll
            for (int b = 1; b < MAX_CLUSTER; b++) y[i] += b < blocks ? part[b][i] : 0.0f;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < EACH; i++) y[i] = sums[at[i]];
}

// A thread's part of a tile's outputs: one column of out, for some of the rows. Its scales and biases are loaded at the
// beginning of the tile.
template <Packing P, typename T>
struct TileOutputs {
    int o;
    float scale[2], bias[2];

    __device__ __forceinline__ TileOutputs(const PackedParams<T>& p, int first_output)
        : o(first_output + (int(threadIdx.x) & ((1 << log_outputs(p)) - 1))) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = weight_row(p, first_output, o - first_output + half * HALF);
            scale[half] =
                P == Packing::Fp8 ? *reinterpret_cast<const float*>(p.rows + row * p.row_bytes + p.code_bytes) : 1.0f;
            bias[half] = p.bias ? as_float(p.bias[row]) : 0.0f;
        }
    }
    // sums: [rows of inp][PITCH], in each block of the cluster, of which this is block `rank`.
    __device__ __forceinline__ void store(const PackedParams<T>& p, const float* sums, int rank) const {
        constexpr int EACH = 4;
        const bool gated = is_gated(p.activation);
        const int log = log_outputs(p), blocks = p.blocks;
        const int per_pass = THREADS >> log, step = blocks * per_pass, r = int(threadIdx.x) & ((1 << log) - 1);
        if (o >= p.columns) return;
#pragma unroll 1
        for (int n = rank * per_pass + (int(threadIdx.x) >> log); n < p.N; n += EACH * step) {
            float y[EACH], up[EACH] = {}, residual[EACH] = {};
            int at[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int row = min(n + i * step, p.N - 1);
                at[i] = row * PITCH + r;
                if (p.residual) residual[i] = as_float(p.residual[row * p.residual_stride + o]);
            }
            add_blocks(y, sums, at, blocks);
            if (gated) add_blocks(up, sums + HALF, at, blocks);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (n + i * step >= p.N) break;
                const float a = y[i] * scale[0] + bias[0], b = up[i] * scale[1] + bias[1];
                const float z = gated ? activate(p.activation, a, b) : activate(p.activation, a);
                p.out[(n + i * step) * p.out_stride + o] = from_float<T>(z + residual[i]);
            }
        }
    }
};

}  // namespace packed_tile
