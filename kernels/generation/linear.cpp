// A GEMM of dot products in registers: tiles of NB rows of inp and OB rows of weight, both read along c in place,
// without packing. A single row streams the weights from memory, whose bandwidth limits it; several rows reuse them
// from the caches. Every output is the sum of the same 16 partial sums in the same order, whatever the tile.
// Weights W are fp32, or bf16 or E4M3 codes that are converted in registers: the same bits as from an fp32 copy.
// packed_linear.h has those with integer sums.
#include "kernels/generation/linear.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/cpu_tile.h"
#include "kernels/generation/linear_check.h"
#include "kernels/generation/packed_linear.h"
#include "runtime/device/convert_dtype.h"

namespace {

// out, and residual or null: element (0, 0) of a tile and their row strides.
struct Output {
    float* out;
    const float *bias, *residual;
    int64_t stride, residual_stride;
};

// A code of Packing::Fp8. Its row's scale follows the C codes.
struct E4M3 {
    int8_t code;
};

// For a single row of inp, weights are prefetched this many bytes ahead as one stream, which is faster than OB streams
// of a row each. For fp32 2 to 3 KiB is what memory delivers to a core within one latency; more is slower. Codes take
// more time a byte.
template <typename W>
constexpr int64_t AHEAD = std::is_same_v<W, E4M3> ? 8192 : 3072;

// Weights as fp32. A code's exponent and mantissa become those of a float, whose bias is larger by 120; subnormal codes
// are right too.
template <typename V>
ALWAYS_INLINE V load_weights(const float* w) {
    return load<V>(w);
}

// A loop over the lanes, which becomes one instruction; __builtin_convertvector becomes 16 with GCC 12.
template <typename V>
ALWAYS_INLINE V load_weights(const E4M3* w) {
    int32_t bits[WIDTH<V>];
    for (int64_t i = 0; i < WIDTH<V>; i++) bits[i] = int32_t(w[i].code) << 20 & int32_t(0x87f00000);
    V scaled;
    std::memcpy(&scaled, bits, sizeof scaled);
    return scaled * 0x1p120f;
}

template <typename V>
ALWAYS_INLINE V load_weights(const bf16* w) {
    uint32_t bits[WIDTH<V>];
    for (int64_t i = 0; i < WIDTH<V>; i++) bits[i] = uint32_t(w[i].bits) << 16;
    V values;
    std::memcpy(&values, bits, sizeof values);
    return values;
}

// The last n < 16 weights of a row; 0 in the other lanes.
ALWAYS_INLINE vec16 load_last_weights(const float* w, int64_t n) {
    return vec_load_partial(w, n);
}
ALWAYS_INLINE vec16 load_last_weights(const bf16* w, int64_t n) {
    float values[16] = {};
    for (int64_t i = 0; i < n; i++) values[i] = to_float(w[i]);
    return vec_load(values);
}
ALWAYS_INLINE vec16 load_last_weights(const E4M3*, int64_t) {
    return vec16{};  // 32 divides the length of its rows
}

// The 16 partial sums are one vec16 with AVX-512, two vec8 with AVX2 (kernels/cpu/cpu_tile.h). ldw: bytes.
template <typename V, int NB, int OB, typename W>
ALWAYS_INLINE void tile(const Output& to, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t C) {
    const auto row_of = [&](int o) INLINE_LAMBDA {
        return reinterpret_cast<const W*>(reinterpret_cast<const char*>(w) + o * ldw);
    };
    constexpr int PARTS = int(16 / WIDTH<V>);
    V sum[NB][OB][PARTS] = {};
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) {
        constexpr int64_t LINE = 64 / sizeof(W);
        if (NB == 1 && c % LINE == 0) {  // in the order of addresses, where the rows follow each other without gaps
#pragma GCC unroll 4
            for (int o = 0; o < OB; o++)
                __builtin_prefetch(reinterpret_cast<const char*>(w + OB * c + LINE * o) + AHEAD<W>);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            V row[OB];
#pragma GCC unroll 4
            for (int o = 0; o < OB; o++) row[o] = load_weights<V>(row_of(o) + c + part * WIDTH<V>);
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
            if (c < C) total += vec_load_partial(x + n * ldx + c, C - c) * load_last_weights(row_of(o) + c, C - c);
            float y = vec_sum(total);
            const float bias = to.bias ? to.bias[o] : 0;
            if constexpr (std::is_same_v<W, E4M3>) {
                float scale;
                std::memcpy(&scale, row_of(o) + C, sizeof scale);
                y = std::fma(y, scale, bias);  // named, for the compiler would fuse in some tiles and not in others
            } else if (to.bias) {
                y += bias;
            }
            if (to.residual) y += to.residual[n * to.residual_stride + o];
            to.out[n * to.stride + o] = y;
        }
    }
}

