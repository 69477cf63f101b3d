// What kernels for Hopper GPUs (sm_90a) are made of, one function for each PTX instruction: barriers in shared memory,
// tensor copies (TMA), products of a warpgroup (wgmma), registers moved between warpgroups. The names in brackets are
// the sections of the PTX ISA manual.
//
// A tile in shared memory is [columns / 64][rows][64] numbers of 16 bits: chunks of 64 columns, in which a row takes
// 128 bytes whose eight pieces of 16 bytes are permuted by the row's last three bits (128-byte swizzle). Tensor copies
// write it, products read it, both without bank conflicts. A chunk starts at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>

#include "kernels/cuda/warp_tile.cuh"

constexpr int WARPGROUP = 128;
constexpr int CHUNK = 64;             // columns
constexpr int CHUNK_ROW = CHUNK * 2;  // bytes
constexpr int SWIZZLE_ALIGNMENT = 1024;

// Where element (row, column) of a tile of ROWS rows lies, in bytes.
template <int ROWS>
__device__ __forceinline__ int tile_offset(int row, int column) {
    const int piece = column % CHUNK / 8;
    return column / CHUNK * ROWS * CHUNK_ROW + row * CHUNK_ROW + ((piece ^ row % 8) * 8 + column % 8) * 2;
}

// --- barriers [Parallel Synchronization and Communication Instructions: mbarrier]
// A phase ends when `arrivals` have arrived and the bytes expected have been written. Phases are waited for by their
// parity: 0 for the first, 1 for the second, 0 for the third.

using Barrier = uint64_t;  // in shared memory

__device__ __forceinline__ void barrier_init(Barrier* b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to tensor copies; then __syncthreads().
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(Barrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}

// Arrives once this thread's copy_async_4 and copy_async_16 so far have landed [cp.async.mbarrier.arrive]; one of the
// barrier's arrivals.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void barrier_wait(Barrier* b, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n"
        "}\n" ::"r"(shared_address(b)),
        "r"(parity)
        : "memory");
}

// A place in a ring of stages and the parity of its current use; both sides walk the ring in the same order.
template <int STAGES>
struct RingPosition {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A barrier of some warps by its number, 1 to 15, all of whose threads sync or arrive [bar, barrier].
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- tensor copies [Data Movement and Conversion Instructions: cp.async.bulk.tensor]

// A box [rows, 1 head, 64 columns] of a tensor [tokens, heads, columns] to a tile's chunk; outside the tensor: zeros.
// One thread asks; the barrier counts the bytes.
__device__ __forceinline__ void tma_load(void* chunk, const CUtensorMap* map, int column, int head, int token,
                                         Barrier* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared_address(chunk)),
        "l"(map), "r"(column), "r"(head), "r"(token), "r"(shared_address(b))
        : "memory");
}

// The other way, as far as the tensor reaches. Of a thread's last copies, wait_stored() until the chunks have been
// read.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, int column, int head, int token, const void* chunk) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(head), "r"(token), "r"(shared_address(chunk))
                 : "memory");
}
__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_stored() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Adds `bytes` (a multiple of 16) of numbers in shared memory to those at `to`, both aligned to 16 bytes, in whichever
// order such additions arrive; a store like the others [cp.reduce.async.bulk].
__device__ __forceinline__ void add_bulk(float* to, const void* from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Shared memory that this thread has written may now be read by products and tensor copies [Async proxy].
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- copies of consecutive bytes [cp.async.bulk]: both addresses and the length are multiples of 16. One thread asks;
// the barrier counts the bytes.

__device__ __forceinline__ void copy_bytes(void* shared, const void* global, int bytes, Barrier* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}

// --- registers [Miscellaneous Instructions: setmaxnreg]: of each thread, by all warps of a warpgroup

template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// --- products of a warpgroup [Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions]
//
// c[n][e] is laid out as in warp_tile.cuh, warp w of the warpgroup holding rows 16w … 16w + 15. Products are issued and
// run on: between wgmma_fence() and wgmma_wait() nobody may touch c or a left operand in registers.

// Earlier writes of registers are seen by the products that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// The products since the last commit form a group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All groups but the last PENDING are complete.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may not move accesses to these registers across.
template <typename R, int N, int M>
__device__ __forceinline__ void pin_registers(R (&x)[N][M]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < M; j++) {
            if constexpr (std::is_same_v<R, float>)
                asm volatile("" : "+f"(x[i][j])::"memory");
            else
                asm volatile("" : "+r"(x[i][j])::"memory");
        }
}

