// The main loop of the GEMMs on Hopper: out [M, N] = a [M, K]·op(b), bf16, summed in fp32. b is [N, K] or [K, N]. A
// second pair of operands, with an inner dimension of its own, is added to the same sums: it continues the steps of K.
//
// A persistent, warp-specialised kernel in ping-pong. A producer warp loads stages of 64 columns of K by TMA; two
// consumer warpgroups take alternate tiles of 128 x 192 sums, so that one rounds and stores its tile while the other
// multiplies. (dev/ladder/gemm_hopper.cu leads here step by step.)
//
//   tile                 128 x 192 sums, 192 a thread
//   stages               4 of 40 KiB: a 128 x 64, b 192 x 64 or 64 x 192
//   registers            168 at launch; consumers 240, producer 24 (setmaxnreg)
//   shared memory        199,680 to 231,424 bytes: stages 163,840, the epilogue 34,816 to 66,560, barriers 1,024
//   blocks per SM        1 of 384 threads
//
// Why 192 columns: a wgmma of 64 x N x 16 takes N/2 cycles and reads 2 KiB of a and 32·N bytes of b from shared memory,
// whose bandwidth is 128 bytes a cycle, while TMA writes (128 + N)·128 bytes in 4·N cycles. With N = 128 that is 96 +
// 64 bytes a cycle, with N = 192 85 + 53; 192 sums are the most that fit into a thread's registers.
//
// GPT-2 124M, fc forward: [65536, 768]·[3072, 768]ᵀ is 512 x 16 tiles of 12 steps, 62 for each of an H100's 132 blocks.
#pragma once

#include "kernels/cuda/gemm_tiles.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"
#include "kernels/gemm_hopper.h"

namespace hopper_gemm_kernel {

constexpr int BM = int(HOPPER_GEMM_ROWS), BN = int(HOPPER_GEMM_COLUMNS), BK = PANEL_COLUMNS, STAGES = 4;
constexpr int MB = BM / 64, NT = BN / 8;  // a thread's sums: c[MB][NT][4]
constexpr int WARPGROUPS = 2, WARPS = 4 * WARPGROUPS, THREADS = (WARPGROUPS + 1) * WARPGROUP;

struct Inputs {
    CUtensorMap a, b[2];  // [1]: the second half of SwiGLU's b
};

struct Arguments {
    Inputs inputs[2];            // the operands, and the second pair of them
    CUtensorMap out[2], aux[2];  // [1]: the second half of SwiGLU's matrices
    CUtensorMap act;
    const bf16* bias;
    float* column_sums;
    const float* row_offsets;
    float* row_sums;
    int valid_columns;
    float alpha;
    bool stores_out, stores_aux;  // stores_aux: of what precedes an activation function
    float* floats;                // out in fp32, with rows of ld_floats
    int64_t ld_floats;
    int M, N;
    int rows, columns, group;  // tiles of clusters
    int steps, first_steps;    // of both pairs; of the first
};

// A warp's part of a tile of out.
struct Position {
    const Arguments& p;
    int tile_row, column;  // column: the first of the tile
    int warp;
    int earlier_tiles;  // of the warpgroup
    __device__ __forceinline__ int row(int m) const { return tile_row * BM + m * 64 + warp % 4 * 16; }
};

// The epilogue decides how b is read and what else is in shared memory.
template <int CLUSTER_, bool B_MN_MAJOR_, typename Epilogue_>
struct Kernel {
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr bool B_MN_MAJOR = B_MN_MAJOR_;  // b is [K, N]
    using Epilogue = Epilogue_;
    struct Stage {
        alignas(SWIZZLE_ALIGNMENT) unsigned char a[BM * PANEL_ROW_BYTES], b[BN * PANEL_ROW_BYTES];
    };
    struct Shared {
        Stage stages[STAGES];
        typename Epilogue::Shared epilogue;
        MbarrierRing<STAGES> ring;
    };
};

// A block loads its own tile of a and its part of the tile of b, which TMA writes to all blocks of the cluster. k:
// where the step begins.
template <typename K>
__device__ __forceinline__ void load_b(const CUtensorMap (&b)[2], typename K::Stage& stage, int k, int column, int rank,
                                       Mbarrier* full) {
    const auto load = [&](int row, const CUtensorMap& map, int map_column, int map_row) {
        unsigned char* const to = stage.b + row * PANEL_ROW_BYTES;
        if constexpr (K::CLUSTER > 1)
            tma_load_multicast(to, &map, map_column, 0, map_row, full, (1 << K::CLUSTER) - 1);
        else
            tma_load(to, &map, map_column, 0, map_row, full);
    };
    if constexpr (K::B_MN_MAJOR) {
        constexpr int PART = BK / K::CLUSTER;
#pragma unroll
        for (int q = 0; q < BN / PANEL_COLUMNS; q++)
            load(q * BK + rank * PART, b[0], column * BN + q * PANEL_COLUMNS, k + rank * PART);
    } else if constexpr (K::Epilogue::GATED) {  // half of the tile's columns are gates, half ups
        for (int half = rank; half < 2; half += K::CLUSTER) load(half * BN / 2, b[half], k, column * BN / 2);
    } else {
        constexpr int PART = BN / K::CLUSTER;
        load(rank * PART, b[0], k, column * BN + rank * PART);
    }
}

// What a step has beyond an inner dimension TMA fills with zeros, so neither pair need end with a step.
template <typename K>
__device__ __forceinline__ void produce(const Arguments& p, typename K::Shared& shared, Tiles<Arguments> tiles,
                                        int rank) {
    RingPosition<STAGES> at;
    for (int row, column; tiles.next(row, column);)
        for (int step = 0; step < p.steps; step++, at.advance()) {
            const bool second = step >= p.first_steps;
            const Inputs& from = p.inputs[second];
            const int k = (second ? step - p.first_steps : step) * BK;
            shared.ring.wait_empty(at);
            Mbarrier* const full = &shared.ring.full[at.stage];
            typename K::Stage& stage = shared.stages[at.stage];
            mbarrier_arrive_expect_tx(full, sizeof(stage.a) + sizeof(stage.b));
            tma_load(stage.a, &from.a, k, 0, (row * K::CLUSTER + rank) * BM, full);
            load_b<K>(from.b, stage, k, column, rank, full);
        }
}

// c = a·op(b) of a step, added to c if `accumulate`.
template <typename K>
__device__ __forceinline__ void multiply_step(float (&c)[MB][NT][4], typename K::Shared& shared,
                                              RingPosition<STAGES> at, bool accumulate) {
    shared.ring.wait_full(at);
    const typename K::Stage& stage = shared.stages[at.stage];
    const uint32_t a = shared_address(stage.a), b_address = shared_address(stage.b);
    const uint32_t b = K::B_MN_MAJOR ? mn_major_descriptor<BK>(b_address) : k_major_descriptor(b_address);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; k++)
#pragma unroll
        for (int m = 0; m < MB; m++)
            wgmma_k16<bf16, false, K::B_MN_MAJOR>(
                c[m], k_major_descriptor(a + m * 64 * PANEL_ROW_BYTES) + k_major_step<BM>(k),
                b + (K::B_MN_MAJOR ? mn_major_step(k) : k_major_step<BN>(k)), accumulate || k > 0);
    wgmma_commit();
}

