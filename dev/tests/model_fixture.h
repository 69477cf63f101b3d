// A model in training for the end-to-end tests: random batches, weights and bounds, and the variants of the model.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "dev/tests/batches.h"
#include "dev/tests/vectors.h"
#include "driver/fp8_layer.h"
#include "driver/inference.h"
#include "driver/pass.h"
#include "model.h"
#include "runtime/normal.h"

template <typename U>
std::vector<U> fetch(const Tensor& t) {
    std::vector<U> host(static_cast<size_t>(t.numel()));
    copy_to_host(host.data(), t.as<U>(), host.size() * sizeof(U), {});
    return host;
}

// A model in training. Its memory holds NaN before the first step, so that reading what nobody wrote shows.
struct Driver {
    Context ctx;
    Model model;
    Activations acts;
    Optimizer optimizer;

    Driver(const ModelConfig& config, const RunShape& shape, bool master_weights = true,
           const OptimizerOptions& options = default_options(), OptimizerType hidden_matrices = OptimizerType::AdamW,
           const GradientOptions& gradients = {}, Offload offload = {}, const LoraOptions& lora = {})
        : model(config, {}, {shape.dtype, shape.dtype != DType::F32 && master_weights}, hidden_matrices, offload, lora,
                shape.fp8),
          acts(config, with_workspace(shape, model)) {
        model.allocate(ctx);
        acts.allocate(ctx);
        if (const int64_t bytes = model.buffer_memory.bytes())
            device_fill(model.buffer_memory.at(0, DType::U8, {bytes}).data, 0xFF, size_t(bytes), {});
        for (const ArenaPlan::Entry& e : acts.plan.entries()) {
            if (e.dtype != DType::I32 && e.name != "rope_table")
                device_fill(acts.at(e).data, 0xFF, size_t(acts.at(e).bytes()), {});
        }
        optimizer.allocate(ctx, model, options, gradients);
        for (const Param& p : model.trained().table.params) {
            const Tensor gradient = optimizer.grads.tensor(p);
            device_fill(gradient.data, 0xFF, size_t(gradient.bytes()), {});
        }
        write_scalars(ctx, acts, StepScalars{});
    }

    static OptimizerOptions default_options() {
        OptimizerOptions options;
        for (GroupHyperparameters& rate : options.rates) rate.weight_decay = 0.1f;
        options.muon.newton_schulz = newton_schulz_coefficients("simple");
        return options;
    }
    static RunShape with_workspace(RunShape shape, const Model& model) {
        shape.update_bytes = update_workspace_bytes(model);
        set_adapters(shape, model);
        return shape;
    }

    // Weights with which every part of the model has an effect: random biases and norm weights, activations of order
    // 1. A model in 16 bits gets smaller weights, as trained ones are, so that rounding errors don't grow from layer to
    // layer until they exceed bounds().
    void randomise(uint64_t seed) {
        randomise(model, seed);
        if (model.adapters) randomise(*model.adapters, seed);
    }
    static void randomise(const Model& model, uint64_t seed) {
        for (const Param& p : model.table.params) {
            std::vector<float> values(size_t(p.padded_numel()), 0.0f);
            const double std = !p.cols ? 0.2 : model.precision.dtype == DType::F32 ? 0.15 : 0.05;
            normal_numbers(values.data(), seed, name_hash(p.name), 0, p.numel());
            for (int64_t i = 0; i < p.numel(); i++)
                values[size_t(i)] = float(p.init_value + std * double(values[size_t(i)]));
            model.arenas.store(p, values.data(), 0, p.padded_numel());
            if (model.fp8 && model.fp8->quantises(p)) model.fp8->store(p, values.data());
            if (model.nf4 && Nf4Base::quantises(p)) model.nf4->store(p, values.data());
        }
    }

    // [n, V] without the padding.
    std::vector<double> logits(const Batch& batch) {
        scale_weights(ctx, model, acts);
        quantise_weights(ctx, model, acts);
        const Input in = upload(ctx, acts, batch);
        forward({ctx, model, acts, in});
        std::vector<double> out;
        for (int64_t n = 0; n < in.n; n++) {
            const std::vector<float> row = fetch_floats(ctx, head_logits({ctx, model, acts, in}, n, n + 1));
            out.insert(out.end(), row.begin(), row.begin() + model.config.vocab_size);
        }
        return out;
    }

    // Gradients of the mean loss over the batches' counted targets; returns that loss.
    double gradients(const std::vector<Batch>& batches) {
        int64_t counted = 0;
        for (const Batch& b : batches)
            counted +=
                std::count_if(b.targets.begin(), b.targets.end(), [](int32_t t) { return t != Batch::NO_TARGET; });
        scale_weights(ctx, model, acts);
        quantise_weights(ctx, model, acts);
        if (acts.fp8) acts.fp8->begin_step(ctx.stream);
        for (size_t i = 0; i < batches.size(); i++) {
            const Input in = upload(ctx, acts, batches[i], loss_tokens_only);
            forward({ctx, model, acts, in});
            backward({ctx, model, acts, in, &optimizer.grads}, static_cast<float>(1.0 / double(counted)), i == 0);
        }
        mean_scale = 1.0 / double(counted);
        return fetch<double>(acts.loss_sum)[0] * mean_scale;
    }

