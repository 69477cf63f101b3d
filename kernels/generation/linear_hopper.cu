// 9 to 64 rows of inp, texts from here on, against a matrix on Hopper GPUs: a few microseconds between a launch and the
// next, most of them spent waiting for something. So everything is asked for as early as it can be, once, by a tensor
// copy where nobody has to touch it; and who waits, waits for bytes and not for threads.
//
// A cluster of S blocks multiplies all texts by a tile of ROWS rows of weight, each block over its own slice of C:
//
//   1. its slices of the weights, which no other kernel writes, are on their way before the kernel before has ended
//      (pdl.cuh);
//   2. its slices of the texts follow. With a norm they come to registers, a row to a warp; mean and squared deviations
//      of every slice go to all blocks of the cluster, which combine them (Chan et al. 1983);
//   3. two warpgroups multiply 64 texts, of which some may be missing, by half of the tile each;
//   4. the sums go to the block that finishes those texts, eight of every 8·S, which adds the S of them up in order.
//
// A text's sums have one order, which follows from C and OC alone.
//
// There is one kernel for layers with and without a norm, and its loops are not unrolled where that gains nothing: the
// launches of a step come one after the other, and instructions that fell out of the cache meanwhile are waited for.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/generation/linear.cuh"

namespace {

constexpr int TEXTS = 64, ROWS = 64;
constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int PRODUCT_ROWS = 32;  // that a warpgroup multiplies by; the others rest
constexpr int PITCH = ROWS + 8;   // floats from one text's sums to the next one's, which begin in other banks
constexpr int W = 8;              // elements of 16 bytes
constexpr int MAX_BLOCKS = 8;
constexpr int MAX_CHUNKS = 6;                              // of a slice
constexpr int MAX_NORM_CHUNKS = WARP * W / PANEL_COLUMNS;  // the same with a norm: a lane has 16 bytes of a row

// How clusters meet a matrix.
struct Shape {
    int blocks;  // of a cluster: S
    int chunks;  // of a slice
};

// Columns of block `rank`: `count` of C from `begin` on.
struct Slice {
    int begin, count;
};
__device__ __forceinline__ Slice slice_of(const Shape& shape, int rank, int64_t C) {
    const int width = shape.chunks * PANEL_COLUMNS, begin = rank * width;
    return {begin, max(0, min(width, int(C) - begin))};
}

struct Shared {
    Mbarrier landed[MAX_CHUNKS];  // a chunk of the tile of weights, and without a norm of the texts too, has landed
    Mbarrier told, received;      // all blocks' moments; all sums
    float2 moments[MAX_BLOCKS][TEXTS];  // of each block's slice: the mean, and Σ of squared deviations from it
};

struct Tiles {
    unsigned char *texts, *weights;
    float* sums;  // [octets finished here][S][8][PITCH]
    __device__ __forceinline__ Tiles(unsigned char* shared, int chunks) {
        texts = shared + (SWIZZLE_ALIGNMENT - shared_address(shared) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
        weights = texts + chunks * TEXTS * PANEL_ROW_BYTES;
        sums = reinterpret_cast<float*>(weights + chunks * ROWS * PANEL_ROW_BYTES);
    }
    static int bytes(const Shape& shape) {
        const int64_t octets = ceil_div(TEXTS / 8, shape.blocks) * shape.blocks;
        return SWIZZLE_ALIGNMENT + shape.chunks * (TEXTS + ROWS) * PANEL_ROW_BYTES +
               int(octets) * 8 * PITCH * int(sizeof(float));
    }
};

// The slices of all texts, normalised, to their tile.
template <typename T>
__device__ __forceinline__ void normalise_texts(unsigned char* tile, Shared& shared, const Layer<T>& a,
                                                const Shape& shape, int rank) {
    constexpr int EACH = TEXTS / WARPS;
    const int lane = lane_id(), column = lane * W;
    const Slice slice = slice_of(shape, rank, a.C);
    const bool inside = column < slice.count;
    const auto text = [&](int i) { return int(threadIdx.x) / WARP + i * WARPS; };
    Pack<T, W> x[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const T* const from = a.inp + text(0) * a.inp_stride + slice.begin + column + i * WARPS * a.inp_stride;
        if (text(i) < a.N && inside) x[i] = load_pack<W>(from);
    }
    // As numbers of 32 bits the rows would take twice the registers: they are unpacked anew each time.
    const auto stay_packed = [&] {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < W / 2; k++) asm volatile("" : "+r"(x[i].word[k]));
    };
    float means[EACH] = {}, squares[EACH] = {};
    if (a.centred) {
        const float per_slice = reciprocal_for<T>(float(max(1, slice.count)));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const Floats<W> v = as_floats(x[i]);
#pragma unroll
            for (int k = 0; k < W; k++) means[i] += v[k];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) means[i] = warp_sum(means[i]) * per_slice;
        stay_packed();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Floats<W> v = as_floats(x[i]);
#pragma unroll
        for (int k = 0; k < W; k++) squares[i] = fmaf(v[k] - means[i], v[k] - means[i], squares[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) squares[i] = warp_sum(inside ? squares[i] : 0.0f);
    if (lane < shape.blocks) {  // each lane tells one block
        const uint32_t to = map_shared_rank(&shared.moments[rank][text(0)], lane),
                       told = map_shared_rank(&shared.told, lane);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (text(i) < a.N) st_async(to + i * WARPS * int(sizeof(float2)), float2{means[i], squares[i]}, told);
    }
    // Lanes side by side combine a row's moments.
    constexpr int SIDE = WARP / EACH;
    static_assert(SIDE >= MAX_BLOCKS);
    const auto over_side = [](float v) {
#pragma unroll
        for (int offset = 1; offset < SIDE; offset *= 2) v += __shfl_xor_sync(ALL_LANES, v, offset);
        return v;
    };
    const float per_row = reciprocal_for<T>(float(a.C));
    const int s = lane % SIDE;
    float2 moments{};
    float count = 0;
    Floats<W> weight{}, bias{};
    if (inside) weight = load_floats<W>(a.norm_weight + slice.begin + column);
    if (inside && a.norm_bias) bias = load_floats<W>(a.norm_bias + slice.begin + column);
    stay_packed();
    mbarrier_wait(&shared.told, 0);
    if (s < shape.blocks) moments = shared.moments[s][text(lane / SIDE)], count = float(slice_of(shape, s, a.C).count);
    const float mean = over_side(count * moments.x) * per_row, apart = moments.x - mean,
                total = over_side(fmaf(count, apart * apart, moments.y));
    const float scale = rsqrtf(fmaf(total, per_row, a.eps)), shift = -mean * scale;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float by = __shfl_sync(ALL_LANES, scale, i * SIDE), plus = __shfl_sync(ALL_LANES, shift, i * SIDE);
        if (text(i) >= a.N || column >= shape.chunks * PANEL_COLUMNS) continue;
        Floats<W> v = as_floats(x[i]);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = fmaf(fmaf(v[k], by, plus), weight[k], bias[k]);
        *reinterpret_cast<Pack<T, W>*>(tile + swizzled_offset<TEXTS>(text(i), column)) = as_pack<T>(v);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    cluster_kernel(const Layer<T> a, const Shape shape, const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ CUtensorMap text_map) {
    constexpr int HALF = ROWS / 2;
    extern __shared__ unsigned char dynamic[];
    __shared__ Shared shared;
    pdl_launch_dependents();
    const int rank = cluster_rank(), warp = int(threadIdx.x) / WARP, S = shape.blocks;
    const Slice slice = slice_of(shape, rank, a.C);
    const Tiles tiles(dynamic, shape.chunks);
    const bool has_norm = a.norm_weight, is_swiglu = a.activation == Activation::SwiGLU;
    const int first_output = int(blockIdx.y) * (is_swiglu ? HALF : ROWS);
    // Beside gate's rows of weight, or in the upper half of the tile, lie up's or more of the same.
    const int second_rows = is_swiglu ? int(a.columns) + first_output : first_output + HALF;
    // Of the octets of texts this block finishes rank, rank + S, …
    const int octets = ((a.N + 7) / 8 - rank + S - 1) / S;

    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int c = 0; c < shape.chunks; c++) mbarrier_init(&shared.landed[c], 1);
        mbarrier_init(&shared.told, 1);
        mbarrier_init(&shared.received, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_tx(&shared.told, S * a.N * int(sizeof(float2)));
        mbarrier_arrive_expect_tx(&shared.received, octets * S * 8 * ROWS * int(sizeof(float)));
#pragma unroll 1
        for (int c = 0; c < shape.chunks; c++) {
            unsigned char* const chunk = tiles.weights + c * ROWS * PANEL_ROW_BYTES;
            mbarrier_arrive_expect_tx(&shared.landed[c], (ROWS + (has_norm ? 0 : TEXTS)) * PANEL_ROW_BYTES);
            for (const bool second : {false, true})
                tma_load(chunk + second * HALF * PANEL_ROW_BYTES, &weight_map, slice.begin + c * PANEL_COLUMNS, 0,
                         second ? second_rows : first_output, &shared.landed[c]);
        }
        if (!has_norm) tma_prefetch_descriptor(&text_map);
    }
    cluster_arrive();
    // A thread finishes rows r, r + 1 and, HALF further, two more of one text; with SwiGLU these are gate's and up's.
    // Their sums lie one behind the other, from `first_sum` on: of 16 rows the pairs 0, 8, 2, 10, 4, 12, 6 and 14.
    const unsigned pair = threadIdx.x % (HALF / 2), place = threadIdx.x / (HALF / 2), first_sum = 2 * pair;
    const int row = int(pair / 8 * 16 + pair % 2 * 8 + pair % 8 / 2 * 2),
              text = (int(place / 8) * S + rank) * 8 + int(place % 8);
    const int columns[2] = {first_output + row, is_swiglu ? first_output + row : second_rows + row};  // of out
    T bias[2][2] = {}, residual[2][2] = {};
    if (a.bias)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (columns[i / 2] + i % 2 < a.columns)
                bias[i / 2][i % 2] = a.bias[(i / 2 ? second_rows : first_output) + row + i % 2];
    if (has_norm && threadIdx.x < 2 * WARP && lane_id() * W < slice.count) {
        const float* const vector = warp == 0 ? a.norm_weight : a.norm_bias;
        if (vector) prefetch_line(vector + slice.begin + lane_id() * W);
    }
    cluster_wait();  // all have started, their barriers too
    pdl_wait();

    if (!has_norm && threadIdx.x == 0)
#pragma unroll 1
        for (int c = 0; c < shape.chunks; c++)
            tma_load(tiles.texts + c * TEXTS * PANEL_ROW_BYTES, &text_map, slice.begin + c * PANEL_COLUMNS, 0, 0,
                     &shared.landed[c]);
    if (has_norm) {
        normalise_texts(tiles.texts, shared, a, shape, rank);
        fence_async_proxy();
        __syncthreads();
    }
    const bool finishes = int(place / 8) < octets && text < a.N;
    if (a.residual && finishes)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (columns[i / 2] + i % 2 < a.columns)
                residual[i / 2][i % 2] = a.residual[text * a.residual_stride + columns[i / 2] + i % 2];

    const int first_row = warp / (WARPGROUP / WARP) * PRODUCT_ROWS;
    if (first_row < ROWS) {
        for (int c = 0; c < shape.chunks; c++) mbarrier_wait(&shared.landed[c], 0);
        float sum[PRODUCT_ROWS / 8][4] = {};
        const uint32_t left = k_major_descriptor(shared_address(tiles.texts)),
                       right = k_major_descriptor(shared_address(tiles.weights) + first_row * PANEL_ROW_BYTES);
        pin_registers(sum);
#pragma unroll 1
        for (int c = 0; c < shape.chunks; c++) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < PANEL_COLUMNS / 16; k++)
                wgmma_k16<T, false, false>(
                    sum, left + c * k_major_step<TEXTS>(PANEL_COLUMNS / 16) + k_major_step<TEXTS>(k),
                    right + c * k_major_step<ROWS>(PANEL_COLUMNS / 16) + k_major_step<ROWS>(k), true);
            wgmma_commit();
        }
        wgmma_wait<0>();
        pin_registers(sum);
        const int lane = lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int octet = warp % (WARPGROUP / WARP) * 2 + half;
            if (octet * 8 >= a.N) break;
            const uint32_t to = map_shared_rank(
                               tiles.sums + ((octet / S * S + rank) * 8 + g) * PITCH + first_row + 4 * t, octet % S),
                           received = map_shared_rank(&shared.received, octet % S);
#pragma unroll
            for (int n = 0; n < PRODUCT_ROWS / 8; n += 2)
                st_async(to + n * 8 * int(sizeof(float)),
                         float4{sum[n][2 * half], sum[n][2 * half + 1], sum[n + 1][2 * half], sum[n + 1][2 * half + 1]},
                         received);
        }
    }
    if (!finishes) return;
    mbarrier_wait(&shared.received, 0);

    const float* const sums = tiles.sums + (place / 8 * S * 8 + place % 8) * PITCH + first_sum;
    float y[2][2] = {};
