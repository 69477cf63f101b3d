// Sampling with top_k up to SAMPLING_FAST_TOP_K, alone or before top_p and min_p: blocks select the k most likely
// tokens of each chunk by radix select; then one block a row selects the k most likely of those, sorts them, applies
// the other filters and samples.
#pragma once

#include "kernels/cuda/bitonic_sort.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/generation/sampling.cuh"

namespace sampling {

// A chunk of a block is 4,096 tokens: the fewer chunks, the fewer candidates.
constexpr int CANDIDATE_TOKENS = 16, CANDIDATE_CHUNK = FILTER_THREADS * CANDIDATE_TOKENS;

// The row's candidates: k of each of its chunks. Rows have room for max_k of each.
__device__ __forceinline__ uint64_t* candidates_of(uint64_t* candidates, int64_t b, int64_t num_chunks, int max_k) {
    return candidates + b * num_chunks * max_k;
}

// The k most likely tokens of each chunk, in any order; 0 where a chunk has fewer.
template <typename T>
__global__ void __launch_bounds__(FILTER_THREADS)
    candidates_kernel(const SamplingParams<T> p, ChunkSummary* chunks, uint64_t* candidates, int max_k) {
    pdl_launch_dependents();
    const int64_t b = blockIdx.x, chunk = b * gridDim.y + blockIdx.y;
    const int k = p.rows[b].top_k;
    const bool needed = p.needs(b, sampling_class::CANDIDATES);
    pdl_wait();
    if (!needed) return;
    __shared__ int written;
    const int64_t begin = int64_t(blockIdx.y) * CANDIDATE_CHUNK;
    const LogitRow<T> row = p.row(b);
    const int count = int(min(int64_t(CANDIDATE_CHUNK), p.V - begin));
    uint64_t keys[CANDIDATE_TOKENS], best = 0;
#pragma unroll
    for (int i = 0; i < CANDIDATE_TOKENS; i++) {
        const int at = i * FILTER_THREADS + int(threadIdx.x);
        keys[i] = at < count ? token_key(row[begin + at], begin + at) : 0;
        best = max(best, keys[i]);
    }
    if (threadIdx.x == 0) written = 0;
    best = block_max<FILTER_THREADS>(best);
    if (threadIdx.x == 0) chunks[chunk] = {best, 0};
    const auto for_each_key = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < CANDIDATE_TOKENS; i++)
            if (keys[i] != 0) visit(keys[i]);
    };
    const uint64_t threshold = count <= k ? 1 : threshold_of_k_largest<FILTER_THREADS, uint64_t>(k, for_each_key);
    uint64_t* const to = candidates_of(candidates, b, gridDim.y, max_k) + int64_t(blockIdx.y) * k;
    for_each_key([&](uint64_t key) {
        if (key >= threshold) to[atomicAdd(&written, 1)] = key;
    });
    __syncthreads();
    for (int i = written + int(threadIdx.x); i < k; i += FILTER_THREADS) to[i] = 0;
}

// Inclusive prefix sum over the block. A thread has PER consecutive elements. Returns the total.
template <int PER>
__device__ double block_inclusive_sums(double (&x)[PER]) {
    __shared__ double warp_sums[FILTER_WARPS];
    double mine = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) mine += x[i];
    const BlockScan<double> scan = block_scan<FILTER_THREADS>(mine, warp_sums);
    double sum = scan.exclusive(mine);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = sum += x[i];
    return scan.total;
}

// The k most likely tokens of all chunks, sorted, into kept[0 … SAMPLING_FAST_TOP_K), filled up with 0. Returns k
// rounded up to a power of two.
__device__ inline int select_and_sort(uint64_t* kept, const uint64_t* candidates, int num_candidates, int k) {
    __shared__ int written;
    const auto for_each_candidate = [&](auto visit) {
        for (int i = int(threadIdx.x); i < num_candidates; i += FILTER_THREADS)
            if (const uint64_t key = candidates[i]; key != 0) visit(key);
    };
    if (threadIdx.x == 0) written = 0;
    for (int i = int(threadIdx.x); i < int(SAMPLING_FAST_TOP_K); i += FILTER_THREADS) kept[i] = 0;
    __syncthreads();
    const uint64_t threshold = threshold_of_k_largest<FILTER_THREADS, uint64_t>(k, for_each_candidate);
    for_each_candidate([&](uint64_t key) {
        if (key >= threshold) kept[atomicAdd(&written, 1)] = key;
    });
    int padded = 1;
    while (padded < k) padded *= 2;
    sort_descending(kept, padded);
    return padded;
}

template <typename T>
__global__ void __launch_bounds__(FILTER_THREADS)
    sample_candidates_kernel(const SamplingParams<T> p, const ChunkSummary* all_chunks, uint64_t* all_candidates,
                             int num_chunks, int max_k) {
    pdl_launch_dependents();
    const SamplingRow& options = p.rows[blockIdx.x];
    const int k = options.top_k;
    const double rate = options.rate, min_p = double(options.min_p);
    const float top_p = options.top_p;
    const bool needed = p.needs(blockIdx.x, sampling_class::CANDIDATES);
    pdl_wait();
    if (!needed) return;
    constexpr int MAX_K = int(SAMPLING_FAST_TOP_K), PER = MAX_K / FILTER_THREADS;
    __shared__ uint64_t kept[MAX_K];
    __shared__ int limit;  // how many of the sorted tokens top_p and min_p leave
    const int64_t b = blockIdx.x;
    uint64_t best;
    if (!find_best<FILTER_THREADS>(all_chunks + b * num_chunks, num_chunks, &best)) {
        if (threadIdx.x == 0) p.write_token(b, -1);
        return;
    }
    if (threadIdx.x == 0) limit = MAX_K;
    const int num_candidates = num_chunks * k;
    const int padded = select_and_sort(kept, candidates_of(all_candidates, b, num_chunks, max_k), num_candidates, k);

    const TokenWeight weight{token_logit(best), rate};
    const int first = int(threadIdx.x) * PER;
    if (top_p < 1 || min_p > 0) {
        double weights[PER], sums[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) sums[i] = weights[i] = first + i < k ? weight(token_logit(kept[first + i])) : 0.0;
        const double total = block_inclusive_sums(sums), enough = double(top_p) * total;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (first + i >= k) continue;
            if (top_p < 1 && sums[i] >= enough) atomicMin(&limit, first + i + 1);
            if (weights[i] < min_p) atomicMin(&limit, first + i);
        }
    }
    __syncthreads();
    // Sorts the kept tokens by id: with the halves of the key exchanged, ~id is the high one.
    const int num_kept = min(k, limit);
    for (int i = int(threadIdx.x); i < padded; i += FILTER_THREADS)
        kept[i] = i < num_kept ? kept[i] << 32 | kept[i] >> 32 : 0;
    sort_descending(kept, padded);
    double weights[PER], sum = 0, remaining;
#pragma unroll
    for (int i = 0; i < PER; i++)
        sum += weights[i] = first + i < num_kept ? weight(logit_of_key(uint32_t(kept[first + i]))) : 0.0;
    const double u = p.uniform(b);
    const auto target = [&](double total) { return u * total; };
    if (!cdf_passes_here<FILTER_THREADS>(sum, target, &remaining)) return;
    p.write_token(b, token_id(kept[first + cdf_index(weights, remaining)] >> 32));
}

}  // namespace sampling
