// Products of small matrices by one warp, the sums in registers: what attention is made of.
//
// A warp's sums c [16·MT, 8·NT] are laid out as mma.sync's m16n8 tiles lay them out: of tile (m, n) lane 4g + t holds
//   c[m][n][0..1] = (row 16m + g,     columns 8n + 2t, 8n + 2t + 1)
//   c[m][n][2..3] = (row 16m + g + 8, the same columns).
// Operands in shared memory are tiles of rows of D elements, PITCH apart:
//   product_nt   c += A·Bᵀ   A [16·MT, D], B [8·NT, D] in shared memory
//   product_nn   c += P·B    P [16·MT, 8·NK] the sums of an earlier product, rounded to T; B [8·NK, ≥ 8·NT] in shared
//                            memory. Or A·B, A [16·MT, D] in shared memory
//   product_tn   c += Aᵀ·B   A [ROWS, ≥ 16·MT], B [ROWS, ≥ 8·NT] in shared memory, rows of A weighted
// The layout of the sums is that of mma.sync's left operand too, so P never leaves the registers (FlashAttention-2,
// Dao 2023). bf16 and fp16 run on tensor cores (mma.sync.m16n8k16, sm_80), sums in fp32. fp32 takes the same layout
// with fused multiply-adds: exact fp32, at the speed of the ordinary units.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

// Elements from one row of a tile to the next: 16 bytes more than the row, an odd multiple of 16, so that the same
// column of 8 rows lies in 8 different groups of banks.
template <typename T, int D>
constexpr int PITCH = D + FULL_WIDTH<T>;

__device__ __forceinline__ int lane_id() {
    return threadIdx.x % WARP;
}

constexpr float LOG2E = 1.44269504f;

// 2^x to 2 units in the last place; 0 for −∞.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over the four lanes that have a row of sums.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// --- copies from global to shared memory that don't wait

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, or zeros where not inside; src is then not read.
__device__ __forceinline__ void copy_async_16(void* dst, const void* src, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(void* dst, const void* src, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

// Waits for this thread's own copies; a barrier makes those of the others visible.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
// The copies since the last commit form a group; all but the last PENDING groups have landed.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_for_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A tile of ROWS rows from rows `stride` apart; zeros from row `count` and from column HS on. Asynchronous where rows
// are aligned to 16 bytes.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(T* tile, const T* src, int64_t stride, int count, int HS, bool aligned) {
    constexpr int W = FULL_WIDTH<T>, PACKS = D / W;
    if (aligned) {
#pragma unroll
        for (int i = 0; i < (ROWS * PACKS + THREADS - 1) / THREADS; i++) {
            const int pack = i * THREADS + int(threadIdx.x), row = pack / PACKS, column = pack % PACKS * W;
            if (ROWS * PACKS % THREADS != 0 && row >= ROWS) break;
            const bool inside = row < count && column < HS;
            copy_async_16(tile + row * PITCH<T, D> + column, inside ? src + row * stride + column : src, inside);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
            const int row = i / D, column = i % D;
            tile[row * PITCH<T, D> + column] = row < count && column < HS ? src[row * stride + column] : T{};
        }
    }
}

// --- tensor cores

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Two floats rounded to T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// --- the products

// The left operand of product_nt: 16·MT rows of a tile. IN_REGISTERS: read once and kept, for tensor cores.
template <typename T, int MT, int D, bool IN_REGISTERS>
class LeftTile {
  public:
    __device__ __forceinline__ explicit LeftTile(const T* rows_) : rows(rows_) {
        if constexpr (!std::is_same_v<T, float>) {
            address = shared_address(rows + lane_id() % 16 * PITCH<T, D> + lane_id() / 16 * 8);
            if constexpr (IN_REGISTERS) {
#pragma unroll
                for (int k = 0; k < D / 16; k++) read(kept[k], k);
            }
        }
    }
    // Columns 16k … 16k + 15 as mma.sync wants them.
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
        for (int m = 0; m < MT; m++) load_matrix(a[m], address + (m * 16 * PITCH<T, D> + k * 16) * int(sizeof(T)));
    }
    uint32_t address = 0;
    uint32_t kept[IN_REGISTERS ? D / 16 : 1][MT][4];
};

