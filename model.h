// The model: its parameters, its activations, and the functions of a training step.
//
// train_gpt.cu defines the model and the step; in driver/, activations.cpp defines RunShape's helpers and Activations,
// planning.cpp what turns options into a model and its memory plan. Commands and tests include this header.
// driver/evaluation.h declares evaluations, driver/trainer.h the training loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "driver/angle_rows.h"
#include "driver/block_inputs.h"
#include "driver/fp8_base.h"
#include "driver/fp8_shards.h"
#include "driver/fp8_state.h"
#include "driver/nf4_base.h"
#include "driver/options.h"
#include "driver/packed_weights.h"
#include "kernels/attention/attention.h"
#include "kernels/generation/sampling.h"
#include "kernels/global_norm.h"
#include "models/lora.h"
#include "parallel/distributed_muon.h"
#include "parallel/snapshot.h"
#include "parallel/update.h"
#include "parallel/weight_gatherer.h"
#include "runtime/context.h"
#include "runtime/device/arena.h"
#include "runtime/device/memory_plan.h"
#include "runtime/device/staging.h"
#include "runtime/device/target.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"
#include "runtime/model/roles.h"

// --------------------------------------------------------------------------------------------------------------------
// Parameters.

// The only list of the model's tensors.
ParamTable parameter_table(const ModelConfig& config, int64_t world,
                           OptimizerType hidden_matrices = OptimizerType::AdamW);

// The dtype of weights and activations, and of what else holds them.
struct Precision {
    DType dtype = DType::F32;
    bool master = false;  // 16-bit weights are rounded from fp32 ones, which the optimizer updates
    DType moments = DType::F32;
    std::optional<Packings> packing = {};  // of the matrices, for inference
};

// In pinned host memory: m and v; master weights; block inputs (BlockInputs); frozen weights (WeightGatherer).
struct Offload {
    bool optimizer = false, master = false, activations = false, weights = false;
    // On the CPU all memory is the host's, so nothing is copied.
    bool moves_inputs(const Target& target) const { return activations && target.device != Device::CPU; }
    static MemoryPlace place(bool offloaded) { return offloaded ? MemoryPlace::Host : MemoryPlace::Device; }
};

struct Model {
    ModelConfig config;
    ParamTable table;
    Precision precision;
    Sharding sharding;
    Offload offload;
    Arena memory, buffer_memory, master_memory;  // weights; gathered groups and fp32 weights; master weights
    WeightArenas arenas;                         // views of them
    // ZeRO stage 3 and streamed weights, else empty and null: the buffers of groups (a base in NF4 or fp8 has its own).
    GroupBuffers buffers;
    std::unique_ptr<WeightGatherer> gatherer;
    std::vector<Event> arrivals;  // by group: its all-gather after the update has ended; empty: there is none
    // LoRA: the adapters, which alone are trained, as a model of its own; whole on every rank in all stages. Else null.
    std::unique_ptr<LoraTable> lora;
    std::unique_ptr<Model> adapters;
    // QLoRA: the weights of the blocks' linear layers, which the arenas then do not hold. Else null.
    std::unique_ptr<Nf4Base> nf4;
    std::unique_ptr<Fp8Base> fp8;       // likewise, adapters beside fp8 matmuls
    std::unique_ptr<Fp8Shards> shards;  // trained in fp8, ZeRO stage 3: the weights of the same, as codes as well
    const FrozenMemory* frozen() const { return nf4 ? &nf4->memory : fp8 ? &fp8->memory : nullptr; }
    std::unique_ptr<PackedWeights> packed;  // matrices in 8 or 4 bits, likewise
    std::vector<int64_t> starts;            // ParamArena::starts of the arena of all other weights; empty: of all

    // Builds the table only; allocate() gets the memory. hidden_matrices: the optimizer of hidden matrices.
    Model(const ModelConfig& model_config, const Sharding& ranks, Precision p = {},
          OptimizerType hidden_matrices = OptimizerType::AdamW, Offload to_host = {},
          const LoraOptions& lora_options = {}, const Fp8Options& fp8_options = {});
    void allocate(const Context& ctx);

    // The model that has gradients and an optimizer state.
    Model& trained() { return adapters ? *adapters : *this; }
    const Model& trained() const { return adapters ? *adapters : *this; }

