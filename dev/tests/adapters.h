// Models with LoRA adapters for tests: the merged model, and the gradients of adapters that follow from those of a
// matrix.
#pragma once

#include "dev/oracle/reference_gradients.h"
#include "dev/tests/model_fixture.h"
#include "dev/tests/test_util.h"

inline LoraOptions lora_options(std::vector<std::string> targets = {"all-linear"}, bool rank_stabilized = false) {
    LoraOptions lora;
    lora.rank = 3;
    lora.alpha = 2;
    lora.rank_stabilized = rank_stabilized;
    lora.targets = std::move(targets);
    return lora;
}

inline Driver lora_driver(const ModelConfig& config, RunShape shape, const LoraOptions& lora, Offload offload = {}) {
    return Driver(config, shape, true, Driver::default_options(), OptimizerType::AdamW, {}, offload, lora);
}

// All weights of a model, padding rows included.
inline void copy_weights(const Model& to, const Model& from) {
    std::vector<float> buffer;
    for (const Param& p : from.table.params) to.arenas.store(p, from.arenas.fetch(p, buffer), 0, p.padded_numel());
}

// Calls f(p, A, B, part, first row of A, first row of B) for each adapter of a model. p: the base's parameter.
template <typename F>
void for_each_adapter(const Model& model, F f) {
    for (const auto& [at, parts] : model.lora->parts) {
        const auto [role, layer] = at;
        const ParamTable& adapters = model.adapters->table;
        const Param& p = *model.table.find(role, int(layer));
        const Param &a = *adapters.find(lora_a(Role(role)), int(layer)),
                    &b = *adapters.find(lora_b(Role(role)), int(layer));
        int64_t a_row = 0, b_row = 0;
        for (const LoraPart& part : parts) {
            f(p, a, b, part, a_row, b_row);
            a_row += b.cols;
            b_row += part.rows;
        }
    }
}

// Left [rows, R] and right [R, cols] of which an adapter is the product, less s: B and A, or of the embedding A and Bᵀ.
struct AdapterFactors {
    std::vector<double> left, right;
};
inline AdapterFactors adapter_factors(const Param& p, const Param& b, const LoraPart& part, int64_t a_row,
                                      int64_t b_row, const std::vector<float>& A, const std::vector<float>& B) {
    const int64_t R = b.cols, C = p.cols;
    if (p.role != WTE)
        return {{B.begin() + b_row * R, B.begin() + (b_row + part.rows) * R},
                {A.begin() + a_row * C, A.begin() + (a_row + R) * C}};
    AdapterFactors f{{A.begin(), A.begin() + part.rows * R}, std::vector<double>(size_t(R * C))};
    for (int64_t c = 0; c < C; c++)
        for (int64_t r = 0; r < R; r++) f.right[size_t(r * C + c)] = double(B[size_t(c * R + r)]);
    return f;
}

// The model with its adapters merged, without rounding except to fp32.
inline void merge(const Driver& lora, const Driver& merged) {
    copy_weights(merged.model, lora.model);
    const double s = lora.model.lora->options.scale();
    for_each_adapter(lora.model, [&](const Param& p, const Param& a, const Param& b, const LoraPart& part,
                                     int64_t a_row, int64_t b_row) {
        std::vector<float> w = fetch_param(merged.model, p);
        const AdapterFactors f = adapter_factors(p, b, part, a_row, b_row, fetch_param(*lora.model.adapters, a),
                                                 fetch_param(*lora.model.adapters, b));
        for (int64_t i = 0; i < part.rows; i++) {
            for (int64_t c = 0; c < p.cols; c++) {
                double sum = 0;
                for (int64_t r = 0; r < b.cols; r++)
                    sum += f.left[size_t(i * b.cols + r)] * f.right[size_t(r * p.cols + c)];
                float& to = w[size_t((part.row + i) * p.cols + c)];
                to = float(double(to) + s * sum);
            }
        }
        merged.model.arenas.store(p, w.data(), 0, p.numel());
    });
}

