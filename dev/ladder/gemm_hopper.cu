// The matmul of a linear layer in bf16 on Hopper, rung by rung, from one tensor core instruction of a warp to the speed
// of a library: out[M, N] = inp[M, K]·weight[N, K]ᵀ, N and K multiples of 8. It goes on where the ladder matmul ends.
//
//     make ladder OP=gemm_hopper BACKEND=cuda ARCH=90a
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung. All load tiles of 64 columns of K by
// TMA, which swizzles them so that neither ldmatrix nor wgmma meets a bank conflict (kernels/cuda/swizzled_tile.cuh).
#include "dev/ladder/linear_layer.cuh"
#include "kernels/cuda/gemm_tiles.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"

namespace {

constexpr int BK = PANEL_COLUMNS;

struct Maps {
    CUtensorMap inp, weight;
};
template <int BM, int BN>
Maps maps_of(const LinearArguments<bf16>& p) {
    const auto map = [&](const bf16* data, int64_t rows, int box_rows) {
        return make_tensor_map("gemm ladder", Heads<bf16>{const_cast<bf16*>(data), p.K, p.K}, rows, 1, p.K, box_rows);
    };
    return {map(p.inp, p.M, BM), map(p.weight, p.N, BN)};
}

// A stage: the tiles of inp and weight for one step.
template <int BM, int BN>
struct Stage {
    alignas(SWIZZLE_ALIGNMENT) unsigned char inp[BM * PANEL_ROW_BYTES], weight[BN * PANEL_ROW_BYTES];
    // Called by one thread. Zeros outside the matrices.
    __device__ __forceinline__ void load(const Maps& maps, int m, int n, int step, Mbarrier* full) {
        mbarrier_arrive_expect_tx(full, sizeof(inp) + sizeof(weight));
        tma_load(inp, &maps.inp, step * BK, 0, m, full);
        tma_load(weight, &maps.weight, step * BK, 0, n, full);
    }
};

// Sums of a warp in the layout of mma.sync and wgmma: 16 rows from `row` on, 8·NT columns from `column` on.
template <int NT>
__device__ __forceinline__ void store_sums(const LinearArguments<bf16>& p, int row, int column,
                                           const float (&c)[NT][4]) {
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + half * 8 + lane / 4, j = column + n * 8 + lane % 4 * 2;
            if (i < p.M && j < p.N) store_floats<2>(p.out + i * p.N + j, {c[n][half * 2], c[n][half * 2 + 1]});
        }
}

template <int BM, int BN, typename Kernel>
void launch_tiles(Kernel kernel, const LinearArguments<bf16>& p, int threads, size_t bytes, Stream stream) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "gemm ladder");
    kernel<<<dim3(unsigned(ceil_div(p.N, BN)), unsigned(ceil_div(p.M, BM))), threads, bytes, cuda_stream(stream)>>>(
        p, maps_of<BM, BN>(p));
}

// --- TMA and mma.sync: 8 warps of 64 x 32 sums each

using MmaStage = Stage<128, 128>;

__global__ void __launch_bounds__(256) mma_kernel(LinearArguments<bf16> p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& stage = *reinterpret_cast<MmaStage*>(memory);
    __shared__ Mbarrier full;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int m0 = int(blockIdx.y) * 128, n0 = int(blockIdx.x) * 128, lane = lane_id();
    const int warp = threadIdx.x / WARP, m = warp / 4 * 64, n = warp % 4 * 32;
    const int steps = int(ceil_div(p.K, BK));
    float c[4][4][4] = {};
    for (int step = 0; step < steps; step++) {
        if (threadIdx.x == 0) stage.load(maps, m0, n0, step, &full);
        mbarrier_wait(&full, step % 2);
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                ldmatrix_x4(
                    a[i], shared_address(stage.inp + swizzled_offset<128>(m + i * 16 + lane % 16, k + lane / 16 * 8)));
#pragma unroll
            for (int j = 0; j < 2; j++)
                ldmatrix_x4(b[j],
                            shared_address(stage.weight + swizzled_offset<128>(n + j * 16 + lane % 8 + lane / 16 * 8,
                                                                               k + lane / 8 % 2 * 8)));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_m16n8k16<bf16>(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 4; i++) store_sums(p, m0 + m + i * 16, n0 + n, c[i]);
}

void mma(const LinearArguments<bf16>& p, Stream stream) {
    launch_tiles<128, 128>(mma_kernel, p, 256, sizeof(MmaStage), stream);
}

// --- wgmma: two warpgroups of 64 x BN sums each. c += a·b of one stage.

template <int BM, int BN>
__device__ __forceinline__ void multiply_stage(float (&c)[BN / 8][4], const Stage<BM, BN>& stage, int warpgroup,
                                               bool add) {
    const uint32_t a = k_major_descriptor(shared_address(stage.inp) + warpgroup * 64 * PANEL_ROW_BYTES);
    const uint32_t b = k_major_descriptor(shared_address(stage.weight));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; k++)
        wgmma_k16<bf16, false, false>(c, a + k_major_step<BM>(k), b + k_major_step<BN>(k), add || k > 0);
    wgmma_commit();
}

