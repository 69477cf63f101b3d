// LLaMA 2 and 3.
#include "models/family.h"

using nlohmann::json;

namespace {

ModelConfig llama(int64_t layers, int64_t channels, int64_t heads, int64_t kv_heads, int64_t ffn) {
    ModelConfig c;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.ffn = ffn;
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.mlp = Mlp::SwiGLU;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    return c;
}

// LLaMA 3.1 and 3.2: the RoPE of 8192 positions stretched to 131072.
ModelConfig llama3(ModelConfig c, bool tied, double rope_factor) {
    c.vocab_size = 128256;
    c.max_positions = 131072;
    c.rope_theta = 500000;
    c.rope_scaling = {RopeScaling::Kind::Llama3, rope_factor, 1, 4, 8192};
    c.tied = tied;
    c.bos = 128000;
    c.eos = 128001;
    return c;
}

ModelConfig llama2(ModelConfig c, int64_t vocab_size, int64_t max_positions, bool tied) {
    c.vocab_size = vocab_size;
    c.max_positions = max_positions;
    c.tied = tied;
    if (vocab_size == 32000) {
        c.bos = 1;
        c.eos = 2;
    }
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c;
    c.layers = keys.size("num_hidden_layers", 32);
    c.channels = keys.size("hidden_size", 4096);
    c.heads = keys.size("num_attention_heads", 32);
    c.kv_heads = keys.size("num_key_value_heads", c.heads);
    if (keys.has("head_dim")) c.head_size = keys.size("head_dim", 0);
    c.ffn = keys.size("intermediate_size", 11008);
    c.max_positions = keys.size("max_position_embeddings", 2048);
    c.norm = Norm::RMSNorm;
    c.norm_eps = keys.number("rms_norm_eps", 1e-6);
    c.positions = Positions::RoPE;
    read_rope(c, keys);
    c.mlp = Mlp::SwiGLU;
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    c.mlp_bias = keys.boolean("mlp_bias", false);
    c.tied = keys.boolean("tie_word_embeddings", false);
    c.vocab_size = keys.size("vocab_size", 32000);
    c.bos = keys.token_id("bos_token_id", 1, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", 2, c.vocab_size);
    const std::string act = keys.text("hidden_act", "silu");
    keys.demand(act == "silu" || act == "swish", "hidden_act", "silu");
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Off && c.qkv_bias == c.proj_bias && !c.has_windows() &&
           c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_sizes(out, c);
    write_rope(out, c);
    out["rms_norm_eps"] = c.norm_eps;
    out["attention_bias"] = c.qkv_bias;
    out["mlp_bias"] = c.mlp_bias;
    out["hidden_act"] = "silu";
}

}  // namespace

const Family& llama_family() {
    static const Family family = {
        "llama",
        "LlamaForCausalLM",
        {"rms_norm_eps", "attention_bias", "hidden_act"},
        read,
        expresses,
        write,
        {{WTE, {"model.embed_tokens"}},
         {NORM1_W, {"model.layers.*.input_layernorm"}},
         {QKV_W,
          {"model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"}},
         {PROJ_W, {"model.layers.*.self_attn.o_proj"}},
         {NORM2_W, {"model.layers.*.post_attention_layernorm"}},
         {FC_W, {"model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"}},
         {FCPROJ_W, {"model.layers.*.mlp.down_proj"}},
         {NORMF_W, {"model.norm"}},
         {HEAD_W, {"lm_head"}}},
        {{"llama-tiny", llama2(llama(4, 128, 4, 2, 384), 4096, 1024, true)},
         {"llama-1B", llama3(llama(16, 2048, 32, 8, 8192), true, 32)},
         {"llama-3B", llama3(llama(28, 3072, 24, 8, 8192), true, 32)},
         {"llama-8B", llama3(llama(32, 4096, 32, 8, 14336), false, 8)},
         {"llama2-7B", llama2(llama(32, 4096, 32, 32, 11008), 32000, 4096, false)}}};
    return family;
}
