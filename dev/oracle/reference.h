// The oracle: every op as naive loops in double, written from the formula in the op's header and not from its kernels.
//
// Each result comes with its `mag` (magnitude), relative to which rounding errors are measured. It is the same formula
// with every term replaced by its absolute value, so that cancellation in a sum does not count as an error. After a
// function of a sum (exp, 1/√) it is the function's condition number times the mag of its argument.
// docs/understand/numerics.md derives them. All arrays are contiguous. A null pointer is an argument that is not given.
// `accumulate` is the earlier value or null.
//
// Inner functions are HOST_DEVICE, so that a plain double kernel can call them where N·C·OC is too large for the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/muon.h"
#include "kernels/policy_loss.h"
#include "kernels/preference_loss.h"
#include "kernels/rope.h"
#include "runtime/model/activation_config.h"
#include "runtime/model/softcap_config.h"
#include "runtime/rng.h"
#include "tensor_library/tensor_ops.h"

namespace reference {

// A number and the mag of its rounding errors.
struct Value {
    double value = 0, mag = 0;
    HOST_DEVICE void add(double x) {
        value += x;
        mag += fabs(x);
    }
    HOST_DEVICE void add(double x, double x_mag) {
        value += x;
        mag += x_mag;
    }
};

// An array of Value in the form that expect_close takes.
struct Values {
    std::vector<double> value, mag;
    Values() = default;
    explicit Values(int64_t n) : value(size_t(n)), mag(size_t(n)) {}
    void set(int64_t i, Value v) {
        value[size_t(i)] = v.value;
        mag[size_t(i)] = v.mag;
    }
    const double* data() const { return value.data(); }
};

// --- functions of tensor_ops.h; y: the second argument

inline Value tensor_function(TensorFunction f, double x, double y) {
    using F = TensorFunction;
    const auto exact = [](double v) { return Value{v, fabs(v)}; };
    switch (f) {
        case F::Id:
            return exact(x);
        case F::Neg:
            return exact(-x);
        case F::Inv:
            return exact(1 / x);
        case F::Exp:
            return {exp(x), exp(x) + 0x1p-102};
        case F::Log:
            return exact(log(x));
        case F::Sigmoid:
            return {1 / (1 + exp(-x)), 1 / (1 + exp(-x)) + 0x1p-102};
        case F::Tanh:
            return exact(tanh(x));
        case F::Relu:
            return exact(x > 0 ? x : 0);
        case F::Add:
            return {x + y, fabs(x) + fabs(y)};
        case F::Sub:
            return {x - y, fabs(x) + fabs(y)};
        case F::Mul:
            return exact(x * y);
        case F::Div:
            return exact(x / y);
        case F::Max:
            return exact(x > y ? x : y);
        case F::Pow:
            return {pow(x, y), fabs(pow(x, y)) + 0x1p-102};
        case F::Lt:
            return exact(x < y);
        case F::Eq:
            return exact(x == y);
        case F::IsClose:
            return exact(fabs(x - y) < 1e-2);
        case F::InvBack:
            return exact(-y / (x * x));
        case F::LogBack:
            return exact(y / x);
        case F::ReluBack:
            return exact(x > 0 ? y : 0);
    }
    return {};
}

// Combines start and n numbers, `stride` apart, by Add, Mul or Max. The relative error of Mul grows with √n.
inline Value tensor_reduce(TensorFunction f, double start, const double* x, int64_t stride, int64_t n) {
    Value v = {start, fabs(start)};
    for (int64_t i = 0; i < n; i++) {
        if (f == TensorFunction::Add) v.add(x[i * stride]);
        if (f == TensorFunction::Mul) v.value *= x[i * stride];
        if (f == TensorFunction::Max) v.value = std::max(v.value, x[i * stride]);
    }
    if (f != TensorFunction::Add) v.mag = fabs(v.value) * (f == TensorFunction::Mul ? sqrt(1.0 + double(n)) : 1);
    return v;
}

// --- embedding, norms, linear, activations, loss, optimizer

// out[N, C]
inline Values embedding_forward(const int32_t* tokens, const int32_t* positions, const double* wte, const double* wpe,
                                int64_t N, int64_t C) {
    Values out(N * C);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            Value v;
            v.add(wte[tokens[n] * C + c]);
            if (wpe) v.add(wpe[positions[n] * C + c]);
            out.set(n * C + c, v);
        }
    return out;
}

// d[rows, C] of either table: index is tokens or positions.
inline Values embedding_backward(const double* dout, const int32_t* index, const double* accumulate, int64_t N,
                                 int64_t C, int64_t rows) {
    Values d(rows * C);
    for (int64_t i = 0; accumulate && i < rows * C; i++) {
        d.value[i] = accumulate[i];
        d.mag[i] = fabs(accumulate[i]);
    }
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            d.value[index[n] * C + c] += dout[n * C + c];
            d.mag[index[n] * C + c] += fabs(dout[n * C + c]);
        }
    return d;
}

// Mean, rstd and the centred row of a norm, each with the mag of its error.
struct RowStatistics {
    Value mean, rstd;
};

// `centred`: LayerNorm; else RMSNorm, whose mean is 0. x = inp + residual.
HOST_DEVICE inline RowStatistics row_statistics(const double* inp, const double* residual, int64_t C, double eps,
                                                bool centred) {
    RowStatistics s;
    Value sum, squares;
    for (int64_t c = 0; c < C; c++) {
        sum.add(inp[c]);
        if (residual) sum.add(residual[c]);
    }
    if (centred) s.mean = {sum.value / double(C), sum.mag / double(C)};
    for (int64_t c = 0; c < C; c++) {
        const double d = inp[c] + (residual ? residual[c] : 0) - s.mean.value;
        const double d_mag = fabs(inp[c]) + (residual ? fabs(residual[c]) : 0) + s.mean.mag;
        squares.add(d * d, fabs(d) * d_mag);
    }
    const double variance = squares.value / double(C) + eps;
    s.rstd.value = 1 / sqrt(variance);
    s.rstd.mag =
        s.rstd.value * (squares.mag / double(C) + eps) / variance;  // δ(v^−½) = ½·v^−½·δv/v, and δ(d²) = 2·d·δd
    return s;
}

struct Norm {
    Values out, sum, mean, rstd;  // mean is not set by rmsnorm
};

inline Norm norm_forward(const double* inp, const double* residual, const double* weight, const double* bias,
                         double eps, int64_t N, int64_t C, bool centred) {
    Norm r{Values(N * C), Values(N * C), Values(centred ? N : 0), Values(N)};
    for (int64_t n = 0; n < N; n++) {
        const double *x = inp + n * C, *y = residual ? residual + n * C : nullptr;
        const RowStatistics s = row_statistics(x, y, C, eps, centred);
        for (int64_t c = 0; c < C; c++) {
            Value sum;
            sum.add(x[c]);
            if (y) sum.add(y[c]);
            r.sum.set(n * C + c, sum);
            const double b = bias ? bias[c] : 0;
            r.out.set(n * C + c, {(sum.value - s.mean.value) * s.rstd.value * weight[c] + b,
                                  (sum.mag + s.mean.mag) * s.rstd.value * fabs(weight[c]) + fabs(b)});
        }
        if (centred) r.mean.set(n, s.mean);
        r.rstd.set(n, s.rstd);
    }
    return r;
}

inline Norm layernorm_forward(const double* inp, const double* residual, const double* weight, const double* bias,
                              double eps, int64_t N, int64_t C) {
    return norm_forward(inp, residual, weight, bias, eps, N, C, true);
}

inline Norm rmsnorm_forward(const double* inp, const double* residual, const double* weight, double eps, int64_t N,
                            int64_t C) {
    return norm_forward(inp, residual, weight, nullptr, eps, N, C, false);
}

struct NormGradients {
    Values dinp, dweight, dbias;  // dbias is not for rmsnorm
};

