// OLMo2: LLaMA with its norms after attention and the MLP, and QK-norm of all heads together.
#include "models/llama_block.h"

using nlohmann::json;

namespace olmo2 {

ModelConfig olmo2(ModelConfig c) {
    c.norm_after = true;
    c.qk_norm = QkNorm::AllHeads;
    c.vocab_size = 100352;  // more rows than the tokenizer has tokens
    c.max_positions = 4096;
    c.norm_eps = 1e-6;
    c.rope_theta = 500000;
    c.tied = false;
    c.eos = 100257;
    return c;
}

ModelConfig read(const ConfigKeys& keys) {
    ModelConfig c = read_llama_block(keys, {32, 4096, 32, 0, 11008, 50304, 2048, 1e-5, false, -1, 50279});
    c.norm_after = true;
    c.qk_norm = QkNorm::AllHeads;
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    refuse_windows(keys);
    return c;
}

bool expresses(const ModelConfig& c) {
    ModelConfig norm_before = c;
    norm_before.norm_after = false;
    return c.norm_after && has_llama_block(norm_before) && c.qk_norm == QkNorm::AllHeads && c.qkv_bias == c.proj_bias &&
           !c.mlp_bias && !c.has_windows() && c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, false);
    // transformers' default may lie beyond the vocabulary, and then it cannot load the model.
    if (!out.contains("pad_token_id")) out["pad_token_id"] = nullptr;
    out["attention_bias"] = c.qkv_bias;
}

std::vector<TensorNames> tensors() {
    std::vector<TensorNames> names = llama_tensors();
    for (TensorNames& t : names) {
        if (t.role == NORM1_W) t.names = {"model.layers.*.post_attention_layernorm"};
        if (t.role == NORM2_W) t.names = {"model.layers.*.post_feedforward_layernorm"};
    }
    names.push_back({QNORM_W, {"model.layers.*.self_attn.q_norm"}});
    names.push_back({KNORM_W, {"model.layers.*.self_attn.k_norm"}});
    return names;
}

const Family& family() {
    static const Family family = {"olmo2",
                                  "Olmo2ForCausalLM",
                                  {},
                                  read,
                                  expresses,
                                  write,
                                  tensors(),
                                  {{"olmo2-1B", olmo2(llama_block(16, 2048, 16, 16, 8192))},
                                   {"olmo2-7B", olmo2(llama_block(32, 4096, 32, 32, 11008))},
                                   {"olmo2-13B", olmo2(llama_block(40, 5120, 40, 40, 13824))},
                                   {"olmo2-32B", olmo2(llama_block(64, 5120, 40, 8, 27648))}}};
    return family;
}

}  // namespace olmo2
