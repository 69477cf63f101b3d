// LayerNorm's forward pass on a GPU, rung by rung: out = (inp − mean)·rstd·weight + bias over rows of C channels, from
// one thread for each row to the speed of a copy.
//
//     make ladder OP=layernorm BACKEND=cuda
//     build/cuda/dev/ladder/layernorm --csv layernorm.csv && scripts/plot_ladder.py layernorm.csv
//
// The shape of GPT-2 124M at B = 64, T = 1024: 65,536 rows of 768 channels, in fp32 and in bf16, with statistics in
// fp32. The op is memory-bound. GB/s count inp once, out once and both statistics, and are compared with a device copy
// of 512 MiB, timed in the same run. Every rung takes any C and eps and optional mean and rstd, and is checked against
// the float64 oracle.
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung.
#include "kernels/norm.h"

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cmath>

#include "dev/bench/machine_limits.h"
#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/cuda/cuda_common.cuh"

namespace cg = cooperative_groups;

namespace {

constexpr int THREADS = 256;

template <typename T>
struct LayerNorm {
    T* out;
    float *mean, *rstd;  // [N], may be null
    const T* inp;
    const float *weight, *bias;  // [C]
    int64_t N, C;
    float eps;
};

template <typename T>
__device__ __forceinline__ void store_statistics(const LayerNorm<T>& a, int64_t n, float mean, float rstd) {
    if (a.mean) a.mean[n] = mean;
    if (a.rstd) a.rstd[n] = rstd;
}

__device__ __forceinline__ float normalised(float x, float mean, float rstd, float weight, float bias) {
    return (x - mean) * rstd * weight + bias;
}

// --- naive

template <typename T>
__global__ void naive_kernel(LayerNorm<T> a) {
    const int64_t n = int64_t(blockIdx.x) * THREADS + threadIdx.x, C = a.C;
    if (n >= a.N) return;
    const T* x = a.inp + n * C;
    float mean = 0, variance = 0;
    for (int64_t c = 0; c < C; c++) mean += as_float(x[c]);
    mean /= float(C);
    for (int64_t c = 0; c < C; c++) variance += (as_float(x[c]) - mean) * (as_float(x[c]) - mean);
    const float rstd = rsqrtf(variance / float(C) + a.eps);
    for (int64_t c = 0; c < C; c++)
        a.out[n * C + c] = from_float<T>(normalised(as_float(x[c]), mean, rstd, a.weight[c], a.bias[c]));
    store_statistics(a, n, mean, rstd);
}

template <typename T>
void naive(const LayerNorm<T>& a, Stream stream) {
    naive_kernel<<<grid_of(ceil_div(a.N, THREADS)), THREADS, 0, cuda_stream(stream)>>>(a);
}

// --- a block for each row

template <typename T>
__global__ void __launch_bounds__(THREADS) block_per_row_kernel(LayerNorm<T> a) {
    const int64_t n = blockIdx.x, C = a.C;
    const T* x = a.inp + n * C;
    float mean = 0, variance = 0;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) mean += as_float(x[c]);
    mean = block_sum<THREADS>(mean) / float(C);
    for (int64_t c = threadIdx.x; c < C; c += THREADS) variance += (as_float(x[c]) - mean) * (as_float(x[c]) - mean);
    const float rstd = rsqrtf(block_sum<THREADS>(variance) / float(C) + a.eps);
    for (int64_t c = threadIdx.x; c < C; c += THREADS)
        a.out[n * C + c] = from_float<T>(normalised(as_float(x[c]), mean, rstd, a.weight[c], a.bias[c]));
    if (threadIdx.x == 0) store_statistics(a, n, mean, rstd);
}

template <typename T>
void block_per_row(const LayerNorm<T>& a, Stream stream) {
    block_per_row_kernel<<<grid_of(a.N), THREADS, 0, cuda_stream(stream)>>>(a);
}

// --- a warp for each row, first one element at a time and then 16 bytes

// Streaming accesses (ld.global.cs, st.global.cs): inp is not read again and out is not read here, so neither should
// evict weight and bias from the caches. W elements of T are 2, 4 or 16 bytes.
template <int BYTES>
using Word = std::conditional_t<BYTES == 2, unsigned short, std::conditional_t<BYTES == 4, unsigned, uint4>>;

template <int W, typename T>
__device__ __forceinline__ Floats<W> load_streaming(const T* p) {
    using Bits = Word<int(sizeof(T)) * W>;
    const Bits bits = __ldcs(reinterpret_cast<const Bits*>(p));
    return as_floats(reinterpret_cast<const Pack<T, W>&>(bits));
}

template <int W, typename T>
__device__ __forceinline__ void store_streaming(T* p, const Floats<W>& x) {
    using Bits = Word<int(sizeof(T)) * W>;
    const Pack<T, W> pack = as_pack<T>(x);
    __stcs(reinterpret_cast<Bits*>(p), reinterpret_cast<const Bits&>(pack));
}

