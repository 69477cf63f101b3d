// Small-batch GEMM on Hopper GPUs: up to 64 rows of inp, 16-bit elements, TMA and wgmma in clusters. A launch takes a
// few microseconds, most of them latency. So every load is issued once and as early as possible, by TMA where no thread
// has to touch the data, and threads wait for bytes (mbarriers) instead of for each other.
//
// A cluster of S blocks multiplies all rows of inp by BLOCK_OC rows of weight; each block has a slice of C:
//
//   1. TMA loads the block's slice of the weights, which no other kernel writes, before the previous kernel has ended
//      (pdl.cuh).
//   2. TMA loads its slice of inp. With a norm, warps load rows to registers instead; the mean and M2 of every slice go
//      to all blocks of the cluster, which combine them (row_statistics.cuh). Where the layer before has made
//      UnscaledRows (linear.h), TMA loads x∘w, and the norm is applied to the sums: two warpgroups multiply the norm's
//      vectors by the weights while the previous kernel ends.
//   3. Two warpgroups multiply the 64 rows of inp, of which some may be missing, by half of the rows of weight each.
//   4. The partial sums go to the block that stores those rows, eight of every 8·S, which adds the S of them in order.
//      16 threads have a row of its tile, so that UnscaledRows of the next norm need no exchange between warps.
//
// A row's sums have one order, which follows from C and OC alone.
//
// One kernel serves layers with and without a norm, and loops are unrolled only where that gains something: the
// launches of a decode step follow each other, and each waits for instructions that have left the cache meanwhile.
//
//   threads               512: 4 warpgroups normalise, load biases and store; 2 of them multiply
//   tile                  64 rows of inp × 64 rows of weight × up to 6 panels of 64 columns (4 with a norm)
//   registers             64 (48 bytes of stack)
//   shared memory         5,152 B + 1 KiB (alignment) + 16 KiB a panel + 2,304·S·⌈8/S⌉ B (partial sums)
//   blocks per SM         2 (registers)
//
// (sm_90a, CUDA 13.0.)
//
// GPT-2 124M, 64 sequences, the q, k and v projection: C = 768 is 12 panels, OC = 2304 is 36 clusters. Blocks should
// not outnumber an H100's 132 SMs. S = 2 would take 6 panels a block, too many with a norm; S = 3 takes 4 and 108
// blocks; S = 4 would take 144 blocks. A block of S = 3 has 5,152 + 1,024 + 4·16,384 + 20,736 = 92,448 bytes of shared
// memory. fc has 48 clusters: behind UnscaledRows S = 2, 96 blocks, of which one runs on an SM and begins beside a
// block of proj; with a norm S = 3, 144 blocks, so that some SMs have two.
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_cluster.cuh"
#include "kernels/generation/linear_unscaled.cuh"

