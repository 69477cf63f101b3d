// SmolLM3: LLaMA in which some layers, by default each fourth, have no RoPE.
#include "models/llama_block.h"

using nlohmann::json;

namespace smollm3 {

void set_rope(ModelConfig& c, int64_t interval) {
    for (int64_t l = 0; l < c.layers; l++) c.layer[size_t(l)].rope = (l + 1) % interval != 0;
}

ModelConfig smollm3(ModelConfig c) {
    fill_defaults(c, "smollm3");
    set_rope(c, 4);
    c.vocab_size = 128256;
    c.max_positions = 65536;
    c.norm_eps = 1e-6;
    c.rope_theta = 5000000;
    c.bos = 128000;
    c.eos = 128001;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    LlamaDefaults defaults = {36, 2048, 16, 4, 11008, 128256, 32768, 1e-6, true, 128000, 128001};
    defaults.rope.theta = 2000000;
    ModelConfig c = read_llama_block(keys, defaults);
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    c.mlp_bias = keys.boolean("mlp_bias", false);
    // Despite its name, 1 stands for a layer with RoPE.
    const json rope = keys.list("no_rope_layers", c.layer.size(), "numbers 1 (RoPE) or 0 (none)",
                                [](const json& x) { return x == 0 || x == 1; });
    if (rope.empty()) set_rope(c, keys.size("no_rope_layer_interval", 4));
    for (size_t l = 0; l < rope.size(); l++) c.layer[l].rope = rope[l] == 1;
    read_layer_windows(c, keys, 0, [&](int64_t layer) { return !c.layer[size_t(layer)].rope; });
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Off && c.qkv_bias == c.proj_bias && has_one_window_size(c);
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, false);
    // transformers' default may lie beyond the vocabulary, and then it cannot load the model.
    if (!out.contains("pad_token_id")) out["pad_token_id"] = nullptr;
    out["attention_bias"] = c.qkv_bias;
    out["mlp_bias"] = c.mlp_bias;
    for (const LayerConfig& l : c.layer) out["no_rope_layers"].push_back(l.rope ? 1 : 0);
    write_layer_windows(out, c);
}

const Family& family() {
    static const Family family = {"smollm3",
                                  "SmolLM3ForCausalLM",
                                  {"no_rope_layers", "no_rope_layer_interval"},
                                  read,
                                  expresses,
                                  write,
                                  llama_tensors(),
                                  {{"smollm3-3B", smollm3(llama_block(36, 2048, 16, 4, 11008))}}};
    return family;
}

}  // namespace smollm3
