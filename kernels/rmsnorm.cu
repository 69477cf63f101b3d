#include "kernels/rmsnorm.h"

#include "kernels/cuda/row_norm.cuh"
#include "kernels/norm_check.h"

void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps,
                     Stream stream) {
    const char* op = "rmsnorm_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const NormSizes z = check_norm_forward(op, dtype, out, sum, rstd, inp, residual, weight);
    const int64_t N = z.N, C = z.C;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        norm_detail::ForwardArguments<T> a{};
        a.out = out.as<T>();
        a.out_stride = row_stride(out);
        if (sum) {
            a.sum = sum.as<T>();
            a.sum_stride = row_stride(sum);
        }
        a.rstd = rstd.as<float>();
        a.inp = inp.as<T>();
        a.inp_stride = row_stride(inp);
        if (residual) {
            a.residual = residual.as<T>();
            a.residual_stride = row_stride(residual);
        }
        a.weight = weight.as<float>();
        a.N = N;
        a.C = C;
        a.eps = eps;
        launch_norm_forward<false>(op, a, rows_aligned({out, sum, inp, residual, weight}), stream);
    });
}

void rmsnorm_add_forward(Tensor out, Tensor rstd, Tensor inp, Tensor residual, Tensor weight, float eps,
                         Stream stream) {
    const char* op = "rmsnorm_add_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const NormSizes z = check_norm_forward(op, dtype, out, {}, rstd, inp, residual, weight, Given::Required);
    const int64_t N = z.N, C = z.C;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        norm_detail::ForwardArguments<T> a{};
        a.out = out.as<T>();
        a.out_stride = row_stride(out);
        a.rstd = rstd.as<float>();
        a.inp = inp.as<T>();
        a.inp_stride = row_stride(inp);
        a.residual = residual.as<T>();
        a.residual_stride = row_stride(residual);
        a.weight = weight.as<float>();
        a.N = N;
        a.C = C;
        a.eps = eps;
        launch_norm_forward<false, true>(op, a, rows_aligned({out, inp, residual, weight}), stream);
    });
}

void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dsum, Tensor dout, Tensor dresidual, Tensor inp,
                      Tensor weight, Tensor rstd, Tensor scratch, bool accumulate, Stream stream) {
    const char* op = "rmsnorm_backward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const NormSizes z = check_norm_backward(op, dtype, dinp, dweight, dsum, dout, dresidual, inp, weight, rstd);
    const int64_t N = z.N, C = z.C;
    check_scratch(op, scratch, rmsnorm_backward_scratch(N, C));
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
        a.rstd = rstd.as<float>();
        a.N = N;
        a.C = C;
        launch_norm_backward<false>(op, a, dweight.as<float>(), static_cast<float*>(nullptr), dsum.as<float>(),
                                    accumulate, rows_aligned({dinp, dout, dresidual, inp, weight}), stream);
    });
}
