#include "models/gguf_architecture.h"

#include <algorithm>

namespace {

using Tensors = std::vector<TensorNames>;

const Tensors LLAMA_BLOCK = {{WTE, {"token_embd"}},
                             {NORM1_W, {"blk.*.attn_norm"}},
                             {QKV_W, {"blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v"}},
                             {PROJ_W, {"blk.*.attn_output"}},
                             {NORM2_W, {"blk.*.ffn_norm"}},
                             {FC_W, {"blk.*.ffn_gate", "blk.*.ffn_up"}},
                             {FCPROJ_W, {"blk.*.ffn_down"}},
                             {NORMF_W, {"output_norm"}},
                             {HEAD_W, {"output"}}};

// The names of the LLaMA block, but for these.
Tensors with(const Tensors& others) {
    Tensors names = LLAMA_BLOCK;
    for (const TensorNames& other : others) {
        const auto same =
            std::find_if(names.begin(), names.end(), [&](const TensorNames& t) { return t.role == other.role; });
        if (same == names.end())
            names.push_back(other);
        else
            *same = other;
    }
    return names;
}

const Tensors QK_NORMS = {{QNORM_W, {"blk.*.attn_q_norm"}}, {KNORM_W, {"blk.*.attn_k_norm"}}};
const Tensors FUSED = {{QKV_W, {"blk.*.attn_qkv"}}, {FC_W, {"blk.*.ffn_up"}}};

const std::vector<GgufArchitecture>& architectures() {
    static const std::vector<Role> ATTENTION = {QKV_W, PROJ_W}, MLP = {FC_W, FCPROJ_W};
    static const std::vector<GgufArchitecture> all = {
        {"llama", "llama", true, LLAMA_BLOCK, ATTENTION, MLP, {}},
        {"qwen2", "qwen2", false, LLAMA_BLOCK, {}, {}, {QKV_W}},
        {"qwen3", "qwen3", false, with(QK_NORMS), ATTENTION, {}, {}},
        {"smollm3", "smollm3", true, LLAMA_BLOCK, ATTENTION, MLP, {}},
        {"olmo2",
         "olmo2",
         false,
         with({{NORM1_W, {"blk.*.post_attention_norm"}}, {NORM2_W, {"blk.*.post_ffw_norm"}}, QK_NORMS[0], QK_NORMS[1]}),
         ATTENTION,
         {},
         {}},
        {"phi3", "phi3", false, with(FUSED), {}, {}, {}},
        {"gpt2",
         "gpt2",
         false,
         with({FUSED[0], FUSED[1], {WPE, {"position_embd"}}}),
         {},
         {},
         {NORM1_W, QKV_W, PROJ_W, NORM2_W, FC_W, FCPROJ_W, NORMF_W}}};
    return all;
}

}  // namespace

const GgufArchitecture* find_gguf_architecture(const std::string& name) {
    for (const GgufArchitecture& a : architectures())
        if (name == a.name) return &a;
    return nullptr;
}

std::string gguf_architecture_names() {
    std::string names;
    for (const GgufArchitecture& a : architectures()) names += (names.empty() ? "" : ", ") + std::string(a.name);
    return names;
}

std::vector<std::string> gguf_names(const GgufArchitecture& architecture, const Param& p) {
    const auto find = [&](bool bias) {
        return std::find_if(architecture.tensors.begin(), architecture.tensors.end(),
                            [&](const TensorNames& t) { return p.role == (bias ? bias_of(t.role) : t.role); });
    };
    const auto weight = find(false), found = weight == architecture.tensors.end() ? find(true) : weight;
    require(found != architecture.tensors.end(), "files of llama.cpp's ", architecture.name, " have no tensor for ",
            p.name);
    std::vector<std::string> names;
    for (std::string name : found->names) {
        if (const size_t at = name.find('*'); at != std::string::npos) name.replace(at, 1, str(p.layer));
        names.push_back(name + (found == weight ? ".weight" : ".bias"));
    }
    require(names.size() == p.sources.size(), p.name, ": ", names.size(), " tensors in a GGUF file for ",
            p.sources.size(), " in a model directory");
    return names;
}

bool gguf_interleaves(const GgufArchitecture& architecture, const Param& p, size_t i) {
    return architecture.interleaved && (p.role == QKV_W || p.role == QKV_B) && i < 2;
}
