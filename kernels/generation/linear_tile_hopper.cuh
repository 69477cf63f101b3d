// The kernel of small-batch GEMMs on Hopper GPUs whose tiles linear_tile.cuh describes: outᵀ = weight · inpᵀ by TMA and
// wgmma, for 16-bit (linear_dense_hopper.cu) and packed weights (linear_packed_hopper.cu). The weights are operand A of
// wgmma, inp is operand B, as TMA brings it. sm_90a only.
//
// A block multiplies 128 rows of weight (with SwiGLU 64 of gate and their 64 of up) by all rows of inp, 64 in each of
// two warpgroups. One more warp loads: a ring of stages, each of 128 bytes of these rows and the columns of inp that
// belong to them. It starts with weights before the previous kernel has ended (pdl.cuh).
//
// Two blocks share an SM, and so does the beginning of the next kernel. Where there are fewer tiles of rows than such
// blocks, a cluster of up to eight divides the columns. Where a block has few stages, the sums have a place of their
// own, and no block waits until all have read their stages.
//
// A row's sums have one order, which follows from C and OC alone.
//
// A kind of weights is a struct Weights:
//
//   Params                          TileParams and what else it needs
//   NT, STAGES, STAGE_BYTES         eights of rows of inp; of the ring
//   COLUMNS, PANELS                 of a stage
//   INP                             where a stage's panels of inp begin, in bytes; the weights lie before them
//   LOAD_BYTES                      of a stage's weights
//   load(stage, p, map, …)          starts the loads of a stage's weights; one thread
//   multiply(sum, stages, …)        sum: the products of the warp's rows in the block's stages
//   outputs(p, first_output, rows)  TileOutputs
#pragma once

#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/generation/linear_tile.cuh"

namespace linear_tile {

constexpr int BLOCK_THREADS = THREADS + WARP;  // and one warp, of which a thread loads
constexpr int RESIDENT = 2;                    // blocks on an SM
constexpr int MAX_BYTES = 113 << 10;           // of dynamic shared memory, beside some mbarriers: half of 228 KiB − 1

constexpr int stages_of(int stage_bytes) {
    return (MAX_BYTES - SWIZZLE_ALIGNMENT - 128) / stage_bytes;
}

struct Maps {
    CUtensorMap weights, scales, inp;
};

template <typename Weights>
__device__ __forceinline__ void expect_stage(int N, Mbarrier* full) {
    mbarrier_arrive_expect_tx(full, Weights::LOAD_BYTES + Weights::PANELS * ((N + 7) / 8 * 8) * PANEL_ROW_BYTES);
}

template <typename Weights>
__device__ __forceinline__ void load_inp(unsigned char* stage, const Maps& maps, int k, Mbarrier* full) {
#pragma unroll
    for (int panel = 0; panel < Weights::PANELS; panel++)
        tma_load(stage + Weights::INP + panel * Weights::NT * 8 * PANEL_ROW_BYTES, &maps.inp,
                 k * Weights::COLUMNS + panel * PANEL_COLUMNS, 0, 0, full);
}

// Waits for the threads of all blocks of the cluster. The barrier need not order their accesses to stages: wgmma has
// ended by then, and what was loaded is in registers.
template <typename T>
__device__ __forceinline__ void meet(const TileParams<T>& p) {
    if (p.log_blocks > 0) {
        cluster_arrive();
        cluster_wait();
    } else
        __syncthreads();
}

// sums_at: where the sums of a cluster's blocks begin, in bytes after the stages; 0: in the place of stages, as one
// block's.
template <typename Weights>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT)
    tile_kernel(const typename Weights::Params p, const __grid_constant__ Maps maps, int sums_at) {
    constexpr int STAGES = Weights::STAGES, STAGE_BYTES = Weights::STAGE_BYTES;
    extern __shared__ unsigned char dynamic[];
    __shared__ MbarrierRing<STAGES> ring;
    __shared__ Mbarrier arrived;
    __shared__ RowNorms norms;
    pdl_launch_dependents();
    unsigned char* const stages =
        dynamic + (SWIZZLE_ALIGNMENT - shared_address(dynamic) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
    const int log = p.log_blocks, rank = int(blockIdx.x) & ((1 << log) - 1);
    const int first_output = int(blockIdx.x) >> log << log_outputs(p);
    // This block's stages of all those of a row.
    const int of_row = int((p.C + Weights::COLUMNS - 1) / Weights::COLUMNS), begin = of_row * rank >> log;
    const int count = (of_row * (rank + 1) >> log) - begin;
    const bool loads = threadIdx.x == THREADS, multiplies = uniform(int(threadIdx.x) / WARP) < WARPS;
    const Sums<Weights::NT> sums(rank, log, p.N, stages + sums_at, &arrived);
    const auto load_weights = [&](unsigned char* stage, int i, Mbarrier* full) {
        expect_stage<Weights>(p.N, full);
        Weights::load(stage, p, maps, first_output, begin + i, full);
    };
    if (loads) {
        ring.init(WARPS);
        sums.expect();
#pragma unroll 1
        for (int i = 0; i < min(count, STAGES); i++) load_weights(stages + i * STAGE_BYTES, i, &ring.full[i]);
        tma_prefetch_descriptor(&maps.inp);
    }
    int rows[2];
    set_rows(rows, p);
    const auto outputs = Weights::outputs(p, first_output, rows);
    meet(p);
    pdl_wait();
    RingPosition<STAGES> at;
    if (loads)
#pragma unroll 1
        for (int i = 0; i < count; i++, at.advance()) {
            unsigned char* const stage = stages + at.stage * STAGE_BYTES;
            ring.wait_empty(at);
            if (i >= STAGES) load_weights(stage, i, &ring.full[at.stage]);
            load_inp<Weights>(stage, maps, begin + i, &ring.full[at.stage]);
        }
    if (multiplies) norms.load(p);
    float sum[Weights::NT][4] = {};
    if (multiplies) Weights::multiply(sum, stages, ring, begin, count, rows);
    float residual[4] = {};
    if (multiplies) outputs.load_residual(residual, p, sums.first);
    if (sums_at == 0) meet(p);  // all stages have been read
    if (multiplies) outputs.store(p, sums, sum, residual, &norms);
}

// maps: those of the weights; the one of inp is made here.
template <typename Weights, typename T>
void launch_tiles(const char* op, const TileParams<T>& tile, const typename Weights::Params& p, Maps maps,
                  Stream stream) {
    constexpr int STAGE_BYTES = Weights::STAGE_BYTES;
    maps.inp = make_tensor_map(op, Heads<const T>{tile.inp, tile.inp_stride, 0}, tile.N, 1, tile.C,
                               int(ceil_div(tile.N, 8)) * 8);
    const int64_t of_block = ceil_div(ceil_div(tile.C, Weights::COLUMNS), tile.blocks()),
                  stages = std::min<int64_t>(of_block, Weights::STAGES);
    const int ring_bytes = SWIZZLE_ALIGNMENT + int(stages) * STAGE_BYTES;
    const bool apart = tile.blocks() > 1 && ring_bytes + SUM_BYTES <= MAX_BYTES;
    const int sums_at = apart ? int(stages) * STAGE_BYTES : 0;
    const int bytes = std::max(ring_bytes, SWIZZLE_ALIGNMENT + sums_at + SUM_BYTES);
    const auto kernel = tile_kernel<Weights>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    launch_pdl_clusters(op, kernel, grid_of(tile.tiles * tile.blocks()), unsigned(tile.blocks()), BLOCK_THREADS,
                        size_t(bytes), stream, p, maps, sums_at);
}

}  // namespace linear_tile
