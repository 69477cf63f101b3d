#include "kernels/generation/kv_cache.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/rope.h"

void kv_append(Tensor k_cache, Tensor v_cache, Tensor qkv, Tensor rows, Tensor angles, Tensor table, int64_t NH,
               Stream stream) {
    const char* op = "kv_append";
    require(k_cache && k_cache.rank == 3, op, ": k_cache is ", shape_string(k_cache), ", expected [rows, NKV, HS]");
    check_matrix(op, "qkv", qkv);
    const int64_t N = qkv.shape[0], R = k_cache.shape[0], NKV = k_cache.shape[1], HS = k_cache.shape[2];
    check_tensor(op, "k_cache", k_cache, DType::F32, {R, NKV, HS});
    check_tensor(op, "v_cache", v_cache, DType::F32, {R, NKV, HS});
    check_matrix(op, "qkv", qkv, N, (NH + 2 * NKV) * HS);
    check_contiguous(op, "k_cache", k_cache);
    check_contiguous(op, "v_cache", v_cache);
    check_tensor(op, "rows", rows, DType::I32, {N});
    const int32_t* row = rows.as<int32_t>();
    const auto has_place = [&](int64_t n) { return row[n] >= 0 && row[n] < R; };
    if (check_angles(op, angles, table, N, HS)) {
        const Tensor q_and_k = split_heads(qkv.columns(0, (NH + NKV) * HS), NH + NKV);
        for (int64_t begin = 0, end; begin < N; begin = end + 1) {  // stretches of tokens that have a place
            for (end = begin; end < N && has_place(end);) end++;
            rope(q_and_k.rows(begin, end), angles.rows(begin, end), table, false, stream);
        }
    }
    const float* k = qkv.as<float>() + NH * HS;
#pragma omp parallel for schedule(static) if (N * NKV * HS > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        if (!has_place(n)) continue;
        const float* from = k + n * row_stride(qkv);
        std::copy_n(from, NKV * HS, k_cache.as<float>() + row[n] * NKV * HS);
        std::copy_n(from + NKV * HS, NKV * HS, v_cache.as<float>() + row[n] * NKV * HS);
    }
}
