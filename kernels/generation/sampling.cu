// Sampling in two to five kernels. Warps or blocks process chunks of the vocabulary side by side; one block a row
// combines what they found. The kernels that a row needs; a call launches those that any of its rows needs, and the
// blocks of other rows exit at once, after pdl_wait(), so that a kernel never ends before those before it:
//
//   no filters            chunk_summary_kernel, sample_kernel
//   top_k ≤ 1024          candidates_kernel, sample_candidates_kernel (sampling_top_k.cuh); top_p and min_p after it
//   top_p without top_k   chunk_summary_kernel, weight_histogram_kernel, threshold_kernel, kept_sums_kernel,
//                         sample_kernel (sampling_threshold.cuh)
//   other filters         the same without weight_histogram_kernel
//
//   kernel                    threads   tokens of a block   registers   shared memory   blocks per SM
//   chunk_summary_kernel          128    2,048 (4 chunks)          64             0 B               8
//   sample_kernel                 128    a row                     32             112 B            16
//   candidates_kernel             256    4,096                     54           1,144 B             4
//   sample_candidates_kernel      256    a row's candidates        48           9,468 B             5
//   weight_histogram_kernel       256    1,024                     32          16,448 B             8
//   threshold_kernel            1,024    a row                     59          20,672 B             1
//   kept_sums_kernel              128    2,048 (4 chunks)          64             0 B               8
//
// (sm_90a, CUDA 13.0, bf16 logits; an SM has 65,536 registers.)
//
// GPT-2 124M, 64 sequences, V = 50257, no filters: ⌈50257/512⌉ = 99 chunks a row, 64·99 = 6336 warps in 1584 blocks of
// 4, then 64 blocks of sample_kernel, each with one chunk for each of 99 of its threads. Of an H100's 132 SMs each
// holds 8 blocks of chunk_summary_kernel, so that the first kernel runs in 1584/(132·8) = 1.5 waves. With top_k = 40:
// ⌈50257/4096⌉ = 13 chunks a row, 64·13 = 832 blocks of candidates_kernel, then 13·40 = 520 candidates a row.
#include "kernels/generation/sampling.h"

#include "kernels/generation/sampling.cuh"
#include "kernels/generation/sampling_check.h"
#include "kernels/generation/sampling_threshold.cuh"
#include "kernels/generation/sampling_top_k.cuh"

namespace sampling {

// The summary of each chunk by a warp, for rows without candidates. Where a histogram follows, the row's warps set it
// to 0 together.
template <typename T>
__global__ void __launch_bounds__(CHUNK_THREADS, 8)
    chunk_summary_kernel(const SamplingParams<T> p, ChunkSummary* chunks, int64_t B, int num_chunks,
                         FixedWeight* histograms) {
    pdl_launch_dependents();
    const RowItem chunk = row_item(chunk_of_warp(), num_chunks);
    const LogitRow<T> row = p.row(min(chunk.row, B - 1));
    const double rate = row.options->rate;
    const int lane = int(threadIdx.x % WARP);
    const int64_t begin = chunk.item * CHUNK + lane * LANE_TOKENS;
    const bool needed = chunk.row < B && !row.has(sampling_class::CANDIDATES);
    pdl_wait();
    if (!needed) return;
    const Floats<LANE_TOKENS> x = row.template load<LANE_TOKENS>(begin);
    if (row.has(sampling_class::HISTOGRAM))
#pragma unroll 1
        for (int64_t i = chunk.item * WARP + lane; i < WEIGHT_BINS; i += num_chunks * WARP)
            histograms[chunk.row * WEIGHT_BINS + i] = 0;
    float largest = -INFINITY;
    int at = 0;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        has_nan |= x[i] != x[i];
        if (x[i] > largest) {
            largest = x[i];
            at = i;
        }
    }
    const uint64_t best = warp_max(token_key(has_nan ? NAN : largest, begin + at));
    const TokenWeight weight{token_logit(best), rate};
    double sum = 0;
    if (rate > 0 && isfinite(weight.max)) {  // all −∞: no weight, whatever the row's maximum
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) sum += weight(x[i]);
        sum = warp_sum(sum);
    }
    if (lane == 0) chunks[chunk_of_warp()] = {best, sum};
}

// Samples by inverse CDF: first the chunk that u falls into, then the token within it. A thread has consecutive chunks,
// one where the vocabulary is not large, and consecutive tokens. thresholds and sums: those of the filters, for rows
// that need a threshold.
constexpr int SAMPLE_THREADS = 128, SAMPLE_TOKENS = CHUNK / SAMPLE_THREADS;

