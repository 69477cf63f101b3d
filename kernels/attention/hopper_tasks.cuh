// The persistent, warp-specialised structure that the attention kernels for Hopper GPUs share.
//
// One block, or two, run on each SM and work through tasks, tiles of rows of one sequence and head. One producer warp
// takes tasks from a counter in global memory and loads their tiles by TMA; one to three consumer warpgroups compute.
// Tasks and tiles reach the consumers through rings of stages in shared memory, guarded by mbarriers.
#pragma once

#include "kernels/attention/attention.cuh"
#include "kernels/cuda/warpgroup_tile.cuh"

namespace hopper {

// The tokens that are cut into tiles of `rows`: the queries, or the keys.
struct Tiled {
    const int32_t* cum;
    int64_t tokens;
    int rows;
};

// The order of tasks puts the longest first, so that all blocks end at about the same time. But it goes section by
// section: a section's pairs of a sequence and a head are few enough that the tensors of their inner loops stay in L2.
//
// Where a count of sequences is given, tiles have an index across the sequences in use (packed_tile() in
// attention.cuh): the heads of a tile follow each other, so that the few sequences at work stay in L2, and each
// sequence starts with its longest tile.
struct Schedule {
    int64_t pairs, heads;  // the sequence after the last stands for the tokens that belong to none
    int tiles;             // of the longest sequence
    int section;           // pairs
    uint32_t* next;        // the next task's index; 0 at the start
    Tiled tiled;

    // Upper bound of the tasks.
    template <typename T>
    int64_t tasks(const Attention<T>& a) const {
        return a.count ? packed_tiles(a.S, tiled.tokens, tiled.rows) * heads : pairs * tiles;
    }
};

struct Task {
    int rank;   // of the tile, 0 for the longest of its pair; −1: there are no more tasks
    int tiles;  // of the sequence, at least
    int head, sequence;
    Sequence seq;
};

// Tasks on their way from the producer warp, which is one task ahead, to the consumers.
struct TaskRing {
    static constexpr int STAGES = 2;
    MbarrierRing<STAGES> ring;
    Task tasks[STAGES];
};

// The producer's end. The atomic on the counter takes about a microsecond, so it is issued one task ahead.
template <typename T>
class TaskProducer {
  public:
    __device__ __forceinline__ TaskProducer(const Attention<T>& a, const Schedule& schedule, TaskRing& ring)
        : a_(a), schedule_(schedule), ring_(ring), used_(a.count ? sequences_in_use(a) : 0) {
        fetch_index();
    }
    __device__ __forceinline__ bool next(Task& task) {
        const uint32_t i = uint32_t(uniform(int(index_)));
        task = {-1, 0, 0, 0, {}};
        if (a_.count) {
            const uint32_t heads = uint32_t(schedule_.heads);
            const Tiled& tiled = schedule_.tiled;
            const PackedTile t = packed_tile(a_, used_, tiled.cum, tiled.tokens, tiled.rows, i / heads);
            if (t.sequence >= 0) {
                fetch_index();
                task = {t.rank, t.tiles, int(i % heads), t.sequence, {}};
                if (task.sequence < a_.S) task.seq = sequence_of(a_, task.sequence);
            }
        } else if (i < uint32_t(schedule_.pairs) * uint32_t(schedule_.tiles)) {
            fetch_index();
            const uint32_t width = uint32_t(schedule_.section), in_section = width * uint32_t(schedule_.tiles);
            const uint32_t first = i / in_section * width, rest = i % in_section;
            const uint32_t here = min(width, uint32_t(schedule_.pairs) - first), pair = first + rest % here;
            task.rank = int(rest / here);
            task.tiles = schedule_.tiles;
            task.head = int(pair % uint32_t(schedule_.heads));
            task.sequence = int(pair / uint32_t(schedule_.heads));
            if (task.sequence < a_.S) task.seq = sequence_of(a_, task.sequence);
        }
        ring_.ring.wait_empty(at_);
        if (lane_id() == 0) {
            ring_.tasks[at_.stage] = task;
            mbarrier_arrive(&ring_.ring.full[at_.stage]);
        }
        at_.advance();
        return task.rank >= 0;
    }

  private:
    __device__ __forceinline__ void fetch_index() {
        if (lane_id() == 0) index_ = atomicAdd(schedule_.next, 1);
    }
    const Attention<T>& a_;
    const Schedule& schedule_;
    TaskRing& ring_;
    RingPosition<TaskRing::STAGES> at_;
    const int used_;
    uint32_t index_ = 0;
};

class TaskConsumer {
  public:
    __device__ __forceinline__ explicit TaskConsumer(TaskRing& ring) : ring_(ring) {}
    __device__ __forceinline__ bool next(Task& task) {
        ring_.ring.wait_full(at_);
        const Task& t = ring_.tasks[at_.stage];
        task = {uniform(t.rank),
                uniform(t.tiles),
                uniform(t.head),
                uniform(t.sequence),
                {uniform(t.seq.q0), uniform(t.seq.k0), uniform(t.seq.qlen), uniform(t.seq.klen), uniform(t.seq.first),
                 uniform(t.seq.last)}};
        ring_.ring.release_and_advance(at_);
        return task.rank >= 0;
    }

