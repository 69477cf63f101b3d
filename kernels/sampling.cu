// Two rounds where that is possible: blocks look at stretches of a row side by side, and one block puts together what
// they found. Filters that need a look at the whole row again and again take the third kernel, a block a row.
#include "kernels/sampling.h"

#include "kernels/dependent_launch.cuh"
#include "kernels/sampling_check.h"
#include "runtime/rng.h"

namespace {

// Larger floats have larger keys; −0 and 0 share one.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The float behind a key.
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
    __device__ __forceinline__ float operator[](int64_t v) const {
        const float x = as_float(logits[v]);
        if (penalty == 1 || !(uint32_t(seen[v / 32]) >> (v % 32) & 1)) return x;
        return x > 0 ? x / penalty : x * penalty;
    }
};

template <typename T>
struct Draw {
    int32_t* ids;
    const T* logits;
    int32_t* seen;
    const int64_t *sequences, *steps;
    int64_t stride, seen_stride, V;
    SamplingOptions options;

    __device__ __forceinline__ Row<T> row(int64_t b) const {
        return {logits + b * stride, seen ? seen + b * seen_stride : nullptr, options.repeat_penalty};
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

__device__ __forceinline__ double warp_inclusive_sum(double x) {
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const double below = __shfl_up_sync(ALL_LANES, x, offset);
        if (int(threadIdx.x) % WARP >= offset) x += below;
    }
    return x;
}

// --------------------------------------------------------------------------------------------------------------------
// Two rounds.

constexpr int ROUND_THREADS = 256, ROUND_WARPS = ROUND_THREADS / WARP;
constexpr int PER_THREAD = 16, STRETCH = ROUND_THREADS * PER_THREAD;

// What a stretch tells: its likeliest token, and Σ exp((l − its own maximum)/temperature).
struct Found {
    Token best;
    double sum;
    int64_t has_nan;
};

// The least Token of the k largest of those that visit(f) calls f(token) for, each thread some; all must differ, or be
// 0. Byte by byte from the top, until a byte's tokens are all among the k. At least k are not 0.
template <typename Visit>
__device__ Token kth_largest_token(int k, Visit visit) {
    __shared__ int count[256];
    __shared__ int above[ROUND_WARPS];
    __shared__ Token shared_edge;
    __shared__ int shared_k, shared_all;
    Token edge = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        count[threadIdx.x] = 0;
        __syncthreads();
        const Token known = shift == 56 ? 0 : ~Token(0) << (shift + 8);
        visit([&](Token t) {
            if (t != 0 && (t & known) == edge) atomicAdd(&count[t >> shift & 255], 1);
        });
        __syncthreads();
        // Thread i looks at byte 255 − i: how many tokens have it or a larger one?
        const int byte = 255 - int(threadIdx.x), mine = count[byte], lane = int(threadIdx.x) % WARP;
        int inclusive = mine;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int below = __shfl_up_sync(ALL_LANES, inclusive, offset);
            if (lane >= offset) inclusive += below;
        }
        if (lane == WARP - 1) above[threadIdx.x / WARP] = inclusive;
        __syncthreads();
        for (int w = 0; w < int(threadIdx.x) / WARP; w++) inclusive += above[w];
        if (inclusive >= k && inclusive - mine < k) {
            shared_edge = edge | Token(byte) << shift;
            shared_k = k - (inclusive - mine);
            shared_all = shared_k == mine;
        }
        __syncthreads();
        edge = shared_edge;
        k = shared_k;
        if (shared_all) break;
    }
    return edge;
}

