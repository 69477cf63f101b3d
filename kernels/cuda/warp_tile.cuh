// Matmuls of small matrices by one warp, the accumulators in registers: what the attention kernels are made of.
//
// A warp's accumulators c [16·MT, 8·NT] are laid out as mma.sync's m16n8 tiles: of tile (m, n), lane 4g + t holds
//   c[m][n][0..1] = (row 16m + g,     columns 8n + 2t, 8n + 2t + 1)
//   c[m][n][2..3] = (row 16m + g + 8, the same columns).
// Operands in shared memory are tiles with rows of D elements, PITCH apart:
//   mma_ABt   c += A·Bᵀ   A [16·MT, D], B [8·NT, D] in shared memory
//   mma_AB    c += A·B    A [16·MT, 8·NK] the accumulators of an earlier matmul, rounded to T, or [16·MT, D] in shared
//                         memory; B [8·NK or D, ≥ 8·NT] in shared memory
//   mma_AtB   c += Aᵀ·B   A [ROWS, ≥ 16·MT], B [ROWS, ≥ 8·NT] in shared memory, rows of A weighted
// The accumulators are laid out like operand A of mma.sync, so P never leaves the registers (FlashAttention-2, Dao
// 2023). bf16 and fp16 run on tensor cores and accumulate in fp32. fp32 takes the same layout with fused multiply-adds:
// exact fp32, at the speed of the FMA units.
#pragma once

#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/mma.cuh"

// Elements from one row of a tile to the next: the row and 16 bytes. That is an odd multiple of 16 bytes, so the same
// column of 8 rows lies in 8 different groups of banks.
template <typename T, int D>
constexpr int PITCH = D + FULL_WIDTH<T>;

__device__ __forceinline__ int lane_id() {
    return threadIdx.x % WARP;
}

// 2^x to 2 units in the last place; 0 for −∞.
__device__ __forceinline__ float exp2_fast(float x) {
    return exp2_for<bf16>(x);
}

// --- accumulators

// Reductions over the four lanes that hold a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// f(x, row, column) for each of the thread's accumulators. The thread's rows of tile m are `row` + 16m and 8 further;
// `column` is the first column of the tile.
template <int NT, typename F>
__device__ __forceinline__ void for_each(float (&c)[NT][4], int row, int column, F f) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(c[n][e], row + e / 2 * 8, column + n * 8 + lane_id() % 4 * 2 + e % 2);
}
template <int MT, int NT, typename F>
__device__ __forceinline__ void for_each(float (&c)[MT][NT][4], int row, int column, F f) {
#pragma unroll
    for (int m = 0; m < MT; m++) for_each(c[m], row + m * 16, column, f);
}

// Lanes that differ in `BIT` add their sums and keep half of them each.
template <int HALF, int BIT, int COUNT>
__device__ __forceinline__ void add_halves(float (&sums)[COUNT]) {
    const bool high = lane_id() & BIT;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float keep = high ? sums[i + HALF] : sums[i], send = high ? sums[i] : sums[i + HALF];
        sums[i] = keep + __shfl_xor_sync(ALL_LANES, send, BIT);
    }
}
// Adds the warp's sums of 64 columns: sums[2n + e] are the thread's own, of columns 8n + 2t + e. Stores those of all
// rows to `to`; each lane stores two.
__device__ __forceinline__ void store_sums_of_rows(float* to, float (&sums)[16]) {
    add_halves<8, 16>(sums);
    add_halves<4, 8>(sums);
    add_halves<2, 4>(sums);
    *reinterpret_cast<float2*>(to + lane_id() / 4 * 8 + lane_id() % 4 * 2) = {sums[0], sums[1]};
}

template <int NT>
__device__ __forceinline__ void set_zero(float (&c)[NT][4]) {
    for_each(c, 0, 0, [](float& x, int, int) { x = 0; });
}

template <int NT>
__device__ __forceinline__ void scale_all(float (&c)[NT][4], float factor) {
    for_each(c, 0, 0, [&](float& x, int, int) { x *= factor; });
}
template <int MT, int NT>
__device__ __forceinline__ void scale_all(float (&c)[MT][NT][4], float factor) {
    for_each(c, 0, 0, [&](float& x, int, int) { x *= factor; });
}

// Multiplies each of the thread's two rows by its own factor.
template <int NT>
__device__ __forceinline__ void scale_rows(float (&c)[NT][4], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] *= factor[e / 2];
}

// --- tiles in shared memory