namespace {

constexpr int BLOCK_N = SMALL_BATCH_MAX_N, BLOCK_OC = 64, HALF_OC = BLOCK_OC / 2;
constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int WARPGROUP_OC = 32;     // rows of weight of a warpgroup; two of the four multiply
constexpr int PITCH = BLOCK_OC + 8;  // floats from one row's sums to the next row's, which begin in other banks
constexpr int W = 8;                 // elements of 16 bytes
constexpr int MAX_PANELS = 6;        // of a slice
constexpr int MAX_NORM_PANELS = WARP * W / PANEL_COLUMNS;  // the same with a norm: a lane has 16 bytes of a row

// How C is distributed over a cluster.
struct ClusterShape {
    int blocks;  // S
    int panels;  // of a slice
};

// Columns of block `rank`: `count` of C from `begin` on.
struct Slice {
    int begin, count;
};
__device__ __forceinline__ Slice slice_of(const ClusterShape& shape, int rank, int64_t C) {
    const int width = shape.panels * PANEL_COLUMNS, begin = rank * width;
    return {begin, max(0, min(width, int(C) - begin))};
}

struct Shared {
    Mbarrier weights_full, inp_full, statistics_full, sums_full;
    RowPart statistics[MAX_CLUSTER][BLOCK_N];  // of each block's slice
    // UnscaledRows: of each row of inp; for each row of weight Σ w·weight and Σ b·weight over the slice, w and b being
    // the norm's.
    RowScale scales[BLOCK_N];
    float2 norm_sums[BLOCK_OC];
};

struct Tiles {
    unsigned char *rows, *weights;
    float* sums;  // [groups of 8 rows stored here][S][8][PITCH]
    __device__ __forceinline__ Tiles(unsigned char* shared, int panels) {
        rows = shared + (SWIZZLE_ALIGNMENT - shared_address(shared) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
        weights = rows + panels * BLOCK_N * PANEL_ROW_BYTES;
        sums = reinterpret_cast<float*>(weights + panels * BLOCK_OC * PANEL_ROW_BYTES);
    }
    static int bytes(const ClusterShape& shape) {
        const int64_t groups = ceil_div(BLOCK_N / 8, shape.blocks) * shape.blocks;
        return SWIZZLE_ALIGNMENT + shape.panels * (BLOCK_N + BLOCK_OC) * PANEL_ROW_BYTES +
               int(groups) * 8 * PITCH * int(sizeof(float));
    }
};

// Normalises this block's slice of all rows into their tile.
template <typename T>
__device__ __forceinline__ void normalize_rows(unsigned char* tile, Shared& shared, const LinearParams<T>& p,
                                               const ClusterShape& shape, int rank) {
    constexpr int EACH = BLOCK_N / WARPS;
    const int lane = lane_id(), column = lane * W;
    const Slice slice = slice_of(shape, rank, p.C);
    const bool inside = column < slice.count;
    const auto row = [&](int i) { return int(threadIdx.x) / WARP + i * WARPS; };
    Pack<T, W> x[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const T* const from = p.inp + row(0) * p.inp_stride + slice.begin + column + i * WARPS * p.inp_stride;
        if (row(i) < p.N && inside) x[i] = load_pack<W>(from);
    }
    // As fp32 the rows would take twice the registers: this makes the compiler unpack them again each time.
    const auto keep_packed = [&] {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < W / 2; k++) asm volatile("" : "+r"(x[i].word[k]));
    };
    float means[EACH] = {}, m2[EACH] = {};
    if (p.centred) {
        const float per_slice = reciprocal_for<T>(float(max(1, slice.count)));
#pragma unroll
        for (int i = 0; i < EACH; i++) means[i] = add_elements(means[i], as_floats(x[i]));
#pragma unroll
        for (int i = 0; i < EACH; i++) means[i] = warp_sum(means[i]) * per_slice;
        keep_packed();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) m2[i] = add_squared_deviations(m2[i], as_floats(x[i]), means[i]);
#pragma unroll
    for (int i = 0; i < EACH; i++) m2[i] = warp_sum(inside ? m2[i] : 0.0f);
    if (lane < shape.blocks) {  // each lane sends to one block
        const uint32_t to = map_shared_rank(&shared.statistics[rank][row(0)], lane),
                       full = map_shared_rank(&shared.statistics_full, lane);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (row(i) < p.N) st_async(to + i * WARPS * int(sizeof(RowPart)), float2{means[i], m2[i]}, full);
    }
    // Eight neighbouring lanes combine the statistics of a row.
    constexpr int LANES = WARP / EACH;
    static_assert(LANES >= MAX_CLUSTER);
    const auto sum_over_lanes = [](float v) {
#pragma unroll
        for (int offset = 1; offset < LANES; offset *= 2) v += __shfl_xor_sync(ALL_LANES, v, offset);
        return v;
    };
    const float per_row = reciprocal_for<T>(float(p.C));
    const int s = lane % LANES;
    RowPart part{};
    float count = 0;
    Floats<W> weight{}, bias{};
    if (inside) weight = load_floats<W>(p.norm_weight + slice.begin + column);
    if (inside && p.norm_bias) bias = load_floats<W>(p.norm_bias + slice.begin + column);
    keep_packed();
    mbarrier_wait(&shared.statistics_full, 0);
    if (s < shape.blocks) {
        part = shared.statistics[s][row(lane / LANES)];
        count = float(slice_of(shape, s, p.C).count);
    }
    const float mean = sum_over_lanes(count * part.mean) * per_row,
                row_m2 = sum_over_lanes(m2_around(mean, part, count));
    const float scale = rsqrtf(fmaf(row_m2, per_row, p.eps)), shift = -mean * scale;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float row_scale = __shfl_sync(ALL_LANES, scale, i * LANES),
                    row_shift = __shfl_sync(ALL_LANES, shift, i * LANES);
        if (row(i) >= p.N || column >= shape.panels * PANEL_COLUMNS) continue;
        Floats<W> v = as_floats(x[i]);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = fmaf(fmaf(v[k], row_scale, row_shift), weight[k], bias[k]);
        *reinterpret_cast<Pack<T, W>*>(tile + swizzled_offset<BLOCK_N>(row(i), column)) = as_pack<T>(v);
    }
}

