// The loss of one sampled token, its gradient and its part in the stats (formulas: policy_loss.h), for the kernels of
// both backends.
#pragma once

#include <cmath>

#include "kernels/policy_loss.h"
#include "runtime/rng.h"  // HOST_DEVICE

// What the kernels get of the n tokens; those that may be missing are null.
struct PolicyArrays {
    float* dlosses;
    const float *losses, *old_logps, *sampler_logps, *reference_logps, *advantages, *weights;
    float scale;
    PolicyOptions options;
};

struct PolicyToken {
    double logp, old_logp, sampler_logp, reference_logp, advantage, weight;
};

struct PolicyTerms {
    double loss, dloss;  // dloss: of the token's own loss −ln π_θ
    double kl, gap;
    bool clipped;
};

HOST_DEVICE inline PolicyTerms policy_terms(const PolicyOptions& o, const PolicyToken& t) {
    const double ratio = exp(t.logp - t.old_logp), log_importance = t.old_logp - t.sampler_logp;
    const double low = 1 - double(o.clip_low), high = 1 + double(o.clip_high);
    const double uncapped = exp(log_importance);
    const double importance = uncapped > o.importance_cap ? o.importance_cap : uncapped;  // NaN stays, fmin drops it
    const bool above = t.advantage > 0 && ratio > high, below = t.advantage < 0 && ratio < low;
    const double gain = importance * t.advantage;
    const double surrogate = gain * (above ? high : below ? low : ratio);
    const double distance = t.reference_logp - t.logp, slope = expm1(distance);
    PolicyTerms r = {-surrogate, above || below ? 0 : gain * ratio, slope - distance, fabs(log_importance),
                     above || below};
    if (o.kl > 0) {  // without it a KL that overflows is no part of the loss
        r.loss += o.kl * r.kl;
        r.dloss += o.kl * slope;
    }
    r.loss *= t.weight;
    r.dloss *= t.weight;
    return r;
}

// A stat of two sets of tokens from those of each. NaN if either is NaN.
HOST_DEVICE inline double combined_policy_stat(int stat, double a, double b) {
    if (stat != POLICY_LARGEST_GAP) return a + b;
    return b > a || b != b ? b : a;
}

// Stores the gradient of token i and adds the token to `stats`, NUM_POLICY_STATS numbers.
HOST_DEVICE inline void add_policy_token(double* stats, const PolicyArrays& x, int64_t i) {
    const double weight = x.weights[i];
    if (weight == 0) {
        if (x.dlosses) x.dlosses[i] = 0;
        return;
    }
    // A missing array stands for the same number as the one before it, so that the ratio of both is exactly 1.
    const double logp = -double(x.losses[i]), old_logp = x.old_logps ? x.old_logps[i] : logp;
    const PolicyToken token = {logp,
                               old_logp,
                               x.sampler_logps ? x.sampler_logps[i] : old_logp,
                               x.reference_logps ? x.reference_logps[i] : logp,
                               x.advantages[i],
                               weight};
    const PolicyTerms terms = policy_terms(x.options, token);
    if (x.dlosses) x.dlosses[i] = float(x.scale * terms.dloss);
    const double of_token[NUM_POLICY_STATS] = {terms.loss, 1,        double(terms.clipped), terms.kl, -logp,
                                               terms.gap,  terms.gap};
    for (int stat = 0; stat < NUM_POLICY_STATS; stat++)
        stats[stat] = combined_policy_stat(stat, stats[stat], of_token[stat]);
}
