#include "kernels/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/softmax_check.h"

namespace {

constexpr int64_t LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

// One row of K columns. Of the first `seen`, those count whose mask is not 0; mask may be null.
MULTIARCH void forward_row(float* out, const float* inp, const uint8_t* mask, int64_t seen, int64_t K, float scale) {
    if (mask) {
        for (int64_t j = 0; j < seen; j++) out[j] = mask[j] ? scale * inp[j] : -INF;
    } else {
        for (int64_t j = 0; j < seen; j++) out[j] = scale * inp[j];
    }
    vec16 maxima = vec_set(-INF);
    const int64_t whole = seen / LANES * LANES, rest = seen - whole;
    for (int64_t j = 0; j < whole; j += LANES) maxima = vec_max(maxima, vec_load(out + j));
    if (rest) maxima = vec_max(maxima, vec_load_partial(out + whole, rest, vec_set(-INF)));
    const float max = vec_hmax(maxima);
    if (max == -INF) {  // the row sees nothing, or a NaN and nothing finite
        const bool nan = std::any_of(out, out + seen, [](float x) { return std::isnan(x); });
        std::fill(out, out + seen, nan ? NAN : 0.0f);
        std::fill(out + seen, out + K, 0.0f);
        return;
    }
    vec16 sum = {};
    for (int64_t j = 0; j < whole; j += LANES) {
        const vec16 p = vec_exp(vec_load(out + j) - max);
        vec_store(out + j, p);
        sum += p;
    }
    if (rest) {
        const vec16 p = vec_exp(vec_load_partial(out + whole, rest, vec_set(-INF)) - max);
        vec_store_partial(out + whole, p, rest);
        sum += p;
    }
    const float inverse = 1 / vec_sum(sum);
    for (int64_t j = 0; j < seen; j++) out[j] *= inverse;
    std::fill(out + seen, out + K, 0.0f);
}

MULTIARCH void backward_row(float* dinp, const float* dout, const float* out, int64_t K, float scale) {
    vec16 sum = {};
    const int64_t whole = K / LANES * LANES, rest = K - whole;
    for (int64_t j = 0; j < whole; j += LANES) sum += vec_load(dout + j) * vec_load(out + j);
    if (rest) sum += vec_load_partial(dout + whole, rest) * vec_load_partial(out + whole, rest);
    const float dot = vec_sum(sum);
    for (int64_t j = 0; j < K; j++) dinp[j] = scale * out[j] * (dout[j] - dot);
}

}  // namespace

void softmax_forward(Tensor out, Tensor inp, Tensor mask, int64_t Q, float scale, bool causal, Stream) {
    const char* op = "softmax_forward";
    const SoftmaxSizes z = check_softmax_forward(op, DType::F32, out, inp, mask, Q);
    const int64_t R = z.R, K = z.K;
#pragma omp parallel for schedule(static) if (R * K > PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        const int64_t i = r % Q, seen = causal ? std::clamp<int64_t>(i + K - Q + 1, 0, K) : K;
        forward_row(out.as<float>() + r * out.stride[0], inp.as<float>() + r * inp.stride[0],
                    mask ? mask.as<uint8_t>() + i * mask.stride[0] : nullptr, seen, K, scale);
    }
}

void softmax_backward(Tensor dinp, Tensor dout, Tensor out, float scale, Stream) {
    const char* op = "softmax_backward";
    const SoftmaxSizes z = check_softmax_backward(op, DType::F32, dinp, dout, out);
    const int64_t R = z.R, K = z.K;
#pragma omp parallel for schedule(static) if (R * K > PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        backward_row(dinp.as<float>() + r * dinp.stride[0], dout.as<float>() + r * dout.stride[0],
                     out.as<float>() + r * out.stride[0], K, scale);
    }
}
