// GPT-2.
#include "models/family.h"

using nlohmann::json;

namespace gpt2 {

ModelConfig gpt2(int64_t layers, int64_t channels, int64_t heads, int64_t vocab_size, int64_t max_positions = 1024) {
    ModelConfig c;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    c.vocab_size = vocab_size;
    c.max_positions = max_positions;
    if (vocab_size == 50257) c.bos = c.eos = 50256;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c;
    c.layers = keys.size("n_layer", 12, "num_hidden_layers");
    c.channels = keys.size("n_embd", 768, "hidden_size");
    c.heads = keys.size("n_head", 12, "num_attention_heads");
    c.max_positions = keys.size("n_positions", 1024, "max_position_embeddings");
    if (keys.has("n_inner")) c.ffn = keys.size("n_inner", 0);
    c.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
    c.tied = keys.boolean("tie_word_embeddings", true);
    c.vocab_size = keys.size("vocab_size", 50257);
    c.bos = keys.token_id("bos_token_id", 50256, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", 50256, c.vocab_size);
    const std::string act = keys.text("activation_function", "gelu_new");
    keys.demand(act == "gelu_new" || act == "gelu_pytorch_tanh", "activation_function", "gelu_new, gelu_pytorch_tanh");
    keys.demand(keys.boolean("scale_attn_weights", true), "scale_attn_weights", "true");
    keys.demand(!keys.boolean("scale_attn_by_inverse_layer_idx", false), "scale_attn_by_inverse_layer_idx", "false");
    refuse_windows(keys);
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_common_options(c) && !c.has_windows() && c.qk_norm == QkNorm::Off && c.norm == Norm::LayerNorm &&
           c.positions == Positions::Learned && c.activation == Activation::GELU && c.qkv_bias && c.proj_bias &&
           c.mlp_bias && c.kv_heads == c.heads && c.heads * c.head_size == c.channels;
}

void write(json& out, const ModelConfig& c, const json& original) {
    out["n_layer"] = c.layers;
    out["n_embd"] = c.channels;
    out["n_head"] = c.heads;
    out["n_positions"] = c.max_positions;
    out["n_inner"] = c.ffn;
    out["layer_norm_epsilon"] = c.norm_eps;
    // One formula with two names, computed in another order: the name stays, so that transformers gives the same bits.
    const bool other_name =
        original.is_object() && original.value("activation_function", json()) == "gelu_pytorch_tanh";
    out["activation_function"] = other_name ? "gelu_pytorch_tanh" : "gelu_new";
    // Training here has no dropout; transformers' default is 0.1.
    for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
        if (!out.contains(key)) out[key] = 0.0;
    }
}

const Family& family() {
    // Conv1D stores matrices transposed.
    static const Family family = {
        "gpt2",
        "GPT2LMHeadModel",
        {"n_layer", "n_embd", "n_head", "n_positions", "n_ctx", "n_inner", "layer_norm_epsilon", "activation_function",
         "scale_attn_weights", "scale_attn_by_inverse_layer_idx"},
        read,
        expresses,
        write,
        {{WTE, {"transformer.wte"}},
         {WPE, {"transformer.wpe"}},
         {NORM1_W, {"transformer.h.*.ln_1"}},
         {QKV_W, {"transformer.h.*.attn.c_attn"}, true},
         {PROJ_W, {"transformer.h.*.attn.c_proj"}, true},
         {NORM2_W, {"transformer.h.*.ln_2"}},
         {FC_W, {"transformer.h.*.mlp.c_fc"}, true},
         {FCPROJ_W, {"transformer.h.*.mlp.c_proj"}, true},
         {NORMF_W, {"transformer.ln_f"}},
         {HEAD_W, {"lm_head"}}},
        {{"gpt2-tiny", gpt2(4, 128, 4, 4096, 256)},
         {"gpt2-mini", gpt2(6, 384, 6, 4096)},
         {"gpt2-124M", gpt2(12, 768, 12, 50257)},
         {"gpt2-350M", gpt2(24, 1024, 16, 50257)},
         {"gpt2-774M", gpt2(36, 1280, 20, 50257)},
         {"gpt2-1558M", gpt2(48, 1600, 25, 50257)}}};
    return family;
}

}  // namespace gpt2
