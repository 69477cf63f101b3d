// LLaMA 2 and 3.
#include "models/llama_block.h"

using nlohmann::json;

namespace llama {

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
    ModelConfig c = read_llama_block(keys, {32, 4096, 32, 0, 11008, 32000, 2048, 1e-6, false, 1, 2});
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    c.mlp_bias = keys.boolean("mlp_bias", false);
    refuse_windows(keys);
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c) && c.qk_norm == QkNorm::Off && c.qkv_bias == c.proj_bias && !c.has_windows() &&
           c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, true);
    out["attention_bias"] = c.qkv_bias;
    out["mlp_bias"] = c.mlp_bias;
}

const Family& family() {
    static const Family family = {"llama",
                                  "LlamaForCausalLM",
                                  {"rms_norm_eps", "hidden_act", "attention_bias"},
                                  read,
                                  expresses,
                                  write,
                                  llama_tensors(),
                                  {{"llama-tiny", llama2(llama_block(4, 128, 4, 2, 384), 4096, 1024, true)},
                                   {"llama-1B", llama3(llama_block(16, 2048, 32, 8, 8192), true, 32)},
                                   {"llama-3B", llama3(llama_block(28, 3072, 24, 8, 8192), true, 32)},
                                   {"llama-8B", llama3(llama_block(32, 4096, 32, 8, 14336), false, 8)},
                                   {"llama-70B", llama3(llama_block(80, 8192, 64, 8, 28672), false, 8)},
                                   {"llama2-7B", llama2(llama_block(32, 4096, 32, 32, 11008), 32000, 4096, false)}}};
    return family;
}

}  // namespace llama
