#include "kernels/matmul_fp8.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/matmul_fp8_check.h"
#include "runtime/device/blas.h"

void matmul_fp8(Tensor out, const Fp8Matrix& a, const Fp8Matrix& b, Tensor bias, bool accumulate,
                bool fast_accumulation, Tensor, Stream stream) {
    const char* op = "matmul_fp8";
    check_matmul_fp8(op, out, a, b, bias, accumulate);
    require(out.dtype == DType::F32 || out.dtype == DType::BF16, op, ": out is ", dtype_name(out.dtype),
            ", expected fp32 or bf16");
    require(!bias || out.dtype == DType::BF16, op, ": a bias with an fp32 out; cuBLASLt adds only bf16 biases");
    require(rows_aligned({a.codes, b.codes}), op, ": rows of codes must be aligned to 16 bytes");
    require(gemm_alignment(a.scale.data) == 16 && gemm_alignment(b.scale.data) == 16, op,
            ": scales must be aligned to 16 bytes");
    static const std::string unavailable = matmul_fp8_unavailable();
    require(unavailable.empty(), op, ": ", unavailable);
    if (out.numel() == 0) return;
    GemmKey key;
    key.M = out.shape[0];
    key.N = out.shape[1];
    key.K = a.codes.shape[1];
    key.ld_out = row_stride(out);
    key.ld_a = row_stride(a.codes);
    key.ld_b = row_stride(b.codes);
    key.dtype = DType::U8;
    key.out_dtype = out.dtype;
    key.format_a = a.format;
    key.format_b = b.format;
    key.fast_accumulation = fast_accumulation;
    key.transpose_b = true;
    key.accumulate = accumulate;
    key.epilogue = bias ? GemmEpilogue::Bias : GemmEpilogue::None;
    key.align_out = gemm_alignment(out.data);
    key.align_a = gemm_alignment(a.codes.data);
    key.align_b = gemm_alignment(b.codes.data);
    key.align_bias = gemm_alignment(bias.data);
    GemmOperands operands{out.data, a.codes.data, b.codes.data, accumulate ? out.data : nullptr, bias.data};
    operands.inverse_scale_a = a.scale.as<float>() + FP8_INVERSE_SCALE;
    operands.inverse_scale_b = b.scale.as<float>() + FP8_INVERSE_SCALE;
    GemmPlan& plan = blas_plan(op, key, operands, stream);
    require(plan.possible, op, ": cuBLASLt has no algorithm for M = ", key.M, ", N = ", key.N, ", K = ", key.K, ", ",
            FP8_FORMAT_NAMES[size_t(a.format)], " x ", FP8_FORMAT_NAMES[size_t(b.format)], " to ",
            dtype_name(key.out_dtype));
    blas_multiply(op, key, plan, operands, stream);
}
