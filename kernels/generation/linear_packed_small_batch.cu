// Small-batch GEMM of packed weights on GPUs other than Hopper's (linear_packed_hopper.cu): 9 to 64 rows of inp, 16-bit
// elements, mma.sync. Here the weights take half or a quarter of the time of 16-bit ones to read, so that matrices of
// any size are worth a kernel of their own.
//
// A block multiplies all rows of inp by 128 rows of weight (with SwiGLU 64 of gate and their 64 of up), 16 a warp. Both
// operands come through shared memory [cp.async], because all warps use inp: a ring of STAGES stages of 128 columns.
// The warps convert codes in registers (packed_codes.cuh). Where there are too few blocks for the SMs, a cluster of up
// to eight shares the columns, on GPUs that have clusters; its blocks read each other's sums and add them in order. As
// elsewhere, the first weights are loaded before the previous kernel has ended.
//
// A row's sums have one order, which follows from C and OC alone.
//
//   stage: weights of 8 bits 20,480 B, of 4 bits 10,240 B; inp (64 rows) 20,480 B; scales 1 KiB
//   ring of 3: 126 KiB, or 96 KiB
//
// (256 threads; sm_80, CUDA 13.0, 64 rows: 118 registers with fp8, 225 with int8, 209 with int4.)
//
// LLaMA 1B, 64 sequences, on the 108 SMs of an A100, gate and up: OC = 16384 are 128 blocks; each reads all of inp, 256
// KiB, and as much of fp8 weights. QKV: OC = 3072 are 24 blocks, too few without clusters: its weights are dequantised.
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_packed_tile.cuh"

namespace {

using namespace linear_tile;

constexpr int GROUPS = 4, COLUMNS = GROUPS * int(PACKED_GROUP), STAGES = 3;

// Offsets of a stage's parts in bytes, for up to 8·NT rows of inp. Rows are padded so that the vectors which a warp
// reads together lie in different banks.
template <Packing P, int NT_>
struct Tile {
    static constexpr int NT = NT_, BATCH = 8 * NT;
    static constexpr int CODE_PITCH = (GROUPS + 1) * group_bytes(P), INP_PITCH = COLUMNS * 2 + 64;
    static constexpr int INP = ROWS * CODE_PITCH, SCALES = INP + BATCH * INP_PITCH;
    static constexpr int SCALE_WORDS = P == Packing::Fp8 ? 0 : GROUPS / 2;  // of a row
    static constexpr int STAGE_BYTES = SCALES + ROWS * SCALE_WORDS * 4;
    static constexpr int BYTES = std::max(STAGES * STAGE_BYTES, SUM_BYTES);
};

// Starts the copies of a stage's weights and scales, of columns from `column` on; zeros past the end of the rows.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void load_weights(char* stage, const PackedParams<T>& p, int first_output, int64_t column) {
    constexpr int PIECES = GROUPS * group_bytes(P) / 16, PIECE_COLUMNS = P == Packing::Int4 ? 32 : 16;
#pragma unroll
    for (int i = int(threadIdx.x); i < ROWS * PIECES; i += THREADS) {
        const int r = i / PIECES, piece = i % PIECES;
        const int64_t c = column + piece * PIECE_COLUMNS;
        const char* const row = p.rows + weight_row(p, first_output, r) * p.row_bytes;
        cp_async_16(stage + r * Tile::CODE_PITCH + piece * 16, row + c / PIECE_COLUMNS * 16, c < p.C);
    }
    if constexpr (Tile::SCALE_WORDS > 0) {
#pragma unroll
        for (int i = int(threadIdx.x); i < ROWS * Tile::SCALE_WORDS; i += THREADS) {
            const int r = i / Tile::SCALE_WORDS, word = i % Tile::SCALE_WORDS;
            const int64_t group = column / PACKED_GROUP + 2 * word;
            const char* const row = p.rows + weight_row(p, first_output, r) * p.row_bytes;
            cp_async_4(stage + Tile::SCALES + 4 * i, row + p.code_bytes + 2 * group, group * PACKED_GROUP < p.C);
        }
    }
}

template <typename Tile, typename T>
__device__ __forceinline__ void load_inp(char* stage, const PackedParams<T>& p, int64_t column) {
    constexpr int PIECES = COLUMNS / 8;
#pragma unroll
    for (int i = int(threadIdx.x); i < Tile::BATCH * PIECES; i += THREADS) {
        const int n = i / PIECES, piece = i % PIECES;
        const int64_t c = column + piece * 8;
        const bool inside = n < p.N && c < p.C;
        cp_async_16(stage + Tile::INP + n * Tile::INP_PITCH + piece * 16, p.inp + (inside ? n * p.inp_stride + c : 0),
                    inside);
    }
}

// Adds the products of the warp's rows in a stage.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void multiply_stage(float (&sum)[Tile::NT][4], const char* stage, const int (&rows)[2]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        uint32_t a[2][4];
        float scale[2] = {1, 1};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = rows[half];
            uint32_t word[LANE_WORDS];
            load_codes<P>(word, stage + r * Tile::CODE_PITCH + group * group_bytes(P) + group_bytes(P) / 4 * t);
            code_pairs<P, T>(a[half], word);
            if constexpr (P != Packing::Fp8)
                scale[half] = as_float(
                    *reinterpret_cast<const fp16*>(stage + Tile::SCALES + r * Tile::SCALE_WORDS * 4 + 2 * group));
        }