template <int W, typename T>
__global__ void __launch_bounds__(THREADS) warp_per_row_kernel(LayerNorm<T> a) {
    const auto warp = cg::tiled_partition<WARP>(cg::this_thread_block());
    const int64_t n = int64_t(blockIdx.x) * warp.meta_group_size() + warp.meta_group_rank(), C = a.C;
    if (n >= a.N) return;
    const T* x = a.inp + n * C;
    const int first = int(warp.thread_rank()) * W;
    float mean = 0, variance = 0;
    for (int64_t c = first; c < C; c += WARP * W) {
        const Floats<W> v = load_floats<W>(x + c);
#pragma unroll
        for (int i = 0; i < W; i++) mean += v[i];
    }
    mean = cg::reduce(warp, mean, cg::plus<float>()) / float(C);
    for (int64_t c = first; c < C; c += WARP * W) {
        const Floats<W> v = load_floats<W>(x + c);
#pragma unroll
        for (int i = 0; i < W; i++) variance += (v[i] - mean) * (v[i] - mean);
    }
    const float rstd = rsqrtf(cg::reduce(warp, variance, cg::plus<float>()) / float(C) + a.eps);
    for (int64_t c = first; c < C; c += WARP * W) {
        Floats<W> v = load_streaming<W>(x + c);
        const Floats<W> weight = load_floats<W>(a.weight + c), bias = load_floats<W>(a.bias + c);
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = normalised(v[i], mean, rstd, weight[i], bias[i]);
        store_streaming(a.out + n * C + c, v);
    }
    if (warp.thread_rank() == 0) store_statistics(a, n, mean, rstd);
}

template <typename T>
void warp_per_row(const LayerNorm<T>& a, Stream stream) {
    warp_per_row_kernel<1><<<grid_of(ceil_div(a.N, THREADS / WARP)), THREADS, 0, cuda_stream(stream)>>>(a);
}

template <typename T>
void vectorised(const LayerNorm<T>& a, Stream stream) {
    dispatch_width<T>(a.C % FULL_WIDTH<T> == 0, [&](auto width) {
        warp_per_row_kernel<width><<<grid_of(ceil_div(a.N, THREADS / WARP)), THREADS, 0, cuda_stream(stream)>>>(a);
    });
}

// --- the kernel in use

