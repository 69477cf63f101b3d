// A thread takes one vector of 16 bytes of each tensor: elementwise.cuh has the arithmetic for GELU. Of a gated
// function a thread takes one vector of gate and the same one of up. LLaMA 1B, bf16, N = 8,192 tokens, I = 8,192: a row
// is 1,024 vectors of 8, four blocks; 32,768 blocks in all. Forward moves 6 bytes an element of out, 403 MB; backward
// with out 12, 805 MB.
#include "kernels/activation.h"

#include "kernels/activation_check.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/mlp_activation.cuh"

namespace {

constexpr int GATED_THREADS = 256;

// W inner channels a thread.
template <int W, typename Forward, typename T>
__global__ void __launch_bounds__(GATED_THREADS)
    gated_forward_kernel(T* out, int64_t out_stride, const T* gate_up, int64_t gate_up_stride, int64_t N, int64_t I) {
    const int64_t i = blockIdx.x * int64_t(GATED_THREADS) + threadIdx.x;
    if (i >= N * (I / W)) return;
    const RowItem at = row_item(i, I / W);
    const T* row = gate_up + at.row * gate_up_stride + at.item * W;
    const Floats<W> gate = load_floats<W>(row), up = load_floats<W>(row + I);
    Floats<W> y;
#pragma unroll
    for (int k = 0; k < W; k++) y[k] = Forward{}(gate[k], up[k]);
    store_floats<W>(out + at.row * out_stride + at.item * W, y);
}

template <typename T>
struct GatedGradient {
    T* dinp;
    int64_t dinp_stride;
    T* out;  // or null
    int64_t out_stride;
    const T* dout;
    int64_t dout_stride;
    const T* inp;
    int64_t inp_stride;
};

// dinp may be the same memory as inp, and out as dout: a thread writes only what it has read.
template <int W, typename Functions, typename T>
__global__ void __launch_bounds__(GATED_THREADS) gated_backward_kernel(GatedGradient<T> a, int64_t N, int64_t I) {
    const int64_t i = blockIdx.x * int64_t(GATED_THREADS) + threadIdx.x;
    if (i >= N * (I / W)) return;
    const RowItem at = row_item(i, I / W);
    const T* row = a.inp + at.row * a.inp_stride + at.item * W;
    const Floats<W> gate = load_floats<W>(row), up = load_floats<W>(row + I);
    const Floats<W> d = load_floats<W>(a.dout + at.row * a.dout_stride + at.item * W);
    Floats<W> dgate, dup, y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float2 gradients = typename Functions::Backward{}(d[k], gate[k], up[k]);
        dgate[k] = gradients.x;
        dup[k] = gradients.y;
        y[k] = typename Functions::Forward{}(gate[k], up[k]);
    }
    T* drow = a.dinp + at.row * a.dinp_stride + at.item * W;
    store_floats<W>(drow, dgate);
    store_floats<W>(drow + I, dup);
    if (a.out) store_floats<W>(a.out + at.row * a.out_stride + at.item * W, y);
}

// Calls launch(width, grid) for the vectors of N rows of I inner channels.
template <typename T, typename Launch>
void launch_gated(const char* op, int64_t N, int64_t I, std::initializer_list<Tensor> tensors, Stream stream,
                  Launch launch) {
    if (N * I == 0) return;
    dispatch_width<T>(I % FULL_WIDTH<T> == 0 && rows_aligned(tensors), [&](auto width) {
        launch(width, grid_of(ceil_div(N * (I / decltype(width)::value), GATED_THREADS)));
    });
    check_launch(op, stream);
}

}  // namespace

void activation_forward(Activation f, Tensor out, Tensor inp, Stream stream) {
    const char* op = "activation_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const int64_t I = check_activation_forward(op, f, out, inp, dtype), N = inp.shape[0];
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        mlp_activation::dispatch<T>(f, [&](auto functions) {
            using Forward = typename decltype(functions)::Forward;
            if constexpr (!mlp_activation::GATED<Forward>) {
                launch_elementwise<T>(op, out, Forward{}, stream, inp);
            } else {
                launch_gated<T>(op, N, I, {out, inp}, stream, [&](auto width, dim3 grid) {
                    gated_forward_kernel<decltype(width)::value, Forward>
                        <<<grid, GATED_THREADS, 0, cuda_stream(stream)>>>(out.as<T>(), row_stride(out),
                                                                          inp.as<const T>(), row_stride(inp), N, I);
                });
            }
        });
    });
}

void activation_backward(Activation f, Tensor dinp, Tensor out, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "activation_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const int64_t I = check_activation_backward(op, f, dinp, out, dout, inp, dtype), N = inp.shape[0];
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        mlp_activation::dispatch<T>(f, [&](auto functions) {
            using Functions = decltype(functions);
            if constexpr (!mlp_activation::GATED<typename Functions::Forward>) {
                launch_elementwise<T>(op, dinp, typename Functions::Backward{}, stream, dout, inp);
            } else {
                const GatedGradient<T> a{.dinp = dinp.as<T>(),
                                         .dinp_stride = row_stride(dinp),
                                         .out = out ? out.as<T>() : nullptr,
                                         .out_stride = row_stride(out),
                                         .dout = dout.as<const T>(),
                                         .dout_stride = row_stride(dout),
                                         .inp = inp.as<const T>(),
                                         .inp_stride = row_stride(inp)};
                launch_gated<T>(op, N, I, {dinp, out, dout, inp}, stream, [&](auto width, dim3 grid) {
                    gated_backward_kernel<decltype(width)::value, Functions>
                        <<<grid, GATED_THREADS, 0, cuda_stream(stream)>>>(a, N, I);
                });
            }
        });
    });
}