#pragma unroll
        for (int j = 0; j < Tile::NT; j++) {
            uint32_t b[4];
            const char* const row = stage + Tile::INP + (8 * j + g) * Tile::INP_PITCH;
            activation_pairs<P>(b, reinterpret_cast<const T*>(row) + group * int(PACKED_GROUP), t);
            float y[4] = {};
            if (P == Packing::Fp8)
#pragma unroll
                for (int k = 0; k < 4; k++) y[k] = sum[j][k];
#pragma unroll
            for (int k = 0; k < 4; k += 2)
                mma_m16n8k16<T>(y, {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]}, b[k], b[k + 1]);
#pragma unroll
            for (int k = 0; k < 4; k++) sum[j][k] = P == Packing::Fp8 ? y[k] : fmaf(scale[k / 2], y[k], sum[j][k]);
        }
    }
}

// Waits for the threads of all blocks of the cluster.
__device__ __forceinline__ void meet() {
#if __CUDA_ARCH__ >= 900
    cluster_sync();
#else
    __syncthreads();
#endif
}

template <Packing P, typename Tile, typename T>
__global__ void __launch_bounds__(THREADS, 1) packed_small_batch_kernel(const PackedParams<T> p) {
    extern __shared__ uint4 shared[];
    __shared__ Mbarrier arrived;
    char* const ring = reinterpret_cast<char*>(shared);
    pdl_launch_dependents();
    const int log = p.log_blocks, rank = int(blockIdx.x) & ((1 << log) - 1);
    const int first_output = int(blockIdx.x) >> log << log_outputs(p);
    // This block's stages of all those of a row.
    const int stages = int((p.C + COLUMNS - 1) / COLUMNS), begin = stages * rank >> log;
    const int count = (stages * (rank + 1) >> log) - begin;
    const auto stage_of = [&](int i) { return ring + i % STAGES * Tile::STAGE_BYTES; };
    const auto column_of = [&](int i) { return int64_t(begin + i) * COLUMNS; };
#pragma unroll 1
    for (int i = 0; i < min(STAGES - 1, count); i++) load_weights<P, Tile>(stage_of(i), p, first_output, column_of(i));
    int rows[2];
    set_rows(rows, p);
    const TileOutputs<T> outputs = packed_outputs<P>(p, first_output, rows);
    const Sums<Tile::NT> sums(rank, log, p.N, shared, &arrived);
    if (threadIdx.x == 0) sums.expect();
    meet();
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {  // a group of copies for each stage; those of the weights are in the first
        if (i < count) load_inp<Tile>(stage_of(i), p, column_of(i));
        cp_async_commit();
    }
    float sum[Tile::NT][4] = {};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // stage i has arrived, and all warps have read stage i − 1
        const int ahead = i + STAGES - 1;
        if (ahead < count) {
            load_weights<P, Tile>(stage_of(ahead), p, first_output, column_of(ahead));
            load_inp<Tile>(stage_of(ahead), p, column_of(ahead));
        }
        cp_async_commit();
        multiply_stage<P, Tile, T>(sum, stage_of(i), rows);
    }
    cp_async_wait_all();
    float residual[4] = {};
    outputs.load_residual(residual, p, sums.first);
    meet();  // all stages have been read
    outputs.store(p, sums, sum, residual, nullptr);
}

template <Packing P, int NT, typename T>
void launch_small_batch(const char* op, const PackedParams<T>& p, Stream stream) {
    using Shape = Tile<P, NT>;
    const auto kernel = packed_small_batch_kernel<P, Shape, T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::BYTES), op);
    launch_pdl_clusters(op, kernel, grid_of(p.tiles << p.log_blocks), unsigned(p.blocks()), THREADS,
                        size_t(Shape::BYTES), stream, p);
}

}  // namespace

template <typename T>
bool linear_packed_small_batch(const char* op, const LinearParams<T>& layer, const PackedWeight& weight,
                               Stream stream) {
    if (!layer.aligned || !rows_aligned({weight.rows}) || layer.N > SMALL_BATCH_MAX_N || !can_pack(layer.C) ||
        Tile<Packing::Int8, 8>::BYTES > max_shared_bytes())
        return false;
    const PackedParams<T> p = packed_params(layer, {}, weight, COLUMNS, 1);
    if (4 * p.tiles < num_sms() && !has_pdl()) return false;  // no clusters, and most SMs would have no block
    dispatch_packing(weight.packing, [&](auto packing) {
        constexpr Packing P = decltype(packing)::value;
        if (p.N <= 16)
            launch_small_batch<P, 2>(op, p, stream);
        else if (p.N <= 32)
            launch_small_batch<P, 4>(op, p, stream);
        else
            launch_small_batch<P, 8>(op, p, stream);
    });
    return true;
}

template bool linear_packed_small_batch(const char*, const LinearParams<bf16>&, const PackedWeight&, Stream);
template bool linear_packed_small_batch(const char*, const LinearParams<fp16>&, const PackedWeight&, Stream);
