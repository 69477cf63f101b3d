// Rounds: many look at stretches of a row side by side, and one block puts together what they found.
//
// Without filters two rounds: the likeliest token and the weight of each stretch, which is a warp's; the draw. With
// top_k up to SAMPLING_FAST_TOP_K two rounds as well: the k likeliest of each stretch, a longer one and a block's; the
// rest with those alone. Any other filter comes down to an edge, the least likely token that is kept: two more rounds
// find it, by the weights of 2,048 intervals of logits and a sort of what lies in the one where top_p is reached, and
// one adds up what is kept of each stretch.
#include "kernels/generation/sampling.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/generation/sampling_check.h"
#include "kernels/linear_attention/exp2_product.h"
#include "runtime/rng.h"

namespace {

// Larger floats have larger keys; −0 and 0 share one. NaN has the largest, so that it can't hide.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return x == x ? key : ~0u;
}

// The float behind a key; NaN behind 0.
__device__ __forceinline__ float from_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token as a number that is the larger the likelier it is: its key, then the lower id.
using Token = unsigned long long;
__device__ __forceinline__ Token token_of(float logit, int64_t id) {
    return Token(ordered(logit)) << 32 | uint32_t(~uint32_t(id));
}
__device__ __forceinline__ int32_t id_of(Token t) {
    return int32_t(~uint32_t(t));
}
__device__ __forceinline__ float logit_of(Token t) {
    return from_key(uint32_t(t >> 32));
}

// The logits of one sequence under the penalty.
template <typename T>
struct Row {
    const T* logits;
    const int32_t* seen;
    float penalty;
    double inverse_penalty;
    int64_t V;
    bool aligned;  // to 16 bytes
    // The product gives the quotient's bits wherever that is a normal number: no quotient of floats is so close to the
    // middle between two of them that the roundings of doubles matter. A division would be many times the code.
    __device__ __forceinline__ float penalised(float x) const {
        return x > 0 ? float(double(x) * inverse_penalty) : x * penalty;
    }
    __device__ __forceinline__ float operator[](int64_t v) const {
        const float x = as_float(logits[v]);
        return penalty == 1 || !(uint32_t(seen[v / 32]) >> (v % 32) & 1) ? x : penalised(x);
    }
    // N in a row, from a multiple of N on, all asked for at once. N divides 32. Beyond the vocabulary −∞: no weight.
    template <int N>
    __device__ __forceinline__ Floats<N> tokens(int64_t begin) const {
        const int left = int(min(int64_t(N), V - begin));
        Floats<N> x;
        if (aligned && left == N) {
            x = load_floats<N>(logits + begin);
        } else {
            const T* const from = logits + (left > 0 ? begin : 0);
            T raw[N];
#pragma unroll
            for (int i = 0; i < N; i++) raw[i] = from[min(i, max(left - 1, 0))];
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = i < left ? as_float(raw[i]) : -INFINITY;
        }
        if (penalty == 1 || left <= 0) return x;
        const uint32_t marks = uint32_t(seen[begin / 32]) >> (begin % 32);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (marks >> i & 1) x[i] = penalised(x[i]);
        return x;
    }
};

template <typename T>
struct Draw {
    int32_t* ids;
    const T* logits;
    int32_t* seen;
    const int64_t *sequences, *steps;
    int64_t stride, seen_stride, V;
    bool aligned;
    SamplingOptions options;
    double inverse_penalty;
    double rate;  // of weights, 2^((l − maximum)·rate): log2(e)/temperature; 0 for argmax

    __device__ __forceinline__ Row<T> row(int64_t b) const {
        return {logits + b * stride,
                seen + (seen ? b * seen_stride : 0),
                options.repeat_penalty,
                inverse_penalty,
                V,
                aligned};
    }
    __device__ __forceinline__ double uniform(int64_t b) const {
        const Philox4 random = philox(options.seed, uint64_t(sequences[b]), uint64_t(steps[b]));
        return uniform01(random.v[0], random.v[1]);
    }
    // One thread's work.
    __device__ __forceinline__ void choose(int64_t b, int32_t id) const {
        ids[b] = id;
        if (seen && id >= 0) seen[b * seen_stride + id / 32] |= int32_t(1u << (id % 32));
    }
};

