// LayerNorm and RMSNorm over rows, forward and backward. One kernel serves both: RMSNorm is the case without centring,
// mean and bias (CENTRED = false).
//
// A group of threads holds a row, so that memory is read once. Forward, the group is a warp, or the whole block for
// long rows: thread i holds the vectors i, i + GROUP, i + 2·GROUP, … of the row, PACKS of them, in registers. Backward,
// the group has a thread for each vector of the row, and the row is staged in shared memory. Rows that are longer, not
// aligned, or not a multiple of a vector take the *_any kernels, which read the row again from the cache.
//
// The gradients of weight and bias, and dsum, are sums over all rows. Blocks loop over many rows and keep their sums in
// registers. Each block writes its sums to the scratch, and a second kernel adds the blocks in order. The number of
// blocks depends only on sizes and GPU, so results are bitwise equal on equal GPUs.
//
//                     forward, warp        forward, block       backward
//   row held by       32 threads           256 threads          1 thread for each 8 channels
//   threads a block   256 (8 rows)         256 (1 row)          groups of rows, up to 384 (1024 for C > 3072)
//   longest row       C = 2048             C = 8192             C = 8192
//   shared memory     -                    32 B                 2 stages of dout, inp, dresidual; 512 B
//   registers         32 to 64 (bf16)      36 to 48 (bf16)      80 (64 for 1024 threads)
//                     32 to 100 (fp32)     40 to 66 (fp32)
//   blocks per SM     4 to 8 (bf16)        5 to 7 (bf16)        2 (1 for C > 3072)
//
// Up to FEW_ROWS rows, a forward block holds one row: 64 rows of LLaMA 1B (C = 2048) are 64 blocks of a warp with 182
// registers.
//
// GPT-2 124M, bf16, B=64, T=1024: N = 65536 rows of C = 768. Forward: 768 = 3·32·8, so a warp holds a row with PACKS =
// 3 and 36 registers; 8192 blocks, 6 on an SM. Backward: 96 threads a row, so 4 rows in a block of 384 threads with 36
// KiB of stages; 264 blocks on the 132 SMs of an H100, 62 rows for each group.
#pragma once

#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/launch_shapes.h"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/row_statistics.cuh"

namespace norm_detail {

constexpr int THREADS = 256;
using gpu_scratch::NORM_BLOCKS, gpu_scratch::NORM_MAX_THREADS, gpu_scratch::NORM_THREADS;
constexpr int WIDTH = gpu_scratch::NORM_VECTOR;
constexpr int64_t FEW_ROWS = 512;  // of a decode step
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
    float* partials;  // [blocks, sums, C]: dweight, dbias if centred, dsum if wanted
    const T* dout;
    const T* dresidual;
    const T* inp;
    const float *weight, *mean, *rstd;
    int64_t dinp_stride, dout_stride, dresidual_stride, inp_stride;
    int64_t N;
    int64_t C;
};

// Copies to shared memory, 16 bytes at a time, bypassing registers and L1.
template <typename T, int W>
__device__ __forceinline__ void copy_async(Pack<T, W>* to, const T* from) {
    static_assert(sizeof(*to) % 16 == 0);
#pragma unroll
    for (size_t byte = 0; byte < sizeof(*to); byte += 16)
        cp_async_16(reinterpret_cast<char*>(to) + byte, reinterpret_cast<const char*>(from) + byte, true);
}

// x = inp + residual, rounded to T whether it is stored or not, so that the backward pass sees the same x. ADD_AFTER:
// the residual is added behind the norm.
template <bool ADD_AFTER, int W, typename T>
__device__ __forceinline__ Pack<T, W> load_x(const ForwardArguments<T>& a, int64_t n, int64_t c) {
    Pack<T, W> x = load_pack<W>(a.inp + n * a.inp_stride + c);
    if (!ADD_AFTER && a.residual) {
        const Floats<W> r = load_floats<W>(a.residual + n * a.residual_stride + c);
        Floats<W> sum = as_floats(x);
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] += r[k];
        x = as_pack<T>(sum);
    }
    return x;
}

// The weights of a vector's columns.
template <int W>
struct Affine {
    Floats<W> weight, bias;
};

