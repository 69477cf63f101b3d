// The gradients of a whole model in float64, by the backward formulas of the oracle's ops (dev/oracle/reference.h), for
// models with softmax attention and without QK-norm or a norm after the embedding. The linear layers of the blocks may
// round their operands to fp8 exactly as training does (docs/use/low_precision.md), which central differences cannot
// follow.
#pragma once

#include <algorithm>

#include "dev/oracle/reference_model.h"
#include "runtime/device/fp8_codes.h"

namespace reference {

// Which operands of the blocks' linear layers are rounded to fp8.
struct Fp8Rounding {
    bool on = false;
    Fp8Format gradients = Fp8Format::E5M2;
};

// x as its fp32 value is represented by codes with a scale from its own amax.
inline std::vector<double> rounded_to_fp8(const std::vector<double>& x, Fp8Format f) {
    float amax = 0;
    for (const double v : x) amax = std::max(amax, std::fabs(float(v)));
    const int e = fp8_scale_exponent(amax, f, 0);
    std::vector<double> y;
    for (const double v : x)
        y.push_back(double(fp8_decode(fp8_encode(float(v) * power_of_two(e), f), f)) * std::exp2(-e));
    return y;
}

inline bool has_gradients(const ModelConfig& c) {
    return c.layers_of(AttentionType::Softmax) == c.layers && c.qk_norm == ::QkNorm::Off && !c.embedding_norm;
}

// deltas: s·B·A of the adapters of linear layers, by the weights' names; an adapter's operands are not rounded. Such a
// weight is frozen, and its gradient is that of its delta: doutᵀ·inp.
struct ModelGradients {
    double loss = 0;
    Weights gradients;
};

namespace detail {

class GradientPass {
  public:
    GradientPass(const ModelConfig& config, const Weights& w, const Weights& of_adapters, Fp8Rounding r,
                 int64_t batch_size, int64_t seq_len)
        : c(config), weights(w), deltas(of_adapters), rounding(r), N(batch_size * seq_len) {
        for (int64_t n = 0; n < N; n++) positions.push_back(int32_t(n % seq_len));
        for (int64_t b = 0; b <= batch_size; b++) cum_seqlens.push_back(int32_t(b * seq_len));
        if (c.positions == Positions::RoPE)
            table = rope_table(seq_len, c.rotary_channels(), c.rope_theta, c.rope_scaling);
        require(has_gradients(c), "reference gradients: not of this model");
    }

    ModelGradients run(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
        std::vector<double> x = embedding_forward(tokens.data(), positions.data(), get(weights, "wte.weight"),
                                                  find(weights, "wpe.weight"), N, c.channels)
                                    .value;
        std::vector<Layer> layers;
        for (int64_t l = 0; l < c.layers; l++) layers.push_back(forward(l, x));
        const Saved normf = norm("normf", x);
        std::vector<double> dx = head(normf.out, targets);
        dx = norm_gradient("normf", normf, dx, nullptr);
        for (int64_t l = c.layers - 1; l >= 0; l--) backward(l, layers[size_t(l)], dx);
        const int64_t V = c.vocab_size;
        add("wte.weight", embedding_backward(dx.data(), tokens.data(), nullptr, N, c.channels, V).value);
        if (find(weights, "wpe.weight"))
            add("wpe.weight",
                embedding_backward(dx.data(), positions.data(), nullptr, N, c.channels, c.max_positions).value);
        return result;
    }

  private:
    using Array = std::vector<double>;
    struct Saved {  // a norm's input, statistics and output
        Array inp, mean, rstd, out;
    };
    struct Layer {
        Saved norm1, norm2;
        Array q, k, v, att, lse, fc, act;
    };

    Array input_codes(const Array& x) const { return rounding.on ? rounded_to_fp8(x, Fp8Format::E4M3) : x; }
    Array gradient_codes(const Array& x) const { return rounding.on ? rounded_to_fp8(x, rounding.gradients) : x; }
    Array weight_codes(const std::string& name) const { return input_codes(weights.at(name + ".weight")); }

