// Common code of both backends: the one computation that gives out and all gradients, and the constants of the op.
//
// out, dq, dv and dk are the same causal computation of rows a and b (E elements) and c (M elements), with other
// operands:
//
//   result_i = Σ_j w_ij·(a_i·b_j + α_i + β_j)·c_j     over j ≤ i or, reversed, j ≥ i;  w_ij: the decay between i and j,
//                                                     exp(−|Γ_i − Γ_j|) with Γ_i = Σ_t≤i g_t
//
//             a       b       c       α    β    order
//   Out       φ(q)    φ(k)    v                           and d from the row sums of its scores
//   DQ        ĝ       v       φ(k)    δ
//   DV        φ(k)    φ(q)    ĝ                 reversed, summed over the query heads of a KV head
//   DK        v       ĝ       φ(q)         δ    reversed, likewise
//
// The state carried from token to token is Σ_j w_j b_j c_jᵀ with a vector: Σ_j w_j b_j (Out), Σ_j w_j c_j (DQ) or
// Σ_j w_j δ_j c_j (DK). KeyState and QueryState compute these states alone: S and z, R and r.
#pragma once

#include "runtime/rng.h"

enum class LinearAttentionResult : uint8_t { Out, DQ, DV, DK, KeyState, QueryState };

constexpr float LINEAR_ATTENTION_EPS = 1e-6f;
constexpr int64_t LINEAR_ATTENTION_MAX_CHUNKED_SIZE = 256;  // of E and M in the chunked form

// The row of sequence i's state; −1: it has none.
HOST_DEVICE inline int64_t state_row(const int32_t* rows, int64_t num_rows, int64_t i) {
    if (!rows) return i;
    return rows[i] >= 0 && rows[i] < num_rows ? rows[i] : -1;
}
