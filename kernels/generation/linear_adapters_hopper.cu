// Linear layers whose rows use LoRA adapters, for 9 to 64 rows of 16-bit elements on Hopper GPUs (lora_rows.h has the
// formulas). Two launches a layer, the same kernel:
//
//   1. low_rank[n, p, a·R + r] = A[a, p·R + r]·x[n] if row n uses adapter a, else 0: one matmul for all adapters, whose
//      matrices A are as one matrix [adapters·parts·R, C].
//   2. y[n, o] = Σ_c weight[o, c]·x[n, c] + Σ_k B[o, k]·low_rank[n, p(o), k], k = a·R + r: the columns of all adapters
//      follow those of C in one sum. So bias, activation and residual are applied where the sum ends, and y is never
//      read again. The zeros of other adapters cost columns, adapters·R beside C, and no launches.
//
// A cluster of S blocks multiplies all rows of inp by BLOCK_OC rows of weight. The columns are panels of 64, those of C
// and then those of adapters·R; each block has a slice of the panels. One thread loads panels by TMA into a ring of
// stages, the first of them before the previous kernel has ended (pdl.cuh), for no kernel writes weights. Two
// warpgroups multiply one half of the block's rows of weight each. linear_cluster.cuh says how sums are added.
//
//   BLOCK_OC              128                        64
//   threads               288: 2 warpgroups multiply and store, a warp loads
//   stages                3 of 24 KiB                5 of 16 KiB
//   shared memory         109,568 B                  101,376 B
//   registers             84                         84
//   blocks per SM         2                          2
//
// (sm_90a, CUDA 13.0; no stack.)
//
// Half of a block's rows of weight must be outputs of one part, whose columns of low_rank they multiply; where the
// other half belongs to another part, as with SwiGLU's gate and up, each half has panels of its own.
//
// LLaMA 1B, 64 rows, 8 adapters of rank 16; an H200's 132 SMs take 264 blocks. fc: C = 2,048 is 32 panels, and two
// parts of 128 columns are 2 · 2 panels more. OC = 16,384 is 128 clusters of S = 2: 256 blocks of 18 panels. They
// read 67.1 MB of weights and 4.2 MB of B: 14.9 µs at 4.8 TB/s. The first launch for it: A is [256, 2,048], 4 clusters
// of 8 blocks of 4 panels, 1 MB, so a launch and two latencies, 3 µs predicted. A layer has four such pairs.
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_cluster.cuh"

namespace {

constexpr int BLOCK_N = SMALL_BATCH_MAX_N, CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARP;

// Sizes for blocks of 16·NT rows of weight.
template <int NT>
struct Block {
    static constexpr int HALF_OC = 8 * NT, OC = 2 * HALF_OC, STAGES = NT == 8 ? 3 : 5;
    static constexpr int PITCH = OC + 8;  // floats from one row's sums to the next row's, which begin in other banks
    static constexpr int ROWS_BYTES = BLOCK_N * PANEL_ROW_BYTES, HALF_BYTES = HALF_OC * PANEL_ROW_BYTES;
    static constexpr int STAGE_BYTES = ROWS_BYTES + 2 * HALF_BYTES;
    static constexpr int PAIRS = HALF_OC / 2;  // of adjacent outputs of half a row
    // S divides the 8 groups of 8 rows, so that the blocks store the same number of them.
    static constexpr int SHARED_BYTES = SWIZZLE_ALIGNMENT + STAGES * STAGE_BYTES + BLOCK_N * PITCH * int(sizeof(float));
};

// The panels of a block's rows of weight.
struct Panels {
    int own, adapters;            // of C; of adapters·R
    int first_part, second_part;  // of the outputs of each half
    __device__ __forceinline__ int count() const { return own + adapters * (first_part == second_part ? 1 : 2); }
    __device__ __forceinline__ bool is_own(int panel) const { return panel < own; }
    __device__ __forceinline__ int part_of(int panel) const {
        return panel < own + adapters ? first_part : second_part;
    }
    __device__ __forceinline__ int column_of(int panel) const {
        return (is_own(panel) ? panel : (panel - own) % adapters) * PANEL_COLUMNS;
    }
    __device__ __forceinline__ bool has(int panel, int half) const {
        return is_own(panel) || part_of(panel) == (half ? second_part : first_part);
    }
};

// How the kernel is launched.
struct Shape {
    int blocks;          // S: 2, 4 or 8
    int panels;          // of C
    int adapter_panels;  // of adapters·R; 0: none
    int part_ends[3], parts;
    const int32_t* adapter_of_row;  // null, or outputs are low_rank's: 0 unless the row uses their adapter
    int adapters, R;

