// The matmul of a linear layer on a GPU, rung by rung: out[M, N] = inp[M, K]·weight[N, K]ᵀ + bias[N], from one thread
// for each output to the speed of a library.
//
//     make ladder OP=matmul BACKEND=cuda
//     build/cuda/dev/ladder/matmul --csv matmul.csv && scripts/plot_ladder.py matmul.csv
//
// There are two ladders. The fp32 ladder runs on the FP32 units and is compared with cuBLASLt's fp32 (no TF32). The
// bf16 ladder runs on the tensor cores with fp32 sums and is compared with cuBLASLt's bf16. Every rung takes any M, N
// and K and an optional bias, is checked against the float64 oracle, and is timed without a bias on random numbers.
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung.
#include "dev/ladder/linear_layer.cuh"
#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/warp_tile.cuh"

namespace {

// The block's tile of out: its first row and column.
struct Tile {
    int64_t m, n;
};
template <int BM, int BN, typename T>
__device__ __forceinline__ Tile tile_of_block(const LinearArguments<T>& p) {
    const int64_t tiles_n = ceil_div(p.N, BN);
    return {blockIdx.x / tiles_n * BM, blockIdx.x % tiles_n * BN};
}

template <int BM, int BN, typename T>
dim3 grid(const LinearArguments<T>& p) {
    return grid_of(ceil_div(p.M, BM) * ceil_div(p.N, BN));
}

template <typename T>
__device__ __forceinline__ void store(const LinearArguments<T>& p, int64_t m, int64_t n, float sum) {
    if (m >= p.M || n >= p.N) return;
    p.out[m * p.N + n] = from_float<T>(p.bias ? sum + as_float(p.bias[n]) : sum);
}

// --- naive

__global__ void naive_kernel(LinearArguments<float> p) {
    const Tile tile = tile_of_block<32, 8>(p);
    const int64_t m = tile.m + threadIdx.x, n = tile.n + threadIdx.y;
    if (m >= p.M || n >= p.N) return;
    float sum = 0;
    for (int64_t k = 0; k < p.K; k++) sum += p.inp[m * p.K + k] * p.weight[n * p.K + k];
    store(p, m, n, sum);
}

void naive(const LinearArguments<float>& p, Stream stream) {
    naive_kernel<<<grid<32, 8>(p), dim3(32, 8), 0, cuda_stream(stream)>>>(p);
}

// --- coalesced

// The warps of a block cover 4 x 8 parts of the outputs, so that they share rows in L1.
__global__ void __launch_bounds__(1024) coalesced_kernel(LinearArguments<float> p) {
    const Tile tile = tile_of_block<4, 8>(p);
    const int warp = threadIdx.x / WARP;
    const int64_t m = tile.m + warp / 8, n = tile.n + warp % 8;
    if (m >= p.M || n >= p.N) return;
    float sum = 0;
    for (int64_t k = lane_id(); k < p.K; k += WARP) sum += p.inp[m * p.K + k] * p.weight[n * p.K + k];
    sum = warp_sum(sum);
    if (lane_id() == 0) store(p, m, n, sum);
}

void coalesced(const LinearArguments<float>& p, Stream stream) {
    coalesced_kernel<<<grid<4, 8>(p), 1024, 0, cuda_stream(stream)>>>(p);
}

// --- tiled in shared memory

__global__ void __launch_bounds__(1024) tiled_kernel(LinearArguments<float> p) {
    constexpr int B = 32;
    // The threads of a warp read 32 rows of `weight` at one k: with rows of 33 floats they are in 32 different banks.
    __shared__ float inp[B][B], weight[B][B + 1];
    const Tile tile = tile_of_block<B, B>(p);
    const int x = threadIdx.x, y = threadIdx.y;
    float sum = 0;
    for (int64_t k0 = 0; k0 < p.K; k0 += B) {
        const bool inside = k0 + x < p.K;
        inp[y][x] = inside && tile.m + y < p.M ? p.inp[(tile.m + y) * p.K + k0 + x] : 0;
        weight[y][x] = inside && tile.n + y < p.N ? p.weight[(tile.n + y) * p.K + k0 + x] : 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < B; k++) sum += inp[y][k] * weight[x][k];
        __syncthreads();  // before the tiles are overwritten
    }
    store(p, tile.m + y, tile.n + x, sum);
}

void tiled(const LinearArguments<float>& p, Stream stream) {
    tiled_kernel<<<grid<32, 32>(p), dim3(32, 32), 0, cuda_stream(stream)>>>(p);
}

// --- tiles in registers