template <typename T>
void kernel_in_use(const LayerNorm<T>& a, Stream stream) {
    const auto tensor = [](auto* data, std::initializer_list<int64_t> shape) {
        using U = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
        return make_tensor(const_cast<U*>(data), dtype_of<U>(), Device::CUDA, shape);
    };
    layernorm_forward({.out = tensor(a.out, {a.N, a.C}),
                       .mean = tensor(a.mean, {a.N}),
                       .rstd = tensor(a.rstd, {a.N}),
                       .inp = tensor(a.inp, {a.N, a.C}),
                       .weight = tensor(a.weight, {a.C}),
                       .bias = tensor(a.bias, {a.C}),
                       .eps = a.eps},
                      stream);
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Rung {
    const char* name;
    void (*forward)(const LayerNorm<T>& a, Stream stream);
    const char* why;
};

template <typename T>
const std::vector<Rung<T>> RUNGS = {
    {"naive", naive<T>,
     "One thread for each row. The 32 threads of a warp read 32 rows, so each reads another cache line, which may "
     "be evicted before the next channel is read. There are too few threads to fill the GPU, and each adds 768 "
     "numbers one after the other."},
    {"block per row", block_per_row<T>,
     "A block of 256 threads for each row: neighbouring threads read neighbouring channels, so every access is "
     "coalesced. The row comes from memory once and from L1 twice. Most of the time is spent at the barriers of "
     "two block sums, for three numbers a thread."},
    {"warp per row", warp_per_row<T>,
     "A warp needs no barrier and no shared memory: its sums take five shuffles (cooperative groups), and the "
     "other warps of an SM work on other rows meanwhile. The last pass reads and writes with a streaming hint, "
     "because the lines are not needed again."},
    {"vectorised", vectorised<T>,
     "16 bytes for each lane and access: 4 or 8 times fewer instructions for the same bytes. bf16 gains, where a "
     "warp moved 64 bytes at a time; fp32 hardly does."},
    {"kernels/norm.cu", kernel_in_use<T>,
     "layernorm_forward(): the row stays in registers, in as many vectors as C needs (a template argument), all "
     "loaded before the first use. So inp is read only once by instructions too, not only from memory."},
};

template <typename T>
void run(const Rung<T>& rung, const LayerNorm<T>& a, Stream stream) {
    rung.forward(a, stream);
    check_launch(rung.name, stream);
}

template <typename T>
struct Problem {
    int64_t N, C;
    float eps;
    DeviceArray<T> inp, out;
    DeviceArray<float> weight, bias, mean, rstd;
    Problem(int64_t N_, int64_t C_, float eps_, Stream stream)
        : N(N_),
          C(C_),
          eps(eps_),
          inp(DeviceArray<T>::random(N * C, 1, 2, 0.5, stream)),
          out(N * C, stream),
          weight(DeviceArray<float>::random(C, 2, 0.5, 1, stream)),
          bias(DeviceArray<float>::random(C, 3, 1, 0, stream)),
          mean(N, stream),
          rstd(N, stream) {}

    LayerNorm<T> arguments(bool statistics) const {
        return {out.data(),
                statistics ? mean.data() : nullptr,
                statistics ? rstd.data() : nullptr,
                inp.data(),
                weight.data(),
                bias.data(),
                N,
                C,
                eps};
    }

    // Runs the rung on poisoned outputs and compares whole rows: all, or every 1021st and the first and last ones.
    bool correct(const Rung<T>& rung, bool statistics, Stream stream) {
        out.poison(stream);
        mean.poison(stream);
        rstd.poison(stream);
        run(rung, arguments(statistics), stream);
        const std::vector<T> got = out.fetch(stream);
        const std::vector<float> got_mean = mean.fetch(stream), got_rstd = rstd.fetch(stream);
        ErrorBound bound(dtype_of<T>(), C), mean_bound(DType::F32, C), rstd_bound(DType::F32, C);
        bool untouched = true;
        for (int64_t n = 0; n < N; n++) {
            if (!statistics)
                untouched = untouched && std::isnan(got_mean[size_t(n)]) && std::isnan(got_rstd[size_t(n)]);
            if (n >= 64 && n < N - 64 && n % 1021 != 0) continue;
            const reference::Norm ref = reference::layernorm_forward(
                &inp.values()[size_t(n * C)], nullptr, weight.values().data(), bias.values().data(), double(eps), 1, C);
            for (int64_t c = 0; c < C; c++)
                bound.add(DeviceArray<T>::widen(got[size_t(n * C + c)]),
                          {ref.out.value[size_t(c)], ref.out.mag[size_t(c)]});
            if (!statistics) continue;
            mean_bound.add(double(got_mean[size_t(n)]), {ref.mean.value[0], ref.mean.mag[0]});
            rstd_bound.add(double(got_rstd[size_t(n)]), {ref.rstd.value[0], ref.rstd.mag[0]});
        }
        return bound.holds() && (statistics ? mean_bound.holds() && rstd_bound.holds() : untouched) &&
               out.guard_intact(stream) && mean.guard_intact(stream) && rstd.guard_intact(stream);
    }
};

template <typename T>
LadderTable climb(int64_t N, Stream stream) {
    constexpr int64_t CHANNELS = 768;
    // Rows shorter than a warp, of odd lengths, and longer than the last rung holds in the registers of a warp.
    std::vector<Problem<T>> small;
    const int64_t sizes[][2] = {{1, 1}, {5, 7}, {3, 33}, {130, 100}, {9, 768}, {67, 1023}, {2, 5000}};
    for (const auto& s : sizes) small.emplace_back(s[0], s[1], s[0] % 2 ? 1e-5f : 1e-2f, stream);
    Problem<T> large(N, CHANNELS, 1e-5f, stream);
    ColdTimer timer(stream);

    LadderTable table;
    table.title = str("layernorm ", dtype_name(dtype_of<T>()));
    table.unit = "GB/s";
    table.unit_size = 1e9;
    table.limit_name = "copy";
    for (const Rung<T>& rung : RUNGS<T>) {
        bool correct = large.correct(rung, true, stream);
        for (Problem<T>& problem : small)
            for (const bool statistics : {false, true}) correct = problem.correct(rung, statistics, stream) && correct;
        const double ms = timer.median_ms([&] { run(rung, large.arguments(true), stream); });
        const double bytes = double(large.inp.bytes() + large.out.bytes() + large.mean.bytes() + large.rstd.bytes() +
                                    large.weight.bytes() + large.bias.bytes());
        table.rows.push_back({rung.name, ms, bytes / (ms * 1e-3), machine_limits().copy, correct, rung.why});
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "rows", 65536, 1 << 19);
        const Stream stream{};
        std::printf("%lld rows of 768 channels on %s. A copy reaches %.0f GB/s.\n\n", (long long)options.size,
                    device_description().c_str(), machine_limits().copy * 1e-9);
        const std::vector<LadderTable> tables = {climb<float>(options.size, stream), climb<bf16>(options.size, stream)};
        for (const LadderTable& table : tables) table.print();
        tables.front().explain();  // the same rungs in both
        write_ladder_csv(options.csv, tables);
        return std::all_of(tables.begin(), tables.end(), [](const LadderTable& table) { return table.correct(); });
    });
}
