// matmul of tensor_ops.h: batches of fp32 matrices of any strides.
//
// A block computes a tile of BM x BN outputs and walks K in steps of BK. Each thread computes T x T outputs: with T = 8
// an element that was read from shared memory is used eight times. While a step is multiplied, the next step's elements
// are loaded into registers, then stored to the other of two buffers. Both operands have the K dimension first in
// shared memory, [BK][BM] and [BK][BN], whatever their strides in global memory, so that a thread reads four rows or
// columns at a time.
//
//                    large tile       small tile
//   BM x BN x BK     128 x 128 x 8    32 x 32 x 16
//   T                8                4
//   threads          256              64
//   shared memory    16.5 KiB         9 KiB
//   registers        125 to 128       93 to 161
//   blocks per SM    2                6 to 10
//
// [1024, 768] times [768, 3072] (the MLP of GPT-2 124M, one sequence of 1,024 tokens): 8·24 = 192 large tiles, more
// than the 132 SMs of an H100, so the large tile is used, with 96 steps of K.
#include "kernels/cuda/cuda_common.cuh"
#include "tensor_library/tensor_ops_check.h"

namespace {

// The dimension in which an operand is read 16 bytes at a time. Any: neither, one element at a time.
enum class Layout : uint8_t { AlongK, AcrossK, Any };

template <int BM_, int BN_, int BK_, int T_>
struct Block {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, T = T_, THREADS = BM / T * (BN / T);
};

struct MatmulArguments {
    BatchedMatmul p;
    float* out;
    const float *a, *b;
    int64_t tiles_m, tiles_n;
};

// The elements that one thread loads of the tiles [LANES][BK] of an operand, tile after tile. A lane is a row of a or a
// column of b. Neighbouring threads read contiguous memory. The packs of a thread are a fixed step apart, so one
// pointer and one index serve all of them.
template <typename S, int LANES, Layout L>
class Fetched {
  public:
    static constexpr int PITCH = LANES + 4;  // two-way bank conflicts instead of eight-way where k runs over the lanes

    // Elements outside the operand are 0. A pack is either wholly inside or wholly outside.
    __device__ __forceinline__ Fetched(const float* data, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                                       int64_t K)
        : along_k(L == Layout::AlongK || (L == Layout::Any && k_stride < lane_stride)), k_left(K) {
        const int i = int(threadIdx.x) * W, tile = along_k ? S::BK : LANES;
        lane = along_k ? i / tile : i % tile;
        k = along_k ? i % tile : i / tile;
        lanes_left = int(min(lanes, int64_t(LANES)));
        at = data + lane * lane_stride + k * k_stride;
        step = along_k ? LANE_STEP * lane_stride : K_STEP * k_stride;
        advance = S::BK * k_stride;
    }
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            Floats<W> v{};
            if (lane + (along_k ? p * LANE_STEP : 0) < lanes_left && k + (along_k ? 0 : p * K_STEP) < k_left)
                v = load_floats<W>(at + p * step);
#pragma unroll
            for (int i = 0; i < W; i++) x[p * W + i] = v[i];
        }
        at += advance;
        k_left -= S::BK;
    }
    __device__ __forceinline__ void store(float (*tile)[PITCH]) const {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            float* to = &tile[k + (along_k ? 0 : p * K_STEP)][lane + (along_k ? p * LANE_STEP : 0)];
            if constexpr (L == Layout::AcrossK)
                *reinterpret_cast<float4*>(to) = {x[p * 4], x[p * 4 + 1], x[p * 4 + 2], x[p * 4 + 3]};
            else
#pragma unroll
                for (int i = 0; i < W; i++) to[i * PITCH] = x[p * W + i];
        }
    }

  private:
    static constexpr int W = L == Layout::Any ? 1 : 4, PACKS = LANES * S::BK / S::THREADS / W;
    static constexpr int LANE_STEP = S::THREADS * W / S::BK, K_STEP = S::THREADS * W / LANES;
    const float* at;
    int64_t step, advance;
    bool along_k;
    int lane, k, lanes_left;
    int64_t k_left;
    float x[PACKS * W];
};