// Loads a tile of ROWS rows from rows `stride` apart, with zeros from row `count` and from column HS on. Asynchronous
// (cp_async_wait_all) if rows are aligned to 16 bytes.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(T* tile, const T* src, int64_t stride, int count, int HS, bool aligned) {
    constexpr int W = FULL_WIDTH<T>, PACKS = D / W;
    if (aligned) {
#pragma unroll
        for (int i = 0; i < (ROWS * PACKS + THREADS - 1) / THREADS; i++) {
            const int pack = i * THREADS + int(threadIdx.x), row = pack / PACKS, column = pack % PACKS * W;
            if (ROWS * PACKS % THREADS != 0 && row >= ROWS) break;
            const bool inside = row < count && column < HS;
            cp_async_16(tile + row * PITCH<T, D> + column, inside ? src + row * stride + column : src, inside);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
            const int row = i / D, column = i % D;
            tile[row * PITCH<T, D> + column] = row < count && column < HS ? src[row * stride + column] : T{};
        }
    }
}

// --- matmuls

// Operand A in shared memory: 16·MT rows of a tile. IN_REGISTERS: loaded once and kept, for tensor cores.
template <typename T, int MT, int D, bool IN_REGISTERS>
class TileA {
  public:
    __device__ __forceinline__ explicit TileA(const T* rows_) : rows(rows_) {
        if constexpr (!std::is_same_v<T, float>) {
            address = shared_address(rows + lane_id() % 16 * PITCH<T, D> + lane_id() / 16 * 8);
            if constexpr (IN_REGISTERS) {
#pragma unroll
                for (int k = 0; k < D / 16; k++) read(kept[k], k);
            }
        }
    }
    // Columns 16k … 16k + 15 in the layout of mma.sync.
    __device__ __forceinline__ void fragment(uint32_t (&a)[MT][4], int k) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < MT * 4; i++) a[i / 4][i % 4] = kept[k][i / 4][i % 4];
        } else {
            read(a, k);
        }
    }
    const T* rows;

  private:
    __device__ __forceinline__ void read(uint32_t (&a)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix_x4(a[m], address + (m * 16 * PITCH<T, D> + k * 16) * int(sizeof(T)));
    }
    uint32_t address = 0;
    uint32_t kept[IN_REGISTERS ? D / 16 : 1][MT][4];
};

// K: in fp32, the number of columns that are contracted.
template <typename T, int MT, int NT, int D, bool IN_REGISTERS, int K = D>
__device__ __forceinline__ void mma_ABt(float (&c)[MT][NT][4], const TileA<T, MT, D, IN_REGISTERS>& left, const T* b) {
    static_assert(NT % 2 == 0 && D % 16 == 0);
    const int lane = lane_id();
    if constexpr (std::is_same_v<T, float>) {
        const float *a_row = left.rows + lane / 4 * PITCH<T, D>, *b_row = b + lane % 4 * 2 * PITCH<T, D>;
#pragma unroll 1
        for (int k = 0; k < K; k += 4) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const Floats<4> low = load_floats<4>(a_row + m * 16 * PITCH<T, D> + k),
                                high = load_floats<4>(a_row + (m * 16 + 8) * PITCH<T, D> + k);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const Floats<4> even = load_floats<4>(b_row + n * 8 * PITCH<T, D> + k),
                                    odd = load_floats<4>(b_row + (n * 8 + 1) * PITCH<T, D> + k);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        c[m][n][0] = fmaf(low[i], even[i], c[m][n][0]);
                        c[m][n][1] = fmaf(low[i], odd[i], c[m][n][1]);
                        c[m][n][2] = fmaf(high[i], even[i], c[m][n][2]);
                        c[m][n][3] = fmaf(high[i], odd[i], c[m][n][3]);
                    }
                }
            }
        }
    } else {
        const uint32_t at = shared_address(b + (lane % 8 + lane / 16 * 8) * PITCH<T, D> + lane / 8 % 2 * 8);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[MT][4];
            left.fragment(a, k);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t right[4];
                ldmatrix_x4(right, at + (n * 8 * PITCH<T, D> + k * 16) * int(sizeof(T)));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_m16n8k16<T>(c[m][n], a[m], right[0], right[1]);
                    mma_m16n8k16<T>(c[m][n + 1], a[m], right[2], right[3]);
                }
            }
        }
    }
}

