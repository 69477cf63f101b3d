// Checks of attention's arguments that do not read the tensors' contents, for both backends.
#pragma once

#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/kv_page.h"

struct AttentionSizes {
    int64_t Nq, Nk, NH, NKV, HS, S;
    int64_t keys;  // upper bound of cum_k
    KvPages pages;
};

inline AttentionSizes check_attention(const char* op, DType dtype, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionSequences& sequences, float scale) {
    require(q && q.rank == 3, op, ": q is ", shape_string(q), ", expected [Nq, NH, HS]");
    require(k && k.rank == 3, op, ": k is ", shape_string(k), ", expected [Nk, NKV, HS]");
    AttentionSizes z{q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], 0, k.shape[0], {}};
    check_tensor(op, "q", q, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "k", k, dtype, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "v", v, dtype, {z.Nk, z.NKV, z.HS});
    require(z.NKV > 0 && z.NH % z.NKV == 0, op, ": ", z.NKV, " KV heads do not divide ", z.NH, " heads");
    require(z.HS >= 1 && z.HS <= attention_max_head_size(), op, ": head size ", z.HS, " lies outside [1, ",
            attention_max_head_size(), "]");
    require(scale > 0, op, ": scale is ", scale, "; it must be positive");
    require(sequences.window >= 0, op, ": window is ", sequences.window, "; it must be 0 (no window) or positive");
    const int64_t longest = std::max(sequences.max_q, sequences.max_k), limit = int64_t(1) << 30;
    require(longest <= limit, op, ": a sequence of ", longest, " tokens; at most ", limit, " are supported");
    z.S = sequences.cum_q.rank == 1 ? sequences.cum_q.shape[0] - 1 : -1;
    require(z.S >= 0, op, ": cum_q is ", shape_string(sequences.cum_q), ", expected [sequences + 1]");
    check_tensor(op, "cum_q", sequences.cum_q, DType::I32, {z.S + 1});
    check_tensor(op, "cum_k", sequences.cum_k, DType::I32, {z.S + 1});
    check_tensor(op, "count", sequences.count, DType::I32, {1}, Given::Optional);
    if (!sequences.pages) return z;
    z.pages = check_pages(op, sequences.pages, z.Nk);
    check_tensor(op, "page_rows", sequences.page_rows, DType::I32, {z.S});
    z.keys = z.S * z.pages.columns * KV_PAGE;
    require(z.keys < int64_t(1) << 31, op, ": ", z.S, " sequences of up to ", z.pages.columns,
            " pages; at most 2^31 - 1 keys are supported");
    return z;
}
