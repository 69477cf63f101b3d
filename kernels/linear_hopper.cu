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
constexpr int64_t MAX_WEIGHTS = 4 << 20;  // beyond, reading the weights takes longer than the library's launch

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

// --- many weights: a ring

// An output head: what counts is that reading it never pauses. Every block keeps all texts in shared memory and takes
// tiles of weight in turn; one warpgroup copies them to a ring of stages, from before the kernel before has ended, the
// other multiplies.
constexpr int STAGES = 5, STAGE_COLUMNS = 2 * CHUNK, MAX_RING_C = 1024;
constexpr int STAGE_ROWS = 64, STAGE_BYTES = STAGE_ROWS * STAGE_COLUMNS * 2;

struct RingBarriers {
    Barrier full[STAGES], empty[STAGES];
};

int ring_stages_of_row(int64_t C) {
    return int(ceil_div(C, STAGE_COLUMNS));
}
int ring_bytes(int64_t C) {
    return SWIZZLE_ALIGNMENT + ring_stages_of_row(C) * TEXTS * STAGE_COLUMNS * 2 + STAGES * STAGE_BYTES;
}

// All texts, normalised if there is a norm, to their tile of `width` columns, zeros from column C on.
template <typename T>
__device__ __forceinline__ void stage_texts(unsigned char* tile, const Layer<T>& a, int width) {
    constexpr int EACH = TEXTS / (THREADS / TEAM), PACKS = MAX_RING_C / CHUNK;
    const int C = int(a.C);
    const auto text = [&](int i) { return int(threadIdx.x) / TEAM + i * (THREADS / TEAM); };
    const auto column = [&](int p) { return p * CHUNK + int(threadIdx.x) % TEAM * W; };
    Pack<T, W> x[EACH][PACKS] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (text(i) < a.N && column(p) < C) x[i][p] = load_pack<W>(a.inp + text(i) * a.inp_stride + column(p));
    float means[EACH] = {}, rstds[EACH] = {};
    if (a.norm_weight) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float sum = 0;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const Floats<W> v = as_floats(x[i][p]);
#pragma unroll
                for (int k = 0; k < W; k++) sum += v[k];
            }
            if (a.centred) means[i] = team_sum(sum) / float(C);
            sum = 0;
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (column(p) >= C) continue;
                const Floats<W> v = as_floats(x[i][p]);
#pragma unroll
                for (int k = 0; k < W; k++) sum = fmaf(v[k] - means[i], v[k] - means[i], sum);
            }
            rstds[i] = 1 / sqrtf(team_sum(sum) / float(C) + a.eps);
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (column(p) >= width) continue;
        const bool inside = a.norm_weight && column(p) < C;
        Floats<W> weight = {}, bias = {};
        if (inside) weight = load_floats<W>(a.norm_weight + column(p));
        if (inside && a.norm_bias) bias = load_floats<W>(a.norm_bias + column(p));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (inside) {
                Floats<W> v = as_floats(x[i][p]);
#pragma unroll
                for (int k = 0; k < W; k++) v[k] = fmaf((v[k] - means[i]) * rstds[i], weight[k], bias[k]);
                x[i][p] = as_pack<T>(v);
            }
            *reinterpret_cast<Pack<T, W>*>(tile + tile_offset<TEXTS>(text(i), column(p))) = x[i][p];
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) ring_kernel(const Layer<T> a) {
    extern __shared__ unsigned char shared[];
    __shared__ RingBarriers barriers;
    let_next_start();
    const int per_row = (int(a.C) + STAGE_COLUMNS - 1) / STAGE_COLUMNS, width = per_row * STAGE_COLUMNS;
    unsigned char* const texts =
        shared + (SWIZZLE_ALIGNMENT - shared_address(shared) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
    unsigned char* const stages = texts + TEXTS * width * 2;
    const int64_t tiles = ceil_div(a.columns, STAGE_ROWS);
    const int64_t uses = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * per_row;  // of stages, by this block
    const bool copies = threadIdx.x >= WARPGROUP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&barriers.full[s], WARPGROUP);
            barrier_init(&barriers.empty[s], WARPGROUP);
        }
        barrier_init_fence();
    }
    __syncthreads();

    RingPosition<STAGES> place;
    int64_t tile = blockIdx.x;
    int part = 0;  // of the tile's rows
    const auto advance = [&] {
        place.advance();
        if (++part == per_row) part = 0, tile += gridDim.x;
    };
    const auto copy_stage = [&] {
        unsigned char* const stage = stages + place.stage * STAGE_BYTES;
        constexpr int PIECES = STAGE_COLUMNS / W;
        const int piece = int(threadIdx.x) % PIECES, column = part * STAGE_COLUMNS + piece * W;
#pragma unroll
        for (int i = 0; i < STAGE_ROWS / (WARPGROUP / PIECES); i++) {
            const int r = int(threadIdx.x) % WARPGROUP / PIECES + i * (WARPGROUP / PIECES);
            const int64_t o = tile * STAGE_ROWS + r;
            const bool inside = o < a.columns && column < int(a.C);
            copy_async_16(stage + tile_offset<STAGE_ROWS>(r, piece * W),
                          inside ? a.weight + o * a.weight_stride + column : a.weight, inside);
        }
        barrier_arrive_after_copies(&barriers.full[place.stage]);
        advance();
    };
    const int64_t first_uses = min(uses, int64_t(STAGES));
    if (copies)
        for (int64_t i = 0; i < first_uses; i++) copy_stage();
    wait_for_previous();
    stage_texts(texts, a, width);
    fence_async_proxy();
    __syncthreads();

    if (copies) {
        for (int64_t i = first_uses; i < uses; i++) {
            barrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
            copy_stage();
        }
        wait_for_copies();
        return;
    }
    const int warp = int(threadIdx.x) / WARP, lane = lane_id(), g = lane / 4, t = lane % 4;
    const bool pairs = a.columns % 2 == 0 && a.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(a.out) % 4 == 0;
    const uint32_t left = rows_descriptor(shared_address(texts));
    float sum[STAGE_ROWS / 8][4] = {};
    for (int64_t i = 0; i < uses; i++) {
        barrier_wait(&barriers.full[place.stage], place.parity);
        fence_async_proxy();
        const uint32_t right = rows_descriptor(shared_address(stages + place.stage * STAGE_BYTES));
        pin_registers(sum);
        product_begin();
#pragma unroll
        for (int k = 0; k < STAGE_COLUMNS / 16; k++)
            product_step<T, false, false>(sum, left + step_columns<TEXTS>(part * (STAGE_COLUMNS / 16) + k),
                                          right + step_columns<STAGE_ROWS>(k), part + k > 0);
        product_commit();
        product_wait<0>();
        pin_registers(sum);
        barrier_arrive(&barriers.empty[place.stage]);
        if (part == per_row - 1) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int n = 16 * warp + 8 * half + g;
                if (n >= a.N) continue;
#pragma unroll
                for (int j = 0; j < STAGE_ROWS / 8; j++) {
                    const int64_t o = tile * STAGE_ROWS + 8 * j + 2 * t;
                    if (o >= a.columns) continue;
                    float low = sum[j][2 * half], high = sum[j][2 * half + 1];
                    if (a.bias) low += as_float(a.bias[o]);
                    if (a.bias && o + 1 < a.columns) high += as_float(a.bias[o + 1]);
                    T* const to = a.out + n * a.out_stride + o;
                    if (pairs) {
                        *reinterpret_cast<uint32_t*>(to) = pack_two<T>(low, high);
                        continue;
                    }
                    to[0] = from_float<T>(low);
                    if (o + 1 < a.columns) to[1] = from_float<T>(high);
                }
            }
        }
        advance();
    }
}

