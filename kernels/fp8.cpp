#include "kernels/fp8.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "kernels/activation.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/fp8_check.h"

namespace {

// Rows that are quantised at a time: a run of so many codes in a row of `columns`.
constexpr int64_t CHUNK_ROWS = 64;

struct Records {
    float amax = 0;
    int64_t saturated = 0, underflowed = 0;
};

// Row n0 + i of y, whose columns are [0, C), for i < rows. y_stride: of y's rows.
void quantise_rows(const Fp8Output& out, Records& total, const float* y, int64_t y_stride, int64_t n0, int64_t rows,
                   int64_t C) {
    const float scale = out.record.scale.as<float>()[FP8_SCALE], largest = fp8_max(out.format);
    uint8_t* const r = out.rows ? out.rows.as<uint8_t>() + n0 * row_stride(out.rows) : nullptr;
    uint8_t* const c = out.columns ? out.columns.as<uint8_t>() + n0 : nullptr;
    const int64_t rs = out.rows ? row_stride(out.rows) : 0, cs = out.columns ? row_stride(out.columns) : 0;
    float amax = total.amax;
    int64_t saturated = 0, underflowed = 0;
#pragma omp parallel for schedule(static) reduction(max : amax) reduction(+ : saturated, underflowed) \
    if (rows * C > PARALLEL_MIN)
    for (int64_t j = 0; j < C; j++)
        for (int64_t i = 0; i < rows; i++) {
            const float x = y[i * y_stride + j], scaled = std::clamp(x * scale, -FLT_MAX, FLT_MAX);
            const bool finite = std::isfinite(x);
            const uint8_t code = finite ? fp8_encode(scaled, out.format) : FP8_NAN;
            amax = std::max(amax, finite ? std::fabs(x) : INFINITY);
            saturated += finite && std::fabs(scaled) > largest;
            underflowed += x != 0 && (code & 0x7f) == 0;
            if (r) r[i * rs + j] = code;
            if (c) c[j * cs + i] = code;
        }
    total.amax = amax;
    total.saturated += saturated;
    total.underflowed += underflowed;
}

// Calls y_of(n0, rows), which returns the chunk's matrix y [rows, C], for all chunks of rows.
template <typename Y>
void quantise_chunks(const Fp8Output& out, int64_t N, int64_t C, Y y_of) {
    Records total;
    for (int64_t n0 = 0; n0 < N; n0 += CHUNK_ROWS) {
        const int64_t rows = std::min(CHUNK_ROWS, N - n0);
        const Tensor y = y_of(n0, rows);
        quantise_rows(out, total, y.as<float>(), row_stride(y), n0, rows, C);
    }
    if (out.record.amax && total.amax > *out.record.amax.as<float>()) *out.record.amax.as<float>() = total.amax;
    if (out.record.counts) {
        int64_t* counts = out.record.counts.as<int64_t>();
        counts[FP8_ELEMENTS] += N * C;
        counts[FP8_SATURATED] += total.saturated;
        counts[FP8_UNDERFLOWED] += total.underflowed;
    }
}

}  // namespace

void fp8_quantise(const Fp8Output& out, Tensor inp, Stream) {
    const char* op = "fp8_quantise";
    check_matrix(op, "inp", inp);
    check_fp8_output(op, out, inp.shape[0], inp.shape[1]);
    quantise_chunks(out, inp.shape[0], inp.shape[1], [&](int64_t n0, int64_t rows) { return inp.rows(n0, n0 + rows); });
}

void fp8_activation_forward(const Fp8Output& out, Tensor act, Activation f, Tensor inp, Stream stream) {
    const char* op = "fp8_activation_forward";
    const int64_t I = check_activation_input(op, "inp", f, inp, DType::F32), N = inp.shape[0];
    check_matrix(op, "act", act, N, I, Given::Optional);
    check_fp8_output(op, out, N, I);
    std::vector<float> chunk(act ? 0 : size_t(std::min(N, CHUNK_ROWS) * I));
    quantise_chunks(out, N, I, [&](int64_t n0, int64_t rows) {
        const Tensor y = act ? act.rows(n0, n0 + rows) : host_tensor(chunk.data(), {rows, I});
        const Tensor x = inp.rows(n0, n0 + rows);
        activation_forward(f, y, x, stream);
        return y;
    });
}

