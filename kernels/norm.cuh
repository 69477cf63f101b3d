// LayerNorm and RMSNorm are one kernel: RMSNorm is the one that is not centred, without mean and bias.
//
// A group of GROUP threads (a warp, or a whole block for long rows) holds a row, so that memory is read once: thread i
// of the group owns the vectors i, i + GROUP, i + 2·GROUP, … of the row, PACKS of them. The forward pass has them in
// registers, the backward pass in shared memory. Rows that are longer, not aligned or of an odd length take the loops
// below, which read the row again from the cache.
//
// Gradients of weight and bias are sums over all rows. Blocks stay for many rows and keep their sums in registers; what
// each block has summed goes to scratch, and a second kernel adds the blocks up in order. The number of blocks is a
// property of the GPU, so that bits are the same for the same GPU.
#pragma once

#include <cuda_pipeline.h>

#include "kernels/cuda_common.cuh"

namespace norm_detail {

constexpr int THREADS = 256;
constexpr int WIDTH = 8;  // elements of a vector: 16 bytes of bf16, 32 of fp32
constexpr int64_t LONGEST_IN_REGISTERS = int64_t(THREADS) * WIDTH * 4;

template <typename T>
struct ForwardArguments {
    T* out;
    T* sum;  // null: not stored
    float *mean, *rstd;
    const T* inp;
    const T* residual;
    const float *weight, *bias;
    int64_t out_stride, sum_stride, inp_stride, residual_stride;
    int64_t N;
    int64_t C;
    float eps;
};

template <typename T>
struct BackwardArguments {
    T* dinp;
    float* partials;  // [blocks, 2·C] (dweight, dbias), or [blocks, C]
    const T* dout;
    const T* dresidual;
    const T* inp;
    const float *weight, *mean, *rstd;
    int64_t dinp_stride, dout_stride, dresidual_stride, inp_stride;
    int64_t N;
    int64_t C;
};

// Into shared memory, 16 bytes at a time, past registers and L1.
template <typename T, int W>
__device__ __forceinline__ void copy_async(Pack<T, W>* to, const T* from) {
    static_assert(sizeof(*to) % 16 == 0);
#pragma unroll
    for (size_t byte = 0; byte < sizeof(*to); byte += 16)
        __pipeline_memcpy_async(reinterpret_cast<char*>(to) + byte, reinterpret_cast<const char*>(from) + byte, 16);
}

// x = inp + residual as it will be read again: rounded to T whether it is stored or not.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_x(const ForwardArguments<T>& a, int64_t n, int64_t c) {
    Pack<T, W> x = load_pack<W>(a.inp + n * a.inp_stride + c);
    if (a.residual) {
        const Pack<T, W> r = load_pack<W>(a.residual + n * a.residual_stride + c);
#pragma unroll
        for (int k = 0; k < W; k++) x.v[k] = from_float<T>(as_float(x.v[k]) + as_float(r.v[k]));
    }
    return x;
}

template <int W, typename T>
__device__ __forceinline__ void store_out(const ForwardArguments<T>& a, int64_t n, int64_t c, const Pack<T, W>& x,
                                          float mean, float rstd) {
    if (a.sum) store_pack(a.sum + n * a.sum_stride + c, x);
    const Floats<W> weight = load_floats<W>(a.weight + c);
    Floats<W> y;
#pragma unroll
    for (int k = 0; k < W; k++) y[k] = (as_float(x.v[k]) - mean) * rstd * weight[k];
    if (a.bias) {
        const Floats<W> bias = load_floats<W>(a.bias + c);
#pragma unroll
        for (int k = 0; k < W; k++) y[k] += bias[k];
    }
    store_floats<W>(a.out + n * a.out_stride + c, y);
}

// The variance from x − mean and not from Σx² − (Σx)²/C, which cancels where the mean is large.
template <bool CENTRED, int GROUP, int PACKS, typename T>
__global__ void __launch_bounds__(THREADS) forward_kernel(ForwardArguments<T> a) {
    constexpr int GROUPS = THREADS / GROUP, W = WIDTH;
    const int64_t n = blockIdx.x * int64_t(GROUPS) + threadIdx.x / GROUP;
    if (n >= a.N) return;  // a whole group
    const int64_t first = threadIdx.x % GROUP * W;
    Pack<T, W> x[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t c = first + p * (GROUP * W);
        if (c < a.C) x[p] = load_x<W>(a, n, c);
    }
    float mean = 0;
    if constexpr (CENTRED) {
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (first + p * (GROUP * W) < a.C)
#pragma unroll
                for (int k = 0; k < W; k++) mean += as_float(x[p].v[k]);
        mean = block_sum<GROUP>(mean) / float(a.C);
    }
    float squares = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++)
        if (first + p * (GROUP * W) < a.C)
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float d = as_float(x[p].v[k]) - mean;
                squares += d * d;
            }
    const float rstd = 1 / sqrtf(block_sum<GROUP>(squares) / float(a.C) + a.eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t c = first + p * (GROUP * W);
        if (c < a.C) store_out<W>(a, n, c, x[p], mean, rstd);
    }
    if (first == 0) {
        if (CENTRED && a.mean) a.mean[n] = mean;
        if (a.rstd) a.rstd[n] = rstd;
    }
}

