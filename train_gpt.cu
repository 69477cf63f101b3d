// train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA.
//
// This file is the whole model and the whole step, from top to bottom in the order in which data flows:
//
//     config → parameter table → arenas → tokens → forward → loss → backward → update → checkpoint → text
//
// It holds no kernel. Launchers from kernels/ do the mathematics; the same text is compiled by g++ for the CPU and by
// nvcc for the GPU, and the Makefile decides which definitions of the launchers are linked.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "commands/commands.h"
#include "commands/matmul_cache.h"
#include "commands/plan.h"
#include "commands/training.h"
#include "data/loader.h"
#include "data/multiple_choice.h"
#include "data/token_files.h"
#include "data/tokenizer.h"
#include "infer/chat.h"
#include "infer/engine.h"
#include "infer/generate.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"
#include "kernels/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gelu.h"
#include "kernels/generation/read_bandwidth.h"
#include "kernels/generation/sampling.h"
#include "kernels/global_norm.h"
#include "kernels/layernorm.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/matmul.h"
#include "kernels/relu2.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "parallel/checkpoint.h"
#include "parallel/evaluation.h"
#include "parallel/update.h"
#include "parallel/weights.h"
#include "runtime/context.h"
#include "runtime/device/arena.h"
#include "runtime/device/convert.h"
#include "runtime/device/device.h"
#include "runtime/device/memory_plan.h"
#include "runtime/device/peaks.h"
#include "runtime/device/staging.h"
#include "runtime/files/checkpoint.h"
#include "runtime/files/files.h"
#include "runtime/files/log.h"
#include "runtime/model/heads.h"
#include "runtime/model/initialise.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"
#include "runtime/rng.h"
#include "runtime/signals.h"

using nlohmann::json;
using nlohmann::ordered_json;

// --------------------------------------------------------------------------------------------------------------------
// The parameter table: the only list of the model's tensors.

enum Slot {
    WTE,
    WPE,  // token and position embedding
    NORM1_W,
    NORM1_B,
    QKV_W,
    QKV_B,
    GATE_W,
    GATE_B,
    HEADNORM_W,  // kind G: the decay of each token and KV head, and the norm of each head's output
    PROJ_W,
    PROJ_B,  // attention half of a block
    NORM2_W,
    NORM2_B,
    FC_W,
    FC_B,
    FCPROJ_W,
    FCPROJ_B,  // MLP half of a block (SwiGLU: FC is gate and up, fused)
    NORMF_W,
    NORMF_B,
    HEAD_W  // final norm, output head (absent when tied to WTE)
};

// Norms and a gate's bias, in a 16-bit model too: few numbers, whose digits matter. They are a group of their own.
bool stays_fp32(Slot slot) {
    return slot == NORM1_W || slot == NORM1_B || slot == NORM2_W || slot == NORM2_B || slot == NORMF_W ||
           slot == NORMF_B || slot == HEADNORM_W || slot == GATE_B;
}

ParamTable parameter_table(const ModelConfig& c, int64_t world) {
    const std::string family = model_family(c);
    const bool gpt2 = family == "gpt2", llama = family == "llama";
    ParamTable table;

    // rows × cols; cols = 0 for a vector. sources: the tensors of a Hugging Face checkpoint that it is made of.
    auto add = [&](Slot slot, int64_t layer, const std::string& name, int64_t rows, int64_t cols, double std,
                   double value, std::vector<SourceTensor> sources) {
        const int64_t group = stays_fp32(slot)             ? c.layers + 2
                              : layer >= 0                 ? 1 + layer
                              : slot == WTE || slot == WPE ? 0
                                                           : 1 + c.layers;
        const int64_t padded = slot == WTE || slot == HEAD_W ? c.padded_vocab() : rows;
        if (sources.empty()) sources = {{name, 0, rows, false}};
        table.params.push_back({slot, static_cast<int>(layer), static_cast<int>(group), name, rows, cols, padded,
                                static_cast<float>(std), static_cast<float>(value), cols > 0, stays_fp32(slot),
                                std::move(sources)});
    };
    const double std = c.init_std;
    // Each block adds twice to the residual stream: its variance stays that of one layer (GPT-2, section 2.3).
    const double residual_std = std / std::sqrt(2.0 * double(c.layers));
    const bool norm_bias = c.norm == Norm::LayerNorm;
    const int64_t C = c.channels, V = c.vocab_size, q_rows = c.heads * c.head_size, kv_rows = c.kv_heads * c.head_size;

    // One tensor of the file, under the family's name. GPT-2's Conv1D stores matrices transposed.
    auto named = [&](const std::string& gpt2_name, const std::string& llama_name, int64_t rows, bool conv1d) {
        std::vector<SourceTensor> sources;
        if (gpt2) sources = {{gpt2_name, 0, rows, conv1d}};
        if (llama) sources = {{llama_name, 0, rows, false}};
        return sources;
    };
    auto norm = [&](Slot slot, int64_t layer, const std::string& name, const std::string& gpt2_name,
                    const std::string& llama_name) {
        add(slot, layer, name + ".weight", C, 0, 0, 1, named(gpt2_name + ".weight", llama_name + ".weight", C, false));
        if (norm_bias) {
            add(static_cast<Slot>(slot + 1), layer, name + ".bias", C, 0, 0, 0,
                named(gpt2_name + ".bias", llama_name + ".bias", C, false));
        }
    };
    // A linear layer; LLaMA's fused ones are made of several tensors, one above the other.
    using Parts = std::vector<std::pair<std::string, int64_t>>;
    auto linear = [&](Slot slot, int64_t layer, const std::string& name, const std::string& gpt2_name,
                      const Parts& llama_parts, int64_t rows, int64_t cols, double weight_std, bool bias) {
        for (const bool is_bias : {false, true}) {
            if (is_bias && !bias) continue;
            const std::string suffix = is_bias ? ".bias" : ".weight";
            std::vector<SourceTensor> sources = named(gpt2_name + suffix, "", rows, !is_bias);
            if (llama) sources.clear();
            int64_t row = 0;
            for (const auto& [part, part_rows] : llama_parts) {
                if (llama) sources.push_back({part + suffix, row, part_rows, false});
                row += part_rows;
            }
            add(static_cast<Slot>(slot + is_bias), layer, name + suffix, rows, is_bias ? 0 : cols,
                is_bias ? 0 : weight_std, 0, sources);
        }
    };

    add(WTE, -1, "wte.weight", V, C, std, 0, named("transformer.wte.weight", "model.embed_tokens.weight", V, false));
    if (c.positions == Positions::Learned) {
        add(WPE, -1, "wpe.weight", c.max_positions, C, std, 0,
            named("transformer.wpe.weight", "", c.max_positions, false));
    }
    for (int64_t l = 0; l < c.layers; l++) {
        const std::string name = str("layers.", l, "."), g = str("transformer.h.", l, "."),
                          m = str("model.layers.", l, ".");
        const std::string a = m + "self_attn.";
        norm(NORM1_W, l, name + "norm1", g + "ln_1", m + "input_layernorm");
        linear(QKV_W, l, name + "qkv", g + "attn.c_attn",
               {{a + "q_proj", q_rows}, {a + "k_proj", kv_rows}, {a + "v_proj", kv_rows}}, q_rows + 2 * kv_rows, C, std,
               c.qkv_bias);
        if (c.attention_type(l) == 'G') {
            // Heads begin with decays σ(bias) from 1 − 1/32 to 1 − 1/512, which forget slowly enough for gradients to
            // reach far and fast enough for sums to stay small (RetNet's span: Sun et al. 2023, section 3.1).
            const double slowest = std::log(511), fastest = std::log(31);
            add(GATE_W, l, name + "gate.weight", c.kv_heads, C, std, 0, {});
            add(GATE_B, l, name + "gate.bias", c.kv_heads, 0, 0, fastest, {});
            table.params.back().init_step =
                static_cast<float>((slowest - fastest) / double(std::max<int64_t>(c.kv_heads - 1, 1)));
            add(HEADNORM_W, l, name + "headnorm.weight", c.head_size, 0, 0, 1, {});
        }
        linear(PROJ_W, l, name + "proj", g + "attn.c_proj", {{a + "o_proj", C}}, C, q_rows, residual_std, c.proj_bias);
        norm(NORM2_W, l, name + "norm2", g + "ln_2", m + "post_attention_layernorm");
        linear(FC_W, l, name + "fc", g + "mlp.c_fc", {{m + "mlp.gate_proj", c.ffn}, {m + "mlp.up_proj", c.ffn}},
               c.fc_channels(), C, std, c.mlp_bias);
        linear(FCPROJ_W, l, name + "fcproj", g + "mlp.c_proj", {{m + "mlp.down_proj", C}}, C, c.ffn, residual_std,
               c.mlp_bias);
    }
    norm(NORMF_W, -1, "normf", "transformer.ln_f", "model.norm");
    if (!c.tied) add(HEAD_W, -1, "head.weight", V, C, std, 0, named("lm_head.weight", "lm_head.weight", V, false));
    std::stable_sort(table.params.begin(), table.params.end(),
                     [](const Param& a, const Param& b) { return a.group < b.group; });
    table.layout(world);
    return table;
}

// What the weights and activations of a model are, and what trains them.
struct Precision {
    DType dtype = DType::F32;
    bool master = false;  // 16-bit weights are rounded from fp32 ones, which the optimizer updates
};

// The model: its knobs, its table and its weights.
struct Model {
    ModelConfig config;
    ParamTable table;
    Precision precision;
    Sharding sharding;
    GroupSlots slots;  // of gathered groups, where each rank keeps its part of the weights
    Arena memory;
    WeightArenas arenas;
    std::unique_ptr<WeightGatherer> gatherer;  // likewise

    // The table only; allocate() gets the memory.
    Model(const ModelConfig& model_config, const Sharding& ranks, Precision p = {})
        : config(model_config), table(parameter_table(config, ranks.world)), precision(p), sharding(ranks) {
        if (sharding.splits_weights()) slots = GroupSlots(table, WeightGatherer::LAYER_SLOTS, false);
    }

    // Elements: of the weights that are kept, of those that are gathered, of fp32 master weights, of what stays fp32
    // apart from them.
    int64_t kept() const { return table.total / sharding.parts(sharding.splits_weights()); }
    int64_t gathered() const { return slots.total(); }
    int64_t master() const { return precision.master ? table.total / sharding.parts(sharding.splits_optimizer()) : 0; }
    int64_t fp32() const { return precision.dtype != DType::F32 || sharding.splits_weights() ? table.fp32_total : 0; }
    int64_t bytes() const { return (kept() + gathered()) * dtype_size(precision.dtype) + (master() + fp32()) * 4; }

    void allocate(const Context& ctx) {
        memory = Arena(bytes(), "weights");
        int64_t at = 0;
        const auto part = [&](DType dtype, int64_t n) {
            const Tensor t = memory.at(at, dtype, {n});
            at += t.bytes();
            return t;
        };
        arenas.weights = sharding.arena(part(precision.dtype, kept()), sharding.splits_weights());
        if (gathered()) arenas.weights.views = slots.views(table, part(precision.dtype, gathered()));
        if (master()) arenas.master = sharding.arena(part(DType::F32, master()), sharding.splits_optimizer());
        if (fp32()) arenas.fp32 = part(DType::F32, fp32());
        arenas.fp32.origin = table.total - table.fp32_total;
        if (gathered()) gatherer = std::make_unique<WeightGatherer>(ctx, table, arenas.weights, slots);
    }