    void add(const std::string& name, const Array& gradient) {
        Array& sum = result.gradients[name];
        sum.resize(gradient.size());
        detail::add(sum, gradient);
    }

    Array linear(const std::string& name, const Array& inp, int64_t C, int64_t OC) const {
        Array out =
            matmul_forward(input_codes(inp).data(), weight_codes(name).data(), find(weights, name + ".bias"), N, C, OC)
                .value;
        if (const double* delta = find(deltas, name + ".weight"))
            detail::add(out, matmul_forward(inp.data(), delta, nullptr, N, C, OC).value);
        return out;
    }
    // Returns the gradient of the input.
    Array linear_gradient(const std::string& name, const Array& inp, const Array& dout, int64_t C, int64_t OC) {
        const Array d = gradient_codes(dout);
        const double* const delta = find(deltas, name + ".weight");
        const Array &left = delta ? dout : d, right = delta ? inp : input_codes(inp);
        add(name + ".weight", matmul_backward_weight(left.data(), right.data(), nullptr, N, C, OC).value);
        if (find(weights, name + ".bias")) add(name + ".bias", matmul_backward_bias(dout.data(), nullptr, N, OC).value);
        Array dinp = matmul_backward_input(d.data(), weight_codes(name).data(), nullptr, N, C, OC).value;
        if (delta) detail::add(dinp, matmul_backward_input(dout.data(), delta, nullptr, N, C, OC).value);
        return dinp;
    }

    Saved norm(const std::string& name, const Array& x) const {
        const bool centred = c.norm == ::Norm::LayerNorm;
        const reference::Norm r = norm_forward(x.data(), nullptr, get(weights, name + ".weight"),
                                               find(weights, name + ".bias"), c.norm_eps, N, c.channels, centred);
        return {x, r.mean.value, r.rstd.value, r.out.value};
    }
    Array norm_gradient(const std::string& name, const Saved& s, const Array& dout, const double* dresidual) {
        const bool centred = c.norm == ::Norm::LayerNorm;
        const NormGradients g =
            norm_backward(dout.data(), dresidual, s.inp.data(), get(weights, name + ".weight"),
                          centred ? s.mean.data() : nullptr, s.rstd.data(), nullptr, nullptr, N, c.channels);
        add(name + ".weight", g.dweight.value);
        if (centred) add(name + ".bias", g.dbias.value);
        return g.dinp.value;
    }

    Array rotated(const Array& x, int64_t heads, int64_t l, bool backward) const {
        if (!c.uses_rope(l)) return x;
        return rope(x.data(), positions.data(), table.data(), N, heads, c.head_size, c.rotary_channels(), backward)
            .value;
    }

    Layer forward(int64_t l, Array& x) const {
        const std::string name = str("layers.", l, ".");
        const int64_t C = c.channels, Q = c.heads * c.head_size, K = c.kv_heads * c.head_size, width = Q + 2 * K;
        Layer a;
        a.norm1 = norm(name + "norm1", x);
        const Array qkv = linear(name + "qkv", a.norm1.out, C, width);
        a.q = rotated(columns(qkv, N, width, 0, Q), c.heads, l, false);
        a.k = rotated(columns(qkv, N, width, Q, Q + K), c.kv_heads, l, false);
        a.v = columns(qkv, N, width, Q + K, width);
        const Attention attention = attention_forward(a.q.data(), a.k.data(), a.v.data(), cum_seqlens, cum_seqlens,
                                                      c.heads, c.kv_heads, c.head_size, scale(), {true, c.window(l)});
        a.att = attention.out.value;
        a.lse = attention.lse.value;
        detail::add(x, linear(name + "proj", a.att, Q, C));
        a.norm2 = norm(name + "norm2", x);
        a.fc = linear(name + "fc", a.norm2.out, C, c.fc_channels());
        a.act = activation_forward(c.activation, a.fc.data(), N, c.ffn).value;
        detail::add(x, linear(name + "fcproj", a.act, c.ffn, C));
        return a;
    }