// mean null: RMSNorm.
inline NormGradients norm_backward(const double* dout, const double* dresidual, const double* inp, const double* weight,
                                   const double* mean, const double* rstd, const double* accumulate_weight,
                                   const double* accumulate_bias, int64_t N, int64_t C) {
    NormGradients g{Values(N * C), Values(C), Values(C)};
    for (int64_t c = 0; c < C; c++) {
        if (accumulate_weight) g.dweight.set(c, {accumulate_weight[c], fabs(accumulate_weight[c])});
        if (accumulate_bias) g.dbias.set(c, {accumulate_bias[c], fabs(accumulate_bias[c])});
    }
    for (int64_t n = 0; n < N; n++) {
        const double m = mean ? mean[n] : 0;
        Value sum_d, sum_dx;
        for (int64_t c = 0; c < C; c++) {
            const double x = inp[n * C + c], d = dout[n * C + c] * weight[c];
            if (mean) sum_d.add(d);
            sum_dx.add(d * (x - m) * rstd[n], fabs(d) * (fabs(x) + fabs(m)) * rstd[n]);
        }
        for (int64_t c = 0; c < C; c++) {
            const double x = inp[n * C + c], x_hat = (x - m) * rstd[n], x_mag = (fabs(x) + fabs(m)) * rstd[n];
            const double dy = dout[n * C + c], d = dy * weight[c], dr = dresidual ? dresidual[n * C + c] : 0;
            g.dinp.set(n * C + c,
                       {dr + rstd[n] * (d - sum_d.value / double(C) - x_hat * sum_dx.value / double(C)),
                        fabs(dr) + rstd[n] * (fabs(d) + sum_d.mag / double(C) + x_mag * sum_dx.mag / double(C))});
            g.dweight.value[c] += dy * x_hat;
            g.dweight.mag[c] += fabs(dy) * x_mag;
            g.dbias.value[c] += dy;
            g.dbias.mag[c] += fabs(dy);
        }
    }
    return g;
}

// Σ_k a[k·a_stride]·b[k·b_stride]
HOST_DEVICE inline Value dot(const double* a, int64_t a_stride, const double* b, int64_t b_stride, int64_t K) {
    Value sum;
    for (int64_t k = 0; k < K; k++) sum.add(a[k * a_stride] * b[k * b_stride]);
    return sum;
}

// out[M, N] = op(a)·op(b), plus accumulate [M, N] and bias [N] where given.
inline Values matmul(const double* a, const double* b, bool transpose_a, bool transpose_b, const double* accumulate,
                     const double* bias, int64_t M, int64_t N, int64_t K) {
    Values out(M * N);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            Value v = dot(a + (transpose_a ? i : i * K), transpose_a ? M : 1, b + (transpose_b ? j * K : j),
                          transpose_b ? 1 : N, K);
            if (accumulate) v.add(accumulate[i * N + j]);
            if (bias) v.add(bias[j]);
            out.set(i * N + j, v);
        }
    return out;
}

inline Values matmul_forward(const double* inp, const double* weight, const double* bias, int64_t N, int64_t C,
                             int64_t OC) {
    return matmul(inp, weight, false, true, nullptr, bias, N, OC, C);
}

inline Values matmul_backward_input(const double* dout, const double* weight, const double* accumulate, int64_t N,
                                    int64_t C, int64_t OC) {
    return matmul(dout, weight, false, false, accumulate, nullptr, N, C, OC);
}

inline Values matmul_backward_weight(const double* dout, const double* inp, const double* accumulate, int64_t N,
                                     int64_t C, int64_t OC) {
    return matmul(dout, inp, true, false, accumulate, nullptr, OC, C, N);
}

inline Values matmul_backward_bias(const double* dout, const double* accumulate, int64_t N, int64_t OC) {
    Values d(OC);
    for (int64_t o = 0; o < OC; o++) {
        Value v;
        for (int64_t n = 0; n < N; n++) v.add(dout[n * OC + o]);
        if (accumulate) v.add(accumulate[o]);
        d.set(o, v);
    }
    return d;
}

// The logistic function and its derivative. An argument off by a relative error u moves σ by |z|·σ'(z)·u and σ' by at
// most |z|·σ'(z)·u, since |σ''| ≤ σ'.
struct Logistic {
    Value value, derivative;
};

HOST_DEVICE inline Logistic logistic(double z) {
    const double e = exp(-fabs(z)), derivative = e / ((1 + e) * (1 + e)), value = z >= 0 ? 1 / (1 + e) : e / (1 + e);
    return {{value, value + fabs(z) * derivative}, {derivative, (1 + fabs(z)) * derivative}};
}

// gate [N, H] = log σ(x), x = inp·weightᵀ + bias; an error of x moves it by σ(−x) times that.
inline Values decay_gate_forward(const double* inp, const double* weight, const double* bias, int64_t N, int64_t C,
                                 int64_t H) {
    Values gate = matmul_forward(inp, weight, bias, N, C, H);
    for (int64_t i = 0; i < N * H; i++) {
        const Value x{gate.value[size_t(i)], gate.mag[size_t(i)]};
        const double y = -(x.value > 0 ? log1p(exp(-x.value)) : log1p(exp(x.value)) - x.value);
        gate.set(i, {y, fabs(y) + logistic(-x.value).value.value * x.mag});
    }
    return gate;
}

// dx[i] = dgate[i]·(1 − exp(gate[i])), n elements.
inline Values decay_gate_backward(const double* dgate, const double* gate, int64_t n) {
    Values dx(n);
    for (int64_t i = 0; i < n; i++) {
        const double d = -dgate[i] * expm1(gate[i]);
        dx.set(i, {d, fabs(d)});
    }
    return dx;
}

// Results below fp32's normal range may be flushed or lose digits: an error of 2^−126 is always allowed.
constexpr double UNDERFLOW_MAG = 0x1p-102;  // 2^−126 / 2^−24

constexpr double GELU_CUBIC = 0.044715, ROOT_2_OVER_PI = 0.79788456080286535588;

// ½(1 + tanh u) = σ(2u): out = x·σ(2u).
HOST_DEVICE inline Value gelu(double x) {
    const Logistic s = logistic(2 * ROOT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
    return {x * s.value.value, fabs(x) * s.value.mag + UNDERFLOW_MAG};
}

HOST_DEVICE inline Value gelu_gradient(double x) {
    const Logistic s = logistic(2 * ROOT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
    const double du = 2 * ROOT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x);
    return {s.value.value + x * s.derivative.value * du, s.value.mag + fabs(x) * s.derivative.mag * du};
}

HOST_DEVICE inline Value relu2(double x) {
    return x > 0 ? Value{x * x, x * x + UNDERFLOW_MAG} : Value{};
}
HOST_DEVICE inline Value relu2_gradient(double x) {
    return x > 0 ? Value{2 * x, 2 * x} : Value{};
}

// out[i] = f(inp[i])
template <typename F>
Values elementwise(F f, const double* inp, int64_t n) {
    Values out(n);
    for (int64_t i = 0; i < n; i++) out.set(i, f(inp[i]));
    return out;
}

// dinp[i] = dout[i]·f'(inp[i])
template <typename F>
Values elementwise_backward(F gradient, const double* dout, const double* inp, int64_t n) {
    Values dinp(n);
    for (int64_t i = 0; i < n; i++) {
        const Value g = gradient(inp[i]);
        dinp.set(i, {dout[i] * g.value, fabs(dout[i]) * g.mag + UNDERFLOW_MAG});
    }
    return dinp;
}

inline Values gelu_forward(const double* inp, int64_t n) {
    return elementwise(gelu, inp, n);
}
inline Values gelu_backward(const double* dout, const double* inp, int64_t n) {
    return elementwise_backward(gelu_gradient, dout, inp, n);
}
inline Values relu2_forward(const double* inp, int64_t n) {
    return elementwise(relu2, inp, n);
}
inline Values relu2_backward(const double* dout, const double* inp, int64_t n) {
    return elementwise_backward(relu2_gradient, dout, inp, n);
}

// out[N, I]; gate_up [N, 2·I]
inline Values swiglu_forward(const double* gate_up, int64_t N, int64_t I) {
    Values out(N * I);
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < I; i++) {
            const double gate = gate_up[n * 2 * I + i], up = gate_up[n * 2 * I + I + i];
            const Value s = logistic(gate).value;
            out.set(n * I + i, {gate * s.value * up, fabs(gate * up) * s.mag + UNDERFLOW_MAG});
        }
    return out;
}

// dgate_up [N, 2·I]
inline Values swiglu_backward(const double* dout, const double* gate_up, int64_t N, int64_t I) {
    Values d(N * 2 * I);
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < I; i++) {
            const int64_t at = n * 2 * I + i;
            const double gate = gate_up[at], up = gate_up[at + I], g = dout[n * I + i];
            const Logistic s = logistic(gate);
            d.set(at, {g * up * (s.value.value + gate * s.derivative.value),
                       fabs(g * up) * (s.value.mag + fabs(gate) * s.derivative.mag) + UNDERFLOW_MAG});
            d.set(at + I, {g * gate * s.value.value, fabs(g * gate) * s.value.mag + UNDERFLOW_MAG});
        }
    return d;
}

