// Draws the next token of each sequence from its logits.
//
//   temperature 0: argmax, ties to the lower id.
//   else: p_v ∝ exp(logits[v] / temperature) over the top_k largest logits (0: all; ties at the edge to the lower id),
//   and the token whose cumulative probability, in order of id, first exceeds the uniform number u.
//
// u comes from Philox keyed by the seed, counter (sequence, step): one sequence's draws never depend on who shares its
// batch. Errors: wrong shape or dtype, negative temperature or top_k, logits that hold NaN or whose
// maximum is not finite (CPU; on CUDA, where nobody waits to be told, the row's id is -1).
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

struct SamplingOptions {
    float temperature = 1;
    int64_t top_k = 0;
    uint64_t seed = 0;
};

// ids [B] int32; logits [B, Vp] fp32, on CUDA also bf16 or fp16, of which V columns count; sequences [B] int64 and
// steps [B] int64 key the draws.
void sample_tokens(Tensor ids, Tensor logits, int64_t V, Tensor sequences, Tensor steps, const SamplingOptions& options,
                   Stream stream);
