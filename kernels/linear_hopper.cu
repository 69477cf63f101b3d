// 9 to 64 rows of inp, texts from here on, against a matrix on Hopper GPUs: some microseconds between a launch and the
// next, most of them spent waiting for something. So everything is asked for as early as it can be, once, and by many.
//
// A cluster of S blocks multiplies all texts by a tile of ROWS rows of weight, each block over its own slice of C:
//
//   1. its slices of the weights, which no other kernel writes, are on their way before the kernel before has ended
//      (dependent_launch.cuh);
//   2. its slices of the texts come to shared memory once. With a norm they come to registers; mean and squared
//      deviations of every slice go to all blocks of the cluster, which combine them (Chan et al. 1983);
//   3. a warpgroup or two multiply 64 texts, of which some may be missing, by the tile;
//   4. the sums go to the block that finishes those texts, eight of every 8·S, which adds the S of them up in order.
//
// A text's sums have one order, which follows from C and OC alone.
#include "kernels/activation.cuh"
#include "kernels/cluster.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/hopper.cuh"
#include "kernels/linear.cuh"

namespace {

constexpr int TEXTS = 64;
constexpr int W = 8;             // elements of 16 bytes
constexpr int TEAM = CHUNK / W;  // threads side by side in a row of a tile
constexpr int MAX_SLICE = 384;

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

// The slices of rows row(0), row(1), … to a tile of ROWS rows (hopper.cuh), asynchronously. Where row(i) is null the
// tile keeps what was there: no sum that anybody reads comes from it. Beyond the last column there are zeros.
template <int ROWS, int THREADS, typename T, typename Row>
__device__ __forceinline__ void load_slices(unsigned char* tile, const Slice& slice, Row row) {
#pragma unroll 2
    for (int i = int(threadIdx.x) / TEAM; i < ROWS; i += THREADS / TEAM) {
        const T* const from = row(i);
        if (!from) continue;
#pragma unroll 1
        for (int column = int(threadIdx.x) % TEAM * W; column < slice.width; column += CHUNK) {
            const bool inside = column < slice.count;
            copy_async_16(tile + tile_offset<ROWS>(i, column), inside ? from + slice.begin + column : from, inside);
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
    alignas(16) float weight[MAX_SLICE], bias[MAX_SLICE];
};

// The norm's vectors on their way.
template <int S, typename T>
__device__ __forceinline__ void load_norm(NormShared<S>& shared, const Layer<T>& a, const Slice& slice) {
    const int vector = int(threadIdx.x) / (MAX_SLICE / 4), column = int(threadIdx.x) % (MAX_SLICE / 4) * 4;
    if (vector > 1) return;
    const float* const from = vector == 0 ? a.norm_weight : a.norm_bias;
    const bool inside = from && column < slice.count;
    copy_async_16((vector == 0 ? shared.weight : shared.bias) + column,
                  inside ? from + slice.begin + column : a.norm_weight, inside);
}

// The slices of all texts, normalised, to their tile. `landed` waits for the norm's vectors.
template <int S, int THREADS, typename T, typename Landed>
__device__ __forceinline__ void normalise_texts(unsigned char* tile, NormShared<S>& shared, const Layer<T>& a, int rank,
                                                const Slice& slice, Landed landed) {
    constexpr int TEAMS = THREADS / TEAM, EACH = (TEXTS + TEAMS - 1) / TEAMS, PACKS = MAX_SLICE / CHUNK;
    const int lane = int(threadIdx.x) % TEAM;
    const float per_row = 1 / float(a.C), per_slice = 1 / float(max(1, slice.count));
    const auto text = [&](int i) { return int(threadIdx.x) / TEAM + i * TEAMS; };
    const auto column = [&](int p) { return p * CHUNK + lane * W; };
    Pack<T, W> x[EACH][PACKS] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (text(i) >= a.N) continue;
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (column(p) < slice.count)
                x[i][p] = load_pack<W>(a.inp + text(i) * a.inp_stride + slice.begin + column(p));
    }
    float means[EACH] = {}, squares[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (a.centred) {
            float sum = 0;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (p * CHUNK >= slice.count) break;
                const Floats<W> v = as_floats(x[i][p]);
#pragma unroll
                for (int k = 0; k < W; k++) sum += v[k];
            }
            means[i] = team_sum(sum) * per_slice;
        }
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (column(p) >= slice.count) break;
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
            if (text(i) < a.N)
                cluster_store(cluster_address(&shared.moments[rank][text(i)], lane), means[i], squares[i]);
    landed();
    cluster_arrive();
    cluster_wait();
    float scale[EACH] = {}, shift[EACH] = {};  // to mean 0 and variance 1
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (text(i) >= a.N) continue;
        float2 moments[S];
        float mean = 0, total = 0;
#pragma unroll
        for (int s = 0; s < S; s++) {
            moments[s] = shared.moments[s][text(i)];
            mean = fmaf(float(slice_of<S>(s, int(a.C)).count) * per_row, moments[s].x, mean);
        }
#pragma unroll
        for (int s = 0; s < S; s++) {
            const float apart = moments[s].x - mean;
            total += fmaf(float(slice_of<S>(s, int(a.C)).count), apart * apart, moments[s].y);
        }
        scale[i] = rsqrtf(fmaf(total, per_row, a.eps));
        shift[i] = -mean * scale[i];
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (column(p) >= slice.width) break;
        const Floats<W> weight = load_floats<W>(shared.weight + column(p)),
                        bias = load_floats<W>(shared.bias + column(p));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (text(i) >= a.N) continue;
            Floats<W> v = as_floats(x[i][p]);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = fmaf(fmaf(v[k], scale[i], shift[i]), weight[k], bias[k]);
            *reinterpret_cast<Pack<T, W>*>(tile + tile_offset<TEXTS>(text(i), column(p))) = as_pack<T>(v);
        }
    }
}