// The part of one thread in copying tiles [ROWS, BK] of a row-major matrix into shared memory, with zeros beyond the
// matrix: 16 bytes of every STEP-th row. Addresses and edges are computed once: for each tile they would take more
// instructions than the mma.sync. ALIGNED: rows start at multiples of 16 bytes.
template <typename T, int ROWS, int BK, int THREADS, bool ALIGNED>
class TileCopier {
  public:
    __device__ __forceinline__ TileCopier(const T* matrix, int64_t first_row, int64_t rows, int64_t columns)
        : stride(columns),
          columns_left(columns),
          rows_left(int(min(rows - first_row, int64_t(ROWS)))),
          src(matrix + first_row * columns) {
        if (ALIGNED) {
            src += row() * stride + column();
            columns_left -= column();
            rows_left -= row();
        }
    }

    // Starts the copy of the next tile to the right; after the last one the tile is all zeros.
    __device__ __forceinline__ void start(T* tile) {
        if constexpr (ALIGNED) {
            T* to = tile + row() * PITCH<T, BK> + column();
            const int left = columns_left > 0 ? rows_left : 0;
#pragma unroll
            for (int i = 0; i < ROWS / STEP; i++)
                cp_async_16(to + i * STEP * PITCH<T, BK>, src + i * (STEP * stride), i * STEP < left);
        } else {
            load_tile<T, BK, ROWS, THREADS>(tile, src, stride, rows_left,
                                            int(max(int64_t(0), min(columns_left, int64_t(BK)))), false);
        }
        src += BK;
        columns_left -= BK;
    }

  private:
    static constexpr int W = FULL_WIDTH<T>, PACKS = BK / W, STEP = THREADS / PACKS;
    static_assert(THREADS % PACKS == 0 && ROWS % STEP == 0);
    __device__ static int row() {
        return int(threadIdx.x) / PACKS;
    }
    __device__ static int column() {
        return int(threadIdx.x) % PACKS * W;
    }
    int64_t stride, columns_left;
    int rows_left;
    const T* src;
};

// Calls f(true_type) if rows can be read 16 bytes at a time, else f(false_type).
template <typename T, typename F>
void dispatch_aligned(const LinearArguments<T>& p, F f) {
    if (p.K % FULL_WIDTH<T> == 0)
        f(std::true_type{});
    else
        f(std::false_type{});
}

// sum[i][j] += Σ_k inp[i·STEP_M][k]·weight[j·STEP_N][k] over BK columns of tiles in shared memory, four at a time.
template <int STEP_M, int STEP_N, int BK, int UNROLL, int RM, int RN>
__device__ __forceinline__ void multiply_add(float (&sum)[RM][RN], const float* inp, const float* weight) {
#pragma unroll UNROLL
    for (int k = 0; k < BK; k += 4) {
        Floats<4> a[RM];
#pragma unroll
        for (int i = 0; i < RM; i++) a[i] = load_floats<4>(inp + i * STEP_M * PITCH<float, BK> + k);
#pragma unroll
        for (int j = 0; j < RN; j++) {
            const Floats<4> b = load_floats<4>(weight + j * STEP_N * PITCH<float, BK> + k);
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < RM; i++) sum[i][j] = fmaf(a[i][t], b[t], sum[i][j]);
        }
    }
}

// A block computes 128 x 128 outputs: 16 x 16 threads, whose outputs are 16 rows and 16 columns apart.
template <bool ALIGNED>
__global__ void __launch_bounds__(256, 2) block_128_kernel(LinearArguments<float> p) {
    constexpr int B = 128, BK = 32, THREADS = 256, SIDE = 16;
    __shared__ __align__(16) float inp[B * PITCH<float, BK>], weight[B * PITCH<float, BK>];
    const Tile tile = tile_of_block<B, B>(p);
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    TileCopier<float, B, BK, THREADS, ALIGNED> copy_inp(p.inp, tile.m, p.M, p.K),
        copy_weight(p.weight, tile.n, p.N, p.K);
    float sum[B / SIDE][B / SIDE] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
        copy_inp.start(inp);
        copy_weight.start(weight);
        cp_async_wait_all();
        __syncthreads();
        multiply_add<SIDE, SIDE, BK, 1>(sum, inp + y * PITCH<float, BK>, weight + x * PITCH<float, BK>);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < B / SIDE; i++)
#pragma unroll
        for (int j = 0; j < B / SIDE; j++) store(p, tile.m + y + i * SIDE, tile.n + x + j * SIDE, sum[i][j]);
}

void block_128(const LinearArguments<float>& p, Stream stream) {
    dispatch_aligned(
        p, [&](auto aligned) { block_128_kernel<aligned><<<grid<128, 128>(p), 256, 0, cuda_stream(stream)>>>(p); });
}