template <typename T>
__global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_kernel(const SamplingParams<T> p, const ChunkSummary* all_chunks, int num_chunks, const uint64_t* thresholds,
                  const double* sums) {
    pdl_launch_dependents();
    const int64_t b = blockIdx.x;
    const SamplingRow& options = p.rows[b];
    const bool needed = !p.needs(b, sampling_class::CANDIDATES), filtered = p.needs(b, sampling_class::THRESHOLD);
    pdl_wait();
    if (!needed) return;
    const ChunkSummary* const chunks = all_chunks + b * num_chunks;
    const double u = p.uniform(b);
    const int each = (num_chunks + SAMPLE_THREADS - 1) / SAMPLE_THREADS,
              begin = min(num_chunks, int(threadIdx.x) * each), end = min(num_chunks, begin + each);
    uint64_t best = 0;
#pragma unroll 1
    for (int c = begin; c < end; c++) best = max(best, chunks[c].best);
    best = block_max<SAMPLE_THREADS>(best);
    const bool finite = isfinite(token_logit(best));
    if (!finite || options.temperature == 0) {
        if (threadIdx.x == 0) p.write_token(b, finite ? token_id(best) : -1);
        return;
    }
    const Filter filter{
        filtered ? thresholds[b] : 0, {token_logit(best), options.rate}, filtered ? double(options.min_p) : 0.0};
    const auto chunk_weight = [&](int c) {
        return filtered ? sums[b * num_chunks + c] : chunks[c].sum * filter.weight(token_logit(chunks[c].best));
    };
    double mine = 0, remaining;
#pragma unroll 1
    for (int c = begin; c < end; c++) mine += chunk_weight(c);
    __shared__ int sampled_chunk;
    __shared__ double remaining_in_chunk;
    const auto target = [&](double total) { return u * total; };
    if (cdf_passes_here<SAMPLE_THREADS>(mine, target, &remaining)) {
#pragma unroll 1
        for (int c = begin; c < end; c++) {
            const double weight = each > 1 ? chunk_weight(c) : mine;
            if (weight > 0 && remaining >= 0) {
                sampled_chunk = c;
                remaining_in_chunk = remaining;
            }
            remaining -= weight;
        }
    }
    __syncthreads();

    const int64_t first = int64_t(sampled_chunk) * CHUNK + int(threadIdx.x) * SAMPLE_TOKENS;
    const Floats<SAMPLE_TOKENS> x = p.row(b).template load<SAMPLE_TOKENS>(first);
    double weights[SAMPLE_TOKENS];
    mine = 0;
#pragma unroll
    for (int i = 0; i < SAMPLE_TOKENS; i++) mine += weights[i] = filter.kept(x[i], first + i);
    const auto target_in_chunk = [&](double) { return remaining_in_chunk; };
    if (!cdf_passes_here<SAMPLE_THREADS>(mine, target_in_chunk, &remaining)) return;
    p.write_token(b, int32_t(first + cdf_index(weights, remaining)));
}

}  // namespace sampling

namespace {

using namespace sampling;

// The layout of the scratch memory. Rows with candidates have chunks of their own.
struct ScratchLayout {
    int64_t num_chunks = 0, num_candidate_chunks = 0;  // of a row
    int64_t max_k = 0;                                 // candidates of a chunk
    int64_t chunks = 0, candidate_chunks = 0, candidates = 0, sums = 0, thresholds = 0, histograms = 0;  // in bytes
    int64_t bytes = 0;

