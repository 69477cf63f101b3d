// Softmax attention with grouped-query heads over packed sequences of unequal length, causal or full, with or without a
// sliding window, forward and backward.
//
//   S_ij = scale·q_i·k_j,   P = softmax_j(S),   out_i = Σ_j P_ij v_j,   lse_i = ln Σ_j exp(S_ij)
//
//   backward, with delta_i = Σ_c dout_ic·out_ic:
//   dv_j = Σ_i P_ij dout_i,   dS_ij = P_ij (dout_i·v_j − delta_i),
//   dq_i = scale·Σ_j dS_ij k_j,   dk_j = scale·Σ_i dS_ij q_i
//
// Query head h reads KV head h / (NH/NKV); dk and dv are summed over the query heads that share the KV head.
//
// Sequence s holds queries cum_q[s] … cum_q[s+1]−1 and keys cum_k[s] … cum_k[s+1]−1 (qlen and klen of them). Let
// o = klen − qlen, so that the last query is aligned with the last key. Query i of a sequence (from 0) sees the keys
// j ≤ i + o, or all keys if not causal. A window w > 0 keeps of these the keys i + o − w < j < i + o + w. For a query
// that sees no key, out = 0 and lse = −∞.
//
// The T×T matrix is never stored: tiles with an online softmax (Milakov, Gimelshein 2018; FlashAttention-2, Dao 2023,
// algorithms 1 and 2). The same input gives the same bits, unless the caller of attention_backward allows otherwise.
// q, k, v, dq, dk, dv are [tokens, heads, HS] with any row and head strides, so that they can be views into the packed
// [tokens, (NH + 2·NKV)·HS] output of the QKV GEMM and its gradient (split_heads in runtime/device/tensor.h).
// Tokens after the last sequence get zeros (lse −∞). Finite values that a query does not see never change its results.
// On the CPU that holds for NaN and infinities too; in CUDA they are multiplied by 0 and spread within a tile of their
// sequence. Sequences are isolated from each other on both.
// dtypes: q, k, v, out and their gradients T, one of fp32, bf16 and fp16 (on the CPU fp32); lse fp32. On tensor cores P
// and dS are rounded to T before they are multiplied; accumulation is in fp32.
// Errors: wrong shapes or dtypes, NKV not dividing NH, HS > attention_max_head_size(), a scale that is not positive, a
// negative window, sequences of more than 2³⁰ tokens; on the CPU also cum_seqlens that decrease, exceed the tensors or
// have a sequence longer than the given maximum, and pages outside the cache. CUDA does not check cum_seqlens and
// pages: it never reads or writes outside the tensors, but the results are then undefined. page_rows must be rows of
// pages.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct AttentionSequences {
    Tensor cum_q, cum_k;           // [S + 1] int32, cum[0] = 0
    int64_t max_q = 0, max_k = 0;  // length of the longest sequence, known to the host; may be an upper bound
    bool causal = true;
    int64_t window = 0;  // keys that a query sees on each side, including its own; 0: no window
    // [1] int32: the number of sequences, if all after them are empty (their cum_q and cum_k are the last ones). With
    // it the launch is the same for every batch of as many tokens, as a CUDA graph needs, and takes no time for empty
    // sequences. Null: S.
    Tensor count = {};
    // Forward only: k and v are a paged cache [pages·KV_PAGE, NKV, HS] (kernels/kv_page.h). Key j of sequence s is in
    // page pages[page_rows[s], j / KV_PAGE], and cum_k only gives the numbers of keys. pages [rows, n] int32, page_rows
    // [S] int32. Null: the keys of a sequence follow each other.
    Tensor pages = {}, page_rows = {};
};

int64_t attention_max_head_size();  // of this backend

// out [Nq, NH, HS]; lse [NH, Nq] fp32 (null: not stored); q [Nq, NH, HS]; k, v [Nk, NKV, HS]; scratch:
// attention_forward_scratch bytes (U8; may be null if that is 0).
void attention_forward(Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, const AttentionSequences& sequences,
                       float scale, Tensor scratch, Stream stream);
int64_t attention_forward_scratch();

// Partial sums over tokens of dq, dk and dv as they are stored. Their rows add up to the gradient of the bias of the
// layer that computed q, k and v (matmul_backward_bias). Null: not wanted.
struct AttentionGradientSums {
    Tensor dq;   // fp32 [rows, NH·HS], contiguous
    Tensor dkv;  // fp32 [rows, 2·NKV·HS], contiguous: of dk, then of dv
};
struct AttentionSumRows {
    int64_t dq = 0, dkv = 0;
};
// Their rows for S sequences of up to max_q queries and max_k keys. 0: attention_backward does not compute them. It
// does on a Hopper GPU for 16-bit types and HS ≤ 64, a multiple of 8, in the deterministic backward pass. Then rows
// must be aligned to 16 bytes, there must be queries and keys, and AttentionSequences::count may not be given.
AttentionSumRows attention_gradient_sum_rows(int64_t S, int64_t max_q, int64_t max_k, int64_t NH, int64_t HS,
                                             DType dtype, bool deterministic = true);

// dq [Nq, NH, HS], dk, dv [Nk, NKV, HS] (overwritten); dout, out [Nq, NH, HS]; lse [NH, Nq];
// scratch: attention_backward_scratch bytes (U8). If not deterministic, dq may be summed in any order, so that two runs
// differ in its last bits. That happens only where it is faster: 16-bit types on a Hopper GPU, with HS from 65 to 128,
// or with HS ≤ 64 and max_k > 2048.
void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                        Tensor lse, const AttentionSequences& sequences, float scale, Tensor scratch, Stream stream,
                        bool deterministic = true, const AttentionGradientSums& sums = {});
// max_k: at least sequences.max_k; used only if not deterministic.
int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t HS, bool deterministic = true, int64_t max_k = 0);
