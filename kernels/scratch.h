// Scratch memory of the kernels that training uses, in bytes, for a target device. Each op's header declares the same
// functions for the device of this program. The sizes for CPU and GPU are in one file because `plan` asks for GPUs that
// the machine does not have.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/linear_attention/linear_attention_types.h"
#include "runtime/device/target.h"

int64_t layernorm_backward_scratch(int64_t N, int64_t C, const Target& target);
int64_t rmsnorm_backward_scratch(int64_t N, int64_t C, const Target& target);
int64_t embedding_backward_scratch(int64_t N, int64_t V, int64_t C, const Target& target);
int64_t sum_squares_scratch(int64_t n, const Target& target);
int64_t qk_norm_backward_scratch(int64_t N, int64_t NH, int64_t NKV, int64_t HS, const Target& target);
int64_t qk_norm_all_heads_backward_scratch(int64_t N, int64_t Cq, int64_t Ck, const Target& target);
int64_t normalize_matrices_scratch(int64_t batch, int64_t rows, int64_t columns, const Target& target);
int64_t newton_schulz_scratch(int64_t batch, int64_t rows, int64_t columns, DType dtype, const Target& target);
int64_t matmul_fp8_scratch(int64_t M, int64_t N, int64_t K, const Target& target);
int64_t matmul_low_rank_scratch(int64_t OC, int64_t ranks, DType dtype, const Target& target);
int64_t attention_forward_scratch(const Target& target);
int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t HS, bool deterministic, int64_t max_k,
                                   const Target& target);
AttentionSumRows attention_gradient_sum_rows(int64_t S, int64_t max_q, int64_t max_k, int64_t NH, int64_t HS,
                                             DType dtype, bool deterministic, const Target& target);
int64_t linear_attention_forward_scratch(const LinearAttentionSizes& sizes, const Target& target);
int64_t linear_attention_backward_scratch(const LinearAttentionSizes& sizes, const Target& target);
