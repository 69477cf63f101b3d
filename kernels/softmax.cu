#include "kernels/cuda_common.cuh"
#include "kernels/softmax.h"

namespace {

// A row is shared by GROUP threads: a warp where rows are short, a block of 256 where they are long. It is read again
// for each pass; by then it lies in the cache.
constexpr int THREADS = 256;
constexpr int64_t LONG_ROW = 2048;

// For GROUP = WARP block_sum and block_max are those of a warp.
template <int GROUP, int W, typename T>
__global__ void __launch_bounds__(THREADS)
    forward_kernel(T* out, int64_t out_stride, const T* inp, int64_t inp_stride, const uint8_t* mask,
                   int64_t mask_stride, int64_t R, int64_t Q, int64_t K, float scale, bool causal) {
    const int64_t r = blockIdx.x * int64_t(THREADS / GROUP) + threadIdx.x / GROUP;
    if (r >= R) return;  // a whole group
    const int64_t first = threadIdx.x % GROUP * W;
    const int64_t i = r % Q, seen = causal ? min(max(i + K - Q + 1, int64_t(0)), K) : K;
    const T* x = inp + r * inp_stride;
    T* y = out + r * out_stride;
    const auto scores = [&](int64_t j) {
        Floats<W> s = load_floats<W>(x + j);
#pragma unroll
        for (int k = 0; k < W; k++)
            s[k] = j + k < seen && (!mask || mask[i * mask_stride + j + k]) ? scale * s[k] : -INFINITY;
        return s;
    };

    float max = -INFINITY;
    for (int64_t j = first; j < seen; j += GROUP * W) {
        const Floats<W> s = scores(j);
#pragma unroll
        for (int k = 0; k < W; k++) max = nan_max(max, s[k]);
    }
    max = block_max<GROUP>(max);
    if (max == -INFINITY) {  // the row sees nothing
        for (int64_t j = first; j < K; j += GROUP * W) store_floats<W>(y + j, Floats<W>{});
        return;
    }
    float sum = 0;
    for (int64_t j = first; j < seen; j += GROUP * W) {
        const Floats<W> s = scores(j);
#pragma unroll
        for (int k = 0; k < W; k++) sum += j + k < seen ? exp_for<T>(s[k] - max) : 0;
    }
    const float inverse = 1 / block_sum<GROUP>(sum);
    for (int64_t j = first; j < K; j += GROUP * W) {
        Floats<W> p{};
        if (j < seen) {
            p = scores(j);
#pragma unroll
            for (int k = 0; k < W; k++) p[k] = j + k < seen ? exp_for<T>(p[k] - max) * inverse : 0;
        }
        store_floats<W>(y + j, p);
    }
}

template <int GROUP, int W, typename T>
__global__ void __launch_bounds__(THREADS)
    backward_kernel(T* dinp, int64_t dinp_stride, const T* dout, int64_t dout_stride, const T* out, int64_t out_stride,
                    int64_t R, int64_t K, float scale) {
    const int64_t r = blockIdx.x * int64_t(THREADS / GROUP) + threadIdx.x / GROUP;
    if (r >= R) return;
    const int64_t first = threadIdx.x % GROUP * W;
    const T *dout_row = dout + r * dout_stride, *out_row = out + r * out_stride;
    float dot = 0;
    for (int64_t j = first; j < K; j += GROUP * W) {
        const Floats<W> g = load_floats<W>(dout_row + j), p = load_floats<W>(out_row + j);
#pragma unroll
        for (int k = 0; k < W; k++) dot += g[k] * p[k];
    }
    dot = block_sum<GROUP>(dot);
    for (int64_t j = first; j < K; j += GROUP * W) {
        const Floats<W> g = load_floats<W>(dout_row + j), p = load_floats<W>(out_row + j);
        Floats<W> d;
#pragma unroll
        for (int k = 0; k < W; k++) d[k] = scale * p[k] * (g[k] - dot);
        store_floats<W>(dinp + r * dinp_stride + j, d);
    }
}

// f(GROUP, W) as integral constants.
template <typename T, typename F>
void dispatch_row(int64_t K, bool aligned, F f) {
    dispatch_width<T>(aligned && K % FULL_WIDTH<T> == 0, [&](auto width) {
        if (K < LONG_ROW)
            f(std::integral_constant<int, WARP>{}, width);
        else
            f(std::integral_constant<int, THREADS>{}, width);
    });
}

}  // namespace

void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream stream) {
    const char* op = "softmax_forward";
    require(inp && inp.rank == 2, op, ": inp is ", shape_string(inp), ", expected [R, K]");
    const int64_t R = inp.shape[0], K = inp.shape[1];
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_tensor(op, "inp", inp, dtype, {R, K});
    check_tensor(op, "out", out, dtype, {R, K});
    require(Q > 0 && R % Q == 0, op, ": ", R, " rows are not a multiple of Q = ", Q);
    check_tensor(op, "mask", mask, DType::U8, {Q, K}, Given::Optional);
    if (R * K == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_row<T>(K, rows_aligned({out, inp}), [&](auto group, auto width) {
            constexpr int GROUP = decltype(group)::value, W = decltype(width)::value;
            forward_kernel<GROUP, W><<<grid_of(ceil_div(R, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(
                out.as<T>(), out.stride[0], inp.as<const T>(), inp.stride[0], mask ? mask.as<const uint8_t>() : nullptr,
                mask ? mask.stride[0] : 0, R, Q, K, scale, causal);
        });
    });
    check_launch(op, stream);
}

void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream stream) {
    const char* op = "softmax_backward";
    require(out && out.rank == 2, op, ": out is ", shape_string(out), ", expected [R, K]");
    const int64_t R = out.shape[0], K = out.shape[1];
    const DType dtype = check_activation_dtype(op, "out", out);
    check_tensor(op, "dinp", dinp, dtype, {R, K});
    check_tensor(op, "dout", dout, dtype, {R, K});
    check_tensor(op, "out", out, dtype, {R, K});
    if (R * K == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_row<T>(K, rows_aligned({dinp, dout, out}), [&](auto group, auto width) {
            constexpr int GROUP = decltype(group)::value, W = decltype(width)::value;
            backward_kernel<GROUP, W><<<grid_of(ceil_div(R, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(
                dinp.as<T>(), dinp.stride[0], dout.as<const T>(), dout.stride[0], out.as<const T>(), out.stride[0], R,
                K, scale);
        });
    });
    check_launch(op, stream);
}
