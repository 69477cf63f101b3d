#include "kernels/qk_norm.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/rotate_head.h"
#include "kernels/norm_partials.h"
#include "kernels/qk_norm_check.h"

namespace {

// The angles of a head's channels; pairs is null if it is not rotated.
struct Rotation {
    const float* pairs;  // [half, 2]: cos, sin
    int64_t half;
};

// weight may be null. Returns rstd.
MULTIARCH float forward_head(float* out, const float* inp, const float* weight, Rotation r, int64_t HS, float eps) {
    vec16 squares = {};
    for_each_vector(HS, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 x = vec_load_lanes(inp + c, lanes);
        squares += x * x;
    });
    const float rstd = 1 / std::sqrt(vec_sum(squares) / float(HS) + eps);
    for_each_vector(HS, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 x_hat = vec_load_lanes(inp + c, lanes) * rstd;
        vec_store_lanes(out + c, weight ? x_hat * vec_load_lanes(weight + c, lanes) : x_hat, lanes);
    });
    if (r.pairs) rotate_head(out, r.pairs, r.half, 1);
    return rstd;
}

// weight null: kept is the rotated x̂, and there is no dweight. dweight: this partition's partial sum.
MULTIARCH void backward_head(float* dinp, float* dweight, const float* dout, const float* kept, const float* weight,
                             float rstd, Rotation r, int64_t HS) {
    alignas(64) float g[QK_NORM_MAX_HEAD], x_hat[QK_NORM_MAX_HEAD];
    const float scale = weight ? rstd : 1;
    for_each_vector(HS, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(g + c, vec_load_lanes(dout + c, lanes), lanes);
        vec_store_lanes(x_hat + c, vec_load_lanes(kept + c, lanes) * scale, lanes);
    });
    if (r.pairs) rotate_head(g, r.pairs, r.half, -1);
    if (r.pairs && !weight) rotate_head(x_hat, r.pairs, r.half, -1);
    vec16 sum = {};
    for_each_vector(HS, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        const vec16 gx = vec_load_lanes(g + c, lanes) * vec_load_lanes(x_hat + c, lanes);
        sum += weight ? gx * vec_load_lanes(weight + c, lanes) : gx;
        if (weight) vec_store_lanes(dweight + c, vec_load_lanes(dweight + c, lanes) + gx, lanes);
    });
    const float mean = vec_sum(sum) / float(HS);
    for_each_vector(HS, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec16 d = vec_load_lanes(g + c, lanes);
        if (weight) d *= vec_load_lanes(weight + c, lanes);
        vec_store_lanes(dinp + c, (d - vec_load_lanes(x_hat + c, lanes) * mean) * rstd, lanes);
    });
}

// Heads of a tensor [N, H, HS].
struct HeadRows {
    float* data;
    int64_t token, head;  // strides
    explicit HeadRows(const Tensor& t) : data(t.as<float>()), token(t.stride[0]), head(t.stride[1]) {}
    float* at(int64_t n, int64_t h) const { return data + n * token + h * head; }
};

struct Rotations {
    const int32_t* positions;
    const float* table;
    int64_t half;
    Rotation of(int64_t n) const { return {table ? table + positions[n] * 2 * half : nullptr, half}; }
};

Rotations rotations(const char* op, const Tensor& positions, const Tensor& table, const QkNormSizes& z) {
    if (!table) return {nullptr, nullptr, 0};
    check_positions(op, positions, z.table_length);
    return {positions.as<int32_t>(), table.as<float>(), z.pairs};
}

}  // namespace

void qk_norm_forward(Tensor out, Tensor rstd, Tensor inp, QkWeights weight, Tensor positions, Tensor table, int64_t NH,
                     float eps, Stream) {
    const char* op = "qk_norm_forward";
    const QkNormSizes z =
        check_qk_norm(op, "inp", inp, DType::F32, rstd, Given::Optional, weight, positions, table, NH);
    check_tensor(op, "out", out, DType::F32, {z.N, z.H, z.HS});
    const Rotations rotation = rotations(op, positions, table, z);
    const HeadRows o(out), x(inp);
    float* rs = rstd.as<float>();
    const float *wq = weight.q.as<float>(), *wk = weight.k.as<float>();
#pragma omp parallel for schedule(static) if (z.N * z.H * z.HS > PARALLEL_MIN)
    for (int64_t n = 0; n < z.N; n++) {
        for (int64_t h = 0; h < z.H; h++) {
            const float head_rstd = forward_head(o.at(n, h), x.at(n, h), h < NH ? wq : wk, rotation.of(n), z.HS, eps);
            if (rs) rs[n * z.H + h] = head_rstd;
        }
    }
}

void qk_norm_backward(Tensor dinp, QkWeights dweight, Tensor dout, Tensor kept, Tensor rstd, QkWeights weight,
                      Tensor positions, Tensor table, int64_t NH, Tensor scratch, bool accumulate, Stream) {
    const char* op = "qk_norm_backward";
    const QkNormSizes z =
        check_qk_norm_backward(op, DType::F32, dinp, dweight, dout, kept, rstd, weight, positions, table, NH, scratch);
    const Rotations rotation = rotations(op, positions, table, z);
    const HeadRows dx(dinp), g(dout), x(kept);
    const float *rs = rstd.as<float>(), *wq = weight.q.as<float>(), *wk = weight.k.as<float>();
    // dwq, dwk: this partition's sums; null without weights.
    const auto token = [=](int64_t n, float* dwq, float* dwk) {
        for (int64_t h = 0; h < z.H; h++) {
            backward_head(dx.at(n, h), h < NH ? dwq : dwk, g.at(n, h), x.at(n, h), h < NH ? wq : wk, rs[n * z.H + h],
                          rotation.of(n), z.HS);
        }
    };
    if (!weight.q) {
#pragma omp parallel for schedule(static) if (z.N * z.H * z.HS > PARALLEL_MIN)
        for (int64_t n = 0; n < z.N; n++) token(n, nullptr, nullptr);
        return;
    }
    float* partials = reinterpret_cast<float*>(scratch.as<uint8_t>());
    norm_partials(partials, z.N, 2 * z.HS, [=](int64_t n, float* p) { token(n, p, p + z.HS); });
    if (!dweight.q) return;
    norm_partials_sum(dweight.q.as<float>(), partials, z.N, 2 * z.HS, 0, z.HS, accumulate);
    norm_partials_sum(dweight.k.as<float>(), partials, z.N, 2 * z.HS, z.HS, z.HS, accumulate);
}