// Matrices in shared memory as products see them [Matrix Descriptor]: the low word of a descriptor, in units of 16
// bytes from bit 0 the address, from bit 16 the distance in the "leading" dimension. The high word is the same for all:
// 1024 bytes from 8 rows to the next 8, 128-byte swizzle.
constexpr uint32_t DESCRIPTOR_HIGH = (8 * CHUNK_ROW >> 4) | 1u << 30;
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address, int leading) {
    return (address & 0x3ffff) >> 4 | uint32_t(leading >> 4) << 16;
}
// Rows of a tile, from `address` on, contracted over their columns ("K-major"). The 16 columns of step k of a
// contraction lie step_columns<ROWS>(k) further.
__device__ __forceinline__ uint32_t rows_descriptor(uint32_t address) {
    return matrix_descriptor(address, 16);
}
template <int ROWS>
__device__ __forceinline__ uint32_t step_columns(int k) {
    return uint32_t(k / 4 * ROWS * CHUNK_ROW + k % 4 * 32) >> 4;
}
// A tile of ROWS rows, contracted over its rows ("MN-major"): the next 64 columns lie a chunk further. The 16 rows of
// step k lie step_rows(k) further.
template <int ROWS>
__device__ __forceinline__ uint32_t columns_descriptor(uint32_t address) {
    return matrix_descriptor(address, ROWS * CHUNK_ROW);
}
__device__ __forceinline__ uint32_t step_rows(int k) {
    return uint32_t(k * 16 * CHUNK_ROW) >> 4;
}

// One instruction: c [64, N] = A·B (+ c where `add`), contracted over 16. A is a descriptor of 64 rows (A_COLUMNS: of
// 64 columns, contracted over their rows) or four registers (columns 2t, 2t + 1 of rows g and g + 8, then the same 8
// columns on); B has N rows to be contracted over their columns, or, B_COLUMNS, N columns to be contracted over their
// rows.
#define WGMMA_4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WGMMA_16(c, n) WGMMA_4(c, n), WGMMA_4(c, n + 1), WGMMA_4(c, n + 2), WGMMA_4(c, n + 3)
#define WGMMA_SUMS_32(c) WGMMA_16(c, 0)
#define WGMMA_SUMS_64(c) WGMMA_16(c, 0), WGMMA_16(c, 4)
#define WGMMA_SUMS_128(c) WGMMA_16(c, 0), WGMMA_16(c, 4), WGMMA_16(c, 8), WGMMA_16(c, 12)
#define WGMMA_FIRST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_FIRST_32 WGMMA_FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_32 "{" WGMMA_FIRST_16 "}, "
#define WGMMA_NAMES_64 "{" WGMMA_FIRST_32 "}, "
#define WGMMA_NAMES_128                                                                                     \
    "{" WGMMA_FIRST_32                                                                                      \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
    "%57,%58,%59,%60,%61,%62,%63}, "
#define WGMMA(N, TYPE, SETUP, LEFT, RIGHT, HIGH, ADD, TRANSPOSED, ...)                                                \
    asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n" SETUP "mov.b64 b, {%" #RIGHT \
                 ", %" #HIGH                                                                                          \
                 "};\n"                                                                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " WGMMA_NAMES_##N LEFT             \
                 ", b, add, 1, 1, " TRANSPOSED ";\n}\n"                                                               \
                 : WGMMA_SUMS_##N(c)                                                                                  \
                 : __VA_ARGS__, "r"(b), "n"(DESCRIPTOR_HIGH), "r"(int(add)), "n"(int(B_COLUMNS)))

