// Mistral: LLaMA with a window in all layers.
#include "models/llama_block.h"

using nlohmann::json;

namespace mistral {

// Mistral 7B v0.1.
ModelConfig mistral(ModelConfig c, int64_t window) {
    c.layer = {{AttentionType::Softmax, window}};
    c.vocab_size = 32000;
    c.max_positions = 32768;
    c.tied = false;
    c.bos = 1;
    c.eos = 2;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c = read_llama_block(keys, {32, 4096, 32, 8, 14336, 32000, 131072, 1e-6, false, 1, 2});
    read_window(c, keys, 4096);
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Off && !c.qkv_bias && !c.proj_bias && !c.mlp_bias &&
           has_same_window(c) && c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, true);
    write_window(out, c);
}

const Family& family() {
    static const Family family = {"mistral",
                                  "MistralForCausalLM",
                                  {},
                                  read,
                                  expresses,
                                  write,
                                  llama_tensors(),
                                  {{"mistral-7B", mistral(llama_block(32, 4096, 32, 8, 14336), 4096)}}};
    return family;
}

}  // namespace mistral
