#include "models/llama_block.h"

#include <algorithm>

using nlohmann::json;

namespace {

constexpr const char* FULL = "full_attention";
constexpr const char* SLIDING = "sliding_attention";

}  // namespace

ModelConfig read_llama_block(const ConfigKeys& keys, const LlamaDefaults& d) {
    ModelConfig c;
    c.layers = keys.size("num_hidden_layers", d.layers);
    c.channels = keys.size("hidden_size", d.channels);
    c.heads = keys.size("num_attention_heads", d.heads);
    c.kv_heads =
        keys.size("num_key_value_heads", d.kv_heads && !keys.null("num_key_value_heads") ? d.kv_heads : c.heads);
    c.head_size = d.head_size;
    if (keys.has("head_dim")) c.head_size = keys.size("head_dim", 0);
    c.ffn = keys.size("intermediate_size", d.ffn);
    c.max_positions = keys.size("max_position_embeddings", d.max_positions);
    c.norm = Norm::RMSNorm;
    c.norm_eps = keys.number("rms_norm_eps", d.norm_eps);
    c.positions = Positions::RoPE;
    read_rope(c, keys, d.rope);
    c.activation = Activation::SwiGLU;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    c.tied = keys.boolean("tie_word_embeddings", d.tied);
    c.vocab_size = keys.size("vocab_size", d.vocab_size);
    c.bos = keys.token_id("bos_token_id", d.bos, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", d.eos, c.vocab_size);
    const std::string act = keys.text("hidden_act", "silu");
    keys.demand(act == "silu" || act == "swish", "hidden_act", "silu");
    fill_defaults(c, keys.file());
    return c;
}

void write_sizes(json& out, const ModelConfig& c) {
    out["num_hidden_layers"] = c.layers;
    out["hidden_size"] = c.channels;
    out["num_attention_heads"] = c.heads;
    out["num_key_value_heads"] = c.kv_heads;
    out["head_dim"] = c.head_size;
    out["intermediate_size"] = c.ffn;
    out["max_position_embeddings"] = c.max_positions;
}

void write_llama_block(json& out, const ModelConfig& c, bool head_dim) {
    write_sizes(out, c);
    if (!head_dim && c.heads * c.head_size == c.channels) out.erase("head_dim");
    write_rope(out, c);
    out["rms_norm_eps"] = c.norm_eps;
    out["hidden_act"] = "silu";
}

bool has_llama_block(const ModelConfig& c, bool partial) {
    const RopeScaling& s = c.rope_scaling;
    const bool rope = c.positions == Positions::RoPE && (partial || s.fraction == 1) &&
                      s.kind != RopeScaling::Kind::Truncated &&
                      (s.kind != RopeScaling::Kind::Dynamic || s.original_max_position == c.max_positions);
    return has_common_options(c) && c.norm == Norm::RMSNorm && c.activation == Activation::SwiGLU && rope;
}

std::vector<TensorNames> llama_tensors() {
    return {{WTE, {"model.embed_tokens"}},
            {NORM1_W, {"model.layers.*.input_layernorm"}},
            {QKV_W,
             {"model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"}},
            {PROJ_W, {"model.layers.*.self_attn.o_proj"}},
            {NORM2_W, {"model.layers.*.post_attention_layernorm"}},
            {FC_W, {"model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"}},
            {FCPROJ_W, {"model.layers.*.mlp.down_proj"}},
            {NORMF_W, {"model.norm"}},
            {HEAD_W, {"lm_head"}}};
}

ModelConfig llama_block(int64_t layers, int64_t channels, int64_t heads, int64_t kv_heads, int64_t ffn) {
    ModelConfig c;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.ffn = ffn;
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.activation = Activation::SwiGLU;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    return c;
}

void read_layer_windows(ModelConfig& c, const ConfigKeys& keys, int64_t default_window,
                        const std::function<bool(int64_t)>& by_default) {
    // transformers ignores sliding_window unless use_sliding_window is true.
    const bool enabled = keys.boolean("use_sliding_window", false) && !keys.null("sliding_window");
    int64_t window = 0;
    if (enabled && (default_window > 0 || keys.has("sliding_window")))
        window = keys.size("sliding_window", default_window);
    const json types = keys.list("layer_types", c.layer.size(), str("\"", FULL, "\" or \"", SLIDING, "\"").c_str(),
                                 [](const json& x) { return x == FULL || x == SLIDING; });
    for (size_t l = 0; l < c.layer.size(); l++) {
        const bool sliding = types.empty() ? window > 0 && by_default(int64_t(l)) : types[l] == SLIDING;
        keys.demand(!sliding || window > 0, "layer_types",
                    str(FULL, " in all layers, unless use_sliding_window is true and sliding_window is given"));
        if (sliding) c.layer[l].window = window;
    }
}

void write_layer_windows(json& out, const ModelConfig& c) {
    out["use_sliding_window"] = c.has_windows();
    out["sliding_window"] = nullptr;
    if (!c.has_windows()) return;
    out["sliding_window"] = c.smallest_window();
    for (const LayerConfig& l : c.layer) out["layer_types"].push_back(l.window ? SLIDING : FULL);
}

bool has_one_window_size(const ModelConfig& c) {
    const int64_t window = c.smallest_window();
    return std::all_of(c.layer.begin(), c.layer.end(),
                       [&](const LayerConfig& l) { return !l.window || l.window == window; });
}

void read_window(ModelConfig& c, const ConfigKeys& keys, int64_t default_window) {
    if (keys.null("sliding_window") || (default_window == 0 && !keys.has("sliding_window"))) return;
    for (LayerConfig& l : c.layer) l.window = keys.size("sliding_window", default_window);
}

void write_window(json& out, const ModelConfig& c) {
    out["sliding_window"] = c.has_windows() ? json(c.smallest_window()) : json(nullptr);
}

bool has_same_window(const ModelConfig& c) {
    return std::all_of(c.layer.begin(), c.layer.end(),
                       [&](const LayerConfig& l) { return l.window == c.layer[0].window; });
}
