// 9 to 64 rows of inp, texts from here on, against a matrix on Hopper GPUs: some microseconds between a launch and the
// next, most of them spent waiting for something. So everything is asked for as early as it can be, once, and by many.
//
// A cluster of S blocks multiplies all texts by a tile of ROWS rows of weight, each block over its own slice of C:
//
//   1. its slices of the weights, which no other kernel writes, are on their way before the kernel before has ended
//      (dependent_launch.cuh);
//   2. its slices of the texts come to shared memory once. With a norm they come to registers; mean and squared
//      deviations of every slice go to all blocks of the cluster, which combine them (Chan et al. 1983);
//   3. one warpgroup multiplies: 64 texts (missing ones are zeros) by ROWS rows;
//   4. the sums go to the block that finishes those texts, eight of every 8·S, which adds the S of them up in order.
//
// A text's sums have one order, which follows from C and OC alone.
#include <cstdlib>

#include "kernels/activation.cuh"
#include "kernels/cluster.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/hopper.cuh"
#include "kernels/linear.cuh"

namespace {

constexpr int THREADS = 256, TEXTS = 64;
constexpr int W = 8;             // elements of 16 bytes
constexpr int TEAM = CHUNK / W;  // threads side by side in a row of a tile
constexpr int MAX_SLICE = 512, MAX_NORM_SLICE = 256;

// A block's columns: `width`, a multiple of the 16 that a product contracts at a time, of which `count` exist.
struct Slice {
    int begin, width, count;
};

template <int S>
__host__ __device__ inline int slice_width(int64_t C) {
    return int(ceil_div(C, 16 * S)) * 16;
}
template <int S>
__device__ __forceinline__ Slice slice_of(int rank, int C) {
    const int width = slice_width<S>(C), begin = rank * width;
    return {begin, width, max(0, min(width, C - begin))};
}

// The slices of ROWS rows to a tile (hopper.cuh), asynchronously; row(i) is null where there is none: zeros.
template <int ROWS, typename T, typename Row>
__device__ __forceinline__ void load_slices(unsigned char* tile, const Slice& slice, const T* somewhere, Row row) {
    for (int i = int(threadIdx.x) / TEAM; i < ROWS; i += THREADS / TEAM) {
        const T* const from = row(i);
        for (int column = int(threadIdx.x) % TEAM * W; column < slice.width; column += CHUNK) {
            const bool inside = from && column < slice.count;
            copy_async_16(tile + tile_offset<ROWS>(i, column), inside ? from + slice.begin + column : somewhere,
                          inside);
        }
    }
}

// Of TEAM threads in a row.
__device__ __forceinline__ float team_sum(float x) {
    x = row_sum(x);
    return x + __shfl_xor_sync(ALL_LANES, x, 4);
}

template <int S>
struct NormShared {
    float2 moments[S][TEXTS];  // of each block's slice: the mean, and the sum of squared deviations from it
    alignas(16) float weight[MAX_NORM_SLICE], bias[MAX_NORM_SLICE];
};

// The norm's vectors on their way.
template <int S, typename T>
__device__ __forceinline__ void load_norm(NormShared<S>& shared, const Layer<T>& a, const Slice& slice) {
    const int vector = int(threadIdx.x) / (MAX_NORM_SLICE / 4), column = int(threadIdx.x) % (MAX_NORM_SLICE / 4) * 4;
    if (vector > 1) return;
    const float* const from = vector == 0 ? a.norm_weight : a.norm_bias;
    const bool inside = from && column < slice.count;
    copy_async_16((vector == 0 ? shared.weight : shared.bias) + column,
                  inside ? from + slice.begin + column : a.norm_weight, inside);
}

// The slices of all texts, normalised, to their tile. `landed` waits for the norm's vectors.
template <int S, typename T, typename Landed>
__device__ __forceinline__ void normalise_texts(unsigned char* tile, NormShared<S>& shared, const Layer<T>& a, int rank,
                                                const Slice& slice, Landed landed) {
    constexpr int EACH = TEXTS / (THREADS / TEAM), PACKS = MAX_NORM_SLICE / CHUNK;
    const int lane = int(threadIdx.x) % TEAM, first = int(threadIdx.x) / TEAM;
    const auto text = [&](int i) { return first + i * (THREADS / TEAM); };
    const auto column = [&](int p) { return p * CHUNK + lane * W; };
    Pack<T, W> x[EACH][PACKS] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (text(i) < a.N && column(p) < slice.count)
                x[i][p] = load_pack<W>(a.inp + text(i) * a.inp_stride + slice.begin + column(p));
    float means[EACH] = {}, squares[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (a.centred) {
            float sum = 0;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const Floats<W> v = as_floats(x[i][p]);
#pragma unroll
                for (int k = 0; k < W; k++) sum += v[k];
            }
            means[i] = team_sum(sum) / float(max(1, slice.count));
        }
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (column(p) >= slice.count) continue;
            const Floats<W> v = as_floats(x[i][p]);
#pragma unroll
            for (int k = 0; k < W; k++) squares[i] = fmaf(v[k] - means[i], v[k] - means[i], squares[i]);
        }
        squares[i] = team_sum(squares[i]);
    }
    cluster_wait();  // for all to have started
    if (lane < S)    // each of the team tells one block