// The next STAGES − 1 stages are loaded while one is multiplied.
template <int STAGES>
__global__ void __launch_bounds__(256) wgmma_kernel(LinearArguments<bf16> p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto* const stages = reinterpret_cast<Stage<128, 128>*>(memory);
    __shared__ Mbarrier full[STAGES];
    const int m = int(blockIdx.y) * 128, n = int(blockIdx.x) * 128, steps = int(ceil_div(p.K, BK));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) mbarrier_init(&full[s], 1);
        mbarrier_init_fence();
        for (int s = 0; s < min(STAGES, steps); s++) stages[s].load(maps, m, n, s, &full[s]);
    }
    __syncthreads();
    const int warp = uniform(threadIdx.x / WARP);
    float c[16][4];
    RingPosition<STAGES> at;
    for (int step = 0; step < steps; step++, at.advance()) {
        mbarrier_wait(&full[at.stage], at.parity);
        multiply_stage(c, stages[at.stage], warp / 4, step > 0);
        wgmma_wait<0>();
        pin_registers(c);
        __syncthreads();  // all have read the stage
        if (threadIdx.x == 0 && step + STAGES < steps)
            stages[at.stage].load(maps, m, n, step + STAGES, &full[at.stage]);
    }
    store_sums(p, m + warp * 16, n, c);
}

template <int STAGES>
void wgmma(const LinearArguments<bf16>& p, Stream stream) {
    launch_tiles<128, 128>(wgmma_kernel<STAGES>, p, 256, STAGES * sizeof(Stage<128, 128>), stream);
}

// --- warp specialisation: a producer warp loads, the others multiply

constexpr int STAGES = 4;
struct SpecialisedShared {
    Stage<128, 256> stages[STAGES];
    MbarrierRing<STAGES> ring;
};

__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    specialised_kernel(LinearArguments<bf16> p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& shared = *reinterpret_cast<SpecialisedShared*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(8);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int m = int(blockIdx.y) * 128, n = int(blockIdx.x) * 256, steps = int(ceil_div(p.K, BK));
    const int warp = uniform(threadIdx.x / WARP);
    RingPosition<STAGES> at;
    if (warp >= 8) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * WARPGROUP)
            for (int step = 0; step < steps; step++, at.advance()) {
                shared.ring.wait_empty(at);
                shared.stages[at.stage].load(maps, m, n, step, &shared.ring.full[at.stage]);
            }
    } else {
        setmaxnreg_inc<232>();
        float c[32][4];
        RingPosition<STAGES> previous;
        for (int step = 0; step < steps; step++) {
            shared.ring.wait_full(at);
            multiply_stage(c, shared.stages[at.stage], warp / 4, step > 0);
            wgmma_wait<1>();
            if (step > 0) shared.ring.release(previous);
            previous = at;
            at.advance();
        }
        wgmma_wait<0>();
        pin_registers(c);
        store_sums(p, m + warp * 16, n, c);
    }
}

