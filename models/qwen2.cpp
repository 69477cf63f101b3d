// Qwen2 and Qwen2.5: LLaMA with biases of q, k and v, and windows in some layers.
#include "models/llama_block.h"

using nlohmann::json;

namespace qwen2 {

// Qwen2.5's base models. Their vocabularies have more rows than the tokenizer has tokens.
ModelConfig qwen2(ModelConfig c, int64_t vocab_size, int64_t max_positions, bool tied) {
    c.qkv_bias = true;
    c.vocab_size = vocab_size;
    c.max_positions = max_positions;
    c.norm_eps = 1e-6;
    c.rope_theta = 1000000;
    c.tied = tied;
    c.bos = c.eos = 151643;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c = read_llama_block(keys, {32, 4096, 32, 32, 22016, 151936, 32768, 1e-6, false, -1, -1});
    c.qkv_bias = true;
    const int64_t full = keys.integer("max_window_layers", 28);
    read_layer_windows(c, keys, 4096, [&](int64_t layer) { return layer >= full; });
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Off && c.qkv_bias && !c.proj_bias && !c.mlp_bias &&
           has_one_window_size(c) && c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, false);
    write_layer_windows(out, c);
}

const Family& family() {
    static const Family family = {"qwen2",
                                  "Qwen2ForCausalLM",
                                  {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
                                  read,
                                  expresses,
                                  write,
                                  llama_tensors(),
                                  {{"qwen2.5-0.5B", qwen2(llama_block(24, 896, 14, 2, 4864), 151936, 32768, true)},
                                   {"qwen2.5-1.5B", qwen2(llama_block(28, 1536, 12, 2, 8960), 151936, 131072, true)},
                                   {"qwen2.5-3B", qwen2(llama_block(36, 2048, 16, 2, 11008), 151936, 32768, true)},
                                   {"qwen2.5-7B", qwen2(llama_block(28, 3584, 28, 4, 18944), 152064, 131072, false)}}};
    return family;
}

}  // namespace qwen2
