#include "kernels/cuda_common.cuh"
#include "kernels/sampling.h"
#include "runtime/rng.h"

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / WARP;

// Larger floats have larger keys; −0 and 0 share one.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The key of the k-th largest logit, byte by byte from the top: each round counts the keys that agree with what is
// known by their next byte. 1 ≤ k ≤ V. After the last round *ties is how many of the logits on the edge belong to the
// k.
template <typename T>
__device__ uint32_t kth_largest(const T* logits, int64_t V, int64_t k, int64_t* ties) {
    __shared__ unsigned count[256];
    __shared__ uint32_t shared_edge;
    __shared__ int64_t shared_k;
    uint32_t edge = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (int64_t v = threadIdx.x; v < V; v += THREADS) {
            const uint32_t key = ordered(as_float(logits[v]));
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

__device__ __forceinline__ double warp_inclusive_sum(double x) {
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const double below = __shfl_up_sync(ALL_LANES, x, offset);
        if (int(threadIdx.x) % WARP >= offset) x += below;
    }
    return x;
}

// A block per sequence. Each warp owns a stretch of the vocabulary and walks it in order, 32 ids at a time.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sample_kernel(int32_t* ids, const T* all_logits, int64_t stride, int64_t V, const int64_t* sequences,
                  const int64_t* steps, SamplingOptions options) {
    const T* logits = all_logits + blockIdx.x * stride;
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;

    // Largest logit, the lowest id among equals: the largest of (key, ~id). A NaN is found on the way.
    unsigned long long mine = 0;
    bool has_nan = false;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) {
        const float x = as_float(logits[v]);
        has_nan |= x != x;
        mine = max(mine, static_cast<unsigned long long>(ordered(x)) << 32 | uint32_t(~uint32_t(v)));
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, offset));
    __shared__ unsigned long long maxima[WARPS];
    if (lane == 0) maxima[warp] = mine;
    has_nan = __syncthreads_or(has_nan);
    for (int w = 0; w < WARPS; w++) mine = max(mine, maxima[w]);
    const int32_t best = int32_t(~uint32_t(mine));
    const double max = as_float(logits[best]), temperature = options.temperature;
    if (has_nan || !isfinite(max)) {
        if (threadIdx.x == 0) ids[blockIdx.x] = -1;
        return;
    }
    if (temperature == 0) {
        if (threadIdx.x == 0) ids[blockIdx.x] = best;
        return;
    }

    // Those that are sampled from: all above the edge, and the first `ties` of those on it, in order of id.
    uint32_t edge = 0;
    int64_t ties = 0;
    if (options.top_k > 0 && options.top_k < V) edge = kth_largest(logits, V, options.top_k, &ties);

    const int64_t stretch = ceil_div(ceil_div(V, WARPS), WARP) * WARP, begin = warp * stretch;
    const int64_t end = min(begin + stretch, V);
    // visit(v, kept) for 32 ids at a time; v may lie behind the end, where nothing is kept. ties_left: for this
    // stretch.
    const auto walk = [&](int64_t ties_left, auto visit) {
        for (int64_t first = begin; first < end; first += WARP) {
            const int64_t v = first + lane;
            const uint32_t key = v < end ? ordered(as_float(logits[v])) : 0;
            const unsigned on_edge = __ballot_sync(ALL_LANES, v < end && key == edge);
            const bool kept =
                v < end && (key > edge || (key == edge && __popc(on_edge & ((1u << lane) - 1)) < ties_left));
            ties_left -= __popc(on_edge);
            if (visit(v, kept)) return;
        }
    };
    int64_t on_edge = 0;
    if (ties > 0)
        for (int64_t first = begin; first < end; first += WARP) {
            const int64_t v = first + lane;
            on_edge += __popc(__ballot_sync(ALL_LANES, v < end && ordered(as_float(logits[v])) == edge));
        }
    int64_t all_on_edge;
    const int64_t ties_left = ties - exclusive_over_warps<int64_t>(on_edge, &all_on_edge);

    const auto weight = [&](int64_t v) { return exp((double(as_float(logits[v])) - max) / temperature); };
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
    const Philox4 random = philox(options.seed, uint64_t(sequences[blockIdx.x]), uint64_t(steps[blockIdx.x]));
    const double threshold = uniform01(random.v[0], random.v[1]) * total;
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
    if (threadIdx.x == 0) ids[blockIdx.x] = chosen == ~0ull ? best : int32_t(chosen);
}

}  // namespace

void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Stream stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    const int64_t B = logits.shape[0], Vp = logits.shape[1];
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_tensor(op, "logits", logits, dtype, {B, Vp});
    check_tensor(op, "ids", ids, DType::I32, {B});
    check_tensor(op, "sequences", sequences, DType::I64, {B});
    check_tensor(op, "steps", steps, DType::I64, {B});
    require(V > 0 && V <= Vp, op, ": V is ", V, ", expected 1 to ", Vp);
    require(options.temperature >= 0 && std::isfinite(options.temperature), op, ": temperature is ",
            options.temperature, ", expected 0 or more");
    require(options.top_k >= 0, op, ": top_k is ", options.top_k, ", expected 0 or more");
    if (B == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        sample_kernel<<<grid_of(B), THREADS, 0, cuda_stream(stream)>>>(ids.as<int32_t>(), logits.as<const T>(),
                                                                       logits.stride[0], V, sequences.as<int64_t>(),
                                                                       steps.as<int64_t>(), options);
    });
    check_launch(op, stream);
}
