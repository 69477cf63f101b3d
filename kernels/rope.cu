#include "kernels/rope.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/rope_check.h"

namespace {

constexpr int THREADS = 256;

// A thread rotates W pairs, channels i … i + W − 1 of a head with those R/2 later, in up to HEADS heads, for which it
// reads the table once. Its heads are `groups` apart, so that neighbouring threads access neighbouring memory. Tokens
// whose position is outside the table stay unchanged.
//
// LLaMA 1B, bf16, N = 8,192 tokens with 32 + 8 heads of 64 in q and k: 32 pairs are 4 vectors of 8, and 40 heads are 10
// groups of 4. 8,192·10·4 threads are 1,280 blocks, which read 42 MB and write as much.
constexpr int HEADS = 4;

template <int W, typename T>
__global__ void __launch_bounds__(THREADS, 3)
    rope_kernel(T* x, int64_t token_stride, int64_t head_stride, const int32_t* positions, const float* table,
                int64_t table_length, int64_t N, int64_t H, int64_t pairs, int64_t groups, float sign) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x, per_head = pairs / W;
    if (i >= N * groups * per_head) return;
    const RowItem head = row_item(i, per_head), token = row_item(head.row, groups);
    const int32_t position = positions[token.row];
    if (position < 0 || position >= table_length) return;
    T* p = x + token.row * token_stride + token.item * head_stride + head.item * W;
    const int64_t step = groups * head_stride;
    Pack<T, W> a[HEADS], b[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (token.item + h * groups < H) {
            a[h] = load_pack<W>(p + h * step);
            b[h] = load_pack<W>(p + h * step + pairs);
        }
    const Floats<2 * W> cos_sin = load_floats<2 * W>(table + (position * pairs + head.item * W) * 2);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (token.item + h * groups >= H) continue;
        const Floats<W> xa = as_floats(a[h]), xb = as_floats(b[h]);
        Floats<W> rotated_a, rotated_b;
#pragma unroll
        for (int k = 0; k < W; k++) {
            const float c = cos_sin[2 * k], s = sign * cos_sin[2 * k + 1];
            rotated_a[k] = xa[k] * c - xb[k] * s;
            rotated_b[k] = xb[k] * c + xa[k] * s;
        }
        store_floats<W>(p + h * step, rotated_a);
        store_floats<W>(p + h * step + pairs, rotated_b);
    }
}

}  // namespace

void rope(Tensor x, Tensor positions, Tensor table, bool backward, Stream stream) {
    const char* op = "rope";
    const DType dtype = check_activation_dtype(op, "x", x);
    const RopeSizes z = check_rope(op, dtype, x, positions, table);
    const int64_t N = z.N, H = z.H, pairs = z.pairs;
    if (N * H * pairs == 0) return;
    const int64_t groups = ceil_div(H, HEADS);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool full = pairs % FULL_WIDTH<T> == 0 && rows_aligned({x}) && start_aligned(table);
        dispatch_width<T>(full, [&](auto width) {
            constexpr int W = decltype(width)::value;
            rope_kernel<W><<<grid_of(ceil_div(N * groups * (pairs / W), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
                x.as<T>(), x.stride[0], x.stride[1], positions.as<int32_t>(), table.as<const float>(), z.T, N, H, pairs,
                groups, backward ? -1.0f : 1.0f);
        });
    });
    check_launch(op, stream);
}