// The gradients of the merged model's weights: in float64 where the oracle has them, else of the driver.
inline reference::Weights merged_gradients(Driver& merged, const Batch& batch, int64_t B, int64_t T) {
    const ModelConfig& config = merged.model.config;
    reference::Weights weights, gradients;
    for (const Param& p : merged.model.table.params) {
        const std::vector<float> values = fetch_param(merged.model, p);
        weights[p.name].assign(values.begin(), values.end());
    }
    if (reference::has_gradients(config) && !config.norm_after)
        return reference::model_gradients(config, weights, batch.tokens, batch.targets, B, T).gradients;
    merged.gradients({batch});
    for (const Param& p : merged.model.table.params) {
        const std::vector<float> g = fetch_floats(merged.ctx, merged.optimizer.grads.tensor(p));
        gradients[p.name].assign(g.begin(), g.begin() + p.numel());
    }
    return gradients;
}

inline double relative_rms(const std::vector<double>& got, const std::vector<double>& expected) {
    return rms(difference(got, expected)) / rms(expected);
}

// The gradient of an adapter's A and B: computed, and expected from dW of the merged model, dA = s·Bᵀ·dW and
// dB = s·dW·Aᵀ over the rows of the adapter.
struct AdapterGradients {
    std::string name;
    std::vector<double> a, b, expected_a, expected_b;
};
inline std::vector<AdapterGradients> adapter_gradients(const Driver& lora, const reference::Weights& dense) {
    std::vector<AdapterGradients> all;
    const double s = lora.model.lora->options.scale();
    const Model& adapters = *lora.model.adapters;
    for_each_adapter(lora.model, [&](const Param& p, const Param& a, const Param& b, const LoraPart& part,
                                     int64_t a_row, int64_t b_row) {
        const int64_t R = b.cols, C = p.cols;
        const std::vector<double>& dW = dense.at(p.name);
        const AdapterFactors f =
            adapter_factors(p, b, part, a_row, b_row, fetch_param(adapters, a), fetch_param(adapters, b));
        const AdapterFactors got =
            adapter_factors(p, b, part, a_row, b_row, fetch_floats(lora.ctx, lora.optimizer.grads.tensor(a)),
                            fetch_floats(lora.ctx, lora.optimizer.grads.tensor(b)));
        AdapterGradients g{str(p.name, " row ", part.row), got.right, got.left, std::vector<double>(size_t(R * C), 0),
                           std::vector<double>(size_t(part.rows * R), 0)};
        for (int64_t i = 0; i < part.rows; i++) {
            for (int64_t r = 0; r < R; r++) {
                for (int64_t c = 0; c < C; c++) {
                    const double d = s * dW[size_t((part.row + i) * C + c)];
                    g.expected_a[size_t(r * C + c)] += f.left[size_t(i * R + r)] * d;
                    g.expected_b[size_t(i * R + r)] += f.right[size_t(r * C + c)] * d;
                }
            }
        }
        all.push_back(std::move(g));
    });
    return all;
}

// Sizes that NF4 can hold.
inline ModelConfig qlora_config(bool llama) {
    ModelConfig c = base_config();
    c.channels = 64;
    c.head_size = 16;
    c.ffn = 128;
    if (!llama) return c;
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.activation = Activation::SwiGLU;
    c.kv_heads = 2;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    return c;
}

// What a model's base in NF4 has for a parameter: the values, not rounded to the model's dtype.
inline std::vector<float> nf4_values(const Driver& driver, const Param& p) {
    const TestArray out = TestArray::poisoned({p.numel()});
    nf4_dequantise(out, driver.model.nf4->matrix(p), driver.ctx.stream);
    synchronize(driver.ctx.stream);
    const std::vector<double> values = out.fetch();
    return {values.begin(), values.end()};
}

// The weights of `from` into a model with a base in NF4; and what NF4 made of them back into `from`.
inline void quantise_base(Driver& to, Driver& from) {
    copy_weights(*to.model.adapters, *from.model.adapters);
    for (const Param& p : from.model.table.params) {
        std::vector<float> values(size_t(p.padded_numel()), 0.0f), buffer;
        const float* const exact = from.model.arenas.fetch(p, buffer);
        std::copy_n(exact, values.size(), values.begin());
        to.model.arenas.store(p, values.data(), 0, p.padded_numel());
        if (!Nf4Base::quantises(p)) continue;
        to.model.nf4->store(p, values.data());
        const std::vector<float> moved = nf4_values(to, p);
        std::copy(moved.begin(), moved.end(), values.begin());
        from.model.arenas.store(p, values.data(), 0, p.numel());
    }
}