template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    stretch_kernel(const Draw<T> draw, Found* found, Token* candidates, int k) {
    wait_for_previous();
    let_next_start();
    const int64_t b = blockIdx.x, begin = int64_t(blockIdx.y) * STRETCH;
    const Row<T> row = draw.row(b);
    const int count = int(min(int64_t(STRETCH), draw.V - begin));
    Token tokens[PER_THREAD], best = 0;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int at = i * ROUND_THREADS + int(threadIdx.x);
        tokens[i] = 0;
        if (at >= count) continue;
        const float x = row[begin + at];
        has_nan |= x != x;
        tokens[i] = token_of(x, begin + at);
        best = max(best, tokens[i]);
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, offset));
    __shared__ Token maxima[ROUND_WARPS];
    __shared__ double sums[ROUND_WARPS];
    __shared__ int written;
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
    if (lane == 0) maxima[warp] = best;
    if (threadIdx.x == 0) written = 0;
    has_nan = __syncthreads_or(has_nan);
    for (int w = 0; w < ROUND_WARPS; w++) best = max(best, maxima[w]);
    Found* const mine = found + b * gridDim.y + blockIdx.y;

    if (k > 0) {
        // The k likeliest of the stretch, in any order: the second round sorts.
        const auto visit = [&](auto f) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) f(tokens[i]);
        };
        const Token edge = count <= k ? 1 : kth_largest_token(k, visit);
        Token* const to = candidates + (b * gridDim.y + blockIdx.y) * k;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (tokens[i] >= edge) to[atomicAdd(&written, 1)] = tokens[i];
        __syncthreads();
        for (int i = written + int(threadIdx.x); i < k; i += ROUND_THREADS) to[i] = 0;
        if (threadIdx.x == 0) *mine = {best, 0, has_nan};
        return;
    }
    double sum = 0;
    if (draw.options.temperature > 0) {
        const double max = logit_of(best), temperature = draw.options.temperature;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (tokens[i] != 0) sum += exp((double(logit_of(tokens[i])) - max) / temperature);
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        sum = 0;
        for (int w = 0; w < ROUND_WARPS; w++) sum += sums[w];
    }
    if (threadIdx.x == 0) *mine = {best, sum, has_nan};
}

// For each of n numbers, a thread having PER of them in a row, the sum up to and with it. Returns the total.
template <int PER>
__device__ double block_inclusive_sums(double (&x)[PER]) {
    __shared__ double sums[ROUND_WARPS];
    double mine = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) mine += x[i];
    const double inclusive = warp_inclusive_sum(mine);
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
    __syncthreads();
    if (lane == WARP - 1) sums[warp] = inclusive;
    __syncthreads();
    double before = 0, total = 0;
    for (int w = 0; w < ROUND_WARPS; w++) {
        if (w == warp) before = total;
        total += sums[w];
    }
    before += inclusive - mine;
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = before += x[i];
    return total;
}