template <int W, typename T>
__device__ __forceinline__ Affine<W> load_affine(const ForwardArguments<T>& a, int64_t c) {
    Affine<W> of{load_floats<W>(a.weight + c), {}};
    if (a.bias) of.bias = load_floats<W>(a.bias + c);
    return of;
}

template <bool ADD_AFTER, int W, typename T>
__device__ __forceinline__ void store_out(const ForwardArguments<T>& a, int64_t n, int64_t c, const Pack<T, W>& x,
                                          const Affine<W>& affine, float mean, float rstd) {
    if (a.sum) store_pack(a.sum + n * a.sum_stride + c, x);
    Floats<W> y = normalize(as_floats(x), mean, rstd, affine.weight, affine.bias);
    if constexpr (ADD_AFTER) {
        const Floats<W> residual = load_floats<W>(a.residual + n * a.residual_stride + c);
#pragma unroll
        for (int k = 0; k < W; k++) y[k] += residual[k];
    }
    store_floats<W>(a.out + n * a.out_stride + c, y);
}

// Rows are taken from the last one on. The matmul before has stored its last rows last, and L2 still has them; the
// matmul after begins with the first rows. Negative beyond the first row.
__device__ __forceinline__ int64_t from_last(int64_t N, int64_t i) {
    return N - 1 - i;
}

// GROUP threads a row, PACKS vectors a thread. FEW: at most FEW_ROWS, as in a decode step, whose time is latency. Then
// a block holds one row, starts before the previous kernel has ended, asks L2 for the weights meanwhile and loads them
// together with the row. The bits are the same.
template <bool CENTRED, bool ADD_AFTER, int GROUP, int PACKS, bool FEW, typename T>
__global__ void __launch_bounds__(FEW ? GROUP : THREADS) forward_kernel(ForwardArguments<T> a) {
    constexpr int GROUPS = (FEW ? GROUP : THREADS) / GROUP, W = WIDTH;
    pdl_launch_dependents();
    const int64_t n = from_last(a.N, blockIdx.x * int64_t(GROUPS) + threadIdx.x / GROUP);
    if (n < 0) return;  // the whole group returns
    const int64_t first = threadIdx.x % GROUP * W;
    if constexpr (FEW) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int64_t c = first + p * (GROUP * W);
            if (c >= a.C) continue;
            prefetch_line(a.weight + c);
            if (a.bias) prefetch_line(a.bias + c);
        }
        pdl_wait();
    }
    Pack<T, W> x[PACKS];
    Affine<W> affine[FEW ? PACKS : 1];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t c = first + p * (GROUP * W);
        if (c >= a.C) continue;
        x[p] = load_x<ADD_AFTER, W>(a, n, c);
        if constexpr (FEW) affine[p] = load_affine<W>(a, c);
    }
    float mean = 0;
    if constexpr (CENTRED) {
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (first + p * (GROUP * W) < a.C) mean = add_elements(mean, as_floats(x[p]));
        mean = block_sum<GROUP>(mean) / float(a.C);
    }
    float m2 = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++)
        if (first + p * (GROUP * W) < a.C) m2 = add_squared_deviations(m2, as_floats(x[p]), mean);
    const float rstd = row_rstd(block_sum<GROUP>(m2), float(a.C), a.eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int64_t c = first + p * (GROUP * W);
        if (c >= a.C) continue;
        if constexpr (!FEW) affine[0] = load_affine<W>(a, c);
        store_out<ADD_AFTER, W>(a, n, c, x[p], affine[FEW ? p : 0], mean, rstd);
    }
    if (first == 0) {
        if (CENTRED && a.mean) a.mean[n] = mean;
        if (a.rstd) a.rstd[n] = rstd;
    }
}

