// Phi-3: LLaMA with fused tensors for q, k, v and for gate, up, RoPE of the first channels of a head, and a window in
// all layers.
#include "models/llama_block.h"

using nlohmann::json;

namespace phi3 {

ModelConfig read(const ConfigKeys& keys) {
    LlamaDefaults defaults = {32, 3072, 32, 0, 8192, 32064, 4096, 1e-5, false, 1, 32000};
    defaults.rope.scaling = false;
    defaults.rope.partial = true;
    ModelConfig c = read_llama_block(keys, defaults);
    read_window(c, keys, 0);
    return c;
}

bool expresses(const ModelConfig& c) {
    return has_llama_block(c, true) && c.rope_scaling.kind == RopeScaling::Kind::None && c.qk_norm == QkNorm::Off &&
           !c.qkv_bias && !c.proj_bias && !c.mlp_bias && has_same_window(c) && c.layers_without_rope() == 0;
}

void write(json& out, const ModelConfig& c, const json&) {
    write_llama_block(out, c, false);
    // transformers' default may lie beyond the vocabulary, and then it cannot load the model.
    if (!out.contains("pad_token_id")) out["pad_token_id"] = nullptr;
    write_window(out, c);
}

std::vector<TensorNames> tensors() {
    std::vector<TensorNames> names = llama_tensors();
    for (TensorNames& t : names) {
        if (t.role == QKV_W) t.names = {"model.layers.*.self_attn.qkv_proj"};
        if (t.role == FC_W) t.names = {"model.layers.*.mlp.gate_up_proj"};
    }
    return names;
}

const Family& family() {
    static const Family family = {"phi3", "Phi3ForCausalLM", {}, read, expresses, write, tensors(), {}};
    return family;
}

}  // namespace phi3
