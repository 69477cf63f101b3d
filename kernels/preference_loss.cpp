#include "kernels/preference_loss.h"

#include <algorithm>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/preference_formula.h"
#include "kernels/preference_loss_check.h"

namespace {

bool is_absent(const PairRows& rows) {
    return rows.chosen == rows.end;
}

// Throws Error unless the pair is absent or lies in [begin, end).
void check_pair(const char* op, int64_t p, const PairRows& rows, int64_t begin, int64_t end) {
    require(is_absent(rows) || lies_within(rows, begin, end), op, ": rows[", p, "] is ", rows.chosen, ", ",
            rows.rejected, ", ", rows.end, ", expected increasing numbers from ", begin, " to ", end);
}

const PairRows* pairs_of(const Tensor& rows) {
    return reinterpret_cast<const PairRows*>(rows.as<int32_t>());
}

// ℓ of the tokens [begin, end).
double logp(const float* losses, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t i = begin; i < end; i++) sum += losses[i];
    return -sum;
}

}  // namespace

void preference_loss(const PreferenceLoss& x, Stream) {
    const PreferenceSizes z = check_preference_loss(x);
    const PairRows* rows = pairs_of(x.rows);
    const auto begins_inside = [&](int64_t p) { return x.begin <= rows[p].chosen && rows[p].chosen < x.end; };
    for (int64_t p = 0; p < z.P; p++)
        if (begins_inside(p)) check_pair("preference_loss", p, rows[p], x.begin, x.end);
    const float *losses = x.losses.as<float>(), *reference = x.reference.as<float>();
    float *stats = x.stats.as<float>(), *dlosses = x.dlosses.as<float>();
#pragma omp parallel for schedule(static) if (z.n > PARALLEL_MIN)
    for (int64_t p = 0; p < z.P; p++) {
        if (!begins_inside(p)) continue;
        const PairRows& r = rows[p];
        float* const own_stats = stats + p * NUM_PAIR_STATS;
        if (is_absent(r)) {
            std::fill_n(own_stats, NUM_PAIR_STATS, 0.0f);
            continue;
        }
        const auto side = [&](int64_t which, int64_t begin, int64_t end) {
            return PairSide{logp(losses, begin, end), reference ? reference[2 * p + which] : 0.0, double(end - begin)};
        };
        const PairSide chosen = side(0, r.chosen, r.rejected), rejected = side(1, r.rejected, r.end);
        const PairLoss pair = preference_loss_of(x.options, chosen, rejected);
        store_pair_stats(own_stats, pair, chosen, rejected);
        if (!dlosses) continue;
        std::fill(dlosses + r.chosen, dlosses + r.rejected, float(-x.scale * pair.dlogp[0]));
        std::fill(dlosses + r.rejected, dlosses + r.end, float(-x.scale * pair.dlogp[1]));
    }
}

void pair_logps(Tensor logps, Tensor losses, Tensor rows, Stream) {
    const PreferenceSizes z = check_pair_logps(logps, losses, rows);
    const PairRows* pairs = pairs_of(rows);
    for (int64_t p = 0; p < z.P; p++) check_pair("pair_logps", p, pairs[p], 0, z.n);
    const float* loss = losses.as<float>();
    float* out = logps.as<float>();
    for (int64_t p = 0; p < z.P; p++) {
        const PairRows& r = pairs[p];
        out[2 * p] = is_absent(r) ? 0 : float(logp(loss, r.chosen, r.rejected));
        out[2 * p + 1] = is_absent(r) ? 0 : float(logp(loss, r.rejected, r.end));
    }
}

void sum_pair_stats(Tensor sums, Tensor stats, bool accumulate, Stream) {
    const int64_t P = check_sum_pair_stats(sums, stats);
    const float* stat = stats.as<float>();
    double* total = sums.as<double>();
    for (int i = 0; i < NUM_PAIR_STATS; i++) {
        double sum = 0;
        for (int64_t p = 0; p < P; p++) sum += stat[p * NUM_PAIR_STATS + i];
        total[i] = accumulate ? total[i] + sum : sum;
    }
}