// One thread initialises the mbarriers and starts the loads of the weights.
__device__ __forceinline__ void load_weights(Shared& shared, const Tiles& tiles, const CUtensorMap& weight_map,
                                             const WeightRows& rows, int first_column, int panels, bool has_norm,
                                             int statistics_bytes, int sums_bytes) {
    mbarrier_init(&shared.weights_full, 1);
    mbarrier_init(&shared.inp_full, 1);
    mbarrier_init(&shared.statistics_full, 1);
    mbarrier_init(&shared.sums_full, 1);
    mbarrier_init_fence();
    if (has_norm) mbarrier_arrive_expect_tx(&shared.statistics_full, statistics_bytes);
    mbarrier_arrive_expect_tx(&shared.sums_full, sums_bytes);
    mbarrier_arrive_expect_tx(&shared.weights_full, panels * BLOCK_OC * PANEL_ROW_BYTES);
    if (!has_norm) mbarrier_arrive_expect_tx(&shared.inp_full, panels * BLOCK_N * PANEL_ROW_BYTES);
#pragma unroll 1
    for (int c = 0; c < panels; c++) {
        unsigned char* const panel = tiles.weights + c * BLOCK_OC * PANEL_ROW_BYTES;
        for (const bool second : {false, true})
            tma_load(panel + second * HALF_OC * PANEL_ROW_BYTES, &weight_map, first_column + c * PANEL_COLUMNS, 0,
                     second ? rows.second : rows.first, &shared.weights_full);
    }
}

// A warp multiplies the norm's vectors by eight rows of weight, of which four lanes have one each, as far as the slice
// goes.
template <typename T>
__device__ __forceinline__ void multiply_norm(Shared& shared, const Tiles& tiles, const LinearParams<T>& p,
                                              const Slice& slice, int first_row) {
    const int lane = lane_id(), row = first_row + lane % 8;
    float of_weight = 0, of_bias = 0;
    mbarrier_wait(&shared.weights_full, 0);
#pragma unroll 2
    for (int column = lane / 8 * W; column < slice.count; column += WARP / 8 * W) {
        const Floats<W> x = as_floats(*reinterpret_cast<const Pack<T, W>*>(tiles.weights +
                                                                           swizzled_offset<BLOCK_OC>(row, column))),
                        weight = load_floats<W>(p.norm_weight + slice.begin + column);
#pragma unroll
        for (int k = 0; k < W; k++) of_weight = fmaf(weight[k], x[k], of_weight);
        if (!p.norm_bias) continue;
        const Floats<W> bias = load_floats<W>(p.norm_bias + slice.begin + column);
#pragma unroll
        for (int k = 0; k < W; k++) of_bias = fmaf(bias[k], x[k], of_bias);
    }
#pragma unroll
    for (int offset = 8; offset < WARP; offset *= 2) {
        of_weight += __shfl_xor_sync(ALL_LANES, of_weight, offset);
        of_bias += __shfl_xor_sync(ALL_LANES, of_bias, offset);
    }
    if (lane < 8) shared.norm_sums[row] = {of_weight, of_bias};
}