// Operand A from the accumulators of an earlier matmul, rounded to T: 16-bit types take half the registers.
template <typename T, int MT, int NK>
class RoundedA {
  public:
    RoundedA() = default;
    __device__ __forceinline__ explicit RoundedA(const float (&p)[MT][NK][4]) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NK; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if constexpr (std::is_same_v<T, float>)
                        words[m][n][i] = {p[m][n][2 * i], p[m][n][2 * i + 1]};
                    else
                        words[m][n][i] = pack_two<T>(p[m][n][2 * i], p[m][n][2 * i + 1]);
                }
    }
    // Columns 16k … 16k + 15 in the layout of mma.sync.
    __device__ __forceinline__ void fragment(uint32_t (&a)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = words[m][2 * k + i / 2][i % 2];
    }
    // fp32: column k of rows 16m + g and 16m + g + 8, from the lane of this row that holds it.
    __device__ __forceinline__ Floats<2> column(int m, int k) const {
        return {__shfl_sync(ALL_LANES, words[m][k / 8][0][k % 2], k % 8 / 2, 4),
                __shfl_sync(ALL_LANES, words[m][k / 8][1][k % 2], k % 8 / 2, 4)};
    }

  private:
    std::conditional_t<std::is_same_v<T, float>, Floats<2>, uint32_t> words[MT][NK][2];
};

// c += A·B on tensor cores, A in left.fragment(a, k) for k < STEPS. D: columns of B's tile.
template <typename T, int D, int STEPS, int MT, int NT, typename Left>
__device__ __forceinline__ void mma_fragments(float (&c)[MT][NT][4], const Left& left, const T* b) {
    const uint32_t at = shared_address(b + lane_id() % 16 * PITCH<T, D> + lane_id() / 16 * 8);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        uint32_t a[MT][4];
        left.fragment(a, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, at + (k * 16 * PITCH<T, D> + n * 8) * int(sizeof(T)));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16<T>(c[m][n], a[m], right[0], right[1]);
                mma_m16n8k16<T>(c[m][n + 1], a[m], right[2], right[3]);
            }
        }
    }
}

template <typename T, int D, int MT, int NK, int NT>
__device__ __forceinline__ void mma_AB(float (&c)[MT][NT][4], const RoundedA<T, MT, NK>& p, const T* b) {
    static_assert(NT % 2 == 0 && NK % 2 == 0);
    if constexpr (std::is_same_v<T, float>) {
        const float* b_row = b + lane_id() % 4 * 2;
#pragma unroll
        for (int k = 0; k < NK * 8; k++) {
            Floats<2> left[MT];
#pragma unroll
            for (int m = 0; m < MT; m++) left[m] = p.column(m, k);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Floats<2> right = load_floats<2>(b_row + k * PITCH<T, D> + n * 8);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) c[m][n][i] = fmaf(left[m][i / 2], right[i % 2], c[m][n][i]);
            }
        }
    } else {
        mma_fragments<T, D, NK / 2>(c, p, b);
    }
}

template <typename T, int D, int MT, int NK, int NT>
__device__ __forceinline__ void mma_AB(float (&c)[MT][NT][4], const float (&p)[MT][NK][4], const T* b) {
    mma_AB<T, D>(c, RoundedA<T, MT, NK>(p), b);
}