// Larger tokens first. n is a power of two.
__device__ void sort_descending(Token* x, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = int(threadIdx.x); i < n / 2; i += ROUND_THREADS) {
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

// The best token of all stretches; false where the logits can't be drawn from.
__device__ bool best_of(const Found* found, int stretches, Token* best) {
    bool has_nan = false;
    *best = 0;
    for (int s = 0; s < stretches; s++) {
        *best = max(*best, found[s].best);
        has_nan |= found[s].has_nan != 0;
    }
    return !has_nan && isfinite(logit_of(*best));
}

// Without filters: the stretch that u falls into, and the token within it.
template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    draw_from_all_kernel(const Draw<T> draw, const Found* all, int stretches) {
    wait_for_previous();
    let_next_start();
    const int64_t b = blockIdx.x;
    const Found* const found = all + b * stretches;
    Token best;
    const bool finite = best_of(found, stretches, &best);
    if (!finite || draw.options.temperature == 0) {
        if (threadIdx.x == 0) draw.choose(b, finite ? id_of(best) : -1);
        return;
    }
    const double max = logit_of(best), temperature = draw.options.temperature;
    const auto weight_of_stretch = [&](int s) {
        return found[s].sum * exp((double(logit_of(found[s].best)) - max) / temperature);
    };
    __shared__ double weights[ROUND_THREADS];  // of stretches, as many as there are threads at a time
    double total = 0;
    for (int first = 0; first < stretches; first += ROUND_THREADS) {
        __syncthreads();
        if (first + int(threadIdx.x) < stretches) weights[threadIdx.x] = weight_of_stretch(first + int(threadIdx.x));
        __syncthreads();
        for (int s = 0; s < min(ROUND_THREADS, stretches - first); s++) total += weights[s];
    }
    const double threshold = draw.uniform(b) * total;
    int chosen = -1;
    double before = 0;
    for (int first = 0; first < stretches && chosen < 0; first += ROUND_THREADS) {
        __syncthreads();
        if (first + int(threadIdx.x) < stretches) weights[threadIdx.x] = weight_of_stretch(first + int(threadIdx.x));
        __syncthreads();
        for (int s = 0; s < min(ROUND_THREADS, stretches - first); s++) {
            if (before + weights[s] > threshold) {
                chosen = first + s;
                break;
            }
            before += weights[s];
        }
    }
    if (chosen < 0) {  // rounding
        if (threadIdx.x == 0) draw.choose(b, id_of(best));
        return;
    }

    const Row<T> row = draw.row(b);
    const int64_t begin = int64_t(chosen) * STRETCH + int64_t(threadIdx.x) * PER_THREAD;
    double sums[PER_THREAD];
    bool possible[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        sums[i] = begin + i < draw.V ? exp((double(row[begin + i]) - max) / temperature) : 0.0;
        possible[i] = sums[i] > 0;
    }
    block_inclusive_sums(sums);
    __shared__ int first, last;
    if (threadIdx.x == 0) first = STRETCH, last = -1;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int at = int(threadIdx.x) * PER_THREAD + i;
        if (possible[i]) atomicMax(&last, at);
        if (possible[i] && before + sums[i] > threshold) atomicMin(&first, at);
    }
    __syncthreads();
    // Where rounding keeps the sum from passing the threshold, the last that can be drawn.
    if (threadIdx.x == 0) draw.choose(b, int32_t(int64_t(chosen) * STRETCH + (first < STRETCH ? first : last)));
}

