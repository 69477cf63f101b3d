// What small-batch GEMMs share whose blocks multiply 128 rows of weight by all rows of inp: tiles, clusters of blocks
// that divide the columns, and the way of the sums to out.
//
// A thread has sums of two rows of weight, with SwiGLU of a row of gate and of its row of up, so that no other thread's
// are needed for an output. Where blocks divide the columns, each adds the sums of some rows of inp: the others write
// theirs into its shared memory (st.async), and an mbarrier counts the bytes. No block waits for another after that.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_unscaled.cuh"

namespace linear_tile {

constexpr int WARPS = 8, THREADS = WARPS * WARP;   // that multiply and store
constexpr int ROWS = 16 * WARPS, HALF = ROWS / 2;  // of weight: a tile's; with SwiGLU half of gate and half of up
static_assert(HALF == UNSCALED_COLUMNS && UNSCALED_MAX_ROWS == 8 * WARPS);
constexpr int MAX_CLUSTER = 8;
constexpr int SUM_BYTES = MAX_CLUSTER * THREADS * int(sizeof(float4));  // of a block's Sums::slots

template <typename T>
struct TileParams : LinearParams<T> {
    UnscaledParams<T> unscaled;
    int64_t tiles;
    int log_blocks;  // log₂ of those of a cluster

    __host__ __device__ int blocks() const { return 1 << log_blocks; }
};

// log₂ of the blocks of a cluster: as many as run at once, `resident` on an SM, with a stage of their own at least.
inline int log_cluster_blocks(int64_t tiles, int64_t stages, int resident) {
    int log = 0;
    while (has_pdl() && 2 << log <= MAX_CLUSTER && tiles << (log + 1) <= resident * num_sms() && 2 << log <= stages)
        log++;
    return log;
}

template <typename T>
TileParams<T> tile_params(const LinearParams<T>& layer, const UnscaledParams<T>& unscaled, int columns_of_stage,
                          int resident) {
    const int64_t tiles = ceil_div(layer.OC, ROWS);
    return {layer, unscaled, tiles, log_cluster_blocks(tiles, ceil_div(layer.C, columns_of_stage), resident)};
}

// log₂ of the outputs of a tile. The row of weight of its row r: with SwiGLU 64 rows of gate, then the same 64 of up.
// Past the end, the last one.
template <typename T>
__device__ __forceinline__ int log_outputs(const TileParams<T>& p) {
    static_assert(ROWS == 128 && HALF == 64);
    return is_gated(p.activation) ? 6 : 7;
}
template <typename T>
__device__ __forceinline__ int64_t weight_row(const TileParams<T>& p, int first_output, int r) {
    const bool gated = is_gated(p.activation);
    return min(int64_t(first_output) + (gated ? r % HALF : r), p.columns - 1) + (gated && r >= HALF ? p.columns : 0);
}

// The rows of the tile that are rows g and g + 8 of the warp's mma (mma.cuh), g being lane / 4.
template <typename T>
__device__ __forceinline__ void set_rows(int (&rows)[2], const TileParams<T>& p) {
    const int g = int(threadIdx.x) % WARP / 4, warp = int(threadIdx.x) / WARP;
    const bool gated = is_gated(p.activation);
    rows[0] = (gated ? 8 : 16) * warp + g;
    rows[1] = rows[0] + (gated ? HALF : 8);
}

// The sums of a tile: of each eight rows of inp a thread has four, as in mma.cuh. The blocks of the cluster, of which
// there are 2^log, divide the up to NT of these eights.
template <int NT>
struct Sums {
    float4* slots;      // [blocks of the cluster][eights of this block][THREADS]
    Mbarrier* arrived;  // those of all blocks; where there are several
    int rank, log, used, first, end;

    __device__ __forceinline__ Sums(int rank_, int log_blocks, int N, void* slots_, Mbarrier* arrived_)
        : slots(static_cast<float4*>(slots_)), arrived(arrived_), rank(rank_), log(log_blocks) {
        used = (N + 7) / 8;
        first = first_of(rank);
        end = min(first_of(rank + 1), used);
    }
    __device__ __forceinline__ int first_of(int block) const { return (block * NT + (1 << log) - 1) >> log; }
    __device__ __forceinline__ float4* slot(int block, int eight) const {
        return slots + (block * max(NT >> log, 1) + eight) * THREADS + threadIdx.x;
    }
    // By one thread, before the blocks of the cluster meet for the first time.
    __device__ __forceinline__ void expect() const {
#if __CUDA_ARCH__ >= 900
        mbarrier_init(arrived, 1);
        mbarrier_init_fence();
        if (log > 0) mbarrier_arrive_expect_tx(arrived, (max(end - first, 0) * THREADS * int(sizeof(float4))) << log);
#endif
    }
    // Gives each block what it adds, once all of them have read what is in the place of the slots.
    __device__ __forceinline__ void send(const float (&sum)[NT][4]) const {
#pragma unroll
        for (int j = 0; j < NT; j++) {
            if (j >= used) break;
            const float4 y = {sum[j][0], sum[j][1], sum[j][2], sum[j][3]};
            const int block = (j << log) / NT;
            float4* const to = slot(rank, j - first_of(block));
#if __CUDA_ARCH__ >= 900
            if (log > 0) {
                st_async(map_shared_rank(to, block), y, map_shared_rank(arrived, block));
                continue;
            }
#endif
            *to = y;
        }
#if __CUDA_ARCH__ >= 900
        if (log > 0) mbarrier_wait(arrived, 0);
#endif
    }
    // y: the sum over the blocks, in their order, for the j-th eight, one of this block's.
    __device__ __forceinline__ void add(float (&y)[4], int j) const {
        Floats<4> part[MAX_CLUSTER] = {};
#pragma unroll
        for (int b = 0; b < MAX_CLUSTER; b++)
            if (b < 1 << log) part[b] = load_floats<4>(reinterpret_cast<const float*>(slot(b, j - first)));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            y[k] = part[0][k];
#pragma unroll
            for (int b = 1; b < MAX_CLUSTER; b++) y[k] += part[b][k];
        }
    }
};