// c = a·op(b) for a tile. issued() is called once all wgmma instructions are issued.
//
// A first step of its own (FREES_SUMS) overwrites c, so the compiler sees that c's registers are free while the
// epilogue of the tile before runs. With them it computes several elements at once: GPT-2 124M's gradient with GELU
// takes 13% fewer cycles. But a dense epilogue also takes issue slots and shared memory from the other warpgroup's
// multiplication, which slows down SwiGLU's gradient by 5%: its steps are many, and hide a slow epilogue.
template <typename K, typename Issued>
__device__ __forceinline__ void multiply(float (&c)[MB][NT][4], typename K::Shared& shared, RingPosition<STAGES>& at,
                                         int steps, Issued issued) {
    constexpr int APART = K::Epilogue::FREES_SUMS;
    RingPosition<STAGES> previous;
    if constexpr (APART) {
        multiply_step<K>(c, shared, at, false);
        previous = at;
        at.advance();
    }
#pragma unroll 1
    for (int step = APART; step < steps; step++) {
        multiply_step<K>(c, shared, at, step > 0);
        wgmma_wait<1>();
        if (step > 0) release_in_cluster<K::CLUSTER>(shared.ring, previous);
        previous = at;
        at.advance();
    }
    issued();
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MB; m++) pin_registers(c[m]);
    release_in_cluster<K::CLUSTER>(shared.ring, previous);
}

// The warpgroups take alternate tiles: one multiplies while the other stores.
template <typename K>
__device__ __forceinline__ void consume(const Arguments& p, typename K::Shared& shared, Tiles<Arguments> tiles,
                                        int rank, int warp) {
    const int warpgroup = warp / 4;
    const auto admit_other = [&] { named_barrier_arrive(2 - warpgroup, 2 * WARPGROUP); };
    if (warpgroup == 1) admit_other();
    RingPosition<STAGES> at;
    int number = 0;
    for (int row, column; tiles.next(row, column); number++) {
        if (number % WARPGROUPS == warpgroup) {
            constexpr int COLUMNS = K::Epilogue::GATED ? BN / 2 : BN;
            const typename K::Epilogue epilogue(
                Position{p, row * K::CLUSTER + rank, column * COLUMNS, warp, number / WARPGROUPS}, shared.epilogue);
            epilogue.prepare();
            float c[MB][NT][4];
            named_barrier_sync(1 + warpgroup, 2 * WARPGROUP);
            multiply<K>(c, shared, at, p.steps, admit_other);
            epilogue.run(c);
        } else {
            at.advance(p.steps);
        }
    }
    tma_store_wait();  // the stores read the block's shared memory
}

template <typename K>
__global__ void __launch_bounds__(THREADS, 1) gemm_kernel(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& shared = *reinterpret_cast<typename K::Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(4 * K::CLUSTER);  // the warps of a warpgroup in each block that shares a stage
        shared.epilogue.init();
        mbarrier_init_fence();
    }
    __syncthreads();
    if constexpr (K::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
    const int warp = uniform(threadIdx.x / WARP), rank = K::CLUSTER > 1 ? cluster_rank() : 0;
    const Tiles tiles(p, int(blockIdx.x) / K::CLUSTER, int(gridDim.x) / K::CLUSTER);
    if (warp >= WARPS) {
        setmaxnreg_dec<24>();
        if (warp == WARPS && lane_id() == 0) produce<K>(p, shared, tiles, rank);
        __syncwarp();
    } else {
        setmaxnreg_inc<240>();
        consume<K>(p, shared, tiles, rank, warp);
    }
    if constexpr (K::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }  // no block writes to one that has left
}

}  // namespace hopper_gemm_kernel
