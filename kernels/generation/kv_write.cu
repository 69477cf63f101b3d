#include "kernels/generation/kv_write.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/kv_rotate.cuh"

namespace {

constexpr int THREADS = 256;

// One block for each token. A thread reads both channels of a rotated pair before it writes them, so that q can be
// rotated in place. Channels beyond the pairs, and v, are copied.
//
// LLaMA 1B, a prompt of 1,000 tokens: 1,000 blocks. (32 + 8) heads of 32 pairs are 5 pairs a thread, and 8 heads of 64
// channels of v are 2 channels a thread.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    kv_append_kernel(T* k_cache, T* v_cache, T* qkv, int64_t stride, const int32_t* rows, int64_t num_rows,
                     Angles angles, int NH, int NKV, int HS) {
    pdl_wait();
    pdl_launch_dependents();
    const int64_t token = blockIdx.x, row = rows[token];
    T* const q = qkv + token * stride;
    const float* const rotation = angles.of(token);
    const bool has_row = row >= 0 && row < num_rows;
    if (!has_row) return;
    T* const to_k = k_cache + row * NKV * HS;
    T* const to_v = v_cache + row * NKV * HS;
    const int pairs = rotation ? angles.pairs : 0, rest = HS - 2 * pairs;
    for (int i = threadIdx.x; i < (NH + NKV) * pairs; i += THREADS) {
        const int head = i / pairs, c = i - head * pairs;
        const T* const x = q + int64_t(head) * HS;
        const float first = rotated(x, c, rotation, pairs), second = rotated(x, c + pairs, rotation, pairs);
        T* const to = head < NH ? q + int64_t(head) * HS : to_k + int64_t(head - NH) * HS;
        to[c] = from_float<T>(first);
        to[c + pairs] = from_float<T>(second);
    }
    const T* const k = q + int64_t(NH) * HS;
    for (int i = threadIdx.x; i < NKV * rest; i += THREADS) {
        const int at = i / rest * HS + 2 * pairs + i % rest;
        to_k[at] = k[at];
    }
    for (int i = threadIdx.x; i < NKV * HS; i += THREADS) to_v[i] = k[NKV * HS + i];
}

// A thread copies one vector of a row of k, and the same of v. blockIdx: the row, THREADS vectors of it.
//
// LLaMA 1B, 63 copies of a page: rows of 128 · 512 channels, 8,192 vectors; 63 · 32 blocks.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS)
    kv_copy_kernel(T* k_to, T* v_to, const int32_t* to_rows, int64_t rows_to, const T* k_from, const T* v_from,
                   const int32_t* from_rows, int64_t rows_from, int64_t row) {
    const int64_t to = to_rows[blockIdx.x], from = from_rows[blockIdx.x];
    const int64_t i = (blockIdx.y * int64_t(THREADS) + threadIdx.x) * W;
    if (to < 0 || to >= rows_to || from < 0 || from >= rows_from || i >= row) return;
    const Pack<T, W> k = load_pack<W>(k_from + from * row + i), v = load_pack<W>(v_from + from * row + i);
    store_pack<W>(k_to + to * row + i, k);
    store_pack<W>(v_to + to * row + i, v);
}

}  // namespace

void kv_append(Tensor k_cache, Tensor v_cache, Tensor qkv, Tensor rows, Tensor angles, Tensor table, int64_t NH,
               Stream stream) {
    const char* op = "kv_append";
    const DType dtype = check_activation_dtype(op, "qkv", qkv);
    const KvAppendSizes z = check_kv_append(op, dtype, k_cache, v_cache, qkv, rows, angles, table, NH);
    if (z.N == 0) return;
    Angles rope_angles{};
    if (table) rope_angles = {angles.as<int32_t>(), table.as<float>(), table.shape[0], int(z.rope_pairs)};
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_pdl(op, kv_append_kernel<T>, grid_of(z.N), THREADS, 0, stream, k_cache.as<T>(), v_cache.as<T>(),
                   qkv.as<T>(), row_stride(qkv), rows.as<int32_t>(), z.rows, rope_angles, int(NH), int(z.NKV),
                   int(z.HS));
    });
}

void kv_copy(Tensor k_to, Tensor v_to, Tensor to_rows, Tensor k_from, Tensor v_from, Tensor from_rows, Stream stream) {
    const char* op = "kv_copy";
    const DType dtype = check_activation_dtype(op, "k_to", k_to);
    const KvCopySizes z = check_kv_copy(op, dtype, k_to, v_to, to_rows, k_from, v_from, from_rows);
    if (z.N == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool aligned = rows_aligned({k_to, v_to, k_from, v_from}) && z.row % FULL_WIDTH<T> == 0;
        dispatch_width<T>(aligned, [&](auto width) {
            constexpr int W = decltype(width)::value;
            const dim3 grid(unsigned(z.N), unsigned(ceil_div(z.row, THREADS * W)));
            kv_copy_kernel<W><<<grid, THREADS, 0, cuda_stream(stream)>>>(
                k_to.as<T>(), v_to.as<T>(), to_rows.as<int32_t>(), z.rows_to, k_from.as<T>(), v_from.as<T>(),
                from_rows.as<int32_t>(), z.rows_from, z.row);
        });
        check_launch(op, stream);
    });
}