// Any row, one block each. `sum` may be the same memory as inp or residual, so it is written in the last pass.
template <bool CENTRED, bool ADD_AFTER, typename T>
__global__ void __launch_bounds__(THREADS) forward_any_kernel(ForwardArguments<T> a) {
    pdl_launch_dependents();
    const int64_t n = blockIdx.x;
    float mean = 0;
    if constexpr (CENTRED) {
        for (int64_t c = threadIdx.x; c < a.C; c += THREADS)
            mean = add_elements(mean, as_floats(load_x<ADD_AFTER, 1>(a, n, c)));
        mean = block_sum<THREADS>(mean) / float(a.C);
    }
    float m2 = 0;
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS)
        m2 = add_squared_deviations(m2, as_floats(load_x<ADD_AFTER, 1>(a, n, c)), mean);
    const float rstd = row_rstd(block_sum<THREADS>(m2), float(a.C), a.eps);
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS)
        store_out<ADD_AFTER, 1>(a, n, c, load_x<ADD_AFTER, 1>(a, n, c), load_affine<1>(a, c), mean, rstd);
    if (threadIdx.x == 0) {
        if (CENTRED && a.mean) a.mean[n] = mean;
        if (a.rstd) a.rstd[n] = rstd;
    }
}

// One vector of dinp − dresidual, where d = dout·weight.
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

// Sums y, and x if BOTH, over the threads of a group. Every thread gets the same bits. `partial` has an element for
// each warp of the block. The next call must pass another array, so that no thread overwrites what another has yet to
// read.
template <bool BOTH>
__device__ __forceinline__ void group_sum(float& x, float& y, float2* partial) {
    if (BOTH) x = warp_sum(x);
    y = warp_sum(y);
    const int warps = int(blockDim.x) / WARP;
    if (warps == 1) return;
    partial += threadIdx.y * warps;
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = {x, y};
    // A named barrier of this group: other groups are at other points of their rows.
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
    x = y = 0;
    for (int w = 0; w < warps; w++) {
        if (BOTH) x += partial[w].x;
        y += partial[w].y;
    }
}

// While a row is computed, cp.async copies the next one to shared memory, which leaves registers for the sums over
// rows. A thread reads back only what it has copied itself, so no barrier is needed. SUM: also sums dsum.
template <bool CENTRED, bool SUM, int THREADS_BOUND, typename T>
__global__ void __launch_bounds__(THREADS_BOUND, THREADS_BOUND == NORM_THREADS ? NORM_BLOCKS : 1)
    backward_kernel(BackwardArguments<T> a) {
    constexpr int W = WIDTH;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ float2 partial[2][NORM_MAX_THREADS / WARP];
    const int threads = int(blockDim.x * blockDim.y), thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    const int C = int(a.C), c = int(threadIdx.x) * W;
    const bool inside = c < C;
    enum { DOUT, X, DRESIDUAL, MATRICES };
    const auto staged = [&](int stage, int matrix) -> Pack<T, W>& {
        return reinterpret_cast<Pack<T, W>*>(dynamic_shared)[(stage * MATRICES + matrix) * threads + thread];
    };
    const auto fetch = [&](int64_t n, int stage) {
        if (n >= 0 && inside) {
            copy_async(&staged(stage, DOUT), a.dout + n * a.dout_stride + c);
            copy_async(&staged(stage, X), a.inp + n * a.inp_stride + c);
            if (a.dresidual) copy_async(&staged(stage, DRESIDUAL), a.dresidual + n * a.dresidual_stride + c);
        }
        cp_async_commit();
    };

    Floats<W> weight{}, dweight{}, dbias{}, dsum{};
    if (inside) weight = load_floats<W>(a.weight + c);
    const float inverse_C = 1 / float(C);
    const int64_t stride = int64_t(gridDim.x) * blockDim.y;
    int64_t n = from_last(a.N, blockIdx.x * int64_t(blockDim.y) + threadIdx.y);
    fetch(n, 0);
    float next_mean = 0, next_rstd = 0;
    const auto fetch_statistics = [&](int64_t m) {
        if (m < 0) return;
        if (CENTRED) next_mean = a.mean[m];
        next_rstd = a.rstd[m];
    };
    fetch_statistics(n);
    for (int stage = 0; n >= 0; n -= stride, stage ^= 1) {
        fetch(n - stride, stage ^ 1);
        const float mean = next_mean, rstd = next_rstd;
        fetch_statistics(n - stride);
        cp_async_wait<1>();
        float mean_d = 0, mean_dx = 0;
        if (inside) {
            const Floats<W> dout = as_floats(staged(stage, DOUT)), x = as_floats(staged(stage, X));
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float x_hat = (x[k] - mean) * rstd, d = dout[k] * weight[k];
                if (CENTRED) mean_d += d;
                mean_dx += d * x_hat;
                dweight[k] += dout[k] * x_hat;
                if (CENTRED) dbias[k] += dout[k];
            }
        }
        group_sum<CENTRED>(mean_d, mean_dx, partial[stage]);
        mean_d *= inverse_C;
        mean_dx *= inverse_C;
        asm volatile("" ::: "memory");  // so that the row is read again and not kept in registers
        if (!inside) continue;
        Floats<W> dx = norm_gradient<CENTRED>(as_floats(staged(stage, DOUT)), as_floats(staged(stage, X)), weight, mean,
                                              rstd, mean_d, mean_dx);
        if (a.dresidual) {
            const Floats<W> r = as_floats(staged(stage, DRESIDUAL));
#pragma unroll
            for (int k = 0; k < W; k++) dx[k] += r[k];
        }
        const Pack<T, W> stored = as_pack<T>(dx);
        store_pack(a.dinp + n * a.dinp_stride + c, stored);
        if constexpr (SUM) {
            const Floats<W> rounded = as_floats(stored);
#pragma unroll
            for (int k = 0; k < W; k++) dsum[k] += rounded[k];
        }
    }

    // Adds the groups of the block in order.
    cp_async_wait<0>();
    auto* groups = reinterpret_cast<float*>(dynamic_shared);  // [groups, C]
    float* out = a.partials + blockIdx.x * int64_t(1 + CENTRED + SUM) * C;
    const auto add_groups = [&](const Floats<W>& sum) {
        __syncthreads();
        if (inside)
#pragma unroll
            for (int k = 0; k < W; k++) groups[threadIdx.y * C + c + k] = sum[k];
        __syncthreads();
        for (int i = thread; i < C; i += threads) {
            float total = 0;
            for (int g = 0; g < int(blockDim.y); g++) total += groups[g * C + i];
            out[i] = total;
        }
        out += C;
    };
    add_groups(dweight);
    if (CENTRED) add_groups(dbias);
    if (SUM) add_groups(dsum);
}