// out [N, I]; inp as activation.h says.
inline Values activation_forward(Activation f, const double* inp, int64_t N, int64_t I) {
    switch (f) {
        case Activation::GELU:
            return gelu_forward(inp, N * I);
        case Activation::ReLU2:
            return relu2_forward(inp, N * I);
        case Activation::SwiGLU:
            return swiglu_forward(inp, N, I);
        case Activation::None:
            break;
    }
    throw Error("reference: no activation function");
}

inline Values activation_backward(Activation f, const double* dout, const double* inp, int64_t N, int64_t I) {
    switch (f) {
        case Activation::GELU:
            return gelu_backward(dout, inp, N * I);
        case Activation::ReLU2:
            return relu2_backward(dout, inp, N * I);
        case Activation::SwiGLU:
            return swiglu_backward(dout, inp, N, I);
        case Activation::None:
            break;
    }
    throw Error("reference: no activation function");
}

// A softcap's f and f'. tanh is computed as (1 − e)/(1 + e): its error near 0 is that of 1. An error u of the exponent
// 2x/c is an error of that size of e, and so of f'.
struct Capped {
    Value value, slope;
};
inline Capped softcap(double x, const Softcap& s) {
    const double c = double(s.cap), u = x / c;
    if (s.function == Softcap::Function::Tanh) {
        const double slope = 1 / (cosh(u) * cosh(u));
        return {{c * tanh(u), c}, {slope, slope * (1 + 2 * fabs(u)) + UNDERFLOW_MAG}};
    }
    if (s.function == Softcap::Function::Rsqrt) {
        const double r = 1 / sqrt(1 + u * u);
        return {{x * r, fabs(x) * r}, {r * r * r, r * r * r + UNDERFLOW_MAG}};
    }
    return {{x, 0}, {1, 1}};
}

struct CrossEntropy {
    Values losses, dlogits;               // [N], [N, Vp]
    std::vector<double> mag_from_losses;  // of dlogits with p = exp((z − z_t) − loss), from a loss that is rounded
};

// ignore: the target whose tokens have no loss.
inline CrossEntropy cross_entropy(const double* logits, const int32_t* targets, int32_t ignore, double dloss, int64_t N,
                                  int64_t V, int64_t Vp, const Softcap& cap = {}) {
    CrossEntropy r{Values(N), Values(N * Vp), std::vector<double>(size_t(N * Vp))};
    for (int64_t n = 0; n < N; n++) {
        if (targets[n] == ignore) continue;
        std::vector<double> row, row_mag;
        std::vector<Value> slope;
        for (int64_t v = 0; v < V; v++) {
            const Capped z = softcap(logits[n * Vp + v], cap);
            row.push_back(z.value.value);
            row_mag.push_back(z.value.mag);
            slope.push_back(z.slope);
        }
        const size_t target = size_t(targets[n]);
        const double m = *std::max_element(row.begin(), row.end()), below_maximum = m - row[target];
        double sum = 0, distance = 0;  // Σ e, and Σ p·|δz|: what rounding z and z − m does to ln Σ
        for (size_t v = 0; v < row.size(); v++) {
            sum += exp(row[v] - m);
            distance += exp(row[v] - m) * (m - row[v] + row_mag[v]);
        }
        distance /= sum;
        // An error u of Σ is an error u of ln Σ, however small that is: hence the 1.
        r.losses.set(n, {log(sum) + below_maximum, 1 + log(sum) + distance + below_maximum + row_mag[target]});
        for (size_t v = 0; v < row.size(); v++) {
            const double p = exp(row[v] - m) / sum, hit = v == target;
            const double error = p * (1 + (m - row[v]) + row_mag[v] + distance) + hit;
            r.dlogits.set(n * Vp + int64_t(v),
                          {dloss * (p - hit) * slope[v].value, fabs(dloss) * error * slope[v].mag + UNDERFLOW_MAG});
            // The errors of z and z_t, of their difference, of the loss, and of the exponent, which is ln p.
            const double from_losses = p * (1 + row_mag[v] + row_mag[target] + fabs(row[v] - row[target]) +
                                            r.losses.mag[size_t(n)] + fabs(log(sum) + m - row[v])) +
                                       hit;
            r.mag_from_losses[size_t(n * Vp) + v] = fabs(dloss) * from_losses * slope[v].mag + UNDERFLOW_MAG;
        }
    }
    return r;
}

// A pair, in the order chosen, rejected. In long double, which keeps the digits of the plain formulas: of 1 − e^a near
// a = 0, and of e^h for h up to 11000.
struct PreferencePair {
    long double loss = 0, reward[2] = {};
    long double dloss[2] = {};  // of the loss of a token
};
inline PreferencePair preference_pair(const PreferenceOptions& o, const long double logp[2],
                                      const long double reference[2], const int64_t tokens[2]) {
    using Method = PreferenceMethod;
    const long double beta = o.beta, epsilon = o.label_smoothing, gamma = o.margin;
    long double x[2], per_token[2];  // ℓ − ℓ_ref, or that of the means
    PreferencePair r;
    for (int i = 0; i < 2; i++) {
        per_token[i] = o.method == Method::DPO ? 1 : 1 / (long double)(tokens[i]);
        x[i] = logp[i] * per_token[i];
        if (has_reference(o.method)) x[i] -= reference[i] * per_token[i];
        r.reward[i] = beta * x[i];
    }
    long double dx[2] = {};
    if (o.method == Method::DPO || o.method == Method::SimPO) {
        const long double h = beta * (x[0] - x[1]) - (o.method == Method::SimPO ? gamma : 0);
        r.loss = (1 - epsilon) * log1pl(expl(-h)) + epsilon * log1pl(expl(h));
        dx[0] = beta * (epsilon / (1 + expl(-h)) - (1 - epsilon) / (1 + expl(h)));
        dx[1] = -dx[0];
    } else if (o.method == Method::IPO) {
        const long double d = x[0] - x[1];
        r.loss = (d - 1 / (2 * beta)) * (d - 1 / (2 * beta));
        dx[0] = 2 * (d - 1 / (2 * beta));
        dx[1] = -dx[0];
    } else {
        long double odds[2], slope[2];
        for (int i = 0; i < 2; i++) {
            const long double a = std::min(x[i], -0x1p-24L);
            odds[i] = a - logl(1 - expl(a));
            slope[i] = 1 / (1 - expl(a));
        }
        const long double h = odds[0] - odds[1];
        r.loss = -x[0] + beta * log1pl(expl(-h));
        dx[0] = -1 - beta / (1 + expl(h)) * slope[0];
        dx[1] = beta / (1 + expl(h)) * slope[1];
    }
    for (int i = 0; i < 2; i++) r.dloss[i] = -dx[i] * per_token[i];
    return r;
}

// A token of a policy gradient. Missing log-probabilities are those that make their ratio 1. The mags are those of
// errors of 2⁻⁵³ in the differences of log-probabilities and in each operation of policy_loss.h's formulas.
struct PolicyToken {
    long double loss, old_logp, sampler_logp, reference_logp, advantage, weight;
};
struct PolicyTerms {
    long double loss = 0, dloss = 0, kl = 0;
    double loss_mag = 0, dloss_mag = 0, kl_mag = 0;
    bool clipped = false;
};
inline PolicyTerms policy_terms(const PolicyOptions& o, const PolicyToken& t) {
    const long double logp = -t.loss, r = expl(logp - t.old_logp), low = 1 - (long double)(o.clip_low),
                      high = 1 + (long double)(o.clip_high);
    const long double rho = std::min(expl(t.old_logp - t.sampler_logp), (long double)(o.importance_cap));
    const long double plain = r * t.advantage, clipped = std::min(std::max(r, low), high) * t.advantage;
    const long double d = t.reference_logp - logp;
    PolicyTerms x;
    x.kl = expl(d) - d - 1;
    x.clipped = clipped < plain;
    x.loss = t.weight * (o.kl * x.kl - rho * std::min(plain, clipped));
    x.dloss = t.weight * (x.clipped ? 0 : rho * plain) + t.weight * o.kl * (expl(d) - 1);
    const double log_errors = 1 + std::fabs(double(logp - t.old_logp)) + std::fabs(double(t.old_logp - t.sampler_logp));
    const double policy_mag = double(rho * std::max(r, high) * fabsl(t.advantage)) * log_errors;
    const double slope_mag = std::fabs(double(expl(d) - 1)) + double(expl(d) * fabsl(d));
    x.kl_mag = slope_mag + std::fabs(double(d));
    x.loss_mag = double(t.weight) * (policy_mag + o.kl * x.kl_mag);
    x.dloss_mag = double(t.weight) * (policy_mag + o.kl * slope_mag);
    return x;
}

