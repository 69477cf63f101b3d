// Small-batch GEMM of packed weights: 9 to 64 rows of inp, 16-bit elements, mma.sync. Here the weights take half or a
// quarter of the time of 16-bit ones to read, so that matrices of any size are worth a kernel of their own.
//
// A block multiplies all rows of inp by 16·WM rows of weight (with SwiGLU half of them gate, half up). Its eight warps
// are WM along the rows of weight times WK along the groups of 32 columns. Both operands come through shared memory
// [cp.async], because inp is used by all warps: a ring of STAGES stages of 32·GROUPS columns each. The warps convert
// codes in registers (packed_codes.cuh). In the end the sums of the WK warps are added in order. As elsewhere, the
// first weights are loaded before the previous kernel has ended.
//
// A row's sums have one order, which follows from C and OC alone.
//
//   WM   WK   GROUPS   stage: weights (8 bits, 4 bits), inp (64 rows), scales   ring of 4
//   8    1    4        20,480 B, 10,240 B;              20,480 B;      1 KiB     164 KiB, 124 KiB
//   2    4    8         9,216 B,  4,608 B;              36,864 B;    512 B      182 KiB, 164 KiB
//
// (256 threads, one block an SM; sm_90a, CUDA 13.0, 64 rows: 116 registers with fp8, up to 197 with int8 and int4.)
//
// LLaMA 1B, 64 sequences, gate and up: OC = 16384 are 128 blocks of 128 rows for the 132 SMs of an H100; each reads all
// of inp, 256 KiB, and as much of fp8 weights. QKV: OC = 3072 are 24 blocks of 128 rows, so WM = 2: 96 of 32.
#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/packed_codes.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int STAGES = 4;

template <typename T>
struct PackedParams : LinearParams<T> {
    const char* rows;
    int64_t row_bytes, code_bytes;
};

// The tile of a block, and the offsets of a stage's parts in bytes. Rows are padded so that the vectors which a warp
// reads together lie in different banks.
template <Packing P, int WM_, int NT_>
struct Tile {
    static constexpr int WM = WM_, WK = WARPS / WM, NT = NT_;
    static constexpr int ROWS = 16 * WM, BATCH = 8 * NT;  // of weight and of inp
    static constexpr int GROUPS = WK == 1 ? 4 : 2 * WK;   // of a stage
    static constexpr int COLUMNS = GROUPS * int(PACKED_GROUP);
    static constexpr int CODE_PITCH = GROUPS * group_bytes(P) + group_bytes(P), INP_PITCH = COLUMNS * 2 + 64;
    static constexpr int INP = ROWS * CODE_PITCH, SCALES = INP + BATCH * INP_PITCH;
    static constexpr int SCALE_WORDS = P == Packing::Fp8 ? 0 : GROUPS / 2;  // of a row
    static constexpr int STAGE_BYTES = SCALES + ROWS * SCALE_WORDS * 4;
    static constexpr int SUM_PITCH = ROWS + 1;  // floats
    static constexpr int BYTES = std::max(STAGES * STAGE_BYTES, WK* BATCH* SUM_PITCH * 4);
};

// The row of weight of row r of a block's tile: 16 for each warp along the rows, with SwiGLU eight of gate and the same
// eight of up. Past the end, the last one.
template <typename T>
__device__ __forceinline__ int64_t weight_row(const PackedParams<T>& p, int64_t first_output, int r) {
    if (!is_gated(p.activation)) return min(first_output + r, p.columns - 1);
    return min(first_output + r / 16 * 8 + r % 8, p.columns - 1) + (r / 8 % 2 ? p.columns : 0);
}