    __device__ __forceinline__ int part_of(int output) const {
        return (parts > 1 && output >= part_ends[0]) + (parts > 2 && output >= part_ends[1]);
    }
};

struct Maps {
    CUtensorMap rows, weights, low_rank, b;
};

// What one thread does: it loads panels begin … end − 1 of the block.
template <int NT>
struct Loader {
    using B = Block<NT>;
    MbarrierRing<B::STAGES>& ring;
    unsigned char* const stages;
    const Maps& maps;
    const Panels& panels;
    const WeightRows& rows;
    const int begin, end;

    __device__ __forceinline__ void load_weights(int stage, int panel) const {
        const bool first = panels.has(panel, 0), second = panels.has(panel, 1);
        mbarrier_arrive_expect_tx(&ring.full[stage], B::ROWS_BYTES + (first + second) * B::HALF_BYTES);
        const CUtensorMap* const map = panels.is_own(panel) ? &maps.weights : &maps.b;
        unsigned char* const to = stages + stage * B::STAGE_BYTES + B::ROWS_BYTES;
        if (first) tma_load(to, map, panels.column_of(panel), 0, rows.first, &ring.full[stage]);
        if (second) tma_load(to + B::HALF_BYTES, map, panels.column_of(panel), 0, rows.second, &ring.full[stage]);
    }
    // Those that fit into the ring: no kernel writes them.
    __device__ __forceinline__ void load_first_weights() const {
#pragma unroll 1
        for (int i = 0; i < min(end - begin, B::STAGES); i++) load_weights(i, begin + i);
    }
    __device__ __forceinline__ void load_all_else() const {
        RingPosition<B::STAGES> at;
#pragma unroll 1
        for (int panel = begin; panel < end; panel++) {
            if (panel >= begin + B::STAGES) {
                ring.wait_empty(at);
                load_weights(at.stage, panel);
            }
            const bool own = panels.is_own(panel);
            tma_load(stages + at.stage * B::STAGE_BYTES, own ? &maps.rows : &maps.low_rank, panels.column_of(panel),
                     own ? 0 : panels.part_of(panel), 0, &ring.full[at.stage]);
            at.advance();
        }
    }
};

// A warpgroup multiplies all rows of inp by its half of the rows of weight.
template <typename T, int NT>
__device__ __forceinline__ void multiply(float (&sum)[NT][4], MbarrierRing<Block<NT>::STAGES>& ring,
                                         const unsigned char* stages, const Panels& panels, int half, int begin,
                                         int end) {
    using B = Block<NT>;
    RingPosition<B::STAGES> at;
    pin_registers(sum);
#pragma unroll 1
    for (int panel = begin; panel < end; panel++) {
        ring.wait_full(at);
        if (panels.has(panel, half)) {
            const uint32_t rows = shared_address(stages) + at.stage * B::STAGE_BYTES, a = k_major_descriptor(rows),
                           b = k_major_descriptor(rows + B::ROWS_BYTES + half * B::HALF_BYTES);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < PANEL_COLUMNS / 16; k++)
                wgmma_k16<T, false, false>(sum, a + k_major_step<BLOCK_N>(k), b + k_major_step<B::HALF_OC>(k), true);
            wgmma_commit();
            wgmma_wait<0>();
        }
        ring.release_and_advance(at);
    }
    pin_registers(sum);
}

// An output of the first launch: its adapter, and its column of low_rank. 8 divides R: those of a pair are adjacent.
struct LowRankColumn {
    int adapter, column;
    __device__ __forceinline__ LowRankColumn(const Shape& s, int output) {
        const int width = s.parts * s.R, rest = output % width;
        adapter = output / width;
        column = (rest / s.R * s.adapters + adapter) * s.R + rest % s.R;
    }
};

