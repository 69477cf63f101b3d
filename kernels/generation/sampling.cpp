#include "kernels/generation/sampling.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_loops.h"
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

// What a row reads and writes of its slot; null where the batch does not have it.
struct RowState {
    int32_t *seen, *counts;
    const int32_t* mask;
};

// The logits under the mask and the penalties; −∞ stays −∞.
void adjust(float* out, const float* logits, int64_t V, const SamplingRow& row, const RowState& state) {
    const bool masks = row.classes & sampling_class::MASK, repeats = row.classes & sampling_class::REPEAT,
               counted = row.classes & sampling_class::COUNTS;
    for (int64_t v = 0; v < V; v++) {
        float l = logits[v];
        if (repeats && marked(state.seen, v)) l = l > 0 ? l / row.repeat_penalty : l * row.repeat_penalty;
        if (counted && state.counts[v] > 0)
            l = float(double(l) - (double(row.presence_penalty) + double(row.frequency_penalty) * state.counts[v]));
        out[v] = masks && !marked(state.mask, v) ? -INFINITY : l;
    }
}

// Scratch of one row: the logits under mask and penalties, and (key, ~id) of the tokens that top_p sorts.
struct RowScratch {
    float* adjusted;
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
        sum += weight(static_cast<uint32_t>(~order[last]));
        if (sum >= enough) break;
    }
    last = std::min(last, n - 1);
    const auto key = [&](int64_t i) { return uint32_t(order[i] >> 32); };
    Kept result{key(last), 0};
    for (int64_t i = last; i >= 0 && key(i) == result.key; i--) result.ties++;
    return result;
}

int32_t sample_row(const float* logits, int64_t V, const SamplingRow& options, uint64_t sequence, uint64_t step,
                   const RowState& state, RowScratch scratch) {
    if (options.classes & sampling_class::ADJUSTED) {
        adjust(scratch.adjusted, logits, V, options, state);
        logits = scratch.adjusted;
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

int64_t sampling_scratch(int64_t B, int64_t V, uint32_t classes) {
    const int64_t order = classes & sampling_class::TOP_P ? 8 : 0,
                  adjusted = classes & sampling_class::ADJUSTED ? 4 : 0;
    return B * V * (order + adjusted);
}

void sample_tokens(Tensor ids, Tensor logits, int64_t V, const SamplingBatch& batch, Tensor scratch, Stream) {
    const char* op = "sample_tokens";
    require(logits && logits.rank == 2, op, ": logits is ", shape_string(logits), ", expected [B, Vp]");
    check_sampling(op, DType::F32, ids, logits, V, batch, scratch);
    const int64_t B = logits.shape[0];
    const SamplingRow* rows = static_cast<const SamplingRow*>(batch.rows.data);
    const auto row_of_slot = [](const Tensor& t, int64_t slot) {
        return t ? t.as<int32_t>() + slot * row_stride(t) : nullptr;
    };
    const auto state_of = [&](int64_t b) {
        const int64_t slot = rows[b].slot;
        return RowState{row_of_slot(batch.seen, slot), row_of_slot(batch.counts, slot), row_of_slot(batch.masks, slot)};
    };
    for (int64_t b = 0; b < B; b++) {
        require((rows[b].classes & ~batch.classes) == 0, op, ": row ", b, " needs classes ", rows[b].classes,
                ", the batch has ", batch.classes);
        for (const Tensor& t : {batch.seen, batch.counts, batch.masks})
            require(!t || (rows[b].slot >= 0 && rows[b].slot < t.shape[0]), op, ": row ", b, " has the slot ",
                    rows[b].slot, "; there are ", t.shape[0]);
    }

    int32_t* id = ids.as<int32_t>();
    // The 8-byte elements come first, so that both arrays are aligned.
    const auto row_scratch = [&](int64_t b) {
        RowScratch r{};
        char* base = static_cast<char*>(scratch.data);
        if (batch.classes & sampling_class::TOP_P) {
            r.order = reinterpret_cast<uint64_t*>(base) + b * V;
            base += B * V * 8;
        }
        if (batch.classes & sampling_class::ADJUSTED) r.adjusted = reinterpret_cast<float*>(base) + b * V;
        return r;
    };
#pragma omp parallel for schedule(dynamic) if (B > 1)
    for (int64_t b = 0; b < B; b++) {
        id[b] = sample_row(logits.as<float>() + b * logits.stride[0], V, rows[b],
                           static_cast<uint64_t>(batch.sequences.as<int64_t>()[b]),
                           static_cast<uint64_t>(batch.steps.as<int64_t>()[b]), state_of(b), row_scratch(b));
    }
    for (int64_t b = 0; b < B; b++) {
        require(id[b] != NOT_FINITE, op, ": row ", b, " of the logits holds NaN, or its maximum is not finite",
                rows[b].classes & sampling_class::MASK ? "; only the tokens that its mask allows count" : "");
        const RowState state = state_of(b);
        if (rows[b].classes & sampling_class::REPEAT)
            state.seen[id[b] / 32] |= static_cast<int32_t>(1u << (id[b] % 32));
        if (rows[b].classes & sampling_class::COUNTS) state.counts[id[b]]++;
    }
}