// Any row, one block for each. `sum` may lie over inp or residual, so it is written in the last pass.
template <bool CENTRED, typename T>
__global__ void __launch_bounds__(THREADS) forward_any_kernel(ForwardArguments<T> a) {
    const int64_t n = blockIdx.x;
    float mean = 0;
    if constexpr (CENTRED) {
        for (int64_t c = threadIdx.x; c < a.C; c += THREADS) mean += as_float(load_x<1>(a, n, c).v[0]);
        mean = block_sum<THREADS>(mean) / float(a.C);
    }
    float squares = 0;
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS) {
        const float d = as_float(load_x<1>(a, n, c).v[0]) - mean;
        squares += d * d;
    }
    const float rstd = 1 / sqrtf(block_sum<THREADS>(squares) / float(a.C) + a.eps);
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS) store_out<1>(a, n, c, load_x<1>(a, n, c), mean, rstd);
    if (threadIdx.x == 0) {
        if (CENTRED && a.mean) a.mean[n] = mean;
        if (a.rstd) a.rstd[n] = rstd;
    }
}

// One vector of dinp − dresidual, with d = dout·weight.
template <bool CENTRED, int W>
__device__ __forceinline__ Floats<W> norm_gradient(const Floats<W>& dout, const Floats<W>& x, const Floats<W>& weight,
                                                   float mean, float rstd, float mean_d, float mean_dx) {
    Floats<W> dx;
#pragma unroll
    for (int k = 0; k < W; k++) {
        dx[k] = dout[k] * weight[k] - (x[k] - mean) * rstd * mean_dx;
        if (CENTRED) dx[k] -= mean_d;
        dx[k] *= rstd;
    }
    return dx;
}

// While a row is computed, the next one is on its way into shared memory (cp.async), so that registers are left for the
// sums over rows. A thread reads back only what it has copied itself, so that nobody waits for anybody.
template <typename T, int PACKS>
struct Stage {
    Pack<T, WIDTH> pack[3][PACKS][THREADS];  // dout, x, dresidual
};
constexpr int STAGES = 2;