    // Sizes in elements: this rank's weights, the buffers for gathered groups, this rank's fp32 master weights, and the
    // parameters that stay fp32, where they have an arena of their own. Only a base in the model's dtype is in groups.
    bool splits_groups() const { return starts.empty() && sharding.splits_weights(); }
    bool streams_groups() const { return starts.empty() && offload.weights; }
    int64_t kept() const { return starts.empty() ? table.total / sharding.parts(splits_groups()) : starts.back(); }
    int64_t gathered() const { return buffers.total(); }
    int64_t master() const { return precision.master ? table.total / sharding.parts(sharding.splits_optimizer()) : 0; }
    int64_t fp32() const { return precision.dtype != DType::F32 || gathered() ? table.fp32_total : 0; }
    int64_t bytes() const { return (kept() + gathered()) * dtype_size(precision.dtype) + (master() + fp32()) * 4; }

    // Null where this model has no such parameter, or not in its dtype; of frozen parameters there is no gradient.
    Tensor weight(int role, int64_t layer = -1) const {
        const Param* p = table.find(role, static_cast<int>(layer));
        return p && arenas.weights.holds(*p) ? arenas.tensor(*p) : Tensor{};
    }
    Tensor gradient(const Gradients& grads, int role, int64_t layer = -1) const {
        const Param* p = table.frozen ? nullptr : table.find(role, static_cast<int>(layer));
        return p ? grads.tensor(*p) : Tensor{};
    }
    Role head() const { return config.tied ? WTE : HEAD_W; }
    int head_group() const { return table.find(head())->group; }  // indices of the table's groups; 0: the embedding
    static int layer_group(int64_t l) { return static_cast<int>(1 + l); }
    int fp32_group() const { return table.num_groups() - 1; }

    // The group's weights are whole while the result lives; group `next` is prefetched if a gatherer brings them.
    GatheredGroup use(const Context& ctx, int group, int next = -1) const;
    void await_weights(const Context& ctx) const;  // later work of ctx.stream sees all groups as updated

  private:
    Model(const ModelConfig& model_config, ParamTable params, const Sharding& ranks, Precision p);
};

// --------------------------------------------------------------------------------------------------------------------
// Activations.

// The shape and the options that determine the activations of a pass over N = B·T tokens.
struct RunShape {
    int64_t B, T;
    bool training = false;
    Recompute recompute = Recompute::None;
    int64_t recompute_layers = ALL_LAYERS;  // the first so many
    Recompute recompute_in(int64_t l) const { return l < recompute_layers ? recompute : Recompute::None; }
    bool overlap = true;  // tensors whose lifetimes don't overlap share memory
    int64_t world = 1;    // ranks: their rows of the step's sums, and the padding of the parameter groups
    DType dtype = DType::F32;
    ActivationEpilogue activation_epilogue = ActivationEpilogue::Off;
    bool adds_in_matmul = false;  // proj and fcproj add to the residual themselves; else the next norm does
    Fp8Options fp8;               // the linear layers of the blocks whose operands are quantised
    int64_t update_bytes = 0;     // update_workspace_bytes() of the model in training
    std::array<int64_t, NUM_LINEAR_LAYERS> lora_widths{};  // LoraTable::widths of the adapters in training; 0: none
    int64_t adapter_elements = 0, lora_vocabulary = 0;     // of all adapters in training; LoraTable::vocabulary
    int64_t nf4_weight = 0;                                // QLoRA: elements of the largest weight in NF4; 0: none
    std::optional<Packings> packing = {};                  // of the matrices, for inference
    std::optional<PreferenceOptions> preference = {};      // training on pairs (driver/sequence_loss.h)
    std::optional<RolloutFlags> rollout = {};              // reinforcement learning (rl/)
    int64_t rollout_bytes = 0;                             // that rollouts use between steps
    bool offload_inputs = false;  // the blocks' inputs, but the last one's, wait in host memory for the backward pass
    bool deterministic = true;    // false: attention's backward pass may add in any order
    Target target = this_target();

    RunShape(int64_t batch_size, int64_t seq_len) : B(batch_size), T(seq_len) {}
};
// Sets the fields of shape that describe the model's adapters, its base in NF4, and its weights in fp8.
void set_adapters(RunShape& shape, const Model& model);
RunShape inference_shape(int64_t B, int64_t T, DType dtype = DType::F32);
RunShape training_shape(int64_t B, int64_t T, DType dtype = DType::F32);