template <typename S, Layout A, Layout B>
__global__ void __launch_bounds__(S::THREADS, S::T == 8 ? 2 : 4)
    matmul_kernel(const __grid_constant__ MatmulArguments q) {
    constexpr int BM = S::BM, BN = S::BN, BK = S::BK, T = S::T, H = 4;  // a thread's T x T outputs: blocks of 4 x 4
    using FetchedA = Fetched<S, BM, A>;
    using FetchedB = Fetched<S, BN, B>;
    __shared__ __align__(16) float tile_a[2][BK][FetchedA::PITCH], tile_b[2][BK][FetchedB::PITCH];
    const BatchedMatmul& p = q.p;
    const RowItem of_batch = row_item(blockIdx.x, q.tiles_m * q.tiles_n), tile = row_item(of_batch.item, q.tiles_n);
    const int64_t m0 = tile.row * BM, n0 = tile.item * BN;
    const float *a = q.a, *b = q.b;
    float* out = q.out;
    int64_t matrix = of_batch.row;
    for (int d = p.batch.rank - 1; d >= 0; d--) {
        const RowItem at = d == 0 ? RowItem{0, matrix} : row_item(matrix, p.batch.shape[d]);
        matrix = at.row;
        out += at.item * p.batch.operand[0].stride[d];
        a += at.item * p.batch.operand[1].stride[d];
        b += at.item * p.batch.operand[2].stride[d];
    }
    FetchedA next_a(a + m0 * p.a_row, p.a_row, p.a_column, p.M - m0, p.K);
    FetchedB next_b(b + n0 * p.b_column, p.b_column, p.b_row, p.N - n0, p.K);
    // A warp reads 2 (T = 4: 4) addresses of a and a contiguous range of b's row.
    constexpr int SIDE = BN / T;
    const int column = threadIdx.x % SIDE, row = threadIdx.x / SIDE;
    float sum[T][T] = {};
    next_a.fetch();
    next_b.fetch();
    next_a.store(tile_a[0]);
    next_b.store(tile_b[0]);
    __syncthreads();
    int buffer = 0;
    for (int64_t k0 = 0; k0 < p.K; k0 += BK, buffer ^= 1) {
        const bool more = k0 + BK < p.K;
        if (more) {
            next_a.fetch();
            next_b.fetch();
        }
#pragma unroll
        for (int k = 0; k < BK; k++) {
            float x[T], y[T];
#pragma unroll
            for (int h = 0; h < T / H; h++) {
                reinterpret_cast<float4*>(x)[h] =
                    *reinterpret_cast<const float4*>(&tile_a[buffer][k][h * (BM * H / T) + row * H]);
                reinterpret_cast<float4*>(y)[h] =
                    *reinterpret_cast<const float4*>(&tile_b[buffer][k][h * (BN * H / T) + column * H]);
            }
#pragma unroll
            for (int i = 0; i < T; i++)
#pragma unroll
                for (int j = 0; j < T; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        if (more) {
            next_a.store(tile_a[buffer ^ 1]);
            next_b.store(tile_b[buffer ^ 1]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < T; i++) {
        const int64_t m = m0 + i / H * (BM * H / T) + row * H + i % H;
        if (m >= p.M) continue;
#pragma unroll
        for (int j = 0; j < T; j++) {
            const int64_t n = n0 + j / H * (BN * H / T) + column * H + j % H;
            if (n < p.N) out[m * p.out_row + n * p.out_column] = sum[i][j];
        }
    }
}

// Whether the matrices of an operand can be read 16 bytes at a time, and in which direction.
Layout layout_of(const BatchedMatmul& p, int operand, int64_t lane_stride, int64_t k_stride, int64_t lanes) {
    const auto aligned = [](int64_t stride) { return stride % 4 == 0; };
    bool rows = reinterpret_cast<uintptr_t>(p.batch.operand[operand].data) % 16 == 0;
    for (int d = 0; d < p.batch.rank; d++) rows = rows && aligned(p.batch.operand[operand].stride[d]);
    if (rows && k_stride == 1 && p.K % 4 == 0 && aligned(lane_stride)) return Layout::AlongK;
    if (rows && lane_stride == 1 && lanes % 4 == 0 && aligned(k_stride)) return Layout::AcrossK;
    return Layout::Any;
}

template <typename F>
void with_layout(Layout layout, F f) {
    switch (layout) {
        case Layout::AlongK:
            return f(std::integral_constant<Layout, Layout::AlongK>{});
        case Layout::AcrossK:
            return f(std::integral_constant<Layout, Layout::AcrossK>{});
        case Layout::Any:
            return f(std::integral_constant<Layout, Layout::Any>{});
    }
}

template <typename S>
void launch_matmul(const char* op, const BatchedMatmul& p, Stream stream) {
    MatmulArguments q{};
    q.p = p;
    q.out = static_cast<float*>(p.batch.operand[0].data);
    q.a = static_cast<const float*>(p.batch.operand[1].data);
    q.b = static_cast<const float*>(p.batch.operand[2].data);
    q.tiles_m = ceil_div(p.M, S::BM);
    q.tiles_n = ceil_div(p.N, S::BN);
    const int64_t blocks = q.tiles_m * q.tiles_n * p.batch.numel();
    require(blocks <= 0x7fffffff, op, ": ", p.batch.numel(), " matmuls of [", p.M, ", ", p.K, "] and [", p.K, ", ", p.N,
            "] need more blocks than a grid can have; split the batch");
    with_layout(layout_of(p, 1, p.a_row, p.a_column, p.M), [&](auto a) {
        with_layout(layout_of(p, 2, p.b_column, p.b_row, p.N), [&](auto b) {
            matmul_kernel<S, decltype(a)::value, decltype(b)::value>
                <<<unsigned(blocks), S::THREADS, 0, cuda_stream(stream)>>>(q);
        });
    });
    check_launch(op, stream);
}

}  // namespace

void tensor_matmul(Tensor out, Tensor a, Tensor b, Stream stream) {
    const char* op = "tensor_matmul";
    const BatchedMatmul p = check_batched_matmul(op, out, a, b);
    if (out.numel() == 0) return;
    // The large tile, unless a matrix is small or there would be fewer blocks than SMs.
    using Large = Block<128, 128, 8, 8>;
    using Small = Block<32, 32, 16, 4>;
    const int64_t large_blocks = ceil_div(p.M, Large::BM) * ceil_div(p.N, Large::BN) * p.batch.numel();
    if (std::min(p.M, p.N) > 64 && large_blocks >= num_sms())
        launch_matmul<Large>(op, p, stream);
    else
        launch_matmul<Small>(op, p, stream);
}
