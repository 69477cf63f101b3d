// Qwen3: LLaMA with QK-norm and heads whose size is free, and windows in some layers.
#include "models/llama_block.h"

using nlohmann::json;

namespace qwen3 {

ModelConfig qwen3(ModelConfig c, bool tied) {
    c.head_size = 128;
    c.qk_norm = QkNorm::Weights;
    c.vocab_size = 151936;  // more rows than the tokenizer has tokens
    c.max_positions = 40960;
    c.norm_eps = 1e-6;
    c.rope_theta = 1000000;
    c.tied = tied;
    c.bos = 151643;
    c.eos = 151645;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c = read_llama_block(keys, {32, 4096, 32, 32, 22016, 151936, 32768, 1e-6, false, -1, -1, {}, 128});
    c.qk_norm = QkNorm::Weights;
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    const int64_t full = keys.integer("max_window_layers", 28);
    read_layer_windows(c, keys, 4096, [&](int64_t layer) { return layer >= full; });
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Weights && c.qkv_bias == c.proj_bias && !c.mlp_bias &&
           has_one_window_size(c) && c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, true);
    out["attention_bias"] = c.qkv_bias;
    write_layer_windows(out, c);
}

std::vector<TensorNames> tensors() {
    std::vector<TensorNames> names = llama_tensors();
    names.push_back({QNORM_W, {"model.layers.*.self_attn.q_norm"}});
    names.push_back({KNORM_W, {"model.layers.*.self_attn.k_norm"}});
    return names;
}

const Family& family() {
    static const Family family = {"qwen3",
                                  "Qwen3ForCausalLM",
                                  {},
                                  read,
                                  expresses,
                                  write,
                                  tensors(),
                                  {{"qwen3-0.6B", qwen3(llama_block(28, 1024, 16, 8, 3072), true)},
                                   {"qwen3-1.7B", qwen3(llama_block(28, 2048, 16, 8, 6144), true)},
                                   {"qwen3-4B", qwen3(llama_block(36, 2560, 32, 8, 9728), true)},
                                   {"qwen3-8B", qwen3(llama_block(36, 4096, 32, 8, 12288), false)}}};
    return family;
}

}  // namespace qwen3
