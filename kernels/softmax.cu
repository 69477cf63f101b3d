// GROUP threads share a row: a warp if rows are short, a block of 256 if they are long. Each thread holds PACKS vectors
// of the row in registers, so that memory is read once. Rows that are longer or not aligned take the *_any kernels,
// which read the row from the cache again for each pass.
//
//                     warp                            block
//   longest row       1024 (16-bit), 512 (fp32)       8192 (16-bit), 4096 (fp32)
//   threads a block   256 (8 rows)                    256 (1 row)
//   shared memory     -                               64 B
//   registers         25 to 52 forward, 22 to 47 backward; 29 to 52 and 26 to 48
//   blocks per SM     4 to 8                          4 to 8
//
// The attention scores of GPT-2 124M, B=64, T=1024: R = 64·12·1024 = 786432 rows of K = 1024. bf16: a row is 4 vectors
// for each lane of a warp, so 98304 blocks with 52 registers, 4 blocks on an SM. fp32: a row is one vector for each of
// 256 threads, so 786432 blocks with 29 registers, 8 blocks on an SM.
#include "kernels/softmax.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/softmax_check.h"

namespace {

constexpr int THREADS = 256;

template <typename T>
struct ForwardArguments {
    T* out;
    const T* inp;
    const uint8_t* mask;  // null: none
    int64_t out_stride, inp_stride, mask_stride;
    int64_t R, Q, K;
    float scale;
    bool causal;
};

// Scores of columns [j, j + W) of a row, −∞ where query i does not see the key.
template <int W, typename T>
__device__ __forceinline__ Floats<W> scores(const ForwardArguments<T>& a, const Pack<T, W>& inp, int64_t j, int64_t i,
                                            int64_t seen) {
    Floats<W> s = as_floats(inp);
#pragma unroll
    for (int k = 0; k < W; k++)
        s[k] = j + k < seen && (!a.mask || a.mask[i * a.mask_stride + j + k]) ? a.scale * s[k] : -INFINITY;
    return s;
}

template <typename T>
__device__ __forceinline__ int64_t keys_seen(const ForwardArguments<T>& a, int64_t i) {
    return a.causal ? min(max(i + a.K - a.Q + 1, int64_t(0)), a.K) : a.K;
}

template <int GROUP, int PACKS, int W, typename T>
__global__ void __launch_bounds__(THREADS) forward_kernel(ForwardArguments<T> a) {
    const int64_t r = blockIdx.x * int64_t(THREADS / GROUP) + threadIdx.x / GROUP;
    if (r >= a.R) return;  // the whole group returns
    const int64_t first = threadIdx.x % GROUP * W, i = r % a.Q, seen = keys_seen(a, i);
    Pack<T, W> inp[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t j = first + p * (GROUP * W);
        if (j < seen) inp[p] = load_pack<W>(a.inp + r * a.inp_stride + j);
    }
    Floats<W> x[PACKS];
    float max = -INFINITY;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t j = first + p * (GROUP * W);
        if (j >= seen) continue;
        x[p] = scores<W>(a, inp[p], j, i, seen);
#pragma unroll
        for (int k = 0; k < W; k++) max = nan_max(max, x[p][k]);
    }
    max = block_max<GROUP>(max);
    if (max == -INFINITY) max = 0;  // the row sees nothing: exp(−∞ − 0) = 0 everywhere
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (first + p * (GROUP * W) >= seen) continue;
#pragma unroll
        for (int k = 0; k < W; k++) {
            x[p][k] = exp_for<T>(x[p][k] - max);
            sum += x[p][k];
        }
    }
    sum = block_sum<GROUP>(sum);
    const float inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t j = first + p * (GROUP * W);
        if (j >= a.K) continue;
        Floats<W> y;
#pragma unroll
        for (int k = 0; k < W; k++) y[k] = j + k < seen ? x[p][k] * inverse : 0;  // also 0 in a row of NaN
        store_floats<W>(a.out + r * a.out_stride + j, y);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) forward_any_kernel(ForwardArguments<T> a) {
    const int64_t r = blockIdx.x, i = r % a.Q, seen = keys_seen(a, i);
    const auto score = [&](int64_t j) {
        return scores<1>(a, load_pack<1>(a.inp + r * a.inp_stride + j), j, i, seen)[0];
    };
    float max = -INFINITY;
    for (int64_t j = threadIdx.x; j < seen; j += THREADS) max = nan_max(max, score(j));
    max = block_max<THREADS>(max);
    if (max == -INFINITY) max = 0;
    float sum = 0;
    for (int64_t j = threadIdx.x; j < seen; j += THREADS) sum += exp_for<T>(score(j) - max);
    sum = block_sum<THREADS>(sum);
    const float inverse = sum == 0 ? 0 : 1 / sum;
    for (int64_t j = threadIdx.x; j < a.K; j += THREADS)
        a.out[r * a.out_stride + j] = from_float<T>(j < seen ? exp_for<T>(score(j) - max) * inverse : 0);
}

template <typename T>
struct BackwardArguments {
    T* dinp;
    const T *dout, *out;
    int64_t dinp_stride, dout_stride, out_stride;
    int64_t R, K;
    float scale;
};