// A warpgroup multiplies the rows of inp by WARPGROUP_OC rows of weight, from first_row of the tile on.
using WarpgroupSums = float[WARPGROUP_OC / 8][4];
template <typename T>
__device__ __forceinline__ void multiply(WarpgroupSums& sum, Shared& shared, const Tiles& tiles, int panels,
                                         bool has_norm, int first_row) {
    mbarrier_wait(&shared.weights_full, 0);
    if (!has_norm) mbarrier_wait(&shared.inp_full, 0);
    const uint32_t a = k_major_descriptor(shared_address(tiles.rows)),
                   b = k_major_descriptor(shared_address(tiles.weights) + first_row * PANEL_ROW_BYTES);
    pin_registers(sum);
#pragma unroll 1
    for (int c = 0; c < panels; c++) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL_COLUMNS / 16; k++)
            wgmma_k16<T, false, false>(
                sum, a + c * k_major_step<BLOCK_N>(PANEL_COLUMNS / 16) + k_major_step<BLOCK_N>(k),
                b + c * k_major_step<BLOCK_OC>(PANEL_COLUMNS / 16) + k_major_step<BLOCK_OC>(k), true);
        wgmma_commit();
    }
    wgmma_wait<0>();
    pin_registers(sum);
}

// Applies the norm to the sums of x∘w over the slice. It is linear in them, so that the slices' results can be added.
__device__ __forceinline__ void scale_sums(WarpgroupSums& sum, const Shared& shared, int first_row) {
    const int lane = lane_id(), warp = int(threadIdx.x) / WARP % (WARPGROUP / WARP);
    const RowScale scales[2] = {shared.scales[16 * warp + lane / 4], shared.scales[16 * warp + lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < WARPGROUP_OC / 8; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 norm = shared.norm_sums[first_row + 8 * n + 2 * (lane % 4) + k % 2];
            const RowScale& row = scales[k / 2];
            sum[n][k] = fmaf(fmaf(-row.mean, norm.x, sum[n][k]), row.rstd, norm.y);
        }
}

// The weights of the next norm at a thread's four outputs.
template <typename T>
__device__ __forceinline__ void load_next_weight(float (&weight)[2][2], const LinearParams<T>& p,
                                                 const UnscaledParams<T>& unscaled, const FourOutputs<T>& to) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (to.columns[i / 2] + i % 2 < p.columns)
            weight[i / 2][i % 2] = unscaled.next_weight[to.columns[i / 2] + i % 2];
}