#pragma unroll
    for (int s = 0; s < MAX_BLOCKS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 part = *reinterpret_cast<const float2*>(sums + min(s, S - 1) * 8 * PITCH + half * HALF);
            y[half][0] += s < S ? part.x : 0, y[half][1] += s < S ? part.y : 0;
        }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i / 2][i % 2] += as_float(bias[i / 2][i % 2]);
    T* const out = a.out + text * a.out_stride;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = i / 2, k = i % 2;
        if (columns[half] + k >= a.columns || (is_swiglu && half)) continue;
        const float z =
            is_swiglu ? swiglu<Math::Fast>(y[0][k], y[1][k]) : activate<Math::Fast>(a.activation, y[half][k]);
        out[columns[half] + k] = from_float<T>(z + as_float(residual[half][k]));
    }
}

template <typename T>
int64_t rows_of_weight(const Layer<T>& a) {
    return a.activation == Activation::SwiGLU ? 2 * a.columns : a.columns;
}

int64_t blocks_of(const Shape& shape, int64_t OC) {
    return shape.blocks * ceil_div(OC, ROWS);
}

// As many blocks as run on SMs of their own: each then has little to read. Where there are more anyway, as
// few as possible. No blocks: the matrix has too many columns.
Shape shape_of(int64_t C, int64_t OC, bool has_norm) {
    const int64_t columns = ceil_div(C, PANEL_COLUMNS), limit = num_sms();
    Shape best{0, 0};
    for (int S = 2; S <= MAX_BLOCKS; S++) {
        const Shape shape{S, int(ceil_div(columns, S))};
        const bool idle = S > 2 && (S - 1) * shape.chunks >= columns;  // some would have no columns
        if (shape.chunks > (has_norm ? MAX_NORM_CHUNKS : MAX_CHUNKS) || idle) continue;
        if (best.blocks == 0 || blocks_of(shape, OC) <= limit) best = shape;
    }
    return best;
}

}  // namespace