  private:
    TaskRing& ring_;
    RingPosition<TaskRing::STAGES> at_;
};

// Threads and registers of a block: WARPGROUPS consumer warpgroups, and one of the producer, which gives up registers
// for them. An SM has 65,536: 3·128·160 + 128·32, 2·128·240 + 128·24, or for two blocks 2·(128·216 + 128·40).
template <int WARPGROUPS>
struct Roles {
    static constexpr int CONSUMER_WARPS = WARPGROUPS * WARPGROUP / WARP;
    static constexpr int THREADS = (WARPGROUPS + 1) * WARPGROUP;
    static constexpr int BLOCKS = WARPGROUPS == 1 ? 2 : 1;  // whose registers an SM has
    static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 1 ? 40 : WARPGROUPS == 3 ? 32 : 24;
    static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 216 : WARPGROUPS == 3 ? 160 : 240;

    // sum: run by the other three warps of the producer's warpgroup; null: they exit.
    template <typename Produce, typename Consume, typename Sum = std::nullptr_t>
    static __device__ __forceinline__ void run(Produce produce, Consume consume, [[maybe_unused]] Sum sum = {}) {
        const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
        if (warpgroup == WARPGROUPS) {
            setmaxnreg_dec<PRODUCER_REGISTERS>();
            if (warp % 4 == 0)
                produce();
            else if constexpr (!std::is_null_pointer_v<Sum>)
                sum(warp % 4 - 1);
        } else {
            setmaxnreg_inc<CONSUMER_REGISTERS>();
            consume(warpgroup);
            tma_store_wait();  // the stores read the block's shared memory
        }
    }
};

// The block's shared memory, its mbarriers initialised.
template <typename Sizes>
__device__ __forceinline__ typename Sizes::Shared& prepare_shared() {
    extern __shared__ __align__(SWIZZLE_ALIGNMENT) unsigned char memory[];
    auto& shared = *reinterpret_cast<typename Sizes::Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.init();
        mbarrier_init_fence();
    }
    __syncthreads();
    return shared;
}

// --- launch

struct Maps {
    CUtensorMap q, k, v, dout;
    CUtensorMap out, dq, dk, dv;  // boxes of 16 rows
};

// inner_bytes: the tensors of the inner loop, which all tasks of a pair read.
// GPT-2 124M forward (B=64, T=1024, NH=12, HS=64; D=64, BM=192): 6 tiles, 65·12 = 780 pairs, 4,680 tasks. K and V of a
// pair take 1024·64·4 bytes = 256 KiB, so a section has 32 pairs (8 MiB): ceil(780 / 32) = 25 sections.
inline Schedule make_schedule(int64_t S, int64_t heads, int tiles, int64_t inner_bytes, uint32_t* next,
                              const Tiled& tiled) {
    constexpr int64_t L2_SHARE = 32 << 20, MAX_SECTION = 32;
    const int64_t pairs = (S + 1) * heads;
    const int64_t fit = std::clamp<int64_t>(L2_SHARE / std::max<int64_t>(1, inner_bytes), 1, MAX_SECTION);
    // All sections have nearly the same size: a small last one would leave blocks idle at the end.
    return {pairs, heads, tiles, int(ceil_div(pairs, ceil_div(pairs, fit))), next, tiled};
}

static __global__ void reset_task_counter_kernel(uint32_t* next) {
    *next = 0;
}

template <typename Sizes, typename T>
void launch_persistent(const char* op, void (*kernel)(Attention<T>, Maps, Schedule), const Attention<T>& a,
                       const Maps& maps, const Schedule& schedule, Stream stream) {
    constexpr int bytes = sizeof(typename Sizes::Shared);
    constexpr int64_t SM_BYTES = 228 << 10,
                      RESERVED = 1 << 10;  // shared memory: an SM's, and what a block takes besides
    constexpr int64_t on_sm = std::min<int64_t>(Sizes::Roles::BLOCKS, SM_BYTES / (bytes + RESERVED));
    const int64_t tasks = schedule.tasks(a), blocks = std::min(tasks, on_sm * num_sms());
    require(tasks < int64_t(1) << 31, op, ": ", a.S, " sequences of up to ", schedule.tiles, " tiles and ",
            schedule.heads, " heads are more than one launch can hold");
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    reset_task_counter_kernel<<<1, 1, 0, cuda_stream(stream)>>>(schedule.next);
    kernel<<<unsigned(blocks), Sizes::Roles::THREADS, bytes, cuda_stream(stream)>>>(a, maps, schedule);
    check_launch(op, stream);
}

constexpr int MAX_HS = 128;

template <typename F>
void dispatch_head_size(int HS, F f) {
    if (HS <= 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}

}  // namespace hopper