inline double global_norm(const double* grads, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += grads[i] * grads[i];
    return sqrt(sum);
}

struct Muon {
    Value m, u;
};

// The momentum of one parameter.
HOST_DEVICE inline Muon muon_momentum(double m, double grad, double grad_scale, double mu) {
    Muon r;
    const double g = grad * grad_scale;
    r.m.add(mu * m);
    r.m.add((1 - mu) * g);
    r.u.add((1 - mu) * g);
    r.u.add(mu * r.m.value, mu * r.m.mag);
    return r;
}

HOST_DEVICE inline Value muon_update(double param, double update, double lr, double shape_scale, double weight_decay) {
    Value p;
    p.add(param);
    p.add(-lr * shape_scale * update);
    p.add(-lr * weight_decay * param);
    return p;
}

// One matrix x [rows, columns]. error(sum, rounded, K) is what a kernel's rounding adds to a result: a sum of K terms
// with its mag, and `rounded`, the absolute values of what is rounded when it is stored. It is 0 for the exact result.
template <typename Error>
std::vector<double> newton_schulz(const double* x, int64_t rows, int64_t columns, const NewtonSchulz& coefficients,
                                  Error error) {
    if (rows > columns) {  // the iteration of the transpose
        const auto transposed = [](const double* from, int64_t M, int64_t N) {
            std::vector<double> to(size_t(M * N));
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < N; j++) to[size_t(j * M + i)] = from[i * N + j];
            return to;
        };
        const std::vector<double> wide =
            newton_schulz(transposed(x, rows, columns).data(), columns, rows, coefficients, error);
        return transposed(wide.data(), columns, rows);
    }
    // alpha·product + beta·addend, rounded as a product and as a sum.
    const auto add = [&](const Values& product, double alpha, const std::vector<double>& addend, double beta,
                         int64_t K) {
        std::vector<double> out(addend.size());
        for (size_t i = 0; i < out.size(); i++) {
            const double first = alpha * product.value[i], second = beta * addend[i], sum = first + second;
            out[i] = sum + error(Value{sum, fabs(alpha) * product.mag[i] + fabs(second)}, fabs(first) + fabs(sum), K);
        }
        return out;
    };
    const double norm = global_norm(x, rows * columns) * coefficients.norm_margin;
    std::vector<double> X(size_t(rows * columns)), A(size_t(rows * rows));
    for (size_t i = 0; i < X.size(); i++) {
        X[i] = norm > 0 ? x[i] / norm : 0;
        X[i] += error(Value{X[i], fabs(X[i])}, fabs(X[i]), 1);
    }
    for (const NewtonSchulz::Step& step : coefficients.steps) {
        const Values gram = matmul(X.data(), X.data(), false, true, nullptr, nullptr, rows, rows, columns);
        for (size_t i = 0; i < A.size(); i++)
            A[i] = gram.value[i] + error(Value{gram.value[i], gram.mag[i]}, fabs(gram.value[i]), columns);
        const std::vector<double> B =
            add(matmul(A.data(), A.data(), false, false, nullptr, nullptr, rows, rows, rows), step.c, A, step.b, rows);
        X = add(matmul(B.data(), X.data(), false, false, nullptr, nullptr, rows, columns, rows), 1, X, step.a, rows);
    }
    return X;
}

struct AdamW {
    Value param, m, v;
};

// One parameter; t is the number of this update, from 1.
HOST_DEVICE inline AdamW adamw(double param, double m, double v, double grad, double grad_scale, double lr,
                               double beta1, double beta2, double eps, double weight_decay, int64_t t) {
    AdamW r;
    const double g = grad * grad_scale;
    r.m.add(beta1 * m);
    r.m.add((1 - beta1) * g);
    r.v.add(beta2 * v);
    r.v.add((1 - beta2) * g * g);
    const double denominator = sqrt(r.v.value / (1 - pow(beta2, double(t)))) + eps,
                 correction = 1 - pow(beta1, double(t));
    r.param.add(param);
    r.param.add(-lr * r.m.value / correction / denominator, lr * r.m.mag / correction / denominator);
    r.param.add(-lr * weight_decay * param);
    return r;
}

// --- attention, RoPE, softmax, sampling

// Σ_j w_j over a softmax: the largest score and Σ exp(score − max). A score off by its rounding error u·mag changes its
// weight by that factor and, through the sum, every other weight of the row: hence p·(1 + mag + Σ p·mag) below.
struct SoftmaxSum {
    double max = -INFINITY, sum = 0, mag = 0;  // mag: Σ p·mag of the scores

    // Two passes over all scores: for max, then for the sum. score(j) is a Value; seen(j) is false for a masked key.
    template <typename Score, typename Seen>
    HOST_DEVICE SoftmaxSum(int64_t K, Score score, Seen seen) {
        for (int64_t j = 0; j < K; j++)
            if (seen(j)) max = fmax(max, score(j).value);
        for (int64_t j = 0; j < K; j++)
            if (seen(j)) {
                const Value s = score(j);
                sum += exp(s.value - max);
                mag += exp(s.value - max) * s.mag;
            }
        if (sum > 0) mag /= sum;
    }
    HOST_DEVICE Value weight(Value score) const {
        const double p = exp(score.value - max) / sum;
        return {p, p * (1 + score.mag + mag) + UNDERFLOW_MAG};
    }
    HOST_DEVICE Value log_sum() const { return {max + log(sum), fabs(max + log(sum)) + 1 + mag}; }
};

// out [R, K]; mask [Q, K] or null. A fully masked row is zeros.
inline Values softmax_forward(const double* inp, const uint8_t* mask, int64_t R, int64_t Q, int64_t K, double scale,
                              bool causal) {
    Values out(R * K);
    for (int64_t r = 0; r < R; r++) {
        const int64_t i = r % Q;
        auto score = [&](int64_t j) { return Value{scale * inp[r * K + j], fabs(scale * inp[r * K + j])}; };
        auto seen = [&](int64_t j) { return (!causal || j <= i + K - Q) && (!mask || mask[i * K + j]); };
        const SoftmaxSum softmax(K, score, seen);
        for (int64_t j = 0; j < K; j++)
            if (seen(j)) out.set(r * K + j, softmax.weight(score(j)));
    }
    return out;
}

inline Values softmax_backward(const double* dout, const double* out, int64_t R, int64_t K, double scale) {
    Values dinp(R * K);
    for (int64_t r = 0; r < R; r++) {
        const double *g = dout + r * K, *p = out + r * K;
        const Value sum = dot(g, 1, p, 1, K);
        for (int64_t j = 0; j < K; j++) {
            dinp.set(r * K + j, {scale * p[j] * (g[j] - sum.value), fabs(scale * p[j]) * (fabs(g[j]) + sum.mag)});
        }
    }
    return dinp;
}

// scale·q·k
HOST_DEVICE inline Value attention_score(const double* q, const double* k, int64_t HS, double scale) {
    const Value s = dot(q, 1, k, 1, HS);
    return {scale * s.value, fabs(scale) * s.mag};
}

// One query of one head: out and out_mag [HS], returns lse. Keys 0 … seen − 1 lie `stride` apart.
HOST_DEVICE inline Value attention_query(double* out, double* out_mag, const double* q, const double* k,
                                         const double* v, int64_t seen, int64_t stride, int64_t HS, double scale) {
    auto score = [&](int64_t j) { return attention_score(q, k + j * stride, HS, scale); };
    const SoftmaxSum softmax(seen, score, [](int64_t) { return true; });
    for (int64_t c = 0; c < HS; c++) out[c] = out_mag[c] = 0;
    for (int64_t j = 0; j < seen; j++) {
        const Value p = softmax.weight(score(j));
        for (int64_t c = 0; c < HS; c++) {
            out[c] += p.value * v[j * stride + c];
            out_mag[c] += p.mag * fabs(v[j * stride + c]);
        }
    }
    return softmax.log_sum();
}

// The keys of its sequence that a query sees.
struct AttentionMask {
    bool causal = true;
    int64_t window = 0;  // 0: none

