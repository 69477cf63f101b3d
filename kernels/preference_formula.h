// The loss of one pair, its rewards and its gradient (formulas: preference_loss.h), for the kernels of both backends.
#pragma once

#include <cmath>

#include "kernels/preference_loss.h"
#include "runtime/rng.h"  // HOST_DEVICE

// A response: ℓ, ℓ_ref and the number of loss tokens.
struct PairSide {
    double logp, reference, tokens;
};

// [0]: of the chosen response, [1]: of the rejected one.
struct PairLoss {
    double loss;
    double reward[2];
    double dlogp[2];  // ∂L/∂ℓ
};

// Whether the pair has loss tokens on both sides, all of them in [begin, end).
HOST_DEVICE inline bool lies_within(const PairRows& rows, int64_t begin, int64_t end) {
    return begin <= rows.chosen && rows.chosen < rows.rejected && rows.rejected < rows.end && rows.end <= end;
}

// ln(1 + e^x), which neither overflows nor loses a small result.
HOST_DEVICE inline double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

// Where e^−x overflows the result is 0.
HOST_DEVICE inline double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

// o(a) of ORPO and o'(a) = 1/(1 − e^a).
struct LogOdds {
    double value, slope;
};
HOST_DEVICE inline LogOdds log_odds(double a) {
    constexpr double LARGEST = -0x1p-24;
    if (a > LARGEST) a = LARGEST;
    const double rest = -expm1(a);  // 1 − e^a, which would cancel near 0
    return {a - log(rest), 1 / rest};
}

HOST_DEVICE inline PairLoss preference_loss_of(const PreferenceOptions& options, const PairSide& chosen,
                                               const PairSide& rejected) {
    const double beta = options.beta, smoothing = options.label_smoothing;
    const bool mean = options.method != PreferenceMethod::DPO;
    const double weight[2] = {mean ? 1 / chosen.tokens : 1, mean ? 1 / rejected.tokens : 1};
    const double score[2] = {(chosen.logp - chosen.reference) * weight[0],
                             (rejected.logp - rejected.reference) * weight[1]};
    double loss = 0, dscore[2] = {};
    switch (options.method) {
        case PreferenceMethod::DPO:
        case PreferenceMethod::SimPO: {
            const double h = beta * (score[0] - score[1]) - options.margin;
            loss = (1 - smoothing) * softplus(-h) + smoothing * softplus(h);
            dscore[0] = beta * (smoothing - sigmoid(-h));
            dscore[1] = -dscore[0];
            break;
        }
        case PreferenceMethod::IPO: {
            const double distance = score[0] - score[1] - 1 / (2 * beta);
            loss = distance * distance;
            dscore[0] = 2 * distance;
            dscore[1] = -dscore[0];
            break;
        }
        case PreferenceMethod::ORPO: {
            const LogOdds c = log_odds(score[0]), r = log_odds(score[1]);
            const double h = c.value - r.value;
            loss = -score[0] + beta * softplus(-h);
            dscore[0] = -1 - beta * sigmoid(-h) * c.slope;
            dscore[1] = beta * sigmoid(-h) * r.slope;
            break;
        }
    }
    return {loss, {beta * score[0], beta * score[1]}, {dscore[0] * weight[0], dscore[1] * weight[1]}};
}

// stats: NUM_PAIR_STATS numbers.
HOST_DEVICE inline void store_pair_stats(float* stats, const PairLoss& pair, const PairSide& chosen,
                                         const PairSide& rejected) {
    stats[PAIR_LOSS] = float(pair.loss);
    stats[PAIR_CHOSEN_REWARD] = float(pair.reward[0]);
    stats[PAIR_REJECTED_REWARD] = float(pair.reward[1]);
    stats[PAIR_ACCURATE] = pair.reward[0] > pair.reward[1];
    stats[PAIR_CHOSEN_LOGP] = float(chosen.logp);
    stats[PAIR_REJECTED_LOGP] = float(rejected.logp);
    stats[PAIR_CHOSEN_TOKENS] = float(chosen.tokens);
    stats[PAIR_REJECTED_TOKENS] = float(rejected.tokens);
    stats[PAIR_REFERENCE_LOGP] = float(chosen.reference + rejected.reference);
}