// top_k, with top_p and min_p after it: the k likeliest of all stretches' candidates, sorted.
template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    draw_from_candidates_kernel(const Draw<T> draw, const Found* all, const Token* all_candidates, int stretches,
                                int k) {
    wait_for_previous();
    let_next_start();
    constexpr int MAX_K = int(SAMPLING_FAST_TOP_K), PER = MAX_K / ROUND_THREADS;
    __shared__ Token kept[MAX_K];
    __shared__ int written, limit;
    const int64_t b = blockIdx.x;
    Token best;
    if (!best_of(all + b * stretches, stretches, &best)) {
        if (threadIdx.x == 0) draw.choose(b, -1);
        return;
    }
    const Token* const candidates = all_candidates + b * stretches * k;
    const int n = stretches * k;
    const auto visit = [&](auto f) {
        for (int i = int(threadIdx.x); i < n; i += ROUND_THREADS) f(candidates[i]);
    };
    if (threadIdx.x == 0) written = 0, limit = MAX_K;
    for (int i = int(threadIdx.x); i < MAX_K; i += ROUND_THREADS) kept[i] = 0;
    __syncthreads();
    const Token edge = kth_largest_token(k, visit);
    visit([&](Token t) {
        if (t >= edge) kept[atomicAdd(&written, 1)] = t;
    });
    int sorted = 1;
    while (sorted < k) sorted *= 2;
    sort_descending(kept, sorted);

    const double max = logit_of(best), temperature = draw.options.temperature;
    const auto weight = [&](Token t) { return exp((double(logit_of(t)) - max) / temperature); };
    const int first = int(threadIdx.x) * PER;
    if (draw.options.top_p < 1 || draw.options.min_p > 0) {
        double weights[PER], sums[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) sums[i] = weights[i] = first + i < k ? weight(kept[first + i]) : 0.0;
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
    double sums[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        sums[i] = first + i < left ? exp((double(from_key(uint32_t(kept[first + i]))) - max) / temperature) : 0.0;
    const double total = block_inclusive_sums(sums), threshold = draw.uniform(b) * total;
    __shared__ int chosen;
    if (threadIdx.x == 0) chosen = MAX_K;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (first + i < left && sums[i] > threshold) atomicMin(&chosen, first + i);
    __syncthreads();
    // best only if rounding keeps the sum from passing the threshold
    if (threadIdx.x == 0) draw.choose(b, chosen == MAX_K ? id_of(best) : int32_t(~uint32_t(kept[chosen] >> 32)));
}

// --------------------------------------------------------------------------------------------------------------------
// A block a row, for any filters.

constexpr int THREADS = 1024, WARPS = THREADS / WARP;
constexpr double FIXED_ONE = 0x1p44;  // weights as integers, whose sums are the same in any order

// The key of the k-th largest logit, byte by byte from the top: each round counts the keys that agree with what is
// known by their next byte. 1 ≤ k ≤ V. After the last round *ties is how many of the logits on the edge belong to the
// k.
template <typename T>
__device__ uint32_t kth_largest(const Row<T>& logits, int64_t V, int64_t k, int64_t* ties) {
    __shared__ unsigned count[256];
    __shared__ uint32_t shared_edge;
    __shared__ int64_t shared_k;
    uint32_t edge = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (int64_t v = threadIdx.x; v < V; v += THREADS) {
            const uint32_t key = ordered(logits[v]);
            if ((key & known) == edge) atomicAdd(&count[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int byte = 255;
            for (; int64_t(count[byte]) < k; byte--) k -= count[byte];
            shared_edge = edge | uint32_t(byte) << shift;
            shared_k = k;
        }
        __syncthreads();
        edge = shared_edge;
        k = shared_k;
    }
    *ties = k;
    return edge;
}

// What is kept of a row: all above the edge, and the first `ties` of those on it in order of id.
struct Kept {
    uint32_t edge;
    int64_t ties;
};

// As few of the likeliest as have together at least top_p of the weight of what `kept` keeps: like kth_largest, with
// weights in place of counts.
template <typename T, typename Weight>
__device__ Kept nucleus(const Row<T>& logits, int64_t V, Kept kept, float top_p, Weight weight) {
    __shared__ unsigned long long weights[256];
    __shared__ unsigned long long shared_above;
    __shared__ double shared_enough;
    __shared__ uint32_t shared_edge;
    __shared__ int64_t shared_ties;
    const auto fixed = [&](float x) { return static_cast<unsigned long long>(llrint(weight(x) * FIXED_ONE)); };
    const unsigned long long on_edge =
        kept.edge ? static_cast<unsigned long long>(kept.ties) * fixed(from_key(kept.edge)) : 0;
    if (threadIdx.x == 0) shared_above = on_edge;
    __syncthreads();
    unsigned long long mine = 0;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) {
        const float x = logits[v];
        if (ordered(x) > kept.edge) mine += fixed(x);
    }
    atomicAdd(&shared_above, mine);
    __syncthreads();
    if (threadIdx.x == 0) shared_enough = double(top_p) * double(shared_above), shared_above = 0;
    uint32_t edge = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) weights[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (int64_t v = threadIdx.x; v < V; v += THREADS) {
            const float x = logits[v];
            const uint32_t key = ordered(x);
            if (key > kept.edge && (key & known) == edge) atomicAdd(&weights[key >> shift & 255], fixed(x));
        }
        if (threadIdx.x == 0 && kept.edge && (kept.edge & known) == edge)
            atomicAdd(&weights[kept.edge >> shift & 255], on_edge);
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned long long above = shared_above;
            int byte = 255;
            for (; byte > 0 && double(above + weights[byte]) < shared_enough; byte--) above += weights[byte];
            shared_above = above;
            shared_edge = edge | uint32_t(byte) << shift;
        }
        __syncthreads();
        edge = shared_edge;
    }
    // How many on the edge are needed: at least one, and no more than there are.
    if (threadIdx.x == 0) {
        const double each = double(fixed(from_key(edge)));
        const double missing = shared_enough - double(shared_above);
        shared_ties = each > 0 ? max(int64_t(1), int64_t(ceil(missing / each))) : INT64_MAX;
        if (edge == kept.edge && kept.ties < shared_ties) shared_ties = kept.ties;
    }
    __syncthreads();
    return {edge, shared_ties};
}

