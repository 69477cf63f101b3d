// The options of the transformer. models/family.h has the presets and reads and writes Hugging Face's config.json.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "runtime/model/activation_config.h"
#include "runtime/model/rope_scaling.h"
#include "runtime/model/softcap_config.h"
#include "runtime/names.h"

enum class Norm : uint8_t { LayerNorm, RMSNorm };
enum class Positions : uint8_t { Learned, RoPE };
// RMSNorm of each head of q and k, without or with weights; of all heads of q together, and of k, with weights.
enum class QkNorm : uint8_t { Off, Plain, Weights, AllHeads };
// The initial weights. GPT2: normal(0, init_std), projections to the residual scaled by the depth. FanIn:
// embeddings normal(0, 1), matrices normal(0, √(0.33/columns)), a tied embedding as a matrix (modded-nanogpt).
enum class Init : uint8_t { GPT2, FanIn };
// As options and config.json write them.
constexpr Names<2> NORM_NAMES = {"layernorm", "rmsnorm"}, POSITIONS_NAMES = {"learned", "rope"},
                   INIT_NAMES = {"gpt2", "fan-in"};
constexpr Names<4> QK_NORM_NAMES = {"off", "plain", "weights", "all-heads"};
// The value is the letter in config.json and run.toml.
enum class AttentionType : char { Softmax = 'S', Linear = 'L', GatedLinear = 'G' };

// The options that may differ from layer to layer.
struct LayerConfig {
    AttentionType attention = AttentionType::Softmax;
    int64_t window = 0;  // softmax: the number of keys that a query sees, its own included; 0: all up to its own
    bool rope = true;    // RoPE rotates q and k (if positions is RoPE)
};

struct ModelConfig {
    std::string family;  // model_type of the files that it comes from or is a preset of (models/family.h); "": any
    int64_t layers = 0, channels = 0, heads = 0, kv_heads = 0, head_size = 0;
    int64_t ffn = 0;            // inner width of the MLP (of gate and of up each if it is gated)
    int64_t vocab_size = 0;     // as in files; rows in memory are padded_vocab()
    int64_t max_positions = 0;  // rows of the position table (Learned); the length trained for (RoPE)
    Norm norm = Norm::LayerNorm;
    double norm_eps = 1e-5;
    bool norm_after = false;  // x + norm(f(x)), not x + f(norm(x)), for attention and the MLP; with RMSNorm only
    Positions positions = Positions::Learned;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    QkNorm qk_norm = QkNorm::Off;
    Activation activation = Activation::GELU;  // of the MLP
    bool qkv_bias = true, proj_bias = true, mlp_bias = true;
    bool embedding_norm = false;  // a norm after the embedding
    bool tied = true;             // the head is the token embedding
    bool head_bias = false;
    double softmax_scale = 0;  // of softmax attention; 0: 1/√head_size
    Softcap logit_softcap;
    Init init = Init::GPT2;
    double init_std = 0.02;  // standard deviation of the initial weights (Init::GPT2)
    bool zero_init = false;  // the projections to the residual and an untied head start at 0
    std::vector<LayerConfig> layer;
    int32_t bos = -1, eos = -1;  // -1: none

    int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
    int64_t qkv_channels() const { return (heads + 2 * kv_heads) * head_size; }
    bool has_qk_weights() const { return qk_norm == QkNorm::Weights || qk_norm == QkNorm::AllHeads; }
    int64_t fc_channels() const { return activation_inputs(activation, ffn); }
    float attention_scale() const;    // of softmax attention
    int64_t rotary_channels() const;  // of a head, by RoPE; those of the table if truncated
    AttentionType attention_type(int64_t l) const { return layer[size_t(l)].attention; }
    int64_t window(int64_t l) const { return layer[size_t(l)].window; }
    bool uses_rope(int64_t l) const { return positions == Positions::RoPE && layer[size_t(l)].rope; }
    // The attention types, one letter per layer: S softmax, L linear, G gated linear
    // (docs/understand/linear_attention.md). Setting them makes one entry of `layer` per letter and keeps what else an
    // entry says, but for the window of linear attention. validate() checks number and letters.
    std::string attention() const;
    void set_attention(const std::string& letters);
    int64_t layers_of(AttentionType type) const;
    int64_t smallest_window() const;  // of a layer that has one; 0: none has
    bool has_windows() const { return smallest_window() > 0; }
    int64_t layers_without_rope() const;
    bool has_linear_attention() const { return layers_of(AttentionType::Softmax) < layers; }
};

constexpr int64_t MAX_DIMENSION = std::numeric_limits<int32_t>::max();  // GEMM libraries count in int32

// Sets options that a user or a file may omit: kv_heads, head_size, ffn (0) and layer (empty, or one entry for all
// layers). Throws Error if head_size is omitted and heads do not divide channels. Call it before validate().
void fill_defaults(ModelConfig& config, const std::string& where);

// Changes the number of layers of a complete config. More layers repeat the features of its layers from the first on.
// Throws Error for a number that validate() would refuse.
void change_layers(ModelConfig& config, int64_t layers, const std::string& where);

// Throws Error naming the option and the remedy if the config is inconsistent: sizes that are zero, negative or
// overflow; KV heads that do not divide heads; an odd head size with RoPE; more or fewer entries of `layer` than
// layers; a window in a layer of linear attention; a head size too large for linear attention or QK-norm; norm_after
// with LayerNorm.
void validate(const ModelConfig& config, const std::string& where);

// A description for people: "124,439,808 weights, 12 layers x 768 channels, ...".
std::string describe(const ModelConfig& config, int64_t weights);