void specialised(const LinearArguments<bf16>& p, Stream stream) {
    launch_tiles<128, 256>(specialised_kernel, p, 3 * WARPGROUP, sizeof(SpecialisedShared), stream);
}

// --- persistent blocks

// A tile of out has BM x BN sums: of a block, whose two warpgroups share it (cooperative), or of each warpgroup
// (ping-pong). The CLUSTER blocks of a cluster have tiles below each other, with the same tile of weight.
template <int BM_, int BN_, bool PINGPONG_, int CLUSTER_, int STAGES_>
struct Shape {
    static constexpr int BM = BM_, BN = BN_, CLUSTER = CLUSTER_, STAGES = STAGES_;
    static constexpr bool PINGPONG = PINGPONG_;
    static constexpr int MB = BM / (PINGPONG ? 64 : 128);  // 64-row parts of a warpgroup's tile
    static constexpr int NT = BN / 8;
    static constexpr int READERS = PINGPONG ? 4 : 8;  // warps of a block that read a stage
    struct Shared {
        Stage<BM, BN> stages[STAGES];
        alignas(SWIZZLE_ALIGNMENT) unsigned char out[8][2][16 * PANEL_ROW_BYTES];  // two panels for each warp
        MbarrierRing<STAGES> ring;
    };
};

struct Persistent {
    CUtensorMap inp, weight, out;
    int rows, columns, group;  // tiles of clusters
    int steps;
};

// Each block loads its own tile of inp and a part of the tile of weight, which TMA writes to all blocks of the cluster.
template <typename S>
__device__ __forceinline__ void produce(const Persistent& p, typename S::Shared& shared, Tiles<Persistent> tiles,
                                        int rank) {
    constexpr int PART = S::BN / S::CLUSTER;
    RingPosition<S::STAGES> at;
    for (int row, column; tiles.next(row, column);)
        for (int step = 0; step < p.steps; step++, at.advance()) {
            shared.ring.wait_empty(at);
            Mbarrier* const full = &shared.ring.full[at.stage];
            Stage<S::BM, S::BN>& stage = shared.stages[at.stage];
            mbarrier_arrive_expect_tx(full, sizeof(stage.inp) + sizeof(stage.weight));
            tma_load(stage.inp, &p.inp, step * BK, 0, (row * S::CLUSTER + rank) * S::BM, full);
            const int first = rank * PART;
            if constexpr (S::CLUSTER > 1)
                tma_load_multicast(stage.weight + first * PANEL_ROW_BYTES, &p.weight, step * BK, 0,
                                   column * S::BN + first, full, (1 << S::CLUSTER) - 1);
            else
                tma_load(stage.weight, &p.weight, step * BK, 0, column * S::BN, full);
        }
}

// c = a·b, by a warpgroup whose rows begin at `row` of the block's tile. issued() is called once all wgmma
// instructions are issued.
template <typename S, typename Issued>
__device__ __forceinline__ void multiply(float (&c)[S::MB][S::NT][4], typename S::Shared& shared,
                                         RingPosition<S::STAGES>& at, int steps, int row, Issued issued) {
    RingPosition<S::STAGES> previous;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        shared.ring.wait_full(at);
        const Stage<S::BM, S::BN>& stage = shared.stages[at.stage];
        const uint32_t inp = shared_address(stage.inp) + row * PANEL_ROW_BYTES;
        const uint32_t weight = k_major_descriptor(shared_address(stage.weight));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; k++)
#pragma unroll
            for (int m = 0; m < S::MB; m++)
                wgmma_k16<bf16, false, false>(
                    c[m], k_major_descriptor(inp + m * 64 * PANEL_ROW_BYTES) + k_major_step<S::BM>(k),
                    weight + k_major_step<S::BN>(k), step > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release_in_cluster<S::CLUSTER>(shared.ring, previous);
        previous = at;
        at.advance();
    }
    issued();
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < S::MB; m++) pin_registers(c[m]);
    release_in_cluster<S::CLUSTER>(shared.ring, previous);
}