// Weights as integers, whose sums are the same in any order; and how many intervals of logits they are counted in.
using Weight = unsigned long long;
constexpr double FIXED_ONE = 0x1p44;
constexpr int INTERVALS = 2048;
constexpr double INTERVALS_PER_OCTAVE = 45;

// What weights are relative to: a logit of `max` has 1.
struct Weighing {
    double max, rate;
    __device__ __forceinline__ double operator()(float x) const { return exp2_product(double(x) - max, rate); }
    __device__ __forceinline__ Weight fixed(float x) const { return Weight(llrint((*this)(x)*FIXED_ONE)); }
    // Interval of a logit's distance to the largest, in steps that change the weight by a factor of 2^(1/45); the last
    // one has everything whose weight is 0 as an integer.
    __device__ __forceinline__ int interval(float x) const {
        const double at = (max - double(x)) * rate * INTERVALS_PER_OCTAVE;
        return at < INTERVALS - 1 ? int(at) : INTERVALS - 1;
    }
};

__device__ __forceinline__ Token warp_max(Token t) {
    const uint32_t key = uint32_t(t >> 32), largest = __reduce_max_sync(ALL_LANES, key);
    return Token(largest) << 32 | __reduce_max_sync(ALL_LANES, key == largest ? uint32_t(t) : 0u);
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// --------------------------------------------------------------------------------------------------------------------
// Two rounds.

// A warp's stretch: each lane has some tokens in a row. Enough to hide the exponentials' latency behind each other, and
// few enough to spread one sequence over most of the machine. Warps share a block only to be launched together.
constexpr int LANE_TOKENS = 16, STRETCH = WARP * LANE_TOKENS;
constexpr int STRETCH_WARPS = 4, STRETCH_THREADS = STRETCH_WARPS * WARP;

// Where a block has a part of a row: its threads, and the tokens of each. Candidates are looked for among many, because
// fewer stretches leave fewer of them.
constexpr int ROUND_THREADS = 256, ROUND_WARPS = ROUND_THREADS / WARP;
constexpr int FEW = 4, MANY = 16;

// What a stretch tells: its likeliest token, NaN if it holds one, and Σ exp((l − its own maximum)/temperature).
struct alignas(16) Found {
    Token best;
    double sum;
};

// The warp's number among all of the grid, which is that of its stretch among all rows'.
__device__ __forceinline__ int64_t warp_in_grid() {
    return int64_t(blockIdx.x) * STRETCH_WARPS + threadIdx.x / WARP;
}

template <typename T>
__global__ void __launch_bounds__(STRETCH_THREADS, 8)
    stretch_kernel(const Draw<T> draw, Found* found, int64_t B, int stretches, Weight* intervals) {
    pdl_launch_dependents();
    const RowItem stretch = row_item(warp_in_grid(), stretches);
    const Row<T> row = draw.row(stretch.row);
    const int lane = int(threadIdx.x % WARP);
    const int64_t begin = stretch.item * STRETCH + lane * LANE_TOKENS;
    pdl_wait();
    if (stretch.row >= B) return;
    const Floats<LANE_TOKENS> x = row.template tokens<LANE_TOKENS>(begin);
    if (intervals)
#pragma unroll 1
        for (int64_t i = stretch.item * WARP + lane; i < INTERVALS; i += stretches * WARP)
            intervals[stretch.row * INTERVALS + i] = 0;
    float largest = -INFINITY;
    int at = 0;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        has_nan |= x[i] != x[i];
        if (x[i] > largest) largest = x[i], at = i;
    }
    const Token best = warp_max(token_of(has_nan ? NAN : largest, begin + at));
    const Weighing weight{logit_of(best), draw.rate};
    double sum = 0;
    if (draw.options.temperature > 0 && isfinite(weight.max)) {  // all −∞: no weight, whatever the row's maximum
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) sum += weight(x[i]);
        sum = warp_sum(sum);
    }
    if (lane == 0) found[warp_in_grid()] = {best, sum};
}