    // Query i and key j of a sequence with klen − qlen = offset.
    bool sees(int64_t i, int64_t j, int64_t offset) const {
        const int64_t ahead = j - (i + offset);
        return (!causal || ahead <= 0) && (window == 0 || std::abs(ahead) < window);
    }
};

// Calls f(i, j0, seen, h, kv) for every query and head: query i sees the keys j0 … j0 + seen − 1.
template <typename F>
void for_each_query(const std::vector<int32_t>& cum_q, const std::vector<int32_t>& cum_k, int64_t NH, int64_t NKV,
                    const AttentionMask& mask, F f) {
    for (size_t s = 0; s + 1 < cum_q.size(); s++) {
        const int64_t qlen = cum_q[s + 1] - cum_q[s], klen = cum_k[s + 1] - cum_k[s];
        for (int64_t i = 0; i < qlen; i++) {
            int64_t begin = 0, seen = 0;
            for (int64_t j = 0; j < klen; j++)
                if (mask.sees(i, j, klen - qlen) && seen++ == 0) begin = j;
            for (int64_t h = 0; h < NH; h++) f(cum_q[s] + i, cum_k[s] + begin, seen, h, h / (NH / NKV));
        }
    }
}

struct Attention {
    Values out, lse;  // [Nq, NH, HS], [NH, Nq]
};

// q [Nq, NH, HS]; k, v [Nk, NKV, HS]; Nq and Nk are the ends of cum_q and cum_k.
inline Attention attention_forward(const double* q, const double* k, const double* v, const std::vector<int32_t>& cum_q,
                                   const std::vector<int32_t>& cum_k, int64_t NH, int64_t NKV, int64_t HS, double scale,
                                   const AttentionMask& mask = {}) {
    const int64_t Nq = cum_q.back();
    Attention r{Values(Nq * NH * HS), Values(NH * Nq)};
    for_each_query(cum_q, cum_k, NH, NKV, mask, [&](int64_t i, int64_t j0, int64_t seen, int64_t h, int64_t kv) {
        const int64_t at = (i * NH + h) * HS, key = (j0 * NKV + kv) * HS;
        r.lse.set(h * Nq + i, attention_query(&r.out.value[size_t(at)], &r.out.mag[size_t(at)], q + at, k + key,
                                              v + key, seen, NKV * HS, HS, scale));
    });
    return r;
}

// P and dS of one query and key in the backward pass.
struct AttentionPair {
    Value p, ds;
};

// delta = Σ_c dout·out of the query.
HOST_DEVICE inline AttentionPair attention_pair(const double* q, const double* dout, double lse, Value delta,
                                                const double* k, const double* v, int64_t HS, double scale) {
    const Value s = attention_score(q, k, HS, scale), dp = dot(dout, 1, v, 1, HS);
    const double p = exp(s.value - lse), p_mag = p * (1 + s.mag + fabs(lse)) + UNDERFLOW_MAG;
    return {{p, p_mag},
            {p * (dp.value - delta.value), p_mag * fabs(dp.value - delta.value) + p * (dp.mag + delta.mag)}};
}

struct AttentionGradients {
    Values dq, dk, dv;
};

// out and lse are the forward pass's, the same that the kernel gets.
inline AttentionGradients attention_backward(const double* dout, const double* q, const double* k, const double* v,
                                             const double* out, const double* lse, const std::vector<int32_t>& cum_q,
                                             const std::vector<int32_t>& cum_k, int64_t NH, int64_t NKV, int64_t HS,
                                             double scale, const AttentionMask& mask = {}) {
    const int64_t Nq = cum_q.back(), Nk = cum_k.back();
    AttentionGradients g{Values(Nq * NH * HS), Values(Nk * NKV * HS), Values(Nk * NKV * HS)};
    auto add = [](Values& d, int64_t i, Value a, double b) {
        d.value[size_t(i)] += a.value * b;
        d.mag[size_t(i)] += a.mag * fabs(b);
    };
    for_each_query(cum_q, cum_k, NH, NKV, mask, [&](int64_t i, int64_t j0, int64_t seen, int64_t h, int64_t kv) {
        const int64_t at = (i * NH + h) * HS;
        const Value delta = dot(dout + at, 1, out + at, 1, HS);
        for (int64_t j = j0; j < j0 + seen; j++) {
            const int64_t key = (j * NKV + kv) * HS;
            const AttentionPair pair =
                attention_pair(q + at, dout + at, lse[h * Nq + i], delta, k + key, v + key, HS, scale);
            const Value ds{scale * pair.ds.value, fabs(scale) * pair.ds.mag};
            for (int64_t c = 0; c < HS; c++) {
                add(g.dq, at + c, ds, k[key + c]);
                add(g.dk, key + c, ds, q[at + c]);
                add(g.dv, key + c, pair.p, dout[at + c]);
            }
        }
    });
    return g;
}

// Linear attention, token by token as its header defines it.
struct LinearAttentionInputs {
    const double *q, *k, *v, *gate, *initial,
        *initial_z;  // as in kernels/linear_attention/linear_attention.h; the last three or null
    std::vector<int32_t> cum;
    int64_t NH, NKV, E, M;
    bool elu, normalise;
};

// φ: rounded once, whatever x is.
HOST_DEVICE inline Value feature(double x, bool elu) {
    const double y = !elu ? x : x > 0 ? x + 1 : exp(x);
    return {y, fabs(y) + (elu && x <= 0 ? UNDERFLOW_MAG : 0)};
}

// S [E, M] (or R) and z [E] (or r) of one sequence and KV head.
struct LinearAttentionSums {
    Values s, z;
    LinearAttentionSums(int64_t E, int64_t M, const double* from, const double* from_z) : s(E * M), z(E) {
        for (size_t i = 0; from && i < s.value.size(); i++) {
            s.value[i] = from[i];
            s.mag[i] = fabs(from[i]);
        }
        for (size_t i = 0; from_z && i < z.value.size(); i++) {
            z.value[i] = from_z[i];
            z.mag[i] = fabs(from_z[i]);
        }
    }
    // A relative error u of g changes exp(g) by u·|g|·exp(g).
    void decay(double g) {
        for (Values* x : {&s, &z})
            for (size_t i = 0; i < x->value.size(); i++) {
                x->value[i] *= exp(g);
                x->mag[i] = x->mag[i] * exp(g) + fabs(g * x->value[i]);
            }
    }
    // s += b cᵀ, z += w·b
    void add(const std::vector<Value>& b, const std::vector<Value>& c, Value w) {
        for (size_t e = 0; e < b.size(); e++) {
            for (size_t m = 0; m < c.size(); m++) {
                s.value[e * c.size() + m] += b[e].value * c[m].value;
                s.mag[e * c.size() + m] += b[e].mag * c[m].mag;
            }
            z.value[e] += b[e].value * w.value;
            z.mag[e] += b[e].mag * w.mag;
        }
    }
    // Σ_e a_e·s_em for column m; Σ_m s_em·c_m for row e.
    Value column(const std::vector<Value>& a, size_t m, size_t M) const {
        Value sum;
        for (size_t e = 0; e < a.size(); e++) sum.add(a[e].value * s.value[e * M + m], a[e].mag * s.mag[e * M + m]);
        return sum;
    }
    Value row(const std::vector<Value>& c, size_t e) const {
        Value sum;
        for (size_t m = 0; m < c.size(); m++)
            sum.add(c[m].value * s.value[e * c.size() + m], c[m].mag * s.mag[e * c.size() + m]);
        return sum;
    }
};

inline std::vector<Value> features_of(const double* x, int64_t n, bool elu) {
    std::vector<Value> f;
    for (int64_t i = 0; i < n; i++) f.push_back(feature(x[i], elu));
    return f;
}

struct LinearAttentionResult {
    Values out, norm, final, final_z;  // [N, NH, M], [NH, N], [S, NKV, E, M], [S, NKV, E]
};

