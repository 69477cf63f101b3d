#include "kernels/matmul_low_rank.h"

#include <algorithm>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/matmul_check.h"
#include "kernels/matmul_low_rank_apart.h"
#include "kernels/matmul_low_rank_check.h"

// Bytes are copied, whatever the dtype.
void block_diagonal(Tensor out, const LoraWeights& adapters, Stream) {
    check_block_diagonal("block_diagonal", out, adapters);
    const int64_t size = dtype_size(out.dtype), row_bytes = out.shape[1] * size,
                  part_bytes = adapters.b.shape[1] * size;
    char* const to = static_cast<char*>(out.data);
    std::fill_n(to, out.shape[0] * row_bytes, char(0));
    for_each_part(adapters, [&](const LoraPart& part, int64_t row, int64_t column) {
        for (int64_t i = 0; i < part.rows; i++)
            std::copy_n(static_cast<const char*>(adapters.b.data) + (row + i) * row_stride(adapters.b) * size,
                        part_bytes, to + (part.row + i) * row_bytes + column * size);
    });
}

void matmul_low_rank_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, const LowRank& low_rank,
                             Stream stream) {
    check_low_rank("matmul_low_rank_forward", low_rank, out);
    low_rank_apart::forward(out, inp, weight, bias, low_rank, stream);
}

void matmul_low_rank_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                                        const LowRank& low_rank, Stream stream) {
    const char* op = "matmul_low_rank_forward_activation";
    check_activation_forward(op, f, out, pre, DType::F32);
    check_low_rank(op, low_rank, pre);
    low_rank_apart::forward_activation(f, out, pre, inp, weight, bias, low_rank, stream);
}

void matmul_low_rank_backward_input(Tensor dinp, Tensor dout, Tensor weight, const LowRankGradient& low_rank,
                                    bool accumulate, Stream stream) {
    check_low_rank("matmul_low_rank_backward_input", low_rank, dinp);
    low_rank_apart::backward_input(dinp, dout, weight, low_rank, accumulate, stream);
}

void matmul_low_rank_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight,
                                         Tensor pre, const LowRankGradient& low_rank, Stream stream) {
    const char* op = "matmul_low_rank_backward_activation";
    check_activation_gradient(op, f, d, pre, DType::F32);
    check_low_rank(op, low_rank, d);
    low_rank_apart::backward_activation(f, d, dout, weight, pre, low_rank, stream);
}