// The largest of a block's N threads, in all of them.
template <int N>
__device__ Token block_max(Token t) {
    __shared__ Token maxima[N / WARP];
    t = warp_max(t);
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = t;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < N / WARP; w++) t = max(t, maxima[w]);
    return t;
}

// The k likeliest of each stretch, in any order: the second round sorts.
template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    candidates_kernel(const Draw<T> draw, Found* found, Token* candidates, int k) {
    pdl_launch_dependents();
    pdl_wait();
    __shared__ int written;
    const int64_t b = blockIdx.x, stretch = b * gridDim.y + blockIdx.y;
    const int64_t begin = int64_t(blockIdx.y) * ROUND_THREADS * MANY;
    const Row<T> row = draw.row(b);
    const int count = int(min(int64_t(ROUND_THREADS * MANY), draw.V - begin));
    Token tokens[MANY], best = 0;
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        const int at = i * ROUND_THREADS + int(threadIdx.x);
        tokens[i] = at < count ? token_of(row[begin + at], begin + at) : 0;
        best = max(best, tokens[i]);
    }
    if (threadIdx.x == 0) written = 0;
    best = block_max<ROUND_THREADS>(best);
    if (threadIdx.x == 0) found[stretch] = {best, 0};
    const auto for_each_token = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < MANY; i++)
            if (tokens[i] != 0) visit(tokens[i]);
    };
    const Token edge = count <= k ? 1 : threshold_of_k_largest<ROUND_THREADS, Token>(k, for_each_token);
    Token* const to = candidates + stretch * k;
    for_each_token([&](Token t) {
        if (t >= edge) to[atomicAdd(&written, 1)] = t;
    });
    __syncthreads();
    for (int i = written + int(threadIdx.x); i < k; i += ROUND_THREADS) to[i] = 0;
}

// For each of n numbers, a thread having PER of them in a row, the sum up to and with it. Returns the total.
template <int PER>
__device__ double block_inclusive_sums(double (&x)[PER]) {
    __shared__ double warp_sums[ROUND_WARPS];
    double mine = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) mine += x[i];
    const BlockScan<double> scan = block_scan<ROUND_THREADS>(mine, warp_sums);
    double sum = scan.exclusive(mine);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = sum += x[i];
    return scan.total;
}

// Larger tokens first. n is a power of two.
__device__ void sort_descending(Token* x, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = int(threadIdx.x); i < n / 2; i += int(blockDim.x)) {
                const int low = i / step * step * 2 + i % step, high = low + step;
                const bool descending = (low & size) == 0;
                if ((x[low] < x[high]) == descending) {
                    const Token t = x[low];
                    x[low] = x[high];
                    x[high] = t;
                }
            }
        }
    __syncthreads();
}

// Which of the block's N threads the cumulative sum of their numbers passes threshold(their total) in: the last with a
// number above 0 before which the sum doesn't exceed it, so that rounding can't miss them all. True in that one, where
// *rest is what is left of the threshold before its number. Between two calls there must be a barrier.
template <int N, typename Threshold>
__device__ bool falls_here(double mine, Threshold threshold, double* rest) {
    __shared__ double warp_sums[N / WARP];
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
    const BlockScan<double> scan = block_scan<N>(mine, warp_sums);
    double left = threshold(scan.total);
    int drawn = 0;
    *rest = 0;
#pragma unroll
    for (int w = 0; w < N / WARP; w++) {
        if (warp_sums[w] > 0 && left >= 0) drawn = w, *rest = left;
        left -= warp_sums[w];
    }
    *rest -= scan.in_warp - mine;
    const unsigned possible = __ballot_sync(ALL_LANES, mine > 0 && *rest >= 0);
    return warp == drawn && possible >> lane == 1;
}

// The best token of all stretches, known to the whole block of N threads; false where the logits can't be drawn from.
template <int N>
__device__ bool best_of(const Found* found, int stretches, Token* best) {
    Token mine = 0;
    for (int s = int(threadIdx.x); s < stretches; s += N) mine = max(mine, found[s].best);
    *best = block_max<N>(mine);
    return isfinite(logit_of(*best));
}