inline LinearAttentionResult linear_attention_forward(const LinearAttentionInputs& p) {
    const int64_t N = p.cum.back(), S = int64_t(p.cum.size()) - 1, group = p.NH / p.NKV, E = p.E, M = p.M;
    LinearAttentionResult r{Values(N * p.NH * M), Values(p.NH * N), Values(S * p.NKV * E * M), Values(S * p.NKV * E)};
    for (int64_t at = 0; at < S * p.NKV; at++) {
        const int64_t s = at / p.NKV, kv = at % p.NKV;
        LinearAttentionSums sums(E, M, p.initial ? p.initial + at * E * M : nullptr,
                                 p.initial_z ? p.initial_z + at * E : nullptr);
        for (int64_t t = p.cum[size_t(s)]; t < p.cum[size_t(s) + 1]; t++) {
            if (p.gate) sums.decay(p.gate[t * p.NKV + kv]);
            sums.add(features_of(p.k + (t * p.NKV + kv) * E, E, p.elu),
                     features_of(p.v + (t * p.NKV + kv) * M, M, false), {1, 1});
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                const std::vector<Value> q = features_of(p.q + (t * p.NH + h) * E, E, p.elu);
                Value d;
                for (size_t e = 0; e < q.size(); e++) d.add(q[e].value * sums.z.value[e], q[e].mag * sums.z.mag[e]);
                d.add(1e-6);
                if (p.normalise) r.norm.set(h * N + t, d);
                for (int64_t m = 0; m < M; m++) {
                    Value x = sums.column(q, size_t(m), size_t(M));
                    if (p.normalise)
                        x = {x.value / d.value, x.mag / d.value + fabs(x.value) * d.mag / (d.value * d.value)};
                    r.out.set((t * p.NH + h) * M + m, x);
                }
            }
        }
        for (int64_t i = 0; i < E * M; i++)
            r.final.set(at * E * M + i, {sums.s.value[size_t(i)], sums.s.mag[size_t(i)]});
        for (int64_t e = 0; e < E; e++) r.final_z.set(at * E + e, {sums.z.value[size_t(e)], sums.z.mag[size_t(e)]});
    }
    return r;
}

struct LinearAttentionGradients {
    Values dq, dk, dv, dgate, dinitial, dinitial_z;
};

// out and norm are the forward pass's, the same that the kernel gets. dfinal and dfinal_z may be null.
inline LinearAttentionGradients linear_attention_backward(const LinearAttentionInputs& p, const double* dout,
                                                          const double* out, const double* norm, const double* dfinal,
                                                          const double* dfinal_z) {
    const int64_t N = p.cum.back(), S = int64_t(p.cum.size()) - 1, group = p.NH / p.NKV, E = p.E, M = p.M;
    LinearAttentionGradients r{Values(N * p.NH * E), Values(N * p.NKV * E),     Values(N * p.NKV * M),
                               Values(N * p.NKV),    Values(S * p.NKV * E * M), Values(S * p.NKV * E)};
    struct Gradient {
        std::vector<Value> g;  // dout/d
        Value delta;           // −g·out
    };
    auto gradient_of = [&](int64_t t, int64_t h) {
        const int64_t at = (t * p.NH + h) * M;
        Gradient x{features_of(dout + at, M, false), {}};
        if (!p.normalise) return x;
        for (int64_t m = 0; m < M; m++) {
            x.g[size_t(m)].value /= norm[h * N + t];
            x.g[size_t(m)].mag /= norm[h * N + t];
            x.delta.add(-x.g[size_t(m)].value * out[at + m]);
        }
        return x;
    };
    // d of a feature becomes d of its input; returns feature·d for the gate.
    auto set = [&](Values& to, int64_t at, double x, Value d) {
        const Value f = feature(x, p.elu);
        const double slope = p.elu ? std::min(f.value, 1.0) : 1;
        to.set(at, {d.value * slope, d.mag * slope + (p.elu ? UNDERFLOW_MAG : 0)});
        return Value{f.value * d.value, f.mag * d.mag};
    };
    for (int64_t at = 0; at < S * p.NKV; at++) {
        const int64_t s = at / p.NKV, kv = at % p.NKV, begin = p.cum[size_t(s)], end = p.cum[size_t(s) + 1];
        LinearAttentionSums state(E, M, p.initial ? p.initial + at * E * M : nullptr,
                                  p.initial_z ? p.initial_z + at * E : nullptr);
        std::vector<Value> query_dot(size_t(end - begin)), key_dot(size_t(end - begin));
        for (int64_t t = begin; t < end; t++) {
            if (p.gate) state.decay(p.gate[t * p.NKV + kv]);
            state.add(features_of(p.k + (t * p.NKV + kv) * E, E, p.elu),
                      features_of(p.v + (t * p.NKV + kv) * M, M, false), {1, 1});
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                const Gradient x = gradient_of(t, h);
                for (int64_t e = 0; e < E; e++) {
                    Value d = state.row(x.g, size_t(e));
                    d.add(x.delta.value * state.z.value[size_t(e)], x.delta.mag * state.z.mag[size_t(e)]);
                    const Value dot = set(r.dq, (t * p.NH + h) * E + e, p.q[(t * p.NH + h) * E + e], d);
                    query_dot[size_t(t - begin)].add(dot.value, dot.mag);
                }
            }
        }
        LinearAttentionSums grad(E, M, dfinal ? dfinal + at * E * M : nullptr, dfinal_z ? dfinal_z + at * E : nullptr);
        Value through;  // the gradient of the state after a token
        for (size_t i = 0; i < grad.s.value.size(); i++)
            through.add(grad.s.value[i] * state.s.value[i], grad.s.mag[i] * state.s.mag[i]);
        for (size_t i = 0; i < grad.z.value.size(); i++)
            through.add(grad.z.value[i] * state.z.value[i], grad.z.mag[i] * state.z.mag[i]);
        double squares = through.mag * through.mag;
        for (int64_t t = end - 1; t >= begin; t--) {
            if (p.gate && t + 1 < end) grad.decay(p.gate[(t + 1) * p.NKV + kv]);
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                const Gradient x = gradient_of(t, h);
                grad.add(features_of(p.q + (t * p.NH + h) * E, E, p.elu), x.g, x.delta);
            }
            const std::vector<Value> k = features_of(p.k + (t * p.NKV + kv) * E, E, p.elu),
                                     v = features_of(p.v + (t * p.NKV + kv) * M, M, false);
            for (int64_t e = 0; e < E; e++) {
                Value d = grad.row(v, size_t(e));
                d.add(grad.z.value[size_t(e)], grad.z.mag[size_t(e)]);
                const int64_t i = (t * p.NKV + kv) * E + e;
                const Value dot = set(r.dk, i, p.k[i], d);
                key_dot[size_t(t - begin)].add(dot.value, dot.mag);
            }
            for (int64_t m = 0; m < M; m++) r.dv.set((t * p.NKV + kv) * M + m, grad.column(k, size_t(m), size_t(M)));
            // A running sum: the squares of its terms' errors add up.
            const Value &q = query_dot[size_t(t - begin)], &dot = key_dot[size_t(t - begin)];
            through.value += q.value - dot.value;
            squares += q.mag * q.mag + dot.mag * dot.mag;
            if (p.gate) r.dgate.set(t * p.NKV + kv, {through.value, fabs(through.value) + sqrt(squares)});
        }
        if (p.gate && begin < end) grad.decay(p.gate[begin * p.NKV + kv]);
        for (int64_t i = 0; i < E * M; i++)
            r.dinitial.set(at * E * M + i, {grad.s.value[size_t(i)], grad.s.mag[size_t(i)]});
        for (int64_t e = 0; e < E; e++) r.dinitial_z.set(at * E + e, {grad.z.value[size_t(e)], grad.z.mag[size_t(e)]});
    }
    return r;
}

