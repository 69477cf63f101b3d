// The sum of many numbers on a GPU, rung by rung: from a tree in shared memory to the speed of memory.
//
//     make ladder OP=reduce BACKEND=cuda
//     build/cuda/dev/ladder/reduce --csv reduce.csv && scripts/plot_ladder.py reduce.csv
//
// 2^27 numbers in fp32 and in bf16, summed in fp32. Each element is read once and almost nothing is written, so the op
// is memory-bound. GB/s are compared with a device copy of 512 MiB, timed in the same run. No rung uses atomics: blocks
// write partial sums, which the same kernel adds, so the same numbers give the same bits. Every rung takes any length
// and is checked against the float64 oracle.
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung.
#include <cmath>

#include "dev/bench/machine_limits.h"
#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/cuda/cuda_common.cuh"
#include "tensor_library/tensor_ops.h"

namespace {

constexpr int THREADS = 256;
constexpr int64_t DEFAULT_SIZE = int64_t(1) << 27;

// --- trees in shared memory, a block for each 256 elements

// Step s adds element i + s to element i, for every i that is a multiple of 2s.
template <typename T>
__global__ void __launch_bounds__(THREADS) neighbours_kernel(float* partial, const T* x, int64_t n) {
    __shared__ float sum[THREADS];
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    sum[threadIdx.x] = i < n ? as_float(x[i]) : 0;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        if (threadIdx.x % (2 * step) == 0) sum[threadIdx.x] += sum[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = sum[0];
}

// The upper half is added to the lower half.
__device__ __forceinline__ float sum_by_halves(float x) {
    __shared__ float sum[THREADS];
    sum[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) sum[threadIdx.x] += sum[threadIdx.x + half];
        __syncthreads();
    }
    return sum[0];
}

template <typename T>
__global__ void __launch_bounds__(THREADS) halves_kernel(float* partial, const T* x, int64_t n) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    const float sum = sum_by_halves(i < n ? as_float(x[i]) : 0);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// --- as many blocks as the GPU holds, which loop over the array

template <typename T>
__device__ __forceinline__ float thread_sum(const T* x, int64_t n) {
    float sum = 0;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < n; i += int64_t(gridDim.x) * THREADS)
        sum += as_float(x[i]);
    return sum;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) walking_kernel(float* partial, const T* x, int64_t n) {
    const float sum = sum_by_halves(thread_sum(x, n));
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) shuffles_kernel(float* partial, const T* x, int64_t n) {
    const float sum = block_sum<THREADS>(thread_sum(x, n));
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// 16 bytes at a time, four loads before the first use; the remaining elements one by one.
template <typename T>
__global__ void __launch_bounds__(THREADS) vectors_kernel(float* partial, const T* x, int64_t n) {
    constexpr int W = FULL_WIDTH<T>, LOADS = 4;
    const int64_t first = blockIdx.x * int64_t(THREADS) + threadIdx.x, step = int64_t(gridDim.x) * THREADS,
                  packs = n / W;
    float sum = 0;
    for (int64_t i = first; i < packs; i += LOADS * step) {
        Pack<T, W> pack[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; l++)
            if (i + l * step < packs) pack[l] = load_pack<W>(x + (i + l * step) * W);
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            if (i + l * step >= packs) continue;
            const Floats<W> v = as_floats(pack[l]);
#pragma unroll
            for (int k = 0; k < W; k++) sum += v[k];
        }
    }
    if (packs * W + first < n) sum += as_float(x[packs * W + first]);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Problem {
    int64_t n;
    DeviceArray<T> x;
    DeviceArray<float> out, scratch;
    reference::Value sum;
    Problem(int64_t n_, Stream stream)
        : n(n_),
          x(DeviceArray<T>::random(n, 1, 1, 0.01, stream)),
          out(1, stream),
          scratch(std::max<int64_t>(2 * ceil_div(n, THREADS), 1 << 16), stream) {
        double value = 0, mag = 0;
#pragma omp parallel for reduction(+ : value, mag)
        for (int64_t i = 0; i < n; i++) {
            value += x.values()[size_t(i)];
            mag += std::fabs(x.values()[size_t(i)]);
        }
        sum = {value, mag};
    }
};

// Blocks for n elements: one for each 256, or as many as the GPU holds.
template <bool ALL>
int64_t blocks_for(int64_t n) {
    const int64_t blocks = std::max<int64_t>(1, ceil_div(n, THREADS));
    return ALL ? blocks : std::min<int64_t>(blocks, 8 * num_sms());
}

// Runs the kernel on the numbers, then on its own partial sums until one is left.
template <typename T, bool ALL>
void in_steps(void (*first)(float*, const T*, int64_t), void (*rest)(float*, const float*, int64_t),
              const Problem<T>& p, Stream stream) {
    int64_t n = blocks_for<ALL>(p.n);
    float *from = p.scratch.data(), *to = from + n;
    first<<<grid_of(n), THREADS, 0, cuda_stream(stream)>>>(n == 1 ? p.out.data() : from, p.x.data(), p.n);
    while (n > 1) {
        const int64_t blocks = ALL ? blocks_for<true>(n) : 1;
        rest<<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(blocks == 1 ? p.out.data() : to, from, n);
        std::swap(from, to);
        n = blocks;
    }
}

template <typename T>
void neighbours(const Problem<T>& p, Stream stream) {
    in_steps<T, true>(neighbours_kernel<T>, neighbours_kernel<float>, p, stream);
}
template <typename T>
void halves(const Problem<T>& p, Stream stream) {
    in_steps<T, true>(halves_kernel<T>, halves_kernel<float>, p, stream);
}
template <typename T>
void walking(const Problem<T>& p, Stream stream) {
    in_steps<T, false>(walking_kernel<T>, walking_kernel<float>, p, stream);
}
template <typename T>
void shuffles(const Problem<T>& p, Stream stream) {
    in_steps<T, false>(shuffles_kernel<T>, shuffles_kernel<float>, p, stream);
}
template <typename T>
void vectors(const Problem<T>& p, Stream stream) {
    in_steps<T, false>(vectors_kernel<T>, vectors_kernel<float>, p, stream);
}
template <typename T>
void kernel_in_use(const Problem<T>& p, Stream stream) {
    const Tensor out = p.out.tensor({1}), x = p.x.tensor({p.n});
    const Tensor scratch = make_tensor(p.scratch.data(), DType::U8, Device::CUDA, {tensor_reduce_scratch(out, x, 0)});
    require(scratch.shape[0] <= p.scratch.bytes(), "reduce ladder: the scratch is too small");
    tensor_reduce(out, TensorFunction::Add, x, 0, 0, scratch, stream);
}

template <typename T>
struct Rung {
    const char* name;
    void (*sum)(const Problem<T>& p, Stream stream);
    const char* why;
};

template <typename T>
const std::vector<Rung<T>> RUNGS = {
    {"neighbours", neighbours<T>,
     "A block reads 256 elements into shared memory and adds neighbours, then neighbours of neighbours: eight "
     "steps with a barrier each. In every step the working threads are spread over all warps, so no warp is idle, "
     "and idle lanes take as long as working ones. Division and remainder decide which threads work."},
    {"halves", halves<T>,
     "The upper half of the sums is added to the lower half: the working threads are contiguous, whole warps "
     "become idle, and neighbouring lanes read neighbouring banks. Still, each thread reads one element for nine "
     "barriers."},
    {"blocks that stay", walking<T>,
     "As many blocks as the GPU holds at a time. Each thread adds its elements, a grid's width apart, in a "
     "register. The tree runs once for hundreds of thousands of elements, and a thousand partial sums remain "
     "instead of a million."},
    {"shuffles", shuffles<T>,
     "Within a warp, five shuffles add registers without a barrier; shared memory holds only the eight sums of "
     "the warps. It matters little here, where the tree is rare, and much for short rows."},
    {"vectors in flight", vectors<T>,
     "16 bytes for each access and four accesses before the first addition. The bandwidth is the number of bytes "
     "in flight divided by the latency, so a thread that waits for one number at a time leaves the memory idle."},
    {"kernels/tensor_library", kernel_in_use<T>,
     "tensor_reduce(): the same for any axis of any strided tensor. Blocks take contiguous ranges of fixed "
     "length, running sums end every 64 vectors for accuracy, and a second launch adds the partial sums."},
};

template <typename T>
void run(const Rung<T>& rung, const Problem<T>& p, Stream stream) {
    rung.sum(p, stream);
    check_launch(rung.name, stream);
}

template <typename T>
bool correct(const Rung<T>& rung, Problem<T>& p, Stream stream) {
    p.out.poison(stream);
    p.scratch.poison(stream);
    run(rung, p, stream);
    ErrorBound bound(DType::F32, p.n);
    bound.add(double(p.out.fetch(stream)[0]), p.sum);
    return bound.holds() && p.out.guard_intact(stream) && p.scratch.guard_intact(stream);
}

template <typename T>
LadderTable climb(int64_t n, Stream stream) {
    std::vector<Problem<T>> small;
    for (const int64_t size : {1, 31, 256, 257, 1000, 65536, 1000003}) small.emplace_back(size, stream);
    Problem<T> large(n, stream);
    ColdTimer timer(stream);
    LadderTable table;
    table.title = str("sum ", dtype_name(dtype_of<T>()));
    table.unit = "GB/s";
    table.unit_size = 1e9;
    table.limit_name = "copy";
    for (const Rung<T>& rung : RUNGS<T>) {
        bool right = correct(rung, large, stream);
        for (Problem<T>& problem : small) right = correct(rung, problem, stream) && right;
        const double ms = timer.median_ms([&] { run(rung, large, stream); });
        table.rows.push_back(
            {rung.name, ms, double(large.x.bytes()) / (ms * 1e-3), machine_limits().copy, right, rung.why});
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "numbers", DEFAULT_SIZE, DEFAULT_SIZE * 4);
        const Stream stream{};
        std::printf("%lld numbers on %s. A copy reaches %.0f GB/s.\n\n", (long long)options.size,
                    device_description().c_str(), machine_limits().copy * 1e-9);
        const std::vector<LadderTable> tables = {climb<float>(options.size, stream), climb<bf16>(options.size, stream)};
        for (const LadderTable& table : tables) table.print();
        tables.front().explain();  // the same rungs in both
        write_ladder_csv(options.csv, tables);
        return std::all_of(tables.begin(), tables.end(), [](const LadderTable& table) { return table.correct(); });
    });
}