// The total of all warps and, for each warp, of the warps before it. One value a warp, the same in all its lanes.
template <typename Number>
__device__ Number exclusive_over_warps(Number mine, Number* total) {
    __shared__ Number shared[WARPS];
    const int warp = int(threadIdx.x) / WARP;
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[warp] = mine;
    __syncthreads();
    Number before = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = sum;
        sum += shared[w];
    }
    *total = sum;
    return before;
}

// A block per sequence. Each warp owns a stretch of the vocabulary and walks it in order, 32 ids at a time.
template <typename T>
__global__ void __launch_bounds__(THREADS) draw_from_row_kernel(const Draw<T> draw) {
    wait_for_previous();
    let_next_start();
    const SamplingOptions& options = draw.options;
    const int64_t V = draw.V;
    const Row<T> logits = draw.row(blockIdx.x);
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;

    // Largest logit, the lowest id among equals: the largest of (key, ~id). A NaN is found on the way.
    Token mine = 0;
    bool has_nan = false;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) {
        const float x = logits[v];
        has_nan |= x != x;
        mine = max(mine, token_of(x, v));
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, offset));
    __shared__ Token maxima[WARPS];
    if (lane == 0) maxima[warp] = mine;
    has_nan = __syncthreads_or(has_nan);
    for (int w = 0; w < WARPS; w++) mine = max(mine, maxima[w]);
    const int32_t best = id_of(mine);
    const double max = logits[best], temperature = options.temperature;
    if (has_nan || !isfinite(max)) {
        if (threadIdx.x == 0) draw.choose(blockIdx.x, -1);
        return;
    }

    Kept kept_tokens{0, 0};
    if (options.top_k > 0 && options.top_k < V)
        kept_tokens.edge = kth_largest(logits, V, options.top_k, &kept_tokens.ties);
    const auto weight_at = [&](float x) { return exp((double(x) - max) / temperature); };
    if (options.top_p < 1) kept_tokens = nucleus(logits, V, kept_tokens, options.top_p, weight_at);
    const uint32_t edge = kept_tokens.edge;
    const int64_t ties = kept_tokens.ties;
    const double least = options.min_p;

    const int64_t stretch = ceil_div(ceil_div(V, WARPS), WARP) * WARP, begin = warp * stretch;
    const int64_t end = min(begin + stretch, V);
    // visit(v, kept) for 32 ids at a time; v may lie behind the end, where nothing is kept. ties_left: for this
    // stretch.
    const auto walk = [&](int64_t ties_left, auto visit) {
        for (int64_t first = begin; first < end; first += WARP) {
            const int64_t v = first + lane;
            const uint32_t key = v < end ? ordered(logits[v]) : 0;
            const unsigned on_edge = __ballot_sync(ALL_LANES, v < end && key == edge);
            const bool kept = v < end &&
                              (key > edge || (key == edge && __popc(on_edge & ((1u << lane) - 1)) < ties_left)) &&
                              weight_at(logits[v]) >= least;
            ties_left -= __popc(on_edge);
            if (visit(v, kept)) return;
        }
    };
    int64_t on_edge = 0;
    if (ties > 0)
        for (int64_t first = begin; first < end; first += WARP) {
            const int64_t v = first + lane;
            on_edge += __popc(__ballot_sync(ALL_LANES, v < end && ordered(logits[v]) == edge));
        }
    int64_t all_on_edge;
    const int64_t ties_left = ties - exclusive_over_warps<int64_t>(on_edge, &all_on_edge);

    const auto weight = [&](int64_t v) { return weight_at(logits[v]); };
    double warp_weight = 0;
    walk(ties_left, [&](int64_t v, bool kept) {
        if (kept) warp_weight += weight(v);
        return false;
    });
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) warp_weight += __shfl_xor_sync(ALL_LANES, warp_weight, offset);
    double total;
    double sum = exclusive_over_warps<double>(warp_weight, &total);

    __shared__ unsigned long long chosen;
    if (threadIdx.x == 0) chosen = ~0ull;
    __syncthreads();
    const double threshold = draw.uniform(blockIdx.x) * total;
    // The first id at which the sum passes the threshold. Warps whose weight ends below it need not look; the one after
    // them does, whatever the rounding of its partial sums says.
    if (sum + warp_weight > threshold) {
        walk(ties_left, [&](int64_t v, bool kept) {
            const double inclusive = sum + warp_inclusive_sum(kept ? weight(v) : 0);
            const unsigned passed = __ballot_sync(ALL_LANES, kept && inclusive > threshold);
            if (passed != 0 && lane == __ffs(passed) - 1) atomicMin(&chosen, static_cast<unsigned long long>(v));
            sum = __shfl_sync(ALL_LANES, inclusive, WARP - 1);
            return passed != 0;
        });
    }
    __syncthreads();
    // best only if rounding keeps the sum from passing the threshold
    if (threadIdx.x == 0) draw.choose(blockIdx.x, chosen == ~0ull ? best : int32_t(chosen));
}

