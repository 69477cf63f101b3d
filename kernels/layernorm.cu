#include "kernels/layernorm.h"

#include "kernels/cuda/row_norm.cuh"
#include "kernels/norm_check.h"

void layernorm_forward(Tensor out, Tensor sum, Tensor mean, Tensor rstd, Tensor inp, Tensor residual, Tensor weight,
                       Tensor bias, float eps, Stream stream) {
    const char* op = "layernorm_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const NormSizes z = check_norm_forward(op, dtype, out, sum, rstd, inp, residual, weight);
    const int64_t N = z.N, C = z.C;
    check_tensor(op, "mean", mean, DType::F32, {N}, Given::Optional);
    check_tensor(op, "bias", bias, DType::F32, {C}, Given::Optional);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        norm_detail::ForwardArguments<T> a{};
        a.out = out.as<T>();
        a.out_stride = row_stride(out);
        if (sum) {
            a.sum = sum.as<T>();
            a.sum_stride = row_stride(sum);
        }
        a.mean = mean.as<float>();
        a.rstd = rstd.as<float>();
        a.inp = inp.as<T>();
        a.inp_stride = row_stride(inp);
        if (residual) {
            a.residual = residual.as<T>();
            a.residual_stride = row_stride(residual);
        }
        a.weight = weight.as<float>();
        a.bias = bias.as<float>();
        a.N = N;
        a.C = C;
        a.eps = eps;
        launch_norm_forward<true>(op, a, rows_aligned({out, sum, inp, residual, weight, bias}), stream);
    });
}

void layernorm_backward(Tensor dinp, Tensor dweight, Tensor dbias, Tensor dsum, Tensor dout, Tensor dresidual,
                        Tensor inp, Tensor weight, Tensor mean, Tensor rstd, Tensor scratch, bool accumulate,
                        Stream stream) {
    const char* op = "layernorm_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const NormSizes z = check_norm_backward(op, dtype, dinp, dweight, dsum, dout, dresidual, inp, weight, rstd);
    const int64_t N = z.N, C = z.C;
    check_tensor(op, "dbias", dbias, DType::F32, {C}, Given::Optional);
    check_tensor(op, "mean", mean, DType::F32, {N});
    check_scratch(op, scratch, layernorm_backward_scratch(N, C));
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        norm_detail::BackwardArguments<T> a{};
        a.dinp = dinp.as<T>();
        a.dinp_stride = row_stride(dinp);
        a.partials = reinterpret_cast<float*>(scratch.as<uint8_t>());
        a.dout = dout.as<T>();
        a.dout_stride = row_stride(dout);
        if (dresidual) {
            a.dresidual = dresidual.as<T>();
            a.dresidual_stride = row_stride(dresidual);
        }
        a.inp = inp.as<T>();
        a.inp_stride = row_stride(inp);
        a.weight = weight.as<float>();
        a.mean = mean.as<float>();
        a.rstd = rstd.as<float>();
        a.N = N;
        a.C = C;
        launch_norm_backward<true>(op, a, dweight.as<float>(), dbias.as<float>(), dsum.as<float>(), accumulate,
                                   rows_aligned({dinp, dout, dresidual, inp, weight}), stream);
    });
}