// What UnscaledRows (linear.h) need of a block, in shared memory: the norm's scales of the rows of inp, and sums over a
// warp's outputs of each row, squared.
struct RowNorms {
    float scale[UNSCALED_MAX_ROWS], squares[WARPS][UNSCALED_MAX_ROWS];

    // By all threads. TileOutputs::store() waits for them.
    template <typename T>
    __device__ __forceinline__ void load(const TileParams<T>& p) {
        const int lane = int(threadIdx.x) % WARP, first = int(threadIdx.x) / WARP * 8, row = first + lane % 8;
        if (!p.unscaled.parts || first >= p.N) return;
        const float rstd = scale_of_row(p, p.unscaled.parts, row).rstd;
        if (lane < 8) scale[row] = rstd;
    }
    // y: of rows 8·eight + 2t and + 1 of inp, t being lane % 4, the thread's squares.
    __device__ __forceinline__ void add(const float (&y)[2], int eight) {
        const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = y[i];
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
            if (lane < 4) squares[warp][8 * eight + 2 * lane + i] = sum;
        }
    }
    // Stores the two parts of the tile's outputs, of the rows that this block has.
    template <typename T>
    __device__ __forceinline__ void store(const TileParams<T>& p, int tile, int first_row, int end_row) const {
        constexpr int OF_PART = WARPS / 2;
        named_barrier_sync(1, THREADS);
        const int n = first_row + int(threadIdx.x) / 2, half = int(threadIdx.x) % 2, part = 2 * tile + half;
        if (n >= min(end_row, p.N) || part * UNSCALED_COLUMNS >= p.columns) return;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < OF_PART; warp++) sum += squares[half * OF_PART + warp][n];
        p.unscaled.next_parts[part * UNSCALED_MAX_ROWS + n] = {0, sum};
    }
};

// A thread's outputs: of each eight rows of inp two, and of out two columns, eight apart, or one with SwiGLU. Its
// biases are loaded at the beginning of the tile, and so are the scales of its rows of weight if they have some.
template <typename T>
struct TileOutputs {
    int o;
    bool gated;
    float scale[2] = {1, 1}, bias[2];

    __device__ __forceinline__ TileOutputs(const TileParams<T>& p, int first_output, const int (&rows)[2])
        : o(first_output + rows[0]), gated(is_gated(p.activation)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = weight_row(p, first_output, rows[half]);
            bias[half] = p.bias ? as_float(p.bias[row]) : 0.0f;
        }
    }
    // Calls f(k, row of inp, column of out) for those of the j-th eight rows; k: the index of its sum.
    template <typename F>
    __device__ __forceinline__ void for_each(const TileParams<T>& p, int j, F f) const {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int n = 8 * j + 2 * (int(threadIdx.x) % 4) + k % 2, column = o + k / 2 * 8;
            if (n < p.N && column < p.columns && !(gated && k >= 2)) f(k, n, column);
        }
    }
    __device__ __forceinline__ void load_residual(float (&residual)[4], const TileParams<T>& p, int j) const {
        if (p.residual)
            for_each(p, j, [&](int k, int n, int c) { residual[k] = as_float(p.residual[n * p.residual_stride + c]); });
    }
    // Adds the sums of the cluster's blocks and stores this block's outputs. residual: of its first eight rows of inp,
    // loaded before the blocks have met. norms: null where a GPU has no UnscaledRows.
    template <int NT>
    __device__ __forceinline__ void store(const TileParams<T>& p, const Sums<NT>& sums, const float (&sum)[NT][4],
                                          float (&residual)[4], RowNorms* norms) const {
        const bool reads = norms && p.unscaled.parts, makes = norms && p.unscaled.next_rows;
        float next_weight[2] = {};
        if (makes)
#pragma unroll
            for (int half = 0; half < 2; half++)
                next_weight[half] = p.unscaled.next_weight[min(int64_t(o + 8 * half), p.columns - 1)];
        sums.send(sum);
        if (reads) named_barrier_sync(1, THREADS);
#pragma unroll 1
        for (int j = sums.first; j < sums.end; j++) {
            float y[4], squares[2] = {};
            sums.add(y, j);
            if (j > sums.first) load_residual(residual, p, j);
            for_each(p, j, [&](int k, int n, int c) {
                const float of_row = reads ? norms->scale[n] : 1.0f;
                const float a = y[k] * (scale[k / 2] * of_row) + bias[k / 2],
                            b = y[k | 2] * (scale[1] * of_row) + bias[1];
                const float z = gated ? activate(p.activation, a, b) : activate(p.activation, a);
                const T out = from_float<T>(z + residual[k]);
                p.out[n * p.out_stride + c] = out;
                if (!makes) return;
                const float x = as_float(out);
                p.unscaled.next_rows[n * p.columns + c] = from_float<T>(x * next_weight[k / 2]);
                squares[k % 2] = fmaf(x, x, squares[k % 2]);
            });
            if (makes) norms->add(squares, j);
        }
        if (makes) norms->store(p, (o & ~(ROWS - 1)) / ROWS, 8 * sums.first, 8 * sums.end);
    }
};

}  // namespace linear_tile