// What is kept of a row: tokens no less likely than the edge that have min_p of the likeliest's weight.
struct Filter {
    Token edge;
    Weighing weight;
    double min_p;
    // The weight of a token, 0 if it isn't kept. Without a branch, so that several are computed side by side.
    __device__ __forceinline__ double kept(float x, int64_t v) const {
        const double w = weight(token_of(x, v) >= edge ? x : -INFINITY);
        return w >= min_p ? w : 0.0;
    }
};

// What is kept of each stretch.
template <typename T>
__global__ void __launch_bounds__(STRETCH_THREADS, 8)
    kept_kernel(const Draw<T> draw, const Found* all, int64_t B, int stretches, const Token* edges, double* sums) {
    pdl_launch_dependents();
    const RowItem stretch = row_item(warp_in_grid(), stretches);
    const int64_t b = stretch.row;
    const int lane = int(threadIdx.x) % WARP;
    const int64_t begin = stretch.item * STRETCH + lane * LANE_TOKENS;
    pdl_wait();
    if (b >= B) return;
    const Floats<LANE_TOKENS> x = draw.row(b).template tokens<LANE_TOKENS>(begin);
    Token best = 0;
    for (int s = lane; s < stretches; s += 4 * WARP)
#pragma unroll
        for (int i = 0; i < 4; i++) best = max(best, all[b * stretches + min(s + i * WARP, stretches - 1)].best);
    best = warp_max(best);
    if (!isfinite(logit_of(best))) return;
    const Filter filter{edges[b], {logit_of(best), draw.rate}, draw.options.min_p};
    double sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) sum += filter.kept(x[i], begin + i);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp_in_grid()] = sum;
}

// The draw: the stretch that u falls into, and the token within it. Of both every thread has some in a row; of
// stretches one, where a vocabulary is not large. edges and sums: of what is kept; null without filters.
constexpr int DRAW_THREADS = 128, DRAW_TOKENS = STRETCH / DRAW_THREADS;

template <typename T>
__global__ void __launch_bounds__(DRAW_THREADS)
    draw_kernel(const Draw<T> draw, const Found* all, int stretches, const Token* edges, const double* sums) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t b = blockIdx.x;
    const Found* const found = all + b * stretches;
    const double u = draw.uniform(b);
    const int each = (stretches + DRAW_THREADS - 1) / DRAW_THREADS, begin = min(stretches, int(threadIdx.x) * each),
              end = min(stretches, begin + each);
    Token best = 0;
#pragma unroll 1
    for (int s = begin; s < end; s++) best = max(best, found[s].best);
    best = block_max<DRAW_THREADS>(best);
    const bool finite = isfinite(logit_of(best));
    if (!finite || draw.options.temperature == 0) {
        if (threadIdx.x == 0) draw.choose(b, finite ? id_of(best) : -1);
        return;
    }
    const Filter filter{edges ? edges[b] : 0, {logit_of(best), draw.rate}, edges ? double(draw.options.min_p) : 0.0};
    const auto stretch_weight = [&](int s) {
        return sums ? sums[b * stretches + s] : found[s].sum * filter.weight(logit_of(found[s].best));
    };
    double mine = 0, rest;
#pragma unroll 1
    for (int s = begin; s < end; s++) mine += stretch_weight(s);
    __shared__ int drawn;
    __shared__ double rest_of_drawn;
    const auto part = [&](double total) { return u * total; };
    if (falls_here<DRAW_THREADS>(mine, part, &rest)) {
#pragma unroll 1
        for (int s = begin; s < end; s++) {
            const double weight = each > 1 ? stretch_weight(s) : mine;
            if (weight > 0 && rest >= 0) drawn = s, rest_of_drawn = rest;
            rest -= weight;
        }
    }
    __syncthreads();

    const int64_t first = int64_t(drawn) * STRETCH + int(threadIdx.x) * DRAW_TOKENS;
    const Floats<DRAW_TOKENS> x = draw.row(b).template tokens<DRAW_TOKENS>(first);
    double weights[DRAW_TOKENS];
    mine = 0;
#pragma unroll
    for (int i = 0; i < DRAW_TOKENS; i++) mine += weights[i] = filter.kept(x[i], first + i);
    const auto found_rest = [&](double) { return rest_of_drawn; };
    if (!falls_here<DRAW_THREADS>(mine, found_rest, &rest)) return;
    int at = 0;
