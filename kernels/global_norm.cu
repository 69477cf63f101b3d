// Sums in fp64, in an order that depends on sizes only: each thread over its vectors, each block over its threads, one
// block over the blocks. The gradients of GPT-2 124M, n = 124,475,904: 1,024 blocks of 256 threads, 119 vectors of 4
// for each thread, four of them in flight.
#include "kernels/global_norm.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/global_norm_check.h"

namespace {

constexpr int THREADS = 256;

// Σ x² in fp64, where squares of fp32 are exact and neither overflow nor underflow. T: float or bf16.
template <int W, typename T>
__global__ void __launch_bounds__(THREADS) sum_squares_kernel(double* partials, const T* x, int64_t n) {
    constexpr int UNROLL = 4;
    const int64_t vectors = n / W, stride = int64_t(gridDim.x) * THREADS;
    double sum[UNROLL] = {};
    const auto add = [&](double& s, const Floats<W>& v) {
#pragma unroll
        for (int k = 0; k < W; k++) s += double(v[k]) * double(v[k]);
    };
    int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    for (; i + (UNROLL - 1) * stride < vectors; i += UNROLL * stride) {
        Floats<W> v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) v[u] = load_floats<W>(x + (i + u * stride) * W);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) add(sum[u], v[u]);
    }
    for (; i < vectors; i += stride) add(sum[0], load_floats<W>(x + i * W));
    if (blockIdx.x == 0 && threadIdx.x < n - vectors * W) {
        const double rest = as_float(x[vectors * W + threadIdx.x]);
        sum[1] += rest * rest;
    }
    const double total = block_sum_fp64<THREADS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// Runs as one block.
__global__ void __launch_bounds__(THREADS)
    add_partials_kernel(double* sum, const double* partials, int64_t blocks, bool accumulate) {
    double mine = 0;
    for (int64_t b = threadIdx.x; b < blocks; b += THREADS) mine += partials[b];
    const double total = block_sum_fp64<THREADS>(mine);
    if (threadIdx.x == 0) *sum = accumulate ? *sum + total : total;
}

constexpr int CONTROL_THREADS = 64;
static_assert(CONTROL_THREADS >= GRAD_NORM_WINDOW && CONTROL_THREADS >= NUM_STEP_SUMS, "a thread for each");

// The median of the window of norms, in all threads: the norm that GRAD_NORM_WINDOW / 2 others come before in the order
// of (norm, index). Once in a block.
__device__ float median_norm(const StepScalars* scalars) {
    __shared__ float norms[GRAD_NORM_WINDOW], median;
    const int i = int(threadIdx.x);
    if (i < GRAD_NORM_WINDOW) norms[i] = scalars->norms[i];
    __syncthreads();
    int before = 0;
    for (int j = 0; j < GRAD_NORM_WINDOW && i < GRAD_NORM_WINDOW; j++)
        before += norms[j] < norms[i] || (norms[j] == norms[i] && j < i);
    if (i < GRAD_NORM_WINDOW && before == GRAD_NORM_WINDOW / 2) median = norms[i];
    __syncthreads();
    return median;
}

// Runs as one block. A thread adds up a column of the ranks' sums, the first one computes the scalars.
__global__ void __launch_bounds__(CONTROL_THREADS)
    control_kernel(StepScalars* scalars, const double* sums, int64_t ranks, double loss_scale, double grad_unit) {
    const bool judged = scalars->spike_factor > 0 && scalars->norm_count >= GRAD_NORM_WINDOW;
    const float median = judged ? median_norm(scalars) : 0;
    __shared__ double sum[NUM_STEP_SUMS];
    StepScalars& s = *scalars;
    const int column = int(threadIdx.x);
    if (column < NUM_STEP_SUMS) {
        double total = 0;
        for (int64_t r = 0; r < ranks; r++) total += sums[r * NUM_STEP_SUMS + column];
        sum[column] = total;
        if (column >= SUM_LOSS) s.pair_stats[column - SUM_LOSS] = float(total);
    }
    __syncthreads();
    if (column > 0) return;
    const double norm = sqrt(sum[SUM_SQUARES]);
    s.loss = float(sum[SUM_LOSS] * loss_scale);
    s.grad_norm = float(grad_unit * norm);
    s.grad_scale = float(s.grad_clip > 0 && s.grad_norm > s.grad_clip ? s.grad_clip / norm : grad_unit);
    const bool spike = judged && s.grad_norm > s.spike_factor * median;
    s.skip = !(isfinite(s.loss) && isfinite(s.grad_norm)) ? SKIP_NOT_FINITE : spike ? SKIP_SPIKE : SKIP_NONE;
    if (isfinite(s.grad_norm)) s.norms[s.norm_count++ % GRAD_NORM_WINDOW] = s.grad_norm;
    if (!s.skip) s.t++;
}

constexpr int LOSS_THREADS = 1024;

// Runs as one block.
__global__ void __launch_bounds__(LOSS_THREADS)
    sum_losses_kernel(double* loss_sum, const float* losses, int64_t n, bool accumulate) {
    double mine = 0;
    for (int64_t i = threadIdx.x; i < n; i += LOSS_THREADS) mine += losses[i];
    const double sum = block_sum_fp64<LOSS_THREADS>(mine);
    if (threadIdx.x == 0) *loss_sum = accumulate ? *loss_sum + sum : sum;
}

}  // namespace

void sum_losses(Tensor loss_sum, Tensor losses, bool accumulate, Stream stream) {
    const char* op = "sum_losses";
    check_tensor(op, "loss_sum", loss_sum, DType::F64, {1});
    require(losses.rank == 1, op, ": losses is ", dtype_name(losses.dtype), " ", shape_string(losses),
            ", expected fp32 [n]");
    check_tensor(op, "losses", losses, DType::F32, {losses.shape[0]});
    sum_losses_kernel<<<1, LOSS_THREADS, 0, cuda_stream(stream)>>>(loss_sum.as<double>(), losses.as<float>(),
                                                                   losses.shape[0], accumulate);
    check_launch(op, stream);
}

void sum_squares(Tensor sum, Tensor grads, bool accumulate, Tensor scratch, Stream stream) {
    const char* op = "sum_squares";
    const int64_t n = check_sum_squares(sum, grads, scratch), blocks = sum_squares_blocks(n, Device::CUDA);
    double* partials = reinterpret_cast<double*>(scratch.as<uint8_t>());
    if (blocks > 0) {
        dispatch_fp32_or_bf16(grads.dtype, [&](auto zero) {
            using T = decltype(zero);
            dispatch_width<float>(rows_aligned({grads}), [&](auto width) {
                sum_squares_kernel<decltype(width)::value>
                    <<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(partials, grads.as<T>(), n);
            });
        });
        check_launch(op, stream);
    }
    add_partials_kernel<<<1, THREADS, 0, cuda_stream(stream)>>>(sum.as<double>(), partials, blocks, accumulate);
    check_launch(op, stream);
}

void step_control(Tensor scalars, Tensor sums, double loss_scale, double grad_unit, Stream stream) {
    const int64_t ranks = check_step_control(scalars, sums, grad_unit);
    control_kernel<<<1, CONTROL_THREADS, 0, cuda_stream(stream)>>>(
        reinterpret_cast<StepScalars*>(scalars.as<uint8_t>()), sums.as<double>(), ranks, loss_scale, grad_unit);
    check_launch("step_control", stream);
}
