// Argument checks of softmax, for both backends.
#pragma once

#include "kernels/check.h"

struct SoftmaxSizes {
    int64_t R, K;
};

inline SoftmaxSizes check_softmax_forward(const char* op, DType dtype, const Tensor& out, const Tensor& inp,
                                          const Tensor& mask, int64_t Q) {
    require(inp && inp.rank == 2, op, ": inp is ", shape_string(inp), ", expected [R, K]");
    const SoftmaxSizes z{inp.shape[0], inp.shape[1]};
    check_tensor(op, "inp", inp, dtype, {z.R, z.K});
    check_tensor(op, "out", out, dtype, {z.R, z.K});
    require(Q > 0 && z.R % Q == 0, op, ": ", z.R, " rows are not a multiple of Q = ", Q);
    check_tensor(op, "mask", mask, DType::U8, {Q, z.K}, Given::Optional);
    return z;
}

inline SoftmaxSizes check_softmax_backward(const char* op, DType dtype, const Tensor& dinp, const Tensor& dout,
                                           const Tensor& out) {
    require(out && out.rank == 2, op, ": out is ", shape_string(out), ", expected [R, K]");
    const SoftmaxSizes z{out.shape[0], out.shape[1]};
    check_tensor(op, "dinp", dinp, dtype, {z.R, z.K});
    check_tensor(op, "dout", dout, dtype, {z.R, z.K});
    check_tensor(op, "out", out, dtype, {z.R, z.K});
    return z;
}
