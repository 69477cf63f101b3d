// This project's own format: what no other family can express.
#include <optional>

#include "models/llama_block.h"

using nlohmann::json;

namespace train_gpt {

// The GPT of modded-nanogpt's track 3, in any depth: width = 64·depth, heads of 128.
ModelConfig modern(int64_t layers) {
    ModelConfig c;
    c.layers = layers;
    c.channels = 64 * layers;
    c.heads = layers / 2;
    c.vocab_size = 50257;
    c.max_positions = 1024;
    c.bos = c.eos = 50256;
    c.norm = Norm::RMSNorm;
    c.norm_eps = 0x1p-23;  // torch's default in F.rms_norm: float32's epsilon
    c.positions = Positions::RoPE;
    c.rope_theta = 1024;
    c.rope_scaling.kind = RopeScaling::Kind::Truncated;
    c.rope_scaling.fraction = 0.5;
    c.qk_norm = QkNorm::Plain;
    c.activation = Activation::ReLU2;
    c.tied = false;
    c.head_bias = c.embedding_norm = c.zero_init = true;
    c.softmax_scale = 0.12;
    c.logit_softcap = {Softcap::Function::Rsqrt, 15};
    c.init = Init::FanIn;
    return c;
}

// The quick start's model. Without QK-norm, which costs time and loss at this size (docs/understand/learning.md).
ModelConfig modern_tiny() {
    ModelConfig c = modern(4);
    c.channels = 128;
    c.heads = 4;
    c.vocab_size = 4096;
    c.max_positions = 256;
    c.bos = c.eos = -1;
    c.qk_norm = QkNorm::Off;
    return c;
}

template <typename Enum, size_t N>
Enum read_enum(const ConfigKeys& keys, const char* key, const Names<N>& names) {
    const std::optional<Enum> found = find_enum<Enum>(names, keys.text(key, ""));
    keys.demand(found.has_value(), key, joined(names));
    return *found;
}

constexpr Names<2> NORM_PLACEMENT_NAMES = {"before", "after"};

void read_layers(ModelConfig& c, const ConfigKeys& keys) {
    c.set_attention(keys.text("attention", ""));
    fill_defaults(c, keys.file());
    const bool linear_rope = keys.boolean("linear_rope", true);
    for (LayerConfig& l : c.layer) l.rope = linear_rope || l.attention == AttentionType::Softmax;
    const json rope = keys.list("layer_rope", c.layer.size(), "booleans", [](const json& x) { return x.is_boolean(); });
    for (size_t l = 0; l < rope.size(); l++) c.layer[l].rope = rope[l];
    const json windows = keys.list("layer_windows", c.layer.size(), "whole numbers", [](const json& x) {
        return x.is_number_integer() && x >= 0 && (!x.is_number_unsigned() || x.get<uint64_t>() <= MAX_DIMENSION);
    });
    for (size_t l = 0; l < windows.size(); l++) c.layer[l].window = windows[l];
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c;
    const auto size = [&](const char* key) {
        if (!keys.has(key)) keys.wrong(key, "a whole number");
        return keys.size(key, 0);
    };
    const auto flag = [&](const char* key) {
        if (!keys.has(key)) keys.wrong(key, "true or false");
        return keys.boolean(key, false);
    };
    c.layers = size("num_hidden_layers");
    c.channels = size("hidden_size");
    c.heads = size("num_attention_heads");
    c.kv_heads = size("num_key_value_heads");
    c.head_size = size("head_dim");
    c.ffn = size("intermediate_size");
    c.vocab_size = size("vocab_size");
    c.max_positions = size("max_position_embeddings");
    c.norm = read_enum<Norm>(keys, "norm", NORM_NAMES);
    if (!keys.has("norm_eps")) keys.wrong("norm_eps", "a number");
    c.norm_eps = keys.number("norm_eps", 0);
    c.positions = read_enum<Positions>(keys, "positions", POSITIONS_NAMES);
    if (c.positions == Positions::RoPE) read_rope(c, keys, {10000, true, true, true});
    c.activation = read_enum<Activation>(keys, "mlp", ACTIVATION_NAMES);
    c.qkv_bias = flag("qkv_bias");
    c.proj_bias = flag("proj_bias");
    c.mlp_bias = flag("mlp_bias");
    c.tied = flag("tie_word_embeddings");
    if (!keys.has("attention")) keys.wrong("attention", "one letter per layer");
    read_layers(c, keys);
    if (keys.has("norm_placement")) c.norm_after = read_enum<int>(keys, "norm_placement", NORM_PLACEMENT_NAMES) == 1;
    c.embedding_norm = keys.boolean("embedding_norm", false);
    c.head_bias = keys.boolean("head_bias", false);
    if (keys.has("attention_scale")) {
        c.softmax_scale = keys.number("attention_scale", 0);
        if (!(c.softmax_scale > 0)) keys.wrong("attention_scale", "positive");
    }
    if (keys.has("logit_softcap")) {
        c.logit_softcap.cap = static_cast<float>(keys.number("logit_softcap", 0));
        c.logit_softcap.function = read_enum<Softcap::Function>(keys, "softcap_function", SOFTCAP_NAMES);
        keys.demand(bool(c.logit_softcap), "softcap_function", "tanh, rsqrt");
    }
    if (keys.has("qk_norm")) c.qk_norm = read_enum<QkNorm>(keys, "qk_norm", QK_NORM_NAMES);
    c.bos = keys.token_id("bos_token_id", -1, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", -1, c.vocab_size);
    return c;
}

// True if RoPE rotates q and k in every layer, except those of linear attention if `linear` is false.
bool rope_in(const ModelConfig& c, bool linear) {
    for (const LayerConfig& l : c.layer) {
        if (l.rope != (linear || l.attention == AttentionType::Softmax)) return false;
    }
    return true;
}

void write_layers(json& out, const ModelConfig& c) {
    out["attention"] = c.attention();
    if (c.has_windows()) {
        for (const LayerConfig& l : c.layer) out["layer_windows"].push_back(l.window);
    }
    if (c.positions != Positions::RoPE) return;
    const bool all = rope_in(c, true);
    if (all || rope_in(c, false)) {
        if (c.has_linear_attention()) out["linear_rope"] = all;
    } else {
        for (const LayerConfig& l : c.layer) out["layer_rope"].push_back(l.rope);
    }
}

void write(json& out, const ModelConfig& c, const json&) {
    write_sizes(out, c);
    if (c.positions == Positions::RoPE) write_rope(out, c);
    out["norm"] = NORM_NAMES[size_t(c.norm)];
    out["norm_eps"] = c.norm_eps;
    out["positions"] = POSITIONS_NAMES[size_t(c.positions)];
    out["mlp"] = ACTIVATION_NAMES[size_t(c.activation)];
    out["qkv_bias"] = c.qkv_bias;
    out["proj_bias"] = c.proj_bias;
    out["mlp_bias"] = c.mlp_bias;
    write_layers(out, c);
    if (c.norm_after) out["norm_placement"] = NORM_PLACEMENT_NAMES[1];
    if (c.embedding_norm) out["embedding_norm"] = true;
    if (c.head_bias) out["head_bias"] = true;
    if (c.softmax_scale > 0) out["attention_scale"] = c.softmax_scale;
    if (c.logit_softcap) {
        out["logit_softcap"] = c.logit_softcap.cap;
        out["softcap_function"] = SOFTCAP_NAMES[size_t(c.logit_softcap.function)];
    }
    if (c.qk_norm != QkNorm::Off) out["qk_norm"] = QK_NORM_NAMES[size_t(c.qk_norm)];
}

const Family& family() {
    static const Family family = {
        "train_gpt",
        nullptr,
        {"norm", "norm_eps", "positions", "mlp", "qkv_bias", "proj_bias", "attention", "linear_rope", "layer_rope",
         "layer_windows", "qk_norm", "norm_placement", "embedding_norm", "head_bias", "attention_scale",
         "logit_softcap", "softcap_function"},
        read,
        [](const ModelConfig&) { return true; },
        write,
        {},
        {{"modern-tiny", modern_tiny()},
         {"modern-124M", modern(12)},
         {"modern-345M", modern(18)},
         {"modern-757M", modern(24)},
         {"modern-1424M", modern(30)}}};
    return family;
}

}  // namespace train_gpt