// Stores a warp's sums through its two panels alternately: one is filled while TMA stores the other.
template <typename S>
__device__ __forceinline__ void store_by_tma(const Persistent& p, unsigned char (&panels)[2][16 * PANEL_ROW_BYTES],
                                             int row, int column, const float (&c)[S::MB][S::NT][4]) {
    constexpr int TILES = PANEL_COLUMNS / 8;
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < S::MB; m++)
#pragma unroll
        for (int q = 0; q < S::NT / TILES; q++) {
            unsigned char* const panel = panels[q % 2];
            if (lane == 0) tma_store_wait<1>();
            __syncwarp();
            uint32_t rounded[TILES / 2][4];
#pragma unroll
            for (int k = 0; k < TILES / 2; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* const pair = c[m][q * TILES + 2 * k + i / 2] + i % 2 * 2;
                    rounded[k][i] = pack_two<bf16>(pair[0], pair[1]);
                }
            store_rounded<16>(panel, 0, rounded);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                tma_store(&p.out, column + q * PANEL_COLUMNS, 0, row + m * 64, panel);
                tma_store_commit();
            }
        }
}

// In ping-pong the warpgroups take alternate tiles: one multiplies while the other stores.
template <typename S>
__device__ __forceinline__ void consume(const Persistent& p, typename S::Shared& shared, Tiles<Persistent> tiles,
                                        int rank, int warp) {
    const int warpgroup = warp / 4, first_row = S::PINGPONG ? 0 : warpgroup * S::MB * 64;
    const auto admit_other = [&] {
        if constexpr (S::PINGPONG) named_barrier_arrive(2 - warpgroup, 2 * WARPGROUP);
    };
    if (warpgroup == 1) admit_other();
    RingPosition<S::STAGES> at;
    float c[S::MB][S::NT][4];
    bool mine = !S::PINGPONG || warpgroup == 0;
    for (int row, column; tiles.next(row, column);) {
        if (mine) {
            if constexpr (S::PINGPONG) named_barrier_sync(1 + warpgroup, 2 * WARPGROUP);
            multiply<S>(c, shared, at, p.steps, first_row, admit_other);
            store_by_tma<S>(p, shared.out[warp], (row * S::CLUSTER + rank) * S::BM + first_row + warp % 4 * 16,
                            column * S::BN, c);
        } else {
            at.advance(p.steps);
        }
        if (S::PINGPONG) mine = !mine;
    }
    tma_store_wait();  // the stores read the block's shared memory
}

template <typename S>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) persistent_kernel(const __grid_constant__ Persistent p) {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& shared = *reinterpret_cast<typename S::Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(S::READERS * S::CLUSTER);
        mbarrier_init_fence();
    }
    __syncthreads();
    if constexpr (S::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
    const int warp = uniform(threadIdx.x / WARP), rank = S::CLUSTER > 1 ? cluster_rank() : 0;
    const Tiles tiles(p, int(blockIdx.x) / S::CLUSTER, int(gridDim.x) / S::CLUSTER);
    if (warp >= 8) {
        setmaxnreg_dec<40>();
        if (warp == 8 && lane_id() == 0) produce<S>(p, shared, tiles, rank);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        consume<S>(p, shared, tiles, rank, warp);
    }
    if constexpr (S::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }  // no block writes to one that has left
}

template <typename S>
void persistent(const LinearArguments<bf16>& p, Stream stream) {
    const char* op = "gemm ladder";
    void (*const kernel)(Persistent) = persistent_kernel<S>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = S::CLUSTER;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(S::CLUSTER);
    config.blockDim = dim3(3 * WARPGROUP);
    config.dynamicSmemBytes = sizeof(typename S::Shared);
    config.stream = cuda_stream(stream);
    config.attrs = &cluster;
    config.numAttrs = S::CLUSTER > 1;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(typename S::Shared)),
               op);
    int resident = int(num_sms());  // clusters that run at the same time
    if constexpr (S::CLUSTER > 1) cuda_check(cudaOccupancyMaxActiveClusters(&resident, kernel, &config), op);

    const Maps maps = maps_of<S::BM, S::BN / S::CLUSTER>(p);
    Persistent arguments{};
    arguments.inp = maps.inp;
    arguments.weight = maps.weight;
    arguments.out = make_tensor_map(op, Heads<bf16>{p.out, p.N, p.N}, p.M, 1, p.N, 16);
    arguments.rows = int(ceil_div(p.M, S::BM * S::CLUSTER));
    arguments.columns = int(ceil_div(p.N, S::BN));
    arguments.group = 16 / S::CLUSTER;
    arguments.steps = int(ceil_div(p.K, BK));
    config.gridDim = dim3(unsigned(std::min(arguments.rows * arguments.columns, resident) * S::CLUSTER));
    cuda_check(cudaLaunchKernelEx(&config, kernel, arguments), op);
}