// K: in fp32, how many of the columns are multiplied.
template <typename T, int MT, int NT, int D, bool IN_REGISTERS, int K = D>
__device__ __forceinline__ void product_nt(float (&c)[MT][NT][4], const LeftTile<T, MT, D, IN_REGISTERS>& left,
                                           const T* b) {
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
                load_matrix(right, at + (n * 8 * PITCH<T, D> + k * 16) * int(sizeof(T)));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma<T>(c[m][n], a[m], right[0], right[1]);
                    mma<T>(c[m][n + 1], a[m], right[2], right[3]);
                }
            }
        }
    }
}

// Sums of an earlier product, rounded to T, as a left operand: in 16 bits half as many registers.
template <typename T, int MT, int NK>
class RoundedSums {
  public:
    RoundedSums() = default;
    __device__ __forceinline__ explicit RoundedSums(const float (&p)[MT][NK][4]) {
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
    // Columns 16k … 16k + 15 as mma.sync wants them.
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

// c += A·B on tensor cores, A from left.fragment(a, k), k < STEPS; D: the row of B's tile.
template <typename T, int D, int STEPS, int MT, int NT, typename Left>
__device__ __forceinline__ void multiply_rows(float (&c)[MT][NT][4], const Left& left, const T* b) {
    const uint32_t at = shared_address(b + lane_id() % 16 * PITCH<T, D> + lane_id() / 16 * 8);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        uint32_t a[MT][4];
        left.fragment(a, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t right[4];
            load_matrix_transposed(right, at + (k * 16 * PITCH<T, D> + n * 8) * int(sizeof(T)));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<T>(c[m][n], a[m], right[0], right[1]);
                mma<T>(c[m][n + 1], a[m], right[2], right[3]);
            }
        }
    }
}

template <typename T, int D, int MT, int NK, int NT>
__device__ __forceinline__ void product_nn(float (&c)[MT][NT][4], const RoundedSums<T, MT, NK>& p, const T* b) {
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
        multiply_rows<T, D, NK / 2>(c, p, b);
    }
}

template <typename T, int D, int MT, int NK, int NT>
__device__ __forceinline__ void product_nn(float (&c)[MT][NT][4], const float (&p)[MT][NK][4], const T* b) {
    product_nn<T, D>(c, RoundedSums<T, MT, NK>(p), b);
}

// DB: the row of B's tile. In fp32 sums are made in blocks of 32 terms.
template <typename T, int DB, int MT, int NT, int D, bool IN_REGISTERS>
__device__ __forceinline__ void product_nn(float (&c)[MT][NT][4], const LeftTile<T, MT, D, IN_REGISTERS>& left,
                                           const T* b) {
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
        multiply_rows<T, DB, D / 16>(c, left, b);
    }
}

// Two numbers of T times two floats, rounded again.
template <typename T>
__device__ __forceinline__ uint32_t scale_two(uint32_t x, float low, float high) {
    Pack<T, 2> pack;
    pack.word[0] = x;
    const Floats<2> y = as_floats(pack);
    return pack_two<T>(y[0] * low, y[1] * high);
}

// DA, DB: the rows of the tiles; weights [ROWS] in shared memory, or null for ones. In fp32 the sum over ROWS is made
// by itself before it is added.
template <typename T, int DA, int DB, int ROWS, int MT, int NT>
__device__ __forceinline__ void product_tn(float (&c)[MT][NT][4], const T* a, const T* b, const float* weights) {
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
                load_matrix_transposed(left[m], a_at + (k * 16 * PITCH<T, DA> + m * 16) * int(sizeof(T)));
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
                load_matrix_transposed(right, b_at + (k * 16 * PITCH<T, DB> + n * 8) * int(sizeof(T)));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma<T>(c[m][n], left[m], right[0], right[1]);
                    mma<T>(c[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }
}

// --- results

// A warp's sums, rounded, to rows of global memory `stride` apart, of which there are `count`, columns below HS. They
// pass through 16·MT rows of shared memory that no other warp uses, so that memory is written in whole rows.
template <typename T, int D, int MT, int NT>
__device__ __forceinline__ void store_tile(T* dst, int64_t stride, int count, int HS, bool aligned, T* rows,
                                           const float (&c)[MT][NT][4]) {
    constexpr int W = FULL_WIDTH<T>, PACKS = NT * 8 / W;
    const int lane = lane_id();
    __syncwarp();  // the rows may have been read
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
