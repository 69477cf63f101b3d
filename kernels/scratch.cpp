#include "kernels/scratch.h"

#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/cuda/launch_shapes.h"
#include "kernels/embedding.h"
#include "kernels/global_norm_check.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/linear_attention/linear_attention_layout.h"
#include "kernels/matmul_fp8_check.h"
#include "kernels/matmul_low_rank.h"
#include "kernels/muon.h"
#include "kernels/norm.h"
#include "kernels/norm_partials.h"
#include "kernels/qk_norm_all_heads.h"

namespace {

bool on_gpu(const Target& target) {
    return target.device == Device::CUDA;
}

}  // namespace

int64_t layernorm_backward_scratch(int64_t N, int64_t C, const Target& target) {
    return on_gpu(target) ? gpu_scratch::norm_partials(N, C, 3, target.sms) : norm_partials_bytes(N, 3 * C);
}

int64_t rmsnorm_backward_scratch(int64_t N, int64_t C, const Target& target) {
    return on_gpu(target) ? gpu_scratch::norm_partials(N, C, 2, target.sms) : norm_partials_bytes(N, 2 * C);
}

// On the CPU threads own columns, so no lists of entries are needed. On a GPU it does not depend on the number of rows:
// the sort's part is computed for all bits of the key.
int64_t embedding_backward_scratch(int64_t N, int64_t, int64_t C, const Target& target) {
    if (!on_gpu(target)) return 0;
    using namespace gpu_scratch;
    const int64_t entries = 2 * N, list = embedding_aligned(entries * int64_t(sizeof(int32_t)));
    return 4 * list + embedding_aligned(embedding_partials(entries, C)) + embedding_aligned(embedding_sort(entries));
}

int64_t sum_squares_scratch(int64_t n, const Target& target) {
    return sum_squares_blocks(n, target.device) * int64_t(sizeof(double));
}

int64_t qk_norm_backward_scratch(int64_t N, int64_t NH, int64_t NKV, int64_t HS, const Target& target) {
    if (!on_gpu(target)) return norm_partials_bytes(N, 2 * HS);
    const gpu_scratch::QkBlocks blocks = gpu_scratch::qk_blocks(NH, NKV, target.sms);
    return (blocks.q + blocks.k) * HS * int64_t(sizeof(float));
}

// One norm after the other.
int64_t qk_norm_all_heads_backward_scratch(int64_t N, int64_t Cq, int64_t Ck, const Target& target) {
    return std::max(rmsnorm_backward_scratch(N, Cq, target), rmsnorm_backward_scratch(N, Ck, target));
}

// On the CPU a sum, and what sum_squares needs.
int64_t normalize_matrices_scratch(int64_t batch, int64_t rows, int64_t columns, const Target& target) {
    if (!on_gpu(target)) return int64_t(sizeof(double)) + sum_squares_scratch(rows * columns, target);
    return batch * gpu_scratch::matrix_chunks(rows * columns) * int64_t(sizeof(double));
}

// On the CPU both operands in fp32: the second whole, the first by chunks of rows.
int64_t matmul_fp8_scratch(int64_t M, int64_t N, int64_t K, const Target& target) {
    return on_gpu(target) ? 0 : (std::min(M, MATMUL_FP8_CPU_ROWS) + N) * K * int64_t(sizeof(float));
}

// On Hopper GPUs adapters may be a part of the matmul with the weight.
int64_t matmul_low_rank_scratch(int64_t OC, int64_t ranks, DType dtype, const Target& target) {
    return target.hopper && dtype == DType::BF16 ? OC * ranks * dtype_size(dtype) : 0;
}

int64_t attention_forward_scratch(const Target& target) {
    return on_gpu(target) ? gpu_scratch::ATTENTION_COUNTER : 0;
}

