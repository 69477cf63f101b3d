#include "kernels/global_norm.h"

#include <cmath>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/global_norm_check.h"
#include "runtime/device/convert_dtype.h"

namespace {

typedef double dvec8 __attribute__((vector_size(64)));

// Σ x² of one block in fp64, where squares of fp32 are exact and neither overflow nor underflow.
MULTIARCH double sum_of_squares(const float* x, int64_t n) {
    dvec8 sum[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 4; k++) {
            vec8 v;
            std::memcpy(&v, x + i + 8 * k, sizeof(v));
            const dvec8 d = __builtin_convertvector(v, dvec8);
            sum[k] += d * d;
        }
    double rest = 0;
    for (; i < n; i++) rest += double(x[i]) * double(x[i]);
    const dvec8 s = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return (((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))) + rest;
}

// Of grads[begin, end).
double block_squares(const Tensor& grads, int64_t begin, int64_t end) {
    if (grads.dtype == DType::F32) return sum_of_squares(grads.as<float>() + begin, end - begin);
    constexpr int64_t CHUNK = 1024;  // stays in a first-level cache
    float values[CHUNK];
    double sum = 0;
    for (; begin < end; begin += CHUNK) {
        const int64_t n = std::min(CHUNK, end - begin);
        convert_to_float(values, grads.as<bf16>() + begin, DType::BF16, n);
        sum += sum_of_squares(values, n);
    }
    return sum;
}

}  // namespace

void sum_losses(Tensor loss_sum, Tensor losses, bool accumulate, Stream) {
    const char* op = "sum_losses";
    check_tensor(op, "loss_sum", loss_sum, DType::F64, {1});
    require(losses.rank == 1, op, ": losses is ", dtype_name(losses.dtype), " ", shape_string(losses),
            ", expected fp32 [n]");
    check_tensor(op, "losses", losses, DType::F32, {losses.shape[0]});
    const float* loss = losses.as<float>();
    double sum = 0;
    for (int64_t i = 0; i < losses.shape[0]; i++) sum += loss[i];
    double& total = *loss_sum.as<double>();
    total = accumulate ? total + sum : sum;
}

void sum_squares(Tensor sum, Tensor grads, bool accumulate, Tensor scratch, Stream) {
    const int64_t n = check_sum_squares(sum, grads, scratch);
    double* partial = reinterpret_cast<double*>(scratch.as<uint8_t>());
#pragma omp parallel for schedule(static) if (n > PARALLEL_MIN)
    for (int64_t b = 0; b < sum_squares_blocks(n, Device::CPU); b++)
        partial[b] = block_squares(grads, b * SUM_SQUARES_BLOCK, std::min((b + 1) * SUM_SQUARES_BLOCK, n));
    double whole = 0;
    for (int64_t b = 0; b < sum_squares_blocks(n, Device::CPU); b++) whole += partial[b];
    double& total = *sum.as<double>();
    total = accumulate ? total + whole : whole;
}

static float median_norm(const StepScalars& s) {
    float sorted[GRAD_NORM_WINDOW];
    std::copy(s.norms, s.norms + GRAD_NORM_WINDOW, sorted);
    std::nth_element(sorted, sorted + GRAD_NORM_WINDOW / 2, sorted + GRAD_NORM_WINDOW);
    return sorted[GRAD_NORM_WINDOW / 2];
}

void step_control(Tensor scalars, Tensor sums, double loss_scale, double grad_unit, Stream) {
    const int64_t ranks = check_step_control(scalars, sums, grad_unit);
    double sum[NUM_STEP_SUMS] = {};
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t i = 0; i < NUM_STEP_SUMS; i++) sum[i] += sums.as<double>()[r * NUM_STEP_SUMS + i];

    StepScalars& s = *reinterpret_cast<StepScalars*>(scalars.as<uint8_t>());
    const double norm = std::sqrt(sum[SUM_SQUARES]);
    s.loss = float(sum[SUM_LOSS] * loss_scale);
    s.grad_norm = float(grad_unit * norm);
    s.grad_scale = float(s.grad_clip > 0 && s.grad_norm > s.grad_clip ? s.grad_clip / norm : grad_unit);
    const bool judged = s.spike_factor > 0 && s.norm_count >= GRAD_NORM_WINDOW;
    const bool spike = judged && s.grad_norm > s.spike_factor * median_norm(s);
    s.skip = !(std::isfinite(s.loss) && std::isfinite(s.grad_norm)) ? SKIP_NOT_FINITE : spike ? SKIP_SPIKE : SKIP_NONE;
    if (std::isfinite(s.grad_norm)) s.norms[s.norm_count++ % GRAD_NORM_WINDOW] = s.grad_norm;
    if (!s.skip) s.t++;
    std::copy(sum + SUM_LOSS, sum + NUM_STEP_SUMS, s.pair_stats);
}
