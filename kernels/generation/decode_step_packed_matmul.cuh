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

#include <type_traits>

#include "kernels/cuda/packed_codes.cuh"
#include "kernels/generation/decode_step_weights.cuh"

namespace fused_decode {

// Like WarpMatmul. BITS: of a code.
template <int NB, typename T, int BITS>
struct PackedWarpMatmul {
    static constexpr int PASSES = NB < 4 ? 1 : NB / 2, AT_ONCE = most_at_once(NB, BITS);
    static constexpr int CHUNK_ROWS = chunk_rows(NB, BITS);
    static constexpr int LOG_ROWS = 3;  // of MAX_STAGE_ROWS, which stage_rows times parts are
    static_assert(1 << LOG_ROWS == MAX_STAGE_ROWS);

    Packing packing;
    int K, pitch, stage_rows, log_parts;
    int t, row, part;         // the lane's quarter of a group; its row and part, of the weights and of the activations
    int groups;               // of the slice
    int codes_at, scales_at;  // bytes from the beginning of a row to the lane's first codes and to the first scale
    int rows_left;            // rows that have not been waited for
    int taken, first_stage;
    const char* from[AT_ONCE];  // the lane's row in each stage
    uint32_t w[AT_ONCE][LANE_WORDS];

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

    template <Packing P, int STAGES>
    __device__ __forceinline__ void load(int group) {
#pragma unroll
        for (int g = 0; g < STAGES; g++) load_codes<P>(w[g], from[g] + codes_at + group * group_bytes(P));
    }
    // The lane's first group; any, where there is none.
    __device__ __forceinline__ int first_group() const {
        return min(part, max(groups - 1, 0));
    }

    // Lane g waits for stage g.
    __device__ __forceinline__ void next(Ring& ring, Slice, int most) {
        const int lane = int(threadIdx.x) % WARP;
        taken = min(most, (rows_left + stage_rows - 1) >> (LOG_ROWS - log_parts));
        if (taken == 0) return;
        first_stage = ring.stage;
        if (lane < taken) ring.wait_full(lane);
        __syncwarp();
#pragma unroll
        for (int g = 0; g < AT_ONCE; g++) {
            from[g] = from[0];  // where no stage is left: read, but not used
            if (g >= taken) continue;
            from[g] = ring.current() + min(row, rows_left - 1) * pitch;
            rows_left -= stage_rows;
            ring.advance();
        }
        for_taken([&](auto stages) { load<BITS == 4 ? Packing::Int4 : Packing::Int8, stages()>(first_group()); });
    }
    // Calls f(a constant: 2, 4 or 8 stages, as few as hold those taken).
    template <typename F>
    __device__ __forceinline__ void for_taken(F f) const {
        if (taken <= 2)
            f(std::integral_constant<int, 2>{});
        else if (AT_ONCE == 4 || taken <= 4)
            f(std::integral_constant<int, 4>{});
        else
            f(std::integral_constant<int, AT_ONCE>{});
    }

    // Adds the products of the lane's groups. sum[i][g]: columns 2t and 2t + 1 of pass i for the lane's row of stage g.
    template <Packing P, int STAGES>
    __device__ __forceinline__ void accumulate(float (&sum)[PASSES][STAGES][2], const T* x, const T* zeros, int N) {
        const T* in[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) in[i] = x + min(i * stage_rows + row, N - 1) * K;
        const int parts = 1 << log_parts, last = max(groups - 1, 0);
        int group = first_group();
#pragma unroll 1
        for (int begin = 0; begin < groups; begin += parts) {
            uint32_t a[STAGES][4];
            float scale[STAGES];
#pragma unroll
            for (int g = 0; g < STAGES; g++) {
                code_pairs<P, T, true>(a[g], w[g]);
                if (P == Packing::Fp8) continue;
                scale[g] = as_float(*reinterpret_cast<const fp16*>(from[g] + scales_at + 2 * group));
            }
            const int now = group;
            const bool exists = begin + part < groups;
            group = min(group + parts, last);
            load<P, STAGES>(group);
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (i > 0 && i * stage_rows >= N) break;
                uint32_t b[4];
                activation_pairs<P>(b, exists ? in[i] + now * int(PACKED_GROUP) : zeros, t);
#pragma unroll
                for (int g = 0; g < STAGES; g += 2) {
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
    // x: the warp's part of the activations, row n at n·K, regrouped(). zeros: those of a group. to[n]: the warp's sums
    // of these rows for sequence n.
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, const T* zeros, int N,
                                             float (*to)[CHUNK_ROWS]) {
        for_taken([&](auto stages) { multiply<stages()>(ring, x, zeros, N, to); });
    }
    template <int STAGES>
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, const T* zeros, int N,
                                             float (*to)[CHUNK_ROWS]) {
        static_assert(STAGES % 2 == 0);  // two are the rows of an mma
        const int lane = int(threadIdx.x) % WARP;
        float sum[PASSES][STAGES][2] = {};
        if constexpr (BITS == 4)
            accumulate<Packing::Int4, STAGES>(sum, x, zeros, N);
        else if (packing == Packing::Fp8)
            accumulate<Packing::Fp8, STAGES>(sum, x, zeros, N);
        else
            accumulate<Packing::Int8, STAGES>(sum, x, zeros, N);
        __syncwarp();
        if (lane < taken) {
            const int stage = first_stage + lane;
            mbarrier_arrive(ring.empty + (stage < ring.stages ? stage : stage - ring.stages));
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (i > 0 && i * stage_rows >= N) break;
            store<STAGES>(sum[i], i * stage_rows, N, to);
        }
    }
    // Stores the lane's row of each stage for the sequences from `first` on.
    template <int STAGES>
    __device__ __forceinline__ void store(const float (&sum)[STAGES][2], int first, int N, float (*to)[CHUNK_ROWS]) {
        const int column = 2 * t, parts = 1 << log_parts, n = first + (column >> log_parts);
        if (log_parts == 0) {
#pragma unroll
            for (int k = 0; k < (NB == 1 ? 1 : 2); k++)
                if (n + k < N)
#pragma unroll
                    for (int g = 0; g < STAGES; g++)
                        if (g < taken) to[n + k][g * stage_rows + row] = sum[g][k];
            return;
        }
        // One of the two columns is of the lane's part, or none.
        float y[STAGES];
#pragma unroll
        for (int g = 0; g < STAGES; g++) {
            y[g] = (column & (parts - 1)) == (part & ~1) ? (part & 1 ? sum[g][1] : sum[g][0]) : 0.0f;
            if (parts > 2) y[g] += __shfl_xor_sync(ALL_LANES, y[g], 1);
        }
#pragma unroll 1
        for (int offset = 4; offset < 4 * parts; offset *= 2)
#pragma unroll
            for (int g = 0; g < STAGES; g++) y[g] += __shfl_xor_sync(ALL_LANES, y[g], offset);
        if (part == 0 && (column & (parts - 1)) == 0 && n < N)
#pragma unroll
            for (int g = 0; g < STAGES; g++)
                if (g < taken) to[n][g * stage_rows + row] = y[g];
    }
};

}  // namespace fused_decode