    // One step on one batch; the loss before it.
    double step(const Batch& batch, double lr, double grad_clip = 1, double momentum = 0.95) {
        gradients({batch});
        StepScalars s = read_scalars(ctx, acts);
        s.lr = static_cast<float>(lr);
        s.grad_clip = static_cast<float>(grad_clip);
        s.momentum = static_cast<float>(momentum);
        write_scalars(ctx, acts, s);
        update(ctx, model, optimizer, acts, mean_scale);
        return read_scalars(ctx, acts).loss;
    }

    std::vector<float> grads() const { return fetch_floats(ctx, optimizer.grads.arena.data); }
    // The most exact ones, in the layout of the arenas.
    std::vector<float> params() const {
        const Model& trained = model.trained();
        std::vector<float> arena(size_t(trained.table.total), 0.0f), buffer;
        for (const Param& p : trained.table.params)
            std::copy_n(trained.arenas.fetch(p, buffer), p.padded_numel(), arena.begin() + p.offset);
        return arena;
    }

    bool loss_tokens_only = false;  // what gradients() uploads

  private:
    double mean_scale = 0;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The dtypes that this backend computes in.
inline std::vector<DType> dtypes() {
    if (backend_device() == Device::CPU) return {DType::F32};
    return {DType::F32, DType::BF16};
}

// The dtypes that it generates in: there is no linear attention in fp16.
inline std::vector<DType> generation_dtypes(const ModelConfig& config) {
    std::vector<DType> all = dtypes();
    if (all.size() > 1 && !config.has_linear_attention()) all.push_back(DType::F16);
    return all;
}

inline std::vector<float> fetch_param(const Model& model, const Param& p) {
    std::vector<float> buffer;
    const float* const values = model.arenas.fetch(p, buffer);
    return {values, values + p.numel()};
}

// Bounds of DESIGN section 7: of the logits' maximum, and of a gradient's RMS.
struct Bounds {
    double logits, gradients;
};
inline Bounds bounds(DType dtype) {
    return dtype == DType::F32 ? Bounds{1e-5, 1e-5} : Bounds{2e-2, 3e-2};
}

inline ModelConfig base_config() {
    ModelConfig c;
    c.layers = 2;
    c.channels = 24;
    c.heads = c.kv_heads = 4;
    c.head_size = 6;
    c.ffn = 40;
    c.vocab_size = 53;
    c.max_positions = 16;
    c.set_attention("SS");
    return c;
}

struct ModelVariant {
    const char* name;
    void (*apply)(ModelConfig&);
};

inline void PrintTo(const ModelVariant& variant, std::ostream* out) {
    *out << variant.name;
}

const ModelVariant MODEL_VARIANTS[] = {
    {"gpt2", [](ModelConfig&) {}},
    {"llama",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
     }},
    {"rmsnorm_learned_relu2",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.activation = Activation::ReLU2;
         c.kv_heads = 1;
     }},
    {"layernorm_rope_swiglu_bias",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.head_size = 10;
         c.tied = false;
     }},
    {"gelu_without_biases_one_layer",
     [](ModelConfig& c) {
         c.qkv_bias = c.proj_bias = c.mlp_bias = false;
         c.layers = 1;
         c.set_attention("S");
         c.heads = c.kv_heads = 1;
         c.head_size = 2;
     }},
    {"linear",
     [](ModelConfig& c) {
         c.set_attention("LS");
         c.kv_heads = 2;
     }},
    {"gated_linear_rope",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.set_attention("GL");
     }},
    {"mixed_without_linear_rope",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.layer = {{AttentionType::GatedLinear, 0, false}, {}};
     }},
    {"rmsnorm_rope_relu2_some_biases",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::ReLU2;
         c.kv_heads = 2;
         c.proj_bias = false;
         c.rope_scaling.kind = RopeScaling::Kind::Linear;
         c.rope_scaling.factor = 2;
     }},
    {"qk_norm",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.qk_norm = QkNorm::Plain;
     }},
    {"qk_norm_with_weights_gqa",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
         c.qk_norm = QkNorm::Weights;
     }},
    {"qk_norm_with_weights_learned_positions",
     [](ModelConfig& c) {
         c.head_size = 5;
         c.qk_norm = QkNorm::Weights;
     }},
    {"qk_norm_linear",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.layer = {{AttentionType::Linear, 0, false}, {AttentionType::GatedLinear, 0, false}};
         c.qk_norm = QkNorm::Plain;
     }},
    {"qk_norm_with_weights_gated_linear",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.set_attention("GS");
         c.kv_heads = 2;
         c.qk_norm = QkNorm::Weights;
     }},
    {"olmo2",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
         c.qk_norm = QkNorm::AllHeads;
         c.norm_after = true;
     }},
    {"norm_after_with_biases_gated_linear",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.set_attention("GS");
         c.norm_after = true;
         c.qk_norm = QkNorm::AllHeads;
     }},
    {"norm_after_one_layer_embedding_norm",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.layers = 1;
         c.set_attention("S");
         c.norm_after = c.embedding_norm = true;
     }},
    {"qk_norm_of_all_heads_layernorm",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.kv_heads = 2;
         c.qk_norm = QkNorm::AllHeads;
     }},
    // Biases of q, k and v alone (Qwen2); a layer without RoPE (SmolLM3).
    {"qwen2",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.proj_bias = c.mlp_bias = false;
     }},
    {"layer_without_rope",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = false;
         c.layer[1].rope = false;
     }},
    // The options of the modern presets.
    {"modern",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::ReLU2;
         c.head_size = 8;
         c.tied = false;
         c.rope_theta = 1024;
         c.rope_scaling.kind = RopeScaling::Kind::Truncated;
         c.rope_scaling.fraction = 0.5;
         c.qk_norm = QkNorm::Plain;
         c.embedding_norm = c.head_bias = true;
         c.softmax_scale = 0.3;
         c.logit_softcap = {Softcap::Function::Rsqrt, 1.5};
     }},
    {"tied_head_bias_tanh_softcap",
     [](ModelConfig& c) {
         c.embedding_norm = c.head_bias = true;
         c.logit_softcap = {Softcap::Function::Tanh, 2};
         c.softmax_scale = 0.2;
     }},
    {"partial_rope",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 10;
         c.rope_scaling.fraction = 0.45;
         c.rope_theta = 500;
     }},
    {"partial_rope_qk_norm_gated_linear",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.set_attention("GS");
         c.head_size = 8;
         c.rope_scaling.fraction = 0.5;
         c.qk_norm = QkNorm::Plain;
         c.embedding_norm = true;
     }},
    // A window that hides keys and one that hides none; a window in only one of the layers.
    {"window",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
         c.layer[0].window = 3;
         c.layer[1].window = 12;
     }},
    {"window_in_one_layer_learned_positions", [](ModelConfig& c) { c.layer[1].window = 1; }},
    {"window_qk_norm_beside_gated_linear",
     [](ModelConfig& c) {
         c.positions = Positions::RoPE;
         c.set_attention("SG");
         c.qk_norm = QkNorm::Plain;
         c.layer[0].window = 5;
     }},
    // Heads of whole 16 bytes in any dtype, for which a GPU has other kernels.
    {"window_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.layer[0].window = 4;
         c.layer[1].window = 2;
     }},
    {"llama_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
     }},
    {"qk_norm_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::ReLU2;
         c.head_size = 16;
         c.qk_norm = QkNorm::Plain;
     }},
    {"qk_norm_with_weights_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.qk_norm = QkNorm::Weights;
     }},
    {"olmo2_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.qk_norm = QkNorm::AllHeads;
         c.norm_after = true;
     }},
    {"modern_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::ReLU2;
         c.head_size = 16;
         c.tied = false;
         c.rope_theta = 1024;
         c.rope_scaling.kind = RopeScaling::Kind::Truncated;
         c.rope_scaling.fraction = 0.5;
         c.qk_norm = QkNorm::Plain;
         c.embedding_norm = c.head_bias = true;
         c.softmax_scale = 0.2;
         c.logit_softcap = {Softcap::Function::Rsqrt, 15};
     }},
    {"partial_rope_softcap_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.rope_scaling.fraction = 0.5;
         c.logit_softcap = {Softcap::Function::Tanh, 3};
         c.softmax_scale = 0.3;
     }},
    {"gated_linear_heads_of_16",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm;
         c.positions = Positions::RoPE;
         c.activation = Activation::SwiGLU;
         c.kv_heads = 2;
         c.head_size = 16;
         c.set_attention("GL");
     }},
};

// Tests that run for each variant, whose model has random weights.
class ModelVariantTest : public testing::TestWithParam<ModelVariant> {
  protected:
    static constexpr int64_t B = 2, T = 11;
    static ModelConfig config() {
        ModelConfig c = base_config();
        GetParam().apply(c);
        validate(c, GetParam().name);
        return c;
    }
    Driver driver{config(), training_shape(B, T)};
    const Batch batch = random_batch(config(), B, T, 5);

    void SetUp() override { driver.randomise(3); }
};

inline std::string variant_name(const testing::TestParamInfo<ModelVariant>& test) {
    return test.param.name;
}
