#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/softcap_vec.h"
#include "kernels/cross_entropy_check.h"
#include "kernels/softcap.h"

namespace {

MULTIARCH float row_maximum(const float* logits, int64_t V) {
    // Four independent maxima: a single one would wait for its own last result at every step.
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    vec16 m[4] = {vec_set(NONE), vec_set(NONE), vec_set(NONE), vec_set(NONE)};
    int64_t v = 0;
    for (; v + 64 <= V; v += 64)
        for (int k = 0; k < 4; k++) m[k] = vec_max(m[k], vec_load(logits + v + 16 * k));
    for (; v + 16 <= V; v += 16) m[0] = vec_max(m[0], vec_load(logits + v));
    if (v < V) m[0] = vec_max(m[0], vec_load_partial(logits + v, V - v, vec_set(NONE)));
    return vec_hmax(vec_max(vec_max(m[0], m[1]), vec_max(m[2], m[3])));
}

// Σ exp(logits − m). Stores the terms in `terms` unless it is null; it may be the logits themselves.
MULTIARCH float sum_exp(float* terms, const float* logits, int64_t V, float m) {
    vec16 sum[2] = {};
    int64_t v = 0;
    for (; v + 32 <= V; v += 32)
        for (int k = 0; k < 2; k++) {
            const vec16 e = vec_exp(vec_load(logits + v + 16 * k) - m);
            sum[k] += e;
            if (terms) vec_store(terms + v + 16 * k, e);
        }
    constexpr float NONE = -std::numeric_limits<float>::infinity();  // exp gives 0
    for (; v < V; v += 16) {
        const int64_t lanes = V - v < 16 ? V - v : 16;
        const vec16 e = vec_exp(vec_load_partial(logits + v, lanes, vec_set(NONE)) - m);
        sum[0] += e;
        if (terms) vec_store_partial(terms + v, e, lanes);
    }
    return vec_sum(sum[0] + sum[1]);
}

MULTIARCH void scale(float* x, int64_t n, float factor) {
    for_each_vector(n, [&](int64_t i, int64_t lanes)
                           INLINE_LAMBDA { vec_store_lanes(x + i, vec_load_lanes(x + i, lanes) * factor, lanes); });
}

// The same with a softcap: Σ exp(f(logits) − m).
MULTIARCH float sum_exp_capped(const float* logits, int64_t V, float m, Softcap softcap) {
    vec16 sum = {};
    for_each_vector(V, [&](int64_t v, int64_t lanes) INLINE_LAMBDA {
        const vec16 e = vec_exp(capped(vec_load_lanes(logits + v, lanes), softcap.function, softcap.cap).value - m);
        sum += lanes == 16 ? e : vec_load_partial(reinterpret_cast<const float*>(&e), lanes);
    });
    return vec_sum(sum);
}

// logits becomes exp(f(logits) − m)·factor·f'(logits). Returns f'(logits[target]).
MULTIARCH float gradient_capped(float* logits, int64_t V, int64_t target, float m, float factor, Softcap softcap) {
    const float slope = capped(vec_set(logits[target]), softcap.function, softcap.cap).slope[0];
    for_each_vector(V, [&](int64_t v, int64_t lanes) INLINE_LAMBDA {
        const CappedLogits z = capped(vec_load_lanes(logits + v, lanes), softcap.function, softcap.cap);
        vec_store_lanes(logits + v, vec_exp(z.value - m) * factor * z.slope, lanes);
    });
    return slope;
}

MULTIARCH float capped_logit(float x, Softcap softcap) {
    return capped(vec_set(x), softcap.function, softcap.cap).value[0];
}

// A row of logits becomes dloss·(exp(f(logits) − f(logits[target]) − loss) − [v = target])·f'(logits).
MULTIARCH void backward_row(float* logits, int64_t V, int64_t target, float loss, float dloss, Softcap softcap) {
    const auto f = [&](vec16 x) INLINE_LAMBDA {
        return softcap ? capped(x, softcap.function, softcap.cap) : CappedLogits{x, vec_set(1)};
    };
    const CappedLogits at_target = f(vec_set(logits[target]));
    for_each_vector(V, [&](int64_t v, int64_t lanes) INLINE_LAMBDA {
        const CappedLogits z = f(vec_load_lanes(logits + v, lanes));
        // The difference of the logits first: f(logits[target]) + loss would round to the precision of the logits.
        const vec16 p = vec_exp(z.value - at_target.value - loss);
        vec_store_lanes(logits + v, p * dloss * z.slope, lanes);
    });
    logits[target] -= dloss * at_target.slope[0];
}

void check_targets(const char* op, const Tensor& targets, int64_t V) {
    const int32_t* target = targets.as<int32_t>();
    for (int64_t n = 0; n < targets.shape[0]; n++)
        require(target[n] == IGNORE_TARGET || (target[n] >= 0 && target[n] < V), op, ": targets[", n, "] is ",
                target[n], ", expected 0 … ", V - 1, " or ", IGNORE_TARGET, " to ignore the token");
}

// A row of logits is read from memory once: after the first pass it is in L2 (200 kB for the vocabulary of GPT-2).
void cross_entropy(const char* op, const Tensor& losses, const Tensor& logits, const Tensor& targets, int64_t V,
                   const float* dloss, const Softcap& softcap) {
    const CrossEntropySizes z = check_cross_entropy(op, DType::F32, losses, logits, targets, V, softcap);
    const int64_t N = z.N, Vp = z.Vp, stride = row_stride(logits);
    check_targets(op, targets, V);
    const int32_t* target = targets.as<int32_t>();
    float *loss = losses.as<float>(), *rows = logits.as<float>();
#pragma omp parallel for schedule(static) if (N * Vp > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        float* row = rows + n * stride;
        if (target[n] == IGNORE_TARGET) {
            loss[n] = 0;
            if (dloss) std::fill_n(row, Vp, 0.0f);
            continue;
        }
        float m = row_maximum(row, V), below_maximum = m - row[target[n]], sum;
        if (softcap) {  // f is monotonic: its maximum is that of the largest logit
            m = capped_logit(m, softcap);
            below_maximum = m - capped_logit(row[target[n]], softcap);
            sum = sum_exp_capped(row, V, m, softcap);
        } else {
            sum = sum_exp(dloss ? row : nullptr, row, V, m);
        }
        // m − logits[target] first: m + ln Σ would round the loss to the precision of the logits.
        loss[n] = float(std::log(double(sum)) + double(below_maximum));
        if (!dloss) continue;
        if (softcap) {
            row[target[n]] -= *dloss * gradient_capped(row, V, target[n], m, *dloss / sum, softcap);
        } else {
            scale(row, V, *dloss / sum);
            row[target[n]] -= *dloss;
        }
        std::fill_n(row + V, Vp - V, 0.0f);
    }
}

}  // namespace

void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, Softcap softcap, Stream) {
    cross_entropy("cross_entropy_forward", losses, logits, targets, V, nullptr, softcap);
}

void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    Softcap softcap, Stream) {
    cross_entropy("cross_entropy_forward_backward", losses, logits, targets, V, &dloss, softcap);
}

void cross_entropy_backward(Tensor logits, Tensor losses, Tensor dlosses, Tensor targets, int64_t V, Softcap softcap,
                            Stream) {
    const char* op = "cross_entropy_backward";
    const CrossEntropySizes z =
        check_cross_entropy_backward(op, DType::F32, logits, losses, dlosses, targets, V, softcap);
    check_targets(op, targets, V);
    const int64_t N = z.N, Vp = z.Vp;
    const int32_t* target = targets.as<int32_t>();
    const float *loss = losses.as<float>(), *dloss = dlosses.as<float>();
    const Rows<float> rows(logits);
#pragma omp parallel for schedule(static) if (N * Vp > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        const bool ignored = target[n] == IGNORE_TARGET;
        if (!ignored) backward_row(rows[n], V, target[n], loss[n], dloss[n], softcap);
        std::fill(rows[n] + (ignored ? 0 : V), rows[n] + Vp, 0.0f);
    }
}
