// A block for each row of logits, which is read from memory once: the first pass keeps its vectors in shared memory for
// the second. What does not fit there is read again from L2.
//
//                     row up to 112 KiB               longer row
//   threads           512                             1024
//   shared memory     the row + 256 B                 up to 225 KiB of the row + 256 B
//   registers         63 (bf16), 48 (fp32); without the gradient 48 and 40; with a softcap 56 to 64 and 47 to 48
//   blocks per SM     2: one reads while the other writes    1
//
// GPT-2 124M: V = 50257, Vp = 50304. bf16: a row has 98.25 KiB, so 512 threads and 2 blocks on an SM of an H100 (228
// KiB of shared memory, 65536 registers = 2·512·64); a thread has 12 or 13 of the 6288 vectors. fp32: 196.5 KiB, so
// 1024 threads and 1 block. B=64, T=1024: 65536 blocks, in as many launches as the driver cuts the tokens into chunks.
#include "kernels/cross_entropy.h"

#include <cfloat>

#include "kernels/cross_entropy_check.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/softcap_values.cuh"
#include "kernels/softcap.h"

namespace {

// exp(x − max)
template <typename T>
__device__ __forceinline__ float exp_below(float x, float max) {
    return logit_exp<T>(x - max);
}

// The online softmax of Milakov and Gimelshein (2018): Σ exp(x − max) for the maximum so far. The maximum starts at the
// lowest finite number, so that logits of −∞ do not give ∞ − ∞. It ignores NaN; the sum does not.
template <typename T>
struct RunningSum {
    float max = -FLT_MAX, sum = 0;

    template <int W>
    __device__ __forceinline__ void add(const Floats<W>& x) {
        float next = max;
#pragma unroll
        for (int k = 0; k < W; k++) next = fmaxf(next, x[k]);
        sum *= exp_below<T>(max, next);
        max = next;
#pragma unroll
        for (int k = 0; k < W; k++) sum += exp_below<T>(x[k], max);
    }
};

template <bool CAPPED, typename T>
__device__ __forceinline__ CappedLogit cap(float x, Softcap softcap) {
    if constexpr (CAPPED) return capped<T>(x, softcap);
    return {x, 1};
}

// kept: vectors of the row that stay in shared memory between the passes. A thread reads back only what it has stored
// itself. dloss and kept are used only if GRADIENT.
template <bool GRADIENT, bool CAPPED, int THREADS, int W, typename T>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    cross_entropy_kernel(float* losses, T* logits, int64_t stride, const int32_t* targets, int64_t V, int64_t Vp,
                         int64_t kept, float dloss, Softcap softcap) {
    constexpr int UNROLL = 4;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    auto* row_start = reinterpret_cast<Pack<T, W>*>(dynamic_shared);
    const int64_t n = blockIdx.x, packs = Vp / W, whole = V / W;  // whole: vectors without padding
    const int32_t target = targets[n];
    T* row = logits + n * stride;
    if (target == IGNORE_TARGET) {
        if (threadIdx.x == 0) losses[n] = 0;
        if (GRADIENT)
            for (int64_t i = threadIdx.x; i < packs; i += THREADS) store_floats<W>(row + i * W, Floats<W>{});
        return;
    }

    RunningSum<T> mine;
    int64_t i = threadIdx.x;
    for (; i + (UNROLL - 1) * THREADS < whole; i += UNROLL * THREADS) {
        Pack<T, W> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = load_pack<W>(row + (i + u * THREADS) * W);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (GRADIENT && i + u * THREADS < kept) row_start[i + u * THREADS] = x[u];
            Floats<W> z = as_floats(x[u]);
#pragma unroll
            for (int k = 0; k < W; k++) z[k] = cap<CAPPED, T>(z[k], softcap).value;
            mine.add(z);
        }
    }
    for (; i < packs; i += THREADS) {
        const Pack<T, W> pack = load_pack<W>(row + i * W);
        if (GRADIENT && i < kept) row_start[i] = pack;
        Floats<W> x = as_floats(pack);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = cap<CAPPED, T>(x[k], softcap).value;
        if (i >= whole)
#pragma unroll
            for (int k = 0; k < W; k++)
                if (i * W + k >= V) x[k] = -INFINITY;
        mine.add(x);
    }
    const float max = block_max<THREADS>(mine.max);
    const float sum = block_sum<THREADS>(mine.sum * exp_below<T>(mine.max, max));

    const bool inside = target >= 0 && target < V;
    if (threadIdx.x == 0) {
        // max − logits[target] first: max + ln Σ would round the loss to the precision of the logits.
        losses[n] = inside ? logf(sum) + (max - cap<CAPPED, T>(as_float(row[target]), softcap).value) : NAN;
    }
    if constexpr (GRADIENT) {
        __syncthreads();  // logits[target] has been read
        const float scale = dloss / sum;
        for (int64_t j = threadIdx.x; j < packs; j += THREADS) {
            Floats<W> d = as_floats(j < kept ? row_start[j] : load_pack<W>(row + j * W));
            Floats<W> slope;
#pragma unroll
            for (int k = 0; k < W; k++) {
                const CappedLogit z = cap<CAPPED, T>(d[k], softcap);
                slope[k] = z.slope;
                d[k] = exp_below<T>(z.value, max) * scale * z.slope;
            }
            if (j == target / W || j >= whole) {
#pragma unroll
                for (int k = 0; k < W; k++) {
                    if (j * W + k == target) d[k] -= dloss * slope[k];
                    if (j * W + k >= V) d[k] = 0;
                }
            }
            store_floats<W>(row + j * W, d);
        }
    }
}

