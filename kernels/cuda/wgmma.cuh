// Matrix multiply-accumulate of a warpgroup [wgmma] and its register allocation [setmaxnreg]. sm_90a only.
//
// The accumulators c[n][e] are laid out as in warp_tile.cuh; warp w of the warpgroup holds rows 16w … 16w + 15. wgmma
// runs asynchronously: between wgmma_fence() and wgmma_wait(), neither c nor an A operand in registers may be accessed.
#pragma once

#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/swizzled_tile.cuh"

constexpr int WARPGROUP = 128;  // threads

// The same in all lanes, so that the compiler keeps it, and what is computed from it, in uniform registers.
__device__ __forceinline__ int uniform(int x) {
    return __shfl_sync(ALL_LANES, x, 0);
}

// Changes the registers of each thread; executed by all warps of a warpgroup.
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Orders earlier register accesses before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// The wgmma instructions since the last commit form a group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the last PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may not move accesses to these registers across this point.
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

// Matrix descriptors. The low word holds, in units of 16 bytes, the address from bit 0 and the leading dimension byte
// offset from bit 16. The high word is the same for all: 128-byte swizzle, and a stride of 1024 bytes between groups of
// 8 rows.
constexpr uint32_t DESCRIPTOR_HIGH = (8 * PANEL_ROW_BYTES >> 4) | 1u << 30;
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address, int leading) {
    return (address & 0x3ffff) >> 4 | uint32_t(leading >> 4) << 16;
}
// An operand contracted over the columns of a tile (K-major), from row `address` on. Step k takes 16 columns; its
// descriptor is k_major_step<ROWS>(k) further.
__device__ __forceinline__ uint32_t k_major_descriptor(uint32_t address) {
    return matrix_descriptor(address, 16);
}
template <int ROWS>
__device__ __forceinline__ uint32_t k_major_step(int k) {
    return uint32_t(k / 4 * ROWS * PANEL_ROW_BYTES + k % 4 * 32) >> 4;
}
// An operand contracted over the rows of a tile of ROWS rows (MN-major); its next 64 columns are the next panel. Step k
// takes 16 rows; its descriptor is mn_major_step(k) further.
template <int ROWS>
__device__ __forceinline__ uint32_t mn_major_descriptor(uint32_t address) {
    return matrix_descriptor(address, ROWS * PANEL_ROW_BYTES);
}
__device__ __forceinline__ uint32_t mn_major_step(int k) {
    return uint32_t(k * 16 * PANEL_ROW_BYTES) >> 4;
}

// One instruction, wgmma.m64nNk16: c [64, N] = A·B, or c += A·B if `add`. A is a descriptor (K-major, or MN-major if
// A_MN_MAJOR) or four registers (columns 2t and 2t + 1 of rows g and g + 8, then the same 8 columns further). B is a
// descriptor, K-major, or MN-major if B_MN_MAJOR.
#define WGMMA_4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WGMMA_16(c, n) WGMMA_4(c, n), WGMMA_4(c, n + 1), WGMMA_4(c, n + 2), WGMMA_4(c, n + 3)
#define WGMMA_ACCUMULATORS_32(c) WGMMA_16(c, 0)
#define WGMMA_ACCUMULATORS_64(c) WGMMA_16(c, 0), WGMMA_16(c, 4)
#define WGMMA_ACCUMULATORS_128(c) WGMMA_16(c, 0), WGMMA_16(c, 4), WGMMA_16(c, 8), WGMMA_16(c, 12)
#define WGMMA_ACCUMULATORS_192(c) WGMMA_ACCUMULATORS_128(c), WGMMA_16(c, 16), WGMMA_16(c, 20)
#define WGMMA_ACCUMULATORS_256(c) WGMMA_ACCUMULATORS_192(c), WGMMA_16(c, 24), WGMMA_16(c, 28)
#define WGMMA_FIRST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_FIRST_32 WGMMA_FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_OPERANDS_32 "{" WGMMA_FIRST_16 "}, "
#define WGMMA_OPERANDS_64 "{" WGMMA_FIRST_32 "}, "
#define WGMMA_FIRST_64                                                                                      \
    WGMMA_FIRST_32                                                                                          \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
    "%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_OPERANDS_128 "{" WGMMA_FIRST_64 "}, "
#define WGMMA_FIRST_96                                                                                  \
    WGMMA_FIRST_64                                                                                      \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
    "%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_OPERANDS_192 "{" WGMMA_FIRST_96 "}, "
#define WGMMA_OPERANDS_256                                                                                  \
    "{" WGMMA_FIRST_96                                                                                      \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116" \
    ",%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
