#include "kernels/cross_entropy.h"

#include <cfloat>

#include "kernels/cuda_common.cuh"

namespace {

constexpr int THREADS = 512;

// Σ exp(x − max) under the largest x so far (Milakov, Gimelshein 2018). It starts at the lowest number instead of −∞,
// so that logits of −∞ meet no ∞ − ∞.
struct RunningSum {
    float max = -FLT_MAX, sum = 0;
};

template <typename T, int W>
__device__ __forceinline__ void add(RunningSum& s, const Floats<W>& x) {
    float max = s.max;
#pragma unroll
    for (int k = 0; k < W; k++) max = nan_max(max, x[k]);
    s.sum *= exp_for<T>(s.max - max);
    s.max = max;
#pragma unroll
    for (int k = 0; k < W; k++) s.sum += exp_for<T>(x[k] - max);
}

// Columns [c, c + W) of which those below V count.
template <int W, typename T>
__device__ __forceinline__ Floats<W> load_logits(const T* row, int64_t c, int64_t V) {
    Floats<W> x = load_floats<W>(row + c);
    if (c + W > V)
#pragma unroll
        for (int k = 0; k < W; k++)
            if (c + k >= V) x[k] = -INFINITY;
    return x;
}

// A block per row. The row is read from memory once: the second pass finds it in L2 and takes it from the end, where it
// is freshest. dloss is looked at only where GRADIENT.
template <bool GRADIENT, int W, typename T>
__global__ void __launch_bounds__(THREADS, 2)
    cross_entropy_kernel(float* losses, T* logits, int64_t stride, const int32_t* targets, int64_t V, int64_t Vp,
                         float dloss) {
    constexpr int UNROLL = 4;
    const int64_t n = blockIdx.x, packs = Vp / W, used = (V + W - 1) / W;
    const int32_t target = targets[n];
    T* row = logits + n * stride;
    if (target == IGNORE_TARGET) {
        if (threadIdx.x == 0) losses[n] = 0;
        if (GRADIENT)
            for (int64_t i = threadIdx.x; i < packs; i += THREADS) store_floats<W>(row + i * W, Floats<W>{});
        return;
    }

    RunningSum mine;
    int64_t i = threadIdx.x;
    for (; i + (UNROLL - 1) * THREADS < used; i += UNROLL * THREADS) {
        Floats<W> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = load_logits<W>(row, (i + u * THREADS) * W, V);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) add<T>(mine, x[u]);
    }
    for (; i < used; i += THREADS) add<T>(mine, load_logits<W>(row, i * W, V));
    const float max = block_max<THREADS>(mine.max);
    const float sum = block_sum<THREADS>(mine.sum * exp_for<T>(mine.max - max));

    const bool inside = target >= 0 && target < V;
    if (threadIdx.x == 0) {
        // max − logits[target] before the logarithm is added: max + ln Σ would round the loss to the logits' last
        // digit.
        losses[n] = inside ? logf(sum) + (max - as_float(row[target])) : NAN;
    }
    if constexpr (GRADIENT) {
        __syncthreads();  // logits[target] has been read
        const float scale = dloss / sum;
        for (int64_t j = packs - 1 - int64_t(threadIdx.x); j >= 0; j -= THREADS) {
            const int64_t c = j * W;
            Floats<W> d = load_logits<W>(row, c, V);
#pragma unroll
            for (int k = 0; k < W; k++) {
                d[k] = exp_for<T>(d[k] - max) * scale;
                if (c + k == target) d[k] -= dloss;
                if (c + k >= V) d[k] = 0;  // NaN − NaN in the row must not reach the padding
            }
            store_floats<W>(row + c, d);
        }
    }
}

template <bool GRADIENT>
void launch(const char* op, Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss, Stream stream) {
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_matrix(op, "logits", logits, dtype);
    const int64_t N = logits.shape[0], Vp = logits.shape[1];
    require(V >= 1 && V <= Vp, op, ": V is ", V, ", expected 1 … ", Vp, ", the columns of logits");
    check_tensor(op, "losses", losses, DType::F32, {N});
    check_tensor(op, "targets", targets, DType::I32, {N});
    if (N == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(Vp % FULL_WIDTH<T> == 0 && rows_aligned({logits}), [&](auto width) {
            cross_entropy_kernel<GRADIENT, decltype(width)::value><<<grid_of(N), THREADS, 0, cuda_stream(stream)>>>(
                losses.as<float>(), logits.as<T>(), row_stride(logits), targets.as<int32_t>(), V, Vp, dloss);
        });
    });
    check_launch(op, stream);
}

}  // namespace

void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, Stream stream) {
    launch<false>("cross_entropy_forward", losses, logits, targets, V, 0, stream);
}

void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    Stream stream) {
    launch<true>("cross_entropy_forward_backward", losses, logits, targets, V, dloss, stream);
}
