// Causal softmax attention's forward pass on a GPU, rung by rung: out_i = Σ_j P_ij v_j over the keys j ≤ i with
// P = softmax(q·kᵀ/√64), from three kernels with a T x T matrix between them to the kernel in use.
//
//     make ladder OP=attention BACKEND=cuda
//     build/cuda/dev/ladder/attention --csv attention.csv && scripts/plot_ladder.py attention.csv
//
// bf16, accumulation and softmax in fp32, 4 sequences of T tokens with 16 heads of 64 channels. TFLOP/s count the two
// matmuls over the unmasked pairs, as dev/bench/bench_attention.cpp does, and are compared with a large bf16 GEMM of
// cuBLASLt in the same run. Every rung takes any T and any number of heads and sequences, and is checked against the
// float64 oracle. The method is the online softmax (Milakov, Gimelshein 2018) in tiles (FlashAttention-2, Dao 2023).
//
// Read the rungs from top to bottom: each keeps the improvements of the previous one.
#include "kernels/attention/attention.h"

#include "dev/bench/machine_limits.h"
#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/attention/attention.cuh"
#include "kernels/cuda/warp_tile.cuh"

namespace {

constexpr int HS = 64;
constexpr float SCALE = 0.125f;           // 1/√HS
constexpr float TO_LOG2 = SCALE * LOG2E;  // q·k as an exponent of 2

// B sequences of T tokens: q, k, v, out [B, T, NH, HS].
struct Forward {
    bf16* out;
    const bf16 *q, *k, *v;
    float* scores;        // [B·NH, T, T], for the first rung
    Tensor cum, scratch;  // for the last rung
    int64_t B, NH;
    int T;

    __host__ __device__ int64_t heads() const { return B * NH; }
    __host__ __device__ int64_t stride() const { return NH * HS; }  // from a token to the next
    // The offset of row i of a head.
    __device__ __forceinline__ int64_t row(int64_t head, int i) const {
        return ((head / NH * T + i) * NH + head % NH) * HS;
    }
};

// --- three kernels

// A grid of tiles BM x BN over the [T, columns] matrix of each head.
struct Tile {
    int64_t head;
    int m, n;
};
template <int BM, int BN>
__device__ __forceinline__ Tile tile_of_block(int T, int columns) {
    const int64_t tiles_n = ceil_div(columns, BN), tiles = ceil_div(T, BM) * tiles_n, tile = blockIdx.x % tiles;
    return {blockIdx.x / tiles, int(tile / tiles_n) * BM, int(tile % tiles_n) * BN};
}
template <int BM, int BN>
dim3 grid(const Forward& a, int columns) {
    return grid_of(a.heads() * ceil_div(a.T, BM) * ceil_div(columns, BN));
}

__global__ void scores_kernel(Forward a) {
    const Tile tile = tile_of_block<8, 32>(a.T, a.T);
    const int i = tile.m + threadIdx.y, j = tile.n + threadIdx.x;
    if (i >= a.T || j > i) return;
    const bf16 *q = a.q + a.row(tile.head, i), *k = a.k + a.row(tile.head, j);
    float sum = 0;
    for (int c = 0; c < HS; c++) sum += as_float(q[c]) * as_float(k[c]);
    a.scores[(tile.head * a.T + i) * a.T + j] = sum * SCALE;
}

// A warp for each row.
__global__ void softmax_kernel(Forward a) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.heads() * a.T) return;
    const int seen = int(row % a.T) + 1;
    float *scores = a.scores + row * a.T, largest = -INF, sum = 0;
    for (int j = threadIdx.x; j < seen; j += WARP) largest = fmaxf(largest, scores[j]);
    largest = warp_max(largest);
    for (int j = threadIdx.x; j < seen; j += WARP) sum += expf(scores[j] - largest);
    sum = warp_sum(sum);
    for (int j = threadIdx.x; j < seen; j += WARP) scores[j] = expf(scores[j] - largest) / sum;
}