template <typename T>
void launch_ring(const char* op, const Layer<T>& a, Stream stream) {
    const int bytes = ring_bytes(a.C);
    const auto kernel = ring_kernel<T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    const int64_t blocks = std::min(ceil_div(a.columns, STAGE_ROWS), num_multiprocessors());
    launch_dependent(op, kernel, grid_of(blocks), THREADS, size_t(bytes), stream, a);
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

// Whether the ring takes it: a plain product with tiles for all multiprocessors, again and again.
template <typename T>
bool in_ring(const Layer<T>& a) {
    return a.activation == Activation::None && !a.residual && a.C <= MAX_RING_C &&
           a.columns >= 2 * STAGE_ROWS * num_multiprocessors();
}

// f(blocks of a cluster, tiles of 8 rows of weight for each): as many blocks as there are multiprocessors, but no more
// than share the texts' sums in little time; slices that leave room for two blocks on each.
template <typename F>
void dispatch_cluster(int64_t C, int64_t OC, F f) {
    const auto eight = std::integral_constant<int, 8>{};
    const bool short_rows = C <= 4 * MAX_NORM_SLICE;
    if (short_rows && ceil_div(OC, 64) * 4 >= num_multiprocessors())
        f(std::integral_constant<int, 4>{}, eight);
    else if (short_rows)
        f(eight, std::integral_constant<int, 4>{});
    else if (ceil_div(OC, 48) * 8 <= num_multiprocessors())
        f(eight, std::integral_constant<int, 6>{});
    else
        f(eight, eight);
}

}  // namespace

template <typename T>
bool hopper_linear_takes(const Layer<T>& a) {
    if (!is_hopper() || a.N > TEXTS || a.C == 0 || a.C % W != 0) return false;
    return in_ring(a) ||
           (a.C * rows_of_weight(a) <= MAX_WEIGHTS && a.C <= 8 * (a.norm_weight ? MAX_NORM_SLICE : MAX_SLICE));
}

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream) {
    if (in_ring(a)) return launch_ring(op, a, stream);
    const int64_t OC = rows_of_weight(a);
    dispatch_cluster(a.C, OC, [&](auto blocks, auto tiles) {
        constexpr int S = decltype(blocks)::value, NT = decltype(tiles)::value;
        const int bytes = Tiles<NT>::bytes(slice_width<S>(a.C));
        const auto kernel = a.norm_weight ? cluster_kernel<T, S, NT, true> : cluster_kernel<T, S, NT, false>;
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
        const dim3 grid(S, unsigned(ceil_div(OC, 8 * NT)));
        launch_dependent_clusters(op, kernel, grid, S, THREADS, size_t(bytes), stream, a);
    });
}

template bool hopper_linear_takes(const Layer<bf16>&);
template bool hopper_linear_takes(const Layer<fp16>&);
template void hopper_linear(const char*, const Layer<bf16>&, Stream);
template void hopper_linear(const char*, const Layer<fp16>&, Stream);