// Which of the kernels: none but the last can do everything.
enum class Way { All, Candidates, WholeRow };
Way way_of(const SamplingOptions& o, int64_t V) {
    const bool all_kept = o.top_k == 0 || o.top_k >= V, no_threshold = o.top_p == 1 && o.min_p == 0;
    if (o.temperature == 0 || (all_kept && no_threshold)) return Way::All;
    return o.top_k > 0 && std::min(o.top_k, V) <= SAMPLING_FAST_TOP_K ? Way::Candidates : Way::WholeRow;
}

int64_t found_bytes(int64_t B, int64_t V) {
    return B * ceil_div(V, STRETCH) * int64_t(sizeof(Found));
}

}  // namespace

int64_t sampling_scratch(int64_t B, int64_t V, const SamplingOptions& options) {
    const Way way = way_of(options, V);
    if (way == Way::WholeRow) return 0;
    const int64_t k = way == Way::Candidates ? std::min(options.top_k, V) : 0;
    return found_bytes(B, V) + B * ceil_div(V, STRETCH) * k * int64_t(sizeof(Token));
}

void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Tensor seen, Tensor scratch, Stream stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_sampling(op, dtype, ids, logits, V, sequences, steps, options, seen, scratch);
    const int64_t B = logits.shape[0], stretches = ceil_div(V, STRETCH);
    if (B == 0) return;
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
                           options};
        const Way way = way_of(options, V);
        if (way == Way::WholeRow) {
            launch_dependent(op, draw_from_row_kernel<T>, grid_of(B), THREADS, 0, stream, draw);
            return;
        }
        require(stretches <= 65535, op, ": a vocabulary of ", V, "; at most ", 65535 * STRETCH);
        Found* const found = static_cast<Found*>(scratch.data);
        Token* const candidates = reinterpret_cast<Token*>(static_cast<char*>(scratch.data) + found_bytes(B, V));
        const int k = way == Way::Candidates ? int(std::min(options.top_k, V)) : 0;
        launch_dependent(op, stretch_kernel<T>, dim3(unsigned(B), unsigned(stretches)), ROUND_THREADS, 0, stream, draw,
                         found, candidates, k);
        if (way == Way::All)
            launch_dependent(op, draw_from_all_kernel<T>, grid_of(B), ROUND_THREADS, 0, stream, draw, found,
                             int(stretches));
        else
            launch_dependent(op, draw_from_candidates_kernel<T>, grid_of(B), ROUND_THREADS, 0, stream, draw, found,
                             candidates, int(stretches), k);
    });
}