// The activations of one layer. BLOCK_ACTIVATIONS (driver/activations.cpp) has their shapes and lifetimes.
struct LayerActs {
    Tensor res1;                    // the residual as the block reads it
    Tensor mean1, rstd1, norm1;     // norm1: its output, if it comes before attention
    Tensor qkv;                     // q and k normalised and rotated, if the model does that and qk is null
    Tensor qk;                      // QK-norm with weights: q and k normalised and rotated
    Tensor rstd_qk;                 // QK-norm: of each head of q and k
    Tensor rstd_q, rstd_k;          // QK-norm of all heads together
    Tensor att;                     // output of attention, by heads
    Tensor lse;                     // softmax: log-sum-exp of each row; linear: denominators
    Tensor log_decay;               // gated linear attention: the log decays
    Tensor att_unnormed, rstd_att;  // gated linear attention: its output before the per-head norm, and that norm's rstd
    Tensor dlog_decay, ddecay_gate;  // gradients: of log_decay, and of the gate's logits
    Tensor proj;                     // what attention adds to the residual, or norm1 reads if it comes after;
                                     // null where the matmul adds it itself. So is fcproj
    Tensor res2;                     // the residual as the MLP's half of the block reads it
    Tensor mean2, rstd2, norm2;
    Tensor fc, act;
    // fp8: the quantised inputs [inputs, N] of qkv, proj, fc and fcproj, for their weights' gradients. The activation
    // function's output exists only quantised: here, and as rows in HeadActs::fp8_rows (act is null).
    Tensor norm1_t, att_t, norm2_t, act_t;
    Tensor lora_qkv, lora_proj, lora_fc, lora_fcproj;  // LoRA: s·A·x of each linear layer's adapters
    Tensor fcproj;  // what the MLP adds to the residual, or norm2 reads if it comes after
    Tensor dfcproj, dact, dnorm2, dproj, datt, dqkv, dnorm1;  // gradients
};

// Memory for the inputs of a micro-step. upload() fills it; Input holds the views of a batch.
struct InputActs {
    Tensor tokens, targets, positions;  // [N] int32
    Tensor loss_rows;                   // [N] int32; a batch uses its first entries
    Tensor policy_terms;                // [5, N] fp32: Batch::PolicyTerms of each loss token
    Tensor pair_rows, pair_reference;   // [pairs, 3] int32, [pairs, 2] fp32: as PreferenceLoss has them; room for N/2
    Tensor cum_seqlens;                 // [N + 1] int32; the sequences of a batch use its first entries
    Tensor num_sequences;               // [1] int32; used if Batch::num_sequences > 0
    Tensor rope_table;                  // [T, R/2, 2], by position; or [N, R/2, 2], by token (angle_rows())
};

// The head, and what all layers share.
struct HeadActs {
    Tensor embedded, meane, rstde;     // the norm after the embedding: its input and its statistics
    Tensor resf, normf, meanf, rstdf;  // the final norm
    Tensor logits, losses;             // of a chunk of tokens; of each token
    Tensor pair_stats, dlosses;        // [pairs, NUM_PAIR_STATS], of each loss token: as PreferenceLoss has them
    Tensor dx, dnormf;                 // gradients: of the residual, of normf
    Tensor dq_sums, dkv_sums;          // of attention's gradients, for the QKV bias (AttentionGradientSums)
    Tensor scratch, forward_scratch;   // bytes
    Tensor fp8_rows, fp8_columns;      // bytes: codes of an operand by rows, [N, inputs] or [N, outputs];
                                       // of a gradient by columns, [outputs, N]
    Tensor fp8_weight;                 // bytes: codes of a weight that is not kept, or not transposed
    Tensor low_rank, dlow_rank;        // LoRA: A·x of embedding or head; the gradient of that, or of a linear layer's
    Tensor base_weight;                // QLoRA: a weight out of NF4
    Tensor update_workspace;           // bytes: Muon's updates and what Newton-Schulz needs
    Tensor sums, scalars;              // [ranks, NUM_STEP_SUMS] fp64; StepScalars
    Tensor rollout;                    // bytes, between steps (rl/rollouts.h)
    Tensor micro_step;                 // its number in the run, for the rounding of gradients to bf16
    Tensor sample_id, sample_key;      // [1] int32 the sampled token; [2] int64 sequence and position, the keys of its
    Tensor sample_row;                 // random number; [1, bytes] a SamplingRow
};