// Rows of inp against OB rows of weight.
template <typename V, int NB, int OB, typename W>
ALWAYS_INLINE void tiles(Output to, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t N, int64_t C) {
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
template <typename V, int NB, int OB, typename W>
ALWAYS_INLINE void panel(Output to, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t N, int64_t rows,
                         int64_t C) {
    for (int64_t n = 0; n < N; n += NB) {
        Output there = to;
        there.out += n * to.stride;
        if (to.residual) there.residual += n * to.residual_stride;
        const int64_t count = std::min<int64_t>(NB, N - n);
        int64_t o = 0;
        const W* row = w;
        const auto next = [&](int64_t step) {
            row = reinterpret_cast<const W*>(reinterpret_cast<const char*>(row) + step * ldw);
            there.out += step;
            if (there.bias) there.bias += step;
            if (there.residual) there.residual += step;
        };
        for (; o + OB <= rows; o += OB, next(OB)) tiles<V, NB, OB>(there, x + n * ldx, ldx, row, ldw, count, C);
        for (; o < rows; o++, next(1)) tiles<V, NB, 1>(there, x + n * ldx, ldx, row, ldw, count, C);
    }
}

template <typename W>
WITH_AVX512 void panel_avx512(const Output& to, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t N,
                              int64_t rows, int64_t C) {
    panel<vec16, 6, 4>(to, x, ldx, w, ldw, N, rows, C);
}

template <typename W>
void panel_avx2(const Output& to, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t N, int64_t rows,
                int64_t C) {
    panel<vec8, 2, 3>(to, x, ldx, w, ldw, N, rows, C);
}

// weight: OC rows that begin ldw bytes apart.
template <typename W>
void gemm(const Tensor& out, const Tensor& inp, const W* weight, int64_t ldw, const Tensor& bias,
          const Tensor& residual) {
    const int64_t N = inp.shape[0], C = inp.shape[1], OC = out.shape[1];
    constexpr int64_t PANEL = 48;  // rows of weight: 4 and 3 divide it
    const int64_t panels = (OC + PANEL - 1) / PANEL, ldx = row_stride(inp);
    const Output to{out.as<float>(), bias.as<float>(), residual.as<float>(), row_stride(out),
                    residual ? row_stride(residual) : 0};
    const float* x = inp.as<float>();
    const char* w = reinterpret_cast<const char*>(weight);
    const auto multiply = has_avx512() ? panel_avx512<W> : panel_avx2<W>;
#pragma omp parallel for schedule(static) if (N * C * OC > PARALLEL_MIN)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t o = p * PANEL;
        const Output there{to.out + o, to.bias ? to.bias + o : nullptr, to.residual ? to.residual + o : nullptr,
                           to.stride, to.residual_stride};
        multiply(there, x, ldx, reinterpret_cast<const W*>(w + o * ldw), ldw, N, std::min(PANEL, OC - o), C);
    }
}

}  // namespace

int64_t linear_gemv_rows(DType) {
    return LINEAR_SMALL_N;
}

int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype, bool packed) {
    return linear_normed_bytes(N, C, dtype) + linear_pre_activation_bytes(N, OC, dtype) +
           (packed ? packed_linear_scratch(N, C) : 0);
}

int64_t linear_nf4_scratch(int64_t N, int64_t C, int64_t OC, DType dtype) {
    return linear_scratch(N, C, OC, dtype) + OC * C * int64_t(sizeof(float));
}

void linear(const LinearOutput& output, Tensor inp, const InputNorm& norm, const LinearWeights& weights, Tensor scratch,
            bool, Stream stream) {
    const LinearSizes z = check_linear("linear", DType::F32, output, inp, norm, weights, scratch);
    const auto& [out, activation, residual] = output;
    const Tensor x = norm.weight ? linear_normed(scratch, z, inp, norm, stream) : inp;
    const Tensor y = activation == Activation::None ? out : linear_pre_activation(scratch, z, inp);
    Tensor weight = weights.weight;
    if (weights.nf4) {
        const Tensor rest = linear_packed_scratch(scratch, z, DType::F32);
        weight = nf4_dequantise(make_tensor(rest.data, DType::F32, rest.device, {z.OC * z.C}), *weights.nf4, stream);
    }
    // check_linear: there is no residual where an activation follows
    if (!weights.packed)
        gemm(y, x, weight.as<float>(), row_stride(weight) * 4, weights.bias, residual);
    else if (weights.packed->packing == Packing::Fp8)
        gemm(y, x, static_cast<const E4M3*>(weights.packed->rows.data), packed_row_bytes(Packing::Fp8, z.C),
             weights.bias, residual);
    else if (weights.packed->packing == Packing::Bf16)
        gemm(y, x, static_cast<const bf16*>(weights.packed->rows.data), packed_row_bytes(Packing::Bf16, z.C),
             weights.bias, residual);
    else
        packed_linear(y, x, *weights.packed, weights.bias, residual, linear_packed_scratch(scratch, z, DType::F32));
    if (activation != Activation::None) activation_forward(activation, out, y, stream);
}

bool linear_takes_unscaled(int64_t, const LinearWeights&, const InputNorm&, DType) {
    return false;
}

bool linear_unscaled(const LinearOutput&, const UnscaledRows&, const LinearWeights&, const UnscaledRows&, Stream) {
    return false;
}
