// Softmax attention on CUDA: arguments and their checks; which kernels run. Hopper GPUs take 16-bit heads of up to 128
// columns by TMA and wgmma (attention_*_hopper.cu); everything else runs on the kernels of tiled_attention.cuh.
#include "kernels/attention/attention.h"

#include "kernels/attention/attention.cuh"
#include "kernels/attention/attention_check.h"
#include "kernels/attention/tiled_attention.cuh"

namespace {

// All arguments but the gradients.
template <typename T>
Attention<T> forward_arguments(const AttentionSizes& z, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const AttentionSequences& sequences, float scale) {
    Attention<T> a{};
    a.q = heads_of<T>(q);
    a.k = heads_of<T>(k);
    a.v = heads_of<T>(v);
    a.out = heads_of<T>(out);
    a.lse = lse.as<float>();
    a.lse_stride = lse.stride[0];
    a.cum_q = sequences.cum_q.as<int32_t>();
    a.cum_k = sequences.cum_k.as<int32_t>();
    if (sequences.count) a.count = sequences.count.as<int32_t>();
    a.causal = sequences.causal;
    // A window longer than every sequence has no effect. Clamped, so that sums with it fit an int.
    a.window = int(std::min(sequences.window, std::max(sequences.max_q, sequences.max_k)));
    a.S = z.S;
    a.Nq = z.Nq;
    a.Nk = z.keys;
    if (z.pages.table) {
        a.pages = z.pages.table;
        a.page_rows = sequences.page_rows.as<int32_t>();
        a.page_columns = int(z.pages.columns);
        a.num_pages = int(z.pages.pages);
    }
    a.NH = z.NH;
    a.NKV = z.NKV;
    a.HS = int(z.HS);
    a.scale = scale;
    return a;
}

// Bytes of the fp32 sums of dq, the first part of the scratch.
int64_t dq_sums_bytes([[maybe_unused]] int64_t Nq, [[maybe_unused]] int64_t NH, [[maybe_unused]] int64_t HS,
                      [[maybe_unused]] bool deterministic, [[maybe_unused]] int64_t max_k) {
#ifdef HAVE_SM90A
    if (!deterministic) return hopper_attention_sums(Nq, NH, HS, max_k);
#endif
    return 0;
}

// Whether attention_backward() can compute the sums that are asked for.
void check_sums(const char* op, const AttentionSizes& z, const AttentionGradientSums& sums,
                const AttentionSequences& sequences, DType dtype, bool deterministic) {
    if (!sums.dq && !sums.dkv) return;
    const AttentionSumRows rows =
        attention_gradient_sum_rows(z.S, sequences.max_q, sequences.max_k, z.NH, z.HS, dtype, deterministic);
    require(rows.dq > 0 && z.Nq > 0 && z.Nk > 0 && !sequences.count, op,
            ": sums of the gradients are not computed here (attention.h)");
    check_tensor(op, "sums.dq", sums.dq, DType::F32, {rows.dq, z.NH * z.HS});
    check_tensor(op, "sums.dkv", sums.dkv, DType::F32, {rows.dkv, 2 * z.NKV * z.HS});
    check_contiguous(op, "sums.dq", sums.dq);
    check_contiguous(op, "sums.dkv", sums.dkv);
}

}  // namespace

int64_t attention_max_head_size() {
    return TILED_ATTENTION_MAX_HS;
}

void attention_forward(Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, const AttentionSequences& sequences,
                       float scale, Tensor scratch, Stream stream) {
    const char* op = "attention_forward";
    const DType dtype = check_activation_dtype(op, "q", q);
    const AttentionSizes z = check_attention(op, dtype, q, k, v, sequences, scale);
    check_tensor(op, "out", out, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq}, Given::Optional);
    check_scratch(op, scratch, attention_forward_scratch());
    if (z.Nq == 0) return;

    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Attention<T> a = forward_arguments<T>(z, q, k, v, out, lse, sequences, scale);
        a.aligned = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out});
        a.next_task = static_cast<uint32_t*>(scratch.data);
#ifdef HAVE_SM90A
        if constexpr (!std::is_same_v<T, float>)
            if (hopper_attention_takes(a)) return hopper_attention_forward(op, a, sequences, stream);
#endif
        tiled_attention_forward(op, a, sequences, stream);
    });
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                        Tensor lse, const AttentionSequences& sequences, float scale, Tensor scratch, Stream stream,
                        bool deterministic, const AttentionGradientSums& sums) {
    const char* op = "attention_backward";
    const DType dtype = check_activation_dtype(op, "q", q);
    const AttentionSizes z = check_attention(op, dtype, q, k, v, sequences, scale);
    require(!z.pages.table, op, ": keys in pages have no gradient");
    check_tensor(op, "dq", dq, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "dk", dk, dtype, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dv", dv, dtype, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dout", dout, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "out", out, dtype, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq});
    check_scratch(op, scratch, attention_backward_scratch(z.Nq, z.NH, z.HS, deterministic, sequences.max_k));
    check_sums(op, z, sums, sequences, dtype, deterministic);

    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Attention<T> a = forward_arguments<T>(z, q, k, v, out, lse, sequences, scale);
        a.dq = heads_of<T>(dq);
        a.dk = heads_of<T>(dk);
        a.dv = heads_of<T>(dv);
        a.dout = heads_of<T>(dout);
        const int64_t dq_sums =
            dq_sums_bytes(z.Nq, z.NH, z.HS, deterministic, sequences.max_k) / int64_t(sizeof(float));
        a.dq_sums = dq_sums > 0 ? static_cast<float*>(scratch.data) : nullptr;
        a.dq_row_sums = sums.dq.as<float>();
        a.dkv_row_sums = sums.dkv.as<float>();
        a.delta = static_cast<float*>(scratch.data) + dq_sums;
        a.next_task = reinterpret_cast<uint32_t*>(a.delta + z.Nq * z.NH);
        a.aligned = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out, dout, dq, dk, dv});
#ifdef HAVE_SM90A
        if constexpr (!std::is_same_v<T, float>)
            if (hopper_attention_takes(a)) return hopper_attention_backward(op, a, sequences, stream);
#endif
        require(!sums.dq, op, ": sums of the gradients need rows aligned to 16 bytes");
        tiled_attention_backward(op, a, sequences, stream);
    });
}