// --- the pipeline, for FP32 units and for tensor cores

// The shape of a block: WARPS_M x WARPS_N warps compute BM x BN outputs in steps of BK columns of inp and weight, with
// STAGES steps in shared memory; BLOCKS blocks on an SM.
template <typename T_, int BM_, int BN_, int BK_, int STAGES_, int WARPS_M, int WARPS_N_, int BLOCKS_>
struct Shape {
    using T = T_;
    static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_, WARPS_N = WARPS_N_, BLOCKS = BLOCKS_;
    static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;  // of a warp
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int STAGE = (BM + BN) * PITCH<T, BK>;  // elements of shared memory
    static constexpr int SHARED_BYTES = STAGES * STAGE * int(sizeof(T));
};

// Gives the tiles step by step, while those of the next STAGES - 1 steps are being copied.
template <typename S, bool ALIGNED>
class Pipeline {
    using T = typename S::T;

  public:
    __device__ __forceinline__ Pipeline(const LinearArguments<T>& p, Tile tile)
        : inp(p.inp, tile.m, p.M, p.K), weight(p.weight, tile.n, p.N, p.K) {
#pragma unroll
        for (int step = 0; step < S::STAGES - 1; step++) start_copies();
    }
    // Starts copying one more step, into the tiles of the previous step.
    __device__ __forceinline__ void start_copies() {
        inp.start(shared() + writing * S::STAGE);
        weight.start(shared() + writing * S::STAGE + WEIGHT);
        cp_async_commit();
        writing = writing + 1 == S::STAGES ? 0 : writing + 1;
    }
    // Waits for the tiles of the next step. After the one barrier the copies of all threads have arrived, and no thread
    // reads the tiles of the previous step any more.
    __device__ __forceinline__ void next_step() {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        reading = reading + 1 == S::STAGES ? 0 : reading + 1;
    }
    // The m-th and n-th rows of the current step.
    __device__ __forceinline__ const T* inp_row(int m) const {
        return shared() + reading * S::STAGE + m * PITCH<T, S::BK>;
    }
    __device__ __forceinline__ const T* weight_row(int n) const {
        return inp_row(0) + WEIGHT + n * PITCH<T, S::BK>;
    }

  private:
    static constexpr int WEIGHT = S::BM * PITCH<T, S::BK>;
    __device__ __forceinline__ static T* shared() {
        extern __shared__ __align__(16) unsigned char dynamic_shared[];
        return reinterpret_cast<T*>(dynamic_shared);
    }
    TileCopier<T, S::BM, S::BK, S::THREADS, ALIGNED> inp;
    TileCopier<T, S::BN, S::BK, S::THREADS, ALIGNED> weight;
    int writing = 0, reading = -1;
};

template <typename S>
void launch(void (*kernel)(LinearArguments<typename S::T>), const LinearArguments<typename S::T>& p, Stream stream) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED_BYTES),
               "matmul ladder");
    kernel<<<grid<S::BM, S::BN>(p), S::THREADS, S::SHARED_BYTES, cuda_stream(stream)>>>(p);
}

// --- double buffered

// The lanes of a warp cover 8 x 4 parts of its outputs: a read of 16 bytes by all lanes touches 8 rows of inp, or 4 of
// weight, in different banks.
template <typename S, bool ALIGNED>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) double_buffered_kernel(LinearArguments<float> p) {
    constexpr int RM = S::WM / 8, RN = S::WN / 4, BK = S::BK;
    const Tile tile = tile_of_block<S::BM, S::BN>(p);
    const int warp = threadIdx.x / WARP, lane = lane_id();
    const int m = warp / S::WARPS_N * S::WM + lane / 4, n = warp % S::WARPS_N * S::WN + lane % 4;
    float sum[RM][RN] = {};
    Pipeline<S, ALIGNED> tiles(p, tile);
    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
        tiles.next_step();
        tiles.start_copies();
        multiply_add<8, 4, BK, BK / 4>(sum, tiles.inp_row(m), tiles.weight_row(n));
    }
#pragma unroll
    for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < RN; j++) store(p, tile.m + m + i * 8, tile.n + n + j * 4, sum[i][j]);
}

void double_buffered(const LinearArguments<float>& p, Stream stream) {
    using S = Shape<float, 128, 128, 32, 2, 2, 2, 2>;
    dispatch_aligned(p, [&](auto aligned) { launch<S>(double_buffered_kernel<S, aligned>, p, stream); });
}

// --- tensor cores

