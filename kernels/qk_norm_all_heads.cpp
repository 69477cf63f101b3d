// QK-norm of all heads together, for both backends.
#include "kernels/qk_norm_all_heads.h"

#include "kernels/check.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

namespace {

// q and k of a matrix of both.
struct QkRows {
    Tensor q, k;
};

QkRows split(const char* op, const Tensor& x, const QkWeights& weight) {
    require(weight.q && weight.k && x.rank == 2 && x.shape[1] == weight.q.numel() + weight.k.numel(), op, ": rows are ",
            shape_string(x), ", weights ", shape_string(weight.q), " and ", shape_string(weight.k),
            "; expected [N, Cq + Ck], [Cq] and [Ck]");
    const int64_t Cq = weight.q.numel();
    return {x.columns(0, Cq), x.columns(Cq, x.shape[1])};
}

}  // namespace

void qk_norm_all_heads_forward(Tensor out, QkRstd rstd, Tensor inp, QkWeights weight, Tensor positions, Tensor table,
                               int64_t H, float eps, Stream stream) {
    const char* op = "qk_norm_all_heads_forward";
    const QkRows x = split(op, inp, weight), y = split(op, out, weight);
    rmsnorm_forward({.out = y.q, .rstd = rstd.q, .inp = x.q, .weight = weight.q, .eps = eps}, stream);
    rmsnorm_forward({.out = y.k, .rstd = rstd.k, .inp = x.k, .weight = weight.k, .eps = eps}, stream);
    if (table) rope(split_heads(out, H), positions, table, false, stream);
}

void qk_norm_all_heads_backward(Tensor d, QkWeights dweight, Tensor inp, QkRstd rstd, QkWeights weight,
                                Tensor positions, Tensor table, int64_t H, Tensor scratch, bool accumulate,
                                Stream stream) {
    const char* op = "qk_norm_all_heads_backward";
    const QkRows x = split(op, inp, weight), dx = split(op, d, weight);
    if (table) rope(split_heads(d, H), positions, table, true, stream);
    const auto norm_backward = [&](Tensor part, Tensor dw, Tensor x_of_part, Tensor w, Tensor statistics) {
        rmsnorm_backward({.dinp = part,
                          .dweight = dw,
                          .dout = part,
                          .inp = x_of_part,
                          .weight = w,
                          .rstd = statistics,
                          .scratch = scratch,
                          .accumulate = accumulate},
                         stream);
    };
    norm_backward(dx.q, dweight.q, x.q, weight.q, rstd.q);
    norm_backward(dx.k, dweight.k, x.k, weight.k, rstd.k);
}