#pragma unroll
        for (int i = 0; i < EACH; i++)
            cluster_store(cluster_address(&shared.moments[rank][text(i)], lane), means[i], squares[i]);
    landed();
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float mean = 0, total = 0;
        float2 moments[S];
#pragma unroll
        for (int s = 0; s < S; s++) {
            moments[s] = shared.moments[s][text(i)];
            mean = fmaf(float(slice_of<S>(s, int(a.C)).count), moments[s].x, mean);
        }
        mean /= float(a.C);
#pragma unroll
        for (int s = 0; s < S; s++) {
            const float apart = moments[s].x - mean;
            total += fmaf(float(slice_of<S>(s, int(a.C)).count), apart * apart, moments[s].y);
        }
        const float rstd = 1 / sqrtf(total / float(a.C) + a.eps);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (column(p) >= slice.width) continue;
            Floats<W> v = as_floats(x[i][p]);
            const Floats<W> weight = load_floats<W>(shared.weight + column(p)),
                            bias = load_floats<W>(shared.bias + column(p));
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = fmaf((v[k] - mean) * rstd, weight[k], bias[k]);
            *reinterpret_cast<Pack<T, W>*>(tile + tile_offset<TEXTS>(text(i), column(p))) = as_pack<T>(v);
        }
    }
}

// What a block has in dynamic shared memory, for slices of `width` columns.
template <int NT>
struct Tiles {
    static constexpr int ROWS = 8 * NT;
    // Floats from one text's sums to the next one's: four texts' pairs of sums lie in different banks.
    static constexpr int PITCH = ROWS + 8;
    unsigned char *texts, *weights;
    float* sums;  // [texts finished here / 8][S][8][PITCH]
    __device__ __forceinline__ Tiles(unsigned char* shared, int width) {
        const int chunks = (width + CHUNK - 1) / CHUNK;
        texts = shared + (SWIZZLE_ALIGNMENT - shared_address(shared) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
        weights = texts + chunks * TEXTS * CHUNK_ROW;
        sums = reinterpret_cast<float*>(weights + chunks * ROWS * CHUNK_ROW);
    }
    static int bytes(int width) {
        return SWIZZLE_ALIGNMENT + int(ceil_div(width, CHUNK)) * (TEXTS + ROWS) * CHUNK_ROW +
               TEXTS * PITCH * int(sizeof(float));
    }
};

template <typename T, int S, int NT, bool NORM>
__global__ void __launch_bounds__(THREADS, 2) cluster_kernel(const Layer<T> a) {
    // A thread finishes rows r and r + HALF of a tile; with SwiGLU the one is gate's, the other up's.
    constexpr int ROWS = 8 * NT, HALF = ROWS / 2, FINISHED = TEXTS / S,
                  EACH = (FINISHED * HALF + THREADS - 1) / THREADS;
    extern __shared__ unsigned char shared[];
    let_next_start();
    cluster_arrive();
    const int rank = cluster_rank(), warp = int(threadIdx.x) / WARP;
    const Slice slice = slice_of<S>(rank, int(a.C));
    const Tiles<NT> tiles(shared, slice.width);
    const bool is_swiglu = a.activation == Activation::SwiGLU;
    const int64_t first_output = int64_t(blockIdx.y) * (is_swiglu ? HALF : ROWS);
    // Row r of the tile is row weight_row(r) of weight, and beyond the last output none.
    const auto output = [&](int r) { return first_output + (is_swiglu ? r % HALF : r); };
    const auto weight_row = [&](int r) { return output(r) + (is_swiglu && r >= HALF ? a.columns : 0); };

    __shared__ std::conditional_t<NORM, NormShared<S>, char> norm;
    if constexpr (NORM) {
        load_norm(norm, a, slice);
        commit_copies();
    }
    load_slices<ROWS>(tiles.weights, slice, a.weight, [&](int r) {
        return output(r) < a.columns ? a.weight + weight_row(r) * a.weight_stride : nullptr;
    });
    commit_copies();
    const int row = int(threadIdx.x) % HALF;
    float bias[2] = {};
    if (a.bias)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (output(row + half * HALF) < a.columns) bias[half] = as_float(a.bias[weight_row(row + half * HALF)]);
    wait_for_previous();

    // Of the texts that this block finishes, `place` counts; they are octets rank, rank + S, … of all.
    const auto place = [&](int e) { return int(threadIdx.x) / HALF + e * (THREADS / HALF); };
    const auto text = [&](int e) { return (place(e) / 8 * S + rank) * 8 + place(e) % 8; };
    const auto finishes = [&](int e) { return place(e) < FINISHED && text(e) < a.N; };
    if constexpr (!NORM)
        load_slices<TEXTS>(tiles.texts, slice, a.inp,
                           [&](int n) { return n < a.N ? a.inp + n * a.inp_stride : nullptr; });
    T residual[EACH][2] = {};
    if (a.residual)
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (finishes(e) && output(row + half * HALF) < a.columns)
                    residual[e][half] = a.residual[text(e) * a.residual_stride + output(row + half * HALF)];
    if constexpr (NORM)
        normalise_texts(tiles.texts, norm, a, rank, slice, [] { wait_for_copy_groups<1>(); });
    else
        cluster_wait();  // for all to have started
    wait_for_copies();
    fence_async_proxy();
    __syncthreads();

    if (warp < WARPGROUP / WARP) {
        float sum[NT][4] = {};
        const uint32_t left = rows_descriptor(shared_address(tiles.texts)),
                       right = rows_descriptor(shared_address(tiles.weights));
        pin_registers(sum);
#pragma unroll 1
        for (int k = 0; k < slice.width / 16; k++) {
            product_begin();
            product_step<T, false, false>(sum, left + step_columns<TEXTS>(k), right + step_columns<ROWS>(k), true);
            product_commit();
        }
        product_wait<0>();
        pin_registers(sum);
        const int lane = lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int octet = 2 * warp + half;
            if (octet * 8 >= a.N) break;
            const uint32_t to =
                cluster_address(tiles.sums + ((octet / S * S + rank) * 8 + g) * Tiles<NT>::PITCH + 2 * t, octet % S);
#pragma unroll
            for (int n = 0; n < NT; n++)
                cluster_store(to + n * 8 * int(sizeof(float)), sum[n][2 * half], sum[n][2 * half + 1]);
        }
    }
    cluster_arrive();
    cluster_wait();

#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (!finishes(e)) continue;
        float y[2] = {};
#pragma unroll
        for (int s = 0; s < S; s++) {
            const float* const from = tiles.sums + ((place(e) / 8 * S + s) * 8 + place(e) % 8) * Tiles<NT>::PITCH + row;
            y[0] += from[0], y[1] += from[HALF];
        }
        y[0] += bias[0], y[1] += bias[1];
        T* const out = a.out + text(e) * a.out_stride;
        if (is_swiglu) {
            if (output(row) < a.columns) out[output(row)] = from_float<T>(swiglu(y[0], y[1]));
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (output(row + half * HALF) >= a.columns) continue;
            float x = y[half];
            if (a.activation == Activation::GELU) x = gelu(x);
            if (a.activation == Activation::ReLU2) x = relu2(x);
            out[output(row + half * HALF)] = from_float<T>(x + as_float(residual[e][half]));
        }
    }
}

