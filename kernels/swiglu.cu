// A thread takes one vector of gate and the same one of up. LLaMA 1B, bf16, N = 8,192 tokens, I = 8,192: a row is 1,024
// vectors of 8, four blocks; 32,768 blocks in all. Forward moves 6 bytes an element of out, 403 MB; backward with out
// 12, 805 MB.
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/swiglu.h"

namespace {

constexpr int THREADS = 256;

// W inner channels a thread.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS)
    forward_kernel(T* out, int64_t out_stride, const T* gate_up, int64_t gate_up_stride, int64_t N, int64_t I) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= N * (I / W)) return;
    const RowItem at = row_item(i, I / W);
    const T* row = gate_up + at.row * gate_up_stride + at.item * W;
    const Floats<W> gate = load_floats<W>(row), up = load_floats<W>(row + I);
    Floats<W> y;
#pragma unroll
    for (int k = 0; k < W; k++) y[k] = mlp_activation::SwigluForward<T>{}(gate[k], up[k]);
    store_floats<W>(out + at.row * out_stride + at.item * W, y);
}

// dgate_up may be the same memory as gate_up, and out as dout: a thread writes only what it has read.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS)
    backward_kernel(T* dgate_up, int64_t dgate_up_stride, T* out, int64_t out_stride, const T* dout,
                    int64_t dout_stride, const T* gate_up, int64_t gate_up_stride, int64_t N, int64_t I) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= N * (I / W)) return;
    const RowItem at = row_item(i, I / W);
    const T* row = gate_up + at.row * gate_up_stride + at.item * W;
    const Floats<W> gate = load_floats<W>(row), up = load_floats<W>(row + I);
    const Floats<W> d = load_floats<W>(dout + at.row * dout_stride + at.item * W);
    Floats<W> dgate, dup, y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float2 gradients = mlp_activation::SwigluBackward<T>{}(d[k], gate[k], up[k]);
        dgate[k] = gradients.x;
        dup[k] = gradients.y;
        y[k] = mlp_activation::SwigluForward<T>{}(gate[k], up[k]);
    }
    T* drow = dgate_up + at.row * dgate_up_stride + at.item * W;
    store_floats<W>(drow, dgate);
    store_floats<W>(drow + I, dup);
    if (out) store_floats<W>(out + at.row * out_stride + at.item * W, y);
}

}  // namespace

void swiglu_forward(Tensor out, Tensor gate_up, Stream stream) {
    const char* op = "swiglu_forward";
    const DType dtype = check_activation_dtype(op, "out", out);
    check_matrix(op, "out", out, dtype);
    const int64_t N = out.shape[0], I = out.shape[1];
    check_matrix(op, "gate_up", gate_up, N, 2 * I, Given::Required, dtype);
    if (N * I == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(I % FULL_WIDTH<T> == 0 && rows_aligned({out, gate_up}), [&](auto width) {
            constexpr int W = decltype(width)::value;
            forward_kernel<W><<<grid_of(ceil_div(N * (I / W), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
                out.as<T>(), row_stride(out), gate_up.as<const T>(), row_stride(gate_up), N, I);
        });
    });
    check_launch(op, stream);
}

void swiglu_backward(Tensor dgate_up, Tensor out, Tensor dout, Tensor gate_up, Stream stream) {
    const char* op = "swiglu_backward";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    const int64_t N = dout.shape[0], I = dout.shape[1];
    check_matrix(op, "dgate_up", dgate_up, N, 2 * I, Given::Required, dtype);
    check_matrix(op, "out", out, N, I, Given::Optional, dtype);
    check_matrix(op, "gate_up", gate_up, N, 2 * I, Given::Required, dtype);
    if (N * I == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool aligned = rows_aligned({dgate_up, out, dout, gate_up});
        dispatch_width<T>(I % FULL_WIDTH<T> == 0 && aligned, [&](auto width) {
            constexpr int W = decltype(width)::value;
            backward_kernel<W><<<grid_of(ceil_div(N * (I / W), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
                dgate_up.as<T>(), row_stride(dgate_up), out ? out.as<T>() : nullptr, row_stride(out),
                dout.as<const T>(), row_stride(dout), gate_up.as<const T>(), row_stride(gate_up), N, I);
        });
    });
    check_launch(op, stream);
}
