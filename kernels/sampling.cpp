#include "kernels/sampling.h"

#include <cmath>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "runtime/rng.h"

namespace {

constexpr int32_t NOT_FINITE = -1;

// Larger floats have larger keys; −0 and 0 share one.
ALWAYS_INLINE uint32_t ordered(float x) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

MULTIARCH int64_t count_at_least(const float* logits, int64_t V, uint32_t key) {
    int64_t count = 0;
    for (int64_t v = 0; v < V; v++) count += ordered(logits[v]) >= key;
    return count;
}

// The key of the k-th largest logit, bit by bit from the top: no sorting and no memory. 1 ≤ k ≤ V.
uint32_t kth_largest(const float* logits, int64_t V, int64_t k) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t larger = key | 1u << bit;
        if (count_at_least(logits, V, larger) >= k) key = larger;
    }
    return key;
}

// The logits that are sampled from: those above the edge, and the first `ties` of those on it.
struct Kept {
    uint32_t edge = 0;  // 0 is below every key but a NaN's
    int64_t ties = 0;
};

Kept top_k(const float* logits, int64_t V, int64_t k) {
    if (k == 0 || k >= V) return {};
    const uint32_t edge = kth_largest(logits, V, k);
    return {edge, k - count_at_least(logits, V, edge + 1)};
}

// Calls visit(v) for the kept logits in order of id until it returns true.
template <typename Visit>
void for_each_kept(const float* logits, int64_t V, Kept kept, Visit visit) {
    for (int64_t v = 0; v < V; v++) {
        const uint32_t key = ordered(logits[v]);
        if ((key > kept.edge || (key == kept.edge && kept.ties-- > 0)) && visit(v)) return;
    }
}

int32_t sample_row(const float* logits, int64_t V, const SamplingOptions& options, uint64_t sequence, uint64_t step) {
    int64_t best = 0;
    bool has_nan = false;
    for (int64_t v = 0; v < V; v++) {
        has_nan |= std::isnan(logits[v]);
        if (logits[v] > logits[best]) best = v;
    }
    if (has_nan || !std::isfinite(logits[best])) return NOT_FINITE;
    if (options.temperature == 0) return static_cast<int32_t>(best);

    const double max = logits[best], temperature = options.temperature;
    auto weight = [&](int64_t v) { return std::exp((logits[v] - max) / temperature); };
    const Kept kept = top_k(logits, V, options.top_k);
    double total = 0;
    for_each_kept(logits, V, kept, [&](int64_t v) {
        total += weight(v);
        return false;
    });
    const Philox4 random = philox(options.seed, sequence, step);
    const double threshold = uniform01(random.v[0], random.v[1]) * total;
    double sum = 0;
    int64_t chosen = best;  // stays only if rounding keeps the sum from passing the threshold
    for_each_kept(logits, V, kept, [&](int64_t v) {
        sum += weight(v);
        if (sum > threshold) chosen = v;
        return sum > threshold;
    });
    return static_cast<int32_t>(chosen);
}

}  // namespace

void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    const int64_t B = logits.shape[0], Vp = logits.shape[1];
    check_tensor(op, "logits", logits, DType::F32, {B, Vp});
    check_tensor(op, "ids", ids, DType::I32, {B});
    check_tensor(op, "sequences", sequences, DType::I64, {B});
    check_tensor(op, "steps", steps, DType::I64, {B});
    require(V > 0 && V <= Vp, op, ": V is ", V, ", expected 1 to ", Vp);
    require(options.temperature >= 0 && std::isfinite(options.temperature), op, ": temperature is ",
            options.temperature, ", expected 0 or more");
    require(options.top_k >= 0, op, ": top_k is ", options.top_k, ", expected 0 or more");

    int32_t* id = ids.as<int32_t>();
#pragma omp parallel for schedule(dynamic) if (B > 1)
    for (int64_t b = 0; b < B; b++) {
        id[b] = sample_row(logits.as<float>() + b * logits.stride[0], V, options,
                           static_cast<uint64_t>(sequences.as<int64_t>()[b]),
                           static_cast<uint64_t>(steps.as<int64_t>()[b]));
    }
    for (int64_t b = 0; b < B; b++) {
        require(id[b] != NOT_FINITE, op, ": row ", b, " of the logits holds NaN, or its maximum is not finite");
    }
}