// --- kernels/gemm_hopper.h

void in_use(const LinearArguments<bf16>& p, Stream stream) {
    multiply_by(GemmKernel::Hopper1, p, stream);
}

using Cooperative = Shape<128, 256, false, 1, 4>;
using CooperativeCluster = Shape<128, 256, false, 2, 4>;
using PingPong = Shape<128, 128, true, 2, 6>;

const std::vector<Rung<bf16>> RUNGS = {
    {"TMA, mma.sync", mma,
     "One thread starts the copy of a whole tile; no thread computes addresses or holds data on the way. A warp "
     "multiplies 16 x 8 x 16 numbers at a time, from registers that ldmatrix fills. Copy, wait, multiply, barrier."},
    {"wgmma", wgmma<1>,
     "Four warps multiply 64 x 128 x 16 numbers with one instruction that reads both operands from shared memory. "
     "Registers hold sums only. Loads and multiplication still alternate."},
    {"ring of 4 stages", wgmma<4>,
     "The next three stages are loaded while one is multiplied. But all warps meet at a barrier in each step, and the "
     "tensor cores idle from one wgmma to the next."},
    {"warp specialisation", specialised,
     "A warp of its own loads, so the others wait for data only: mbarriers say when a stage is full and when it is "
     "read. The next wgmma is issued before the last has finished. With the loader's registers (setmaxnreg) a tile has "
     "128 x 256 sums, so L2 is read three quarters as often."},
    {"persistent", persistent<Cooperative>,
     "A block for each SM takes tile after tile: the loads of the next begin while the last is stored. Tiles are "
     "stored "
     "by TMA, and in an order in which blocks that run at the same time share rows and columns in L2."},
    {"persistent, clusters of 2", persistent<CooperativeCluster>,
     "Two SMs share the tile of weight: each loads half and TMA writes it to both. L2 is read two thirds as often."},
    {"ping-pong", persistent<PingPong>,
     "Each warpgroup has a tile of its own: one stores while the other multiplies. The tiles are smaller, so shared "
     "memory is the limit: a step reads 96 bytes of it a cycle and TMA writes 64, but it has 128."},
    {"the kernel in use", in_use,
     "Ping-pong with tiles of 128 x 192 (kernels/gemm_hopper.cuh): 192 sums take the most registers of a thread that "
     "fit. "
     "A step reads 85 bytes a cycle; TMA writes 53. It pays where K is short and where an activation function follows, "
     "which one warpgroup computes while the other multiplies."},
    {"cuBLASLt", library<bf16>, "The library's fastest algorithm for this size."},
};

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "M = N = K", 4096, 16384);
        if (!is_hopper()) {
            std::printf("The ladder gemm_hopper needs a Hopper GPU, this is %s\n", device_description().c_str());
            return true;
        }
        require(options.size % 8 == 0, "--size is ", options.size, ", expected a multiple of 8");
        const Stream stream = create_blas_stream();
        std::printf("out[%lld, %lld] = inp[M, K]·weight[N, K]ᵀ, M = N = K, on %s. %s\n\n", (long long)options.size,
                    (long long)options.size, device_description().c_str(), matmul_library());
        const LadderTable table =
            climb(RUNGS, {{1, 8, 8}, {131, 264, 72}, {200, 136, 72}, {128, 256, 64}, {129, 24, 1000}}, false,
                  options.size, stream);
        destroy_stream(stream);
        table.print();
        table.explain();
        write_ladder_csv(options.csv, {table});
        return table.correct();
    });
}
