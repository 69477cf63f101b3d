// A linear layer with what surrounds it in a block, for inference: the norm before it, its bias, an activation, and the
// addition to the residual.
//
//   x = norm(inp)                                      x = inp without a norm
//   y[n, o] = Σ_c x[n, c]·weight[o, c] + bias[o]
//   out = residual + y, or out = f(y)                  f: activation.h; if it is gated,
//                                                      gate = y[n, i], up = y[n, I + i], OC = 2·I
//
// In generation N is small, and the time is that of reading the weights; everything else overlaps with it. On the CPU
// every sum over c has the same order for all N: a row's result does not depend on the batch, bit for bit. On CUDA that
// holds for N ≤ LINEAR_SMALL_N (2 on Hopper in 16 bits), and for all N with `batch_invariant`: a GEMV kernel reads the
// weights once for 8 rows (fewer where rows are too long for shared memory). Small-batch GEMM kernels take up to 64
// rows of 16-bit elements: on Hopper all matrices but those of heads, elsewhere those that are read in the time of a
// launch or two. Otherwise matmul.h multiplies, and the library chooses the order of sums.
//
// T is the dtype of inp, weight, bias, residual and out: fp32; on CUDA also bf16 and fp16. Norm weights and sums are
// fp32; x is rounded to T, and so is y where matmul.h computes it.
//
// Packed weights (kernels/packed_weight.h) are dequantised in registers, and on CUDA rounded to T there; so are NF4
// weights. On the CPU x is quantised too where they are Int8 or Int4: in groups of 32 to int8, with d = max |x| / 127
// in fp32. A group's sum is an exact integer, so
//   y[n, o] = Σ_g d_x[n, g]·d_w[o, g]·(Σ code_x·code_w) + bias[o]
//
// Errors: wrong shape or dtype, odd OC with a gated f, an activation together with a residual, weights that are neither
// in T nor packed.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/activation_config.h"
#include "runtime/model/linear_weight.h"

// The norm of a linear layer's input: LayerNorm (centred) or RMSNorm; norm.h has the formulas.
struct InputNorm {
    Tensor weight, bias;  // [C] fp32; weight null: no norm, bias null: none
    float eps = 1e-5f;
    bool centred = true;
};

constexpr int64_t LINEAR_SMALL_N = 8;
// Rows of inp up to which weights in T are multiplied by the GEMV without batch_invariant.
int64_t linear_gemv_rows(DType dtype);

// What becomes of y.
struct LinearOutput {
    Tensor out;  // [N, OC], with a gated f [N, OC/2]
    Activation activation = Activation::None;
    Tensor residual = {};  // as out, may be the same memory, or null
};

// inp [N, C]; scratch: linear_scratch bytes (U8).
void linear(const LinearOutput& output, Tensor inp, const InputNorm& norm, const LinearWeights& weights, Tensor scratch,
            bool batch_invariant, Stream stream);
// packed: for weights in T and for packed ones.
int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype, bool packed = false);
// The same for NF4 weights.
int64_t linear_nf4_scratch(int64_t N, int64_t C, int64_t OC, DType dtype);

// Rows between a residual and the norm before a layer, in a form that needs no pass of its own over them: the layer
// that makes the residual x also writes x∘w, w being the norm's weight, and the mean and M2 (kernels/cuda/
// row_statistics.cuh) of parts of x's rows; the layer behind the norm multiplies x∘w by its weights, and its sums
// become
//
//   y[n, o] = (Σ_c (x∘w)[n, c]·weight[o, c] − mean[n]·Σ_c w[c]·weight[o, c])·rstd[n]
//             + Σ_c b[c]·weight[o, c] + bias[o]
//
// mean = 0 and b = 0 are RMSNorm. x∘w is rounded to T, where otherwise the norm's result is.
struct UnscaledRows {
    Tensor rows;          // [N, C]: x∘w; without parts: a layer's input
    Tensor parts = {};    // [unscaled_parts(C), UNSCALED_MAX_ROWS, 2] fp32: mean, M2 of UNSCALED_COLUMNS columns each
    InputNorm norm = {};  // between x and the layer that reads the rows
};
constexpr int64_t UNSCALED_COLUMNS = 64, UNSCALED_MAX_ROWS = 64;
constexpr int64_t unscaled_parts(int64_t C) {
    return (C + UNSCALED_COLUMNS - 1) / UNSCALED_COLUMNS;
}

// Whether linear_unscaled() multiplies N rows behind the norm by these weights, and linear() would not be faster.
bool linear_takes_unscaled(int64_t N, const LinearWeights& weights, const InputNorm& norm, DType dtype);
// A layer that reads or makes such rows, or both: x of `next` is out, which has no activation then. On Hopper GPUs, up
// to 64 rows in bf16; false where that is not supported.
bool linear_unscaled(const LinearOutput& output, const UnscaledRows& inp, const LinearWeights& weights,
                     const UnscaledRows& next, Stream stream);