// A warp's sums in the layout of mma.sync (kernels/cuda/warp_tile.cuh), its first row and column given.
template <int MT, int NT>
__device__ __forceinline__ void store_sums(const LinearArguments<bf16>& p, int64_t m0, int64_t n0,
                                           const float (&c)[MT][NT][4]) {
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int64_t column = n0 + n * 8 + lane % 4 * 2;
        const float low = p.bias && column < p.N ? as_float(p.bias[column]) : 0,
                    high = p.bias && column + 1 < p.N ? as_float(p.bias[column + 1]) : 0;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t row = m0 + m * 16 + half * 8 + lane / 4;
                if (row >= p.M) continue;
                const Floats<2> pair = {c[m][n][half * 2] + low, c[m][n][half * 2 + 1] + high};
                bf16* at = p.out + row * p.N + column;
                if (p.N % 2 == 0) {
                    if (column < p.N) store_floats<2>(at, pair);
                } else {  // the pair may be unaligned, or half outside
                    if (column < p.N) at[0] = from_float<bf16>(pair[0]);
                    if (column + 1 < p.N) at[1] = from_float<bf16>(pair[1]);
                }
            }
    }
}

template <typename S, bool ALIGNED>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) tensor_core_kernel(LinearArguments<bf16> p) {
    constexpr int BK = S::BK, MT = S::WM / 16, NT = S::WN / 8;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    bf16 *inp = reinterpret_cast<bf16*>(dynamic_shared), *weight = inp + S::BM * PITCH<bf16, BK>;
    const Tile tile = tile_of_block<S::BM, S::BN>(p);
    TileCopier<bf16, S::BM, BK, S::THREADS, ALIGNED> copy_inp(p.inp, tile.m, p.M, p.K);
    TileCopier<bf16, S::BN, BK, S::THREADS, ALIGNED> copy_weight(p.weight, tile.n, p.N, p.K);
    const int warp = threadIdx.x / WARP, m = warp / S::WARPS_N * S::WM, n = warp % S::WARPS_N * S::WN;
    float sum[MT][NT][4] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
        copy_inp.start(inp);
        copy_weight.start(weight);
        cp_async_wait_all();
        __syncthreads();
        mma_ABt(sum, TileA<bf16, MT, BK, false>(inp + m * PITCH<bf16, BK>), weight + n * PITCH<bf16, BK>);
        __syncthreads();
    }
    store_sums(p, tile.m + m, tile.n + n, sum);
}

void tensor_cores(const LinearArguments<bf16>& p, Stream stream) {
    using S = Shape<bf16, 128, 128, 32, 1, 2, 4, 2>;
    dispatch_aligned(p, [&](auto aligned) { launch<S>(tensor_core_kernel<S, aligned>, p, stream); });
}

// --- tensor cores behind a pipeline

// While mma.sync multiplies 16 columns, ldmatrix loads the next 16; at the end of a step, from the tiles of the next
// step.
template <typename S, bool ALIGNED>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) pipelined_kernel(LinearArguments<bf16> p) {
    constexpr int BK = S::BK, MT = S::WM / 16, NT = S::WN / 8, KT = BK / 16;
    static_assert(KT % 2 == 0, "the fragments' buffer must be the same at the beginning of each step");
    const Tile tile = tile_of_block<S::BM, S::BN>(p);
    const int warp = threadIdx.x / WARP, lane = lane_id();
    const int m = warp / S::WARPS_N * S::WM, n = warp % S::WARPS_N * S::WN;
    float sum[MT][NT][4] = {};
    uint32_t a[2][MT][4], b[2][NT / 2][4];
    Pipeline<S, ALIGNED> tiles(p, tile);
    const auto load_fragments = [&](int k) {
        const uint32_t inp = shared_address(tiles.inp_row(m + lane % 16) + lane / 16 * 8),
                       weight = shared_address(tiles.weight_row(n + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < MT; i++)
            ldmatrix_x4(a[k % 2][i], inp + (i * 16 * PITCH<bf16, BK> + k * 16) * int(sizeof(bf16)));
#pragma unroll
        for (int j = 0; j < NT / 2; j++)
            ldmatrix_x4(b[k % 2][j], weight + (j * 16 * PITCH<bf16, BK> + k * 16) * int(sizeof(bf16)));
    };
    tiles.next_step();
    load_fragments(0);
    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
        tiles.start_copies();
#pragma unroll
        for (int k = 0; k < KT; k++) {
            if (k == KT - 1) tiles.next_step();
            load_fragments((k + 1) % KT);  // unused after the last step
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    mma_m16n8k16<bf16>(sum[i][j], a[k % 2][i], b[k % 2][j / 2][j % 2 * 2],
                                       b[k % 2][j / 2][j % 2 * 2 + 1]);
        }
    }
    store_sums(p, tile.m + m, tile.n + n, sum);
}