__global__ void weighted_sum_kernel(Forward a) {
    const Tile tile = tile_of_block<8, 32>(a.T, HS);
    const int i = tile.m + threadIdx.y, c = tile.n + threadIdx.x;
    if (i >= a.T) return;
    const float* p = a.scores + (tile.head * a.T + i) * a.T;
    float sum = 0;
    for (int j = 0; j <= i; j++) sum += p[j] * as_float(a.v[a.row(tile.head, j) + c]);
    a.out[a.row(tile.head, i) + c] = from_float<bf16>(sum);
}

void three_kernels(const Forward& a, Stream stream) {
    const dim3 threads(WARP, 8);
    scores_kernel<<<grid<8, 32>(a, a.T), threads, 0, cuda_stream(stream)>>>(a);
    softmax_kernel<<<grid_of(ceil_div(a.heads() * a.T, 8)), threads, 0, cuda_stream(stream)>>>(a);
    weighted_sum_kernel<<<grid<8, 32>(a, HS), threads, 0, cuda_stream(stream)>>>(a);
}

// --- the online softmax

constexpr int ROWS = 128;  // threads of a block, each with a row

__global__ void __launch_bounds__(ROWS) online_kernel(Forward a) {
    const Tile tile = tile_of_block<ROWS, 1>(a.T, 1);
    const int i = tile.m + threadIdx.x;
    if (i >= a.T) return;
    float q[HS], out[HS] = {}, largest = -INF, sum = 0;
    // Vectors of 8 channels, 16 bytes.
#pragma unroll
    for (int c = 0; c < HS; c += 8) {
        const Floats<8> x = load_floats<8>(a.q + a.row(tile.head, i) + c);
#pragma unroll
        for (int e = 0; e < 8; e++) q[c + e] = x[e] * TO_LOG2;
    }
    for (int j = 0; j <= i; j++) {
        float s = 0;
#pragma unroll
        for (int c = 0; c < HS; c += 8) {
            const Floats<8> k = load_floats<8>(a.k + a.row(tile.head, j) + c);
#pragma unroll
            for (int e = 0; e < 8; e++) s = fmaf(q[c + e], k[e], s);
        }
        const float next = fmaxf(largest, s), rescale = exp2_fast(largest - next), p = exp2_fast(s - next);
        largest = next;
        sum = fmaf(sum, rescale, p);
#pragma unroll
        for (int c = 0; c < HS; c += 8) {
            const Floats<8> v = load_floats<8>(a.v + a.row(tile.head, j) + c);
#pragma unroll
            for (int e = 0; e < 8; e++) out[c + e] = fmaf(out[c + e], rescale, p * v[e]);
        }
    }
#pragma unroll
    for (int c = 0; c < HS; c += 8) {
        Floats<8> x;
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = out[c + e] / sum;
        store_floats<8>(a.out + a.row(tile.head, i) + c, x);
    }
}

void online(const Forward& a, Stream stream) {
    online_kernel<<<grid<ROWS, 1>(a, 1), ROWS, 0, cuda_stream(stream)>>>(a);
}

// --- tiles: in fp32, in bf16 on tensor cores, and with copies of the next tiles in flight

// 4 warps with 32 queries each walk over 64 keys at a time. T is the type of the tiles in shared memory and selects the
// instructions that multiply them (mma_ABt and mma_AB in kernels/cuda/warp_tile.cuh).
constexpr int MT = 2, WARPS = 4, BM = WARPS * MT * 16, BN = 64, THREADS = WARPS * WARP;

// Rows of a head into a tile; zeros from row `count` on.
template <typename T, int N>
__device__ __forceinline__ void copy_rows(T* tile, const bf16* src, int64_t stride, int count) {
    if constexpr (std::is_same_v<T, bf16>) {
        load_tile<bf16, HS, N, THREADS>(tile, src, stride, count, HS, true);
    } else {
#pragma unroll
        for (int i = 0; i < N * HS; i += THREADS * 4) {
            const int row = (i + int(threadIdx.x) * 4) / HS, c = (i + int(threadIdx.x) * 4) % HS;
            const Floats<4> x = row < count ? load_floats<4>(src + row * stride + c) : Floats<4>{};
            *reinterpret_cast<float4*>(tile + row * PITCH<T, HS> + c) = {x[0], x[1], x[2], x[3]};
        }
    }
}