template <bool CENTRED, int GROUP, int PACKS, typename T>
__global__ void __launch_bounds__(THREADS, 2) backward_kernel(BackwardArguments<T> a) {
    constexpr int GROUPS = THREADS / GROUP, W = WIDTH;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    auto* stages = reinterpret_cast<Stage<T, PACKS>*>(dynamic_shared);
    const int group = int(threadIdx.x) / GROUP, lane = int(threadIdx.x) % GROUP;
    const int C = int(a.C), first = lane * W;
    Floats<W> dweight[PACKS], dbias[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++)
#pragma unroll
        for (int k = 0; k < W; k++) dweight[p][k] = dbias[p][k] = 0;

    const auto fetch = [&](int64_t n, int stage) {
        if (n < a.N) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const int c = first + p * (GROUP * W);
                if (c >= C) continue;
                copy_async(&stages[stage].pack[0][p][threadIdx.x], a.dout + n * a.dout_stride + c);
                copy_async(&stages[stage].pack[1][p][threadIdx.x], a.inp + n * a.inp_stride + c);
                if (a.dresidual)
                    copy_async(&stages[stage].pack[2][p][threadIdx.x], a.dresidual + n * a.dresidual_stride + c);
            }
        }
        __pipeline_commit();
    };

    const int64_t stride = int64_t(gridDim.x) * GROUPS;
    int64_t n = blockIdx.x * int64_t(GROUPS) + group;
    fetch(n, 0);
    for (int stage = 0; n < a.N; n += stride, stage ^= 1) {
        fetch(n + stride, stage ^ 1);
        const float mean = CENTRED ? a.mean[n] : 0, rstd = a.rstd[n];
        __pipeline_wait_prior(1);
        const Stage<T, PACKS>& row = stages[stage];
        float sum_d = 0, sum_dx = 0;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = first + p * (GROUP * W);
            if (c >= C) continue;
            const Floats<W> dout = as_floats(row.pack[0][p][threadIdx.x]), x = as_floats(row.pack[1][p][threadIdx.x]);
            const Floats<W> weight = load_floats<W>(a.weight + c);
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float x_hat = (x[k] - mean) * rstd;
                sum_d += dout[k] * weight[k];
                sum_dx += dout[k] * weight[k] * x_hat;
                dweight[p][k] += dout[k] * x_hat;
                dbias[p][k] += dout[k];
            }
        }
        block_sum<GROUP>(sum_d, sum_dx);
        const float mean_d = sum_d / float(C), mean_dx = sum_dx / float(C);
        asm volatile("" ::: "memory");  // reads the row again instead of keeping it in registers
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = first + p * (GROUP * W);
            if (c >= C) continue;
            Floats<W> dx =
                norm_gradient<CENTRED>(as_floats(row.pack[0][p][threadIdx.x]), as_floats(row.pack[1][p][threadIdx.x]),
                                       load_floats<W>(a.weight + c), mean, rstd, mean_d, mean_dx);
            if (a.dresidual) {
                const Floats<W> r = as_floats(row.pack[2][p][threadIdx.x]);
#pragma unroll
                for (int k = 0; k < W; k++) dx[k] += r[k];
            }
            store_floats<W>(a.dinp + n * a.dinp_stride + c, dx);
        }
    }

    float* partial = a.partials + blockIdx.x * (CENTRED ? 2 : 1) * a.C;
    if constexpr (GROUPS == 1) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = first + p * (GROUP * W);
            if (c >= C) continue;
            store_floats<W>(partial + c, dweight[p]);
            if (CENTRED) store_floats<W>(partial + a.C + c, dbias[p]);
        }
    } else {
        // The block's groups are added up in order, GROUP vectors at a time.
        __shared__ float shared[GROUPS][GROUP * W];
        const auto add_groups = [&](const Floats<W>& mine, float* out, int64_t begin) {
            __syncthreads();
            store_floats<W>(&shared[group][first], mine);
            __syncthreads();
            for (int i = int(threadIdx.x); i < GROUP * W; i += THREADS) {
                float sum = 0;
#pragma unroll
                for (int g = 0; g < GROUPS; g++) sum += shared[g][i];
                if (begin + i < a.C) out[begin + i] = sum;
            }
        };
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            add_groups(dweight[p], partial, p * (GROUP * W));
            if (CENTRED) add_groups(dbias[p], partial + a.C, p * (GROUP * W));
        }
    }
}

// Any row, one block for each at a time; the block's sums lie in scratch, where each thread owns its columns.
template <bool CENTRED, typename T>
__global__ void __launch_bounds__(THREADS) backward_any_kernel(BackwardArguments<T> a) {
    float *dweight = a.partials + blockIdx.x * (CENTRED ? 2 : 1) * a.C, *dbias = dweight + a.C;
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS) {
        dweight[c] = 0;
        if (CENTRED) dbias[c] = 0;
    }
    for (int64_t n = blockIdx.x; n < a.N; n += gridDim.x) {
        const T *dout_row = a.dout + n * a.dout_stride, *x_row = a.inp + n * a.inp_stride;
        const float mean = CENTRED ? a.mean[n] : 0, rstd = a.rstd[n];
        float sum_d = 0, sum_dx = 0;
        for (int64_t c = threadIdx.x; c < a.C; c += THREADS) {
            const float dout = as_float(dout_row[c]), x_hat = (as_float(x_row[c]) - mean) * rstd;
            const float d = dout * a.weight[c];
            sum_d += d;
            sum_dx += d * x_hat;
            dweight[c] += dout * x_hat;
            if (CENTRED) dbias[c] += dout;
        }
        block_sum<THREADS>(sum_d, sum_dx);
        const float mean_d = sum_d / float(a.C), mean_dx = sum_dx / float(a.C);
        for (int64_t c = threadIdx.x; c < a.C; c += THREADS) {
            Floats<1> dx = norm_gradient<CENTRED>(load_floats<1>(dout_row + c), load_floats<1>(x_row + c),
                                                  load_floats<1>(a.weight + c), mean, rstd, mean_d, mean_dx);
            if (a.dresidual) dx[0] += as_float(a.dresidual[n * a.dresidual_stride + c]);
            store_floats<1>(a.dinp + n * a.dinp_stride + c, dx);
        }
    }
}

