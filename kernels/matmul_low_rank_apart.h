// kernels/matmul_low_rank.h as several matmuls: those of the adapters, and one with the weight that adds to them. Both
// backends have it. Checks arguments as the functions there.
#pragma once

#include "kernels/matmul_low_rank.h"

namespace low_rank_apart {

void forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, const LowRank& low_rank, Stream stream);
void forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                        const LowRank& low_rank, Stream stream);
void backward_input(Tensor dinp, Tensor dout, Tensor weight, const LowRankGradient& low_rank, bool accumulate,
                    Stream stream);
void backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight, Tensor pre,
                         const LowRankGradient& low_rank, Stream stream);

}  // namespace low_rank_apart