#define WGMMA(N, TYPE, SETUP, LEFT, RIGHT, HIGH, ADD, TRANSPOSED, ...)                                                \
    asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n" SETUP "mov.b64 b, {%" #RIGHT \
                 ", %" #HIGH                                                                                          \
                 "};\n"                                                                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " WGMMA_OPERANDS_##N LEFT          \
                 ", b, add, 1, 1, " TRANSPOSED ";\n}\n"                                                               \
                 : WGMMA_ACCUMULATORS_##N(c)                                                                          \
                 : __VA_ARGS__, "r"(b), "n"(DESCRIPTOR_HIGH), "r"(int(add)), "n"(int(B_MN_MAJOR)))

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR, int NT>
__device__ __forceinline__ void wgmma_k16(float (&c)[NT][4], uint32_t a, uint32_t b, bool add) {
    static_assert(NT == 4 || NT == 8 || NT == 16 || NT == 24 || NT == 32);
    constexpr bool BF16 = std::is_same_v<T, bf16>;
#define WGMMA_A(N, TYPE, A, A_T, B, HIGH, ADD, B_T)                                                       \
    WGMMA(N, TYPE, "mov.b64 a, {%" #A ", %" #HIGH "};\n", "a", B, HIGH, ADD, "%" #A_T ", %" #B_T, "r"(a), \
          "n"(int(A_MN_MAJOR)))
    if constexpr (NT == 4 && BF16) WGMMA_A(32, "bf16", 16, 17, 18, 19, 20, 21);
    if constexpr (NT == 4 && !BF16) WGMMA_A(32, "f16", 16, 17, 18, 19, 20, 21);
    if constexpr (NT == 8 && BF16) WGMMA_A(64, "bf16", 32, 33, 34, 35, 36, 37);
    if constexpr (NT == 8 && !BF16) WGMMA_A(64, "f16", 32, 33, 34, 35, 36, 37);
    if constexpr (NT == 16 && BF16) WGMMA_A(128, "bf16", 64, 65, 66, 67, 68, 69);
    if constexpr (NT == 16 && !BF16) WGMMA_A(128, "f16", 64, 65, 66, 67, 68, 69);
    if constexpr (NT == 24 && BF16) WGMMA_A(192, "bf16", 96, 97, 98, 99, 100, 101);
    if constexpr (NT == 24 && !BF16) WGMMA_A(192, "f16", 96, 97, 98, 99, 100, 101);
    if constexpr (NT == 32 && BF16) WGMMA_A(256, "bf16", 128, 129, 130, 131, 132, 133);
    if constexpr (NT == 32 && !BF16) WGMMA_A(256, "f16", 128, 129, 130, 131, 132, 133);
#undef WGMMA_A
}

template <typename T, bool B_MN_MAJOR, int NT>
__device__ __forceinline__ void wgmma_k16(float (&c)[NT][4], const uint32_t (&a)[4], uint32_t b, bool add) {
    static_assert(NT == 4 || NT == 8 || NT == 16);
    constexpr bool BF16 = std::is_same_v<T, bf16>;
#define WGMMA_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
    if constexpr (NT == 4 && BF16) WGMMA(32, "bf16", "", "{%16, %17, %18, %19}", 20, 21, 22, "%23", WGMMA_A);
    if constexpr (NT == 4 && !BF16) WGMMA(32, "f16", "", "{%16, %17, %18, %19}", 20, 21, 22, "%23", WGMMA_A);
    if constexpr (NT == 8 && BF16) WGMMA(64, "bf16", "", "{%32, %33, %34, %35}", 36, 37, 38, "%39", WGMMA_A);
    if constexpr (NT == 8 && !BF16) WGMMA(64, "f16", "", "{%32, %33, %34, %35}", 36, 37, 38, "%39", WGMMA_A);
    if constexpr (NT == 16 && BF16) WGMMA(128, "bf16", "", "{%64, %65, %66, %67}", 68, 69, 70, "%71", WGMMA_A);
    if constexpr (NT == 16 && !BF16) WGMMA(128, "f16", "", "{%64, %65, %66, %67}", 68, 69, 70, "%71", WGMMA_A);
#undef WGMMA_A
}

#undef WGMMA
#undef WGMMA_OPERANDS_256
#undef WGMMA_OPERANDS_192
#undef WGMMA_OPERANDS_128
#undef WGMMA_OPERANDS_64
#undef WGMMA_OPERANDS_32
#undef WGMMA_FIRST_96
#undef WGMMA_FIRST_64
#undef WGMMA_FIRST_32
#undef WGMMA_FIRST_16
#undef WGMMA_ACCUMULATORS_256
#undef WGMMA_ACCUMULATORS_192
#undef WGMMA_ACCUMULATORS_128
#undef WGMMA_ACCUMULATORS_64
#undef WGMMA_ACCUMULATORS_32
#undef WGMMA_16
#undef WGMMA_4

// c = A·Bᵀ as one group. A: 64 rows of a tile of ROWS rows and D columns; B: a tile of 8·NT rows and D columns. (With A
// in registers, loaded once, less shared memory bandwidth would be needed. But ptxas 13.0 then reuses registers that a
// wgmma in a loop still reads.)
template <typename T, int ROWS, int D, int NT>
__device__ __forceinline__ void wgmma_ABt(float (&c)[NT][4], uint32_t a_rows, uint32_t b_tile) {
    const uint32_t a = k_major_descriptor(a_rows), b = k_major_descriptor(b_tile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma_k16<T, false, false>(c, a + k_major_step<ROWS>(k), b + k_major_step<NT * 8>(k), k > 0);
    wgmma_commit();
}

// c = Aᵀ·B as one group. A: a tile of ROWS rows and 64 columns; B: 8·NT columns, from b_column on, of a tile of ROWS
// rows.
template <typename T, int ROWS, int NT>
__device__ __forceinline__ void wgmma_AtB(float (&c)[NT][4], uint32_t a_tile, uint32_t b_tile, int b_column) {
    const uint32_t a = mn_major_descriptor<ROWS>(a_tile),
                   b = mn_major_descriptor<ROWS>(b_tile + swizzled_offset<ROWS>(0, b_column));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) wgmma_k16<T, true, true>(c, a + mn_major_step(k), b + mn_major_step(k), k > 0);
    wgmma_commit();
}

// c += A·B as one group. A: registers (round_to_A); B: a tile of 16·K rows and 8·NT columns.
template <typename T, int NT, int K>
__device__ __forceinline__ void wgmma_AB(float (&c)[NT][4], const uint32_t (&a)[K][4], uint32_t b_tile) {
    const uint32_t b = mn_major_descriptor<K * 16>(b_tile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k++) wgmma_k16<T, true>(c, a[k], b + mn_major_step(k), true);
    wgmma_commit();
}