// On a GPU the fp32 sums of dq, delta and the task counter, on the CPU delta.
int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t HS, bool deterministic, int64_t max_k,
                                   const Target& target) {
    const bool sums = !deterministic && target.hopper;
    return (sums ? gpu_scratch::hopper_dq_sums(Nq, NH, HS, max_k) : 0) + Nq * NH * int64_t(sizeof(float)) +
           attention_forward_scratch(target);
}

AttentionSumRows attention_gradient_sum_rows(int64_t S, int64_t max_q, int64_t max_k, int64_t NH, int64_t HS,
                                             DType dtype, bool deterministic, const Target& target) {
    using namespace gpu_scratch;
    const bool two_passes = deterministic || hopper_dq_sums(1, NH, HS, max_k) == 0;
    if (!target.hopper || dtype == DType::F32 || HS > HOPPER_SUM_MAX_HS || HS % 8 || !two_passes) return {};
    const auto rows = [&](int64_t longest, int64_t tile) {
        return S * std::max<int64_t>(1, divide_up(longest, tile)) * HOPPER_SUM_ROWS;
    };
    return {rows(max_q, hopper_query_rows(HS)), rows(max_k, HOPPER_KEY_ROWS)};
}

int64_t linear_attention_forward_scratch(const LinearAttentionSizes& z, const Target& target) {
    return on_gpu(target) ? linear_attention::Layout(z, false, target.sms).bytes() : 0;
}

int64_t linear_attention_backward_scratch(const LinearAttentionSizes& z, const Target& target) {
    if (on_gpu(target)) return linear_attention::Layout(z, true, target.sms).bytes();
    return (2 * z.NH * z.N + z.NKV * z.N + (z.states ? z.S * z.NKV : 0)) * int64_t(sizeof(float));
}

// --- for the device of this program

int64_t layernorm_backward_scratch(int64_t N, int64_t C) {
    return layernorm_backward_scratch(N, C, this_target());
}

int64_t rmsnorm_backward_scratch(int64_t N, int64_t C) {
    return rmsnorm_backward_scratch(N, C, this_target());
}

int64_t embedding_backward_scratch(int64_t N, int64_t V, int64_t C) {
    return embedding_backward_scratch(N, V, C, this_target());
}

int64_t sum_squares_scratch(int64_t n) {
    return sum_squares_scratch(n, this_target());
}

int64_t qk_norm_backward_scratch(int64_t N, int64_t NH, int64_t NKV, int64_t HS) {
    return qk_norm_backward_scratch(N, NH, NKV, HS, this_target());
}

int64_t qk_norm_all_heads_backward_scratch(int64_t N, int64_t Cq, int64_t Ck) {
    return qk_norm_all_heads_backward_scratch(N, Cq, Ck, this_target());
}

int64_t normalize_matrices_scratch(int64_t batch, int64_t rows, int64_t columns) {
    return normalize_matrices_scratch(batch, rows, columns, this_target());
}

int64_t matmul_fp8_scratch(int64_t M, int64_t N, int64_t K) {
    return matmul_fp8_scratch(M, N, K, this_target());
}

int64_t matmul_low_rank_scratch(int64_t OC, int64_t ranks, DType dtype) {
    return matmul_low_rank_scratch(OC, ranks, dtype, this_target());
}

int64_t attention_forward_scratch() {
    return attention_forward_scratch(this_target());
}

int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t HS, bool deterministic, int64_t max_k) {
    return attention_backward_scratch(Nq, NH, HS, deterministic, max_k, this_target());
}

AttentionSumRows attention_gradient_sum_rows(int64_t S, int64_t max_q, int64_t max_k, int64_t NH, int64_t HS,
                                             DType dtype, bool deterministic) {
    return attention_gradient_sum_rows(S, max_q, max_k, NH, HS, dtype, deterministic, this_target());
}

int64_t linear_attention_forward_scratch(const LinearAttentionSizes& sizes) {
    return linear_attention_forward_scratch(sizes, this_target());
}

int64_t linear_attention_backward_scratch(const LinearAttentionSizes& sizes) {
    return linear_attention_backward_scratch(sizes, this_target());
}