template <bool GRADIENT, int THREADS, int W, typename T>
void launch_rows(const char* op, Tensor losses, Tensor logits, Tensor targets, int64_t V, int64_t kept, float dloss,
                 Softcap softcap, Stream stream) {
    const auto kernel = softcap ? cross_entropy_kernel<GRADIENT, true, THREADS, W, T>
                                : cross_entropy_kernel<GRADIENT, false, THREADS, W, T>;
    const int shared = int(kept * int64_t(sizeof(Pack<T, W>)));
    if (shared) cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), op);
    kernel<<<grid_of(logits.shape[0]), THREADS, size_t(shared), cuda_stream(stream)>>>(
        losses.as<float>(), logits.as<T>(), row_stride(logits), targets.as<int32_t>(), V, logits.shape[1], kept, dloss,
        softcap);
}

template <bool GRADIENT>
void launch(const char* op, Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss, Softcap softcap,
            Stream stream) {
    const DType dtype = check_activation_dtype(op, "logits", logits);
    const CrossEntropySizes z = check_cross_entropy(op, dtype, losses, logits, targets, V, softcap);
    const int64_t N = z.N, Vp = z.Vp;
    if (N == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(Vp % FULL_WIDTH<T> == 0 && rows_aligned({logits}), [&](auto width) {
            constexpr int W = decltype(width)::value;
            // Two blocks on an SM if two rows fit, else one block with as many threads. Each block also needs 1 KiB
            // for the system and some for its sums. Without the gradient nothing is kept, but the number of threads,
            // and so the bits of the loss, are the same.
            constexpr int64_t RESERVED = 2048;
            const int64_t row = Vp * int64_t(sizeof(T));
            const int64_t kept_bytes = GRADIENT ? std::min(row, max_shared_bytes() - RESERVED) : 0;
            const int64_t kept = kept_bytes / int64_t(sizeof(Pack<T, W>));
            if (row <= shared_bytes_per_sm() / 2 - RESERVED)
                launch_rows<GRADIENT, 512, W, T>(op, losses, logits, targets, V, kept, dloss, softcap, stream);
            else
                launch_rows<GRADIENT, 1024, W, T>(op, losses, logits, targets, V, kept, dloss, softcap, stream);
        });
    });
    check_launch(op, stream);
}

constexpr int BACKWARD_THREADS = 512;

// A block for each row, which is read and written once. GPT-2 124M: a thread has 12 or 13 of the 6288 vectors of a row
// in bf16.
template <bool CAPPED, int W, typename T>
__global__ void __launch_bounds__(BACKWARD_THREADS)
    backward_kernel(T* logits, int64_t stride, const float* losses, const float* dlosses, const int32_t* targets,
                    int64_t V, int64_t Vp, Softcap softcap) {
    const int64_t n = blockIdx.x, packs = Vp / W;
    const int32_t target = targets[n];
    T* row = logits + n * stride;
    if (target == IGNORE_TARGET) {
        for (int64_t j = threadIdx.x; j < packs; j += BACKWARD_THREADS) store_floats<W>(row + j * W, Floats<W>{});
        return;
    }
    const bool inside = target >= 0 && target < V;
    const float target_logit = cap<CAPPED, T>(inside ? as_float(row[target]) : NAN, softcap).value;
    const float loss = losses[n], dloss = dlosses[n];
    __syncthreads();  // every thread has read logits[target]
    for (int64_t j = threadIdx.x; j < packs; j += BACKWARD_THREADS) {
        const int hit = int(target - j * W), valid = int(V - j * W);  // within the vector: the target, and the end
        Floats<W> d = load_floats<W>(row + j * W);
#pragma unroll
        for (int k = 0; k < W; k++) {
            const CappedLogit z = cap<CAPPED, T>(d[k], softcap);
            // The difference of the logits first: target_logit + loss would round to the precision of the logits.
            const float p = logit_exp<T>(z.value - target_logit - loss);
            d[k] = k < valid ? (p - float(k == hit)) * dloss * z.slope : 0;
        }
        store_floats<W>(row + j * W, d);
    }
}

}  // namespace

void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, Softcap softcap, Stream stream) {
    launch<false>("cross_entropy_forward", losses, logits, targets, V, 0, softcap, stream);
}

void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    Softcap softcap, Stream stream) {
    launch<true>("cross_entropy_forward_backward", losses, logits, targets, V, dloss, softcap, stream);
}

void cross_entropy_backward(Tensor logits, Tensor losses, Tensor dlosses, Tensor targets, int64_t V, Softcap softcap,
                            Stream stream) {
    const char* op = "cross_entropy_backward";
    const DType dtype = check_activation_dtype(op, "logits", logits);
    const CrossEntropySizes z = check_cross_entropy_backward(op, dtype, logits, losses, dlosses, targets, V, softcap);
    if (z.N == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(z.Vp % FULL_WIDTH<T> == 0 && rows_aligned({logits}), [&](auto width) {
            constexpr int W = decltype(width)::value;
            const auto kernel = softcap ? backward_kernel<true, W, T> : backward_kernel<false, W, T>;
            kernel<<<grid_of(z.N), BACKWARD_THREADS, 0, cuda_stream(stream)>>>(logits.as<T>(), row_stride(logits),
                                                                               losses.as<float>(), dlosses.as<float>(),
                                                                               targets.as<int32_t>(), V, z.Vp, softcap);
        });
    });
    check_launch(op, stream);
}