    // Null where this model has no such parameter.
    Tensor weight(Slot slot, int64_t layer = -1) const {
        const Param* p = table.find(slot, static_cast<int>(layer));
        return p ? arenas.tensor(*p) : Tensor{};
    }
    Tensor gradient(const Gradients& grads, Slot slot, int64_t layer = -1) const {
        const Param* p = table.find(slot, static_cast<int>(layer));
        return p ? grads.tensor(*p) : Tensor{};
    }
    Slot head() const { return config.tied ? WTE : HEAD_W; }
    // Groups of the table.
    int head_group() const { return table.find(head())->group; }
    static int layer_group(int64_t l) { return static_cast<int>(1 + l); }
    int fp32_group() const { return table.num_groups() - 1; }

    // The group's weights are whole while this lives; the next one's are on their way.
    GatheredGroup use(const Context& ctx, int group, int next = -1) const {
        return GatheredGroup(gatherer.get(), group, next, ctx.stream);
    }
};

// FLOP per token of a training step, for MFU: 6 per weight used in a product (2 forward, 4 backward) and attention's
// two products, by kind the causal half of [T, T] or the recurrent form: k vᵀ added to a state, and the state times q.
double flop_per_token(const Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    double weights = 0;
    for (const Param& p : model.table.params) {
        const bool lookup_only = p.slot == WPE || (p.slot == WTE && !c.tied);
        if (p.cols > 0 && !lookup_only) weights += double(p.numel());
    }
    const double softmax = double(T) * double(c.heads * c.head_size),
                 linear = double((c.heads + c.kv_heads) * c.head_size * c.head_size);
    const int64_t S = c.layers_of('S');
    return 6 * weights + 6 * (double(S) * softmax + double(c.layers - S) * linear);
}

// How the samples of a training run are drawn, with the run's seed.
constexpr SamplingOptions TRAINING_SAMPLES = {0.8f, 50};

// --------------------------------------------------------------------------------------------------------------------
// Activations: what a pass over N = B·T tokens computes, with the moments of first and last use.

struct RunShape {
    int64_t B, T;
    bool training = false;
    Recompute recompute = Recompute::None;
    bool overlap = true;  // tensors whose lifetimes don't meet share memory
    int64_t world = 1;    // ranks that the gradient arena is padded for
    DType dtype = DType::F32;
    GeluEpilogue gelu_epilogue = GeluEpilogue::Off;
    bool deterministic = true;  // attention's backward pass
};

struct LayerActs {
    Tensor res1;                 // [N, C] the residual stream as norm1 reads it
    Tensor mean1, rstd1, norm1;  // [N], [N], [N, C]
    Tensor qkv;                  // [N, (NH + 2·NKV)·HS], q and k rotated where RoPE is used
    Tensor gate, mix, rstd_mix;  // kind G: [N, NKV] log decays, [N, NH·HS] attention before the heads' norm, [N, NH]
    Tensor att, lse;             // [N, NH·HS], [NH, N]: of kind L its denominators
    Tensor proj;                 // [N, C] what attention adds to the residual stream
    Tensor res2;                 // [N, C] the residual stream as norm2 reads it
    Tensor mean2, rstd2, norm2;
    Tensor fc, act;                           // [N, fc_channels], [N, ffn]
    Tensor fcproj;                            // [N, C] what the MLP adds to the residual stream
    Tensor dact, dnorm2, datt, dqkv, dnorm1;  // gradients of the above, alive for a moment each
    Tensor dgate, dgate_x;  // [N, NKV], [N, NKV rounded up to 8]: of gate and what it is computed from
};

constexpr Tensor LayerActs::*LAYER_FIELDS[] = {
    &LayerActs::res1,   &LayerActs::mean1,    &LayerActs::rstd1, &LayerActs::norm1,  &LayerActs::qkv,
    &LayerActs::att,    &LayerActs::proj,     &LayerActs::res2,  &LayerActs::mean2,  &LayerActs::rstd2,
    &LayerActs::norm2,  &LayerActs::fc,       &LayerActs::act,   &LayerActs::fcproj, &LayerActs::dact,
    &LayerActs::dnorm2, &LayerActs::datt,     &LayerActs::dqkv,  &LayerActs::dnorm1, &LayerActs::gate,
    &LayerActs::mix,    &LayerActs::rstd_mix, &LayerActs::dgate, &LayerActs::dgate_x};

class Activations {
  public:
    // Plans only. allocate() makes the tensors real.
    Activations(const ModelConfig& config, const RunShape& run_shape);
    void allocate(const Context& ctx);
    Activations(const Activations&) = delete;
    Activations& operator=(const Activations&) = delete;

    const ModelConfig config;
    const RunShape shape;
    ArenaPlan plan;

    // inputs of a micro-step
    Tensor tokens, targets, positions;  // [N] int32
    Tensor cum_seqlens;                 // [N + 1] int32; the sequences of this batch use its first entries
    Tensor rope_table;                  // [T, HS/2, 2]
    // the blocks; backward[l] is forward[l] but for what is computed again
    std::vector<LayerActs> forward, backward;
    // the head
    Tensor resf, meanf, rstdf, normf;  // [N, C], [N], [N], [N, C]
    Tensor logits, losses;             // [chunk, Vp], [N]
    Tensor dx, dnormf;                 // [N, C] gradients: of the residual stream, of normf
    Tensor scratch, forward_scratch;   // bytes
    Tensor sums, loss_sum, scalars;    // [ranks, NUM_STEP_SUMS] fp64, this rank's SUM_LOSS of them; StepScalars
    Tensor sample_id, sample_key;      // [1] int32, [2] int64, training: the drawn token, and (sequence, step)
    std::unique_ptr<Staging> staging;  // what the inputs pass through

    // Three numbers for each token, and the sequences' ends. The scalars of a step take a slot of their own.
    int64_t staging_bytes() const { return (4 * shape.B * shape.T + 1) * 4; }
    static constexpr int STAGING_SLOTS = 4;
    Tensor at(const ArenaPlan::Entry& e) const { return memory.at(e.offset, e.dtype, e.shape); }
    // A number of a rank's row of sums.
    Tensor sum(int64_t rank, StepSum which) const {
        return make_tensor(sums.as<double>() + rank * NUM_STEP_SUMS + which, DType::F64, sums.device, {1});
    }

  private:
    void place(std::initializer_list<Tensor*> fields, const std::string& name, DType dtype, std::vector<int64_t> dims,
               int64_t first, int64_t last);

    Arena memory;
    std::vector<std::pair<Tensor*, int64_t>> bindings;  // which plan entry each tensor is
};

void Activations::place(std::initializer_list<Tensor*> fields, const std::string& name, DType dtype,
                        std::vector<int64_t> dims, int64_t first, int64_t last) {
    const int64_t entry = plan.add(name, dtype, dims, first, last);
    for (Tensor* t : fields) bindings.emplace_back(t, entry);
}

// GELU computed inside a product rounds otherwise than the kernel that recomputes it alone; faster sums are attention's
// of 16-bit numbers.
RunShape effective(const ModelConfig& c, RunShape shape) {
    const bool alone = shape.recompute == Recompute::Activation || shape.recompute == Recompute::Norms;
    if (alone && shape.gelu_epilogue == GeluEpilogue::Both) shape.gelu_epilogue = GeluEpilogue::Backward;
    shape.deterministic |= shape.dtype == DType::F32 || c.layers_of('S') == 0;
    if (!shape.training || c.mlp != Mlp::GELU) shape.gelu_epilogue = GeluEpilogue::Off;
    return shape;
}