// blockIdx: rank in the cluster, rows of weight.
template <typename T, int NT>
__global__ void __launch_bounds__(THREADS, 2)
    ring_kernel(const LinearParams<T> p, const Shape shape, const __grid_constant__ Maps maps) {
    using B = Block<NT>;
    extern __shared__ unsigned char dynamic[];
    __shared__ MbarrierRing<B::STAGES> ring;
    __shared__ Mbarrier sums_full;
    pdl_launch_dependents();
    unsigned char* const stages =
        dynamic + (SWIZZLE_ALIGNMENT - shared_address(dynamic) % SWIZZLE_ALIGNMENT) % SWIZZLE_ALIGNMENT;
    float* const sums = reinterpret_cast<float*>(stages + B::STAGES * B::STAGE_BYTES);
    const int rank = cluster_rank(), S = shape.blocks, groups = stored_groups(p.N, rank, S);
    const WeightRows rows = WeightRows::of_block(p, B::HALF_OC);
    const Panels panels{shape.panels, shape.adapter_panels, shape.part_of(rows.first),
                        shape.part_of(min(rows.second, int(p.OC) - 1))};
    const int each = (panels.count() + S - 1) / S, begin = min(rank * each, panels.count()),
              end = min(begin + each, panels.count());
    const Loader<NT> loader{ring, stages, maps, panels, rows, begin, end};
    if (threadIdx.x == CONSUMERS) {
        ring.init(CONSUMERS / WARP);
        mbarrier_init(&sums_full, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_tx(&sums_full, groups * S * 8 * B::OC * int(sizeof(float)));
        loader.load_first_weights();
    }
    cluster_arrive();
    if (threadIdx.x >= CONSUMERS) {
        cluster_wait();
        pdl_wait();
        if (threadIdx.x == CONSUMERS) loader.load_all_else();
        return;
    }
    // A thread stores several times four outputs, of the same columns.
    const unsigned pair = threadIdx.x % B::PAIRS;
    FourOutputs<T> outputs(p, rows, column_of_pair(pair));
    outputs.load_bias(p);
    int to_adapter[2] = {}, to_column[2] = {outputs.columns[0], outputs.columns[1]};
    if (shape.adapter_of_row)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const LowRankColumn to(shape, outputs.columns[i]);
            to_adapter[i] = to.adapter;
            to_column[i] = to.column;
        }
    cluster_wait();  // all blocks have initialised their mbarriers
    pdl_wait();

    const int half = uniform(int(threadIdx.x) / WARPGROUP);
    float sum[NT][4] = {};
    multiply<T>(sum, ring, stages, panels, half, begin, end);
    send_sums<B::PITCH>(sum, sums, &sums_full, half * B::HALF_OC, rank, S, p.N);
    const auto row_of = [&](int stored) { return (stored / 8 * S + rank) * 8 + stored % 8; };
    const int first = int(threadIdx.x) / B::PAIRS;
    if (p.residual && first < groups * 8 && row_of(first) < p.N) outputs.load_residual(p, row_of(first));
    mbarrier_wait(&sums_full, 0);
#pragma unroll 1
    for (int stored = first; stored < groups * 8 && row_of(stored) < p.N; stored += CONSUMERS / B::PAIRS) {
        const int row = row_of(stored);
        if (p.residual && stored > first) outputs.load_residual(p, row);
        float y[2][2] = {};
        add_slices<B::PITCH, B::HALF_OC>(y, sums + (stored / 8 * S * 8 + stored % 8) * B::PITCH + 2 * pair, S);
        T* const out = p.out + row * p.out_stride;
        const int adapter = shape.adapter_of_row ? shape.adapter_of_row[row] : -1;
        finish_outputs(p, outputs, y, [&](int part, int k, float z) {
            const bool used = !shape.adapter_of_row || adapter == to_adapter[part];
            out[to_column[part] + k] = from_float<T>(used ? z : 0.0f);
        });
    }
}

