// Which rows of the final norm's output the head computes, and losses other than cross-entropy: those of preference
// pairs, whose gradients depend on whole sequences (kernels/preference_loss.h), and the policy gradient of
// reinforcement learning (kernels/policy_loss.h).
//
// A policy gradient is computed chunk by chunk of the head's rows: losses, the gradient with respect to each of them,
// gradients. With a temperature T the head reads its input divided by T, so that all logits are.
//
// Of pairs the head computes the rows of loss tokens pair by pair: those of the chosen response, then those of the
// rejected one. The gradient of a token depends on all losses of its pair, and the head runs in chunks of rows, so no
// pair goes beyond the chunk in which it begins: where one would, −1 rows, which cost a matmul but have no gradient,
// fill the chunk before it. Then each chunk is computed once: losses, the coefficients of its pairs, gradients. A batch
// with a pair longer than a chunk, or without room for the gaps, takes two passes over the head instead: all losses,
// then all gradients. LLaMA-3 in bf16 has chunks of 4096 rows.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "driver/pass.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/policy_loss.h"
#include "kernels/preference_loss.h"

// The rows of acts.policy_terms: as Batch::PolicyTerms has them.
enum PolicyTerm { TERM_ADVANTAGE, TERM_WEIGHT, TERM_SAMPLER, TERM_REFERENCE, TERM_OLD, NUM_POLICY_TERMS };

// The rows of the tokens with a target. On a GPU whole chunks of the head, filled up with −1, so that a recorded
// micro-step fits every batch with as many chunks. Empty: no chunk can be left out, and the loss is cross-entropy.
std::vector<int32_t> loss_rows(const Activations& acts, const Batch& batch);

// Pairs that a pass over so many tokens has room for: each side has a position at least.
inline int64_t most_pairs(int64_t tokens) {
    return tokens / 2;
}

// The rows of the head for a batch.
struct PairLayout {
    std::vector<int32_t> loss_rows;  // the token of each row; −1: none
    std::vector<PairRows> pairs;     // `most`; those that the batch does not have are absent
    bool two_passes = false;
};
// chunk: rows of the head's chunks. The number of rows is a multiple of `unit`, but at most that of the batch's tokens.
PairLayout lay_out_pairs(const Batch& batch, int64_t most, int64_t chunk, int64_t unit);

// upload() of a batch's pairs: sets in.pair_rows and in.two_passes and returns PairLayout::loss_rows.
std::vector<int32_t> upload_pairs(const Context& ctx, const Activations& acts, const Batch& batch, Input& in);
// After upload(): the reference's ℓ of chosen and rejected of each of the batch's pairs, [pairs of the batch, 2].
void upload_reference(const Context& ctx, const Activations& acts, const std::vector<float>& logps);

// upload() of what the policy gradient of each of these rows needs; sets in.old_policy.
void upload_policy(const Context& ctx, const Activations& acts, const Batch& batch, const std::vector<int32_t>& rows,
                   Input& in);
// What the head's input is multiplied by: 1 / temperature.
float logit_scale(const Activations& acts);

// Rows [begin, end) of the head with the destinations of its gradients.
using HeadRows = std::function<LinearCrossEntropy(int64_t begin, int64_t end)>;
// The losses of all head rows, the pairs' stats, and the gradients of dloss times the sum of the pairs' losses.
void pair_head_forward_backward(const Pass& p, float dloss, const HeadRows& head);

// The losses of all head rows, the gradients of dloss times the sum of the policy's losses, and the sums of PolicyStat
// in this rank's row of acts.sums from SUM_LOSS on. accumulate: these sums are added to what is there.
void policy_head_forward_backward(const Pass& p, float dloss, bool accumulate, const HeadRows& head);
// Σ ln of the probability that the model, with or without its adapters, gives to each target of the batch at the run's
// temperature: by position, 0 where there is none. One forward pass; waits for it.
std::vector<float> target_logps(const Context& ctx, const Model& model, const Activations& acts, const Batch& batch,
                                bool adapters);
// What a run reports of its policy, as names and values, from the ranks' rows of acts.sums, [ranks, NUM_STEP_SUMS].
std::vector<std::pair<std::string, double>> policy_metrics(const std::vector<double>& sums);

// The sums of acts.pair_stats over the pairs, in this rank's row of acts.sums. Of a pass without gradients, the stats
// are computed first, from the losses of token_losses().
void sum_pairs(const Pass& p, bool accumulate);
// A forward pass of the reference, which is the model without its adapters: acts.pair_reference.
void reference_pass(const Context& ctx, const Model& model, const Activations& acts, const Input& in);

// What a run reports of its pairs: names and values, from sums over `pairs` pairs. rewards_chosen, rewards_rejected,
// margin, accuracy (the share of pairs whose chosen response has the greater reward): means over the pairs.
// logp_chosen, logp_rejected: nats per token. kl, with a reference: the mean of ln π − ln π_ref over the tokens of both
// responses, which estimates the divergence where the responses are like the model's own.
using PairSums = std::array<double, NUM_PAIR_STATS>;
PairSums pair_sums_of(const StepScalars& step);
std::vector<std::pair<std::string, double>> pair_metrics(const PairSums& sums, double pairs, PreferenceMethod method);
