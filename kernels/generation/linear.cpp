// A GEMM of dot products in registers: tiles of NB rows of inp and OB rows of weight, both read along c in place,
// without packing. A single row streams the weights from memory, whose bandwidth limits it; several rows reuse them
// from the caches. Every output is the sum of the same 16 partial sums in the same order, whatever the tile.
#include "kernels/generation/linear.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/cpu_tile.h"
#include "kernels/generation/linear_check.h"

namespace {

// out, and residual or null: element (0, 0) of a tile and their row strides.
struct Output {
    float* out;
    const float *bias, *residual;
    int64_t stride, residual_stride;
};

// For a single row of inp, weights are prefetched this many elements ahead as one stream, which is faster than OB
// streams of a row each. 2 to 3 KiB is what memory delivers to a core within one latency; more is slower.
constexpr int64_t AHEAD = 768;

// The 16 partial sums are one vec16 with AVX-512, two vec8 with AVX2 (kernels/cpu/cpu_tile.h).
template <typename V, int NB, int OB>
ALWAYS_INLINE void tile(const Output& to, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t C) {
    constexpr int PARTS = int(16 / WIDTH<V>);
    V sum[NB][OB][PARTS] = {};
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) {
        if constexpr (NB == 1) {  // in the order of addresses, where the rows follow each other without gaps
#pragma GCC unroll 4
            for (int o = 0; o < OB; o++) __builtin_prefetch(w + AHEAD + OB * c + 16 * o);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            V row[OB];
#pragma GCC unroll 4
            for (int o = 0; o < OB; o++) row[o] = load<V>(w + o * ldw + c + part * WIDTH<V>);
#pragma GCC unroll 6
            for (int n = 0; n < NB; n++) {
                const V a = load<V>(x + n * ldx + c + part * WIDTH<V>);
#pragma GCC unroll 4
                for (int o = 0; o < OB; o++) sum[n][o][part] += a * row[o];
            }
        }
    }
#pragma GCC unroll 6
    for (int n = 0; n < NB; n++) {
#pragma GCC unroll 4
        for (int o = 0; o < OB; o++) {
            vec16 total;
            std::memcpy(&total, sum[n][o], sizeof(total));
            if (c < C) total += vec_load_partial(x + n * ldx + c, C - c) * vec_load_partial(w + o * ldw + c, C - c);
            float y = vec_sum(total);
            if (to.bias) y += to.bias[o];
            if (to.residual) y += to.residual[n * to.residual_stride + o];
            to.out[n * to.stride + o] = y;
        }
    }
}

// Rows of inp against OB rows of weight.
template <typename V, int NB, int OB>
ALWAYS_INLINE void tiles(Output to, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t N, int64_t C) {
    int64_t n = 0;
    const auto at = [&](int64_t row) {
        Output there = to;
        there.out += row * to.stride;
        if (to.residual) there.residual += row * to.residual_stride;
        return there;
    };
    for (; n + NB <= N; n += NB) tile<V, NB, OB>(at(n), x + n * ldx, ldx, w, ldw, C);
    for (; n < N; n++) tile<V, 1, OB>(at(n), x + n * ldx, ldx, w, ldw, C);
}

// A panel of rows of weight against all rows of inp, NB of them at a time so that those stay in the first cache.
template <typename V, int NB, int OB>
ALWAYS_INLINE void panel(Output to, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t N, int64_t rows,
                         int64_t C) {
    for (int64_t n = 0; n < N; n += NB) {
        Output there = to;
        there.out += n * to.stride;
        if (to.residual) there.residual += n * to.residual_stride;
        const int64_t count = std::min<int64_t>(NB, N - n);
        int64_t o = 0;
        const auto next = [&](int64_t step) {
            o += step;
            there.out += step;
            if (there.bias) there.bias += step;
            if (there.residual) there.residual += step;
        };
        for (; o + OB <= rows; next(OB)) tiles<V, NB, OB>(there, x + n * ldx, ldx, w + o * ldw, ldw, count, C);
        for (; o < rows; next(1)) tiles<V, NB, 1>(there, x + n * ldx, ldx, w + o * ldw, ldw, count, C);
    }
}

WITH_AVX512 void panel_avx512(const Output& to, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t N,
                              int64_t rows, int64_t C) {
    panel<vec16, 6, 4>(to, x, ldx, w, ldw, N, rows, C);
}

void panel_avx2(const Output& to, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t N, int64_t rows,
                int64_t C) {
    panel<vec8, 2, 3>(to, x, ldx, w, ldw, N, rows, C);
}

void gemm(const Tensor& out, const Tensor& inp, const Tensor& weight, const Tensor& bias, const Tensor& residual) {
    const int64_t N = inp.shape[0], C = inp.shape[1], OC = weight.shape[0];
    constexpr int64_t PANEL = 48;  // rows of weight: 4 and 3 divide it
    const int64_t panels = (OC + PANEL - 1) / PANEL, ldx = row_stride(inp), ldw = row_stride(weight);
    const Output to{out.as<float>(), bias.as<float>(), residual.as<float>(), row_stride(out),
                    residual ? row_stride(residual) : 0};
    const float *x = inp.as<float>(), *w = weight.as<float>();
    const auto multiply = has_avx512() ? panel_avx512 : panel_avx2;
#pragma omp parallel for schedule(static) if (N * C * OC > PARALLEL_MIN)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t o = p * PANEL;
        const Output there{to.out + o, to.bias ? to.bias + o : nullptr, to.residual ? to.residual + o : nullptr,
                           to.stride, to.residual_stride};
        multiply(there, x, ldx, w + o * ldw, ldw, N, std::min(PANEL, OC - o), C);
    }
}

}  // namespace

int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype) {
    return linear_normed_bytes(N, C, dtype) + N * OC * dtype_size(dtype);
}

void linear(const LinearOutput& output, Tensor inp, const InputNorm& norm, const LinearWeights& weights, Tensor scratch,
            bool, Stream stream) {
    const LinearSizes z = check_linear("linear", DType::F32, output, inp, norm, weights, scratch);
    const auto& [out, activation, residual] = output;
    const Tensor x = norm.weight ? linear_normed(scratch, z, inp, norm, stream) : inp;
    const Tensor y = activation == Activation::None ? out : linear_pre_activation(scratch, z, inp);
    gemm(y, x, weights.weight, weights.bias,
         residual);  // check_linear: there is no residual where an activation follows
    if (activation != Activation::None) activation_forward(activation, out, y, stream);
}