Activations::Activations(const ModelConfig& model_config, const RunShape& run_shape)
    : config(model_config),
      shape(effective(model_config, run_shape)),
      forward(static_cast<size_t>(config.layers)),
      backward(forward.size()) {
    const ModelConfig& c = config;
    const DType dtype = shape.dtype;
    int64_t N;
    require(!__builtin_mul_overflow(shape.B, shape.T, &N), "--batch-size x --seq-len overflows; lower one of them");
    require(c.positions != Positions::Learned || shape.T <= c.max_positions, "a sequence of ", shape.T,
            " tokens is beyond the model's position table of ", c.max_positions,
            " rows; shorten it (--seq-len) or raise --max-positions of a preset");
    const int64_t C = c.channels, L = c.layers;

    // The moments of a step: each block's phases forward, the head, then for each block a moment of recomputation and
    // its phases backward, then the embedding's gradient and the update.
    enum Phase { NORM1, QKV, ATTENTION, PROJ, NORM2, FC, ACT, FCPROJ, PHASES };
    auto F = [&](int64_t l, int phase) { return 1 + l * PHASES + phase; };
    const int64_t HEAD = F(L, 0);
    auto R = [&](int64_t l) { return HEAD + 1 + (L - 1 - l) * (PHASES + 1); };
    auto G = [&](int64_t l, int phase) { return R(l) + PHASES - phase; };
    const int64_t UPDATE = R(-1) + 1;
    const bool training = shape.training;

    place({&tokens}, "tokens", DType::I32, {N}, 0, UPDATE);
    place({&targets}, "targets", DType::I32, {N}, 0, UPDATE);
    place({&positions}, "positions", DType::I32, {N}, 0, UPDATE);
    place({&cum_seqlens}, "cum_seqlens", DType::I32, {N + 1}, 0, UPDATE);
    if (c.positions == Positions::RoPE)
        place({&rope_table}, "rope_table", DType::F32, {shape.T, c.head_size / 2, 2}, 0, UPDATE);

    for (int64_t l = 0; l < L; l++) {
        LayerActs &f = forward[static_cast<size_t>(l)], &b = backward[static_cast<size_t>(l)];
        const std::string layer = str("layers.", l, ".");
        // A tensor of the forward pass: born at one phase, last read at moment last_forward of the forward pass and at
        // phase last_backward of the backward pass, which finds it kept, or computed again from some level on.
        auto keep_as = [&](DType type, Tensor LayerActs::*field, const char* name, std::vector<int64_t> dims, int born,
                           int64_t last_forward, int last_backward, bool again) {
            if (!training)
                place({&(f.*field)}, layer + name, type, dims, F(l, born), last_forward);
            else if (!again)
                place({&(f.*field), &(b.*field)}, layer + name, type, dims, F(l, born), G(l, last_backward));
            else {
                place({&(f.*field)}, layer + name, type, dims, F(l, born), last_forward);
                place({&(b.*field)}, layer + name + " (again)", type, dims, R(l), G(l, last_backward));
            }
        };
        auto keep = [&](Tensor LayerActs::*field, const char* name, std::vector<int64_t> dims, int born,
                        int64_t last_forward, int last_backward, bool again) {
            keep_as(dtype, field, name, std::move(dims), born, last_forward, last_backward, again);
        };
        auto gradient = [&](Tensor LayerActs::*field, const char* name, std::vector<int64_t> dims, int born, int last) {
            if (training) place({&(b.*field)}, layer + name, dtype, dims, G(l, born), G(l, last));
        };
        const bool again_act = shape.recompute >= Recompute::Activation,
                   again_norms = shape.recompute >= Recompute::Norms, again_block = shape.recompute >= Recompute::Block;
        // Means and 1/σ are only kept for the backward pass.
        auto statistic = [&](Tensor LayerActs::*field, const char* name, int phase) {
            if (training) keep_as(DType::F32, field, name, {N}, phase, F(l, phase), phase, again_block);
        };
        keep(&LayerActs::res1, "res1", {N, C}, l == 0 ? -1 : NORM1, F(l, NORM2), NORM1, false);
        if (c.norm == Norm::LayerNorm) statistic(&LayerActs::mean1, "mean1", NORM1);
        statistic(&LayerActs::rstd1, "rstd1", NORM1);
        keep(&LayerActs::norm1, "norm1", {N, C}, NORM1, F(l, QKV), QKV, again_norms);
        keep(&LayerActs::qkv, "qkv", {N, c.qkv_channels()}, QKV, F(l, ATTENTION), ATTENTION, again_block);
        keep(&LayerActs::att, "att", {N, c.heads * c.head_size}, ATTENTION, F(l, PROJ), ATTENTION, again_block);
        const char kind = c.attention_type(l);
        if (training && kind != 'G') {
            keep_as(DType::F32, &LayerActs::lse, kind == 'S' ? "lse" : "denominator", {c.heads, N}, ATTENTION,
                    F(l, ATTENTION), ATTENTION, again_block);
        }
        if (kind == 'G') {
            keep_as(DType::F32, &LayerActs::gate, "gate", {N, c.kv_heads}, QKV, F(l, ATTENTION), QKV, again_block);
            keep(&LayerActs::mix, "mix", {N, c.heads * c.head_size}, ATTENTION, F(l, ATTENTION), ATTENTION,
                 again_block);
            if (training) {
                keep_as(DType::F32, &LayerActs::rstd_mix, "rstd_mix", {N, c.heads}, ATTENTION, F(l, ATTENTION),
                        ATTENTION, again_block);
                place({&b.dgate}, layer + "dgate", DType::F32, {N, c.kv_heads}, G(l, ATTENTION), G(l, QKV));
            }
            gradient(&LayerActs::dgate_x, "dgate_x", {N, (c.kv_heads + 7) / 8 * 8}, QKV, QKV);
        }
        place({&f.proj}, layer + "proj", dtype, {N, C}, F(l, PROJ), F(l, NORM2));
        if (training && again_block) place({&b.proj}, layer + "proj (again)", dtype, {N, C}, R(l), R(l));
        keep(&LayerActs::res2, "res2", {N, C}, NORM2, F(l + 1, NORM1), NORM2, again_block);
        if (c.norm == Norm::LayerNorm) statistic(&LayerActs::mean2, "mean2", NORM2);
        statistic(&LayerActs::rstd2, "rstd2", NORM2);
        keep(&LayerActs::norm2, "norm2", {N, C}, NORM2, F(l, FC), FC, again_norms);
        // SwiGLU's backward pass writes its gradient over its input, which then lives until fc's gradient is done.
        keep(&LayerActs::fc, "fc", {N, c.fc_channels()}, FC, F(l, ACT), FC, again_block);
        keep(&LayerActs::act, "act", {N, c.ffn}, ACT, F(l, FCPROJ), FCPROJ, again_act);
        place({&f.fcproj}, layer + "fcproj", dtype, {N, C}, F(l, FCPROJ), F(l + 1, NORM1));

        gradient(&LayerActs::dact, "dact", {N, c.ffn}, FCPROJ, FC);
        gradient(&LayerActs::dnorm2, "dnorm2", {N, C}, FC, NORM2);
        gradient(&LayerActs::datt, "datt", {N, c.heads * c.head_size}, PROJ, ATTENTION);
        gradient(&LayerActs::dqkv, "dqkv", {N, c.qkv_channels()}, ATTENTION, QKV);
        gradient(&LayerActs::dnorm1, "dnorm1", {N, C}, QKV, NORM1);
    }

    // The classifier works on chunks of tokens, so that no [N, Vp] buffer exists: a power of two of them, whose logits
    // fill a temporary of the device's liking.
    const int64_t Vp = c.padded_vocab();
    int64_t chunk = 64;
    while (2 * chunk * Vp * dtype_size(dtype) <= device_chunk_bytes()) chunk *= 2;
    place({&resf}, "resf", dtype, {N, C}, HEAD, HEAD);
    place({&normf}, "normf", dtype, {N, C}, HEAD, HEAD);
    place({&logits}, "logits", dtype, {std::min(chunk, N), Vp}, HEAD, HEAD);
    place({&losses}, "losses", DType::F32, {N}, HEAD, HEAD);
    place({&sums}, "sums", DType::F64, {shape.world, NUM_STEP_SUMS}, 0, UPDATE);
    const LinearAttentionSizes linear{N, N, c.heads, c.kv_heads, c.head_size, c.head_size, shape.T, false};
    const bool has_linear = c.has_linear_attention();
    const int64_t forward_bytes =
        std::max(attention_forward_scratch(), has_linear ? linear_attention_forward_scratch(linear) : 0);
    if (forward_bytes > 0) place({&forward_scratch}, "forward_scratch", DType::U8, {forward_bytes}, 0, UPDATE);
    if (training) {
        place({&sample_id}, "sample_id", DType::I32, {1}, HEAD, HEAD);
        place({&sample_key}, "sample_key", DType::I64, {2}, HEAD, HEAD);
        if (c.norm == Norm::LayerNorm) place({&meanf}, "meanf", DType::F32, {N}, HEAD, HEAD);
        place({&rstdf}, "rstdf", DType::F32, {N}, HEAD, HEAD);
        place({&dnormf}, "dnormf", dtype, {N, C}, HEAD, HEAD);
        place({&dx}, "dx", dtype, {N, C}, HEAD, UPDATE);
        place({&scalars}, "scalars", DType::U8, {int64_t(sizeof(StepScalars))}, 0, UPDATE);
        const int64_t scratch_bytes = std::max(
            {layernorm_backward_scratch(N, C), rmsnorm_backward_scratch(N, C), embedding_backward_scratch(N, Vp, C),
             attention_backward_scratch(N, c.heads, c.head_size, shape.deterministic, shape.T),
             has_linear ? linear_attention_backward_scratch(linear) : 0,
             c.layers_of('G') ? rmsnorm_backward_scratch(N * c.heads, c.head_size) : 0,
             sum_squares_scratch(parameter_table(c, shape.world).total),
             sampling_scratch(1, c.vocab_size, TRAINING_SAMPLES)});
        place({&scratch}, "scratch", DType::U8, {scratch_bytes}, HEAD, UPDATE);
    }
    plan.assign_offsets(shape.overlap);
}

void Activations::allocate(const Context& ctx) {
    memory = Arena(plan.bytes(), "activations");
    staging = std::make_unique<Staging>(staging_bytes(), STAGING_SLOTS);
    for (const auto& [tensor, entry] : bindings) *tensor = at(plan.entries()[static_cast<size_t>(entry)]);
    loss_sum = sum(ctx.rank, SUM_LOSS);
    if (rope_table) {
        std::vector<float> host(static_cast<size_t>(rope_table.numel()));
        ::rope_table(host_tensor(host.data(), {shape.T, config.head_size / 2, 2}), config.rope_theta,
                     config.rope_scaling);
        copy_to_device(rope_table.data, host.data(), host.size() * sizeof(float), ctx.stream);
    }
}

// The first n tokens' part of a layer's activations: a pass may be over fewer tokens than were planned for.
LayerActs first_tokens(LayerActs a, int64_t n) {
    for (Tensor LayerActs::*field : LAYER_FIELDS) {
        if (a.*field) a.*field = (a.*field).rows(0, n);
    }
    if (a.lse) a.lse = make_tensor(a.lse.data, a.lse.dtype, a.lse.device, {a.lse.shape[0], n});
    return a;
}

// --------------------------------------------------------------------------------------------------------------------
// Forward.

// The tokens of a pass, on the device.
struct Input {
    int64_t n;                          // tokens
    Tensor tokens, targets, positions;  // [n]
    AttentionSequences sequences;
};

Input upload(const Context& ctx, const Activations& acts, const Batch& batch) {
    const int64_t n = static_cast<int64_t>(batch.tokens.size()), S = static_cast<int64_t>(batch.cum_seqlens.size());
    auto put = [&](Tensor planned, const std::vector<int32_t>& host) {
        const Tensor t = planned.rows(0, static_cast<int64_t>(host.size()));
        acts.staging->put(t.data, host.data(), t.bytes(), ctx.stream);
        return t;
    };
    acts.staging->next();
    Input in{n, put(acts.tokens, batch.tokens), {}, put(acts.positions, batch.positions), {}};
    if (!batch.targets.empty()) in.targets = put(acts.targets, batch.targets);
    in.sequences.cum_q = in.sequences.cum_k = put(acts.cum_seqlens, batch.cum_seqlens);
    in.sequences.max_q = in.sequences.max_k = batch.max_seqlen;
    require(S >= 2, "a batch without a sequence");
    return in;
}

// One sequence of given tokens.
Batch single_sequence(const int32_t* tokens, int64_t n) {
    Batch b;
    b.tokens.assign(tokens, tokens + n);
    b.positions.resize(b.tokens.size());
    std::iota(b.positions.begin(), b.positions.end(), 0);
    b.cum_seqlens = {0, static_cast<int32_t>(n)};
    b.max_seqlen = n;
    return b;
}

// out = norm(inp + residual), and the sum is stored; mean, rstd, sum and residual may be null.
void norm_forward(const Context& ctx, const Model& model, Slot slot, int64_t layer, Tensor out, Tensor sum, Tensor mean,
                  Tensor rstd, Tensor inp, Tensor residual) {
    const Range range(ctx.profiler, "norm");
    const float eps = static_cast<float>(model.config.norm_eps);
    const Tensor weight = model.weight(slot, layer), bias = model.weight(static_cast<Slot>(slot + 1), layer);
    if (model.config.norm == Norm::LayerNorm)
        layernorm_forward(out, sum, mean, rstd, inp, residual, weight, bias, eps, ctx.stream);
    else
        rmsnorm_forward(out, sum, rstd, inp, residual, weight, eps, ctx.stream);
}

// What a linear layer is called in a profile.
const char* linear_name(Slot weight) {
    return weight == QKV_W ? "qkv" : weight == PROJ_W ? "proj" : weight == FC_W ? "fc" : "fcproj";
}

void linear_forward(const Context& ctx, const Model& model, Slot slot, int64_t l, Tensor out, Tensor inp) {
    const Range range(ctx.profiler, linear_name(slot));
    matmul_forward(out, inp, model.weight(slot, l), model.weight(static_cast<Slot>(slot + 1), l), ctx.stream);
}

void mlp_forward(const Context& ctx, const Model& model, const LayerActs& a) {
    const Range range(ctx.profiler, "activation");
    switch (model.config.mlp) {
        case Mlp::GELU:
            return gelu_forward(a.act, a.fc, ctx.stream);
        case Mlp::SwiGLU:
            return swiglu_forward(a.act, a.fc, ctx.stream);
        case Mlp::ReLU2:
            return relu2_forward(a.act, a.fc, ctx.stream);
    }
}