// A layer's activations for the first n tokens: a pass may have fewer tokens than were planned for.
LayerActs first_tokens(LayerActs a, int64_t n);

// How a training run samples text (temperature, top-k). The seed is the run's.
constexpr SamplingOptions TRAINING_SAMPLES = {0.8f, 50};

class Activations : public InputActs, public HeadActs {
  public:
    // Plans only; until allocate() all tensors are null.
    Activations(const ModelConfig& config, const RunShape& run_shape);
    void allocate(const Context& ctx, const Tensor& shared = {});  // shared: memory of the caller's, U8 [plan.bytes()]
    Activations(const Activations&) = delete;
    Activations& operator=(const Activations&) = delete;

    const ModelConfig config;
    const RunShape shape;
    ArenaPlan plan;

    std::vector<LayerActs> forward, backward;  // backward[l] is forward[l] except for what is recomputed
    Tensor loss_sum;                           // SUM_LOSS of this rank's row of sums
    std::unique_ptr<Fp8State> fp8;             // null: all matmuls are in the model's dtype
    std::unique_ptr<Staging> staging;          // pinned memory that inputs are copied through
    std::unique_ptr<AngleRows> angles;         // what angle_rows() works with; null: the table is by position

    std::unique_ptr<BlockInputs> host_inputs;  // the blocks' inputs in host memory; null: they stay on the device

    // Whether the layer's res1 waits in host memory (RunShape::offload_inputs), the bytes of one, and of all.
    bool in_host_memory(int64_t l) const { return shape.offload_inputs && l + 1 < config.layers; }
    int64_t input_bytes() const { return shape.B * shape.T * config.channels * dtype_size(shape.dtype); }
    int64_t host_bytes() const { return shape.offload_inputs ? (config.layers - 1) * input_bytes() : 0; }

    // int32: token, target, position and loss row of each token, cum_seqlens and num_sequences; int64: the number of
    // the next micro-step; the angles of each token. The scalars of a step use another buffer.
    int64_t staging_bytes() const;
    // The row of rope_table for each token of a batch. Dynamic NTK scaling beyond the original length has a row for
    // each token, because its angles depend on the length of its sequence, and uploads them.
    const std::vector<int32_t>& angle_rows(const Batch& batch, Stream stream) const;
    static constexpr int STAGING_BUFFERS = 4;
    bool uses_fp8(int64_t l) const { return fp8 && fp8->options.in_layer(l, config.layers); }
    Tensor at(const ArenaPlan::Entry& e) const { return memory.at(e.offset, e.dtype, e.shape); }
    // One of the sums of a rank.
    Tensor sum(int64_t rank, StepSum which) const {
        return make_tensor(sums.as<double>() + rank * NUM_STEP_SUMS + which, DType::F64, sums.device, {1});
    }
    Tensor pair_sums(int64_t rank) const {
        return make_tensor(sum(rank, SUM_LOSS).data, DType::F64, sums.device, {NUM_PAIR_STATS});
    }

  private:
    void add(std::initializer_list<Tensor*> fields, const std::string& name, DType dtype,
             const std::vector<int64_t>& dims, int64_t first, int64_t last);
    void plan_layer(int64_t l);
    template <typename Acts, typename Table>
    void plan_whole_pass(Acts& acts, const Table& table);

    Arena memory;
    std::vector<std::pair<Tensor*, int64_t>> bindings;  // each tensor and the index of its plan entry
};

// --------------------------------------------------------------------------------------------------------------------
// A training step: forward, backward, update.

// The tokens of a pass, on the device.
struct Input {
    int64_t n;                 // tokens
    Tensor tokens, positions;  // [n]
    Tensor targets;            // [n], or as many as loss_rows
    Tensor loss_rows;          // the tokens that backward() computes the head of, then −1; null: all
    AttentionSequences sequences;
    bool two_passes = false;  // over the head (driver/sequence_loss.h)
    bool old_policy = false;  // as Batch has it