// Any row, one block each at a time. The sums of a block are in the scratch, where each thread owns its columns.
template <bool CENTRED, bool SUM, typename T>
__global__ void __launch_bounds__(THREADS) backward_any_kernel(BackwardArguments<T> a) {
    float* dweight = a.partials + blockIdx.x * int64_t(1 + CENTRED + SUM) * a.C;
    float *dbias = dweight + a.C, *dsum = dweight + (1 + CENTRED) * a.C;
    for (int64_t c = threadIdx.x; c < a.C; c += THREADS) {
        dweight[c] = 0;
        if (CENTRED) dbias[c] = 0;
        if (SUM) dsum[c] = 0;
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
            if (SUM) dsum[c] += rounded_to<T>(dx[0]);
        }
    }
}

// outs[s][c] (+)= Σ_b partials[b, s, c] in a fixed order: first SUM_SLICES interleaved running sums, then their sum.
constexpr int SUM_COLUMNS = 32, SUM_SLICES = 32;
struct SumOutputs {
    float* data[3];  // null: not wanted
};
static __global__ void __launch_bounds__(SUM_COLUMNS* SUM_SLICES)
    sum_partials_kernel(SumOutputs outs, const float* partials, int64_t blocks, int64_t C, bool accumulate) {
    __shared__ float shared[SUM_SLICES][SUM_COLUMNS];
    float* out = outs.data[blockIdx.y];
    if (!out) return;
    const int64_t c = blockIdx.x * int64_t(SUM_COLUMNS) + threadIdx.x;
    float sum = 0;
    if (c < C)
#pragma unroll 8
        for (int64_t b = threadIdx.y; b < blocks; b += SUM_SLICES)
            sum += partials[(b * gridDim.y + blockIdx.y) * C + c];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C) return;
    sum = accumulate ? out[c] : 0;
    for (int s = 0; s < SUM_SLICES; s++) sum += shared[s][threadIdx.x];
    out[c] = sum;
}