void fp8_activation_backward(const Fp8Output& out, Tensor dinp, Activation f, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "fp8_activation_backward";
    const int64_t I = check_activation_input(op, "inp", f, inp, DType::F32), N = inp.shape[0], C = inp.shape[1];
    check_matrix(op, "dout", dout, N, I);
    check_matrix(op, "dinp", dinp, N, C, Given::Optional);
    check_fp8_output(op, out, N, C);
    std::vector<float> chunk(dinp ? 0 : size_t(std::min(N, CHUNK_ROWS) * C));
    quantise_chunks(out, N, C, [&](int64_t n0, int64_t rows) {
        const Tensor y = dinp ? dinp.rows(n0, n0 + rows) : host_tensor(chunk.data(), {rows, C});
        const Tensor d = dout.rows(n0, n0 + rows), x = inp.rows(n0, n0 + rows);
        activation_backward(f, y, {}, d, x, stream);
        return y;
    });
}

void fp8_transpose(Tensor columns, Tensor rows, Stream) {
    const char* op = "fp8_transpose";
    check_fp8_transpose(op, columns, rows);
    const int64_t N = rows.shape[0], C = rows.shape[1], from_stride = row_stride(rows), to_stride = row_stride(columns);
    const uint8_t* from = rows.as<uint8_t>();
    uint8_t* to = columns.as<uint8_t>();
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t c0 = 0; c0 < C; c0 += CHUNK_ROWS)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = c0; c < std::min(c0 + CHUNK_ROWS, C); c++)
                to[c * to_stride + n] = from[n * from_stride + c];
}

void fp8_set_scale(const Fp8Record& record, Fp8Format format, int margin, Stream) {
    const char* op = "fp8_set_scale";
    check_fp8_slot(op, record);
    require(bool(record.amax), op, ": amax is missing");
    fp8_store_scale(record.scale.as<float>(), fp8_scale_exponent(*record.amax.as<float>(), format, margin));
}

void fp8_update_scales(Tensor scales, Tensor history, Tensor amaxes, Fp8Format format, int margin, Stream) {
    check_fp8_scales("fp8_update_scales", scales, history, amaxes);
    const int64_t S = scales.shape[0], H = history.shape[0], stride = row_stride(history);
    float* h = history.as<float>();
    for (int64_t s = 0; s < S; s++) {
        float newest = 0;
        for (int64_t r = 0; r < amaxes.shape[0]; r++) {
            const float amax = amaxes.as<float>()[r * row_stride(amaxes) + s];
            newest = std::isnan(amax) || amax > newest ? amax : newest;
        }
        if (std::isfinite(newest)) {
            for (int64_t i = H - 1; i > 0; i--) h[i * stride + s] = h[(i - 1) * stride + s];
            h[s] = newest;
        }
        float largest = 0;
        for (int64_t i = 0; i < H; i++) largest = std::max(largest, h[i * stride + s]);
        fp8_store_scale(scales.as<float>() + FP8_SCALE_FLOATS * s, fp8_scale_exponent(largest, format, margin));
    }
}

void fp8_sum_counts(Tensor totals, Tensor counts, Stream) {
    check_fp8_counts("fp8_sum_counts", totals, counts);
    for (int64_t i = 0; i < NUM_FP8_COUNTS; i++) {
        totals.as<int64_t>()[i] = 0;
        for (int64_t s = 0; s < counts.shape[0]; s++)
            totals.as<int64_t>()[i] += counts.as<int64_t>()[s * NUM_FP8_COUNTS + i];
    }
}