#pragma unroll
    for (int i = 0; i < DRAW_TOKENS; i++) {
        if (weights[i] > 0 && rest >= 0) at = i;
        rest -= weights[i];
    }
    draw.choose(b, int32_t(first + at));
}

// top_k, with top_p and min_p after it: the k likeliest of all stretches' candidates, sorted.
template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    draw_from_candidates_kernel(const Draw<T> draw, const Found* all, const Token* all_candidates, int stretches,
                                int k) {
    pdl_launch_dependents();
    pdl_wait();
    constexpr int MAX_K = int(SAMPLING_FAST_TOP_K), PER = MAX_K / ROUND_THREADS;
    __shared__ Token kept[MAX_K];
    __shared__ int written, limit;
    const int64_t b = blockIdx.x;
    Token best;
    if (!best_of<ROUND_THREADS>(all + b * stretches, stretches, &best)) {
        if (threadIdx.x == 0) draw.choose(b, -1);
        return;
    }
    const Token* const candidates = all_candidates + b * stretches * k;
    const int n = stretches * k;
    const auto for_each_candidate = [&](auto visit) {
        for (int i = int(threadIdx.x); i < n; i += ROUND_THREADS)
            if (const Token t = candidates[i]; t != 0) visit(t);
    };
    if (threadIdx.x == 0) written = 0, limit = MAX_K;
    for (int i = int(threadIdx.x); i < MAX_K; i += ROUND_THREADS) kept[i] = 0;
    __syncthreads();
    const Token edge = threshold_of_k_largest<ROUND_THREADS, Token>(k, for_each_candidate);
    for_each_candidate([&](Token t) {
        if (t >= edge) kept[atomicAdd(&written, 1)] = t;
    });
    int sorted = 1;
    while (sorted < k) sorted *= 2;
    sort_descending(kept, sorted);

    const Weighing weight{logit_of(best), draw.rate};
    const int first = int(threadIdx.x) * PER;
    if (draw.options.top_p < 1 || draw.options.min_p > 0) {
        double weights[PER], sums[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) sums[i] = weights[i] = first + i < k ? weight(logit_of(kept[first + i])) : 0.0;
        const double total = block_inclusive_sums(sums), enough = double(draw.options.top_p) * total;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (first + i >= k) continue;
            if (draw.options.top_p < 1 && sums[i] >= enough) atomicMin(&limit, first + i + 1);
            if (weights[i] < double(draw.options.min_p)) atomicMin(&limit, first + i);
        }
    }
    __syncthreads();
    // The kept in order of id.
    const int left = min(k, limit);
    for (int i = int(threadIdx.x); i < sorted; i += ROUND_THREADS)
        kept[i] = i < left ? Token(~uint32_t(id_of(kept[i]))) << 32 | uint32_t(kept[i] >> 32) : 0;
    sort_descending(kept, sorted);  // the larger ~id first; the key has become the low half
    double weights[PER], sum = 0, rest;
#pragma unroll
    for (int i = 0; i < PER; i++)
        sum += weights[i] = first + i < left ? weight(from_key(uint32_t(kept[first + i]))) : 0.0;
    const double u = draw.uniform(b);
    const auto part = [&](double total) { return u * total; };
    if (!falls_here<ROUND_THREADS>(sum, part, &rest)) return;
    int at = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (weights[i] > 0 && rest >= 0) at = i;
        rest -= weights[i];
    }
    draw.choose(b, int32_t(~uint32_t(kept[first + at] >> 32)));
}

// --------------------------------------------------------------------------------------------------------------------
// The edge.

constexpr int THREADS = 1024, WARPS = THREADS / WARP;

// The key of the k-th largest logit. *ties is how many of the logits on the edge belong to the k. 1 ≤ k ≤ V.
template <typename T>
__device__ uint32_t kth_largest(const Row<T>& logits, int64_t V, int64_t k, int64_t* ties) {
    const auto for_each_key = [&](auto add) {
        for (int64_t v = threadIdx.x; v < V; v += THREADS) add(ordered(logits[v]), 1);
    };
    const auto reached = [&](int sum) { return sum >= k; };
    const auto complete = [](int) { return false; };  // all bits of the key are wanted
    const auto selection = radix_select<THREADS, uint32_t, int>(for_each_key, reached, complete);
    *ties = k - selection.above;
    return selection.threshold;
}

