// top_p, and top_k beyond SAMPLING_FAST_TOP_K: one kernel finds the key of the least likely token that is kept, another
// sums what is kept of each chunk.
#pragma once

#include "kernels/cuda/bitonic_sort.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/generation/sampling.cuh"

namespace sampling {

constexpr int HISTOGRAM_TOKENS = 4;  // consecutive tokens of a thread

// The histogram of each row's weights, by blocks of 1,024 tokens.
template <typename T>
__global__ void __launch_bounds__(FILTER_THREADS)
    weight_histogram_kernel(const SamplingParams<T> p, const ChunkSummary* all_chunks, int num_chunks,
                            FixedWeight* histograms) {
    pdl_launch_dependents();
    const int64_t b = blockIdx.x;
    const double rate = p.rows[b].rate;
    const bool needed = p.needs(b, sampling_class::HISTOGRAM);
    pdl_wait();
    if (!needed) return;
    __shared__ FixedWeight bins[WEIGHT_BINS];
    const Floats<HISTOGRAM_TOKENS> x = p.row(b).template load<HISTOGRAM_TOKENS>(
        (int64_t(blockIdx.y) * FILTER_THREADS + int(threadIdx.x)) * HISTOGRAM_TOKENS);
    uint64_t best;
    if (!find_best<FILTER_THREADS>(all_chunks + b * num_chunks, num_chunks, &best)) return;
    const TokenWeight weight{token_logit(best), rate};
    for (int i = int(threadIdx.x); i < WEIGHT_BINS; i += FILTER_THREADS) bins[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HISTOGRAM_TOKENS; i++) {
        const FixedWeight w = weight.fixed(x[i]);
        if (w > 0) atomicAdd(&bins[weight.bin(x[i])], w);
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < WEIGHT_BINS; i += FILTER_THREADS)
        if (bins[i] > 0) atomicAdd(&histograms[b * WEIGHT_BINS + i], bins[i]);
}

constexpr int THRESHOLD_THREADS = 1024, THRESHOLD_WARPS = THRESHOLD_THREADS / WARP;

// The kept logits of a row: all with a larger key, and the first `ties` in order of id of those with this key.
struct LogitThreshold {
    uint32_t key;  // 0 is below the keys of all logits
    int64_t ties;
};

// The k largest logits. 1 ≤ k ≤ V.
template <typename T>
__device__ LogitThreshold top_k_threshold(const LogitRow<T>& row, int64_t V, int64_t k) {
    const auto for_each_key = [&](auto add) {
        for (int64_t v = threadIdx.x; v < V; v += THRESHOLD_THREADS) add(logit_key(row[v]), 1);
    };
    const auto reached = [&](int sum) { return sum >= k; };
    const auto complete = [](int) { return false; };  // ties are counted, so that all bits of the key are needed
    const auto selection = radix_select<THRESHOLD_THREADS, uint32_t, int>(for_each_key, reached, complete);
    return {selection.threshold, k - selection.above};
}

// The fewest of the most likely tokens that together have top_p of the weight of what `kept` keeps: a radix select by
// weight.
template <typename T>
__device__ LogitThreshold top_p_threshold(const LogitRow<T>& row, int64_t V, LogitThreshold kept, float top_p,
                                          TokenWeight weight) {
    __shared__ FixedWeight shared_total;
    const FixedWeight of_ties = kept.key ? FixedWeight(kept.ties) * weight.fixed(logit_of_key(kept.key)) : 0;
    if (threadIdx.x == 0) shared_total = of_ties;
    __syncthreads();
    FixedWeight mine = 0;
    for (int64_t v = threadIdx.x; v < V; v += THRESHOLD_THREADS) {
        const float x = row[v];
        if (logit_key(x) > kept.key) mine += weight.fixed(x);
    }
    atomicAdd(&shared_total, mine);
    __syncthreads();
    const double enough = double(top_p) * double(shared_total);
    const auto for_each_key = [&](auto add) {
        for (int64_t v = threadIdx.x; v < V; v += THRESHOLD_THREADS) {
            const float x = row[v];
            if (const uint32_t key = logit_key(x); key > kept.key) add(key, weight.fixed(x));
        }
        if (threadIdx.x == 0 && kept.key) add(kept.key, of_ties);
    };
    const auto reached = [&](FixedWeight sum) { return double(sum) >= enough; };
    const auto complete = [](FixedWeight) { return false; };
    const auto selection = radix_select<THRESHOLD_THREADS, uint32_t, FixedWeight>(for_each_key, reached, complete);
    // How many tokens with this key are needed: at least one, and no more than there are.
    const double each = double(weight.fixed(logit_of_key(selection.threshold)));
    const double missing = enough - double(selection.above);
    int64_t ties = each > 0 ? max(int64_t(1), int64_t(ceil(missing / each))) : INT64_MAX;
    if (selection.threshold == kept.key && kept.ties < ties) ties = kept.ties;
    return {selection.threshold, ties};
}

// The token key of the last token that `kept` keeps.
template <typename T>
__device__ uint64_t token_threshold(const LogitRow<T>& row, int64_t V, LogitThreshold kept) {
    if (kept.key == 0 || kept.ties == INT64_MAX) return uint64_t(kept.key) << 32;
    __shared__ uint64_t threshold;
    __shared__ int64_t warp_sums[THRESHOLD_WARPS];
    if (threadIdx.x == 0) threshold = uint64_t(kept.key) << 32;  // keeps all of them, should there be fewer
    const int64_t per_thread = ceil_div(V, THRESHOLD_THREADS), begin = min(V, threadIdx.x * per_thread),
                  end = min(V, begin + per_thread);
    int64_t mine = 0;
    for (int64_t v = begin; v < end; v++) mine += logit_key(row[v]) == kept.key;
    int64_t before = block_scan<THRESHOLD_THREADS>(mine, warp_sums).exclusive(mine);
    if (before < kept.ties && before + mine >= kept.ties)
        for (int64_t v = begin; v < end; v++)
            if (logit_key(row[v]) == kept.key && ++before == kept.ties) threshold = token_key(row[v], v);
    __syncthreads();
    return threshold;
}

// top_p by the row's histogram: finds the bin in which the sum of weights reaches top_p of the total, and sorts the
// tokens of that bin. Returns 0 where the bin has too many of them.
template <typename T>
__device__ uint64_t top_p_by_histogram(const LogitRow<T>& row, int64_t V, const FixedWeight* histogram, float top_p,
                                       TokenWeight weight) {
    constexpr int PER = WEIGHT_BINS / THRESHOLD_THREADS;
    __shared__ uint64_t in_bin[WEIGHT_BINS];
    __shared__ FixedWeight warp_sums[THRESHOLD_WARPS];
    __shared__ int count, deciding_bin;
    __shared__ FixedWeight above;  // the bin
    __shared__ uint64_t threshold;
    if (threadIdx.x == 0) {
        count = 0;
        deciding_bin = WEIGHT_BINS - 1;
        threshold = 0;
    }
    FixedWeight mine[PER], sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) sum += mine[i] = histogram[int(threadIdx.x) * PER + i];
    const BlockScan<FixedWeight> scan = block_scan<THRESHOLD_THREADS>(sum, warp_sums);
    const double enough = double(top_p) * double(scan.total);
    FixedWeight up_to = scan.exclusive(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const double before = double(up_to);
        up_to += mine[i];
        if ((before < enough || (threadIdx.x == 0 && i == 0)) && double(up_to) >= enough) {
            deciding_bin = int(threadIdx.x) * PER + i;
            above = up_to - mine[i];
        }
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < V; v += THRESHOLD_THREADS) {
        const float x = row[v];
        if (weight.bin(x) != deciding_bin) continue;
        const int at = atomicAdd(&count, 1);
        if (at < WEIGHT_BINS) in_bin[at] = token_key(x, v);
    }
    __syncthreads();
    if (count > WEIGHT_BINS) return 0;
    int padded = 1;
    while (padded < count) padded *= 2;
    for (int i = count + int(threadIdx.x); i < padded; i += THRESHOLD_THREADS) in_bin[i] = 0;
    sort_descending(in_bin, padded);
    sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int at = int(threadIdx.x) * PER + i;
        sum += mine[i] = at < count ? weight.fixed(token_logit(in_bin[at])) : 0;
    }
    up_to = above + block_scan<THRESHOLD_THREADS>(sum, warp_sums).exclusive(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int at = int(threadIdx.x) * PER + i;
        const bool reached = at == 0 ? false : double(up_to) >= enough;
        up_to += mine[i];
        if (at < count && !reached && double(up_to) >= enough) threshold = in_bin[at];
    }
    __syncthreads();
    return threshold;
}