// Starts the copies of a stage's weights and scales, of columns from `column` on; zeros past the end of the rows.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void load_weights(char* stage, const PackedParams<T>& p, int64_t first_output,
                                             int64_t column) {
    constexpr int PIECES = Tile::GROUPS * group_bytes(P) / 16, PIECE_COLUMNS = P == Packing::Int4 ? 32 : 16;
#pragma unroll
    for (int i = int(threadIdx.x); i < Tile::ROWS * PIECES; i += THREADS) {
        const int r = i / PIECES, piece = i % PIECES;
        const int64_t c = column + piece * PIECE_COLUMNS;
        const char* const row = p.rows + weight_row(p, first_output, r) * p.row_bytes;
        cp_async_16(stage + r * Tile::CODE_PITCH + piece * 16, row + c / PIECE_COLUMNS * 16, c < p.C);
    }
    if constexpr (Tile::SCALE_WORDS > 0) {
#pragma unroll
        for (int i = int(threadIdx.x); i < Tile::ROWS * Tile::SCALE_WORDS; i += THREADS) {
            const int r = i / Tile::SCALE_WORDS, word = i % Tile::SCALE_WORDS;
            const int64_t group = column / PACKED_GROUP + 2 * word;
            const char* const row = p.rows + weight_row(p, first_output, r) * p.row_bytes;
            cp_async_4(stage + Tile::SCALES + 4 * i, row + p.code_bytes + 2 * group, group * PACKED_GROUP < p.C);
        }
    }
}

template <typename Tile, typename T>
__device__ __forceinline__ void load_inp(char* stage, const PackedParams<T>& p, int64_t column) {
    constexpr int PIECES = Tile::COLUMNS / 8;
#pragma unroll
    for (int i = int(threadIdx.x); i < Tile::BATCH * PIECES; i += THREADS) {
        const int n = i / PIECES, piece = i % PIECES;
        const int64_t c = column + piece * 8;
        const bool inside = n < p.N && c < p.C;
        cp_async_16(stage + Tile::INP + n * Tile::INP_PITCH + piece * 16, p.inp + (inside ? n * p.inp_stride + c : 0),
                    inside);
    }
}

// Adds the products of the warp's groups of a stage.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void multiply_stage(float (&sum)[Tile::NT][4], const char* stage, int wm, int wk) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < Tile::GROUPS / Tile::WK; i++) {
        const int group = wk + i * Tile::WK;
        uint32_t a[2][4];
        float scale[2] = {1, 1};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = 16 * wm + 8 * half + g;
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

// Adds the warps' sums [WK, BATCH, SUM_PITCH] in order and stores the block's outputs.
template <Packing P, typename Tile, typename T>
__device__ __forceinline__ void store_outputs(const PackedParams<T>& p, const float* sums, int64_t first_output) {
    const bool gated = is_gated(p.activation);
    const int outputs = gated ? Tile::ROWS / 2 : Tile::ROWS;
    for (int i = int(threadIdx.x); i < outputs * p.N; i += THREADS) {
        const int n = i / outputs, mine = i % outputs, r = gated ? mine / 8 * 16 + mine % 8 : mine;
        const int64_t o = first_output + mine;
        if (o >= p.columns) continue;
        const auto total = [&](int row, int64_t weight) {
            float y = 0;
#pragma unroll
            for (int k = 0; k < Tile::WK; k++) y += sums[(k * Tile::BATCH + n) * Tile::SUM_PITCH + row];
            if (P == Packing::Fp8) y *= *reinterpret_cast<const float*>(p.rows + weight * p.row_bytes + p.code_bytes);
            return y + (p.bias ? as_float(p.bias[weight]) : 0.0f);
        };
        float y = total(r, o);
        y = gated ? activate(p.activation, y, total(r + 8, p.columns + o)) : activate(p.activation, y);
        if (p.residual) y += as_float(p.residual[n * p.residual_stride + o]);
        p.out[n * p.out_stride + o] = from_float<T>(y);
    }
}