template <typename T, int STAGES>
constexpr int TILE_BYTES = (BM + STAGES * 2 * BN) * PITCH<T, HS>* int(sizeof(T));

template <typename T, int STAGES>
__global__ void __launch_bounds__(THREADS, 2) tiled_kernel(Forward a) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int K_TILE = BN * PITCH<T, HS>;
    T *q_tile = reinterpret_cast<T*>(memory), *stages = q_tile + BM * PITCH<T, HS>;
    const int tiles = int(ceil_div(a.T, BM));
    const int64_t head = blockIdx.x / tiles, first = a.row(head, 0);
    const int i0 =
        (tiles - 1 - int(blockIdx.x % tiles)) * BM;  // the longest first: short blocks fill idle SMs at the end
    const int keys = min(i0 + BM, a.T), warp_row = threadIdx.x / WARP * MT * 16, lane = lane_id();
    const auto copy_keys = [&](int j0) {
        T* stage = stages + j0 / BN % STAGES * 2 * K_TILE;
        copy_rows<T, BN>(stage, a.k + first + j0 * a.stride(), a.stride(), keys - j0);
        copy_rows<T, BN>(stage + K_TILE, a.v + first + j0 * a.stride(), a.stride(), keys - j0);
    };
    copy_rows<T, BM>(q_tile, a.q + first + i0 * a.stride(), a.stride(), keys - i0);
    if (STAGES == 2) copy_keys(0);

    const TileA<T, MT, HS, false> q(q_tile + warp_row * PITCH<T, HS>);
    float out[MT][HS / 8][4] = {}, largest[MT][2], sum[MT][2] = {};
    for (auto& row : largest) row[0] = row[1] = -INF;
    for (int j0 = 0; j0 < keys; j0 += BN) {
        if (STAGES == 1) {
            __syncthreads();  // all warps have read the tiles
            copy_keys(j0);
        }
        cp_async_wait_all();
        __syncthreads();
        if (STAGES == 2 && j0 + BN < keys) copy_keys(j0 + BN);
        if (j0 >= i0 + warp_row + MT * 16) continue;  // no query of this warp sees these keys
        const T* k_tile = stages + j0 / BN % STAGES * 2 * K_TILE;
        float s[MT][BN / 8][4] = {};
        mma_ABt(s, q, k_tile);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = i0 + warp_row + m * 16 + half * 8 + lane / 4;
                float next = largest[m][half], added = 0;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[m][n][half * 2 + e];
                        x = j0 + n * 8 + lane % 4 * 2 + e <= i ? x * TO_LOG2 : -INF;
                        next = fmaxf(next, x);
                    }
                next = row_max(next);  // of the four lanes that share a row
                const float rescale = exp2_fast(largest[m][half] - next);
                largest[m][half] = next;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = half * 2; e < half * 2 + 2; e++) added += s[m][n][e] = exp2_fast(s[m][n][e] - next);
                sum[m][half] = fmaf(sum[m][half], rescale, added);
#pragma unroll
                for (int n = 0; n < HS / 8; n++)
#pragma unroll
                    for (int e = half * 2; e < half * 2 + 2; e++) out[m][n][e] *= rescale;
            }
        mma_AB<T, HS>(out, s, k_tile + K_TILE);
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i0 + warp_row + m * 16 + half * 8 + lane / 4;
            const float factor = 1 / row_sum(sum[m][half]);
            if (i >= a.T) continue;
#pragma unroll
            for (int n = 0; n < HS / 8; n++)
                store_floats<2>(a.out + a.row(head, i) + n * 8 + lane % 4 * 2,
                                {out[m][n][half * 2] * factor, out[m][n][half * 2 + 1] * factor});
        }
}

template <typename T, int STAGES>
void tiled(const Forward& a, Stream stream) {
    constexpr int BYTES = TILE_BYTES<T, STAGES>;
    cuda_check(cudaFuncSetAttribute(tiled_kernel<T, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES),
               "attention ladder");
    tiled_kernel<T, STAGES><<<grid<BM, 1>(a, 1), THREADS, BYTES, cuda_stream(stream)>>>(a);
}

