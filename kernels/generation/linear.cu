// Chooses the kernel of a linear layer by the number of rows N and the matrix: GEMV for up to 8 rows, or for any number
// where batch invariance is asked for; a small-batch GEMM for up to 64 rows; otherwise a norm, the library's GEMM and
// an activation one after the other.
#include "kernels/generation/linear.h"

#include "kernels/generation/linear.cuh"
#include "kernels/generation/linear_check.h"
#include "kernels/matmul.h"

namespace {

template <typename T>
LinearParams<T> make_params(const LinearSizes& z, const LinearOutput& output, const Tensor& inp, const InputNorm& norm,
                            const LinearWeights& weights) {
    const auto& [out, activation, residual] = output;
    const Tensor &weight = weights.weight, &bias = weights.bias;
    LinearParams<T> p{};
    p.inp = inp.as<T>();
    p.inp_stride = row_stride(inp);
    p.weight = weight.as<T>();
    p.weight_stride = row_stride(weight);
    p.out = out.as<T>();
    p.out_stride = row_stride(out);
    if (bias) p.bias = bias.as<T>();
    if (residual) {
        p.residual = residual.as<T>();
        p.residual_stride = row_stride(residual);
    }
    p.norm_weight = norm.weight.as<float>();
    p.norm_bias = norm.bias.as<float>();
    p.C = z.C;
    p.OC = z.OC;
    p.columns = z.columns;
    p.N = int(z.N);
    p.eps = norm.eps;
    p.centred = norm.centred;
    p.activation = activation;
    p.aligned = rows_aligned({inp, weight, norm.weight, norm.bias});
    return p;
}

// False if the layer needs the library.
template <typename T>
bool launch_own_kernel(const char* op, const LinearParams<T>& p, bool batch_invariant, Stream stream) {
    if ((p.N <= LINEAR_SMALL_N || batch_invariant) && linear_gemv(op, p, stream)) return true;
    if constexpr (sizeof(T) == 2) {
#ifdef HAVE_SM90A
        if (linear_small_batch_hopper(op, p, stream)) return true;
#endif
        return linear_small_batch(op, p, stream);
    }
    return false;
}

}  // namespace

int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype) {
    return linear_normed_bytes(N, C, dtype) + N * OC * dtype_size(dtype);
}

void linear(const LinearOutput& output, Tensor inp, const InputNorm& norm, const LinearWeights& weights, Tensor scratch,
            bool batch_invariant, Stream stream) {
    const char* op = "linear";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const LinearSizes z = check_linear(op, dtype, output, inp, norm, weights, scratch);
    if (z.N == 0 || z.OC == 0) return;
    bool done = false;
    dispatch_dtype(op, dtype, [&](auto zero) {
        const auto p = make_params<decltype(zero)>(z, output, inp, norm, weights);
        done = launch_own_kernel(op, p, batch_invariant, stream);
    });
    if (done) return;
    const Tensor &out = output.out, &weight = weights.weight, &bias = weights.bias;
    const Activation activation = output.activation;
    Tensor residual = output.residual;
    const Tensor x = norm.weight ? linear_normed(scratch, z, inp, norm, stream) : inp;
    if (activation != Activation::None)
        return matmul_forward_activation(activation, out, linear_pre_activation(scratch, z, inp), x, weight, bias,
                                         stream);
    if (!residual) return matmul_forward(out, x, weight, bias, stream);
    if (row_stride(residual) != row_stride(out)) {
        const size_t width = size_t(z.columns * dtype_size(dtype)), item = size_t(dtype_size(dtype));
        cuda_check(cudaMemcpy2DAsync(out.data, size_t(row_stride(out)) * item, residual.data,
                                     size_t(row_stride(residual)) * item, width, size_t(z.N), cudaMemcpyDeviceToDevice,
                                     cuda_stream(stream)),
                   op);
        residual = out;
    }
    matmul_forward_add(out, x, weight, bias, residual, stream);
}
