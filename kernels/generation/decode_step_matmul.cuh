// The matmuls of the fused decode step: up to NB rows of activations times the block's rows of a weight matrix. Each
// warp multiplies one eighth of the columns of all these rows.
#pragma once

#include "kernels/generation/decode_step_weights.cuh"

namespace fused_decode {

// The lanes of a warp over the rows of a stage: 32 / rows lanes share a row, and each takes one vector of it in a step.
// Odd rows begin with the second step and end with the first, because the same vectors of two rows are mostly in the
// same banks.
struct LaneMap {
    int lanes, row, in_row, count, steps;

    __device__ __forceinline__ LaneMap(int rows, int vectors) {
        const int lane = int(threadIdx.x) % WARP, log_lanes = __clz(rows) - 26;  // of 32 / rows
        lanes = 1 << log_lanes;
        row = lane >> log_lanes;
        in_row = lane & (lanes - 1);
        count = vectors;
        steps = (vectors + lanes - 1) >> log_lanes;
    }
    // The lane's vector in step i; -1: none.
    __device__ __forceinline__ int vector(int i) const {
        int shifted = i + (row & 1);
        if (shifted >= steps) shifted -= steps;
        const int v = shifted * lanes + in_row;
        return i < steps && v < count ? v : -1;
    }
};

// A warp's part of one matmul. next() waits for the next stages, up to AT_ONCE, and loads their first weights to
// registers; multiply() multiplies them with the warp's part of the activations and releases the stages.
template <int NB, typename T>
struct WarpMatmul {
    static constexpr int W = FULL_WIDTH<T>, STEPS = NB <= 2 ? 3 : 1, AT_ONCE = most_at_once(NB, 0);
    static constexpr int CHUNK_ROWS = chunk_rows(NB, 0);

    LaneMap map;
    int K, stage_rows;
    int rows_left;  // rows that have not been waited for
    int taken, first_stage;
    const T* from[AT_ONCE];  // the lane's row in each stage
    Pack<T, W> w[AT_ONCE][STEPS];

    __device__ __forceinline__ WarpMatmul(const MatrixPlan& p, Slice slice, int rows)
        : map(p.stage_rows, slice.count), K(p.K), stage_rows(p.stage_rows), rows_left(rows) {}

    __device__ __forceinline__ void load(int first_step, int stages) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int v = map.vector(first_step + s);
#pragma unroll
            for (int g = 0; g < AT_ONCE; g++) {
                w[g][s] = {};
                if (g < stages && v >= 0) w[g][s] = load_pack<W>(from[g] + v * W);
            }
        }
    }
    __device__ __forceinline__ void next(Ring& ring, Slice slice, int most) {
        taken = 0;
        first_stage = ring.stage;
#pragma unroll
        for (int g = 0; g < AT_ONCE; g++) {
            if (g >= most || rows_left <= 0) continue;
            ring.wait_full();
            from[g] = reinterpret_cast<const T*>(ring.current()) + min(map.row, rows_left - 1) * K + slice.first * W;
            rows_left -= stage_rows;
            taken++;
            ring.advance();
        }
        load(0, taken);
    }
    // x: the warp's part of the activations, row n at n·K. to[n]: the warp's sums of these rows for sequence n.
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, const T*, int N, float (*to)[CHUNK_ROWS]) {
        if (taken == 1)
            multiply<1>(ring, x, N, to);
        else if (taken == 2)
            multiply<2>(ring, x, N, to);
        else
            multiply<AT_ONCE>(ring, x, N, to);
    }
    template <int STAGES>
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, int N, float (*to)[CHUNK_ROWS]) {
        const int lane = int(threadIdx.x) % WARP;
        float sum[STAGES][NB] = {};
#pragma unroll 1
        for (int i = 0; i < map.steps; i += STEPS) {
            if (i > 0) load(i, taken);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int v = map.vector(i + s);
                Floats<W> weight[STAGES];
#pragma unroll
                for (int g = 0; g < STAGES; g++) weight[g] = as_floats(w[g][s]);
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    Pack<T, W> in = {};
                    if (v >= 0) in = load_pack<W>(x + min(n, N - 1) * K + v * W);
                    const Floats<W> f = as_floats(in);
#pragma unroll
                    for (int k = 0; k < W; k++)
#pragma unroll
                        for (int g = 0; g < STAGES; g++) sum[g][n] = fmaf(f[k], weight[g][k], sum[g][n]);
                }
            }
        }
        __syncwarp();
        if (lane < taken) {
            const int stage = first_stage + lane;
            mbarrier_arrive(ring.empty + (stage < ring.stages ? stage : stage - ring.stages));
        }
#pragma unroll 1
        for (int offset = map.lanes / 2; offset > 0; offset /= 2)
#pragma unroll
            for (int g = 0; g < STAGES; g++)
#pragma unroll
                for (int n = 0; n < NB; n++) sum[g][n] += __shfl_xor_sync(ALL_LANES, sum[g][n], offset);
        if (map.in_row > 0) return;
#pragma unroll
        for (int g = 0; g < STAGES; g++)
#pragma unroll
            for (int n = 0; n < NB; n++)
                if (g < taken) to[n][g * stage_rows + map.row] = sum[g][n];
    }
};

}  // namespace fused_decode
