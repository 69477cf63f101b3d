// out[n, c] = f(inp0[n, c], inp1[n, c], …) for matrices of one dtype, as the activation functions need.
//
// A thread takes one vector of 16 bytes, or one element where rows are not aligned. GELU of GPT-2 124M, bf16, B = 64,
// T = 1,024: 65,536·3,072 elements are 8 a thread, 98,304 blocks of 256; forward reads 403 MB and writes as much.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

namespace elementwise_detail {

template <typename T>
struct Operand {
    const T* data;
    int64_t stride;
};

constexpr int THREADS = 256;

// W elements a thread. out may be the same memory as an input: a thread reads all its inputs before it writes.
template <int W, typename T, typename F, typename... Operands>
__global__ void __launch_bounds__(THREADS)
    elementwise_kernel(T* out, int64_t stride, int64_t rows, int64_t columns, F f, Operands... inp) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x, per_row = columns / W;
    if (i >= rows * per_row) return;
    const RowItem at = rows == 1 ? RowItem{0, i} : row_item(i, per_row);
    Floats<W> y;
    [&](const auto&... x) {
#pragma unroll
        for (int k = 0; k < W; k++) y[k] = f(x[k]...);
    }(load_floats<W>(inp.data + at.row * inp.stride + at.item * W)...);
    store_floats<W>(out + at.row * stride + at.item * W, y);
}

}  // namespace elementwise_detail

// out and inputs are [N, C] of T. f takes as many floats as there are inputs and returns a float.
template <typename T, typename F, typename... Inputs>
void launch_elementwise(const char* op, const Tensor& out, F f, Stream stream, const Inputs&... inputs) {
    using namespace elementwise_detail;
    const int64_t N = out.shape[0], C = out.shape[1];
    if (N * C == 0) return;
    // Contiguous matrices are treated as one long row.
    const bool flat = out.contiguous() && (inputs.contiguous() && ...);
    const int64_t rows = flat ? 1 : N, columns = flat ? N * C : C;
    const bool full = columns % FULL_WIDTH<T> == 0 && rows_aligned({out, inputs...});
    dispatch_width<T>(full, [&](auto width) {
        constexpr int W = decltype(width)::value;
        elementwise_kernel<W><<<grid_of(ceil_div(rows * (columns / W), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            out.as<T>(), row_stride(out), rows, columns, f, Operand<T>{inputs.template as<T>(), row_stride(inputs)}...);
    });
    check_launch(op, stream);
}