// out[c] (+)= Σ_b partials[b·width + offset + c] in a fixed order: SLICES interleaved running sums, then those in turn.
constexpr int SUM_COLUMNS = 32, SUM_SLICES = 32;
static __global__ void __launch_bounds__(SUM_COLUMNS* SUM_SLICES)
    sum_partials_kernel(float* out, const float* partials, int64_t blocks, int64_t width, int64_t C, bool accumulate) {
    __shared__ float shared[SUM_SLICES][SUM_COLUMNS];
    const int64_t c = blockIdx.x * int64_t(SUM_COLUMNS) + threadIdx.x;
    float sum = 0;
    if (c < C)
        for (int64_t b = threadIdx.y; b < blocks; b += SUM_SLICES) sum += partials[b * width + c];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C) return;
    sum = accumulate ? out[c] : 0;
    for (int s = 0; s < SUM_SLICES; s++) sum += shared[s][threadIdx.x];
    out[c] = sum;
}

// f(GROUP, PACKS) as integral constants: what holds a row of C channels. False if nothing does.
template <typename F>
bool dispatch_row(int64_t C, bool aligned, F f) {
    if (!aligned || C % WIDTH != 0 || C > LONGEST_IN_REGISTERS) return false;
    const std::integral_constant<int, WARP> warp;
    const std::integral_constant<int, THREADS> block;
    if (C <= 1 * WARP * WIDTH)
        f(warp, std::integral_constant<int, 1>{});
    else if (C <= 2 * WARP * WIDTH)
        f(warp, std::integral_constant<int, 2>{});
    else if (C <= 3 * WARP * WIDTH)
        f(warp, std::integral_constant<int, 3>{});
    else if (C <= 4 * WARP * WIDTH)
        f(warp, std::integral_constant<int, 4>{});
    else if (C <= 1 * THREADS * WIDTH)
        f(block, std::integral_constant<int, 1>{});
    else if (C <= 2 * THREADS * WIDTH)
        f(block, std::integral_constant<int, 2>{});
    else
        f(block, std::integral_constant<int, 4>{});
    return true;
}

}  // namespace norm_detail

template <bool CENTRED, typename T>
void launch_norm_forward(const char* op, const norm_detail::ForwardArguments<T>& a, bool aligned, Stream stream) {
    using namespace norm_detail;
    if (a.N * a.C == 0) return;
    const bool in_registers = dispatch_row(a.C, aligned, [&](auto group, auto packs) {
        constexpr int GROUP = decltype(group)::value, PACKS = decltype(packs)::value;
        forward_kernel<CENTRED, GROUP, PACKS>
            <<<grid_of(ceil_div(a.N, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    if (!in_registers) forward_any_kernel<CENTRED><<<grid_of(a.N), THREADS, 0, cuda_stream(stream)>>>(a);
    check_launch(op, stream);
}

// As many blocks as run at once (THREADS threads, two on a multiprocessor), or as there are rows.
inline int64_t norm_backward_blocks(int64_t N) {
    return std::max<int64_t>(1, std::min(2 * num_multiprocessors(), N));
}
inline int64_t norm_backward_scratch(int64_t N, int64_t width) {
    return norm_backward_blocks(N) * width * int64_t(sizeof(float));
}

// dbias null: not wanted.
template <bool CENTRED, typename T>
void launch_norm_backward(const char* op, const norm_detail::BackwardArguments<T>& a, float* dweight, float* dbias,
                          bool accumulate, bool aligned, Stream stream) {
    using namespace norm_detail;
    if (a.C == 0) return;
    const int64_t blocks = norm_backward_blocks(a.N), width = (CENTRED ? 2 : 1) * a.C;
    bool launched = false;
    dispatch_row(a.C, aligned, [&](auto group, auto packs) {
        constexpr int GROUP = decltype(group)::value, PACKS = decltype(packs)::value;
        constexpr int SHARED = STAGES * int(sizeof(Stage<T, PACKS>));
        const auto kernel = backward_kernel<CENTRED, GROUP, PACKS, T>;
        cudaFuncAttributes attributes;
        cuda_check(cudaFuncGetAttributes(&attributes, kernel), op);
        if (SHARED + int64_t(attributes.sharedSizeBytes) > max_shared_bytes()) return;  // a smaller GPU
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED), op);
        kernel<<<grid_of(blocks), THREADS, SHARED, cuda_stream(stream)>>>(a);
        launched = true;
    });
    if (!launched) backward_any_kernel<CENTRED><<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(a);
    check_launch(op, stream);
    for (float* out : {dweight, dbias}) {
        if (!out) continue;
        sum_partials_kernel<<<grid_of(ceil_div(a.C, SUM_COLUMNS)), dim3(SUM_COLUMNS, SUM_SLICES), 0,
                              cuda_stream(stream)>>>(out, a.partials + (out == dbias ? a.C : 0), blocks, width, a.C,
                                                     accumulate);
        check_launch(op, stream);
    }
}
