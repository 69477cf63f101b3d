// The matmuls of the fused decode step with packed weights, by mma.sync [m16n8k16]. Decoding one sequence, an mma
// wastes seven of its eight columns, but it takes the multiplications, the sums over lanes and the cost of more
// sequences off the warps. Left to them is the conversion of codes to T, 1.2 to 2.3 instructions a weight
// (packed_codes.cuh), about half of all.
//
// The weights of two stages are the 16 rows of an mma, up to 8 of each. Where a stage has fewer, each row is divided
// into parts, so that rows times parts are 8: group j of the warp's columns belongs to part j % parts. Parts are
// columns of the product too, and only the sums whose row and column are of the same part are kept:
//
//   stage_rows   parts   row of lane g, its part   sequences of the 8 columns
//   8            1       g, 0                      8
//   4            2       g / 2, g % 2              4
//   2            4       g / 4, g % 4              2
//
// More sequences than that take several passes over the columns, which share the converted weights. Which groups are
// added in which order follows from the matrix alone.
#pragma once

#include "kernels/cuda/packed_codes.cuh"
#include "kernels/generation/decode_step_weights.cuh"

namespace fused_decode {

// Like WarpMatmul.
template <int NB, typename T>
struct PackedWarpMatmul {
    static constexpr int PASSES = NB < 4 ? 1 : NB / 2;

    Packing packing;
    int K, pitch, stage_rows, log_parts;
    int t, row, part;         // the lane's quarter of a group; its row and part, of the weights and of the activations
    int groups;               // of the slice
    int codes_at, scales_at;  // bytes from the beginning of a row to the lane's first codes and to the first scale
    int rows_left;            // rows that have not been waited for
    int taken, first_stage;
    const char* from[STAGES_AT_ONCE];  // the lane's row in each stage
    uint32_t w[STAGES_AT_ONCE][LANE_WORDS];

    __device__ __forceinline__ PackedWarpMatmul(const MatrixPlan& p, Slice slice, int rows)
        : packing(p.packing),
          K(p.K),
          pitch(p.pitch),
          stage_rows(p.stage_rows),
          log_parts(p.log_parts),
          rows_left(rows) {
        const int lane = int(threadIdx.x) % WARP, g = lane / 4;
        t = lane % 4;
        row = g >> log_parts;
        part = g & ((1 << log_parts) - 1);
        const int first = slice.first * FULL_WIDTH<T> / int(PACKED_GROUP);
        groups = slice.count * FULL_WIDTH<T> / int(PACKED_GROUP);
        codes_at = group_bytes(packing) * first + group_bytes(packing) / 4 * t;
        scales_at = int(packed_code_bytes(packing, K)) + 2 * first;
    }

    // The lane's group in a step. Past the last one it takes another one's place; its weights then count as zeros.
    __device__ __forceinline__ int group_of(int step) const {
        return min((step << log_parts) + part, max(groups - 1, 0));
    }
    __device__ __forceinline__ bool has_group(int step) const { return (step << log_parts) + part < groups; }

    template <Packing P, int STAGES>
    __device__ __forceinline__ void load(int step) {
        const int at = codes_at + group_of(step) * group_bytes(P);
#pragma unroll
        for (int g = 0; g < STAGES; g++) load_codes<P>(w[g], from[g] + at);
    }
    __device__ __forceinline__ void next(Ring& ring, Slice, int most) {
        taken = 0;
        first_stage = ring.stage;
#pragma unroll
        for (int g = 0; g < STAGES_AT_ONCE; g++) {
            from[g] = from[0];  // where no stage is left: read, but not used
            if (g >= most || rows_left <= 0) continue;
            ring.wait_full();
            from[g] = ring.current() + min(row, rows_left - 1) * pitch;
            rows_left -= stage_rows;
            taken++;
            ring.advance();
        }
        if (taken == 0) return;
        if (packing == Packing::Int4)
            load<Packing::Int4, STAGES_AT_ONCE>(0);
        else
            load<Packing::Int8, STAGES_AT_ONCE>(0);
    }

