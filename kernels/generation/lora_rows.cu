// A block works on one tile of rows. Both kernels read weights that no other kernel writes; what they do before
// pdl_wait() overlaps with the previous kernel.
//
// LLaMA 1B, bf16, 64 rows of 8 adapters of rank 16: 8 tiles in use. qkv shrinks 2,048 channels to 48: a warp takes one
// row of A and SLICE channels, 8 · 6 · 2 = 96 blocks; fc expands 32 to 16,384: a thread takes one output, 8 · 64 = 512
// blocks. The matrices of the four layers are 1.4 MB an adapter and block: 11 MB, 4 µs, beside 61 MB of the model's.
#include "kernels/generation/lora_rows.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/lora_rows_check.h"

namespace {

constexpr int SLICE = 1024, TILE = int(LORA_TILE), WARPS = 8, THREADS = 256;

template <typename T>
struct Adapters {
    const T *a, *b;
    const int32_t *tile_rows, *tile_adapters;
    float* low_rank;
    int64_t N, C, OC;
    int adapters, width, R, splits;  // width: parts·R
    int part_ends[LORA_MAX_PARTS];
};

// The tile's adapter; −1: the block has nothing to do.
template <typename T>
__device__ __forceinline__ int adapter_of(const Adapters<T>& p, int64_t tile) {
    const int adapter = p.tile_adapters[tile];
    return adapter < p.adapters ? adapter : -1;
}

// The rows of a tile; −1: none.
template <typename T>
__device__ __forceinline__ int64_t row_of(const Adapters<T>& p, int64_t tile, int i) {
    const int64_t row = p.tile_rows[tile * TILE + i];
    return row < p.N ? row : -1;
}

// blockIdx: tile, WARPS rows of A, split of C.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS) shrink_kernel(const Adapters<T> p, const T* x, int64_t stride) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t tile = blockIdx.x, j = blockIdx.y * int64_t(WARPS) + threadIdx.x / 32, split = blockIdx.z;
    const int lane = int(threadIdx.x) % 32, adapter = adapter_of(p, tile);
    if (adapter < 0 || j >= p.width) return;
    int64_t row[TILE];
    float sum[TILE] = {};
#pragma unroll
    for (int i = 0; i < TILE; i++) row[i] = row_of(p, tile, i);
    const T* const a = p.a + (adapter * int64_t(p.width) + j) * p.C;
    const int64_t end = min(p.C, (split + 1) * SLICE);
#pragma unroll 2
    for (int64_t c = split * SLICE + lane * W; c < end; c += 32 * W) {
        const Floats<W> weight = load_floats<W>(a + c);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            if (row[i] < 0) continue;
            const Floats<W> inp = load_floats<W>(x + row[i] * stride + c);
#pragma unroll
            for (int k = 0; k < W; k++) sum[i] += weight[k] * inp[k];
        }
    }
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const float total = warp_sum(sum[i]);
        if (lane == 0 && row[i] >= 0) p.low_rank[(split * p.N + row[i]) * p.width + j] = total;
    }
}

// blockIdx: tile, THREADS outputs. Shared memory: the tile's rows of h [TILE, width].
template <int W, typename T>
__global__ void __launch_bounds__(THREADS) expand_kernel(const Adapters<T> p, T* y, int64_t stride) {
    extern __shared__ float h[];
    pdl_launch_dependents();
    pdl_wait();
    const int64_t tile = blockIdx.x, o = blockIdx.y * int64_t(THREADS) + threadIdx.x;
    const int adapter = adapter_of(p, tile);
    if (adapter < 0) return;
    for (int i = int(threadIdx.x); i < TILE * p.width; i += THREADS) {
        const int64_t row = row_of(p, tile, i / p.width);
        float total = 0;
        for (int split = 0; split < p.splits && row >= 0; split++)
            total += p.low_rank[(split * p.N + row) * p.width + i % p.width];
        h[i] = total;
    }
    __syncthreads();
    if (o >= p.OC) return;
    int part = 0;
    while (o >= p.part_ends[part]) part++;
    const T* const b = p.b + (o * p.adapters + adapter) * p.R;
    float sum[TILE] = {};
#pragma unroll 2
    for (int r = 0; r < p.R; r += W) {
        const Floats<W> weight = load_floats<W>(b + r);
#pragma unroll
        for (int i = 0; i < TILE; i++)
#pragma unroll
            for (int k = 0; k < W; k++) sum[i] += weight[k] * h[i * p.width + part * p.R + r + k];
    }
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const int64_t row = row_of(p, tile, i);
        if (row < 0) continue;
        T* const to = y + row * stride + o;
        *to = from_float<T>(as_float(*to) + sum[i]);
    }
}

template <typename T>
Adapters<T> make_adapters(const AdapterSizes& z, const Tensor& low_rank, const AdapterWeights& w,
                          const AdapterTiles& tiles) {
    Adapters<T> p{};
    p.a = w.a.as<T>();
    p.b = w.b.as<T>();
    p.tile_rows = tiles.rows.as<int32_t>();
    p.tile_adapters = tiles.adapters.as<int32_t>();
    p.low_rank = low_rank.as<float>();
    p.N = z.N;
    p.C = w.a.shape[2];
    p.OC = w.b.shape[0];
    p.adapters = int(z.adapters);
    p.width = int(z.parts * z.R);
    p.R = int(z.R);
    p.splits = int(low_rank.shape[0]);
    for (size_t i = 0; i < size_t(LORA_MAX_PARTS); i++) p.part_ends[i] = int(w.part_ends[i]);
    return p;
}

}  // namespace

int64_t adapter_splits(int64_t C) {
    return ceil_div(C, SLICE);
}

void adapters_shrink(Tensor low_rank, Tensor x, const AdapterWeights& w, const AdapterTiles& tiles, Stream stream) {
    const char* op = "adapters_shrink";
    const DType dtype = check_activation_dtype(op, "x", x);
    const AdapterSizes z = check_adapters(op, dtype, low_rank, "x", x, w, tiles);
    if (z.N == 0 || z.tiles == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const Adapters<T> p = make_adapters<T>(z, low_rank, w, tiles);
        const dim3 grid(unsigned(z.tiles), unsigned(ceil_div(p.width, WARPS)), unsigned(p.splits));
        dispatch_width<T>(p.C % FULL_WIDTH<T> == 0 && rows_aligned({x}) && start_aligned(w.a), [&](auto width) {
            launch_pdl(op, shrink_kernel<decltype(width)::value, T>, grid, THREADS, 0, stream, p, x.as<T>(),
                       row_stride(x));
        });
    });
}

void adapters_expand(Tensor y, Tensor low_rank, const AdapterWeights& w, const AdapterTiles& tiles, Stream stream) {
    const char* op = "adapters_expand";
    const DType dtype = check_activation_dtype(op, "y", y);
    const AdapterSizes z = check_adapters(op, dtype, low_rank, "y", y, w, tiles);
    if (z.N == 0 || z.tiles == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const Adapters<T> p = make_adapters<T>(z, low_rank, w, tiles);
        const dim3 grid(unsigned(z.tiles), unsigned(ceil_div(p.OC, THREADS)));
        dispatch_width<T>(start_aligned(w.b), [&](auto width) {
            launch_pdl(op, expand_kernel<decltype(width)::value, T>, grid, THREADS,
                       size_t(TILE * p.width) * sizeof(float), stream, p, y.as<T>(), row_stride(y));
        });
    });
}