    int64_t head_tokens() const { return loss_rows ? loss_rows.shape[0] : n; }
    int64_t head_kind() const { return two_passes || old_policy ? -head_tokens() : head_tokens(); }  // of graphs
};
// loss_tokens_only: for backward(), which then computes the head only of tokens with a target.
Input upload(const Context& ctx, const Activations& acts, const Batch& batch, bool loss_tokens_only = false);
Batch single_sequence(const int32_t* tokens, int64_t n);

struct Pass;  // driver/pass.h: context, model, activations and input; for backward() the gradients, too
// Tokens to the final norm's output (acts.normf).
void forward(const Pass& p);
// The logits of rows [begin, end) of normf, in the logits buffer; with the softcap, if the model has one.
Tensor head_logits(const Pass& p, int64_t begin, int64_t end);
// After forward(): the loss of each of in.head_tokens(), in acts.losses.
// look: called with each chunk of logits, before the softcap, and its first row; the next chunk overwrites the logits.
void token_losses(const Pass& p, const std::function<void(int64_t begin, Tensor logits)>& look = {});
// The same, and sums them into acts.loss_sum.
void evaluate_loss(const Pass& p, bool accumulate, const std::function<void(int64_t begin, Tensor logits)>& look = {});
// After forward(): computes the head and the loss, adds the loss to acts.loss_sum, and computes every gradient. dloss
// is the gradient of each token's loss. first_micro, last_micro: whether this is the step's first or last micro-step.
void backward(const Pass& p, float dloss, bool first_micro, bool last_micro = true);

struct OptimizerOptions : ElementwiseOptions {
    MuonOptions muon;
    HyperparametersByGroup rates;
};

// Gradients and the optimizer state in Precision::moments: m (AdamW's first moment, Muon's momentum) in an arena with
// the layout of the weights; AdamW's second moment v, which has no elements for the matrices that Muon updates.
struct Optimizer {
    Arena gradient_memory, state_memory;
    Gradients grads;
    ParamArena m, v;
    std::vector<UpdateSlice> slices;
    OptimizerOptions options;
    Muon muon;  // without matrices if AdamW updates everything

    // Elements of m, and of v (the largest over the ranks).
    static int64_t moments(const Model& model) {
        return model.table.total / model.sharding.parts(model.sharding.splits_optimizer());
    }
    static int64_t second_moments(const Model& model) {
        return second_moment_size(model.table, model.sharding.parts(model.sharding.splits_optimizer()));
    }
    static int64_t state_bytes(const Model& model) {
        return (moments(model) + second_moments(model)) * dtype_size(model.precision.moments);
    }
    void allocate(const Context& ctx, const Model& model, const OptimizerOptions& optimizer_options,
                  const GradientOptions& gradients = {});
};

// Bytes that the update needs besides the arenas: RunShape::update_bytes.
int64_t update_workspace_bytes(const Model& model, int64_t round_bytes = MUON_ROUND_BYTES,
                               const Target& target = this_target());

// Computes the global gradient norm, clips, runs Muon and AdamW, and gathers the weights that other ranks updated.
// scale = 1/(loss tokens of the step) turns the sum of losses into a mean. grad_unit turns the gradients into those of
// that mean: 1/(dloss · loss tokens).
void update(const Context& ctx, Model& model, Optimizer& optimizer, const Activations& acts, double scale,
            double grad_unit = 1);
StepScalars read_scalars(const Context& ctx, const Activations& acts);
void write_scalars(const Context& ctx, const Activations& acts, const StepScalars& s);

// --------------------------------------------------------------------------------------------------------------------
// The memory plan, printed before anything is allocated.

GradientOptions gradient_options(const RunOptions& options, uint64_t seed = 0);
Fp8Options fp8_options(Fp8Options options, const Model& model);                    // with what depends on the model
Offload offload_options(const std::string& what);                                  // of --offload
MemoryPlan memory_plan(const Model& model, const Target& target = this_target());  // the weights alone
MemoryPlan memory_plan(const Model& model, const Activations& acts, const GradientOptions& gradients = {});
// The model that a run with these options trains on this rank, and the shape of its micro-steps. Nothing is allocated.
Model model_of(const RunOptions& options, const ModelConfig& config, int64_t rank, int64_t world);
RunShape run_shape(const RunOptions& options, const Model& model, const Target& target = this_target());
Snapshot snapshot_of(const Model& model);              // of its training state, not allocated
double flop_per_token(const Model& model, int64_t T);  // of a training step, for MFU