// What is kept of a row: all above the edge, and the first `ties` of those on it in order of id.
struct Kept {
    uint32_t edge;
    int64_t ties;
};

// As few of the likeliest as have together at least top_p of the weight of what `kept` keeps: like kth_largest, with
// weights in place of counts.
template <typename T>
__device__ Kept nucleus(const Row<T>& logits, int64_t V, Kept kept, float top_p, Weighing weight) {
    __shared__ Weight shared_total;
    const Weight on_edge = kept.edge ? Weight(kept.ties) * weight.fixed(from_key(kept.edge)) : 0;
    if (threadIdx.x == 0) shared_total = on_edge;
    __syncthreads();
    Weight mine = 0;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) {
        const float x = logits[v];
        if (ordered(x) > kept.edge) mine += weight.fixed(x);
    }
    atomicAdd(&shared_total, mine);
    __syncthreads();
    const double enough = double(top_p) * double(shared_total);
    const auto for_each_key = [&](auto add) {
        for (int64_t v = threadIdx.x; v < V; v += THREADS) {
            const float x = logits[v];
            if (const uint32_t key = ordered(x); key > kept.edge) add(key, weight.fixed(x));
        }
        if (threadIdx.x == 0 && kept.edge) add(kept.edge, on_edge);
    };
    const auto reached = [&](Weight sum) { return double(sum) >= enough; };
    const auto complete = [](Weight) { return false; };
    const auto selection = radix_select<THREADS, uint32_t, Weight>(for_each_key, reached, complete);
    const uint32_t edge = selection.threshold;
    // How many on the edge are needed: at least one, and no more than there are.
    const double each = double(weight.fixed(from_key(edge))), missing = enough - double(selection.above);
    int64_t ties = each > 0 ? max(int64_t(1), int64_t(ceil(missing / each))) : INT64_MAX;
    if (edge == kept.edge && kept.ties < ties) ties = kept.ties;
    return {edge, ties};
}

template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    interval_kernel(const Draw<T> draw, const Found* all, int stretches, Weight* all_intervals) {
    pdl_launch_dependents();
    pdl_wait();
    __shared__ Weight weights[INTERVALS];
    const int64_t b = blockIdx.x;
    const Floats<FEW> x =
        draw.row(b).template tokens<FEW>((int64_t(blockIdx.y) * ROUND_THREADS + int(threadIdx.x)) * FEW);
    Token best;
    if (!best_of<ROUND_THREADS>(all + b * stretches, stretches, &best)) return;
    const Weighing weight{logit_of(best), draw.rate};
    for (int i = int(threadIdx.x); i < INTERVALS; i += ROUND_THREADS) weights[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FEW; i++) {
        const Weight w = weight.fixed(x[i]);
        if (w > 0) atomicAdd(&weights[weight.interval(x[i])], w);
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < INTERVALS; i += ROUND_THREADS)
        if (weights[i] > 0) atomicAdd(&all_intervals[b * INTERVALS + i], weights[i]);
}

