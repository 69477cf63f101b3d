// A matmul with a weight whose inner dimension the adapters continue (GemmKey::K2), where that is faster than matmuls
// of their own (matmul_low_rank_apart.h).
#include "kernels/matmul_low_rank.h"

#include <algorithm>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/linear_gemm.h"
#include "kernels/matmul_low_rank_apart.h"
#include "kernels/matmul_low_rank_check.h"

namespace {

constexpr int MAX_PARTS = 3;  // q, k and v

struct Parts {
    LoraPart part[MAX_PARTS];
    int64_t R;
};

bool few_parts(const LoraWeights& adapters) {
    return adapters.parts->size() <= MAX_PARTS;
}

// A thread writes an element. LLaMA 8B, q, k and v with rank 16: 6144 x 48, 1,152 blocks.
template <typename T>
__global__ void block_diagonal_kernel(T* out, const T* b, int64_t stride, const __grid_constant__ Parts parts,
                                      int64_t rows, int64_t columns) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= rows * columns) return;
    const int64_t row = i / columns, column = i % columns, of = column / parts.R;
    int64_t first = 0;  // of the part's rows of B
    for (int64_t earlier = 0; earlier < of; earlier++) first += parts.part[earlier].rows;
    const int64_t within = row - parts.part[of].row;
    const bool inside = within >= 0 && within < parts.part[of].rows;
    out[i] = inside ? b[(first + within) * stride + column % parts.R] : T{};
}

// The matrix [OC, P·R] whose product with h is what the adapters add: B itself if one adapter covers all of out, else
// block_diagonal() in the scratch, which write() fills. Null where there is neither.
struct WholeB {
    const LowRank& low_rank;
    bool direct;
    Tensor b;

    WholeB(const LowRank& of, int64_t OC) : low_rank(of) {
        const LoraWeights& adapters = of.adapters;
        direct = adapters.parts->size() == 1 && covers(adapters, OC);
        if (direct) b = adapters.b;
        if (direct || !of.scratch || !few_parts(adapters)) return;
        const int64_t ranks = of.h.shape[1];
        if (of.scratch.bytes() >= OC * ranks * dtype_size(adapters.b.dtype))
            b = make_tensor(of.scratch.data, adapters.b.dtype, adapters.b.device, {OC, ranks});
    }
    void write(Stream stream) const {
        if (!direct) block_diagonal(b, low_rank.adapters, stream);
    }
};

void extend(Gemm& gemm, const Tensor& a2, const Tensor& b2) {
    gemm.key.K2 = a2.shape[1];
    gemm.key.ld_a2 = row_stride(a2);
    gemm.key.ld_b2 = row_stride(b2);
    gemm.key.align_a2 = gemm_alignment(a2.data);
    gemm.key.align_b2 = gemm_alignment(b2.data);
    gemm.operands.a2 = a2.data;
    gemm.operands.b2 = b2.data;
}

// Runs the extended GEMM after prepare(), which writes its operands, or `apart`, which computes the same with several
// kernels: so it is where nothing was timed. The rows of both are independent of each other with
// matmul_batch_invariant(), but their bits differ, and which one is faster depends on the number of rows.
template <typename Prepare, typename Apart>
void run_extended(const char* op, const Gemm& gemm, Stream stream, Prepare prepare, Apart apart) {
    if (!hopper_takes(gemm) || is_batch_invariant(op, gemm.key, stream)) return apart();
    GemmPlan& plan = blas_plan(op, gemm.key, gemm.operands, stream);
    Kernels kernels;
    kernels.add(GemmKernel::Separate);
    add_hopper_kernels(kernels, gemm);
    run_fastest(op, plan, kernels, stream, [&](GemmKernel kernel) {
        if (kernel == GemmKernel::Separate) return apart();
        prepare();
        run_hopper(op, gemm, kernel, stream);
    });
}

}  // namespace