template <typename T, bool A_COLUMNS, bool B_COLUMNS, int NT>
__device__ __forceinline__ void product_step(float (&c)[NT][4], uint32_t a, uint32_t b, bool add) {
    static_assert(NT == 4 || NT == 8 || NT == 16);
    constexpr bool BF16 = std::is_same_v<T, bf16>;
#define WGMMA_A(N, TYPE, A, A_T, B, HIGH, ADD, B_T)                                                       \
    WGMMA(N, TYPE, "mov.b64 a, {%" #A ", %" #HIGH "};\n", "a", B, HIGH, ADD, "%" #A_T ", %" #B_T, "r"(a), \
          "n"(int(A_COLUMNS)))
    if constexpr (NT == 4 && BF16) WGMMA_A(32, "bf16", 16, 17, 18, 19, 20, 21);
    if constexpr (NT == 4 && !BF16) WGMMA_A(32, "f16", 16, 17, 18, 19, 20, 21);
    if constexpr (NT == 8 && BF16) WGMMA_A(64, "bf16", 32, 33, 34, 35, 36, 37);
    if constexpr (NT == 8 && !BF16) WGMMA_A(64, "f16", 32, 33, 34, 35, 36, 37);
    if constexpr (NT == 16 && BF16) WGMMA_A(128, "bf16", 64, 65, 66, 67, 68, 69);
    if constexpr (NT == 16 && !BF16) WGMMA_A(128, "f16", 64, 65, 66, 67, 68, 69);
#undef WGMMA_A
}

template <typename T, bool B_COLUMNS, int NT>
__device__ __forceinline__ void product_step(float (&c)[NT][4], const uint32_t (&a)[4], uint32_t b, bool add) {
    static_assert(NT == 8 || NT == 16);
    constexpr bool BF16 = std::is_same_v<T, bf16>;
#define WGMMA_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
    if constexpr (NT == 8 && BF16) WGMMA(64, "bf16", "", "{%32, %33, %34, %35}", 36, 37, 38, "%39", WGMMA_A);
    if constexpr (NT == 8 && !BF16) WGMMA(64, "f16", "", "{%32, %33, %34, %35}", 36, 37, 38, "%39", WGMMA_A);
    if constexpr (NT == 16 && BF16) WGMMA(128, "bf16", "", "{%64, %65, %66, %67}", 68, 69, 70, "%71", WGMMA_A);
    if constexpr (NT == 16 && !BF16) WGMMA(128, "f16", "", "{%64, %65, %66, %67}", 68, 69, 70, "%71", WGMMA_A);
#undef WGMMA_A
}

#undef WGMMA
#undef WGMMA_NAMES_128
#undef WGMMA_NAMES_64
#undef WGMMA_NAMES_32
#undef WGMMA_FIRST_32
#undef WGMMA_FIRST_16
#undef WGMMA_SUMS_128
#undef WGMMA_SUMS_64
#undef WGMMA_SUMS_32
#undef WGMMA_16
#undef WGMMA_4

