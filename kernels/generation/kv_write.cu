#include "kernels/generation/kv_write.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/kv_rotate.cuh"

namespace {

constexpr int THREADS = 256;

// One block for each token. A thread has W channels: of both halves of W rotated pairs, which it reads before it
// writes, so that q can be rotated in place; or of k beyond the pairs, or of v, which are copied.
//
// LLaMA 1B, a prompt of 1,000 tokens: 1,000 blocks. (32 + 8) heads of 32 pairs and 8 heads of 64 channels of v are 160
// + 64 threads of W = 8.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS)
    kv_append_kernel(T* k_cache, T* v_cache, T* qkv, int64_t stride, const int32_t* rows, int64_t num_rows,
                     Angles angles, int NH, int NKV, int HS) {
    pdl_wait();
    pdl_launch_dependents();
    const int64_t token = blockIdx.x, row = rows[token];
    T *const q = qkv + token * stride, *const k = q + int64_t(NH) * HS;
    const float* const rotation = angles.of(token);
    const bool has_row = row >= 0 && row < num_rows;
    if (!has_row) return;
    T *const to_k = k_cache + row * NKV * HS, *const to_v = v_cache + row * NKV * HS;
    const int pairs = rotation ? angles.pairs : 0, rest = HS - 2 * pairs;
    const int rotated_end = (NH + NKV) * (pairs / W), k_end = rotated_end + NKV * (rest / W),
              v_end = k_end + NKV * (HS / W);
    for (int i = threadIdx.x; i < v_end; i += THREADS) {
        if (i < rotated_end) {
            const int head = i / (pairs / W), c = (i - head * (pairs / W)) * W;
            const T* const x = q + int64_t(head) * HS + c;
            const Floats<W> a = load_floats<W>(x), b = load_floats<W>(x + pairs);
            const Floats<2 * W> cos_sin = load_floats<2 * W>(rotation + 2 * c);
            Floats<W> rotated_a, rotated_b;
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float cosine = cos_sin[2 * j], sine = cos_sin[2 * j + 1];
                rotated_a[j] = a[j] * cosine - b[j] * sine;
                rotated_b[j] = b[j] * cosine + a[j] * sine;
            }
            T* const to = head < NH ? q + int64_t(head) * HS + c : to_k + int64_t(head - NH) * HS + c;
            store_floats<W>(to, rotated_a);
            store_floats<W>(to + pairs, rotated_b);
        } else if (i < k_end) {
            const int j = i - rotated_end, at = j / (rest / W) * HS + 2 * pairs + j % (rest / W) * W;
            store_pack<W>(to_k + at, load_pack<W>(k + at));
        } else {
            const int at = (i - k_end) * W;
            store_pack<W>(to_v + at, load_pack<W>(k + NKV * HS + at));
        }
    }
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
        constexpr int FULL = FULL_WIDTH<T>;
        const bool full = rows_aligned({k_cache, v_cache, qkv}) && start_aligned(table) && z.HS % FULL == 0 &&
                          rope_angles.pairs % FULL == 0;
        dispatch_width<T>(full, [&](auto width) {
            launch_pdl(op, kv_append_kernel<decltype(width)::value, T>, grid_of(z.N), THREADS, 0, stream,
                       k_cache.as<T>(), v_cache.as<T>(), qkv.as<T>(), row_stride(qkv), rows.as<int32_t>(), z.rows,
                       rope_angles, int(NH), int(z.NKV), int(z.HS));
        });
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