template <int NT>
bool halves_have_one_part(int64_t columns, bool gated, const Shape& shape) {
    if (gated) return shape.parts == 1 || (shape.parts == 2 && shape.part_ends[0] == columns);
    for (int part = 0; part + 1 < shape.parts; part++)
        if (shape.part_ends[part] % Block<NT>::HALF_OC != 0) return false;
    return true;
}

// As many blocks a cluster as run at once, two on each SM, with two panels or more.
int cluster_blocks(int64_t clusters, int64_t panels) {
    int S = 2;
    while (S < MAX_CLUSTER && 2 * S * clusters <= 2 * num_sms() && panels >= 4 * S) S *= 2;
    return S;
}

template <int NT, typename T>
void launch(const char* op, const LinearParams<T>& p, Shape shape, const AdapterParams<T>& a, Stream stream) {
    using B = Block<NT>;
    const auto kernel = ring_kernel<T, NT>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, B::SHARED_BYTES), op);
    const int64_t columns = int64_t(a.adapters) * a.R;
    const auto matrix = [&](const T* data, int64_t stride, int64_t rows, int64_t C, int box) {
        return make_tensor_map(op, Heads<const T>{data, stride, 0}, rows, 1, C, box);
    };
    const Maps maps{
        matrix(p.inp, p.inp_stride, p.N, p.C, BLOCK_N), matrix(p.weight, p.weight_stride, p.OC, p.C, B::HALF_OC),
        make_tensor_map(op, Heads<const T>{a.low_rank, a.parts * columns, columns}, p.N, a.parts, columns, BLOCK_N),
        matrix(a.b, columns, a.part_ends[a.parts - 1], columns, B::HALF_OC)};
    const int64_t clusters = ceil_div(p.OC, B::OC);
    shape.blocks = cluster_blocks(clusters, shape.panels + shape.adapter_panels);
    launch_pdl_clusters(op, kernel, dim3(unsigned(shape.blocks), unsigned(clusters)), unsigned(shape.blocks), THREADS,
                        size_t(B::SHARED_BYTES), stream, p, shape, maps);
}

}  // namespace

template <typename T>
bool linear_adapters_hopper(const char* op, const LinearParams<T>& p, const AdapterParams<T>& a, Stream stream) {
    if (!is_hopper() || !p.aligned || p.N > BLOCK_N || p.C == 0 || p.C % 8 != 0) return false;
    Shape shape{};
    shape.panels = int(ceil_div(p.C, PANEL_COLUMNS));
    shape.adapters = a.adapters;
    shape.parts = a.parts;
    shape.R = a.R;
    for (int i = 0; i < a.parts; i++) shape.part_ends[i] = a.part_ends[i];
    // Blocks of 128 rows read inp half as often, but of a small matrix there would be too few.
    const bool large = 4 * MAX_CLUSTER * ceil_div(p.OC, Block<8>::OC) >= 3 * num_sms(), gated = is_gated(p.activation);
    if (!(large ? halves_have_one_part<8> : halves_have_one_part<4>)(p.columns, gated, shape)) return false;

    LinearParams<T> first{};
    first.inp = p.inp;
    first.inp_stride = p.inp_stride;
    first.weight = a.a;
    first.weight_stride = first.C = p.C;
    first.OC = first.columns = first.out_stride = int64_t(a.adapters) * a.parts * a.R;
    first.N = p.N;
    first.out = a.low_rank;
    first.activation = Activation::None;
    shape.adapter_of_row = a.adapter_of_row;
    launch<4>(op, first, shape, a, stream);

    shape.adapter_of_row = nullptr;
    shape.adapter_panels = int(ceil_div(int64_t(a.adapters) * a.R, PANEL_COLUMNS));
    large ? launch<8>(op, p, shape, a, stream) : launch<4>(op, p, shape, a, stream);
    return true;
}

template bool linear_adapters_hopper(const char*, const LinearParams<bf16>&, const AdapterParams<bf16>&, Stream);
template bool linear_adapters_hopper(const char*, const LinearParams<fp16>&, const AdapterParams<fp16>&, Stream);
