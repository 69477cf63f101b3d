// Small-batch GEMM of packed weights on Hopper GPUs: 3 to 64 rows of inp, 16-bit elements. The kernel is the one of
// linear_tile_hopper.cuh; here are its weights: operand A of wgmma from registers, so that converted weights never pass
// through shared memory.
//
// A lane loads two neighbouring codes at a time, those of a register of wgmma's fragment of A, and converts them
// (packed_codes.cuh). With fp8 it converts a group of 32 columns while wgmma multiplies the group before, that of the
// stage before too. With Int8 and Int4 a group has sums of its own, which are added with its scale; other warpgroups of
// the SM multiply meanwhile.
//
//                                fp8      int8     int4
//   columns of a stage           128      128      256
//   stage, KiB                   32       34       50       codes 16, inp 16 or 32, scales 2
//   stages                       3        3        2
//   shared memory of an SM, KiB  194      206      202      two blocks, each with 1 KiB for alignment
//   registers                    79       96       96       (bf16; int8: 24 bytes of stack)
//
// (64 rows of inp; 288 threads; sm_90a, CUDA 13.0. Up to 32 rows: stages of 24, 26 and 34 KiB, at most 77 registers.)
//
// H100, floors of an SM for a stage of fp8 (16 KiB of codes, 64 rows of inp), of 1,270 cycles at 1.755 GHz:
//
//   DRAM             16,384 B / (3.0 TB/s / 132)                                  720 ns, 1,270 cycles
//   L2 to SM         32 KiB / (5.5 TB/s / 132), where all SMs have a block        790 ns, 1,380 cycles
//   tensor cores     2 warpgroups · 8 wgmma (64 · 64 · 16) · 32                   512 cycles
//   shared memory    256 loads of codes; 2 · 16 KiB of inp for wgmma and 32 KiB
//                    written, at 128 B a cycle                                    768 cycles
//   conversion       16,384 · 2 instructions / 128, and half as many others       390 cycles
//
// In flight: 4.2 TB/s · 700 ns / 132 = 22 KB of codes an SM are needed. Two blocks have two stages each on their way
// while they multiply the third: 64 KiB; one block 32 KiB.
//
// LLaMA 1B, 64 sequences, fp8: q, k and v 24 tiles, clusters of 8, 192 blocks; proj and down 16 tiles, clusters of 8;
// gate and up 128 tiles, clusters of 2, 256 blocks of the 264 that run at once; the head 1,002 blocks.
#include "kernels/generation/linear_packed_tile.cuh"
#include "kernels/generation/linear_tile_hopper.cuh"

namespace {

using namespace linear_tile;

constexpr int SCALE_COLUMNS = 8;  // fp16 scales of a row in a stage: 16 bytes, the least that TMA copies

// Offsets of a stage's parts in bytes, for up to 8·NT rows of inp.
template <Packing P, int NT_>
struct Tile {
    static constexpr int NT = NT_, BATCH = 8 * NT;
    static constexpr bool ROW_SCALES = P == Packing::Fp8;
    static constexpr int GROUPS = PANEL_ROW_BYTES / group_bytes(P), COLUMNS = GROUPS * int(PACKED_GROUP);
    static constexpr int PANELS = COLUMNS / PANEL_COLUMNS, INP = ROWS * PANEL_ROW_BYTES;
    static constexpr int SCALES = INP + PANELS * BATCH * PANEL_ROW_BYTES;
    static constexpr int SCALE_BYTES = ROW_SCALES ? 0 : ROWS * SCALE_COLUMNS * 2;
    static constexpr int STAGE_BYTES = SCALES + SCALE_BYTES, STAGES = stages_of(STAGE_BYTES);
    static constexpr int LOAD_BYTES = INP + SCALE_BYTES;
    static_assert(STAGE_BYTES % SWIZZLE_ALIGNMENT == 0);
};

// The lane's codes of a group as fragments of A, [k16][register]. lane: the address of its first two in vector 0 of the
// first of its rows; a row's vectors of 16 bytes are swizzled. between: how much further its second row is. Int4 has
// both fragments in the same bytes.
template <Packing P, typename T>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[2][4], uint32_t lane, uint32_t between, int group) {
    constexpr int VECTORS = group_bytes(P) / 16;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t from =
                (lane ^ uint32_t((group * VECTORS + v) * 16)) + (i % 2 ? between : 0) + uint32_t(i / 2 * 8);
            uint16_t two;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(from) : "memory");
            a[v][i] = neighbour_codes<P, T>(two, 0);
            if (VECTORS == 1) a[1][i] = neighbour_codes<P, T>(two, 1);
        }
}

