// The block of LLaMA and its descendants, which several families share: RMSNorm, SwiGLU, RoPE. The families differ in
// biases, QK-norm, the names of some tensors, and in what differs from layer to layer.
#pragma once

#include <functional>
#include <vector>

#include "models/family.h"

struct LlamaDefaults {
    int64_t layers, channels, heads, kv_heads;  // kv_heads 0: as many as heads
    int64_t ffn, vocab_size, max_positions;
    double norm_eps;
    bool tied;
    int32_t bos, eos;
    RopeForms rope = {};
    int64_t head_size = 0;  // 0: channels / heads
};
// Reads sizes, heads, norms, RoPE and special ids. All biases are off.
ModelConfig read_llama_block(const ConfigKeys& keys, const LlamaDefaults& defaults);
// Writes them. head_dim: whether that key is written even if its value is channels / heads.
void write_llama_block(nlohmann::json& out, const ModelConfig& config, bool head_dim);
// True for such a block, with any biases, QK-norm, windows and layers without RoPE. partial: also if RoPE rotates only
// the first channels of a head.
bool has_llama_block(const ModelConfig& config, bool partial = false);
std::vector<TensorNames> llama_tensors();

// The sizes, under the names that these families and configs of type train_gpt give them.
void write_sizes(nlohmann::json& out, const ModelConfig& config);

// A block of these sizes: with biases off and heads of channels / heads.
ModelConfig llama_block(int64_t layers, int64_t channels, int64_t heads, int64_t kv_heads, int64_t ffn);

// Windows that some layers have: use_sliding_window, sliding_window, and layer_types with an entry for each layer.
// by_default: the layers that have a window where layer_types is missing.
void read_layer_windows(ModelConfig& config, const ConfigKeys& keys, int64_t default_window,
                        const std::function<bool(int64_t layer)>& by_default);
void write_layer_windows(nlohmann::json& out, const ModelConfig& config);
bool has_one_window_size(const ModelConfig& config);  // also if no layer has a window

// A window that all layers have: sliding_window.
void read_window(ModelConfig& config, const ConfigKeys& keys, int64_t default_window);
void write_window(nlohmann::json& out, const ModelConfig& config);
bool has_same_window(const ModelConfig& config);  // in all layers, or in none