    ScratchLayout(int64_t B, int64_t V, uint32_t classes) {
        const auto reserve = [&](int64_t size) {
            const int64_t offset = bytes;
            bytes += size;
            return offset;
        };
        num_chunks = ceil_div(V, CHUNK);
        num_candidate_chunks = ceil_div(V, CANDIDATE_CHUNK);
        if (classes & (sampling_class::UNFILTERED | sampling_class::THRESHOLD))
            chunks = reserve(B * num_chunks * int64_t(sizeof(ChunkSummary)));
        if (classes & sampling_class::CANDIDATES) {
            max_k = std::min(SAMPLING_FAST_TOP_K, V);
            candidate_chunks = reserve(B * num_candidate_chunks * int64_t(sizeof(ChunkSummary)));
            candidates = reserve(B * num_candidate_chunks * max_k * int64_t(sizeof(uint64_t)));
        }
        if (!(classes & sampling_class::THRESHOLD)) return;
        sums = reserve(B * num_chunks * int64_t(sizeof(double)));
        thresholds = reserve(B * int64_t(sizeof(uint64_t)));
        if (classes & sampling_class::HISTOGRAM) histograms = reserve(B * WEIGHT_BINS * int64_t(sizeof(FixedWeight)));
    }
};

template <typename T>
void launch_candidates(const char* op, const SamplingParams<T>& p, int64_t B, const ScratchLayout& z, char* scratch,
                       Stream stream) {
    ChunkSummary* const chunks = reinterpret_cast<ChunkSummary*>(scratch + z.candidate_chunks);
    uint64_t* const candidates = reinterpret_cast<uint64_t*>(scratch + z.candidates);
    const int num_chunks = int(z.num_candidate_chunks), max_k = int(z.max_k);
    launch_pdl(op, candidates_kernel<T>, dim3(unsigned(B), unsigned(num_chunks)), FILTER_THREADS, 0, stream, p, chunks,
               candidates, max_k);
    launch_pdl(op, sample_candidates_kernel<T>, grid_of(B), FILTER_THREADS, 0, stream, p, chunks, candidates,
               num_chunks, max_k);
}

template <typename T>
void launch_chunks(const char* op, const SamplingParams<T>& p, int64_t B, const ScratchLayout& z, uint32_t classes,
                   char* scratch, Stream stream) {
    ChunkSummary* const chunks = reinterpret_cast<ChunkSummary*>(scratch + z.chunks);
    const int num_chunks = int(z.num_chunks);
    const dim3 warp_per_chunk = grid_of(ceil_div(B * num_chunks, CHUNK_WARPS));
    uint64_t* const thresholds = reinterpret_cast<uint64_t*>(scratch + z.thresholds);
    double* const sums = reinterpret_cast<double*>(scratch + z.sums);
    FixedWeight* const histograms = reinterpret_cast<FixedWeight*>(scratch + z.histograms);
    launch_pdl(op, chunk_summary_kernel<T>, warp_per_chunk, CHUNK_THREADS, 0, stream, p, chunks, B, num_chunks,
               histograms);
    if (classes & sampling_class::HISTOGRAM) {
        const dim3 grid(unsigned(B), unsigned(ceil_div(p.V, FILTER_THREADS * HISTOGRAM_TOKENS)));
        launch_pdl(op, weight_histogram_kernel<T>, grid, FILTER_THREADS, 0, stream, p, chunks, num_chunks, histograms);
    }
    if (classes & sampling_class::THRESHOLD) {
        launch_pdl(op, threshold_kernel<T>, grid_of(B), THRESHOLD_THREADS, 0, stream, p, chunks, num_chunks, histograms,
                   thresholds);
        launch_pdl(op, kept_sums_kernel<T>, warp_per_chunk, CHUNK_THREADS, 0, stream, p, chunks, B, num_chunks,
                   thresholds, sums);
    }
    launch_pdl(op, sample_kernel<T>, grid_of(B), SAMPLE_THREADS, 0, stream, p, chunks, num_chunks, thresholds, sums);
}

}  // namespace

int64_t sampling_scratch(int64_t B, int64_t V, uint32_t classes) {
    return ScratchLayout(B, V, classes).bytes;
}

void sample_tokens(Tensor ids, Tensor logits, int64_t V, const SamplingBatch& batch, Tensor scratch, Stream stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_sampling(op, dtype, ids, logits, V, batch, scratch);
    const int64_t B = logits.shape[0];
    if (B == 0) return;
    constexpr int64_t MAX_V = 65535 * FILTER_THREADS * HISTOGRAM_TOKENS;  // a grid has at most 65535 blocks in y
    require(V <= MAX_V, op, ": a vocabulary of ", V, "; at most ", MAX_V);
    const ScratchLayout z(B, V, batch.classes);
    const auto ints = [](const Tensor& t) { return t ? t.as<int32_t>() : nullptr; };
    const auto stride = [](const Tensor& t) { return t ? t.stride[0] : 0; };
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const SamplingParams<T> p{ids.as<int32_t>(),
                                  logits.as<const T>(),
                                  static_cast<const SamplingRow*>(batch.rows.data),
                                  ints(batch.seen),
                                  ints(batch.counts),
                                  ints(batch.masks),
                                  batch.sequences.as<int64_t>(),
                                  batch.steps.as<int64_t>(),
                                  logits.stride[0],
                                  stride(batch.seen),
                                  stride(batch.counts),
                                  stride(batch.masks),
                                  V,
                                  rows_aligned({logits})};
        char* const base = static_cast<char*>(scratch.data);
        if (batch.classes & (sampling_class::UNFILTERED | sampling_class::THRESHOLD))
            launch_chunks(op, p, B, z, batch.classes, base, stream);
        if (batch.classes & sampling_class::CANDIDATES) launch_candidates(op, p, B, z, base, stream);
    });
}