// Linear attention as sums over pairs of tokens, for single rows of long sequences without states: a second,
// independent definition.
class LinearAttentionPairs {
  public:
    LinearAttentionPairs(const LinearAttentionInputs& inputs, const double* dout, const double* out, const double* norm)
        : p(inputs),
          group(inputs.NH / inputs.NKV),
          q(elementwise([&](double x) { return feature(x, p.elu); }, p.q, p.cum.back() * p.NH * p.E)),
          k(elementwise([&](double x) { return feature(x, p.elu); }, p.k, p.cum.back() * p.NKV * p.E)),
          v(elementwise([](double x) { return feature(x, false); }, p.v, p.cum.back() * p.NKV * p.M)),
          g(elementwise([](double x) { return feature(x, false); }, dout, p.cum.back() * p.NH * p.M)),
          delta(p.cum.back() * p.NH),
          decay(p.cum.back() * p.NKV) {
        for (int64_t i = 0; i < p.cum.back() * p.NH && p.normalise; i++) {
            const double d = norm[i % p.NH * p.cum.back() + i / p.NH];
            for (int64_t at = i * p.M; at < (i + 1) * p.M; at++) {
                g.value[size_t(at)] /= d;
                g.mag[size_t(at)] /= d;
                delta.value[size_t(i)] -= g.value[size_t(at)] * out[at];
                delta.mag[size_t(i)] += fabs(g.value[size_t(at)] * out[at]);
            }
        }
        for (int64_t i = 0; i < p.cum.back() * p.NKV && p.gate; i++)
            decay.value[size_t(i)] = p.gate[i] + (i < p.NKV ? 0 : decay.value[size_t(i - p.NKV)]);
    }
    // Row t of head h: of out [M] and dq [E], where begin is the first token of its sequence; of dk [E] and dv [M] of
    // a KV head, where end is that of the next sequence.
    Values out_row(int64_t t, int64_t h, int64_t begin) const {
        Values row(p.M);
        Value d;
        for (int64_t s = begin; s <= t; s++) {
            const Value x = score(t, s, h);
            d.add(x.value, x.mag);
            add(row, x, v, s * p.NKV + h / group);
        }
        d.add(1e-6);
        for (size_t m = 0; m < row.value.size() && p.normalise; m++) {
            row.value[m] /= d.value;
            row.mag[m] = (row.mag[m] + fabs(row.value[m]) * d.mag) / d.value;
        }
        return row;
    }
    Values dq_row(int64_t t, int64_t h, int64_t begin) const {
        Values row(p.E);
        for (int64_t s = begin; s <= t; s++) add(row, score_gradient(t, s, h), k, s * p.NKV + h / group);
        return through_features(row, q, t * p.NH + h);
    }
    Values dk_row(int64_t s, int64_t kv, int64_t end) const {
        Values row(p.E);
        for (int64_t t = s; t < end; t++)
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) add(row, score_gradient(t, s, h), q, t * p.NH + h);
        return through_features(row, k, s * p.NKV + kv);
    }
    Values dv_row(int64_t s, int64_t kv, int64_t end) const {
        Values row(p.M);
        for (int64_t t = s; t < end; t++)
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) add(row, score(t, s, h), g, t * p.NH + h);
        return row;
    }

  private:
    // w_ts·(a·b + extra), w_ts = exp(Σ of the gates after s, up to t): rows a_at and b_at of n numbers.
    Value weighted(int64_t t, int64_t s, int64_t kv, const Values& a, int64_t a_at, const Values& b, int64_t b_at,
                   int64_t n, Value extra) const {
        Value sum = extra;
        const double *x = &a.value[size_t(a_at * n)], *y = &b.value[size_t(b_at * n)],
                     *x_mag = &a.mag[size_t(a_at * n)], *y_mag = &b.mag[size_t(b_at * n)];
        constexpr int64_t W = 4;  // independent sums: long sequences spend their time here
        double value[W] = {}, mag[W] = {};
        for (int64_t i = 0; i + W <= n; i += W)
            for (int64_t j = 0; j < W; j++) {
                value[j] += x[i + j] * y[i + j];
                mag[j] += x_mag[i + j] * y_mag[i + j];
            }
        for (int64_t i = n / W * W; i < n; i++) {
            value[0] += x[i] * y[i];
            mag[0] += x_mag[i] * y_mag[i];
        }
        for (int64_t j = 0; j < W; j++) sum.add(value[j], mag[j]);
        const double w = decay.value[size_t(t * p.NKV + kv)] - decay.value[size_t(s * p.NKV + kv)];
        return {sum.value * exp(w), (sum.mag + fabs(w * sum.value)) * exp(w)};
    }
    Value score(int64_t t, int64_t s, int64_t h) const {
        return weighted(t, s, h / group, q, t * p.NH + h, k, s * p.NKV + h / group, p.E, {});
    }
    Value score_gradient(int64_t t, int64_t s, int64_t h) const {
        const size_t i = size_t(t * p.NH + h);
        return weighted(t, s, h / group, g, int64_t(i), v, s * p.NKV + h / group, p.M, {delta.value[i], delta.mag[i]});
    }
    static void add(Values& row, Value score, const Values& x, int64_t at) {
        const size_t n = row.value.size();
        for (size_t i = 0; i < n; i++) {
            row.value[i] += score.value * x.value[size_t(at) * n + i];
            row.mag[i] += score.mag * x.mag[size_t(at) * n + i];
        }
    }
    Values through_features(Values row, const Values& features, int64_t at) const {
        for (size_t e = 0; e < row.value.size() && p.elu; e++) {
            const double slope = std::min(features.value[size_t(at) * row.value.size() + e], 1.0);
            row.value[e] *= slope;
            row.mag[e] = row.mag[e] * slope + UNDERFLOW_MAG;
        }
        return row;
    }

    const LinearAttentionInputs& p;
    int64_t group;
    Values q, k, v, g, delta, decay;  // features; ĝ; δ [N, NH]; sums of the gates [N, NKV]
};

// Radians per position of each of the R/2 pairs in a table of T positions.
inline std::vector<double> rope_frequencies(int64_t T, int64_t R, double theta, const RopeScaling& scaling) {
    std::vector<double> f(size_t(R / 2));
    const double L = double(T), L0 = double(scaling.original_max_position), s = scaling.factor;
    if (scaling.kind == RopeScaling::Kind::Dynamic && L > L0) {
        theta *= pow(s * L / L0 - (s - 1), double(R) / double(R - 2));
    }
    for (size_t i = 0; i < f.size(); i++) {
        f[i] = pow(theta, -double(2 * i) / double(R));
        if (scaling.kind == RopeScaling::Kind::Truncated) {
            const double n = floor(scaling.fraction * double(f.size()));
            f[i] = double(i) >= n ? 0 : n > 1 ? pow(1 / theta, double(i) / (n - 1)) : 1;
        }
        if (scaling.kind == RopeScaling::Kind::Linear) f[i] /= s;
        if (scaling.kind == RopeScaling::Kind::Llama3) {
            const double wavelength = 2 * M_PI / f[i], low = scaling.low_freq_factor, high = scaling.high_freq_factor;
            const double smooth = (L0 / wavelength - low) / (high - low);
            f[i] = wavelength > L0 / low    ? f[i] / s
                   : wavelength < L0 / high ? f[i]
                                            : (1 - smooth) * f[i] / s + smooth * f[i];
        }
    }
    return f;
}

// [T, R/2, 2]: cos, sin.
inline std::vector<double> rope_table(int64_t T, int64_t R, double theta, const RopeScaling& scaling) {
    const std::vector<double> f = rope_frequencies(T, R, theta, scaling);
    std::vector<double> table;
    for (int64_t t = 0; t < T; t++)
        for (const double frequency : f) {
            table.push_back(cos(double(t) * frequency));
            table.push_back(sin(double(t) * frequency));
        }
    return table;
}

// x [N, H, HS], its first R channels rotated; table [T, R/2, 2]. x_mag null: |x|.
inline Values rope(const double* x, const int32_t* positions, const double* table, int64_t N, int64_t H, int64_t HS,
                   int64_t R, bool backward, const double* x_mag = nullptr) {
    Values out(N * H * HS);
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t c = 0; c < HS; c++) {
                const int64_t at = (n * H + h) * HS;
                const auto mag = [&](int64_t i) { return x_mag ? x_mag[at + i] : fabs(x[at + i]); };
                Value v;
                if (c >= R) {
                    v.add(x[at + c], mag(c));
                } else {
                    const int64_t other = c < R / 2 ? c + R / 2 : c - R / 2;
                    const double* rotation = table + (positions[n] * (R / 2) + c % (R / 2)) * 2;
                    const double sine = (c < R / 2) != backward ? -rotation[1] : rotation[1];
                    v.add(x[at + c] * rotation[0], mag(c) * fabs(rotation[0]));
                    v.add(x[at + other] * sine, mag(other) * fabs(sine));
                }
                out.set(at + c, v);
            }
    return out;
}

// The sizes of qk_norm: R rotated channels, 0: none.
struct QkNorm {
    int64_t N, NH, NKV, HS, R;
    int64_t heads() const { return NH + NKV; }
};

struct QkNormForward {
    Values out, rstd;  // [N, H, HS], [N, H]
};

