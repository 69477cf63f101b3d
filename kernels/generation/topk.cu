// Top-k by radix select in one or two kernels: blocks select the k largest elements of each chunk of a row; where a row
// has several chunks, one block a row selects the k largest of their candidates. The last block sorts.
//
//   kernel               threads   registers   shared memory   blocks per SM
//   chunk_top_k_kernel       256          32        9,268 B                8
//   merge_top_k_kernel       256          32        9,268 B                8
//
// (sm_90a, CUDA 13.0.) GPT-2 124M, k = 50: one row of V = 50257 has 24 chunks of at least 2,048 elements, so the merge
// reads 24·50 = 1,200 candidates. 64 rows have 9 chunks each: 64·9 = 576 blocks, four for each of an H100's 132 SMs.
#include "kernels/cuda/bitonic_sort.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/generation/token_key.h"
#include "kernels/generation/topk.h"
#include "kernels/generation/topk_check.h"

namespace {

constexpr int THREADS = 256;
// Elements of a chunk, at least: eight for each thread, and eight times as many as its candidates.
constexpr int64_t MIN_CHUNK = 8 * THREADS, MIN_CHUNK_PER_K = 8;

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

template <typename T>
struct TopK {
    T* values;
    int32_t* ids;
    const T* inp;
    int64_t values_stride, ids_stride, inp_stride;
    int64_t V, num_chunks, chunk;  // chunk: its elements
    int k;
    uint64_t* candidates;  // [B, num_chunks, k]
};

// Sorts the k keys of a row in shared memory and writes their values and ids.
template <typename T>
__device__ void write_sorted(const TopK<T>& a, int64_t b, uint64_t* keys) {
    int padded = 1;
    while (padded < a.k) padded *= 2;
    for (int i = a.k + int(threadIdx.x); i < padded; i += THREADS) keys[i] = 0;
    sort_descending(keys, padded);
    for (int i = threadIdx.x; i < a.k; i += THREADS) {
        const int32_t id = token_id(keys[i]);
        a.ids[b * a.ids_stride + i] = id;
        a.values[b * a.values_stride + i] = a.inp[b * a.inp_stride + id];
    }
}

// One block for each chunk of each row. If a chunk is the whole row, the block writes the result.
template <typename T>
__global__ void __launch_bounds__(THREADS) chunk_top_k_kernel(TopK<T> a) {
    __shared__ uint64_t keys[TOP_K_MAX];
    const RowItem at = row_item(blockIdx.x, a.num_chunks);
    const int64_t begin = at.item * a.chunk, n = min(a.chunk, a.V - begin);
    const T* inp = a.inp + at.row * a.inp_stride;
    const int kept = int(min(int64_t(a.k), n));
    select_largest(
        keys, [&](int64_t i) { return token_key(as_float(inp[begin + i]), begin + i); }, n, kept);
    if (a.num_chunks == 1) return write_sorted(a, at.row, keys);
    uint64_t* to = a.candidates + blockIdx.x * int64_t(a.k);
    for (int i = threadIdx.x; i < a.k; i += THREADS) to[i] = i < kept ? keys[i] : uint64_t(i);  // smaller than all keys
}

template <typename T>
__global__ void __launch_bounds__(THREADS) merge_top_k_kernel(TopK<T> a) {
    __shared__ uint64_t keys[TOP_K_MAX];
    const uint64_t* candidates = a.candidates + blockIdx.x * a.num_chunks * a.k;
    select_largest(
        keys, [&](int64_t i) { return candidates[i]; }, a.num_chunks * a.k, a.k);
    write_sorted(a, blockIdx.x, keys);
}

// As many chunks of a row as give each SM four blocks, unless they would be too short.
int64_t num_chunks_of(int64_t B, int64_t V, int64_t k) {
    const int64_t shortest = std::max(MIN_CHUNK, MIN_CHUNK_PER_K * k);
    return std::max<int64_t>(1, std::min(ceil_div(4 * num_sms(), std::max<int64_t>(B, 1)), V / shortest));
}

}  // namespace

int64_t top_k_scratch(int64_t B, int64_t V, int64_t k) {
    const int64_t num_chunks = num_chunks_of(B, V, k);
    return num_chunks > 1 ? B * num_chunks * k * int64_t(sizeof(uint64_t)) : 0;
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
        a.values = values.as<T>();
        a.values_stride = row_stride(values);
        a.ids = ids.as<int32_t>();
        a.ids_stride = row_stride(ids);
        a.inp = inp.as<const T>();
        a.inp_stride = row_stride(inp);
        a.V = inp.shape[1];
        a.k = int(values.shape[1]);
        a.num_chunks = num_chunks_of(B, a.V, a.k);
        a.chunk = ceil_div(a.V, a.num_chunks);
        a.candidates = static_cast<uint64_t*>(scratch.data);
        chunk_top_k_kernel<<<grid_of(B * a.num_chunks), THREADS, 0, cuda_stream(stream)>>>(a);
        if (a.num_chunks > 1) merge_top_k_kernel<<<grid_of(B), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    check_launch(op, stream);
}
