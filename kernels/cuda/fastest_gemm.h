// CUDA only: a GEMM with its operands, and the choice among the kernels that compute it, the library's and our own.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "kernels/gemm_hopper.h"
#include "runtime/device/blas.h"
#include "runtime/timing.h"

struct Gemm {
    GemmKey key;
    GemmOperands operands;
};

// The caller has checked shapes. bias and aux are null or of a's dtype.
inline Gemm make_gemm(const Tensor& out, const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b,
                      bool accumulate, GemmEpilogue epilogue, const Tensor& bias, const Tensor& aux) {
    GemmKey key;
    key.M = out.shape[0];
    key.N = out.shape[1];
    key.K = a.shape[transpose_a ? 0 : 1];
    key.ld_out = row_stride(out);
    key.ld_a = row_stride(a);
    key.ld_b = row_stride(b);
    key.ld_aux = aux ? row_stride(aux) : 0;
    key.dtype = a.dtype;
    key.out_dtype = out.dtype;
    key.transpose_a = transpose_a;
    key.transpose_b = transpose_b;
    key.accumulate = accumulate;
    key.epilogue = epilogue;
    key.align_out = gemm_alignment(out.data);
    key.align_a = gemm_alignment(a.data);
    key.align_b = gemm_alignment(b.data);
    key.align_bias = gemm_alignment(bias.data);
    key.align_aux = gemm_alignment(aux.data);
    return {key, {out.data, a.data, b.data, accumulate ? out.data : nullptr, bias.data, aux.data}};
}

// The kernels that compute a GEMM with what follows it.
struct Kernels {
    std::array<GemmKernel, 4> all{};
    size_t count = 0;
    void add(GemmKernel kernel) { all[count++] = kernel; }
    bool has(GemmKernel kernel) const {
        return std::find(all.begin(), all.begin() + count, kernel) != all.begin() + count;
    }
};

inline bool hopper_takes([[maybe_unused]] const Gemm& gemm) {
#ifdef HAVE_SM90A
    return hopper_gemm_takes(gemm.key) && gemm.operands.beta == 1;
#else
    return false;
#endif
}

inline void add_hopper_kernels(Kernels& kernels, const Gemm& gemm) {
    if (!hopper_takes(gemm)) return;
    kernels.add(GemmKernel::Hopper1);
    kernels.add(GemmKernel::Hopper2);
}

inline void run_hopper([[maybe_unused]] const char* op, [[maybe_unused]] const Gemm& gemm,
                       [[maybe_unused]] GemmKernel kernel, [[maybe_unused]] Stream stream) {
#ifdef HAVE_SM90A
    hopper_gemm(op, gemm.key, gemm.operands, kernel == GemmKernel::Hopper1 ? 1 : 2, stream);
#endif
}

// Whether the rows of this GEMM may not depend on each other (matmul_batch_invariant()).
inline bool is_batch_invariant(const char* op, const GemmKey& key, Stream stream) {
    return !key.transpose_a && key.transpose_b && blas_of(op, stream).batch_invariant;
}

// There is nothing to tune: a decode step has as many rows as there are sequences left, so that sizes are new all the
// time. Clusters, which change no bit, pay where each of the two blocks has many tiles of rows.
inline void run_batch_invariant(const char* op, const Gemm& gemm, Stream stream) {
    constexpr int64_t MANY_ROWS = 1024;
    require(hopper_takes(gemm), op,
            ": hopper_gemm(), whose rows do not depend on each other, does not take M = ", gemm.key.M,
            ", N = ", gemm.key.N, ", K = ", gemm.key.K, ", ", dtype_name(gemm.key.dtype), " to ",
            dtype_name(gemm.key.out_dtype), "; it takes bf16 with N and row strides that are multiples of 8");
    run_hopper(op, gemm, gemm.key.M < MANY_ROWS ? GemmKernel::Hopper1 : GemmKernel::Hopper2, stream);
}

// Runs the fastest kernel, which tuning finds. Untuned it is the library's, or the first where the library has none.
template <typename Run>
void run_fastest(const char* op, GemmPlan& plan, const Kernels& kernels, Stream stream, Run run) {
    const Blas& blas = blas_of(op, stream);
    if (plan.adopted && !kernels.has(plan.kernel)) {
        plan.kernel = GemmKernel::Library;
        plan.compared = false;
    }
    plan.adopted = false;
    if (blas.tuning && !blas.only_kernel && !plan.compared && kernels.count > 1) {
        std::vector<std::function<void()>> work;
        for (size_t i = 0; i < kernels.count; i++) {
            run(kernels.all[i]);  // tunes the GEMMs in it
            work.emplace_back([&run, kernel = kernels.all[i]] { run(kernel); });
        }
        const bool full_power = draws_full_power(timed_ms(work[0], 1, stream));
        const std::vector<double> medians = time_in_turns(work, stream, full_power ? LONG_SAMPLE_MS : SHORT_SAMPLE_MS);
        const size_t best = fastest_of(medians);
        plan.kernel = kernels.all[best];
        plan.milliseconds = medians[best];
        plan.compared = true;
    }
    const GemmKernel wanted = blas.only_kernel.value_or(plan.kernel);
    run(kernels.has(wanted) ? wanted : kernels.all[0]);
}

inline void run_fastest_gemm(const char* op, const Gemm& gemm, Stream stream) {
    const GemmKey& key = gemm.key;
    GemmPlan& plan = blas_plan(op, key, gemm.operands, stream);
    Kernels kernels;
    if (plan.possible) kernels.add(GemmKernel::Library);
    add_hopper_kernels(kernels, gemm);
    require(kernels.count > 0, op, ": cuBLASLt has no algorithm for M = ", key.M, ", N = ", key.N, ", K = ", key.K,
            ", batch ", key.batch, ", ", dtype_name(key.dtype), " to ", dtype_name(key.out_dtype));
    run_fastest(op, plan, kernels, stream, [&](GemmKernel kernel) {
        if (kernel == GemmKernel::Library)
            blas_multiply(op, key, plan, gemm.operands, stream);
        else
            run_hopper(op, gemm, kernel, stream);
    });
}

// For the matmuls of a linear layer: with matmul_batch_invariant() the forward pass has no choice.
inline void run_gemm(const char* op, const Gemm& gemm, Stream stream) {
    if (is_batch_invariant(op, gemm.key, stream)) return run_batch_invariant(op, gemm, stream);
    run_fastest_gemm(op, gemm, stream);
}
