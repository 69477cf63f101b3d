#include "kernels/norm.h"

#include "kernels/cuda/row_norm.cuh"
#include "kernels/norm_check.h"

namespace {

int64_t stride_of(const Tensor& t) {
    return t ? row_stride(t) : 0;
}

// Null, of whatever dtype a tensor that is not given has.
template <typename T>
T* optional(const Tensor& t) {
    return t ? t.as<T>() : nullptr;
}

template <bool CENTRED, bool ADD_AFTER>
void forward(const char* op, const NormForward& a, Stream stream) {
    const DType dtype = check_activation_dtype(op, "inp", a.inp);
    const NormSizes z = check_norm(op, a, dtype, CENTRED, ADD_AFTER);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const norm_detail::ForwardArguments<T> arguments{.out = a.out.as<T>(),
                                                         .sum = optional<T>(a.sum),
                                                         .mean = a.mean.as<float>(),
                                                         .rstd = a.rstd.as<float>(),
                                                         .inp = a.inp.as<T>(),
                                                         .residual = optional<T>(a.residual),
                                                         .weight = a.weight.as<float>(),
                                                         .bias = a.bias.as<float>(),
                                                         .out_stride = stride_of(a.out),
                                                         .sum_stride = stride_of(a.sum),
                                                         .inp_stride = stride_of(a.inp),
                                                         .residual_stride = stride_of(a.residual),
                                                         .N = z.N,
                                                         .C = z.C,
                                                         .eps = a.eps};
        launch_norm_forward<CENTRED, ADD_AFTER>(
            op, arguments, rows_aligned({a.out, a.sum, a.inp, a.residual, a.weight, a.bias}), stream);
    });
}

template <bool CENTRED>
void backward(const char* op, const NormBackward& a, Stream stream) {
    const DType dtype = check_activation_dtype(op, "inp", a.inp);
    const NormSizes z = check_norm(op, a, dtype, CENTRED);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const norm_detail::BackwardArguments<T> arguments{.dinp = a.dinp.as<T>(),
                                                          .partials = reinterpret_cast<float*>(a.scratch.as<uint8_t>()),
                                                          .dout = a.dout.as<T>(),
                                                          .dresidual = optional<T>(a.dresidual),
                                                          .inp = a.inp.as<T>(),
                                                          .weight = a.weight.as<float>(),
                                                          .mean = a.mean.as<float>(),
                                                          .rstd = a.rstd.as<float>(),
                                                          .dinp_stride = stride_of(a.dinp),
                                                          .dout_stride = stride_of(a.dout),
                                                          .dresidual_stride = stride_of(a.dresidual),
                                                          .inp_stride = stride_of(a.inp),
                                                          .N = z.N,
                                                          .C = z.C};
        launch_norm_backward<CENTRED>(op, arguments, a.dweight.as<float>(), a.dbias.as<float>(), a.dsum.as<float>(),
                                      a.accumulate, rows_aligned({a.dinp, a.dout, a.dresidual, a.inp, a.weight}),
                                      stream);
    });
}

}  // namespace

void layernorm_forward(const NormForward& a, Stream stream) {
    forward<true, false>("layernorm_forward", a, stream);
}

void rmsnorm_forward(const NormForward& a, Stream stream) {
    forward<false, false>("rmsnorm_forward", a, stream);
}

void rmsnorm_add_forward(const NormForward& a, Stream stream) {
    forward<false, true>("rmsnorm_add_forward", a, stream);
}

void layernorm_backward(const NormBackward& a, Stream stream) {
    backward<true>("layernorm_backward", a, stream);
}

void rmsnorm_backward(const NormBackward& a, Stream stream) {
    backward<false>("rmsnorm_backward", a, stream);
}
