#include "kernels/generation/sampling.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/generation/sampling_check.h"
#include "kernels/generation/token_key.h"
#include "runtime/rng.h"

namespace {

constexpr int32_t NOT_FINITE = -1;

MULTIARCH int64_t count_at_least(const float* logits, int64_t V, uint32_t key) {
    int64_t count = 0;
    for (int64_t v = 0; v < V; v++) count += number_key(logits[v]) >= key;
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

// The logits that are kept: those with a larger key, and the first `ties` of those with this key.
struct Kept {
    uint32_t key = 0;  // 0 is below the keys of all logits
    int64_t ties = 0;
};

Kept top_k(const float* logits, int64_t V, int64_t k) {
    if (k == 0 || k >= V) return {};
    const uint32_t key = kth_largest(logits, V, k);
    return {key, k - count_at_least(logits, V, key + 1)};
}

// Calls visit(v) for the kept logits in order of id until it returns true.
template <typename Visit>
void for_each_kept(const float* logits, int64_t V, Kept kept, Visit visit) {
    for (int64_t v = 0; v < V; v++) {
        const uint32_t key = number_key(logits[v]);
        if ((key > kept.key || (key == kept.key && kept.ties-- > 0)) && visit(v)) return;
    }
}

bool marked(const int32_t* seen, int64_t v) {
    return static_cast<uint32_t>(seen[v / 32]) >> (v % 32) & 1;
}

// The logits under the penalty; −∞ stays −∞.
void penalize(float* out, const float* logits, int64_t V, const int32_t* seen, float penalty) {
    for (int64_t v = 0; v < V; v++) {
        out[v] = !marked(seen, v) ? logits[v] : logits[v] > 0 ? logits[v] / penalty : logits[v] * penalty;
    }
}

// Scratch of one row: the logits under the penalty, and (key, ~id) of the tokens that top_p sorts.
struct RowScratch {
    float* penalized;
    uint64_t* order;
};

// Applies top_p to the kept tokens, whose weights sum to `total`. Tokens of less weight than (1 − top_p)·total/V have
// together less than (1 − top_p)·total: the nucleus lies among the others, and only those are sorted.
template <typename Weight>
Kept nucleus(const float* logits, int64_t V, Kept kept, double total, float top_p, Weight weight, uint64_t* order) {
    const double enough = double(top_p) * total, cut = (1 - double(top_p)) * total / double(V);
    int64_t n = 0;
    for_each_kept(logits, V, kept, [&](int64_t v) {
        if (weight(v) >= cut) order[n++] = uint64_t(number_key(logits[v])) << 32 | uint32_t(~uint32_t(v));
        return false;
    });
    std::sort(order, order + n, std::greater<uint64_t>());
    double sum = 0;
    int64_t last = 0;
    for (; last < n; last++) {
        sum += weight(int64_t(~uint32_t(order[last])));
        if (sum >= enough) break;
    }
    last = std::min(last, n - 1);
    const auto key = [&](int64_t i) { return uint32_t(order[i] >> 32); };
    Kept result{key(last), 0};
    for (int64_t i = last; i >= 0 && key(i) == result.key; i--) result.ties++;
    return result;
}

int32_t sample_row(const float* logits, int64_t V, const SamplingOptions& options, uint64_t sequence, uint64_t step,
                   const int32_t* seen, RowScratch scratch) {
    if (options.repeat_penalty != 1) {
        penalize(scratch.penalized, logits, V, seen, options.repeat_penalty);
        logits = scratch.penalized;
    }
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
    Kept kept = top_k(logits, V, options.top_k);
    if (options.top_p < 1) {
        double total = 0;
        for_each_kept(logits, V, kept, [&](int64_t v) {
            total += weight(v);
            return false;
        });
        kept = nucleus(logits, V, kept, total, options.top_p, weight, scratch.order);
    }
    const double least = options.min_p;
    double total = 0;
    for_each_kept(logits, V, kept, [&](int64_t v) {
        const double w = weight(v);
        if (w >= least) total += w;
        return false;
    });
    const Philox4 random = philox(options.seed, sequence, step);
    const double threshold = uniform01(random.v[0], random.v[1]) * total;
    double sum = 0;
    int64_t sampled = best;  // remains only if rounding keeps the sum from passing the threshold
    for_each_kept(logits, V, kept, [&](int64_t v) {
        const double w = weight(v);
        if (w < least) return false;
        sum += w;
        if (sum > threshold) sampled = v;
        return sum > threshold;
    });
    return static_cast<int32_t>(sampled);
}

}  // namespace

int64_t sampling_scratch(int64_t B, int64_t V, const SamplingOptions& options) {
    const int64_t order = options.top_p < 1 ? 8 : 0, penalized = options.repeat_penalty != 1 ? 4 : 0;
    return B * V * (order + penalized);
}

void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Tensor seen, Tensor scratch, Stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    check_sampling(op, DType::F32, ids, logits, V, sequences, steps, options, seen, scratch);
    const int64_t B = logits.shape[0];

    int32_t* id = ids.as<int32_t>();
    // The 8-byte elements come first, so that both arrays are aligned.
    const auto row_scratch = [&](int64_t b) {
        RowScratch r{};
        char* base = static_cast<char*>(scratch.data);
        if (options.top_p < 1) {
            r.order = reinterpret_cast<uint64_t*>(base) + b * V;
            base += B * V * 8;
        }
        if (options.repeat_penalty != 1) r.penalized = reinterpret_cast<float*>(base) + b * V;
        return r;
    };
    const auto marks = [&](int64_t b) { return seen ? seen.as<int32_t>() + b * seen.stride[0] : nullptr; };
#pragma omp parallel for schedule(dynamic) if (B > 1)
    for (int64_t b = 0; b < B; b++) {
        id[b] = sample_row(logits.as<float>() + b * logits.stride[0], V, options,
                           static_cast<uint64_t>(sequences.as<int64_t>()[b]),
                           static_cast<uint64_t>(steps.as<int64_t>()[b]), marks(b), row_scratch(b));
    }
    for (int64_t b = 0; b < B; b++) {
        require(id[b] != NOT_FINITE, op, ": row ", b, " of the logits holds NaN, or its maximum is not finite");
        if (seen) marks(b)[id[b] / 32] |= static_cast<int32_t>(1u << (id[b] % 32));
    }
}
