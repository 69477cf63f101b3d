// Small-batch GEMM of large matrices on Hopper GPUs: up to 64 rows of inp, 16-bit elements and weights. The kernel is
// the one of linear_tile_hopper.cuh; here are its weights: operand A of wgmma from shared memory, as TMA brings it.
//
// linear_hopper.cu loads all that a block multiplies at once; this one streams, so that it takes rows of any length.
//
//   columns of a stage   64
//   stage, KiB           24: weights 16, inp 8 (up to 32 rows: 4)
//   stages               4 (5), two blocks an SM
//   registers            68, 62 (bf16; no spills)
//
// (288 threads; sm_90a, CUDA 13.0.)
//
// H100, floors of an SM for a stage of 64 rows of inp:
//
//   DRAM           16,384 B / (3.0 TB/s / 132)                            720 ns, 1,270 cycles
//   L2 to SM       24 KiB / (5.5 TB/s / 132), where all SMs have a block  590 ns, 1,035 cycles
//   tensor cores   2 warpgroups · 4 wgmma (64 · 64 · 16) · 32             256 cycles
//   shared memory  24 KiB written; 2 · 16 KiB read by wgmma, at 128 B     450 cycles
//
// In flight: two blocks have up to four stages of weights each, 128 KiB; 4.2 TB/s · 700 ns / 132 = 22 KB are needed.
//
// LLaMA 1B, 64 sequences: q, k and v 24 tiles, clusters of 8, 192 blocks of 4 stages; proj 16 tiles, clusters of 8, 128
// blocks of 4 stages; gate and up 128 tiles, clusters of 2, 256 blocks of 16 stages; down 128 blocks of 16 stages.
#include "kernels/generation/linear_tile_hopper.cuh"

namespace {

using namespace linear_tile;

// Row 16w + 8h + g of a tile in shared memory is row g or g + 8 of warp w's fragment. set_rows() says which row of
// weight that is: with SwiGLU eight rows of gate (h = 0) alternate with their eight of up.
template <int NT_, typename T>
struct Dense {
    using Params = TileParams<T>;
    static constexpr int NT = NT_, PANELS = 1, COLUMNS = PANEL_COLUMNS;
    static constexpr int INP = ROWS * PANEL_ROW_BYTES, LOAD_BYTES = INP;
    static constexpr int STAGE_BYTES = INP + 8 * NT * PANEL_ROW_BYTES, STAGES = stages_of(STAGE_BYTES);
    static_assert(STAGE_BYTES % SWIZZLE_ALIGNMENT == 0);

    static __device__ __forceinline__ void load(unsigned char* stage, const Params& p, const Maps& maps,
                                                int first_output, int k, Mbarrier* full) {
        tma_load(stage, &maps.weights, {k * COLUMNS, 0, 0, first_output >> (log_outputs(p) - 3)}, full);
    }
    static __device__ __forceinline__ void multiply(float (&sum)[NT][4], const unsigned char* stages,
                                                    MbarrierRing<STAGES>& ring, int, int count, const int (&)[2]) {
        const int first_row = uniform(int(threadIdx.x) / WARPGROUP) * HALF;
        const uint32_t a = k_major_descriptor(shared_address(stages) + first_row * PANEL_ROW_BYTES),
                       b = k_major_descriptor(shared_address(stages) + INP);
        RingPosition<STAGES> at;
        pin_registers(sum);
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const uint32_t stage = uint32_t(uniform(at.stage)) * (STAGE_BYTES >> 4);
            ring.wait_full(at);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++)
                wgmma_k16<T, false, false>(sum, a + stage + k_major_step<ROWS>(k), b + stage + k_major_step<8 * NT>(k),
                                           true);
            wgmma_commit();
            wgmma_wait<0>();
            pin_registers(sum);
            ring.release_and_advance(at);
        }
    }
    static __device__ __forceinline__ TileOutputs<T> outputs(const Params& p, int first_output, const int (&rows)[2]) {
        return {p, first_output, rows};
    }
};

// The rows of weight in eights: [pairs of eights][2][8][C].
template <typename T>
CUtensorMap map_of_weights(const char* op, const TileParams<T>& p) {
    const bool gated = is_gated(p.activation);
    const int64_t eight = 8 * p.weight_stride, second = gated ? p.columns * p.weight_stride : eight;
    return encode_tensor_map<T, 4>(op, p.weight, {p.C, 8, 2, p.OC / 16},
                                   {p.weight_stride, second, gated ? eight : 2 * eight}, {PANEL_COLUMNS, 8, 2, 8},
                                   CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int NT, typename T>
void launch_dense(const char* op, const TileParams<T>& p, Stream stream) {
    Maps maps{};
    maps.weights = map_of_weights(op, p);
    launch_tiles<Dense<NT, T>, T>(op, p, p, maps, stream);
}

}  // namespace

bool dense_hopper_takes(int64_t C, int64_t OC) {
    // The library's GEMM reads the matrix of a head as fast as a copy.
    return is_hopper() && C > 0 && C % 8 == 0 && OC % 16 == 0 && ceil_div(OC, ROWS) <= RESIDENT * num_sms();
}

template <typename T>
bool linear_dense_hopper(const char* op, const LinearParams<T>& layer, const UnscaledParams<T>& unscaled,
                         Stream stream) {
    if (!dense_hopper_takes(layer.C, layer.OC) || !layer.aligned || layer.N > SMALL_BATCH_MAX_N ||
        (layer.norm_weight && !unscaled.parts))
        return false;
    const TileParams<T> p = tile_params(layer, unscaled, PANEL_COLUMNS, RESIDENT);
    p.N <= 32 ? launch_dense<4>(op, p, stream) : launch_dense<8>(op, p, stream);
    return true;
}

template bool linear_dense_hopper(const char*, const LinearParams<bf16>&, const UnscaledParams<bf16>&, Stream);
template bool linear_dense_hopper(const char*, const LinearParams<fp16>&, const UnscaledParams<fp16>&, Stream);
