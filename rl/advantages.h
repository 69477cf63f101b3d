// From the rewards of completions to what a policy gradient weighs their tokens by.
//
// G completions of a prompt form a group; r_i is the reward of the i-th, μ the mean of its group's rewards.
//
//   group      A_i = (r_i − μ) / (σ + 10⁻⁴), σ of the group's rewards   (Shao et al. 2024, "DeepSeekMath", 4.1.2)
//   batch      the same with σ of all rewards of the rollout             (Z. Liu et al. 2025, arXiv 2508.08221)
//   mean-only  A_i = r_i − μ                                              (Liu et al. 2025, "Dr. GRPO", equation 3)
//
// "Tricks or Traps? A Deep Dive into RL for LLM Reasoning" calls the mean of a group with the deviation of the batch
// Lite PPO; it is trl's scale_rewards "batch". REINFORCE++ (Hu et al. 2025, arXiv 2501.03262) differs: its σ is that of
// all r_i − μ.
//
// σ is that of a sample: the sum of squares is divided by the number less one. 10⁻⁴ is trl's. All advantages of a group
// whose rewards are equal are exactly 0.
//
// The loss of a rollout is Σ w_t·L_t / D over its sampled tokens t, L_t as in kernels/policy_loss.h; o_i are the tokens
// of a completion, N all completions:
//
//   sequence  w_t = 1/|o_i|, D = N                  a mean of means over completions   (Shao et al. 2024, equation 3)
//   batch     w_t = 1,       D = Σ|o_i|             a mean over tokens                 (Yu et al. 2025, "DAPO", eq. 8)
//   constant  w_t = 1,       D = N·(longest length allowed)                            (Liu et al. 2025: Dr. GRPO)
//
// D counts all completions, those that are not learnt from included: the ones that were cut, whose tokens it does not
// count where they are masked, and groups without a difference. All as in trl.
#pragma once

#include <cstdint>
#include <vector>

#include "driver/options.h"

// rewards: group by group. Throws Error if their number is no multiple of G, or G < 2.
std::vector<float> advantages(const std::vector<double>& rewards, int64_t G, Advantage method);

// Whether the rewards [begin, begin + G) are not all equal.
bool group_differs(const std::vector<double>& rewards, size_t begin, int64_t G);

// w_t of a completion of so many tokens.
float token_weight(LossNorm norm, int64_t length);
// D. lengths: of all completions, on all ranks; 0: it is masked.
int64_t loss_divisor(LossNorm norm, const std::vector<int64_t>& lengths, int64_t max_tokens);
