// Causal linear attention with grouped-query heads over packed sequences of unequal length, forward and backward, and
// its decode step.
//
// With φ the feature map (identity, or elu(x) + 1: x + 1 above 0, eˣ below) and g ≤ 0 a log decay for each token and KV
// head (0 where no gate is given), for each sequence and KV head, head h reading KV head h / (NH/NKV):
//
//   S_t = exp(g_t)·S_t−1 + φ(k_t) v_tᵀ    [E, M]        z_t = exp(g_t)·z_t−1 + φ(k_t)    [E]
//   out_t = S_tᵀ φ(q_t)                                 or, normalised,
//   out_t = S_tᵀ φ(q_t) / d_t,   d_t = φ(q_t)·z_t + ε,  ε = 1e-6
//
//   normalised elu + 1: Katharopoulos et al. 2020, "Transformers are RNNs", equations 8 to 12; without either the
//   causal product of that paper; with a constant gate RetNet (Sun et al. 2023), with one that depends on the token
//   Mamba-2's scalar decay (Dao, Gu 2024) and the gated linear attention of Yang et al. 2023 with one decay for a head.
//
//   backward, ĝ = dout/d, δ = −ĝ·out (not normalised: ĝ = dout, δ = 0), R and r running from the end:
//   R_t = exp(g_t+1)·R_t+1 + φ(q_t) ĝ_tᵀ (summed over the query heads of the KV head),   r likewise with δ_t φ(q_t)
//   dφ(q_t) = S_t ĝ_t + δ_t z_t,   dφ(k_t) = R_t v_t + r_t,   dv_t = R_tᵀ φ(k_t),
//   dg_t = ⟨exp(g_t)·S_t−1, R_t⟩ + exp(g_t)·z_t−1·r_t = Σ_s≥t (φ(q_s)·dφ(q_s) − φ(k_s)·dφ(k_s)) + ⟨S_T, dS_T⟩
//
// docs/linear_attention.md has the chunked form that trains, and its cost. No atomics: the same input gives the same
// bits, on the CPU with any number of threads. A token never changes the results of those before it, as long as it is
// finite; sequences are isolated from each other.
//
// q, k, v, out and their gradients are [N, heads, size] with any row and head strides, so that they can be views into
// packed rows (split_heads in runtime/device/tensor.h). E and M may differ. dtypes: q, k, v, out and their gradients T,
// fp32 or bf16 (the CPU: fp32; fp16 can't hold the sums that a state is); gate, norm, the states and their gradients
// fp32. On tensor cores φ, ĝ, the scores of a chunk and the state are rounded to T before they are multiplied; sums, z,
// d, δ and the state that is carried are fp32. Tokens after the last sequence get zeros. Errors: wrong shapes or
// dtypes, NKV not dividing NH, E or M beyond 512, or beyond 256 with Form::Chunked; a normaliser without elu + 1; on
// the CPU also cum that decreases, runs past the tensors or has a sequence longer than max_length. CUDA does not look
// at cum on the host: it never reads or writes outside the tensors, but results are then undefined.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

enum class FeatureMap : uint8_t { Identity, EluPlusOne };

struct LinearAttention {
    // Recurrent: token by token, any E and M up to 512. Chunked: matrix products over chunks of tokens, E and M up to
    // 256. Automatic: chunked where it can.
    enum class Form : uint8_t { Automatic, Recurrent, Chunked };
    FeatureMap features = FeatureMap::EluPlusOne;
    bool normalise = true;
    Form form = Form::Automatic;
};

// The kinds that models have layers of: 'L' is normalised with features elu + 1; 'G' has neither, but gates, and an
// RMSNorm of each head's output in place of the normaliser (RetNet, GLA).
inline LinearAttention linear_attention_type(char letter) {
    LinearAttention kind;
    if (letter == 'G') kind.features = FeatureMap::Identity, kind.normalise = false;
    return kind;
}

struct LinearAttentionSequences {
    Tensor cum;              // [S + 1] int32, cum[0] = 0: sequence s is tokens cum[s] … cum[s + 1] − 1
    int64_t max_length = 0;  // of the longest, known to the host
};

// What a sequence hands on: s [S, NKV, E, M] and, normalised only, z [S, NKV, E]; fp32, contiguous. Null: not given. An
// initial state that isn't given is zeros.
// rows [S] int32, for the final state and for that of decode alone: s and z hold the states of any number R of texts,
// and sequence i's is row rows[i] of them; no two share one. A row that does not exist (−1) marks a sequence whose
// state is not wanted, in decode one that is finished: its out is 0. Null: row i, and R = S.
struct LinearAttentionState {
    Tensor s, z, rows = {};
};

constexpr int64_t LINEAR_ATTENTION_MAX_SIZE = 512;  // of a head: E and M

struct LinearAttentionSizes {
    int64_t N, S, NH, NKV, E, M, max_length;
    bool states = true;  // initial or final ones, or gradients of them, are given
};
// Bytes of scratch that suffice for a pass of these sizes and for any with fewer or shorter sequences; depends on the
// GPU. Without states they don't grow with the number of sequences.
int64_t linear_attention_forward_scratch(const LinearAttentionSizes& sizes);
int64_t linear_attention_backward_scratch(const LinearAttentionSizes& sizes);

// out [N, NH, M]; norm [NH, N] fp32: d, for the backward pass (null: not stored; not normalised: not used); final:
// null, or the state after each sequence. q [N, NH, E]; k [N, NKV, E]; v [N, NKV, M]; gate [N, NKV] fp32 or null.
void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttention& kind, Tensor scratch,
                              Stream stream);

// dq, dk, dv like q, k, v; dgate [N, NKV] fp32, where there is a gate; dinitial: null, or the gradient of the initial
// state; all overwritten. dout, out [N, NH, M] and norm [NH, N] of the forward pass (normalised only; else they may be
// null); dfinal: null, or the gradient of the final state.
void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttention& kind, Tensor scratch,
                               Stream stream);

// One token for each of S sequences: state is moved on by it, in fp32 whatever T. out [S, NH, M]; q [S, NH, E];
// k [S, NKV, E]; v [S, NKV, M]; gate [S, NKV] fp32 or null.
void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttention& kind, Stream stream);