// DB: columns of B's tile. In fp32, blocks of 32 terms are summed before they are added to c.
template <typename T, int DB, int MT, int NT, int D, bool IN_REGISTERS>
__device__ __forceinline__ void mma_AB(float (&c)[MT][NT][4], const TileA<T, MT, D, IN_REGISTERS>& left, const T* b) {
    static_assert(NT % 2 == 0 && D % 32 == 0);
    if constexpr (std::is_same_v<T, float>) {
        const int lane = lane_id();
        const float *a_row = left.rows + lane / 4 * PITCH<T, D>, *b_row = b + lane % 4 * 2;
#pragma unroll 1
        for (int begin = 0; begin < D; begin += 32) {
            float sum[MT][NT][4] = {};
#pragma unroll 4
            for (int k = begin; k < begin + 32; k++) {
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const float low = a_row[m * 16 * PITCH<T, D> + k], high = a_row[(m * 16 + 8) * PITCH<T, D> + k];
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const Floats<2> right = load_floats<2>(b_row + k * PITCH<T, DB> + n * 8);
                        sum[m][n][0] = fmaf(low, right[0], sum[m][n][0]);
                        sum[m][n][1] = fmaf(low, right[1], sum[m][n][1]);
                        sum[m][n][2] = fmaf(high, right[0], sum[m][n][2]);
                        sum[m][n][3] = fmaf(high, right[1], sum[m][n][3]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < MT * NT * 4; i++)
                c[i / 4 / NT][i / 4 % NT][i % 4] += sum[i / 4 / NT][i / 4 % NT][i % 4];
        }
    } else {
        mma_fragments<T, DB, D / 16>(c, left, b);
    }
}

// Two elements of T times two floats, rounded to T.
template <typename T>
__device__ __forceinline__ uint32_t scale_two(uint32_t x, float low, float high) {
    Pack<T, 2> pack;
    pack.word[0] = x;
    const Floats<2> y = as_floats(pack);
    return pack_two<T>(y[0] * low, y[1] * high);
}

// DA, DB: columns of the tiles; weights [ROWS] in shared memory, or null for ones. In fp32, the ROWS terms are summed
// before they are added to c.
template <typename T, int DA, int DB, int ROWS, int MT, int NT>
__device__ __forceinline__ void mma_AtB(float (&c)[MT][NT][4], const T* a, const T* b, const float* weights) {
    static_assert(NT % 2 == 0 && ROWS % 16 == 0);
    const int lane = lane_id();
    if constexpr (std::is_same_v<T, float>) {
        const float *a_column = a + lane / 4, *b_row = b + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            float sum[NT][4] = {};
#pragma unroll 4
            for (int k = 0; k < ROWS; k++) {
                const float weight = weights ? weights[k] : 1.0f;
                const float low = weight * a_column[k * PITCH<T, DA> + m * 16],
                            high = weight * a_column[k * PITCH<T, DA> + m * 16 + 8];
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const Floats<2> right = load_floats<2>(b_row + k * PITCH<T, DB> + n * 8);
                    sum[n][0] = fmaf(low, right[0], sum[n][0]);
                    sum[n][1] = fmaf(low, right[1], sum[n][1]);
                    sum[n][2] = fmaf(high, right[0], sum[n][2]);
                    sum[n][3] = fmaf(high, right[1], sum[n][3]);
                }
            }
#pragma unroll
            for (int i = 0; i < NT * 4; i++) c[m][i / 4][i % 4] += sum[i / 4][i % 4];
        }
    } else {
        const uint32_t a_at = shared_address(a + (lane % 8 + lane / 16 * 8) * PITCH<T, DA> + lane / 8 % 2 * 8),
                       b_at = shared_address(b + lane % 16 * PITCH<T, DB> + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) {
            uint32_t left[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                ldmatrix_x4_trans(left[m], a_at + (k * 16 * PITCH<T, DA> + m * 16) * int(sizeof(T)));
            if (weights) {
                const Floats<2> first = load_floats<2>(weights + k * 16 + lane % 4 * 2),
                                second = load_floats<2>(weights + k * 16 + 8 + lane % 4 * 2);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        left[m][i] = i < 2 ? scale_two<T>(left[m][i], first[0], first[1])
                                           : scale_two<T>(left[m][i], second[0], second[1]);
            }
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t right[4];
                ldmatrix_x4_trans(right, b_at + (k * 16 * PITCH<T, DB> + n * 8) * int(sizeof(T)));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_m16n8k16<T>(c[m][n], left[m], right[0], right[1]);
                    mma_m16n8k16<T>(c[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }
}

// Stores a warp's accumulators, rounded, to the first `count` rows of global memory, `stride` apart, columns below HS.
// They pass through 16·MT rows of shared memory that no other warp uses, so that global memory is written in whole
// rows.
template <typename T, int D, int MT, int NT>
__device__ __forceinline__ void store_tile(T* dst, int64_t stride, int count, int HS, bool aligned, T* rows,
                                           const float (&c)[MT][NT][4]) {
    constexpr int W = FULL_WIDTH<T>, PACKS = NT * 8 / W;
    const int lane = lane_id();
    __syncwarp();  // all lanes have read the rows
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            T* at = rows + (m * 16 + lane / 4) * PITCH<T, D> + n * 8 + lane % 4 * 2;
            store_floats<2>(at, {c[m][n][0], c[m][n][1]});
            store_floats<2>(at + 8 * PITCH<T, D>, {c[m][n][2], c[m][n][3]});
        }
    }
    __syncwarp();
    if (aligned) {
        for (int i = lane; i < MT * 16 * PACKS; i += WARP) {
            const int row = i / PACKS, column = i % PACKS * W;
            if (row < count && column < HS)
                *reinterpret_cast<uint4*>(dst + row * stride + column) =
                    *reinterpret_cast<const uint4*>(rows + row * PITCH<T, D> + column);
        }
    } else {
        for (int i = lane; i < MT * 16 * NT * 8; i += WARP) {
            const int row = i / (NT * 8), column = i % (NT * 8);
            if (row < count && column < HS) dst[row * stride + column] = rows[row * PITCH<T, D> + column];
        }
    }
}