// weight_q, weight_k null: 1.
inline QkNormForward qk_norm_forward(const QkNorm& z, const double* inp, const double* weight_q, const double* weight_k,
                                     const int32_t* positions, const double* table, double eps) {
    const std::vector<double> ones(size_t(z.HS), 1);
    const Norm q = rmsnorm_forward(inp, nullptr, weight_q ? weight_q : ones.data(), eps, z.N * z.heads(), z.HS),
               k = rmsnorm_forward(inp, nullptr, weight_k ? weight_k : ones.data(), eps, z.N * z.heads(), z.HS);
    QkNormForward r{q.out, q.rstd};
    for (int64_t row = 0; row < z.N * z.heads(); row++)
        for (int64_t c = row * z.HS; c < (row + 1) * z.HS && row % z.heads() >= z.NH; c++)
            r.out.set(c, {k.out.value[size_t(c)], k.out.mag[size_t(c)]});
    if (z.R) r.out = rope(r.out.data(), positions, table, z.N, z.heads(), z.HS, z.R, false, r.out.mag.data());
    return r;
}

struct QkNormBackward {
    Values dinp, dweight_q, dweight_k;
};

// kept: inp of the forward pass; without weights its out.
inline QkNormBackward qk_norm_backward(const QkNorm& z, const double* dout, const double* kept, const double* rstd,
                                       const double* weight_q, const double* weight_k, const int32_t* positions,
                                       const double* table, const double* accumulate_q, const double* accumulate_k) {
    const int64_t n = z.N * z.heads() * z.HS;
    std::vector<double> g(dout, dout + n), inp(kept, kept + n);
    if (z.R) g = rope(dout, positions, table, z.N, z.heads(), z.HS, z.R, true).value;
    if (z.R && !weight_q) inp = rope(kept, positions, table, z.N, z.heads(), z.HS, z.R, true).value;
    if (!weight_q)
        for (int64_t i = 0; i < n; i++) inp[size_t(i)] /= rstd[i / z.HS];
    const std::vector<double> ones(size_t(z.HS), 1);
    QkNormBackward r{Values(n), Values(z.HS), Values(z.HS)};
    // The gradients of the heads [first, first + heads) of each token.
    const auto part = [&](int64_t first, int64_t heads, const double* weight, const double* accumulate) {
        std::vector<double> part_g, part_inp, part_rstd;
        const auto each_row = [&](auto f) {
            for (int64_t t = 0; t < z.N; t++)
                for (int64_t h = first; h < first + heads; h++) f(t * z.heads() + h);
        };
        each_row([&](int64_t row) {
            part_g.insert(part_g.end(), g.begin() + row * z.HS, g.begin() + (row + 1) * z.HS);
            part_inp.insert(part_inp.end(), inp.begin() + row * z.HS, inp.begin() + (row + 1) * z.HS);
            part_rstd.push_back(rstd[row]);
        });
        const NormGradients d = norm_backward(part_g.data(), nullptr, part_inp.data(), weight ? weight : ones.data(),
                                              nullptr, part_rstd.data(), accumulate, nullptr, z.N * heads, z.HS);
        int64_t from = 0;
        each_row([&](int64_t row) {
            for (int64_t c = 0; c < z.HS; c++, from++)
                r.dinp.set(row * z.HS + c, {d.dinp.value[size_t(from)], d.dinp.mag[size_t(from)]});
        });
        return d.dweight;
    };
    r.dweight_q = part(0, z.NH, weight_q, accumulate_q);
    r.dweight_k = part(z.NH, z.NKV, weight_k, accumulate_k);
    return r;
}

struct RowParts {
    std::vector<double> q, k;
};
// q and k of rows [N, H·HS].
inline RowParts split_rows(const QkNorm& z, const double* rows) {
    RowParts parts;
    const int64_t Q = z.NH * z.HS, K = z.NKV * z.HS;
    for (int64_t n = 0; n < z.N; n++, rows += Q + K) {
        parts.q.insert(parts.q.end(), rows, rows + Q);
        parts.k.insert(parts.k.end(), rows + Q, rows + Q + K);
    }
    return parts;
}
inline void set_rows(const QkNorm& z, Values& rows, const Values& q, const Values& k) {
    const int64_t Q = z.NH * z.HS, K = z.NKV * z.HS;
    for (int64_t n = 0; n < z.N; n++)
        for (int64_t c = 0; c < Q + K; c++) {
            const Values& from = c < Q ? q : k;
            const size_t i = size_t(c < Q ? n * Q + c : n * K + c - Q);
            rows.set(n * (Q + K) + c, {from.value[i], from.mag[i]});
        }
}

// QK-norm of all heads together. weight_q [NH·HS], weight_k [NKV·HS]; out [N, H·HS], rstd [2, N].
inline QkNormForward qk_norm_all_heads_forward(const QkNorm& z, const double* inp, const double* weight_q,
                                               const double* weight_k, const int32_t* positions, const double* table,
                                               double eps) {
    const RowParts x = split_rows(z, inp);
    const Norm q = rmsnorm_forward(x.q.data(), nullptr, weight_q, eps, z.N, z.NH * z.HS),
               k = rmsnorm_forward(x.k.data(), nullptr, weight_k, eps, z.N, z.NKV * z.HS);
    QkNormForward r{Values(z.N * z.heads() * z.HS), Values(2 * z.N)};
    set_rows(z, r.out, q.out, k.out);
    for (int64_t n = 0; n < z.N; n++) {
        r.rstd.set(n, {q.rstd.value[size_t(n)], q.rstd.mag[size_t(n)]});
        r.rstd.set(z.N + n, {k.rstd.value[size_t(n)], k.rstd.mag[size_t(n)]});
    }
    if (z.R) r.out = rope(r.out.value.data(), positions, table, z.N, z.heads(), z.HS, z.R, false, r.out.mag.data());
    return r;
}

// g: dout rotated back.
inline QkNormBackward qk_norm_all_heads_backward(const QkNorm& z, const double* g, const double* inp,
                                                 const double* rstd, const double* weight_q, const double* weight_k,
                                                 const double* accumulate_q, const double* accumulate_k) {
    const RowParts x = split_rows(z, inp), d = split_rows(z, g);
    const NormGradients q = norm_backward(d.q.data(), nullptr, x.q.data(), weight_q, nullptr, rstd, accumulate_q,
                                          nullptr, z.N, z.NH * z.HS),
                        k = norm_backward(d.k.data(), nullptr, x.k.data(), weight_k, nullptr, rstd + z.N, accumulate_k,
                                          nullptr, z.N, z.NKV * z.HS);
    QkNormBackward r{Values(z.N * z.heads() * z.HS), q.dweight, k.dweight};
    set_rows(z, r.dinp, q.dinp, k.dinp);
    return r;
}

// The logits under a repetition penalty.
inline std::vector<double> penalised(const double* logits, int64_t V, const std::vector<bool>& seen, double penalty) {
    std::vector<double> out(logits, logits + V);
    for (size_t v = 0; v < out.size(); v++)
        if (seen[v]) out[v] = out[v] > 0 ? out[v] / penalty : out[v] * penalty;
    return out;
}

// Probability of each of V tokens: softmax(logits/temperature) over the top_k largest (0: all), ties to the lower id;
// of those as few as have together top_p; of those the ones at least min_p times as likely as the most likely token.
inline std::vector<double> sampling_probabilities(const double* logits, int64_t V, double temperature, int64_t top_k,
                                                  double top_p = 1, double min_p = 0) {
    std::vector<int64_t> order(static_cast<size_t>(V));
    for (int64_t v = 0; v < V; v++) order[size_t(v)] = v;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    if (top_k > 0) order.resize(std::min(size_t(top_k), order.size()));
    std::vector<double> p(static_cast<size_t>(V));
    const auto probability = [&](int64_t v) { return exp((logits[v] - logits[order[0]]) / temperature); };
    if (temperature == 0) {
        p[size_t(order[0])] = 1;
        return p;
    }
    double all = 0, cumulative = 0, sum = 0;
    for (const int64_t v : order) all += probability(v);
    for (const int64_t v : order) {
        if (top_p < 1 && cumulative >= top_p * all) break;
        cumulative += probability(v);
        if (probability(v) >= min_p) sum += p[size_t(v)] = probability(v);
    }
    for (double& x : p) x /= sum;
    return p;
}

// The first token whose cumulative probability exceeds u.
inline int32_t sample(const std::vector<double>& probabilities, double u) {
    double sum = 0;
    for (size_t v = 0; v < probabilities.size(); v++) {
        sum += probabilities[v];
        if (sum > u) return int32_t(v);
    }
    return int32_t(std::max_element(probabilities.begin(), probabilities.end()) - probabilities.begin());
}

}  // namespace reference