bool is_hopper() {
    static const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                               device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    return hopper;
}

struct Shape {
    int S, NT;
};
Shape shape_of(int64_t C, int64_t OC) {
    if (const char* e = std::getenv(str("SOME_", C, "x", OC).c_str())) return {e[0] - '0', e[1] - '0'};
    if (C <= 1024 && ceil_div(OC, 64) * 4 >= num_multiprocessors()) return {4, 8};
    if (C <= 1024) return {8, 4};
    return {8, ceil_div(OC, 48) * 8 <= num_multiprocessors() ? 6 : 8};
}

template <typename F>
void dispatch_shape(Shape s, F f) {
    const auto with = [&](auto clusters) {
        if (s.NT == 4) return f(clusters, std::integral_constant<int, 4>{});
        if (s.NT == 6) return f(clusters, std::integral_constant<int, 6>{});
        f(clusters, std::integral_constant<int, 8>{});
    };
    if (s.S == 4)
        with(std::integral_constant<int, 4>{});
    else
        with(std::integral_constant<int, 8>{});
}

}  // namespace

bool hopper_linear_takes(int64_t N, int64_t C, int64_t OC, bool has_norm) {
    static const int64_t max_weights = std::getenv("SOME_MAX") ? atoll(std::getenv("SOME_MAX")) : 4 << 20;
    const Shape shape = shape_of(C, OC);
    return is_hopper() && N <= TEXTS && C > 0 && C % W == 0 && C * OC <= max_weights &&
           C <= shape.S * (has_norm ? MAX_NORM_SLICE : MAX_SLICE) && !std::getenv("SOME_OFF");
}

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream) {
    const int64_t OC = a.activation == Activation::SwiGLU ? 2 * a.columns : a.columns;
    dispatch_shape(shape_of(a.C, OC), [&](auto clusters, auto n_tiles) {
        constexpr int S = decltype(clusters)::value, NT = decltype(n_tiles)::value;
        const int bytes = Tiles<NT>::bytes(slice_width<S>(a.C));
        const auto kernel = a.norm_weight ? cluster_kernel<T, S, NT, true> : cluster_kernel<T, S, NT, false>;
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
        const dim3 grid(S, unsigned(ceil_div(OC, 8 * NT)));
        launch_dependent_clusters(op, kernel, grid, S, THREADS, size_t(bytes), stream, a);
    });
}

template void hopper_linear(const char*, const Layer<bf16>&, Stream);
template void hopper_linear(const char*, const Layer<fp16>&, Stream);