// c = (64 rows of a tile of ROWS rows and D columns)·(the 8·NT rows of another)ᵀ; a group of its own. (As registers,
// read once, the left rows would save shared memory's bandwidth, but ptxas 13.0 lets others have registers that a
// product in a loop still needs.)
template <typename T, int ROWS, int D, int NT>
__device__ __forceinline__ void wgmma_ABt(float (&c)[NT][4], uint32_t left_rows, uint32_t tile) {
    const uint32_t left = rows_descriptor(left_rows), right = rows_descriptor(tile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        product_step<T, false, false>(c, left + step_columns<ROWS>(k), right + step_columns<NT * 8>(k), k > 0);
    wgmma_commit();
}

// c = (a tile of ROWS rows and 64 columns)ᵀ·(8·NT columns, from column `column` on, of another of ROWS rows); a group
// of its own.
template <typename T, int ROWS, int NT>
__device__ __forceinline__ void wgmma_AtB(float (&c)[NT][4], uint32_t left_tile, uint32_t tile, int column) {
    const uint32_t left = columns_descriptor<ROWS>(left_tile),
                   right = columns_descriptor<ROWS>(tile + tile_offset<ROWS>(0, column));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        product_step<T, true, true>(c, left + step_rows(k), right + step_rows(k), k > 0);
    wgmma_commit();
}

// The sums of a product, rounded to T, as the left operand of another.
template <typename T, int NT>
__device__ __forceinline__ void round_to_left(uint32_t (&p)[NT / 2][4], const float (&c)[NT][4]) {
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        p[k][0] = pack_two<T>(c[2 * k][0], c[2 * k][1]);
        p[k][1] = pack_two<T>(c[2 * k][2], c[2 * k][3]);
        p[k][2] = pack_two<T>(c[2 * k + 1][0], c[2 * k + 1][1]);
        p[k][3] = pack_two<T>(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

// The same numbers into the warp's 16 rows of a tile of ROWS rows [stmatrix].
template <int ROWS, int K>
__device__ __forceinline__ void store_rounded(unsigned char* tile, int first_row, const uint32_t (&p)[K][4]) {
    const int lane = lane_id(), row = first_row + lane % 16;
#pragma unroll
    for (int k = 0; k < K; k++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(tile + tile_offset<ROWS>(row, k * 16 + lane / 16 * 8))),
                     "r"(p[k][0]), "r"(p[k][1]), "r"(p[k][2]), "r"(p[k][3])
                     : "memory");
}

// c += p · (a tile of 16·K rows and 8·NT columns); a group of its own.
template <typename T, int NT, int K>
__device__ __forceinline__ void wgmma_AB(float (&c)[NT][4], const uint32_t (&p)[K][4], uint32_t tile) {
    const uint32_t right = columns_descriptor<K * 16>(tile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k++) product_step<T, true>(c, p[k], right + step_rows(k), true);
    wgmma_commit();
}

// Rows of sums on their way to global memory: 16 of them, of one head, for a warp.
template <typename T>
struct Rows {
    const CUtensorMap* map;  // boxes of 16 tokens
    T* data;                 // the first row; the others are `stride` apart
    int64_t stride;
    int head, token;  // of the first row in the map
    int begin, end;   // those that exist, of 0 … 16
    int columns;      // a multiple of 8
};

// c, rounded, by way of the warp's rows of a tile of ROWS rows in shared memory.
template <int ROWS, int NT, typename T>
__device__ __forceinline__ void store_rows(const Rows<T>& to, unsigned char* tile, int first_row,
                                           const float (&c)[NT][4]) {
    const int lane = lane_id();
    if (lane == 0) wait_stored();
    __syncwarp();  // the tile's rows may be written
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<uint32_t*>(tile +
                                         tile_offset<ROWS>(first_row + lane / 4 + half * 8, n * 8 + lane % 4 * 2)) =
                pack_two<T>(c[n][2 * half], c[n][2 * half + 1]);
    if (to.begin <= 0 && to.end >= 16) {
        fence_async_proxy();
        __syncwarp();
        if (lane > 0) return;
#pragma unroll
        for (int chunk = 0; chunk < NT * 8 / CHUNK; chunk++)
            tma_store(to.map, chunk * CHUNK, to.head, to.token, tile + tile_offset<ROWS>(first_row, chunk * CHUNK));
        commit_stores();
        return;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * NT; i += WARP) {
        const int row = i / NT, column = i % NT * 8;
        if (row >= to.begin && row < to.end && column < to.columns)
            *reinterpret_cast<uint4*>(to.data + row * to.stride + column) =
                *reinterpret_cast<const uint4*>(tile + tile_offset<ROWS>(first_row + row, column));
    }
}