// RoPE on q and k where they lie, side by side in the packed rows; backward: on their gradients.
void rotate(const Context& ctx, const Activations& acts, const Input& in, int64_t l, Tensor qkv, bool backward) {
    if (!acts.config.uses_rope(l)) return;
    const Range range(ctx.profiler, "rope");
    rope(split_qk(acts.config, qkv), in.positions, acts.rope_table, backward, ctx.stream);
}

// Kind G: a log decay for each token and KV head.
void gate_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a) {
    if (model.config.attention_type(l) != 'G') return;
    const Range range(ctx.profiler, "gate");
    decay_gate_forward(a.gate, a.norm1, model.weight(GATE_W, l), model.weight(GATE_B, l), ctx.stream);
}

// a.att from a.qkv, by the layer's kind of attention.
void layer_attention_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a,
                             const Activations& acts, const Input& in) {
    const ModelConfig& c = model.config;
    const char kind = c.attention_type(l);
    const QkvHeads x = split_qkv(c, a.qkv);
    const Range range(ctx.profiler, "attention");
    if (kind == 'S') {
        return attention_forward(split_heads(a.att, c.heads), a.lse, x.q, x.k, x.v, in.sequences, c.attention_scale(),
                                 acts.forward_scratch, ctx.stream);
    }
    linear_attention_forward(split_heads(kind == 'G' ? a.mix : a.att, c.heads), a.lse, {}, x.q, x.k, x.v, a.gate, {},
                             {in.sequences.cum_q, in.sequences.max_q}, linear_attention_type(kind),
                             acts.forward_scratch, ctx.stream);
    if (kind == 'G') {
        rmsnorm_forward(head_matrix(a.att, c.heads), {}, head_vector(a.rstd_mix), head_matrix(a.mix, c.heads), {},
                        model.weight(HEADNORM_W, l), static_cast<float>(c.norm_eps), ctx.stream);
    }
}

// A block from its first norm's output to its activation: what recomputation repeats. The last product is left to the
// caller, since the backward pass doesn't need it.
void block_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a, const Activations& acts,
                   const Input& in) {
    linear_forward(ctx, model, QKV_W, l, a.qkv, a.norm1);
    gate_forward(ctx, model, l, a);
    rotate(ctx, acts, in, l, a.qkv, false);
    layer_attention_forward(ctx, model, l, a, acts, in);
    linear_forward(ctx, model, PROJ_W, l, a.proj, a.att);
    norm_forward(ctx, model, NORM2_W, l, a.norm2, a.res2, a.mean2, a.rstd2, a.res1, a.proj);
    if (acts.shape.gelu_epilogue == GeluEpilogue::Both) {
        const Range range(ctx.profiler, "fc");
        matmul_forward_gelu(a.act, a.fc, a.norm2, model.weight(FC_W, l), model.weight(FC_B, l), ctx.stream);
    } else {
        linear_forward(ctx, model, FC_W, l, a.fc, a.norm2);
        mlp_forward(ctx, model, a);
    }
}

// Tokens to the final norm's output (acts.normf).
void forward(const Context& ctx, const Model& model, const Activations& acts, const Input& in) {
    const Range range(ctx.profiler, "forward");
    const int64_t L = model.config.layers;
    LayerActs before{};
    if (model.gatherer) model.gatherer->begin(ctx.stream);
    for (int64_t l = 0; l < L; l++) {
        const LayerActs a = first_tokens(acts.forward[static_cast<size_t>(l)], in.n);
        if (l == 0) {
            const Range embedding(ctx.profiler, "embedding");
            const GatheredGroup weights = model.use(ctx, 0, model.layer_group(0));
            embedding_forward(a.res1, in.tokens, in.positions, model.weight(WTE), model.weight(WPE), ctx.stream);
            norm_forward(ctx, model, NORM1_W, l, a.norm1, {}, a.mean1, a.rstd1, a.res1, {});
        } else {
            norm_forward(ctx, model, NORM1_W, l, a.norm1, a.res1, a.mean1, a.rstd1, before.res2, before.fcproj);
        }
        const GatheredGroup weights =
            model.use(ctx, model.layer_group(l), l + 1 < L ? model.layer_group(l + 1) : model.head_group());
        block_forward(ctx, model, l, a, acts, in);
        linear_forward(ctx, model, FCPROJ_W, l, a.fcproj, a.act);
        before = a;
    }
    auto first = [&](Tensor t) { return t ? t.rows(0, in.n) : t; };
    norm_forward(ctx, model, NORMF_W, -1, first(acts.normf), first(acts.resf), first(acts.meanf), first(acts.rstdf),
                 before.res2, before.fcproj);
}

// The head's logits of rows [begin, end) of normf, in the logits buffer.
Tensor head_logits(const Context& ctx, const Model& model, const Activations& acts, int64_t begin, int64_t end) {
    const Range range(ctx.profiler, "head");
    const GatheredGroup weights = model.use(ctx, model.head_group());
    const Tensor logits = acts.logits.rows(0, end - begin);
    matmul_forward(logits, acts.normf.rows(begin, end), model.weight(model.head()), {}, ctx.stream);
    return logits;
}

// Sums the losses of the batch into loss_sum. Forward only.
void evaluate_loss(const Context& ctx, const Model& model, const Activations& acts, const Input& in, bool accumulate) {
    const int64_t chunk = acts.logits.shape[0];
    for (int64_t begin = 0; begin < in.n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, in.n);
        const Tensor logits = head_logits(ctx, model, acts, begin, end);
        cross_entropy_forward(acts.losses.rows(begin, end), logits, in.targets.rows(begin, end),
                              model.config.vocab_size, ctx.stream);
    }
    sum_losses(acts.loss_sum, acts.losses.rows(0, in.n), accumulate, ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Backward. Parameter gradients are overwritten by the first micro-step and added to by the others (accumulate), so
// nothing is zeroed. Gradients of activations are overwritten. A group's gradient is summed over the ranks from the
// moment that it is closed.

// The head: losses, their gradient, the head's weight gradient and dnormf, chunk by chunk. dloss: 1/(tokens of the
// step).
void head_forward_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                           const Input& in, float dloss, bool accumulate) {
    const int64_t chunk = acts.logits.shape[0];
    const GatheredGroup weights = model.use(ctx, model.head_group());
    const Tensor weight = model.weight(model.head()), dweight = model.gradient(grads, model.head());
    for (int64_t begin = 0; begin < in.n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, in.n);
        const Tensor logits = head_logits(ctx, model, acts, begin, end);
        {
            const Range range(ctx.profiler, "cross_entropy");
            cross_entropy_forward_backward(acts.losses.rows(begin, end), logits, in.targets.rows(begin, end),
                                           model.config.vocab_size, dloss, ctx.stream);
        }
        const Range range(ctx.profiler, "head");
        matmul_backward_weight(dweight, {}, logits, acts.normf.rows(begin, end), accumulate || begin > 0, ctx.stream);
        matmul_backward_input(acts.dnormf.rows(begin, end), logits, weight, false, ctx.stream);
    }
}

// dinp = dresidual + the norm's gradient; dinp and dresidual may be the same tensor. dsum: the bias gradient of the
// linear layer whose output was added to the residual stream here, which is the sum of dinp over the tokens; null: no
// bias.
void norm_backward(const Context& ctx, const Model& model, const Gradients& grads, Slot slot, int64_t layer,
                   Tensor dinp, Tensor dsum, Tensor dout, Tensor dresidual, Tensor inp, Tensor mean, Tensor rstd,
                   Tensor scratch, bool accumulate) {
    const Range range(ctx.profiler, "norm");
    const Tensor weight = model.weight(slot, layer), dweight = model.gradient(grads, slot, layer);
    const Tensor dbias = model.gradient(grads, static_cast<Slot>(slot + 1), layer);
    if (model.config.norm == Norm::LayerNorm) {
        layernorm_backward(dinp, dweight, dbias, dsum, dout, dresidual, inp, weight, mean, rstd, scratch, accumulate,
                           ctx.stream);
    } else {
        rmsnorm_backward(dinp, dweight, dsum, dout, dresidual, inp, weight, rstd, scratch, accumulate, ctx.stream);
    }
}

// A linear layer: gradients of its weight, of its bias where no norm's backward pass has it, and of its input.
void weight_backward(const Context& ctx, const Model& model, const Gradients& grads, Slot slot, int64_t l, Tensor dout,
                     Tensor inp, bool accumulate) {
    const Range range(ctx.profiler, linear_name(slot));
    const bool before_norm = slot == PROJ_W || slot == FCPROJ_W;
    const Tensor dbias = before_norm ? Tensor{} : model.gradient(grads, static_cast<Slot>(slot + 1), l);
    matmul_backward_weight(model.gradient(grads, slot, l), dbias, dout, inp, accumulate, ctx.stream);
}

void linear_backward(const Context& ctx, const Model& model, const Gradients& grads, Slot slot, int64_t l, Tensor dinp,
                     Tensor dout, Tensor inp, bool accumulate) {
    weight_backward(ctx, model, grads, slot, l, dout, inp, accumulate);
    const Range range(ctx.profiler, linear_name(slot));
    matmul_backward_input(dinp, dout, model.weight(slot, l), false, ctx.stream);
}

// Gradient of the activation's input. It takes the place of its gradient (GELU, ReLU²) or of the input (SwiGLU).
Tensor mlp_backward(const Context& ctx, const Model& model, const LayerActs& a) {
    const Range range(ctx.profiler, "activation");
    switch (model.config.mlp) {
        case Mlp::GELU:
            gelu_backward(a.dact, a.dact, a.fc, ctx.stream);
            return a.dact;
        case Mlp::ReLU2:
            relu2_backward(a.dact, a.dact, a.fc, ctx.stream);
            return a.dact;
        case Mlp::SwiGLU:
            swiglu_backward(a.fc, a.dact, a.fc, ctx.stream);
            return a.fc;
    }
    return {};
}

// What the forward pass didn't keep. The same kernels on the same inputs: bitwise the same.
void recompute(const Context& ctx, const Model& model, int64_t l, const LayerActs& a, const Activations& acts,
               const Input& in) {
    const Range range(ctx.profiler, "recompute");
    const Recompute level = acts.shape.recompute;
    if (level >= Recompute::Norms) norm_forward(ctx, model, NORM1_W, l, a.norm1, {}, a.mean1, a.rstd1, a.res1, {});
    if (level == Recompute::Block) return block_forward(ctx, model, l, a, acts, in);
    if (level >= Recompute::Norms) norm_forward(ctx, model, NORM2_W, l, a.norm2, {}, a.mean2, a.rstd2, a.res2, {});
    if (level >= Recompute::Activation) mlp_forward(ctx, model, a);
}