// The least likely token of the fewest that have together top_p of a row's weight. 0 where too many lie in the interval
// that decides.
template <typename T>
__device__ Token nucleus_edge(const Row<T>& row, int64_t V, const Weight* intervals, float top_p, Weighing weight) {
    constexpr int PER = INTERVALS / THREADS;
    __shared__ Token inside[INTERVALS];
    __shared__ int count, deciding;
    __shared__ Weight above;
    __shared__ Token edge;
    if (threadIdx.x == 0) count = 0, deciding = INTERVALS - 1, edge = 0;
    __shared__ Weight warp_sums[WARPS];
    Weight mine[PER], sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) sum += mine[i] = intervals[int(threadIdx.x) * PER + i];
    const BlockScan<Weight> scan = block_scan<THREADS>(sum, warp_sums);
    const double enough = double(top_p) * double(scan.total);
    Weight up_to = scan.exclusive(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const double before = double(up_to);
        up_to += mine[i];
        if ((before < enough || (threadIdx.x == 0 && i == 0)) && double(up_to) >= enough)
            deciding = int(threadIdx.x) * PER + i, above = up_to - mine[i];
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < V; v += THREADS) {
        const float x = row[v];
        if (weight.interval(x) != deciding) continue;
        const int at = atomicAdd(&count, 1);
        if (at < INTERVALS) inside[at] = token_of(x, v);
    }
    __syncthreads();
    if (count > INTERVALS) return 0;
    int padded = 1;
    while (padded < count) padded *= 2;
    for (int i = count + int(threadIdx.x); i < padded; i += THREADS) inside[i] = 0;
    sort_descending(inside, padded);
    sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int at = int(threadIdx.x) * PER + i;
        sum += mine[i] = at < count ? weight.fixed(logit_of(inside[at])) : 0;
    }
    up_to = above + block_scan<THREADS>(sum, warp_sums).exclusive(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int at = int(threadIdx.x) * PER + i;
        const bool reached = at == 0 ? false : double(up_to) >= enough;
        up_to += mine[i];
        if (at < count && !reached && double(up_to) >= enough) edge = inside[at];
    }
    __syncthreads();
    return edge;
}

// The token of `kept` that stands last: the ties-th, in order of id, of those on its edge.
template <typename T>
__device__ Token edge_of(const Row<T>& row, int64_t V, Kept kept) {
    if (kept.edge == 0 || kept.ties == INT64_MAX) return Token(kept.edge) << 32;
    __shared__ Token edge;
    if (threadIdx.x == 0) edge = Token(kept.edge) << 32;  // all of them, should there be fewer
    const int64_t part = ceil_div(V, THREADS), begin = min(V, threadIdx.x * part), end = min(V, begin + part);
    int64_t mine = 0;
    for (int64_t v = begin; v < end; v++) mine += ordered(row[v]) == kept.edge;
    __shared__ int64_t warp_sums[WARPS];
    int64_t before = block_scan<THREADS>(mine, warp_sums).exclusive(mine);
    if (before < kept.ties && before + mine >= kept.ties)
        for (int64_t v = begin; v < end; v++)
            if (ordered(row[v]) == kept.edge && ++before == kept.ties) edge = token_of(row[v], v);
    __syncthreads();
    return edge;
}

// intervals: null where top_k comes before top_p, or there is no top_p; then a block looks at the row itself.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    edge_kernel(const Draw<T> draw, const Found* all, int stretches, const Weight* intervals, Token* edges) {
    pdl_launch_dependents();
    pdl_wait();
    const SamplingOptions& options = draw.options;
    const int64_t b = blockIdx.x;
    Token best, edge = 0;
    if (!best_of<THREADS>(all + b * stretches, stretches, &best)) return;
    const Row<T> row = draw.row(b);
    const Weighing weight{logit_of(best), draw.rate};
    if (intervals) edge = nucleus_edge(row, draw.V, intervals + b * INTERVALS, options.top_p, weight);
    if (edge == 0) {
        Kept kept{0, 0};
        if (options.top_k > 0 && options.top_k < draw.V)
            kept.edge = kth_largest(row, draw.V, options.top_k, &kept.ties);
        if (options.top_p < 1) kept = nucleus(row, draw.V, kept, options.top_p, weight);
        edge = edge_of(row, draw.V, kept);
    }
    if (threadIdx.x == 0) edges[b] = edge;
}

constexpr double LOG2E = 1.4426950408889634074;

enum class Way { All, Candidates, Edge };
Way way_of(const SamplingOptions& o, int64_t V) {
    const bool all_kept = o.top_k == 0 || o.top_k >= V, no_threshold = o.top_p == 1 && o.min_p == 0;
    if (o.temperature == 0 || (all_kept && no_threshold)) return Way::All;
    return o.top_k > 0 && std::min(o.top_k, V) <= SAMPLING_FAST_TOP_K ? Way::Candidates : Way::Edge;
}