// Stores the UnscaledRows of four outputs of a row, x, which are 0 past its end. 16 lanes have the row's part.
template <typename T>
__device__ __forceinline__ void store_unscaled(const LinearParams<T>& p, const UnscaledParams<T>& unscaled,
                                               const FourOutputs<T>& to, const float (&x)[2][2],
                                               const float (&weight)[2][2], int row) {
    const auto sum_of_part = [lanes = 0xffffu << (lane_id() & 16)](float v) {
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) v += __shfl_xor_sync(lanes, v, offset);
        return v;
    };
    const int part = int(blockIdx.y);
    const float count = float(min(int64_t(BLOCK_OC), p.columns - part * BLOCK_OC));
    const float mean = unscaled.next_centred ? sum_of_part(x[0][0] + x[0][1] + x[1][0] + x[1][1]) / count : 0.0f;
    float m2 = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = to.columns[i / 2] + i % 2;
        const float value = x[i / 2][i % 2];
        if (column >= p.columns) continue;
        m2 = fmaf(value - mean, value - mean, m2);
        unscaled.next_rows[row * p.columns + column] = from_float<T>(value * weight[i / 2][i % 2]);
    }
    m2 = sum_of_part(m2);
    if (lane_id() % 16 == 0) unscaled.next_parts[part * UNSCALED_MAX_ROWS + row] = {mean, m2};
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    cluster_kernel(const LinearParams<T> p, const UnscaledParams<T> unscaled, const ClusterShape shape,
                   const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap row_map) {
    extern __shared__ unsigned char dynamic[];
    __shared__ Shared shared;
    pdl_launch_dependents();
    const int rank = cluster_rank(), warp = int(threadIdx.x) / WARP, S = shape.blocks;
    const Slice slice = slice_of(shape, rank, p.C);
    const Tiles tiles(dynamic, shape.panels);
    const bool unscales = unscaled.parts, has_norm = p.norm_weight && !unscales;
    const int first_row = warp / (WARPGROUP / WARP) * WARPGROUP_OC;  // of the tile
    const bool multiplies = first_row < BLOCK_OC;
    const WeightRows weight_rows = WeightRows::of_block(p, HALF_OC);
    const int groups = stored_groups(p.N, rank, S);

    if (threadIdx.x == 0) {
        load_weights(shared, tiles, weight_map, weight_rows, slice.begin, shape.panels, has_norm,
                     S * p.N * int(sizeof(RowPart)), groups * S * 8 * BLOCK_OC * int(sizeof(float)));
        if (!has_norm) tma_prefetch_descriptor(&row_map);
    }
    cluster_arrive();
    // A thread stores four outputs of one row.
    const unsigned pair = threadIdx.x % (HALF_OC / 2), thread_row = threadIdx.x / (HALF_OC / 2), first_sum = 2 * pair;
    const int row = (int(thread_row / 8) * S + rank) * 8 + int(thread_row % 8);
    FourOutputs<T> outputs(p, weight_rows, column_of_pair(pair));
    outputs.load_bias(p);
    if (unscaled.next_rows && threadIdx.x == 0) {
        prefetch_line(unscaled.next_weight + outputs.columns[0]);
        if (outputs.columns[1] < p.columns) prefetch_line(unscaled.next_weight + outputs.columns[1]);
    }
    if (has_norm && threadIdx.x < 2 * WARP && lane_id() * W < slice.count) {
        const float* const vector = warp == 0 ? p.norm_weight : p.norm_bias;
        if (vector) prefetch_line(vector + slice.begin + lane_id() * W);
    }
    cluster_wait();  // all blocks have initialised their mbarriers
    const int eight = 8 * (warp - BLOCK_OC / WARPGROUP_OC * (WARPGROUP / WARP));  // of the warps that do not multiply
    if (unscales && !multiplies) multiply_norm(shared, tiles, p, slice, eight);
    pdl_wait();

    if (!has_norm && threadIdx.x == 0)
#pragma unroll 1
        for (int c = 0; c < shape.panels; c++)
            tma_load(tiles.rows + c * BLOCK_N * PANEL_ROW_BYTES, &row_map, slice.begin + c * PANEL_COLUMNS, 0, 0,
                     &shared.inp_full);
    if (has_norm) {
        normalize_rows(tiles.rows, shared, p, shape, rank);
        fence_async_proxy();
        __syncthreads();
    }
    if (unscales && !multiplies) {
        const RowScale scale = scale_of_row(p, unscaled.parts, eight + lane_id() % 8);
        if (lane_id() < 8) shared.scales[eight + lane_id()] = scale;
    }
    const bool stores = int(thread_row / 8) < groups && row < p.N;
    if (p.residual && stores) outputs.load_residual(p, row);

    WarpgroupSums sum = {};
    if (multiplies) multiply<T>(sum, shared, tiles, shape.panels, has_norm, first_row);
    if (unscales) {
        __syncthreads();
        if (multiplies) scale_sums(sum, shared, first_row);
    }
    if (multiplies) send_sums<PITCH>(sum, tiles.sums, &shared.sums_full, first_row, rank, S, p.N);
    if (!stores) return;
    float next_weight[2][2] = {};
    if (unscaled.next_rows) load_next_weight(next_weight, p, unscaled, outputs);
    mbarrier_wait(&shared.sums_full, 0);

    float y[2][2] = {}, x[2][2] = {};
    add_slices<PITCH, HALF_OC>(y, tiles.sums + (thread_row / 8 * S * 8 + thread_row % 8) * PITCH + first_sum, S);
    T* const out = p.out + row * p.out_stride;
    finish_outputs(p, outputs, y, [&](int half, int k, float z) {
        const T rounded = from_float<T>(z);
        out[outputs.columns[half] + k] = rounded;
        x[half][k] = as_float(rounded);
    });
    if (unscaled.next_rows) store_unscaled(p, unscaled, outputs, x, next_weight, row);
}