// One block finds the threshold of a row.
template <typename T>
__global__ void __launch_bounds__(THRESHOLD_THREADS)
    threshold_kernel(const SamplingParams<T> p, const ChunkSummary* all_chunks, int num_chunks,
                     const FixedWeight* histograms, uint64_t* thresholds) {
    pdl_launch_dependents();
    const int64_t b = blockIdx.x;
    const SamplingRow& options = p.rows[b];
    const bool needed = p.needs(b, sampling_class::THRESHOLD);
    pdl_wait();
    if (!needed) return;
    uint64_t best, threshold = 0;
    if (!find_best<THRESHOLD_THREADS>(all_chunks + b * num_chunks, num_chunks, &best)) return;
    const LogitRow<T> row = p.row(b);
    const TokenWeight weight{token_logit(best), options.rate};
    if (p.needs(b, sampling_class::HISTOGRAM))
        threshold = top_p_by_histogram(row, p.V, histograms + b * WEIGHT_BINS, options.top_p, weight);
    if (threshold == 0) {
        LogitThreshold kept{0, 0};
        if (options.top_k > 0 && options.top_k < p.V) kept = top_k_threshold(row, p.V, options.top_k);
        if (options.top_p < 1) kept = top_p_threshold(row, p.V, kept, options.top_p, weight);
        threshold = token_threshold(row, p.V, kept);
    }
    if (threadIdx.x == 0) thresholds[b] = threshold;
}

