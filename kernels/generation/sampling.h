// Samples the next token of each sequence from its logits. Each row of the batch has its own options and does not
// depend on the other rows. In this order:
//
//   mask            tokens that the row's mask does not allow are not looked at: l_v = −∞
//   repeat_penalty  for each token v marked as seen: l_v = logits[v] / penalty if logits[v] > 0, else
//                   logits[v]·penalty; l_v = logits[v] for the others (Keskar et al. 2019, section 4.1)
//   presence_penalty, frequency_penalty
//                   l_v −= presence·[count_v > 0] + frequency·count_v, where count_v is how often the completion has v
//                   so far, without the prompt (OpenAI, API reference of chat completions)
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
// finite, a mask that allows no token, a slot that does not exist. On CUDA such a row gets the id −1 (no check of the
// slot), because nothing waits for the kernel to end.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct SamplingOptions {
    float temperature = 1;  // ≥ 0
    int64_t top_k = 0;      // ≥ 0
    uint64_t seed = 0;
    float top_p = 1;              // (0, 1]
    float min_p = 0;              // [0, 1]
    float repeat_penalty = 1;     // > 0; 1: none
    float presence_penalty = 0;   // finite; 0: none
    float frequency_penalty = 0;  // finite; 0: none
};

constexpr int64_t SAMPLING_FAST_TOP_K = 1024;

// What a row needs, as bits; a batch needs what its rows need together. The first four choose the kernels on CUDA: what
// no row needs is not launched.
namespace sampling_class {
constexpr uint32_t UNFILTERED = 1;  // argmax, or no filters
constexpr uint32_t CANDIDATES = 2;  // top_k up to SAMPLING_FAST_TOP_K
constexpr uint32_t THRESHOLD = 4;   // other filters
constexpr uint32_t HISTOGRAM = 8;   // of these, top_p without top_k
constexpr uint32_t TOP_P = 16;
constexpr uint32_t REPEAT = 32;  // repeat_penalty
constexpr uint32_t COUNTS = 64;  // presence_penalty, frequency_penalty
constexpr uint32_t MASK = 128;
constexpr uint32_t KERNELS = UNFILTERED | CANDIDATES | THRESHOLD | HISTOGRAM, ADJUSTED = REPEAT | COUNTS | MASK,
                   ANY = KERNELS | TOP_P | ADJUSTED;
}  // namespace sampling_class

// The options of a row as kernels read them from memory, on either backend.
struct SamplingRow {
    uint64_t seed = 0;
    double rate = 0;            // log2(e)/temperature; 0 for temperature 0
    double inverse_repeat = 1;  // 1/repeat_penalty
    float temperature = 1, top_p = 1, min_p = 0;
    float repeat_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    int32_t top_k = 0;  // at most V
    int32_t slot = 0;   // the row's sequence: its row of seen, counts and masks
    uint32_t classes = sampling_class::UNFILTERED;
    uint32_t unused = 0;
};

// Throws Error for an option outside its range.
SamplingRow sampling_row(const SamplingOptions& options, int64_t V, int64_t slot = 0, bool masked = false);

// What sample_tokens reads of a batch beside its logits. S slots may be more than the B rows; two rows never share one.
struct SamplingBatch {
    Tensor rows;              // [B, sizeof(SamplingRow)] bytes; not written by a kernel launched just before
    Tensor sequences, steps;  // [B] int64: the counters of u
    uint32_t classes = 0;     // of all rows together
    Tensor seen;  // [S, ⌈V/32⌉] int32: bit v%32 of word v/32 marks token v; the sampled token is marked too. For REPEAT
    Tensor counts;  // [S, V] int32: how often the completion has each token; the sampled one is counted. For COUNTS
    Tensor masks;   // [S, ⌈V/32⌉] int32: bits of the tokens that are allowed. For MASK
};

// ids [B] int32; logits [B, Vp] fp32, on CUDA also bf16 or fp16, of which V columns count. scratch: sampling_scratch
// bytes (U8).
void sample_tokens(Tensor ids, Tensor logits, int64_t V, const SamplingBatch& batch, Tensor scratch, Stream stream);
// classes: at least those of the batch.
int64_t sampling_scratch(int64_t B, int64_t V, uint32_t classes);
