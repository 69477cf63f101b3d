// The model that a run names, and the options of `train` and `plan`. commands/ parses and checks them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/scorer.h"
#include "kernels/policy_loss.h"
#include "kernels/preference_loss.h"
#include "models/lora.h"
#include "models/model_source.h"
#include "parallel/update.h"
#include "runtime/communication/launcher.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/device/tensor.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

// Of --weights beside PACKING_NAMES: kernels/nf4.h.
constexpr const char* NF4_NAME = "nf4";

// A model: a preset, a directory in Hugging Face layout or a run directory. Each model option of a preset can be
// overridden.
struct ModelOptions {
    std::string model;
    std::string base;  // of an adapter; empty: the one that it names
    std::string dtype = "fp32";
    bool auto_dtype = false;        // dtype was chosen by --dtype auto
    std::string weights = "model";  // or one of PACKING_NAMES, or NF4_NAME (driver/inference.h)
    bool for_gpu = false;           // plan --gpu: a dtype that this backend does not support
    std::optional<int64_t> layers, channels, heads, kv_heads, head_size, ffn, max_positions, vocab_size;
    std::string norm, positions, mlp, bias, tied, attention, window, linear_rope, qk_norm, norm_placement, rope_partial,
        softcap_function, embedding_norm, head_bias, init, zero_init;
    std::optional<double> rope_theta, rope_fraction, attention_scale, logit_softcap;

    // The model that the options name. data_vocab: vocabulary of the data's tokenizer, 0 if there is none.
    // Throws Error: unknown model, model options given for a checkpoint, a contradicting config, a dtype that the
    // backend does not support.
    ModelSource resolve(int64_t data_vocab) const;
    DType type() const;  // of --dtype

  private:
    bool any_option() const;
    void change_architecture(ModelConfig& config) const;
    void set_windows(ModelConfig& config) const;
    void check_dtype(const ModelConfig& config) const;
};

enum class Schedule : uint8_t { Cosine, Linear, Constant, WSD };
constexpr Names<4> SCHEDULE_NAMES = {"cosine", "linear", "constant", "wsd"};

// Recompute level: the activations that the backward pass recomputes instead of keeping them. Each level includes the
// previous ones.
enum class Recompute : uint8_t { None, Activation, Norms, Block };
constexpr Names<4> RECOMPUTE_NAMES = {"none", "activation", "norms", "block"};
constexpr int64_t ALL_LAYERS = INT64_MAX;

// Whether the MLP's activation function is fused into the matmuls around it (16-bit training): its gradient only, or
// both passes.
enum class ActivationEpilogue : uint8_t { Off, Backward, Both };
constexpr Names<3> ACTIVATION_EPILOGUE_NAMES = {"off", "backward", "both"};

// Which matmuls of training are in fp8, and how their operands are scaled (driver/fp8_state.h).
struct Fp8Options {
    bool on = false;
    Fp8Format gradients = Fp8Format::E5M2;
    bool delayed = true;       // scaling
    bool keep_weights = true;  // quantised, from one update to the next; of frozen weights both orientations
    bool auto_weights = true;  // keep_weights is for choose_fp8_weights() to say (driver/fit.h)
    bool frozen = false;       // adapters are trained: weights have no gradients and are never quantised again
    int64_t skip_first = 0, skip_last = 0;

    bool in_layer(int64_t l, int64_t layers) const { return on && l >= skip_first && l < layers - skip_last; }
};

// How ranks shard the state of a run (parallel/sharding.h), and how they sum gradients.
struct ShardingOptions {
    int64_t zero_stage = 0, bucket_mib = 32;
    std::string reduce_dtype = "fp32";
};

// Options of Muon; absent ones get the defaults.
struct MuonFlags {
    std::optional<double> momentum, adam_weight_decay;
    std::optional<int64_t> momentum_warmup, iterations;
    std::string coefficients, scale;

    double momentum_or_default() const { return momentum.value_or(0.95); }
    std::string coefficients_or_default() const { return coefficients.empty() ? "polar-express" : coefficients; }
    bool rms_scale() const { return scale == "rms"; }
};

// The loss of a run on preference pairs (kernels/preference_loss.h); absent options get the method's defaults.
struct PreferenceFlags {
    std::optional<PreferenceMethod> method;  // --loss; nothing: cross-entropy
    std::optional<double> beta, label_smoothing, margin;
    bool adapters_off = false;  // --reference: at each step by the model without its adapters; else computed once

    bool on() const { return method.has_value(); }
    bool has_reference() const { return method && ::has_reference(*method); }
    std::optional<PreferenceOptions> options() const;
    std::string description() const;  // "dpo, beta 0.1, label smoothing 0, margin 0"; "none"
};

