// llama.cpp's architectures that this project's families are, and the names of their tensors.
#pragma once

#include <string>
#include <vector>

#include "models/family.h"

struct GgufArchitecture {
    const char* name;                  // general.architecture
    const char* family;                // model_type of config.json
    bool interleaved;                  // RoPE rotates neighbouring channels of q and k
    std::vector<TensorNames> tensors;  // "blk.*.attn_q" for each matrix, or one name for a fused one
    // Roles of the weights that may have a bias: of a config.json's key; of all models.
    std::vector<Role> attention_bias, mlp_bias, always_bias;
};

const GgufArchitecture* find_gguf_architecture(const std::string& name);
std::string gguf_architecture_names();  // "llama, qwen2, ..."

// The names of the tensors that a parameter is made of, in the order of its sources.
std::vector<std::string> gguf_names(const GgufArchitecture& architecture, const Param& p);
// Whether the rows of the parameter's source i have interleaved heads.
bool gguf_interleaves(const GgufArchitecture& architecture, const Param& p, size_t i);