void block_diagonal(Tensor out, const LoraWeights& adapters, Stream stream) {
    const char* op = "block_diagonal";
    check_block_diagonal(op, out, adapters);
    require(few_parts(adapters), op, ": ", adapters.parts->size(), " parts, expected at most ", MAX_PARTS);
    if (out.numel() == 0) return;
    Parts parts{};
    std::copy(adapters.parts->begin(), adapters.parts->end(), parts.part);
    parts.R = adapters.b.shape[1];
    dispatch_dtype(op, out.dtype, [&](auto zero) {
        using T = decltype(zero);
        block_diagonal_kernel<<<unsigned(ceil_div(out.numel(), 256)), 256, 0, cuda_stream(stream)>>>(
            out.as<T>(), adapters.b.as<T>(), row_stride(adapters.b), parts, out.shape[0], out.shape[1]);
    });
    check_launch(op, stream);
}

void matmul_low_rank_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, const LowRank& low_rank,
                             Stream stream) {
    const char* op = "matmul_low_rank_forward";
    const DType dtype = check_forward(op, inp, weight, bias);
    check_matrix(op, "out", out, inp.shape[0], weight.shape[0], Given::Required, dtype);
    check_low_rank(op, low_rank, out);
    const auto apart = [&] { low_rank_apart::forward(out, inp, weight, bias, low_rank, stream); };
    const WholeB b(low_rank, out.shape[1]);
    if (!b.b || out.numel() == 0) return apart();
    Gemm gemm =
        make_gemm(out, inp, weight, false, true, false, bias ? GemmEpilogue::Bias : GemmEpilogue::None, bias, {});
    extend(gemm, low_rank.h, b.b);
    run_extended(
        op, gemm, stream, [&] { b.write(stream); }, apart);
}

void matmul_low_rank_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                                        const LowRank& low_rank, Stream stream) {
    const char* op = "matmul_low_rank_forward_activation";
    const DType dtype = check_forward(op, inp, weight, bias);
    check_matrix(op, "pre", pre, inp.shape[0], weight.shape[0], Given::Required, dtype);
    const int64_t I = check_activation_forward(op, f, out, pre, dtype);
    check_low_rank(op, low_rank, pre);
    const auto apart = [&] { low_rank_apart::forward_activation(f, out, pre, inp, weight, bias, low_rank, stream); };
    const WholeB b(low_rank, pre.shape[1]);
    const GemmEpilogue epilogue = bias ? epilogues_of(f).forward_bias : epilogues_of(f).forward;
    if (!b.b || !can_fuse({out, pre, inp, weight})) return apart();
    Gemm gemm = gemm_with_activation(epilogue, out, I, inp, weight, true, bias, pre);
    extend(gemm, low_rank.h, b.b);
    run_extended(
        op, gemm, stream, [&] { b.write(stream); }, apart);
}

void matmul_low_rank_backward_input(Tensor dinp, Tensor dout, Tensor weight, const LowRankGradient& low_rank,
                                    bool accumulate, Stream stream) {
    const char* op = "matmul_low_rank_backward_input";
    check_backward_input(op, dinp, dout, weight);
    check_low_rank(op, low_rank, dinp);
    const auto apart = [&] { low_rank_apart::backward_input(dinp, dout, weight, low_rank, accumulate, stream); };
    if (dinp.numel() == 0 || dout.shape[1] == 0) return apart();
    Gemm gemm = make_gemm(dinp, dout, weight, false, false, accumulate, GemmEpilogue::None, {}, {});
    extend(gemm, low_rank.dh, low_rank.a);
    run_extended(
        op, gemm, stream, [] {}, apart);
}

void matmul_low_rank_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight,
                                         Tensor pre, const LowRankGradient& low_rank, Stream stream) {
    const char* op = "matmul_low_rank_backward_activation";
    const DType dtype = check_backward_input(op, d.dact, dout, weight);
    check_activation_gradient(op, f, d, pre, dtype);
    check_low_rank(op, low_rank, d);
    const auto apart = [&] { low_rank_apart::backward_activation(f, d, dout, weight, pre, low_rank, stream); };
    std::optional<Gemm> gemm = gradient_gemm(f, d, dout, weight, pre);
    if (!gemm) return apart();
    extend(*gemm, low_rank.dh, low_rank.a);
    run_extended(
        op, *gemm, stream, [] {}, apart);
}
