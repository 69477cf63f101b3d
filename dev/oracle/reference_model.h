// The whole model in float64: the oracle's ops (dev/oracle/reference.h), composed by the formulas of a transformer. It
// shares only the config and the names of the parameters with the driver.
//
//   x = wte[tokens] (+ wpe[positions]), normed after that if the model says so
//   per layer:  x += proj(attention(rope(qk_norm(qkv(norm1(x))))));   x += fcproj(mlp(fc(norm2(x))))
//   norms after:  x += norm1(proj(attention(rope(qk_norm(qkv(x))))));   x += norm2(fcproj(mlp(fc(x))))
//   logits = softcap(normf(x)·headᵀ (+ bias)),   loss = mean of −ln softmax(logits)[target] over the targets that are
//   not ignored
//
// It is slow and exact to about 1e-14. PyTorch's float64 fixtures check it. It checks the driver's logits and loss, and
// by central differences of the loss the driver's gradients, for model options that PyTorch's models do not have.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "dev/oracle/reference.h"
#include "kernels/cross_entropy.h"
#include "runtime/error.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

namespace reference {

// Values by the parameter's name ("layers.0.qkv.weight"), as in files: no padding rows.
using Weights = std::map<std::string, std::vector<double>>;

// An arena of fp32 on the host, widened.
inline Weights widen(const ParamTable& table, const float* arena) {
    Weights weights;
    for (const Param& p : table.params) {
        weights[p.name].assign(arena + p.offset, arena + p.offset + p.numel());
    }
    return weights;
}

struct ModelOutput {
    std::vector<double> logits;  // [B·T, V]
    double loss = 0;
};

namespace detail {

// Null where the model has no such parameter (a bias).
inline const double* find(const Weights& weights, const std::string& name) {
    const auto it = weights.find(name);
    return it == weights.end() ? nullptr : it->second.data();
}

inline const double* get(const Weights& weights, const std::string& name) {
    const double* w = find(weights, name);
    require(w, "reference model: no weights called ", name);
    return w;
}

inline std::vector<double> norm(const ModelConfig& c, const Weights& weights, const std::string& name,
                                const std::vector<double>& x, int64_t N) {
    const double *weight = get(weights, name + ".weight"), *bias = find(weights, name + ".bias");
    const bool layernorm = c.norm == ::Norm::LayerNorm;
    return (layernorm ? layernorm_forward(x.data(), nullptr, weight, bias, c.norm_eps, N, c.channels)
                      : rmsnorm_forward(x.data(), nullptr, weight, c.norm_eps, N, c.channels))
        .out.value;
}

// QK-norm of q or of k: RMSNorm over each head, or over all of them, with weights if there are any of that name.
inline std::vector<double> qk_norm(const ModelConfig& c, const Weights& weights, const std::string& name,
                                   const std::vector<double>& x, int64_t N, int64_t heads) {
    const bool together = c.qk_norm == ::QkNorm::AllHeads;
    const int64_t rows = together ? N : N * heads, channels = together ? heads * c.head_size : c.head_size;
    const std::vector<double> ones(size_t(channels), 1);
    const double* weight = find(weights, name + ".weight");
    return rmsnorm_forward(x.data(), nullptr, weight ? weight : ones.data(), c.norm_eps, rows, channels).out.value;
}

inline std::vector<double> linear(const Weights& weights, const std::string& name, const std::vector<double>& x,
                                  int64_t N, int64_t C, int64_t OC) {
    return matmul_forward(x.data(), get(weights, name + ".weight"), find(weights, name + ".bias"), N, C, OC).value;
}

// linear: features elu + 1, normalised. gated_linear: neither, but a log decay for each token and KV head, and an
// RMSNorm of each head afterwards. inp: the input of the QKV projection.
inline std::vector<double> linear_attention(const ModelConfig& c, const Weights& weights, const std::string& layer,
                                            const std::vector<double>& inp, const std::vector<double>& q,
                                            const std::vector<double>& k, const std::vector<double>& v,
                                            const std::vector<int32_t>& cum_seqlens) {
    const int64_t N = cum_seqlens.back(), HS = c.head_size;
    LinearAttentionInputs p{q.data(), k.data(),   v.data(),    nullptr, nullptr, nullptr, cum_seqlens,
                            c.heads,  c.kv_heads, c.head_size, HS,      true,    true};
    if (!find(weights, layer + "gate.weight")) return linear_attention_forward(p).out.value;
    const std::vector<double> gate = decay_gate_forward(inp.data(), get(weights, layer + "gate.weight"),
                                                        get(weights, layer + "gate.bias"), N, c.channels, c.kv_heads)
                                         .value;
    p.gate = gate.data();
    p.elu = p.normalise = false;
    const std::vector<double> heads = linear_attention_forward(p).out.value;
    return rmsnorm_forward(heads.data(), nullptr, get(weights, layer + "headnorm.weight"), c.norm_eps, N * c.heads, HS)
        .out.value;
}

// Columns [begin, end) of a matrix with `width` columns.
inline std::vector<double> columns(const std::vector<double>& x, int64_t N, int64_t width, int64_t begin, int64_t end) {
    std::vector<double> out;
    for (int64_t n = 0; n < N; n++) out.insert(out.end(), x.begin() + n * width + begin, x.begin() + n * width + end);
    return out;
}

inline void add(std::vector<double>& x, const std::vector<double>& y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
}

}  // namespace detail

// tokens, targets [B·T]: B sequences of T tokens.
inline ModelOutput model_forward(const ModelConfig& c, const Weights& weights, const std::vector<int32_t>& tokens,
                                 const std::vector<int32_t>& targets, int64_t B, int64_t T) {
    using namespace detail;
    const int64_t N = B * T, C = c.channels, HS = c.head_size, R = c.rotary_channels(), Q = c.heads * HS,
                  K = c.kv_heads * HS, width = Q + 2 * K;
    std::vector<int32_t> positions, cum_seqlens;
    for (int64_t n = 0; n < N; n++) positions.push_back(int32_t(n % T));
    for (int64_t b = 0; b <= B; b++) cum_seqlens.push_back(int32_t(b * T));
    const bool learned = c.positions == Positions::Learned;
    const std::vector<double> table = learned ? std::vector<double>() : rope_table(T, R, c.rope_theta, c.rope_scaling);

    std::vector<double> x = embedding_forward(tokens.data(), positions.data(), get(weights, "wte.weight"),
                                              learned ? get(weights, "wpe.weight") : nullptr, N, C)
                                .value;
    if (c.embedding_norm) x = norm(c, weights, "embednorm", x, N);
    const double scale = c.softmax_scale > 0 ? c.softmax_scale : 1 / std::sqrt(double(HS));
    // The norm of a half of a block: of its input, or of its output.
    const auto before = [&](const std::string& name, const std::vector<double>& y) {
        return c.norm_after ? y : norm(c, weights, name, y, N);
    };
    const auto after = [&](const std::string& name, const std::vector<double>& y) {
        return c.norm_after ? norm(c, weights, name, y, N) : y;
    };
    for (int64_t l = 0; l < c.layers; l++) {
        const std::string layer = str("layers.", l, ".");
        const std::vector<double> inp = before(layer + "norm1", x);
        const std::vector<double> qkv = linear(weights, layer + "qkv", inp, N, C, width);
        std::vector<double> q = columns(qkv, N, width, 0, Q), k = columns(qkv, N, width, Q, Q + K);
        const std::vector<double> v = columns(qkv, N, width, Q + K, width);
        if (c.qk_norm != ::QkNorm::Off) {
            q = qk_norm(c, weights, layer + "qnorm", q, N, c.heads);
            k = qk_norm(c, weights, layer + "knorm", k, N, c.kv_heads);
        }
        if (c.uses_rope(l)) {
            q = rope(q.data(), positions.data(), table.data(), N, c.heads, HS, R, false).value;
            k = rope(k.data(), positions.data(), table.data(), N, c.kv_heads, HS, R, false).value;
        }
        const std::vector<double> att = c.attention_type(l) == AttentionType::Softmax
                                            ? attention_forward(q.data(), k.data(), v.data(), cum_seqlens, cum_seqlens,
                                                                c.heads, c.kv_heads, HS, scale, {true, c.window(l)})
                                                  .out.value
                                            : linear_attention(c, weights, layer, inp, q, k, v, cum_seqlens);
        add(x, after(layer + "norm1", linear(weights, layer + "proj", att, N, Q, C)));
        const std::vector<double> fc = linear(weights, layer + "fc", before(layer + "norm2", x), N, C, c.fc_channels());
        add(x,
            after(layer + "norm2", linear(weights, layer + "fcproj",
                                          activation_forward(c.activation, fc.data(), N, c.ffn).value, N, c.ffn, C)));
    }
    ModelOutput out;
    out.logits =
        matmul_forward(norm(c, weights, "normf", x, N).data(), get(weights, c.tied ? "wte.weight" : "head.weight"),
                       find(weights, "head.bias"), N, C, c.vocab_size)
            .value;
    for (double& logit : out.logits) logit = softcap(logit, c.logit_softcap).value.value;
    const Values losses =
        cross_entropy(out.logits.data(), targets.data(), IGNORE_TARGET, 1, N, c.vocab_size, c.vocab_size).losses;
    int64_t counted = 0;
    for (int64_t n = 0; n < N; n++) {
        out.loss += losses.value[size_t(n)];
        counted += targets[size_t(n)] != IGNORE_TARGET;
    }
    out.loss /= double(counted);
    return out;
}

}  // namespace reference
