#include "kernels/cuda/radix_select.cuh"
#include "kernels/generation/topk.h"
#include "kernels/generation/topk_check.h"

namespace {

constexpr int THREADS = 256;
constexpr int64_t STRETCH = 8192;  // elements of a row that a block of the first round looks at, at least

// The k largest of n different keys, in any order, into selected[0 … k). k ≤ n.
template <typename Key>
__device__ void select_largest(uint64_t* selected, Key key, int64_t n, int k) {
    __shared__ int taken;
    if (threadIdx.x == 0) taken = 0;  // radix_select synchronises the block
    const auto for_each_key = [&](auto visit) {
        for (int64_t i = threadIdx.x; i < n; i += THREADS) visit(key(i));
    };
    const uint64_t threshold = threshold_of_k_largest<THREADS, uint64_t>(k, for_each_key);
    for_each_key([&](uint64_t x) {
        if (x >= threshold) selected[atomicAdd(&taken, 1)] = x;
    });
    __syncthreads();
}

// Bitonic sort, the largest first. n: a power of two.
__device__ void sort_descending(uint64_t* keys, int n) {
    for (int run = 2; run <= n; run *= 2)
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < n; i += THREADS) {
                const int other = i ^ step;
                const uint64_t a = keys[i], b = keys[other];
                if (other > i && (i & run ? a > b : a < b)) keys[i] = b, keys[other] = a;
            }
            __syncthreads();
        }
}

template <typename T>
struct TopK {
    T* values;
    int32_t* ids;
    const T* inp;
    int64_t values_stride, ids_stride, inp_stride;
    int64_t V, stretches, stretch;
    int k;
    uint64_t* candidates;  // [B, stretches, k]
};

// Sorts the k keys of a row in shared memory and writes what they stand for.
template <typename T>
__device__ void write_sorted(const TopK<T>& a, int64_t b, uint64_t* keys) {
    int padded = 1;
    while (padded < a.k) padded *= 2;
    for (int i = a.k + int(threadIdx.x); i < padded; i += THREADS) keys[i] = 0;
    __syncthreads();
    sort_descending(keys, padded);
    for (int i = threadIdx.x; i < a.k; i += THREADS) {
        const int32_t id = top_k_id(keys[i]);
        a.ids[b * a.ids_stride + i] = id;
        a.values[b * a.values_stride + i] = a.inp[b * a.inp_stride + id];
    }
}

// A block for each stretch of each row; if there is one stretch, it is the whole.
template <typename T>
__global__ void __launch_bounds__(THREADS) first_round_kernel(TopK<T> a) {
    __shared__ uint64_t keys[TOP_K_MAX];
    const RowItem at = row_item(blockIdx.x, a.stretches);
    const int64_t begin = at.item * a.stretch, n = min(a.stretch, a.V - begin);
    const T* inp = a.inp + at.row * a.inp_stride;
    const int kept = int(min(int64_t(a.k), n));
    select_largest(
        keys, [&](int64_t i) { return top_k_key(as_float(inp[begin + i]), begin + i); }, n, kept);
    if (a.stretches == 1) return write_sorted(a, at.row, keys);
    uint64_t* to = a.candidates + blockIdx.x * int64_t(a.k);
    for (int i = threadIdx.x; i < a.k; i += THREADS) to[i] = i < kept ? keys[i] : uint64_t(i);  // below every key
}

template <typename T>
__global__ void __launch_bounds__(THREADS) second_round_kernel(TopK<T> a) {
    __shared__ uint64_t keys[TOP_K_MAX];
    const uint64_t* candidates = a.candidates + blockIdx.x * a.stretches * a.k;
    select_largest(
        keys, [&](int64_t i) { return candidates[i]; }, a.stretches * a.k, a.k);
    write_sorted(a, blockIdx.x, keys);
}

// As many stretches of a row as give each SM a few blocks, none shorter than STRETCH.
int64_t stretches_of(int64_t B, int64_t V) {
    return std::max<int64_t>(1, std::min(ceil_div(4 * num_sms(), std::max<int64_t>(B, 1)), V / STRETCH));
}

}  // namespace

int64_t top_k_scratch(int64_t B, int64_t V, int64_t k) {
    const int64_t stretches = stretches_of(B, V);
    return stretches > 1 ? B * stretches * k * int64_t(sizeof(uint64_t)) : 0;
}

void top_k(Tensor values, Tensor ids, Tensor inp, Tensor scratch, Stream stream) {
    const char* op = "top_k";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_top_k(op, dtype, values, ids, inp, scratch);
    const int64_t B = inp.shape[0];
    if (B == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        TopK<T> a{};
        a.values = values.as<T>(), a.values_stride = row_stride(values);
        a.ids = ids.as<int32_t>(), a.ids_stride = row_stride(ids);
        a.inp = inp.as<const T>(), a.inp_stride = row_stride(inp);
        a.V = inp.shape[1], a.k = int(values.shape[1]);
        a.stretches = stretches_of(B, a.V), a.stretch = ceil_div(a.V, a.stretches);
        a.candidates = static_cast<uint64_t*>(scratch.data);
        first_round_kernel<<<grid_of(B * a.stretches), THREADS, 0, cuda_stream(stream)>>>(a);
        if (a.stretches > 1) second_round_kernel<<<grid_of(B), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    check_launch(op, stream);
}