    // dx: on entry the gradient of the block's output, on return that of its input.
    void backward(int64_t l, const Layer& a, Array& dx) {
        const std::string name = str("layers.", l, ".");
        const int64_t C = c.channels, Q = c.heads * c.head_size, K = c.kv_heads * c.head_size, width = Q + 2 * K;
        const Array dact = linear_gradient(name + "fcproj", a.act, dx, c.ffn, C);
        const Array dfc = activation_backward(c.activation, dact.data(), a.fc.data(), N, c.ffn).value;
        const Array dnorm2 = linear_gradient(name + "fc", a.norm2.out, dfc, C, c.fc_channels());
        dx = norm_gradient(name + "norm2", a.norm2, dnorm2, dx.data());

        const Array datt = linear_gradient(name + "proj", a.att, dx, Q, C);
        const AttentionGradients d =
            attention_backward(datt.data(), a.q.data(), a.k.data(), a.v.data(), a.att.data(), a.lse.data(), cum_seqlens,
                               cum_seqlens, c.heads, c.kv_heads, c.head_size, scale(), {true, c.window(l)});
        const Array dq = rotated(d.dq.value, c.heads, l, true), dk = rotated(d.dk.value, c.kv_heads, l, true);
        Array dqkv;
        for (int64_t n = 0; n < N; n++) {
            dqkv.insert(dqkv.end(), dq.begin() + n * Q, dq.begin() + (n + 1) * Q);
            dqkv.insert(dqkv.end(), dk.begin() + n * K, dk.begin() + (n + 1) * K);
            dqkv.insert(dqkv.end(), d.dv.value.begin() + n * K, d.dv.value.begin() + (n + 1) * K);
        }
        const Array dnorm1 = linear_gradient(name + "qkv", a.norm1.out, dqkv, C, width);
        dx = norm_gradient(name + "norm1", a.norm1, dnorm1, dx.data());
    }

    // Loss, and the gradients of the head's weight and of its input.
    Array head(const Array& inp, const std::vector<int32_t>& targets) {
        const int64_t V = c.vocab_size, counted = std::count_if(targets.begin(), targets.end(),
                                                                [](int32_t t) { return t != IGNORE_TARGET; });
        const std::string name = c.tied ? "wte.weight" : "head.weight";
        const Array logits =
            matmul_forward(inp.data(), get(weights, name), find(weights, "head.bias"), N, c.channels, V).value;
        const CrossEntropy r = cross_entropy(logits.data(), targets.data(), IGNORE_TARGET, 1.0 / double(counted), N, V,
                                             V, c.logit_softcap);
        for (const double loss : r.losses.value) result.loss += loss / double(counted);
        const Array& d = r.dlogits.value;
        add(name, matmul_backward_weight(d.data(), inp.data(), nullptr, N, c.channels, V).value);
        if (find(weights, "head.bias")) add("head.bias", matmul_backward_bias(d.data(), nullptr, N, V).value);
        return matmul_backward_input(d.data(), get(weights, name), nullptr, N, c.channels, V).value;
    }

    double scale() const { return c.softmax_scale > 0 ? c.softmax_scale : 1 / std::sqrt(double(c.head_size)); }

    const ModelConfig& c;
    const Weights &weights, &deltas;
    const Fp8Rounding rounding;
    const int64_t N;
    std::vector<int32_t> positions, cum_seqlens;
    std::vector<double> table;
    ModelGradients result;
};

}  // namespace detail

// tokens, targets [B·T]: B sequences of T tokens. Gradients of the mean loss, by the parameters' names.
inline ModelGradients model_gradients(const ModelConfig& config, const Weights& weights,
                                      const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
                                      int64_t B, int64_t T, Fp8Rounding rounding = {}, const Weights& deltas = {}) {
    return detail::GradientPass(config, weights, deltas, rounding, B, T).run(tokens, targets);
}

}  // namespace reference
