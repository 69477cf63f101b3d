// Samples the next token of each sequence from its logits. In this order:
//
//   repeat_penalty  for each token v marked as seen: l_v = logits[v] / penalty if logits[v] > 0, else
//                   logits[v]·penalty; l_v = logits[v] for the others (Keskar et al. 2019, section 4.1)
//   temperature     0: the argmax of l, ties to the lower id; the options below have no effect. Otherwise
//                   p_v ∝ exp(l_v / temperature)
//   top_k           keeps the k most likely tokens (0: all)
//   top_p           of the tokens that top_k keeps, keeps as few of the most likely ones as together have at least this
//                   fraction of the probability of all of them (Holtzman et al. 2020, section 3.1; 1: all)
//   min_p           of the tokens that top_p keeps, keeps those with at least this fraction of the probability of the
//                   most likely token (Nguyen et al. 2024; 0: all)
//   sampling        the token at which the cumulative probability of the kept tokens, in order of id, first exceeds u
//
// Among equal logits the lower id counts as more likely. u is a uniform number from Philox, keyed by the seed, with the
// counter (sequence, step): a sequence's tokens do not depend on the other sequences of the batch.
//
// On CUDA, top_k beyond SAMPLING_FAST_TOP_K is slower: one block per row selects. top_p compares sums of probabilities
// in fixed point, in units of 2^−44 of the most likely token's, which are the same in any order.
//
// Errors: wrong shape or dtype; options outside their range; on the CPU, logits with NaN or with a maximum that is not
// finite. On CUDA such a row gets the id −1, because nothing waits for the kernel to end.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct SamplingOptions {
    float temperature = 1;  // ≥ 0
    int64_t top_k = 0;      // ≥ 0
    uint64_t seed = 0;
    float top_p = 1;           // (0, 1]
    float min_p = 0;           // [0, 1]
    float repeat_penalty = 1;  // > 0; 1: none
};

constexpr int64_t SAMPLING_FAST_TOP_K = 1024;

// ids [B] int32; logits [B, Vp] fp32, on CUDA also bf16 or fp16, of which V columns count; sequences [B] int64 and
// steps [B] int64 are the counters of u. seen [B, ⌈V/32⌉] int32 or null: bit v%32 of word v/32 marks token v; the
// sampled token is marked too. A penalty needs it. scratch: sampling_scratch bytes (U8).
void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Tensor seen, Tensor scratch, Stream stream);
int64_t sampling_scratch(int64_t B, int64_t V, const SamplingOptions& options);