// a.dqkv and a.dgate from a.datt. The gradient of the heads' norm takes the place of its output.
void layer_attention_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l,
                              const LayerActs& a, const Activations& acts, const Input& in, bool accumulate) {
    const ModelConfig& c = model.config;
    const char kind = c.attention_type(l);
    const QkvHeads x = split_qkv(c, a.qkv), d = split_qkv(c, a.dqkv);
    const Range range(ctx.profiler, "attention");
    if (kind == 'S') {
        return attention_backward(d.q, d.k, d.v, split_heads(a.datt, c.heads), x.q, x.k, x.v,
                                  split_heads(a.att, c.heads), a.lse, in.sequences, c.attention_scale(), acts.scratch,
                                  ctx.stream, acts.shape.deterministic);
    }
    if (kind == 'G') {
        rmsnorm_backward(head_matrix(a.att, c.heads), model.gradient(grads, HEADNORM_W, l), {},
                         head_matrix(a.datt, c.heads), {}, head_matrix(a.mix, c.heads), model.weight(HEADNORM_W, l),
                         head_vector(a.rstd_mix), acts.scratch, accumulate, ctx.stream);
    }
    linear_attention_backward(d.q, d.k, d.v, a.dgate, {}, split_heads(kind == 'G' ? a.att : a.datt, c.heads), {}, x.q,
                              x.k, x.v, a.gate, {}, split_heads(kind == 'G' ? a.mix : a.att, c.heads), a.lse,
                              {in.sequences.cum_q, in.sequences.max_q}, linear_attention_type(kind), acts.scratch,
                              ctx.stream);
}

// Kind G: gradients of the gate's weights, and of its input, which is added to dnorm1.
void gate_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l, const LayerActs& a,
                   bool accumulate) {
    if (model.config.attention_type(l) != 'G') return;
    const Range range(ctx.profiler, "gate");
    const Tensor dx = a.dgate_x.columns(0, model.config.kv_heads);
    decay_gate_backward(dx, a.dgate, a.gate, ctx.stream);
    matmul_backward_weight(model.gradient(grads, GATE_W, l), model.gradient(grads, GATE_B, l), dx, a.norm1, accumulate,
                           ctx.stream);
    matmul_backward_input(a.dnorm1, dx, model.weight(GATE_W, l), true, ctx.stream);
}

// dx comes in as the gradient of the block's output and leaves as that of its input.
void block_backward(const Context& ctx, const Model& model, Gradients& grads, int64_t l, const LayerActs& a,
                    const Activations& acts, const Input& in, Tensor dx, bool accumulate) {
    Tensor dfc = a.dact;
    if (acts.shape.gelu_epilogue != GeluEpilogue::Off) {
        weight_backward(ctx, model, grads, FCPROJ_W, l, dx, a.act, accumulate);
        const Range range(ctx.profiler, "fcproj");
        matmul_backward_input_gelu(a.dact, dx, model.weight(FCPROJ_W, l), a.fc, ctx.stream);
    } else {
        linear_backward(ctx, model, grads, FCPROJ_W, l, a.dact, dx, a.act, accumulate);
        dfc = mlp_backward(ctx, model, a);
    }
    linear_backward(ctx, model, grads, FC_W, l, a.dnorm2, dfc, a.norm2, accumulate);
    norm_backward(ctx, model, grads, NORM2_W, l, dx, model.gradient(grads, PROJ_B, l), a.dnorm2, dx, a.res2, a.mean2,
                  a.rstd2, acts.scratch, accumulate);

    linear_backward(ctx, model, grads, PROJ_W, l, a.datt, dx, a.att, accumulate);
    layer_attention_backward(ctx, model, grads, l, a, acts, in, accumulate);
    rotate(ctx, acts, in, l, a.dqkv, true);
    linear_backward(ctx, model, grads, QKV_W, l, a.dnorm1, a.dqkv, a.norm1, accumulate);
    gate_backward(ctx, model, grads, l, a, accumulate);
    if (l) grads.open(model.layer_group(l - 1), ctx.stream);  // its last bias has its gradient here
    norm_backward(ctx, model, grads, NORM1_W, l, dx, l ? model.gradient(grads, FCPROJ_B, l - 1) : Tensor{}, a.dnorm1,
                  dx, a.res1, a.mean1, a.rstd1, acts.scratch, accumulate);
}

