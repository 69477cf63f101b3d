// The small kernels around the matmuls. GPT-2 124M, a chunk of 8192 tokens: C = 768, Vp = 50304, so a row of the
// logits is 262 tiles of 192 columns.
#include "kernels/cross_entropy_hopper.h"

#include "kernels/cross_entropy.h"
#include "kernels/cross_entropy_check.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/fastest_gemm.h"
#include "kernels/matmul.h"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;

// offsets[n] = −logits[n, target]·log2 e, a warp for each token: 1024 blocks. −∞ where the target is ignored (then all
// exponentials are 0), NaN where it is not in the vocabulary.
template <int W>
__global__ void __launch_bounds__(THREADS)
    offsets_kernel(float* offsets, const bf16* inp, int64_t inp_stride, const bf16* weight, int64_t weight_stride,
                   const int32_t* targets, int64_t N, int64_t C, int64_t V) {
    const int64_t n = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (n >= N) return;
    const int lane = threadIdx.x % WARP, target = targets[n];
    const bool inside = target >= 0 && target < V;
    float sum = 0;
    if (inside)
        for (int64_t c = lane * W; c < C; c += WARP * W) {
            const Floats<W> x = load_floats<W>(inp + n * inp_stride + c);
            const Floats<W> w = load_floats<W>(weight + target * weight_stride + c);
#pragma unroll
            for (int k = 0; k < W; k++) sum = fmaf(x[k], w[k], sum);
        }
    sum = warp_sum(sum);
    if (lane == 0) offsets[n] = inside ? -sum * LOG2E : target == IGNORE_TARGET ? -INFINITY : NAN;
}

// row[c] *= factor, by a warp.
template <int W>
__device__ __forceinline__ void scale_row(bf16* row, int64_t C, float factor) {
    for (int64_t c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        Floats<W> x = load_floats<W>(row + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] *= factor;
        store_floats<W>(row + c, x);
    }
}

// What the losses leave for the gradient: nothing, e, or e and r·inp.
enum class Keep { Nothing, Exponentials, All };

// Adds up the sums of the tiles [tiles, N], and computes from them the losses, the exponential of the target (if e is
// kept) and r·inp. A block has 32 tokens: 256 blocks. First a lane has a token and a warp every eighth tile.
template <Keep KEEP, int W>
__global__ void __launch_bounds__(THREADS)
    losses_kernel(float* losses, bf16* exponentials, int64_t stride, bf16* inp, int64_t inp_stride, const float* sums,
                  const int32_t* targets, int64_t N, int64_t C, int64_t tiles, float dloss) {
    __shared__ float partial[WARPS][WARP];
    __shared__ float factors[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t first = int64_t(blockIdx.x) * WARP, n = first + lane;
    float sum = 0;
    if (n < N) {
#pragma unroll 4
        for (int64_t tile = warp; tile < tiles; tile += WARPS) sum += sums[tile * N + n];
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && n < N) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[w][lane];
        const bool ignored = targets[n] == IGNORE_TARGET;
        losses[n] = ignored ? 0 : logf(total);
        factors[lane] = ignored ? 0 : dloss / total;
        // e[n, target] is 1. A total of NaN stands for a target outside the vocabulary, too.
        if (KEEP != Keep::Nothing && total == total && !ignored)
            exponentials[n * stride + targets[n]] = from_float<bf16>(fminf(1 - total, 0));
    }
    if (KEEP != Keep::All) return;
    __syncthreads();
    for (int i = warp; i < WARP && first + i < N; i += WARPS)
        scale_row<W>(inp + (first + i) * inp_stride, C, factors[i]);
}

// dinp[n] *= r[n], which is dloss·exp(−loss[n]). A warp for each token: 1024 blocks. An ignored token has zeros.
template <int W>
__global__ void __launch_bounds__(THREADS)
    scale_kernel(bf16* dinp, int64_t stride, const float* losses, int64_t N, int64_t C, float dloss) {
    const int64_t n = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (n < N) scale_row<W>(dinp + n * stride, C, dloss * expf(-losses[n]));
}

// rows[n] *= r[n] of a token with a gradient of its own, dlosses[n]·exp(−loss[n]): 0 where the target is ignored,
// whatever dlosses holds there. A warp for each token.
template <int W>
__global__ void __launch_bounds__(THREADS)
    scale_by_token_kernel(bf16* rows, int64_t stride, const float* losses, const float* dlosses, const int32_t* targets,
                          int64_t N, int64_t C) {
    const int64_t n = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (n < N) scale_row<W>(rows + n * stride, C, targets[n] == IGNORE_TARGET ? 0 : dlosses[n] * expf(-losses[n]));
}

// The forward matmul: logits becomes e.
Gemm gemm_of(const LinearCrossEntropy& x) {
    return make_gemm(x.logits, x.inp, x.weight, false, true, false, GemmEpilogue::Exp, {}, {});
}

int64_t tiles_of(const LinearCrossEntropy& x) {
    return ceil_div(x.logits.shape[1], HOPPER_GEMM_COLUMNS);
}