    // Adds the products of the lane's groups. sum[i][g]: columns 2t and 2t + 1 of pass i for the lane's row of stage g.
    template <Packing P, int STAGES, int EVEN>
    __device__ __forceinline__ void accumulate(float (&sum)[PASSES][EVEN][2], const T* x, int N) {
        const T* in[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) in[i] = x + min(i * stage_rows + row, N - 1) * K;
#pragma unroll 1
        for (int step = 0; (step << log_parts) < groups; step++) {
            const int group = group_of(step);
            const bool inside = has_group(step);
            uint32_t a[EVEN][4] = {};
            float scale[EVEN] = {};
#pragma unroll
            for (int g = 0; g < STAGES; g++) {
                if (P == Packing::Fp8 && !inside) w[g][0] = w[g][1] = 0;
                code_pairs<P, T>(a[g], w[g]);
                if (P == Packing::Fp8) continue;
                scale[g] = as_float(*reinterpret_cast<const fp16*>(from[g] + scales_at + 2 * group));
                if (!inside) scale[g] = 0;
            }
            load<P, STAGES>(step + 1);
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (i > 0 && i * stage_rows >= N) break;
                uint32_t b[4];
                activation_pairs<P>(b, in[i] + group * int(PACKED_GROUP), t);
#pragma unroll
                for (int g = 0; g < EVEN; g += 2) {
                    float y[4] = {};
                    if (P == Packing::Fp8)
#pragma unroll
                        for (int k = 0; k < 4; k++) y[k] = sum[i][g + k / 2][k % 2];
#pragma unroll
                    for (int k = 0; k < 4; k += 2)
                        mma_m16n8k16<T>(y, {a[g][k], a[g + 1][k], a[g][k + 1], a[g + 1][k + 1]}, b[k], b[k + 1]);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float& to = sum[i][g + k / 2][k % 2];
                        to = P == Packing::Fp8 ? y[k] : fmaf(scale[g + k / 2], y[k], to);
                    }
                }
            }
        }
        if constexpr (P == Packing::Fp8) {
#pragma unroll
            for (int g = 0; g < STAGES; g++) {
                const float scale = *reinterpret_cast<const float*>(from[g] + K);
#pragma unroll
                for (int i = 0; i < PASSES; i++) {
                    sum[i][g][0] *= scale;
                    sum[i][g][1] *= scale;
                }
            }
        }
    }
    // x: the warp's part of the activations, row n at n·K. to[n]: the warp's sums of these rows for sequence n.
    template <int STAGES>
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, int N, float (*to)[CHUNK_ROWS]) {
        const int lane = int(threadIdx.x) % WARP;
        float sum[PASSES][STAGES + STAGES % 2][2] = {};
        if (packing == Packing::Fp8)
            accumulate<Packing::Fp8, STAGES>(sum, x, N);
        else if (packing == Packing::Int8)
            accumulate<Packing::Int8, STAGES>(sum, x, N);
        else
            accumulate<Packing::Int4, STAGES>(sum, x, N);
        __syncwarp();
        if (lane < taken) {
            const int stage = first_stage + lane;
            mbarrier_arrive(ring.empty + (stage < ring.stages ? stage : stage - ring.stages));
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (i > 0 && i * stage_rows >= N) break;
#pragma unroll
            for (int g = 0; g < STAGES; g++) store(sum[i][g], i * stage_rows, g, N, to);
        }
    }
    // Stores the lane's row of stage g for the sequences from `first` on.
    __device__ __forceinline__ void store(const float (&sum)[2], int first, int g, int N, float (*to)[CHUNK_ROWS]) {
        const int column = 2 * t, parts = 1 << log_parts, n = first + (column >> log_parts);
        const int at = g * stage_rows + row;
        if (log_parts == 0) {
            if (g < taken && n < N) to[n][at] = sum[0];
            if (g < taken && n + 1 < N) to[n + 1][at] = sum[1];
            return;
        }
        // One of the two columns is of the lane's part, or none.
        float y = (column & (parts - 1)) == (part & ~1) ? (part & 1 ? sum[1] : sum[0]) : 0.0f;
        if (parts > 2) y += __shfl_xor_sync(ALL_LANES, y, 1);
#pragma unroll 1
        for (int offset = 4; offset < 4 * parts; offset *= 2) y += __shfl_xor_sync(ALL_LANES, y, offset);
        if (part == 0 && (column & (parts - 1)) == 0 && g < taken && n < N) to[n][at] = y;
    }
};

}  // namespace fused_decode
