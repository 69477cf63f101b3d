// The options of the transformer, the presets (families of options) and Hugging Face's config.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/error.h"
#include "runtime/model/rope_scaling.h"
#include "runtime/model/softcap.h"

enum class Norm : uint8_t { LayerNorm, RMSNorm };
enum class Positions : uint8_t { Learned, RoPE };
enum class Mlp : uint8_t { GELU, SwiGLU, ReLU2 };
enum class QkNorm : uint8_t { Off, Plain, Weights };  // RMSNorm of each head of q and k, without or with weights
// The initial weights. GPT2: normal(0, init_std), projections to the residual stream scaled by the depth. FanIn:
// embeddings normal(0, 1), matrices normal(0, √(0.33/columns)), a tied embedding as a matrix (modded-nanogpt).
enum class Init : uint8_t { GPT2, FanIn };
// The value is the letter in config.json and run.toml.
enum class AttentionType : char { Softmax = 'S', Linear = 'L', GatedLinear = 'G' };

struct ModelConfig {
    int64_t layers = 0, channels = 0, heads = 0, kv_heads = 0, head_size = 0;
    int64_t ffn = 0;            // inner width of the MLP (of gate and of up each for SwiGLU)
    int64_t vocab_size = 0;     // as in files; rows in memory are padded_vocab()
    int64_t max_positions = 0;  // rows of the position table (Learned); the length trained for (RoPE)
    Norm norm = Norm::LayerNorm;
    double norm_eps = 1e-5;
    Positions positions = Positions::Learned;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    QkNorm qk_norm = QkNorm::Off;
    Mlp mlp = Mlp::GELU;
    bool qkv_bias = true, proj_bias = true, mlp_bias = true;
    bool embedding_norm = false;  // a norm after the embedding
    bool tied = true;             // the head is the token embedding
    bool head_bias = false;
    double softmax_scale = 0;  // of softmax attention; 0: 1/√head_size
    Softcap logit_softcap;
    Init init = Init::GPT2;
    double init_std = 0.02;      // standard deviation of the initial weights (Init::GPT2)
    bool zero_init = false;      // the projections to the residual stream and an untied head start at 0
    std::string attention;       // one letter per layer: S softmax, L linear, G gated linear (docs/linear_attention.md)
    bool linear_rope = true;     // RoPE also rotates q and k of linear and gated linear layers
    int32_t bos = -1, eos = -1;  // -1: none

    int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
    int64_t qkv_channels() const { return (heads + 2 * kv_heads) * head_size; }
    int64_t fc_channels() const { return mlp == Mlp::SwiGLU ? 2 * ffn : ffn; }
    float attention_scale() const;    // of softmax attention
    int64_t rotary_channels() const;  // of a head, by RoPE; those of the table if truncated
    AttentionType attention_type(int64_t layer) const { return AttentionType(attention[size_t(layer)]); }
    bool uses_rope(int64_t layer) const {
        return positions == Positions::RoPE && (attention_type(layer) == AttentionType::Softmax || linear_rope);
    }
    int64_t layers_of(AttentionType type) const;
    bool has_linear_attention() const { return layers_of(AttentionType::Softmax) < layers; }
};

// Sets options that a user or a file may omit: kv_heads, head_size, ffn (0) and attention ("" or one letter for all
// layers). Throws Error if head_size is omitted and heads do not divide channels. Call it before validate().
void fill_defaults(ModelConfig& config, const std::string& where);

// Throws Error naming the option and the remedy if the config is inconsistent: sizes that are zero, negative or
// overflow; KV heads that do not divide heads; an odd head size with RoPE; more or fewer attention types than layers; a
// head size too large for linear attention.
void validate(const ModelConfig& config, const std::string& where);

// Looks up "gpt2-124M", "llama-1B", ...; returns false for an unknown name. The config is complete and valid. After a
// change of layers, channels or heads, reset attention to "" and head_size and ffn to 0, and call fill_defaults().
bool preset(const std::string& name, ModelConfig& config);
std::vector<std::string> preset_names();

// "gpt2" or "llama" if that family can express the config exactly, otherwise "train_gpt".
std::string model_family(const ModelConfig& config);

// A description for people: "124,439,808 weights, 12 layers x 768 channels, ...".
std::string describe(const ModelConfig& config, int64_t weights);

// Reads a config.json: GPT-2 and LLaMA as transformers 4 and 5 write them, and our "train_gpt". path is for errors.
// Throws Error naming the key if a value would change the logits and is not implemented.
ModelConfig config_from_json(const nlohmann::json& json, const std::string& path);

// Writes a config.json that transformers 4 and 5 both read. original: the file that the model was loaded from ({} if
// none); keys that this program does not know are copied from it.
nlohmann::json config_to_json(const ModelConfig& config, const nlohmann::json& original);
