// Draws the next token of each sequence from its logits. In this order:
//
//   repeat_penalty  l_v = logits[v] / penalty where that is positive, ·penalty where it is not, for every token v that
//                   is marked as seen, and logits[v] else (Keskar et al. 2019, section 4.1)
//   temperature     0: argmax of l, ties to the lower id, and nothing below matters. Else p_v ∝ exp(l_v / temperature)
//   top_k           only the k likeliest are kept (0: all)
//   top_p           of those, as few of the likeliest as have together at least this part of their probability
//                   (Holtzman et al. 2020, section 3.1; 1: all)
//   min_p           of those, what is at least this fraction of the likeliest (Nguyen et al. 2024; 0: all)
//   draw            the token whose cumulative probability among the kept, in order of id, first exceeds u
//
// Among equal logits the lower id counts as likelier. u comes from Philox keyed by the seed, counter (sequence, step):
// one sequence's draws never depend on who shares its batch.
//
// On CUDA a row is looked at in stretches side by side; beyond SAMPLING_FAST_TOP_K top_k takes one block a row. top_p
// is decided by sums of probabilities rounded to 2^−44 of the likeliest, which are exact in any order.
//
// Errors: wrong shape or dtype, options outside their range, logits that hold NaN or whose maximum is not finite (CPU;
// on CUDA, where nobody waits to be told, the row's id is -1).
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
// steps [B] int64 key the draws. seen [B, ⌈V/32⌉] int32 or null: bit v%32 of word v/32 marks token v; the token drawn
// is marked too. Needed by a penalty. scratch: sampling_scratch bytes (U8).
void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Tensor seen, Tensor scratch, Stream stream);
int64_t sampling_scratch(int64_t B, int64_t V, const SamplingOptions& options);