// What a block has in dynamic shared memory, for slices of `width` columns.
template <int NT>
struct Tiles {
    static constexpr int ROWS = 8 * NT;
    static constexpr int THREADS = 8 * ROWS;
    // A warpgroup multiplies by so many: by fewer, and the texts' tile would be read more often, by more, and others
    // would wait for longer.
    static constexpr int PRODUCT_ROWS = 32;
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
__global__ void __launch_bounds__(Tiles<NT>::THREADS, 2) cluster_kernel(const Layer<T> a) {
    // A thread finishes rows r and r + HALF of a tile; with SwiGLU the one is gate's, the other up's.
    constexpr int ROWS = 8 * NT, THREADS = Tiles<NT>::THREADS, MINE = Tiles<NT>::PRODUCT_ROWS, HALF = ROWS / 2,
                  FINISHED = TEXTS / S, EACH = (FINISHED * HALF + THREADS - 1) / THREADS;
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
    load_slices<ROWS, THREADS, T>(tiles.weights, slice, [&](int r) {
        return output(r) < a.columns ? a.weight + weight_row(r) * a.weight_stride : nullptr;
    });
    commit_copies();
    const int row = int(threadIdx.x) % HALF;
    T bias[2] = {};
    if (a.bias)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (output(row + half * HALF) < a.columns) bias[half] = a.bias[weight_row(row + half * HALF)];
    wait_for_previous();

    // Of the texts that this block finishes, `place` counts; they are octets rank, rank + S, … of all.
    const auto place = [&](int e) { return int(threadIdx.x) / HALF + e * (THREADS / HALF); };
    const auto text = [&](int e) { return (place(e) / 8 * S + rank) * 8 + place(e) % 8; };
    const auto finishes = [&](int e) { return place(e) < FINISHED && text(e) < a.N; };
    if constexpr (!NORM)
        load_slices<TEXTS, THREADS, T>(tiles.texts, slice,
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
        normalise_texts<S, THREADS>(tiles.texts, norm, a, rank, slice, [] { wait_for_copy_groups<1>(); });
    else
        cluster_wait();  // for all to have started
    wait_for_copies();
    fence_async_proxy();
    __syncthreads();

    const int first_row = warp / (WARPGROUP / WARP) * MINE;  // of those that this warpgroup multiplies by
    if (first_row < ROWS) {
        float sum[MINE / 8][4] = {};
        const uint32_t left = rows_descriptor(shared_address(tiles.texts)),
                       right = rows_descriptor(shared_address(tiles.weights) + first_row * CHUNK_ROW);
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
            const int octet = warp % (WARPGROUP / WARP) * 2 + half;
            if (octet * 8 >= a.N) break;
            const float* const place_there =
                tiles.sums + ((octet / S * S + rank) * 8 + g) * Tiles<NT>::PITCH + first_row + 2 * t;
            const uint32_t to = cluster_address(place_there, octet % S);
#pragma unroll
            for (int n = 0; n < MINE / 8; n++)
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
        y[0] += as_float(bias[0]), y[1] += as_float(bias[1]);
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

template <typename T>
int64_t rows_of_weight(const Layer<T>& a) {
    return a.activation == Activation::SwiGLU ? 2 * a.columns : a.columns;
}

// The shape in which clusters meet a matrix: as few blocks as keep slices short, so that blocks of the next kernel find
// room beside them and start early; narrow tiles where the matrix has few rows.
struct Shape {
    int blocks;  // of a cluster
    int tiles;   // of 8 rows of weight for each cluster
};
Shape shape_of(int64_t C, int64_t OC) {
    const int tiles = OC >= 16 * num_multiprocessors() ? 8 : 4;
    return {C <= 2 * MAX_SLICE ? 2 : C <= 4 * MAX_SLICE ? 4 : 8, tiles};
}
template <typename F>
void dispatch(const Shape& shape, F f) {
    const auto with = [&](auto blocks) {
        if (shape.tiles == 4) return f(blocks, std::integral_constant<int, 4>{});
        f(blocks, std::integral_constant<int, 8>{});
    };
    if (shape.blocks == 2) return with(std::integral_constant<int, 2>{});
    if (shape.blocks == 4) return with(std::integral_constant<int, 4>{});
    with(std::integral_constant<int, 8>{});
}
int64_t clusters_of(const Shape& shape, int64_t OC) {
    return ceil_div(OC, 8 * shape.tiles);
}

}  // namespace

// Where not all blocks run at once, a second wave costs more than what the library loses.
template <typename T>
bool hopper_linear_takes(const Layer<T>& a) {
    if (!is_hopper() || a.N > TEXTS || a.C == 0 || a.C % W != 0 || a.C > 8 * MAX_SLICE) return false;
    const int64_t OC = rows_of_weight(a);
    const Shape shape = shape_of(a.C, OC);
    return 2 * shape.blocks * clusters_of(shape, OC) <= 3 * num_multiprocessors();
}

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream) {
    const Shape shape = shape_of(a.C, rows_of_weight(a));
    dispatch(shape, [&](auto blocks, auto tiles) {
        constexpr int S = decltype(blocks)::value, NT = decltype(tiles)::value;
        const int bytes = Tiles<NT>::bytes(slice_width<S>(a.C));
        const auto kernel = a.norm_weight ? cluster_kernel<T, S, NT, true> : cluster_kernel<T, S, NT, false>;
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
        const dim3 grid(S, unsigned(clusters_of(shape, rows_of_weight(a))));
        launch_dependent_clusters(op, kernel, grid, S, Tiles<NT>::THREADS, size_t(bytes), stream, a);
    });
}

template bool hopper_linear_takes(const Layer<bf16>&);
template bool hopper_linear_takes(const Layer<fp16>&);
template void hopper_linear(const char*, const Layer<bf16>&, Stream);
template void hopper_linear(const char*, const Layer<fp16>&, Stream);
