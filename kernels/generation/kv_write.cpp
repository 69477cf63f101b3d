#include "kernels/generation/kv_write.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/rope.h"

void kv_append(Tensor k_cache, Tensor v_cache, Tensor qkv, Tensor rows, Tensor angles, Tensor table, int64_t NH,
               Stream stream) {
    const char* op = "kv_append";
    const KvAppendSizes z = check_kv_append(op, DType::F32, k_cache, v_cache, qkv, rows, angles, table, NH);
    const int64_t N = z.N, NKV = z.NKV, HS = z.HS;
    const int32_t* row = rows.as<int32_t>();
    const auto has_row = [&](int64_t n) { return row[n] >= 0 && row[n] < z.rows; };
    if (z.rope_pairs > 0) {
        const Tensor q_and_k = split_heads(qkv.columns(0, (NH + NKV) * HS), NH + NKV);
        for (int64_t begin = 0, end; begin < N; begin = end + 1) {  // runs of tokens that have a row
            for (end = begin; end < N && has_row(end);) end++;
            rope(q_and_k.rows(begin, end), angles.rows(begin, end), table, false, stream);
        }
    }
    const float* k = qkv.as<float>() + NH * HS;
#pragma omp parallel for schedule(static) if (N * NKV * HS > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        if (!has_row(n)) continue;
        const float* from = k + n * row_stride(qkv);
        std::copy_n(from, NKV * HS, k_cache.as<float>() + row[n] * NKV * HS);
        std::copy_n(from + NKV * HS, NKV * HS, v_cache.as<float>() + row[n] * NKV * HS);
    }
}

void kv_copy(Tensor k_to, Tensor v_to, Tensor to_rows, Tensor k_from, Tensor v_from, Tensor from_rows, Stream) {
    const KvCopySizes z = check_kv_copy("kv_copy", DType::F32, k_to, v_to, to_rows, k_from, v_from, from_rows);
    const int32_t *to = to_rows.as<int32_t>(), *from = from_rows.as<int32_t>();
#pragma omp parallel for schedule(static) if (z.N * z.row > PARALLEL_MIN)
    for (int64_t i = 0; i < z.N; i++) {
        if (to[i] < 0 || to[i] >= z.rows_to || from[i] < 0 || from[i] >= z.rows_from) continue;
        std::copy_n(k_from.as<float>() + from[i] * z.row, z.row, k_to.as<float>() + to[i] * z.row);
        std::copy_n(v_from.as<float>() + from[i] * z.row, z.row, v_to.as<float>() + to[i] * z.row);
    }
}