template <int GROUP, int PACKS, int W, typename T>
__global__ void __launch_bounds__(THREADS) backward_kernel(BackwardArguments<T> a) {
    const int64_t r = blockIdx.x * int64_t(THREADS / GROUP) + threadIdx.x / GROUP;
    if (r >= a.R) return;
    const int64_t first = threadIdx.x % GROUP * W;
    Pack<T, W> dout[PACKS], out[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t j = first + p * (GROUP * W);
        if (j >= a.K) continue;
        dout[p] = load_pack<W>(a.dout + r * a.dout_stride + j);
        out[p] = load_pack<W>(a.out + r * a.out_stride + j);
    }
    float dot = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (first + p * (GROUP * W) >= a.K) continue;
        const Floats<W> g = as_floats(dout[p]), y = as_floats(out[p]);
#pragma unroll
        for (int k = 0; k < W; k++) dot += g[k] * y[k];
    }
    dot = block_sum<GROUP>(dot);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t j = first + p * (GROUP * W);
        if (j >= a.K) continue;
        const Floats<W> g = as_floats(dout[p]), y = as_floats(out[p]);
        Floats<W> d;
#pragma unroll
        for (int k = 0; k < W; k++) d[k] = a.scale * y[k] * (g[k] - dot);
        store_floats<W>(a.dinp + r * a.dinp_stride + j, d);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_any_kernel(BackwardArguments<T> a) {
    const int64_t r = blockIdx.x;
    const T *dout = a.dout + r * a.dout_stride, *out = a.out + r * a.out_stride;
    float dot = 0;
    for (int64_t j = threadIdx.x; j < a.K; j += THREADS) dot += as_float(dout[j]) * as_float(out[j]);
    dot = block_sum<THREADS>(dot);
    for (int64_t j = threadIdx.x; j < a.K; j += THREADS)
        a.dinp[r * a.dinp_stride + j] = from_float<T>(a.scale * as_float(out[j]) * (as_float(dout[j]) - dot));
}

// Calls f(GROUP, PACKS), as integral constants, for rows of K columns. Returns false if no instance holds such a row.
template <int W, typename F>
bool dispatch_row(int64_t K, bool aligned, F f) {
    constexpr int64_t WARP_VECTOR = WARP * W, BLOCK_VECTOR = THREADS * W;
    const std::integral_constant<int, WARP> warp;
    const std::integral_constant<int, THREADS> block;
    if (!aligned || K % W != 0 || K > 4 * BLOCK_VECTOR) return false;
    if (K <= WARP_VECTOR)
        f(warp, std::integral_constant<int, 1>{});
    else if (K <= 4 * WARP_VECTOR)
        f(warp, std::integral_constant<int, 4>{});
    else if (K <= BLOCK_VECTOR)
        f(block, std::integral_constant<int, 1>{});
    else
        f(block, std::integral_constant<int, 4>{});
    return true;
}

}  // namespace

void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream stream) {
    const char* op = "softmax_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const SoftmaxSizes z = check_softmax_forward(op, dtype, out, inp, mask, Q);
    const int64_t R = z.R, K = z.K;
    if (R * K == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int W = FULL_WIDTH<T>;
        ForwardArguments<T> a{};
        a.out = out.as<T>();
        a.out_stride = out.stride[0];
        a.inp = inp.as<const T>();
        a.inp_stride = inp.stride[0];
        if (mask) {
            a.mask = mask.as<const uint8_t>();
            a.mask_stride = mask.stride[0];
        }
        a.R = R;
        a.Q = Q;
        a.K = K;
        a.scale = scale;
        a.causal = causal;
        const bool in_registers = dispatch_row<W>(K, rows_aligned({out, inp}), [&](auto group, auto packs) {
            constexpr int GROUP = decltype(group)::value, PACKS = decltype(packs)::value;
            forward_kernel<GROUP, PACKS, W>
                <<<grid_of(ceil_div(R, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(a);
        });
        if (!in_registers) forward_any_kernel<<<grid_of(R), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    check_launch(op, stream);
}

void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream stream) {
    const char* op = "softmax_backward";
    const DType dtype = check_activation_dtype(op, "out", out);
    const SoftmaxSizes z = check_softmax_backward(op, dtype, dinp, dout, out);
    const int64_t R = z.R, K = z.K;
    if (R * K == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int W = FULL_WIDTH<T>;
        BackwardArguments<T> a{};
        a.dinp = dinp.as<T>();
        a.dinp_stride = dinp.stride[0];
        a.dout = dout.as<const T>();
        a.dout_stride = dout.stride[0];
        a.out = out.as<const T>();
        a.out_stride = out.stride[0];
        a.R = R;
        a.K = K;
        a.scale = scale;
        const bool in_registers = dispatch_row<W>(K, rows_aligned({dinp, dout, out}), [&](auto group, auto packs) {
            constexpr int GROUP = decltype(group)::value, PACKS = decltype(packs)::value;
            backward_kernel<GROUP, PACKS, W>
                <<<grid_of(ceil_div(R, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(a);
        });
        if (!in_registers) backward_any_kernel<<<grid_of(R), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    check_launch(op, stream);
}