// How the rewards of a prompt's completions become advantages, and what the loss is a mean over (rl/advantages.h).
enum class Advantage : uint8_t { Group, Batch, MeanOnly };
constexpr Names<3> ADVANTAGE_NAMES = {"group", "batch", "mean-only"};
enum class LossNorm : uint8_t { Sequence, Batch, Constant };
constexpr Names<3> LOSS_NORM_NAMES = {"sequence", "batch", "constant"};

// What samples: the engine, or training's own forward pass (rl/exact_forward.h). Auto: the latter on a GPU that can.
enum class Sampler : uint8_t { Auto, Fast, Exact };
constexpr Names<3> SAMPLER_NAMES = {"auto", "fast", "exact"};

// Reinforcement learning (rl/): the rollout that comes before a run's updates, and the loss of these.
struct RolloutFlags {
    int64_t prompts = 0;                         // of a rollout, on all ranks together; 0: the run does not sample
    int64_t completions = 8;                     // of each prompt
    int64_t max_tokens = 256, batch_size = 256;  // of a completion; completions that a rank samples at the same time
    int64_t updates = 1;                         // of the weights, after each rollout
    double temperature = 1;
    Advantage advantage = Advantage::Group;
    LossNorm loss_norm = LossNorm::Sequence;
    bool keep_truncated = false;  // completions that max_tokens cut are learnt from
    PolicyOptions policy;
    int64_t max_idle_steps = 50, completions_every = 10;
    bool chat_template = true, ignore_eos = false;
    Sampler sampler = Sampler::Auto;
    bool exact = false;  // as choose_sampler() decided

    bool on() const { return prompts > 0; }
    // What a resumed run may not change; "none".
    std::string description() const;
};

// The options that determine the memory of a training run, besides the number of ranks: `train` and `plan` have them.
struct RunOptions {
    ModelOptions model;
    int64_t batch_size = 4, seq_len = 256;
    OptimizerType optimizer = OptimizerType::AdamW;  // of hidden matrices
    std::string optimizer_dtype = "fp32", grad_dtype = "fp32", grad_rounding = "stochastic", offload = "none";
    Recompute recompute = Recompute::None;
    int64_t recompute_layers = ALL_LAYERS;  // the first so many; the others keep everything
    std::string recompute_text() const;     // "block:20"
    ActivationEpilogue activation_epilogue = ActivationEpilogue::Both;
    bool master_weights = true, nondeterministic = false;
    Fp8Options fp8;
    LoraOptions lora;
    PreferenceFlags preference;
    RolloutFlags rollout;
    ShardingOptions sharding;
    int64_t gpu_memory = 0;  // bytes of the GPU that the run may take; 0: all
    bool fit = false;        // add options with which the run fits into memory
};

struct TrainOptions : RunOptions {
    const char* command = "train";    // that starts the run, for messages
    bool batch_given = false;         // --batch-size
    bool random_weights = false;      // LoRA: the base is a preset with initial weights
    std::string data, new_data, out;  // data: of --new-data where that is given
    // What is not given here, check_training() chooses: another length, and other rates, where a run starts from a
    // checkpoint than where it starts from scratch.
    int64_t steps = 0;  // 0: as many as `epochs` take
    double epochs = 0;  // 0: not given; of the first data directory, counted from where the run begins to use it
    int64_t total_batch_tokens = 0;                              // 0: batch_size · seq_len
    std::optional<double> lr, embedding_lr, head_lr, vector_lr;  // learning_rates() has the defaults
    double final_lr = 0.1, decay_fraction = 0.2;
    Schedule schedule = Schedule::Cosine;
    int64_t warmup = -1;  // -1: a fraction of the steps
    std::optional<double> weight_decay;
    double grad_clip = 1, spike_factor = 0;
    ElementwiseOptions elementwise;  // less the seed
    MuonFlags muon;
    int64_t eval_every = 250, eval_tokens = 0, sample_every = 0, save_every = 1000, keep = 3, max_skips = 5;
    std::string sample_prompts;  // file; empty: samples without a prompt
    std::string save_dtype = "fp32", on_save_error = "continue", eval_multiple_choice;
    double step_timeout = 0;  // seconds; 0: none
    std::string pack;         // "examples" or "none"; empty: examples if the data has them
    std::string too_long = "error";
    uint64_t seed = 42;
    bool document_mask = false, overfit_one_batch = false, resume = false;
    bool gemm_tune = true, measure_peak = false;
    Scorer::Options scorer;  // of rollouts
    LaunchOptions launch;
    int64_t profile = 0;  // the step to profile; 0: none
    std::string toml;     // every option, as `--config` reads it
};