// Σ of the kept weights of each chunk, relative to the row's most likely token.
template <typename T>
__global__ void __launch_bounds__(CHUNK_THREADS, 8)
    kept_sums_kernel(const SamplingParams<T> p, const ChunkSummary* all_chunks, int64_t B, int num_chunks,
                     const uint64_t* thresholds, double* sums) {
    pdl_launch_dependents();
    const RowItem chunk = row_item(chunk_of_warp(), num_chunks);
    const int64_t b = chunk.row;
    const int lane = int(threadIdx.x) % WARP;
    const int64_t begin = chunk.item * CHUNK + lane * LANE_TOKENS;
    const SamplingRow& options = p.rows[min(b, B - 1)];
    const bool needed = b < B && (options.classes & sampling_class::THRESHOLD) != 0;
    pdl_wait();
    if (!needed) return;
    const Floats<LANE_TOKENS> x = p.row(b).template load<LANE_TOKENS>(begin);
    uint64_t best = 0;
    for (int c = lane; c < num_chunks; c += 4 * WARP)
#pragma unroll
        for (int i = 0; i < 4; i++)
            best = max(best, all_chunks[b * num_chunks + min(c + i * WARP, num_chunks - 1)].best);
    best = warp_max(best);
    if (!isfinite(token_logit(best))) return;
    const Filter filter{thresholds[b], {token_logit(best), options.rate}, options.min_p};
    double sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) sum += filter.kept(x[i], begin + i);
    sum = warp_sum(sum);
    if (lane == 0) sums[chunk_of_warp()] = sum;
}

}  // namespace sampling