// After forward(): the loss (added up in acts.loss_sum) and every gradient. first_micro, last_micro: of the step's
// micro-steps.
void backward(const Context& ctx, const Model& model, Gradients& grads, const Activations& acts, const Input& in,
              float dloss, bool first_micro, bool last_micro = true) {
    const Range range(ctx.profiler, "backward");
    grads.begin(first_micro, last_micro);
    const bool accumulate = grads.accumulate();
    grads.open(model.fp32_group(), ctx.stream);
    grads.open(model.head_group(), ctx.stream);
    head_forward_backward(ctx, model, grads, acts, in, dloss, accumulate);
    sum_losses(acts.loss_sum, acts.losses.rows(0, in.n), !first_micro, ctx.stream);
    if (!model.config.tied) grads.close(model.head_group(), ctx.stream);
    auto first = [&](Tensor t) { return t ? t.rows(0, in.n) : t; };
    const Tensor dx = first(acts.dx);
    const int64_t last = model.config.layers - 1;
    grads.open(model.layer_group(last), ctx.stream);
    norm_backward(ctx, model, grads, NORMF_W, -1, dx, model.gradient(grads, FCPROJ_B, last), first(acts.dnormf), {},
                  first(acts.resf), first(acts.meanf), first(acts.rstdf), acts.scratch, accumulate);
    for (int64_t l = last; l >= 0; l--) {
        const LayerActs a = first_tokens(acts.backward[static_cast<size_t>(l)], in.n);
        const GatheredGroup weights = model.use(ctx, model.layer_group(l), l ? model.layer_group(l - 1) : -1);
        recompute(ctx, model, l, a, acts, in);
        block_backward(ctx, model, grads, l, a, acts, in, dx, accumulate);
        grads.close(model.layer_group(l), ctx.stream);
    }
    if (!model.config.tied) grads.open(0, ctx.stream);
    {
        const Range embedding(ctx.profiler, "embedding");
        // A tied embedding already holds the head's gradient of this micro-step.
        embedding_backward(model.gradient(grads, WTE), model.gradient(grads, WPE), dx, in.tokens, in.positions,
                           acts.scratch, accumulate || model.config.tied, accumulate, ctx.stream);
    }
    grads.close(0, ctx.stream);
    grads.close(model.fp32_group(), ctx.stream);
    grads.end(ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Update.

// Gradients and Adam's moments: arenas with the layout of the weights.
struct Optimizer {
    Arena memory;
    Gradients grads;
    ParamArena m, v;
    std::vector<UpdateSlice> slices;
    std::vector<Event> updated;  // by slice
    AdamWOptions options;

    // Elements of m, and of v.
    static int64_t moments(const Model& model) {
        return model.table.total / model.sharding.parts(model.sharding.splits_optimizer());
    }
    void allocate(const Context& ctx, const Model& model, const AdamWOptions& adamw, double weight_decay,
                  const ReduceOptions& reduce = {}) {
        const ParamTable& table = model.table;
        const Sharding& sharding = model.sharding;
        const int64_t grad_bytes = Gradients::memory(table, sharding, reduce).bytes(), n = moments(model);
        memory = Arena(grad_bytes + 2 * n * 4, "gradients and optimizer");
        const Tensor all = memory.at(0, DType::U8, {memory.bytes()});
        device_fill(all.data, 0, static_cast<size_t>(all.bytes()), ctx.stream);
        grads.allocate(table, sharding, reduce, all.rows(0, grad_bytes), &ctx);
        m = sharding.arena(memory.at(grad_bytes, DType::F32, {n}), sharding.splits_optimizer());
        v = sharding.arena(memory.at(grad_bytes + n * 4, DType::F32, {n}), sharding.splits_optimizer());
        options = adamw;
        slices = make_update_slices(table, sharding, model.arenas, grads, m, v, weight_decay);
        updated = std::vector<Event>(slices.size());
    }
};

// Global norm, clipping, AdamW, and what was updated on other ranks. scale: 1/(scored tokens of the step), which makes
// the sum of losses a mean. grad_unit: what makes the gradients that mean's, where they were divided by more tokens.
void update(const Context& ctx, Model& model, Optimizer& optimizer, const Activations& acts, double scale,
            double grad_unit = 1) {
    const Range range(ctx.profiler, "update");
    const std::vector<UpdateSlice>& slices = optimizer.slices;
    for (size_t i = 0; i < slices.size(); i++)
        sum_squares(acts.sum(ctx.rank, SUM_SQUARES), slices[i].own_grads, i > 0, acts.scratch, ctx.stream);
    ctx.comm->all_gather(acts.sums, acts.sums.rows(ctx.rank, ctx.rank + 1), ctx.stream);
    step_control(acts.scalars, acts.sums, scale, grad_unit, ctx.stream);
    for (size_t i = 0; i < slices.size(); i++) {
        const UpdateSlice& p = slices[i];
        adamw_update(p.params, p.params_T, p.m, p.v, p.grads, p.segments.data(),
                     static_cast<int64_t>(p.segments.size()), optimizer.options, acts.scalars, ctx.stream);
        if (!p.gathered) continue;
        optimizer.updated[i].record(ctx.stream);
        optimizer.updated[i].make_wait(ctx.side);
        const Range gathering(ctx.profiler, "all_gather of updated weights", ctx.side);
        ctx.comm->all_gather(p.gathered, model.sharding.own(p.gathered), ctx.side);
        optimizer.updated[i].record(ctx.side);
    }
    if (!model.sharding.splits_optimizer()) return;
    const Range waiting(ctx.profiler, "wait for weights");
    for (size_t i = 0; i < slices.size(); i++)
        if (slices[i].gathered) optimizer.updated[i].make_wait(ctx.stream);
}

StepScalars read_scalars(const Context& ctx, const Activations& acts) {
    StepScalars s;
    copy_to_host(&s, acts.scalars.data, sizeof s, ctx.stream);
    return s;
}

void write_scalars(const Context& ctx, const Activations& acts, const StepScalars& s) {
    copy_to_device(acts.scalars.data, &s, sizeof s, ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Evaluation and sampling with a model in memory.

// Scores a split's tokens once, up to limit of them (0: all), each rank its share of the batches.
Evaluation evaluate(const Context& ctx, const Model& model, const Activations& acts, const TokenFiles& files,
                    int32_t end_of_text, int64_t limit, int64_t split_bytes) {
    const EvalBatches batches{files, acts.shape.B, acts.shape.T, model.config.vocab_size, end_of_text, limit};
    return evaluate(ctx, batches, split_bytes, acts.loss_sum, [&](const Batch& batch, bool accumulate) {
        const Input in = upload(ctx, acts, batch);
        forward(ctx, model, acts, in);
        evaluate_loss(ctx, model, acts, in, accumulate);
    });
}

// Draws the token that follows `tokens` with the memory of a training run, which has no cache: it computes the whole
// context again, or the last of it that the batch has room for. All ranks take part and go on with rank 0's token.
int32_t next_token(const Context& ctx, const Model& model, const Activations& acts, const std::vector<int32_t>& tokens,
                   uint64_t seed, int64_t step) {
    const int64_t window = std::min(static_cast<int64_t>(tokens.size()), acts.shape.T);
    const Input in = upload(ctx, acts, single_sequence(tokens.data() + tokens.size() - size_t(window), window));
    forward(ctx, model, acts, in);
    const Tensor logits = head_logits(ctx, model, acts, window - 1, window);
    const int64_t key[2] = {0, step};
    copy_to_device(acts.sample_key.data, key, sizeof key, ctx.stream);
    SamplingOptions sampling = TRAINING_SAMPLES;
    sampling.seed = seed;
    sample_tokens(acts.sample_id, logits, model.config.vocab_size, acts.sample_key.rows(0, 1),
                  acts.sample_key.rows(1, 2), sampling, {}, acts.scratch, ctx.stream);
    ctx.wait_for_all("sampling");
    int32_t id;
    copy_to_host(&id, acts.sample_id.data, sizeof id, ctx.stream);
    ctx.comm->broadcast_host(id, 0);
    return id;
}

// --------------------------------------------------------------------------------------------------------------------
// The memory plan, printed before anything is allocated.

MemoryPlan memory_plan(const Model& model) {
    const int64_t size = dtype_size(model.precision.dtype);
    MemoryPlan plan;
    plan.add("weights", model.kept() * size);
    plan.add("gathered weights", model.gathered() * size);
    plan.add("master weights", model.master() * 4);
    plan.add("fp32 weights", model.fp32() * 4);
    return plan;
}

MemoryPlan memory_plan(const Model& model, const Activations& acts, const ReduceOptions& reduce = {}) {
    MemoryPlan plan = memory_plan(model);
    if (acts.shape.training) {
        const Gradients::Memory grads = Gradients::memory(model.table, model.sharding, reduce);
        plan.add("gradients", grads.arena * 4);
        plan.add("gradients in progress", grads.slots * 4 + grads.buffer_bytes);
        plan.add("optimizer (m, v)", 2 * Optimizer::moments(model) * 4);
        if (model.sharding.world > 1) plan.add("collectives", comm_overhead_bytes());
    }
    plan.add("activations", acts.plan.bytes());
    plan.add("program and libraries", device_overhead_bytes());
    return plan;
}

MemoryPlan memory_plan(const Model& model, const Engine& engine) {
    MemoryPlan plan = memory_plan(model);
    plan.add("KV cache", engine.cache_bytes());
    if (engine.state_bytes()) plan.add("linear states", engine.state_bytes());
    plan.add("activations", engine.activation_bytes());
    plan.add("program and libraries", device_overhead_bytes());
    return plan;
}

// --------------------------------------------------------------------------------------------------------------------
// Training.

ReduceOptions reduce_options(const ShardingOptions& o) {
    return {o.reduce_dtype == "bf16" ? DType::BF16 : DType::F32, o.bucket_mib << 20};
}

class Trainer {
  public:
    Trainer(const Context& context, TrainSetup setup);
    ~Trainer();
    void run();
    void queue_step(Loader& loader);
    LoaderOptions loader_options() const;

  private:
    // A step that the device works on. The host looks at its scalars one step later, so that it never waits for a
    // device that has nothing else to do.
    struct QueuedStep {
        int64_t step = 0;
        Event begin, end;
        HostMemory memory{host_alloc(sizeof(StepScalars)), host_free};  // that the device copies the scalars to
        StepScalars* scalars() const { return static_cast<StepScalars*>(memory.get()); }
    };

    void start();    // weights, optimizer and step: fresh, or from the checkpoint
    void warm_up();  // algorithms and graphs
    void adopt_checkpoint_choices();
    void micro_step(const Batch& batch, bool first, bool last, bool replay = true);
    bool stopping() const;
    void tell(const std::string& text) const;  // on stderr, once
    void finish_step(RunLog& log, Progress& progress);
    void evaluate_split(RunLog& log, Progress& progress);
    void sample_text(Progress& progress);
    void save(Progress& progress);

    const Context& ctx;
    const TrainSetup s;
    const TrainOptions& o;
    const DType dtype;
    std::unique_ptr<Tokenizer> tokenizer;  // null: no samples of text
    int64_t val_bytes;

    Model model;
    Activations acts;
    Optimizer optimizer;
    int64_t step = 0, saved_step = -1;
    double val_loss = NAN;         // at this step, if it was evaluated
    std::vector<Batch> one_batch;  // for --overfit-one-batch
    Graph graphs[2][2];            // a micro-step: whether it is a step's first, and of several ranks' its last
    QueuedStep queue[2];
    int64_t queued = 0, finished = 0;  // steps of this process
    int64_t skips_in_a_row = 0;
    bool stop = false;                          // a rank was asked to, before a step that is finished
    double peak_flops = 0, measured_flops = 0;  // what MFU is of; a product measured at the start
    const AbortOnFailure abort_on_failure{ctx};
};

void Trainer::tell(const std::string& text) const {
    if (ctx.rank == 0) std::cerr << text;
}

Trainer::Trainer(const Context& context, TrainSetup setup)
    : ctx(context),
      s(std::move(setup)),
      o(s.o),
      dtype(o.model.type()),
      val_bytes(s.val_files ? text_bytes(s.data, *s.val_files, false) : 0),
      model(s.source.config, {o.sharding.zero_stage, ctx.rank, ctx.world},
            {dtype, dtype != DType::F32 && o.master_weights}),
      acts(s.source.config, {o.batch_size, o.seq_len, true, o.recompute, true, ctx.world, dtype,
                             dtype == DType::F32 ? GeluEpilogue::Off : o.gelu_epilogue, !o.nondeterministic}) {
    if (!s.data.tokenizer_path().empty()) tokenizer = std::make_unique<Tokenizer>(s.data.tokenizer_path());
    const MemoryPlan plan = memory_plan(model, acts, reduce_options(o.sharding));
    plan.check([&](int64_t available) {
        return what_fits(o, ctx.world, available, [&](int64_t stage, int64_t B, Recompute level) {
            RunShape shape = acts.shape;
            shape.B = B, shape.recompute = level;
            return memory_plan(Model(model.config, {stage, ctx.rank, ctx.world}, model.precision),
                               Activations(model.config, shape), reduce_options(o.sharding))
                .total;
        });
    });
    make_directories(o.out);  // before the plan: a run that is refused prints nothing else
    tell(str(s.source.name, ": ", describe(model.config, model.table.num_weights()), ", ", dtype_name(dtype), "\n",
             device_description(), ", ", matmul_library(), "\n",
             ctx.world > 1 ? str(ctx.world, " ranks, ZeRO stage ", o.sharding.zero_stage, "\n") : "", "memory plan\n",
             plan.text(ctx.in_use_before)));
    peak_flops = dense_peak_flops(device_name(), dtype);
    // Before the arenas are there: it takes memory of its own.
    if (o.measure_peak || !peak_flops) measured_flops = measured_peak_flops(ctx.stream, dtype);
    tell(str("MFU is a fraction of ", with_commas(std::llround((peak_flops ? peak_flops : measured_flops) / 1e9)),
             " GFLOP/s", ctx.world > 1 ? " of each rank, " : ", ",
             peak_flops ? str("the dense ", dtype_name(dtype), " peak of ", device_name())
                        : str("a matrix product in ", dtype_name(dtype), " measured now"),
             "\n"));
    if (!peak_flops) peak_flops = measured_flops;
    model.allocate(ctx);
    acts.allocate(ctx);
    optimizer.allocate(ctx, model, {static_cast<float>(o.beta1), static_cast<float>(o.beta2), 1e-8f, o.seed},
                       o.weight_decay, reduce_options(o.sharding));
    start();
    warm_up();
    if (ctx.rank == 0) write_file(join_path(o.out, "run.toml"), o.toml);
}

// The device may still be at work on a step, and write to its scalars.
Trainer::~Trainer() {
    if (abort_on_failure.failed()) return;
    try {
        synchronize(ctx.stream);
    } catch (const Error&) {  // a destructor has nobody to tell
    }
}

void Trainer::start() {
    StepScalars scalars{};
    if (!s.checkpoint.empty()) {
        load_state(join_path(s.checkpoint, "state.safetensors"), model.table, {model.arenas, optimizer.m, optimizer.v});
        step = saved_step = s.first_step;
        scalars.t = s.adam_steps;
    } else if (!s.source.directory.empty()) {
        load_weights(s.source.directory, model.table, model.arenas);
    } else {
        initialise_weights(model.table, model.arenas, o.seed, ctx.stream);
    }
    write_scalars(ctx, acts, scalars);
}

// Picks the algorithms of the matrix products and records the graphs, so that all steps are alike. Every number that
// this computes is overwritten by the first step.
void Trainer::warm_up() {
    if (!graphs_replay()) return;
    if (o.gemm_tune) load_matmul_cache(ctx.stream);
    adopt_checkpoint_choices();
    matmul_tuning(o.gemm_tune && ctx.rank == 0, ctx.stream);
    Batch batch;
    const size_t N = static_cast<size_t>(o.batch_size * o.seq_len);
    batch.tokens = batch.targets = batch.positions = std::vector<int32_t>(N, 0);
    for (int64_t b = 0; b <= o.batch_size; b++) batch.cum_seqlens.push_back(static_cast<int32_t>(b * o.seq_len));
    batch.max_seqlen = o.seq_len;
    const auto micro_steps = [&](bool replay) {
        for (int64_t micro = 0; micro < s.micro_steps; micro++) {
            const bool first = micro == 0, last = micro + 1 == s.micro_steps;
            if (first || last || micro == 1) micro_step(batch, first, last, replay);
        }
    };
    if (ctx.world > 1) {  // rank 0's choices for all, made before any is recorded
        micro_steps(false);
        ctx.wait_for_all("warm-up");
        std::string chosen = matmul_choices(ctx.stream, true);
        ctx.comm->broadcast_host(chosen, 0);
        matmul_use_choices(chosen, ctx.stream, true);
    }
    micro_steps(true);
    matmul_tuning(false, ctx.stream);
    if (o.gemm_tune && ctx.rank == 0) store_matmul_cache(ctx.stream);
    ctx.wait_for_all("warm-up");
}

// A resumed run takes the algorithms that its checkpoint names, so that it computes the same bits.
void Trainer::adopt_checkpoint_choices() {
    bool ours;
    try {
        ours = matmul_use_choices(s.gemm_choices, ctx.stream, true);
    } catch (const Error&) {
        throw Error(str(join_path(s.checkpoint, "trainer.json"),
                        ": key 'gemm' is damaged; set it to \"\" to have the algorithms chosen again"));
    }
    if (!ours) {
        tell(
            "the checkpoint's matrix products were chosen on another GPU or library: choosing again, so results may "
            "differ in the last digits\n");
    }
}

// Forward and backward over one batch, whose gradients are added to those that are there or, the first of a step, take
// their place.
void Trainer::micro_step(const Batch& batch, bool first, bool last, bool replay) {
    const Input in = upload(ctx, acts, batch);
    auto work = [&] {
        forward(ctx, model, acts, in);
        backward(ctx, model, optimizer.grads, acts, in, static_cast<float>(1.0 / double(o.total_batch_tokens)), first,
                 last);
    };
    // With documents the number of sequences changes from batch to batch, and the kernels' grids with it. What a
    // profiler is to see can't be replayed.
    if (o.document_mask || ctx.profiler.on() || !replay)
        work();
    else
        graphs[first][last && ctx.world > 1].run(ctx.stream, work);
}

// One optimizer step: micro-steps whose gradients add up, then the update. The host goes ahead of the device, by no
// more batches than Staging has slots.
void Trainer::queue_step(Loader& loader) {
    QueuedStep& q = queue[queued % 2];
    q.begin.record(ctx.stream);
    StepScalars settings{};
    settings.lr = static_cast<float>(learning_rate(o, step));
    settings.grad_clip = static_cast<float>(o.grad_clip);
    acts.staging->next();
    acts.staging->put(acts.scalars.data, &settings, offsetof(StepScalars, loss), ctx.stream);
    const double asked_to_stop = stop_requested();
    acts.staging->put(acts.sum(ctx.rank, SUM_STOP).data, &asked_to_stop, sizeof asked_to_stop, ctx.stream);
    int64_t scored = 0;
    for (int64_t micro = 0; micro < s.micro_steps; micro++) {
        if (o.overfit_one_batch && static_cast<int64_t>(one_batch.size()) < s.micro_steps)
            one_batch.push_back(loader.next());
        const Batch& batch = o.overfit_one_batch ? one_batch[static_cast<size_t>(micro)] : loader.next();
        micro_step(batch, micro == 0, micro + 1 == s.micro_steps);
        scored += batch.scored;
    }
    // The gradients are those of a sum over total_batch_tokens: recorded graphs hold that number. A step whose tokens
    // are all masked has none.
    const double count = double(std::max<int64_t>(scored, 1));
    update(ctx, model, optimizer, acts, 1 / count, double(o.total_batch_tokens) / count);
    copy_to_host_async(q.scalars(), acts.scalars.data, sizeof(StepScalars), ctx.stream);
    q.end.record(ctx.stream);
    if (ctx.world > 1) ctx.comm->watch(str("step ", step + 1), ctx.stream);
    q.step = ++step;
    queued++;
    val_loss = NAN;
}

// Waits for the oldest queued step and tells of it.
void Trainer::finish_step(RunLog& log, Progress& progress) {
    const QueuedStep& q = queue[finished++ % 2];
    ctx.wait(q.end);
    const StepScalars& r = *q.scalars();
    stop |= r.stop != 0;
    const double ms = elapsed_ms(q.begin, q.end), tokens_per_s = double(o.total_batch_tokens) / ms * 1e3;
    const double flops = tokens_per_s / double(ctx.world) * flop_per_token(model, o.seq_len);
    ordered_json line = {{"step", q.step},           {"loss", r.loss}, {"lr", r.lr},
                         {"grad_norm", r.grad_norm}, {"ms", ms},       {"tokens_per_s", tokens_per_s},
                         {"mfu", flops / peak_flops}};
    if (o.measure_peak) line["of_measured"] = flops / measured_flops;
    if (r.skip) line["skipped"] = true;
    log.write(line);
    char text[160];
    std::snprintf(text, sizeof text, "loss %.4f  lr %.2e  norm %.3f  %.0f tokens/s", r.loss, r.lr, r.grad_norm,
                  tokens_per_s);
    progress.step(q.step, text);

    skips_in_a_row = r.skip ? skips_in_a_row + 1 : 0;
    if (r.skip) progress.note(str("step ", q.step, ": the loss or the gradient is not finite; update skipped"));
    require(skips_in_a_row < o.max_skips, "stopped at step ", q.step, ": loss or gradient not finite ", skips_in_a_row,
            " times in a row; the weights are those of step ", q.step - skips_in_a_row,
            "; lower --lr or raise --warmup, and start from the last checkpoint");
}

void Trainer::evaluate_split(RunLog& log, Progress& progress) {
    const Evaluation e = evaluate(ctx, model, acts, *s.val_files, s.data.end_of_text, o.eval_tokens, val_bytes);
    val_loss = e.loss();
    log.write({{"step", step}, {"val_loss", e.loss()}, {"bits_per_byte", e.bits_per_byte()}});
    char text[128];
    int length = std::snprintf(text, sizeof text, "step %" PRId64 "  val_loss %.4f", step, e.loss());
    if (e.bytes > 0) std::snprintf(text + length, sizeof text - length, "  bits_per_byte %.4f", e.bits_per_byte());
    progress.note(text);
}

// Ranks stop together: after the same step, which the step's own numbers tell all of them.
bool Trainer::stopping() const {
    return ctx.world > 1 ? stop : stop_requested();
}

void Trainer::sample_text(Progress& progress) {
    CompletionOptions options;
    options.max_tokens = 64;
    Completion answer(tokenizer.get(), options);
    std::vector<int32_t> tokens = {start_token(model.config, tokenizer.get())};
    do {
        tokens.push_back(next_token(ctx, model, acts, tokens, o.seed, int64_t(tokens.size()) - 1));
    } while (!answer.add(tokens.back()));
    progress.note(str("step ", step, "  sample: ", answer.text()));
}

void Trainer::save(Progress& progress) {
    if (saved_step == step) return;
    ctx.wait_for_all("a checkpoint");
    char name[32];
    std::snprintf(name, sizeof name, "step_%08" PRId64, step);
    const std::string path = join_path(o.out, name);
    write_checkpoint(
        ctx, path, model.table, {model.arenas, optimizer.m, optimizer.v}, [&](const std::string& directory) {
            save_model_files(directory, model.config, s.source.original_config, {s.source.directory, s.data.path});
            write_json(join_path(directory, "trainer.json"), {{"step", step},
                                                              {"adam_steps", read_scalars(ctx, acts).t},
                                                              {"samples", step * (o.total_batch_tokens / o.seq_len)},
                                                              {"seed", o.seed},
                                                              {"seq_len", o.seq_len},
                                                              {"total_batch_tokens", o.total_batch_tokens},
                                                              {"data", s.data_fingerprint},
                                                              {"dtype", dtype_name(dtype)},
                                                              {"gemm", matmul_choices(ctx.stream, true)},
                                                              {"val_loss", val_loss}});
        });
    if (ctx.rank == 0) remove_old_checkpoints(o.out, o.keep, best_checkpoint(o.out));
    ctx.comm->barrier();
    saved_step = step;
    progress.note("saved " + path);
}

LoaderOptions Trainer::loader_options() const {
    LoaderOptions options;
    options.B = o.batch_size;
    options.T = o.seq_len;
    options.micro_steps = s.micro_steps;
    options.rank = ctx.rank;
    options.world = ctx.world;
    options.seed = o.seed;
    options.documents = o.document_mask;
    options.end_of_text = s.data.end_of_text;
    options.vocab_size = model.config.vocab_size;
    return options;
}

void Trainer::run() {
    RunLog log(ctx.rank == 0 ? join_path(o.out, "log.jsonl") : "", step);
    Progress progress(o.steps, step, ctx.rank == 0);
    Loader loader(s.train_files, loader_options(), o.overfit_one_batch ? 0 : step);  // resumed, the same one batch
    progress.note(str(step ? str("resumed from ", s.checkpoint, "; ") : "", with_commas(s.train_files.size()),
                      " training tokens in ", with_commas(loader.num_windows()), " windows (", loader.dropped_tokens(),
                      " tokens at the end left out), ", with_commas(o.total_batch_tokens), " a step"));
    catch_stop_signals();
    while (step < o.steps && !stopping()) {
        if (step + 1 == o.profile) ctx.profiler.start(ctx.stream);
        queue_step(loader);
        if (ctx.profiler.on()) {
            ctx.profiler.stop();
            progress.note(str("step ", step, " by its parts\n", ctx.profiler.report()));
        }
        const bool last = step == o.steps,
                   evaluating = s.val_files && (last || (o.eval_every && step % o.eval_every == 0)),
                   sampling = tokenizer && o.sample_every && step % o.sample_every == 0,
                   saving = last || (o.save_every && step % o.save_every == 0);
        // The step before is finished, this one where it is already done or something is about to look at the model.
        // Several ranks know the same: each would see another moment.
        while (finished < queued && (queued - finished > 1 || evaluating || sampling || saving ||
                                     (ctx.world == 1 && queue[finished % 2].end.reached()))) {
            finish_step(log, progress);
        }
        if (evaluating) evaluate_split(log, progress);
        if (sampling) sample_text(progress);
        if (saving) save(progress);
    }
    while (finished < queued) finish_step(log, progress);
    progress.finish();
    save(progress);
    if (step < o.steps) progress.note(str("stopped at step ", step, "; 'train --resume --out ", o.out, "' goes on"));
}

// --------------------------------------------------------------------------------------------------------------------
// The commands.

void run_train(const Args& args) {
    TrainOptions options = parse_train(args);
    if (const int64_t ranks = ranks_to_start(options.launch)) {
        check_training(options, ranks);  // what is wrong is said once, and at once
        Args command = {"train"};
        command.insert(command.end(), args.begin(), args.end());
        return run_ranks(ranks, command);
    }
    const Context ctx(join_world(options.launch));
    TrainSetup setup = check_training(std::move(options), ctx.world);
    if (setup.first_step >= setup.o.steps) {
        if (ctx.rank > 0) return;
        std::cerr << setup.o.out << " is done: step " << setup.first_step << " of " << setup.o.steps
                  << "; raise --steps to go on\n";
        return;
    }
    Trainer(ctx, std::move(setup)).run();
}

constexpr const char* NO_WEIGHTS = " is a preset without weights; name a model directory or a run";
constexpr const char* SMALLER_INFERENCE =
    "give it fewer tokens at a time, a --dtype of 16 bits where this backend has one, or a smaller model";

// A model with its weights, and activations for one pass over B sequences of T tokens.
struct LoadedModel {
    ModelSource source;
    Model model;
    Activations acts;

    LoadedModel(const Context& ctx, const ModelSource& from, const RunShape& shape)
        : source(from), model(source.config, {}, {shape.dtype}), acts(source.config, shape) {
        require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
        memory_plan(model, acts).check([](int64_t) { return SMALLER_INFERENCE; });
        model.allocate(ctx);
        load_weights(source.directory, model.table, model.arenas);
        acts.allocate(ctx);
    }
};

// The weights as infer/ knows them.
InferenceWeights inference_weights(const Model& model) {
    const auto norm = [&](Slot slot, int64_t l) {
        return NormWeights{model.weight(slot, l), model.weight(static_cast<Slot>(slot + 1), l)};
    };
    const auto linear = [&](Slot slot, int64_t l) {
        return LinearWeights{model.weight(slot, l), model.weight(static_cast<Slot>(slot + 1), l)};
    };
    InferenceWeights w{model.weight(WTE), model.weight(WPE), {}, norm(NORMF_W, -1), model.weight(model.head())};
    for (int64_t l = 0; l < model.config.layers; l++) {
        w.blocks.push_back({norm(NORM1_W, l), norm(NORM2_W, l), linear(QKV_W, l), linear(PROJ_W, l), linear(FC_W, l),
                            linear(FCPROJ_W, l), linear(GATE_W, l), model.weight(HEADNORM_W, l)});
    }
    return w;
}

// A model with its weights, or random ones, and what generates with it.
struct LoadedEngine {
    Model model;
    Engine engine;

    LoadedEngine(const Context& ctx, const ModelSource& source, const EngineOptions& options, bool random_weights)
        : model(source.config, {}, {options.dtype}), engine(source.config, options, ctx.stream) {
        require(random_weights || !source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
        memory_plan(model, engine).check([](int64_t) { return SMALLER_INFERENCE; });
        model.allocate(ctx);
        if (random_weights)
            initialise_weights(model.table, model.arenas, options.sampling.seed, ctx.stream);
        else
            load_weights(source.directory, model.table, model.arenas);
        load_matmul_cache(ctx.stream);
        engine.allocate(inference_weights(model));
        store_matmul_cache(ctx.stream);
    }
};

// A forward pass over B sequences of T tokens.
RunShape inference_shape(int64_t B, int64_t T, DType dtype) {
    RunShape shape{B, T};
    shape.dtype = dtype;
    return shape;
}

// A tensor of any of the float dtypes on the host.
std::vector<float> fetch_floats(const Context& ctx, const Tensor& t) {
    std::string bytes(static_cast<size_t>(t.bytes()), '\0');
    copy_to_host(bytes.data(), t.data, bytes.size(), ctx.stream);
    std::vector<float> values(static_cast<size_t>(t.numel()));
    convert_to_float(values.data(), bytes.data(), t.dtype, t.numel());
    return values;
}

// One "key value" a line, or a JSON object.
void print_result(const ordered_json& result, bool as_json) {
    if (as_json) std::cout << result.dump() << "\n";
    for (const auto& [key, value] : result.items())
        if (!as_json) std::cout << key << " " << value << "\n";
}

void run_multiple_choice(const EvalOptions& o) {
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const std::vector<Question> questions = read_questions(o.multiple_choice);
    const Tokenizer tokenizer(join_path(source.directory, "tokenizer.json"));
    const std::vector<Choice> choices = make_choices(questions, tokenizer, source.config.vocab_size);
    int64_t T = o.seq_len;
    if (!T) {
        for (const Choice& c : choices) T = std::max(T, int64_t(c.tokens.size() + tokenizer.start_of_text().size()));
        if (source.config.positions == Positions::Learned) T = std::min(T, source.config.max_positions);
    }
    const LoadedModel m(ctx, source, inference_shape(o.batch_size, T, o.model.type()));
    const auto losses = [&](const Batch& batch) {
        const Input in = upload(ctx, m.acts, batch);
        forward(ctx, m.model, m.acts, in);
        evaluate_loss(ctx, m.model, m.acts, in, false);
        return fetch_floats(ctx, m.acts.losses.rows(0, in.n));
    };
    const ChoiceScorer scorer{tokenizer.start_of_text(), start_token(source.config, &tokenizer), o.batch_size, T,
                              losses};
    const ChoiceAccuracy result = choice_accuracy(questions, choices, score_choices(choices, scorer));
    print_result({{"accuracy", result.accuracy}, {"accuracy_norm", result.by_byte}, {"count", questions.size()}},
                 o.json);
}

void run_eval(const Args& args) {
    const EvalOptions o = parse_eval(args);
    if (!o.multiple_choice.empty()) return run_multiple_choice(o);
    const Context ctx;
    const DataDirectory data = open_data(o.data);
    const bool train_split = o.split == "train";
    const TokenFiles files(train_split ? data.train_pattern() : data.val_pattern());
    const ModelSource source = o.model.resolve(0);
    check_same_tokenizer(data, source);
    int64_t T = o.seq_len;
    if (!T && !source.directory.empty()) T = trained_seq_len(source.directory);
    if (T <= 0) T = std::min<int64_t>(source.config.max_positions, 1024);
    const LoadedModel m(ctx, source, inference_shape(o.batch_size, T, o.model.type()));
    const Evaluation e =
        evaluate(ctx, m.model, m.acts, files, data.end_of_text, 0, text_bytes(data, files, train_split));
    print_result({{"tokens", e.tokens},
                  {"bytes", e.bytes},
                  {"val_loss", e.loss()},
                  {"perplexity", std::exp(e.loss())},
                  {"bits_per_byte", e.bits_per_byte()}},
                 o.json);
}

SamplingOptions sampling_options(const SamplingFlags& o) {
    return {float(o.temperature), o.top_k, o.seed, float(o.top_p), float(o.min_p), float(o.repeat_penalty)};
}

void run_sample(const Args& args) {
    const SampleOptions o = parse_sample(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const std::string tokenizer_path = join_path(source.directory, "tokenizer.json");
    const bool has_tokenizer = !source.directory.empty() && path_exists(tokenizer_path);
    require(has_tokenizer || o.random_weights, source.name,
            " has no tokenizer.json, which reading and writing text needs; put the model's own beside config.json");
    std::unique_ptr<Tokenizer> tokenizer;
    if (has_tokenizer) tokenizer = std::make_unique<Tokenizer>(tokenizer_path);

    SampleJob job;
    job.prompts = o.prompt_file.empty() ? std::vector<std::string>{o.prompt} : split_prompts(read_file(o.prompt_file));
    int64_t longest = 0;
    for (const std::string& prompt : job.prompts) {
        job.tokens.push_back(prompt_tokens(prompt, source, tokenizer.get()));
        longest = std::max(longest, int64_t(job.tokens.back().size()));
    }
    EngineOptions engine_options;
    engine_options.slots = std::min(int64_t(job.prompts.size()) * o.num_samples, o.batch_size);
    engine_options.context = o.context ? o.context : longest + o.max_tokens;
    if (!o.context && source.config.positions == Positions::Learned)
        engine_options.context = std::min(engine_options.context, source.config.max_positions);
    engine_options.dtype = o.model.type();
    engine_options.sampling = sampling_options(o.draw);
    engine_options.batch_invariant = o.batch_invariant;
    engine_options.logprobs = o.logprobs;
    LoadedEngine m(ctx, source, engine_options, o.random_weights);

    job.num_samples = o.num_samples;
    job.answer.max_tokens = o.max_tokens;
    job.answer.stop = o.stop;
    if (!o.ignore_eos) job.answer.eos = end_tokens(source, tokenizer.get());
    job.policy = {o.slide, o.keep};
    job.json = o.json;
    sample(
        m.engine, job, tokenizer.get(), [&] { return measured_read_bandwidth(ctx.stream); }, std::cout, std::cerr);
}

void run_chat(const Args& args) {
    const ChatCommandOptions o = parse_chat(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    const ChatTemplate format = find_chat_template(source.directory);
    const Tokenizer tokenizer(join_path(source.directory, "tokenizer.json"));
    EngineOptions engine_options;
    engine_options.context = o.context ? o.context : std::min<int64_t>(source.config.max_positions, 4096);
    engine_options.dtype = o.model.type();
    engine_options.sampling = sampling_options(o.draw);
    LoadedEngine m(ctx, source, engine_options, false);
    ChatOptions options;
    options.system = o.system_given ? o.system : format.default_system;
    options.answer.max_tokens = o.max_tokens;
    options.answer.eos = end_tokens(source, &tokenizer);
    options.slide = o.slide;
    std::cerr << source.name << ", " << chat_format_name(format.format) << ", a context of " << engine_options.context
              << " tokens; /reset begins anew, /exit ends, Ctrl-C stops an answer\n";
    const GenerateStatistics statistics = chat(m.engine, tokenizer, format, options, std::cin, std::cout,
                                               stop_requested, catch_interrupt, release_interrupt);
    std::cerr << statistics_text(statistics,
                                 bandwidth_to_show(statistics, [&] { return measured_read_bandwidth(ctx.stream); }));
}

void run_logits(const Args& args) {
    const LogitsOptions o = parse_logits(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const int64_t T = static_cast<int64_t>(o.tokens.size()), V = source.config.vocab_size;
    for (const int32_t id : o.tokens) {
        require(id < V, "--tokens: ", id, " is beyond the model's vocabulary of ", V);
    }
    RunShape shape = inference_shape(1, T, o.model.type());
    shape.overlap = o.dump.empty();  // every activation survives until it is dumped
    const LoadedModel m(ctx, source, shape);
    const Input in = upload(ctx, m.acts, single_sequence(o.tokens.data(), T));
    forward(ctx, m.model, m.acts, in);

    std::vector<float> host(static_cast<size_t>(T * V));
    for (int64_t t = 0; t < T; t++) {
        const std::vector<float> row = fetch_floats(ctx, head_logits(ctx, m.model, m.acts, t, t + 1));
        std::copy_n(row.begin(), V, host.begin() + t * V);
    }
    write_npy(o.output, host_tensor(host.data(), {T, V}));
    if (o.dump.empty()) return;
    make_directories(o.dump);
    for (const ArenaPlan::Entry& e : m.acts.plan.entries()) {
        const bool floats = e.dtype == DType::F32 || e.dtype == m.acts.shape.dtype;
        if (!floats || e.name == "logits" || e.name == "losses") continue;
        std::vector<float> values = fetch_floats(ctx, m.acts.at(e));
        write_npy(join_path(o.dump, e.name + ".npy"),
                  make_tensor(values.data(), DType::F32, Device::CPU, e.shape.data(), int(e.shape.size())));
    }
}

void run_plan(const Args& args) {
    const PlanOptions o = parse_plan(args);
    const ModelSource source = o.model.resolve(0);
    const DType dtype = o.model.type();
    const bool training = !o.inference && !o.generate;
    const Precision precision{dtype, dtype != DType::F32 && training && o.master_weights};
    const Model model(source.config, {o.sharding.zero_stage, 0, o.world}, precision);
    const Activations acts(source.config, {o.batch_size, o.seq_len, training, o.recompute, true, o.world, dtype,
                                           GeluEpilogue::Off, !o.nondeterministic});
    const ReduceOptions reduce = reduce_options(o.sharding);
    EngineOptions generation;
    generation.slots = o.batch_size, generation.context = o.seq_len, generation.dtype = dtype;
    const MemoryPlan plan =
        o.generate ? memory_plan(model, Engine(source.config, generation, {})) : memory_plan(model, acts, reduce);
    // Of several ranks: what each stage would need, stage 0 being what one rank alone needs of state.
    std::vector<int64_t> stages;
    for (int64_t stage = 0; o.world > 1 && stage <= 3; stage++)
        stages.push_back(memory_plan(Model(source.config, {stage, 0, o.world}, precision), acts, reduce).total);
    show_plan({source.name, describe(model.config, model.table.num_weights()), model.table.num_weights(),
               flop_per_token(model, o.seq_len), training, o.world, plan, stages,
               o.generate ? std::vector<ArenaPlan::Entry>{} : acts.plan.entries()},
              o.json);
}

void run_convert(const Args& args) {
    convert_model(parse_convert(args), [](const ModelConfig& config) { return parameter_table(config, 1); });
}

void run_info(const Args& args) {
    show_info(parse_info(args));
}

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char** argv) {
    take_signals_in_a_thread();
    return run_program(argc, argv,
                       {{"train", "train a model", run_train},
                        {"eval", "score a split of a data set", run_eval},
                        {"sample", "continue prompts", run_sample},
                        {"chat", "hold a conversation", run_chat},
                        {"logits", "write the logits of given tokens", run_logits},
                        {"plan", "show the memory that a run needs", run_plan},
                        {"convert", "turn a model into another format", run_convert},
                        {"info", "show what a file, a checkpoint or this program is", run_info}});
}
#endif