template <Packing P, typename Tile, typename T>
__global__ void __launch_bounds__(THREADS, 1) packed_small_batch_kernel(const PackedParams<T> p) {
    extern __shared__ uint4 shared[];
    char* const ring = reinterpret_cast<char*>(shared);
    pdl_launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int wm = warp % Tile::WM, wk = warp / Tile::WM;
    const int64_t first_output = int64_t(blockIdx.x) * (is_gated(p.activation) ? Tile::ROWS / 2 : Tile::ROWS);
    const int iterations = int((p.C + Tile::COLUMNS - 1) / Tile::COLUMNS);
    const auto stage_of = [&](int i) { return ring + i % STAGES * Tile::STAGE_BYTES; };
#pragma unroll 1
    for (int i = 0; i < min(STAGES - 1, iterations); i++)
        load_weights<P, Tile>(stage_of(i), p, first_output, int64_t(i) * Tile::COLUMNS);
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {  // a group of copies for each stage; those of the weights are in the first
        if (i < iterations) load_inp<Tile>(stage_of(i), p, int64_t(i) * Tile::COLUMNS);
        cp_async_commit();
    }
    float sum[Tile::NT][4] = {};
#pragma unroll 1
    for (int i = 0; i < iterations; i++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // stage i has arrived, and all warps have read stage i − 1
        const int ahead = i + STAGES - 1;
        if (ahead < iterations) {
            load_weights<P, Tile>(stage_of(ahead), p, first_output, int64_t(ahead) * Tile::COLUMNS);
            load_inp<Tile>(stage_of(ahead), p, int64_t(ahead) * Tile::COLUMNS);
        }
        cp_async_commit();
        multiply_stage<P, Tile, T>(sum, stage_of(i), wm, wk);
    }
    cp_async_wait_all();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int j = 0; j < Tile::NT; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            sums[(wk * Tile::BATCH + 8 * j + 2 * t + k % 2) * Tile::SUM_PITCH + 16 * wm + 8 * (k / 2) + g] = sum[j][k];
    __syncthreads();
    store_outputs<P, Tile>(p, sums, first_output);
}

template <Packing P, int WM, int NT, typename T>
void launch_small_batch(const char* op, const PackedParams<T>& p, Stream stream) {
    using Shape = Tile<P, WM, NT>;
    const auto kernel = packed_small_batch_kernel<P, Shape, T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::BYTES), op);
    launch_pdl(op, kernel, grid_of(ceil_div(p.OC, Shape::ROWS)), THREADS, size_t(Shape::BYTES), stream, p);
}

}  // namespace

template <typename T>
bool linear_packed_small_batch(const char* op, const LinearParams<T>& layer, const PackedWeight& weight,
                               Stream stream) {
    if (!layer.aligned || !rows_aligned({weight.rows}) || layer.N > SMALL_BATCH_MAX_N || !can_pack(layer.C) ||
        Tile<Packing::Int8, 2, 8>::BYTES > max_shared_bytes())
        return false;
    PackedParams<T> p{layer, static_cast<const char*>(weight.rows.data), packed_row_bytes(weight.packing, layer.C),
                      packed_code_bytes(weight.packing, layer.C)};
    // As large a tile as leaves most SMs a block.
    const bool large = 4 * ceil_div(p.OC, 128) >= 3 * num_sms();
    dispatch_packing(weight.packing, [&](auto packing) {
        constexpr Packing P = decltype(packing)::value;
        if (p.N <= 16)
            large ? launch_small_batch<P, 8, 2>(op, p, stream) : launch_small_batch<P, 2, 2>(op, p, stream);
        else if (p.N <= 32)
            large ? launch_small_batch<P, 8, 4>(op, p, stream) : launch_small_batch<P, 2, 4>(op, p, stream);
        else
            large ? launch_small_batch<P, 8, 8>(op, p, stream) : launch_small_batch<P, 2, 8>(op, p, stream);
    });
    return true;
}

template bool linear_packed_small_batch(const char*, const LinearParams<bf16>&, const PackedWeight&, Stream);
template bool linear_packed_small_batch(const char*, const LinearParams<fp16>&, const PackedWeight&, Stream);
