// What small-batch GEMM kernels of a linear layer share whose blocks form clusters: block s of the S blocks of a
// cluster multiplies a slice of the columns of inp. Its sums go to the blocks that store those rows, eight of every
// 8·S, which add the S of them in order. sm_90a only.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/generation/linear.cuh"

constexpr int MAX_CLUSTER = 8;

// The two halves of a block's rows of weight: consecutive, or with SwiGLU rows of gate and the same of up.
struct WeightRows {
    int first, second;
    int output;  // of the first one
    template <typename T>
    static __device__ __forceinline__ WeightRows of_block(const LinearParams<T>& p, int half_rows) {
        const bool gated = is_gated(p.activation);
        const int output = int(blockIdx.y) * half_rows * (gated ? 1 : 2);
        return {output, output + (gated ? int(p.columns) : half_rows), output};
    }
};

// Of the groups of 8 rows of inp, a block stores rank, rank + S, …
__device__ __forceinline__ int stored_groups(int N, int rank, int S) {
    return ((N + 7) / 8 - rank + S - 1) / S;
}

// Sends a warpgroup's sums of 8·NT rows of weight, which are columns of the tile from first_column on.
// sums: [groups that a block stores][S][8][PITCH]; full counts the bytes in the block that gets them.
template <int PITCH, int NT>
__device__ __forceinline__ void send_sums(const float (&sum)[NT][4], float* sums, Mbarrier* full, int first_column,
                                          int rank, int S, int N) {
    const int lane = lane_id(), g = lane / 4, t = lane % 4, warp = int(threadIdx.x) / WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int group = warp % (WARPGROUP / WARP) * 2 + half;  // of 8 rows
        if (group * 8 >= N) break;
        const uint32_t to =
            map_shared_rank(sums + ((group / S * S + rank) * 8 + g) * PITCH + first_column + 4 * t, group % S);
        const uint32_t counted = map_shared_rank(full, group % S);
#pragma unroll
        for (int n = 0; n < NT; n += 2)
            st_async(to + n * 8 * int(sizeof(float)),
                     float4{sum[n][2 * half], sum[n][2 * half + 1], sum[n + 1][2 * half], sum[n + 1][2 * half + 1]},
                     counted);
    }
}

// The first of the two columns whose sums are at 2·pair and 2·pair + 1: send_sums() puts the pairs of 16 columns in the
// order 0, 8, 2, 10, 4, 12, 6, 14.
__device__ __forceinline__ int column_of_pair(unsigned pair) {
    return int(pair / 8 * 16 + pair % 2 * 8 + pair % 8 / 2 * 2);
}

// A thread's four outputs of a row: two adjacent ones, and those of the other half of the rows of weight.
template <typename T>
struct FourOutputs {
    T bias[2][2] = {}, residual[2][2] = {};
    int columns[2], weight_rows[2];  // of out; of weight
    __device__ __forceinline__ FourOutputs(const LinearParams<T>& p, const WeightRows& rows, int column)
        : columns{rows.output + column, (is_gated(p.activation) ? rows.output : rows.second) + column},
          weight_rows{rows.first + column, rows.second + column} {}
    __device__ __forceinline__ void load_bias(const LinearParams<T>& p) {
        if (!p.bias) return;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (columns[i / 2] + i % 2 < p.columns) bias[i / 2][i % 2] = p.bias[weight_rows[i / 2] + i % 2];
    }
    __device__ __forceinline__ void load_residual(const LinearParams<T>& p, int row) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (columns[i / 2] + i % 2 < p.columns)
                residual[i / 2][i % 2] = p.residual[row * p.residual_stride + columns[i / 2] + i % 2];
    }
};

// Adds the S partial sums of four outputs in order, from `sums` on.
template <int PITCH, int HALF>
__device__ __forceinline__ void add_slices(float (&y)[2][2], const float* sums, int S) {
#pragma unroll
    for (int s = 0; s < MAX_CLUSTER; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 part = *reinterpret_cast<const float2*>(sums + min(s, S - 1) * 8 * PITCH + half * HALF);
            y[half][0] += s < S ? part.x : 0;
            y[half][1] += s < S ? part.y : 0;
        }
}

// Calls store(half, k, value) for a thread's outputs, columns to.columns[half] + k of out, whose sums are y.
template <typename T, typename Store>
__device__ __forceinline__ void finish_outputs(const LinearParams<T>& p, const FourOutputs<T>& to, float (&y)[2][2],
                                               Store store) {
    const bool gated = is_gated(p.activation);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i / 2][i % 2] += as_float(to.bias[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = i / 2, k = i % 2;
        if (to.columns[half] + k >= p.columns || (gated && half)) continue;
        const float z = gated ? activate<Math::Fast>(p.activation, y[0][k], y[1][k])
                              : activate<Math::Fast>(p.activation, y[half][k]);
        store(half, k, z + as_float(to.residual[half][k]));
    }
}
