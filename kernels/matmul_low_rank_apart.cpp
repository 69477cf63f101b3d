#include "kernels/matmul_low_rank_apart.h"

#include "kernels/activation.h"
#include "kernels/matmul_low_rank_check.h"

void matmul_low_rank(Tensor out, const LowRank& low_rank, bool accumulate, Stream stream) {
    check_low_rank("matmul_low_rank", low_rank, out);
    const LoraWeights& adapters = low_rank.adapters;
    const int64_t R = adapters.b.shape[1];
    for_each_part(adapters, [&](const LoraPart& part, int64_t row, int64_t column) {
        const Tensor to = out.columns(part.row, part.row + part.rows), h = low_rank.h.columns(column, column + R),
                     b = adapters.b.rows(row, row + part.rows);
        if (accumulate)
            matmul_forward_add(to, h, b, {}, to, stream);
        else
            matmul_forward(to, h, b, {}, stream);
    });
}

namespace low_rank_apart {

// Adapters that cover all of out write it first: the read of out hides in the epilogue of the large matmul, while a
// thin one would wait for it.
void forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, const LowRank& low_rank, Stream stream) {
    if (covers(low_rank.adapters, out.shape[1])) {
        matmul_low_rank(out, low_rank, false, stream);
        matmul_forward_add(out, inp, weight, bias, out, stream);
    } else {
        matmul_forward(out, inp, weight, bias, stream);
        matmul_low_rank(out, low_rank, true, stream);
    }
}

void forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                        const LowRank& low_rank, Stream stream) {
    forward(pre, inp, weight, bias, low_rank, stream);
    activation_forward(f, out, pre, stream);
}

void backward_input(Tensor dinp, Tensor dout, Tensor weight, const LowRankGradient& low_rank, bool accumulate,
                    Stream stream) {
    matmul_backward_input(dinp, low_rank.dh, low_rank.a, accumulate, stream);
    matmul_backward_input(dinp, dout, weight, true, stream);
}

void backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight, Tensor pre,
                         const LowRankGradient& low_rank, Stream stream) {
    backward_input(d.dact, dout, weight, low_rank, false, stream);
    activation_backward(f, d.dpre, d.act, d.dact, pre, stream);
}

}  // namespace low_rank_apart