int64_t num_blocks(const ClusterShape& shape, int64_t OC) {
    return shape.blocks * ceil_div(OC, BLOCK_OC);
}

// As many blocks a cluster as leave each block an SM of its own, so that each has little to read; if there are more
// blocks than SMs anyway, as few as possible. 0 blocks: this kernel does not take the matrix.
ClusterShape cluster_shape(int64_t C, int64_t OC, bool has_norm) {
    if (!is_hopper() || C == 0 || C % W != 0) return {0, 0};
    const int64_t panels = ceil_div(C, PANEL_COLUMNS);
    ClusterShape best{0, 0};
    for (int S = 2; S <= MAX_CLUSTER; S++) {
        const ClusterShape shape{S, int(ceil_div(panels, S))};
        const bool idle = S > 2 && (S - 1) * shape.panels >= panels;  // some blocks would have no columns
        if (shape.panels > (has_norm ? MAX_NORM_PANELS : MAX_PANELS) || idle) continue;
        if (best.blocks == 0 || num_blocks(shape, OC) <= num_sms()) best = shape;
    }
    // With far more blocks than run at once, a second wave costs more than other kernels.
    return 2 * num_blocks(best, OC) <= 3 * num_sms() ? best : ClusterShape{0, 0};
}

}  // namespace

bool small_batch_hopper_takes_norm(int64_t C, int64_t OC) {
    return cluster_shape(C, OC, true).blocks > 0;
}
bool small_batch_hopper_takes_at_once(int64_t C, int64_t OC) {
    const ClusterShape shape = cluster_shape(C, OC, false);
    return shape.blocks > 0 && num_blocks(shape, OC) <= num_sms();
}

template <typename T>
bool linear_small_batch_hopper(const char* op, const LinearParams<T>& p, const UnscaledParams<T>& unscaled,
                               Stream stream) {
    if (!p.aligned || p.N > BLOCK_N) return false;
    const ClusterShape shape = cluster_shape(p.C, p.OC, p.norm_weight && !unscaled.parts);
    if (shape.blocks == 0) return false;
    const int bytes = Tiles::bytes(shape);
    const auto kernel = cluster_kernel<T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    const CUtensorMap weights =
                          make_tensor_map(op, Heads<const T>{p.weight, p.weight_stride, 0}, p.OC, 1, p.C, HALF_OC),
                      rows = make_tensor_map(op, Heads<const T>{p.inp, p.inp_stride, 0}, p.N, 1, p.C, BLOCK_N);
    const dim3 grid(unsigned(shape.blocks), unsigned(ceil_div(p.OC, BLOCK_OC)));
    launch_pdl_clusters(op, kernel, grid, unsigned(shape.blocks), THREADS, size_t(bytes), stream, p, unscaled, shape,
                        weights, rows);
    return true;
}

template bool linear_small_batch_hopper(const char*, const LinearParams<bf16>&, const UnscaledParams<bf16>&, Stream);
template bool linear_small_batch_hopper(const char*, const LinearParams<fp16>&, const UnscaledParams<fp16>&, Stream);