// Where a lane's codes are in shared memory: of its first row in vector 0 of a stage, and how far its second row is.
struct LaneCodes {
    uint32_t first, between;
};

// sum += the products of the warp's 16 rows of weight in a stage, which is the k-th of the row. With fp8 the fragments
// of its first group are in a already, and load_next() loads those of the next stage while wgmma multiplies the last.
template <Packing P, typename Tile, typename T, int FRAGMENTS, typename F>
__device__ __forceinline__ void multiply_stage(float (&sum)[Tile::NT][4], uint32_t (&a)[FRAGMENTS][2][4],
                                               const unsigned char* stage, const LaneCodes& lane, int k, F load_next) {
    constexpr bool ROW_SCALES = Tile::ROW_SCALES;
    const uint32_t codes = shared_address(stage) + lane.first,
                   b = uint32_t(uniform(int(k_major_descriptor(shared_address(stage) + Tile::INP))));
    const uint32_t row = lane.first / PANEL_ROW_BYTES, between = lane.between / PANEL_ROW_BYTES;
    const auto* const scales =
        reinterpret_cast<const fp16*>(stage + Tile::SCALES) + row * SCALE_COLUMNS + k * Tile::GROUPS % SCALE_COLUMNS;
    float y[Tile::NT][4];  // the sums of a group with a scale of its own; wgmma sets them
    if (FRAGMENTS == 1) load_fragments<P, T>(a[0], codes, lane.between, 0);
    pin_registers(sum);
#pragma unroll
    for (int group = 0; group < Tile::GROUPS; group++) {
        const int now = group % FRAGMENTS, next = (group + 1) % FRAGMENTS;
        pin_registers(a[now]);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t columns = b + k_major_step<Tile::BATCH>(2 * group + half);
            if constexpr (ROW_SCALES)
                wgmma_k16<T, false>(sum, a[now][half], columns, true);
            else
                wgmma_k16<T, false>(y, a[now][half], columns, half > 0);
        }
        wgmma_commit();
        wgmma_wait<FRAGMENTS - 1>();
        pin_registers(a[next]);  // which have been read
        if constexpr (!ROW_SCALES) {
            pin_registers(y);
            const float scale[2] = {as_float(scales[group]), as_float(scales[between * SCALE_COLUMNS + group])};
#pragma unroll
            for (int j = 0; j < Tile::NT; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[j][i] = fmaf(scale[i / 2], y[j][i], sum[j][i]);
        }
        if (group + 1 < Tile::GROUPS)
            load_fragments<P, T>(a[next], codes, lane.between, group + 1);
        else
            load_next();
    }
    wgmma_wait<0>();
    pin_registers(a[FRAGMENTS - 1]);
    pin_registers(sum);
}

// sum: the products of the warp's rows in `count` stages, which are those of a row from `begin` on.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void multiply(float (&sum)[Tile::NT][4], const unsigned char* stages,
                                         MbarrierRing<Tile::STAGES>& ring, int begin, int count, const int (&rows)[2]) {
    constexpr int FRAGMENTS = Tile::ROW_SCALES ? 2 : 1;
    static_assert(Tile::GROUPS % FRAGMENTS == 0);
    const LaneCodes lane = {uint32_t(rows[0] * PANEL_ROW_BYTES + rows[0] % 8 * 16 + int(threadIdx.x) % 4 * 2),
                            uint32_t((rows[1] - rows[0]) * PANEL_ROW_BYTES)};
    uint32_t a[FRAGMENTS][2][4] = {};  // of two groups in turn
    RingPosition<Tile::STAGES> at;
    const auto load_first = [&](bool exists) {
        if (FRAGMENTS == 1 || !exists) return;
        ring.wait_full(at);
        load_fragments<P, T>(a[0], shared_address(stages + at.stage * Tile::STAGE_BYTES) + lane.first, lane.between, 0);
    };
    load_first(count > 0);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const RingPosition<Tile::STAGES> now = at;
        if (FRAGMENTS == 1) ring.wait_full(now);
        at.advance();
        multiply_stage<P, Tile, T>(sum, a, stages + now.stage * Tile::STAGE_BYTES, lane, begin + i,
                                   [&] { load_first(i + 1 < count); });
        ring.release(now);
    }
}