// Calls f(GROUP, PACKS), as integral constants, for rows of C channels. Returns false if no instance holds such a row.
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
    else if (C <= 8 * WARP * WIDTH)
        f(warp, std::integral_constant<int, 8>{});
    else if (C <= 2 * THREADS * WIDTH)
        f(block, std::integral_constant<int, 2>{});
    else
        f(block, std::integral_constant<int, 4>{});
    return true;
}

}  // namespace norm_detail

template <bool CENTRED, bool ADD_AFTER = false, typename T>
void launch_norm_forward(const char* op, const norm_detail::ForwardArguments<T>& a, bool aligned, Stream stream) {
    using namespace norm_detail;
    if (a.N * a.C == 0) return;
    const bool in_registers = dispatch_row(a.C, aligned, [&](auto group, auto packs) {
        constexpr int GROUP = decltype(group)::value, PACKS = decltype(packs)::value;
        if (a.N <= FEW_ROWS)
            launch_pdl(op, forward_kernel<CENTRED, ADD_AFTER, GROUP, PACKS, true, T>, grid_of(a.N), GROUP, 0, stream,
                       a);
        else
            forward_kernel<CENTRED, ADD_AFTER, GROUP, PACKS, false>
                <<<grid_of(ceil_div(a.N, THREADS / GROUP)), THREADS, 0, cuda_stream(stream)>>>(a);
    });
    if (!in_registers) forward_any_kernel<CENTRED, ADD_AFTER><<<grid_of(a.N), THREADS, 0, cuda_stream(stream)>>>(a);
    check_launch(op, stream);
}

namespace norm_detail {

template <bool CENTRED, bool SUM, typename T>
void launch_backward(const char* op, const BackwardArguments<T>& a, const SumOutputs& sums, bool accumulate,
                     bool aligned, Stream stream) {
    const gpu_scratch::NormBlock shape = gpu_scratch::norm_block(a.C);
    const int64_t blocks = gpu_scratch::norm_blocks(a.N, a.C, num_sms());
    const auto kernel = shape.threads <= NORM_THREADS ? backward_kernel<CENTRED, SUM, NORM_THREADS, T>
                                                      : backward_kernel<CENTRED, SUM, NORM_MAX_THREADS, T>;
    // Two stages of three matrices. The sums at the end need less.
    const int64_t shared = 2 * 3 * int64_t(sizeof(Pack<T, WIDTH>)) * shape.threads * shape.groups;
    constexpr int64_t STATIC_SHARED = 1024;
    if (aligned && a.C % WIDTH == 0 && a.C <= NORM_MAX_THREADS * WIDTH &&
        shared + STATIC_SHARED <= max_shared_bytes()) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), op);
        kernel<<<grid_of(blocks), dim3(unsigned(shape.threads), unsigned(shape.groups)), size_t(shared),
                 cuda_stream(stream)>>>(a);
    } else {
        backward_any_kernel<CENTRED, SUM><<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(a);
    }
    check_launch(op, stream);
    if (!sums.data[0] && !sums.data[1] && !sums.data[2]) return;
    const dim3 grid(unsigned(ceil_div(a.C, SUM_COLUMNS)), 1 + CENTRED + SUM);
    sum_partials_kernel<<<grid, dim3(SUM_COLUMNS, SUM_SLICES), 0, cuda_stream(stream)>>>(sums, a.partials, blocks, a.C,
                                                                                         accumulate);
    check_launch(op, stream);
}

}  // namespace norm_detail

// dweight, dbias and dsum may be null: not computed.
template <bool CENTRED, typename T>
void launch_norm_backward(const char* op, const norm_detail::BackwardArguments<T>& a, float* dweight, float* dbias,
                          float* dsum, bool accumulate, bool aligned, Stream stream) {
    using namespace norm_detail;
    if (a.C == 0) return;
    SumOutputs sums{{dweight}};
    if (CENTRED) sums.data[1] = dbias;
    if (dsum) {
        sums.data[1 + CENTRED] = dsum;
        launch_backward<CENTRED, true>(op, a, sums, accumulate, aligned, stream);
    } else {
        launch_backward<CENTRED, false>(op, a, sums, accumulate, aligned, stream);
    }
}