void pipelined(const LinearArguments<bf16>& p, Stream stream) {
    using Large = Shape<bf16, 128, 256, 64, 3, 2, 4, 1>;
    using Small = Shape<bf16, 128, 128, 64, 2, 2, 4, 1>;  // consumer GPUs have 100 KiB of shared memory
    if (Large::SHARED_BYTES <= max_shared_bytes())
        dispatch_aligned(p, [&](auto aligned) { launch<Large>(pipelined_kernel<Large, aligned>, p, stream); });
    else
        dispatch_aligned(p, [&](auto aligned) { launch<Small>(pipelined_kernel<Small, aligned>, p, stream); });
}

// Multiples of nothing, of a vector only, smaller and larger than the tiles.
const std::vector<std::array<int64_t, 3>> SIZES = {{1, 1, 1},      {3, 5, 7},      {131, 257, 67},
                                                   {200, 130, 72}, {128, 256, 64}, {129, 24, 1000}};

const std::vector<Rung<float>> FP32_RUNGS = {
    {"naive", naive,
     "One thread for each output. The 32 threads of a warp read 32 rows of inp, so each reads another cache line: "
     "32 passes through L1 for 32 multiply-adds. If the row stride is a power of two, the lines evict each other."},
    {"coalesced", coalesced,
     "One warp for each output: its threads read neighbouring numbers of a row, one pass for 32 multiply-adds, "
     "and add their sums with shuffles at the end. The limit is now two loads for each multiply-add, at best from "
     "L1."},
    {"tiled", tiled,
     "A block of 32 x 32 threads copies a tile of each matrix into shared memory and uses each number 32 times, "
     "so L2 and memory are read 32 times less. But each multiply-add still loads two numbers, now from shared "
     "memory."},
    {"8 x 8 per thread", block_128,
     "A block computes 128 x 128 outputs, each thread 64 sums in registers: 16 loaded numbers give 64 "
     "multiply-adds, a load has four numbers, and L2 is read a quarter as often. Shared memory is no longer the "
     "limit. The latency of each tile is: copy, barrier, multiply, barrier."},
    {"double buffered", double_buffered,
     "cp.async copies the next tiles while the current ones are multiplied, with one barrier a tile. A thread has "
     "128 sums, so 24 loaded numbers give 128 multiply-adds, and the lanes of a warp cover 8 x 4 parts, so a read "
     "of shared memory takes fewer passes. Multiply-adds still share the issue slots with loads and addresses."},
    {"cuBLASLt", library<float>,
     "What matmul_forward() uses: machine code scheduled by hand around register banks. The limit here."},
};

const std::vector<Rung<bf16>> BF16_RUNGS = {
    {"mma.sync", tensor_cores,
     "A warp multiplies 16 x 8 x 16 numbers with one tensor core instruction. ldmatrix loads the operands: it "
     "gives 8 x 8 tiles to the lanes in the layout of mma.sync. Copy, barrier, multiply, barrier, as in 8 x 8 per "
     "thread."},
    {"mma.sync, pipelined", pipelined,
     "64 x 64 sums for each warp, so shared memory is read less often for the same multiply-adds. Tiles are "
     "copied two steps ahead, and ldmatrix loads operands one mma.sync ahead, so the tensor cores wait less. "
     "Closing the rest of the gap needs wgmma, which only Hopper has: the ladder gemm_hopper."},
    {"cuBLASLt", library<bf16>,
     "What matmul_forward() uses. On Hopper its kernels use wgmma: a warpgroup multiplies operands in shared memory, "
     "and "
     "TMA copies the tiles. The limit here."},
};

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "M = N = K", 4096, 16384);
        const Stream stream = create_blas_stream();
        std::printf("out[%lld, %lld] = inp[M, K]·weight[N, K]ᵀ, M = N = K, on %s. %s\n\n", (long long)options.size,
                    (long long)options.size, device_description().c_str(), matmul_library());
        const std::vector<LadderTable> tables = {climb(FP32_RUNGS, SIZES, true, options.size, stream),
                                                 climb(BF16_RUNGS, SIZES, true, options.size, stream)};
        destroy_stream(stream);
        for (const LadderTable& table : tables) table.print();
        for (const LadderTable& table : tables) table.explain();
        write_ladder_csv(options.csv, tables);
        return std::all_of(tables.begin(), tables.end(), [](const LadderTable& table) { return table.correct(); });
    });
}