// Computes the losses and, as KEEP says, logits = e and inp = r·inp.
template <Keep KEEP>
void forward(const char* op, const LinearCrossEntropy& x, Stream stream) {
    const DType T = DType::BF16;
    const CrossEntropySizes z = check_cross_entropy(op, T, x.losses, x.logits, x.targets, x.V, x.softcap);
    check_matrix(op, "inp", x.inp, z.N, x.inp.shape[1], Given::Required, T);
    check_matrix(op, "weight", x.weight, z.Vp, x.inp.shape[1], Given::Required, T);
    const int64_t N = z.N, C = x.inp.shape[1], tiles = tiles_of(x);
    float* const offsets = static_cast<float*>(blas_of(op, stream).workspace);
    float* const sums = offsets + N;
    dispatch_width<bf16>(C % FULL_WIDTH<bf16> == 0 && rows_aligned({x.inp, x.weight}), [&](auto width) {
        constexpr int W = decltype(width)::value;
        offsets_kernel<W><<<grid_of(ceil_div(N, WARPS)), THREADS, 0, cuda_stream(stream)>>>(
            offsets, x.inp.as<bf16>(), row_stride(x.inp), x.weight.as<bf16>(), row_stride(x.weight),
            x.targets.as<int32_t>(), N, C, x.V);
        check_launch(op, stream);
        Gemm gemm = gemm_of(x);
        if (KEEP == Keep::Nothing) gemm.operands.out = nullptr;
        gemm.operands.row_offsets = offsets;
        gemm.operands.row_sums = sums;
        gemm.operands.valid_columns = x.V;
        run_gemm(op, gemm, stream);
        losses_kernel<KEEP, W><<<grid_of(ceil_div(N, WARP)), THREADS, 0, cuda_stream(stream)>>>(
            x.losses.as<float>(), x.logits.as<bf16>(), row_stride(x.logits), x.inp.as<bf16>(), row_stride(x.inp), sums,
            x.targets.as<int32_t>(), N, C, tiles, x.dloss);
        check_launch(op, stream);
    });
}

// rows [N, C], inp or dinp, times the tokens' r.
void scale_by_token(const char* op, const LinearCrossEntropy& x, const Tensor& rows, Stream stream) {
    const int64_t N = rows.shape[0], C = rows.shape[1];
    dispatch_width<bf16>(C % FULL_WIDTH<bf16> == 0 && rows_aligned({rows}), [&](auto width) {
        scale_by_token_kernel<decltype(width)::value><<<grid_of(ceil_div(N, WARPS)), THREADS, 0, cuda_stream(stream)>>>(
            rows.as<bf16>(), row_stride(rows), x.losses.as<float>(), x.dlosses.as<float>(), x.targets.as<int32_t>(), N,
            C);
    });
    check_launch(op, stream);
}

}  // namespace

bool hopper_cross_entropy_takes(const LinearCrossEntropy& x, Stream stream) {
    for (const Tensor& t : {x.logits, x.inp, x.weight})
        if (!t || t.rank != 2 || t.dtype != DType::BF16 || t.numel() == 0) return false;
    const Blas& blas = blas_of("linear_cross_entropy", stream);
    const int64_t bytes = (tiles_of(x) + 1) * x.logits.shape[0] * int64_t(sizeof(float));
    return !x.bias && !x.dbias && !x.softcap && bytes <= int64_t(Blas::WORKSPACE_BYTES) &&
           hopper_gemm_takes(gemm_of(x).key) && blas.only_kernel.value_or(GemmKernel::Hopper1) >= GemmKernel::Hopper1;
}

void hopper_cross_entropy(const LinearCrossEntropy& x, Stream stream) {
    const char* op = "linear_cross_entropy";
    const int64_t N = x.inp.shape[0], C = x.inp.shape[1];
    check_matrix(op, "dinp", x.dinp, N, C, Given::Required, DType::BF16);
    forward<Keep::All>(op, x, stream);
    if (x.dweight) matmul_backward_weight(x.dweight, {}, x.logits, x.inp, x.accumulate, stream);
    matmul_backward_input(x.dinp, x.logits, x.weight, false, stream);
    dispatch_width<bf16>(C % FULL_WIDTH<bf16> == 0 && rows_aligned({x.dinp}), [&](auto width) {
        scale_kernel<decltype(width)::value><<<grid_of(ceil_div(N, WARPS)), THREADS, 0, cuda_stream(stream)>>>(
            x.dinp.as<bf16>(), row_stride(x.dinp), x.losses.as<float>(), N, C, x.dloss);
    });
    check_launch(op, stream);
}

void hopper_cross_entropy_losses(const LinearCrossEntropy& x, Stream stream) {
    forward<Keep::Exponentials>("linear_cross_entropy_losses", x, stream);
}

void hopper_cross_entropy_gradient(const LinearCrossEntropy& x, Stream stream) {
    const char* op = "linear_cross_entropy_gradient";
    const DType T = DType::BF16;
    check_cross_entropy_backward(op, T, x.logits, x.losses, x.dlosses, x.targets, x.V, x.softcap);
    const int64_t N = x.logits.shape[0], C = x.weight.shape[1];
    check_matrix(op, "inp", x.inp, N, C, Given::Required, T);
    check_matrix(op, "dinp", x.dinp, N, C, Given::Required, T);
    if (x.dweight) {
        scale_by_token(op, x, x.inp, stream);
        matmul_backward_weight(x.dweight, {}, x.logits, x.inp, x.accumulate, stream);
    }
    matmul_backward_input(x.dinp, x.logits, x.weight, false, stream);
    scale_by_token(op, x, x.dinp, stream);
}

void hopper_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream) {
    forward<Keep::Nothing>("linear_cross_entropy_forward", x, stream);
}
