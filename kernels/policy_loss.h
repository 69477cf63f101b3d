// The loss of a policy gradient on sampled tokens, its gradient, and what a run reports of them.
//
// Of a token that was sampled from π_sampler (the engine's kernels), with the weights that π_old stands for (training's
// kernels), while π_θ is the model that learns:
//
//   r = π_θ / π_old,   ρ = min(π_old / π_sampler, C),   d = ln π_ref − ln π_θ,   k3 = e^d − d − 1
//   L = w·(β·k3 − ρ·min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A))
//
//   min and clip    Schulman et al. 2017, equation 7; Shao et al. 2024 (GRPO), equation 3. ε_high > ε_low: Yu et al.
//                   2025 (DAPO), section 3.1
//   ρ               truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you
//                   off-policy RL training". No gradient flows through ρ
//   k3              an unbiased, never negative estimate of KL(π_θ ‖ π_ref): Schulman 2020, "Approximating KL
//                   divergence"; Shao et al. 2024, equation 4. As there, ρ is not a factor of it
//   A, w            the advantage and the token's share in the mean, which are known beforehand (rl/advantages.h)
//
// In ρ stands π_old and not π_θ, so that it corrects for the difference between the kernels alone; r does the rest.
// The gradient of L with respect to the token's own loss −ln π_θ is
//
//   w·(ρ·r·A + β·(e^d − 1)),   without its first term if the token is clipped: A > 0 and r > 1 + ε_high, or A < 0 and
//                              r < 1 − ε_low
//
// A token of weight 0 does not count: whatever its other values are, NaN too, its gradient is 0 and nothing is reported
// of it. Formulas and sums are in fp64, sums in an order that depends on n alone: the same inputs give the same bits.
//
// Throws Error on a wrong shape or dtype, and on options out of range: ε_low or ε_high < 0, β < 0, β > 0 without
// reference_logps, C < 1 (infinity: no cap).
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct PolicyOptions {
    float clip_low = 0.2f, clip_high = 0.2f;  // ε
    float kl = 0;                             // β
    float importance_cap = 2;                 // C
};

// What is summed over the tokens whose weight is not 0.
enum PolicyStat {
    POLICY_LOSS,         // L, without `scale`
    POLICY_TOKENS,       // 1
    POLICY_CLIPPED,      // 1 if the token is clipped
    POLICY_KL,           // k3; 0 without reference_logps
    POLICY_ENTROPY,      // −ln π_θ of the sampled token: unbiased where π_θ is the sampler
    POLICY_SAMPLER_GAP,  // |ln π_old − ln π_sampler|; 0 without sampler_logps
    POLICY_LARGEST_GAP,  // the largest of these, not a sum
    NUM_POLICY_STATS
};

struct PolicyLoss {
    Tensor dlosses;              // fp32 [n]: scale times the gradient of L. Null: not computed
    Tensor losses;               // fp32 [n]: −ln π_θ, nats
    Tensor old_logps;            // fp32 [n]: ln π_old. Null: π_old is π_θ, so that r is 1 (and has a gradient)
    Tensor sampler_logps;        // fp32 [n]: ln π_sampler. Null: ρ is 1
    Tensor reference_logps;      // fp32 [n]: ln π_ref. Null: no KL. With β = 0 the KL is reported only
    Tensor advantages, weights;  // fp32 [n]: A and w
    Tensor stats;                // fp64 [NUM_POLICY_STATS]
    float scale = 1;
    bool accumulate = false;  // stats: add to what is there (the largest gap: the larger one), else overwrite
    PolicyOptions options;
};

void policy_loss(const PolicyLoss& x, Stream stream);