// Where far from all blocks run at once, a second wave costs more than what the library loses.
template <typename T>
bool hopper_linear_takes(const Layer<T>& a) {
    if (!is_hopper() || a.N > TEXTS || a.C == 0 || a.C % W != 0) return false;
    const int64_t OC = rows_of_weight(a);
    const Shape shape = shape_of(a.C, OC, a.norm_weight);
    return shape.blocks > 0 && 2 * blocks_of(shape, OC) <= 3 * num_sms();
}

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream) {
    const int64_t OC = rows_of_weight(a);
    const Shape shape = shape_of(a.C, OC, a.norm_weight);
    const int bytes = Tiles::bytes(shape);
    const auto kernel = cluster_kernel<T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    const CUtensorMap weights = make_tensor_map(op, Heads<const T>{a.weight, a.weight_stride, 0}, OC, 1, a.C, ROWS / 2),
                      texts = make_tensor_map(op, Heads<const T>{a.inp, a.inp_stride, 0}, a.N, 1, a.C, TEXTS);
    const dim3 grid(unsigned(shape.blocks), unsigned(ceil_div(OC, ROWS)));
    launch_pdl_clusters(op, kernel, grid, unsigned(shape.blocks), THREADS, size_t(bytes), stream, a, shape, weights,
                        texts);
}

template bool hopper_linear_takes(const Layer<bf16>&);
template bool hopper_linear_takes(const Layer<fp16>&);
template void hopper_linear(const char*, const Layer<bf16>&, Stream);
template void hopper_linear(const char*, const Layer<fp16>&, Stream);