// --- the kernel in use

void kernel_in_use(const Forward& a, Stream stream) {
    const auto tensor = [&](const bf16* data) {
        return make_tensor(const_cast<bf16*>(data), DType::BF16, Device::CUDA, {a.B * a.T, a.NH, HS});
    };
    attention_forward(tensor(a.out), Tensor{}, tensor(a.q), tensor(a.k), tensor(a.v), {a.cum, a.cum, a.T, a.T}, SCALE,
                      a.scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------

struct Rung {
    const char* name;
    void (*forward)(const Forward& a, Stream stream);
    int roundings;  // to bf16 between the inputs and out
    const char* why;
};

const std::vector<Rung> RUNGS = {
    {"three kernels", three_kernels, 1,
     "The formula: all scores, the softmax of each row, the weighted sums of v, with one thread for each score and "
     "each output. Each multiply-add loads its two operands, and the T x T matrix goes to memory and back twice: a "
     "gigabyte for 2,048 tokens, four times as much for 4,096."},
    {"online softmax", online, 1,
     "One thread for each query, with q and the sum of P·v in registers, walks over the keys once. After a larger "
     "score the sum so far is scaled down, so no score is ever stored and memory grows with T, not with T². The "
     "threads of a warp read the same key together. But each loaded value still serves one multiply-add of each "
     "thread, and the whole sum is scaled for every key."},
    {"tiles in fp32", tiled<float, 1>, 1,
     "A block copies 64 keys and values into shared memory for 128 queries and scales the sums once for all 64. A "
     "warp's scores and sums are 32 x 64 matrices in registers, 4 rows and 16 columns to a thread, so that each loaded "
     "value serves 4 or 16 multiply-adds. Blocks with the most keys start first. The remaining limit: tensor cores are "
     "15 times as fast as fp32 multiply-adds."},
    {"mma.sync", tiled<bf16, 1>, 2,
     "The same source with bf16 tiles: one tensor core instruction computes a 16 x 8 x 16 matmul. A warp's scores are "
     "laid out like operand A of mma.sync, so P, rounded to bf16, goes into the second matmul straight from registers. "
     "Copy, barrier, multiply, barrier."},
    {"mma.sync, pipelined", tiled<bf16, 2>, 2,
     "Two stages of keys and values: the next tiles are copied (cp.async) while the current ones are multiplied, with "
     "one barrier a step. The remaining limit: accumulators, operands and addresses take 240 registers, so that only "
     "two warps share a tensor core, and nothing makes one multiply while the other computes exponentials."},
    {"kernels/attention", kernel_in_use, 2,
     "attention_forward(). On Hopper, wgmma multiplies 64 rows at once straight from shared memory, one warp only "
     "loads tiles by TMA, and one warpgroup's softmax overlaps with another's matmuls. On other GPUs it is the "
     "previous rung "
     "with q in registers, masks only on the diagonal, and stores of whole rows."},
};

void run(const Rung& rung, const Forward& a, Stream stream) {
    rung.forward(a, stream);
    check_launch(rung.name, stream);
}

struct Problem {
    int64_t B, T, NH;
    DeviceArray<bf16> q, k, v, out;
    DeviceArray<int32_t> cum;
    DeviceArray<uint8_t> scratch;
    DeviceArray<float> scores;
    struct Row {
        int64_t begin;  // in out
        double value[HS], mag[HS];
    };
    std::vector<Row> expected;

    Problem(int64_t B_, int64_t T_, int64_t NH_, Stream stream)
        : B(B_),
          T(T_),
          NH(NH_),
          // Scores with a standard deviation of 3: sums are rescaled sometimes, and rows have some large probabilities.
          q(DeviceArray<bf16>::random(B * T * NH * HS, 1, 3, 0, stream)),
          k(DeviceArray<bf16>::random(B * T * NH * HS, 2, 1, 0, stream)),
          v(DeviceArray<bf16>::random(B * T * NH * HS, 3, 1, 0, stream)),
          out(B * T * NH * HS, stream),
          cum(B + 1, stream),
          scratch(attention_forward_scratch(), stream),
          scores(B * NH * T * T, stream) {
        std::vector<int32_t> starts;
        for (int64_t b = 0; b <= B; b++) starts.push_back(int32_t(b * T));
        copy_to_device(cum.data(), starts.data(), size_t(cum.bytes()), stream);
        synchronize(stream);
        choose_rows();
    }

    // All rows of a small problem; else samples: first and last rows, both sides of tile edges, and random ones.
    void choose_rows() {
        const int64_t rows = B * T * NH;
        if (rows <= 4096) {
            for (int64_t r = 0; r < rows; r++) expected.push_back({r * HS, {}, {}});
        } else {
            for (uint64_t s = 0; s < 512; s++) {
                const Philox4 r = philox(4, s, 0);
                const int64_t edge = int64_t(r.v[1] % uint64_t(T / 32 + 1)) * 32 - int64_t(r.v[2] % 2);
                const int64_t i = s % 4 == 0   ? r.v[2] % 2 ? T - 1 : 0
                                  : s % 4 == 1 ? int64_t(r.v[1]) % T
                                               : std::clamp<int64_t>(edge, 0, T - 1);
                expected.push_back({((r.v[0] % B * T + i) * NH + r.v[3] % NH) * HS, {}, {}});
            }
        }
#pragma omp parallel for schedule(dynamic)
        for (size_t r = 0; r < expected.size(); r++) {
            Row& row = expected[r];
            const int64_t i = row.begin / (NH * HS) % T, first_key = row.begin - i * NH * HS;
            reference::attention_query(row.value, row.mag, &q.values()[size_t(row.begin)],
                                       &k.values()[size_t(first_key)], &v.values()[size_t(first_key)], i + 1, NH * HS,
                                       HS, double(SCALE));
        }
    }

    Forward arguments() const {
        return {out.data(),
                q.data(),
                k.data(),
                v.data(),
                scores.data(),
                cum.tensor({B + 1}),
                scratch.tensor({attention_forward_scratch()}),
                B,
                NH,
                int(T)};
    }

    bool correct(const Rung& rung, Stream stream) {
        out.poison(stream);
        scores.poison(stream);
        run(rung, arguments(), stream);
        const std::vector<bf16> got = out.fetch(stream);
        ErrorBound bound(DType::BF16, T, rung.roundings);
        for (const Row& row : expected)
            for (int64_t c = 0; c < HS; c++)
                bound.add(double(to_float(got[size_t(row.begin + c)])), {row.value[c], row.mag[c]});
        return bound.holds() && out.guard_intact(stream) && scores.guard_intact(stream);
    }
    double flops() const {
        return 4.0 * double(B * NH * HS) * double(T * (T + 1) / 2);
    }
};

LadderTable climb(int64_t T, Stream stream) {
    // Single queries; lengths that are a multiple of a tile, next to one, and neither.
    std::vector<Problem> small;
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 2}, {2, 64, 3}, {2, 127, 3}, {1, 129, 5}, {1, 1000, 2}};
    for (const auto& s : sizes) small.emplace_back(s[0], s[1], s[2], stream);
    Problem large(4, T, 16, stream);
    ColdTimer timer(stream);

    LadderTable table;
    table.title = "attention bf16";
    table.unit = "TFLOP/s";
    table.unit_size = 1e12;
    table.limit_name = "matmul";
    for (const Rung& rung : RUNGS) {
        bool correct = large.correct(rung, stream);
        for (Problem& problem : small) correct = problem.correct(rung, stream) && correct;
        const double ms = timer.median_ms([&] { run(rung, large.arguments(), stream); });
        table.rows.push_back(
            {rung.name, ms, large.flops() / (ms * 1e-3), machine_limits().flops_bf16, correct, rung.why});
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "T", 2048, 8192);
        const Stream stream = create_stream();
        std::printf("4 sequences of %lld tokens, 16 heads of 64 channels, causal, on %s.\n\n", (long long)options.size,
                    device_description().c_str());
        const LadderTable table = climb(options.size, stream);
        destroy_stream(stream);
        table.print();
        table.explain();
        write_ladder_csv(options.csv, {table});
        return table.correct();
    });
}