// What lies in scratch, one behind the other.
struct Scratch {
    int64_t stretches = 0;
    int64_t k = 0;
    int64_t found = 0, candidates = 0, sums = 0, edges = 0, intervals = 0, bytes = 0;  // where they begin
    Scratch(int64_t B, int64_t V, const SamplingOptions& o) {
        const Way way = way_of(o, V);
        const auto take = [&](int64_t size) {
            const int64_t begin = bytes;
            bytes += size;
            return begin;
        };
        stretches = ceil_div(V, way == Way::Candidates ? ROUND_THREADS * MANY : STRETCH);
        found = take(B * stretches * int64_t(sizeof(Found)));
        if (way == Way::Candidates) {
            k = std::min(o.top_k, V);
            candidates = take(B * stretches * k * int64_t(sizeof(Token)));
        }
        if (way != Way::Edge) return;
        sums = take(B * stretches * int64_t(sizeof(double)));
        edges = take(B * int64_t(sizeof(Token)));
        intervals = take(B * INTERVALS * int64_t(sizeof(Weight)));
    }
};

}  // namespace

int64_t sampling_scratch(int64_t B, int64_t V, const SamplingOptions& options) {
    return Scratch(B, V, options).bytes;
}

void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Tensor seen, Tensor scratch, Stream stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_sampling(op, dtype, ids, logits, V, sequences, steps, options, seen, scratch);
    const int64_t B = logits.shape[0];
    if (B == 0) return;
    const Scratch z(B, V, options);
    constexpr int64_t MOST = 65535 * ROUND_THREADS * FEW;
    require(V <= MOST, op, ": a vocabulary of ", V, "; at most ", MOST);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const Draw<T> draw{ids.as<int32_t>(),
                           logits.as<const T>(),
                           seen ? seen.as<int32_t>() : nullptr,
                           sequences.as<int64_t>(),
                           steps.as<int64_t>(),
                           logits.stride[0],
                           seen ? seen.stride[0] : 0,
                           V,
                           rows_aligned({logits}),
                           options,
                           1 / double(options.repeat_penalty),
                           options.temperature > 0 ? LOG2E / double(options.temperature) : 0.0};
        char* const base = static_cast<char*>(scratch.data);
        Found* const found = reinterpret_cast<Found*>(base + z.found);
        const int stretches = int(z.stretches), k = int(z.k);
        const auto parts = [&](int64_t n) { return dim3(unsigned(B), unsigned(n)); };
        const Way way = way_of(options, V);
        if (way == Way::Candidates) {
            Token* const candidates = reinterpret_cast<Token*>(base + z.candidates);
            launch_pdl(op, candidates_kernel<T>, parts(stretches), ROUND_THREADS, 0, stream, draw, found, candidates,
                       k);
            launch_pdl(op, draw_from_candidates_kernel<T>, grid_of(B), ROUND_THREADS, 0, stream, draw, found,
                       candidates, stretches, k);
            return;
        }
        Token* edges = nullptr;
        double* sums = nullptr;
        Weight* intervals = nullptr;
        if (way == Way::Edge) {
            edges = reinterpret_cast<Token*>(base + z.edges), sums = reinterpret_cast<double*>(base + z.sums);
            const bool top_k = options.top_k > 0 && options.top_k < V;
            if (options.top_p < 1 && !top_k) intervals = reinterpret_cast<Weight*>(base + z.intervals);
        }
        const dim3 each_stretch = grid_of(ceil_div(B * stretches, STRETCH_WARPS));
        launch_pdl(op, stretch_kernel<T>, each_stretch, STRETCH_THREADS, 0, stream, draw, found, B, stretches,
                   intervals);
        if (intervals)
            launch_pdl(op, interval_kernel<T>, parts(ceil_div(V, ROUND_THREADS * FEW)), ROUND_THREADS, 0, stream, draw,
                       found, stretches, intervals);
        if (way == Way::Edge) {
            launch_pdl(op, edge_kernel<T>, grid_of(B), THREADS, 0, stream, draw, found, stretches, intervals, edges);
            launch_pdl(op, kept_kernel<T>, each_stretch, STRETCH_THREADS, 0, stream, draw, found, B, stretches, edges,
                       sums);
        }
        launch_pdl(op, draw_kernel<T>, grid_of(B), DRAW_THREADS, 0, stream, draw, found, stretches, edges, sums);
    });
}