template <Packing P, int NT_, typename T>
struct Codes : Tile<P, NT_> {
    using Shape = Tile<P, NT_>;
    using Params = PackedParams<T>;

    // The codes and the scales are loaded as 16-bit elements, which TMA does not look at.
    static __device__ __forceinline__ void load(unsigned char* stage, const Params& p, const Maps& maps,
                                                int first_output, int k, Mbarrier* full) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = int(weight_row(p, first_output, half * HALF));
            tma_load(stage + half * Shape::INP / 2, &maps.weights, k * PANEL_COLUMNS, 0, row, full);
            if constexpr (!Shape::ROW_SCALES)
                tma_load(stage + Shape::SCALES + half * Shape::SCALE_BYTES / 2, &maps.scales,
                         k * Shape::GROUPS / SCALE_COLUMNS * SCALE_COLUMNS, 0, row, full);
        }
    }
    static __device__ __forceinline__ void multiply(float (&sum)[NT_][4], const unsigned char* stages,
                                                    MbarrierRing<Shape::STAGES>& ring, int begin, int count,
                                                    const int (&rows)[2]) {
        ::multiply<P, Shape, T>(sum, stages, ring, begin, count, rows);
    }
    static __device__ __forceinline__ TileOutputs<T> outputs(const Params& p, int first_output, const int (&rows)[2]) {
        return packed_outputs<P>(p, first_output, rows);
    }
};

template <Packing P, int NT, typename T>
void launch_codes(const char* op, const LinearParams<T>& layer, const UnscaledParams<T>& unscaled,
                  const PackedWeight& weight, Stream stream) {
    using Weights = Codes<P, NT, T>;
    const PackedParams<T> p = packed_params(layer, unscaled, weight, Weights::COLUMNS, RESIDENT);
    const auto of_16_bits = [&](int64_t first_byte, int64_t columns, int box) {
        const auto* const data = reinterpret_cast<const fp16*>(p.rows + first_byte);
        return make_tensor_map(op, Heads<const fp16>{data, p.row_bytes / 2, 0}, p.OC, 1, columns, HALF, box);
    };
    Maps maps{};
    maps.weights = of_16_bits(0, p.code_bytes / 2, PANEL_COLUMNS);
    if (!Weights::ROW_SCALES) maps.scales = of_16_bits(p.code_bytes, p.C / PACKED_GROUP, SCALE_COLUMNS);
    launch_tiles<Weights, T>(op, p, p, maps, stream);
}

}  // namespace

template <typename T>
bool linear_packed_hopper(const char* op, const LinearParams<T>& layer, const UnscaledParams<T>& unscaled,
                          const PackedWeight& weight, Stream stream) {
    if (!is_hopper() || !layer.aligned || !rows_aligned({weight.rows}) || layer.N > SMALL_BATCH_MAX_N ||
        !can_pack(layer.C))
        return false;
    dispatch_packing(weight.packing, [&](auto packing) {
        constexpr Packing P = decltype(packing)::value;
        layer.N <= 32 ? launch_codes<P, 4>(op, layer, unscaled, weight, stream)
                      : launch_codes<P, 8>(op, layer, unscaled, weight, stream);
    });
    return true;
}

template bool linear_packed_hopper(const char*, const LinearParams<bf16>&, const UnscaledParams<bf16>&,
                                   const PackedWeight&, Stream);
template bool linear_packed_hopper(const char*, const LinearParams<fp16>&, const UnscaledParams<fp16>&,
                                   const PackedWeight&, Stream);
