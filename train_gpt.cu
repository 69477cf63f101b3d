// train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA.
//
// This file is the model and the training step, from top to bottom in the order in which data flows:
//
//     parameter table → forward → loss → backward → update → evaluation → memory plan → training loop
//
// model.h declares the model and the step, trainer.h the training loop; activations.cpp plans the memory of the
// activations. This file contains no kernels: it calls the launchers of kernels/. g++ compiles it for the CPU and nvcc
// for the GPU; the Makefile decides which definitions of the launchers are linked.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "commands/fit.h"
#include "commands/matmul_cache.h"
#include "commands/run.h"
#include "infer/generate.h"
#include "infer/prompts.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/fp8.h"
#include "kernels/gather_rows.h"
#include "kernels/gelu.h"
#include "kernels/layernorm.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/matmul.h"
#include "kernels/matmul_fp8.h"
#include "kernels/qk_norm_all_heads.h"
#include "kernels/relu2.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/softcap.h"
#include "kernels/swiglu.h"
#include "models/family.h"
#include "models/lora_adapter.h"
#include "models/model_source.h"
#include "parallel/checkpoint.h"
#include "runtime/device/convert.h"
#include "runtime/device/gpu_table.h"
#include "runtime/files/checkpoint.h"
#include "runtime/files/files.h"
#include "runtime/model/heads.h"
#include "runtime/model/initialise.h"
#include "runtime/signals.h"
#include "trainer.h"

using nlohmann::ordered_json;

// --------------------------------------------------------------------------------------------------------------------
// The parameter table: the only list of the model's tensors.

namespace {

// Norms and the decay gate's bias stay fp32 in a 16-bit model too: they are few, and their precision matters. They form
// the last group of the table.
bool stays_fp32(Slot slot) {
    return slot == NORM1_W || slot == NORM1_B || slot == NORM2_W || slot == NORM2_B || slot == NORMF_W ||
           slot == NORMF_B || slot == EMBEDNORM_W || slot == EMBEDNORM_B || slot == QNORM_W || slot == KNORM_W ||
           slot == HEADNORM_W || slot == DECAY_GATE_B;
}

// The standard deviation of a matrix's initial weights. gpt2: by Init::GPT2.
double initial_std(const ModelConfig& c, Slot slot, int64_t inputs, double gpt2) {
    if (c.zero_init && (slot == PROJ_W || slot == FCPROJ_W || slot == HEAD_W)) return 0;
    if (c.init == Init::GPT2) return gpt2;
    const bool lookup_only = slot == WPE || (slot == WTE && !c.tied);
    return lookup_only ? 1 : std::sqrt(0.33 / double(inputs));
}

RateGroup rate_group(Slot slot, bool matrix) {
    if (slot == WTE || slot == WPE) return RateGroup::Embeddings;
    if (slot == HEAD_W) return RateGroup::Head;
    return matrix && slot != DECAY_GATE_W ? RateGroup::HiddenMatrices : RateGroup::Vectors;
}

}  // namespace

ParamTable parameter_table(const ModelConfig& c, int64_t world, OptimizerType hidden_matrices) {
    const Family& family = family_of(c);
    ParamTable table;

    // Adds a parameter of rows × cols; cols = 0 for a vector. Its initial values are normal(0, init_std), or init_value
    // if init_std is 0. sources: the tensors of a Hugging Face checkpoint that it is made of; {}: one of its own name.
    auto add = [&](Slot slot, int64_t layer, const std::string& name, int64_t rows, int64_t cols, double init_std,
                   double init_value, std::vector<SourceTensor> sources) {
        const bool embedding = slot == WTE || slot == WPE || (slot == HEAD_B && c.tied);
        const int64_t group = stays_fp32(slot) ? c.layers + 2 : layer >= 0 ? 1 + layer : embedding ? 0 : 1 + c.layers;
        const int64_t padded = slot == WTE || slot == HEAD_W || slot == HEAD_B ? c.padded_vocab() : rows;
        if (cols > 0) init_std = initial_std(c, slot, cols, init_std);
        if (sources.empty()) sources = {{name, 0, rows, false}};
        table.params.push_back({slot, static_cast<int>(layer), static_cast<int>(group), name, rows, cols, padded,
                                static_cast<float>(init_std), static_cast<float>(init_value), cols > 0,
                                stays_fp32(slot), std::move(sources)});
        Param& p = table.params.back();
        p.rate_group = rate_group(slot, cols > 0);
        if (p.rate_group == RateGroup::HiddenMatrices) p.optimizer = hidden_matrices, p.part_rows = {rows};
    };
    const double weight_std = c.init_std;
    // Each block adds to the residual stream twice. The factor keeps the stream's variance independent of the number of
    // layers (GPT-2, section 2.3).
    const double residual_std = weight_std / std::sqrt(2.0 * double(c.layers));
    const int64_t C = c.channels, V = c.vocab_size, q_rows = c.heads * c.head_size, kv_rows = c.kv_heads * c.head_size;

    auto norm = [&](Slot slot, int64_t layer, const std::string& name, int64_t n) {
        add(slot, layer, name + ".weight", n, 0, 0, 1, source_tensors(family, slot, false, layer, {n}));
    };
    auto norm_of_channels = [&](Slot slot, int64_t layer, const std::string& name) {
        norm(slot, layer, name, C);
        if (c.norm != Norm::LayerNorm) return;
        add(bias_of(slot), layer, name + ".bias", C, 0, 0, 0, source_tensors(family, slot, true, layer, {C}));
    };
    // A linear layer: weight and bias. parts: the rows of the matrices that it fuses (q, k, v; gate, up), which may be
    // tensors of their own in files.
    using Parts = std::vector<int64_t>;
    auto linear = [&](Slot slot, int64_t layer, const std::string& name, const Parts& parts, int64_t cols,
                      double init_std, bool bias) {
        const int64_t rows = std::accumulate(parts.begin(), parts.end(), int64_t(0));
        add(slot, layer, name + ".weight", rows, cols, init_std, 0, source_tensors(family, slot, false, layer, parts));
        table.params.back().part_rows = parts;
        if (!bias) return;
        add(bias_of(slot), layer, name + ".bias", rows, 0, 0, 0, source_tensors(family, slot, true, layer, parts));
    };
    // An embedding or the head.
    auto table_of_rows = [&](Slot slot, const std::string& name, int64_t rows) {
        add(slot, -1, name + ".weight", rows, C, weight_std, 0, source_tensors(family, slot, false, -1, {rows}));
    };

    table_of_rows(WTE, "wte", V);
    if (c.positions == Positions::Learned) table_of_rows(WPE, "wpe", c.max_positions);
    if (c.embedding_norm) norm_of_channels(EMBEDNORM_W, -1, "embednorm");
    for (int64_t l = 0; l < c.layers; l++) {
        const std::string name = str("layers.", l, ".");
        norm_of_channels(NORM1_W, l, name + "norm1");
        linear(QKV_W, l, name + "qkv", {q_rows, kv_rows, kv_rows}, C, weight_std, c.qkv_bias);
        if (c.has_qk_weights()) {
            const bool all_heads = c.qk_norm == QkNorm::AllHeads;
            norm(QNORM_W, l, name + "qnorm", all_heads ? q_rows : c.head_size);
            norm(KNORM_W, l, name + "knorm", all_heads ? kv_rows : c.head_size);
        }
        if (c.attention_type(l) == AttentionType::GatedLinear) {
            // The initial decays σ(bias) of the heads range from 1 − 1/32 to 1 − 1/512: slow enough for gradients to
            // reach far, fast enough for sums to stay small (RetNet's range: Sun et al. 2023, section 3.1).
            const double slowest = std::log(511), fastest = std::log(31);
            add(DECAY_GATE_W, l, name + "gate.weight", c.kv_heads, C, weight_std, 0, {});
            add(DECAY_GATE_B, l, name + "gate.bias", c.kv_heads, 0, 0, fastest, {});
            table.params.back().init_step =
                static_cast<float>((slowest - fastest) / double(std::max<int64_t>(c.kv_heads - 1, 1)));
            norm(HEADNORM_W, l, name + "headnorm", c.head_size);
        }
        linear(PROJ_W, l, name + "proj", {C}, q_rows, residual_std, c.proj_bias);
        norm_of_channels(NORM2_W, l, name + "norm2");
        const Parts fc = c.mlp == Mlp::SwiGLU ? Parts{c.ffn, c.ffn} : Parts{c.ffn};
        linear(FC_W, l, name + "fc", fc, C, weight_std, c.mlp_bias);
        linear(FCPROJ_W, l, name + "fcproj", {C}, c.ffn, residual_std, c.mlp_bias);
    }
    norm_of_channels(NORMF_W, -1, "normf");
    if (!c.tied) table_of_rows(HEAD_W, "head", V);
    if (c.head_bias) add(HEAD_B, -1, "head.bias", V, 0, 0, 0, {});
    std::stable_sort(table.params.begin(), table.params.end(),
                     [](const Param& a, const Param& b) { return a.group < b.group; });
    table.layout(world);
    return table;
}

Model::Model(const ModelConfig& model_config, ParamTable params, const Sharding& ranks, Precision p)
    : config(model_config), table(std::move(params)), precision(p), sharding(ranks) {
    if (sharding.splits_weights()) slots = GroupSlots(table, WeightGatherer::LAYER_SLOTS, false);
}

Model::Model(const ModelConfig& model_config, const Sharding& ranks, Precision p, OptimizerType hidden_matrices,
             Offload to_host, const LoraOptions& lora_options)
    : Model(model_config, parameter_table(model_config, ranks.world, hidden_matrices), ranks, p) {
    offload = to_host;
    if (!lora_options.on()) return;
    table.frozen = true;
    precision.master = false;
    lora = std::make_unique<LoraTable>(table, lora_options, ranks.world, hidden_matrices);
    if (lora_options.nf4) nf4 = std::make_unique<Nf4Base>(table);
    const Sharding whole{std::min<int64_t>(ranks.stage, 2), ranks.rank, ranks.world};
    adapters.reset(new Model(config, lora->params, whole, p));
}

void Model::allocate(const Context& ctx) {
    const int64_t exact = master() * 4;
    memory = Arena(bytes() - exact, "weights");
    master_memory = Arena(exact, "master weights", Offload::place(offload.master));
    int64_t at = 0;
    const auto part = [&](DType dtype, int64_t n) {
        const Tensor t = memory.at(at, dtype, {n});
        at += t.bytes();
        return t;
    };
    arenas.weights = sharding.arena(part(precision.dtype, kept()), sharding.splits_weights());
    if (nf4) arenas.weights.starts = Nf4Base::other_starts(table), nf4->allocate();
    if (gathered()) arenas.weights.views = slots.views(table, part(precision.dtype, gathered()));
    if (master())
        arenas.master = sharding.arena(master_memory.at(0, DType::F32, {master()}), sharding.splits_optimizer());
    if (fp32()) arenas.fp32 = part(DType::F32, fp32());
    arenas.fp32.origin = table.total - table.fp32_total;
    if (gathered()) gatherer = std::make_unique<WeightGatherer>(ctx, table, arenas.weights, slots);
    if (adapters) adapters->allocate(ctx);
}

// 6 FLOP per weight of a matmul (2 forward, 4 backward; a frozen weight has no gradient: 2 backward), plus attention's
// two matmuls: the causal half of [T, T] for softmax, of which a window w < T leaves T·w − w²/2; the recurrent form for
// linear attention (k vᵀ is added to a state, the state is multiplied by q).
double flop_per_token(const Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    double weights = 0;
    for (const Param& p : model.table.params) {
        const bool lookup_only = p.slot == WPE || (p.slot == WTE && !c.tied);
        if (p.cols > 0 && !lookup_only) weights += double(p.numel());
    }
    const double of_weights =
        model.adapters ? 4 * weights + 6 * double(model.adapters->table.num_weights()) : 6 * weights;
    double attention = 0;
    for (int64_t l = 0; l < c.layers; l++) {
        const double w = double(c.window(l)), keys = w > 0 && w < double(T) ? w * (2 - w / double(T)) : double(T);
        if (c.attention_type(l) == AttentionType::Softmax)
            attention += keys * double(c.heads * c.head_size);
        else
            attention += double((c.heads + c.kv_heads) * c.head_size * c.head_size);
    }
    return of_weights + 6 * attention;
}

// --------------------------------------------------------------------------------------------------------------------
// Forward.

namespace {

// The rows of the tokens with a target. On a GPU whole chunks of the head, filled up with −1, so that a recorded
// micro-step fits every batch with as many chunks. Empty: no chunk can be left out.
std::vector<int32_t> find_loss_rows(const Activations& acts, const std::vector<int32_t>& targets) {
    std::vector<int32_t> rows;
    for (size_t n = 0; n < targets.size(); n++)
        if (targets[n] != Batch::NO_TARGET) rows.push_back(static_cast<int32_t>(n));
    const size_t unit = acts.logits.device == Device::CPU ? 1 : size_t(acts.logits.shape[0]);
    const size_t size = std::max<size_t>((rows.size() + unit - 1) / unit, 1) * unit;
    if (size >= targets.size()) return {};
    rows.resize(size, -1);
    return rows;
}

}  // namespace

Input upload(const Context& ctx, const Activations& acts, const Batch& batch, bool loss_tokens_only) {
    const int64_t n = static_cast<int64_t>(batch.tokens.size()), S = static_cast<int64_t>(batch.cum_seqlens.size());
    auto put = [&](Tensor planned, const std::vector<int32_t>& host) {
        const Tensor t = planned.rows(0, static_cast<int64_t>(host.size()));
        acts.staging->put(t.data, host.data(), t.bytes(), ctx.stream);
        return t;
    };
    acts.staging->next();
    Input in{n, put(acts.tokens, batch.tokens), put(acts.positions, batch.positions), {}, {}, {}};
    std::vector<int32_t> rows;
    if (loss_tokens_only) rows = find_loss_rows(acts, batch.targets);
    if (!rows.empty()) {
        in.loss_rows = put(acts.loss_rows, rows);
        for (int32_t& row : rows) row = row < 0 ? Batch::NO_TARGET : batch.targets[size_t(row)];
        in.targets = put(acts.targets, rows);
    } else if (!batch.targets.empty()) {
        in.targets = put(acts.targets, batch.targets);
    }
    in.sequences.cum_q = in.sequences.cum_k = put(acts.cum_seqlens, batch.cum_seqlens);
    in.sequences.max_q = in.sequences.max_k = batch.max_seqlen;
    if (batch.num_sequences > 0) {
        const int32_t count = static_cast<int32_t>(batch.num_sequences);
        in.sequences.count = acts.num_sequences;
        acts.staging->put(acts.num_sequences.data, &count, sizeof count, ctx.stream);
    }
    require(S >= 2, "a batch without a sequence");
    return in;
}

Batch single_sequence(const int32_t* tokens, int64_t n) {
    Batch b;
    b.tokens.assign(tokens, tokens + n);
    b.positions.resize(b.tokens.size());
    std::iota(b.positions.begin(), b.positions.end(), 0);
    b.cum_seqlens = {0, static_cast<int32_t>(n)};
    b.max_seqlen = n;
    return b;
}

namespace {

// What a norm reads and keeps. mean is null for RMSNorm; both mean and rstd are null without a backward pass.
struct NormActs {
    Tensor out, inp, mean, rstd;
};
// Norms before attention and the MLP: inp is the residual stream.
NormActs norm1(const LayerActs& a) {
    return {a.norm1, a.res1, a.mean1, a.rstd1};
}
NormActs norm2(const LayerActs& a) {
    return {a.norm2, a.res2, a.mean2, a.rstd2};
}
// Norms after them: out is the residual stream that follows, of which the backward pass needs nothing.
NormActs norm_after_attention(const LayerActs& a) {
    return {a.res2, a.proj, {}, a.rstd1};
}
NormActs norm_after_mlp(const LayerActs& a, Tensor next_stream) {
    return {next_stream, a.fcproj, {}, a.rstd2};
}
// What the QKV projection reads, and FC.
Tensor qkv_input(const LayerActs& a) {
    return a.norm1 ? a.norm1 : a.res1;
}
Tensor fc_input(const LayerActs& a) {
    return a.norm2 ? a.norm2 : a.res2;
}
Tensor first_rows(const Tensor& t, int64_t n) {
    return t ? t.rows(0, n) : t;
}
NormActs final_norm(const Activations& acts, int64_t n) {
    return {first_rows(acts.normf, n), first_rows(acts.resf, n), first_rows(acts.meanf, n), first_rows(acts.rstdf, n)};
}
// The norm after the embedding. Without a backward pass it works in place.
NormActs embedding_norm(const Activations& acts, Tensor out) {
    const int64_t n = out.shape[0];
    return {out, acts.embedded ? acts.embedded.rows(0, n) : out, first_rows(acts.meane, n), first_rows(acts.rstde, n)};
}

// out = norm(inp + added), and inp + added becomes the residual stream a.inp. If added is null: out = norm(a.inp).
void norm_forward(const Context& ctx, const Model& model, Slot slot, int64_t layer, const NormActs& a, Tensor inp = {},
                  Tensor added = {}) {
    const Range range(ctx.profiler, "norm");
    const float eps = static_cast<float>(model.config.norm_eps);
    const Tensor weight = model.weight(slot, layer), bias = model.weight(bias_of(slot), layer);
    const Tensor sum = added ? a.inp : Tensor{};
    if (!added) inp = a.inp;
    if (model.config.norm == Norm::LayerNorm)
        layernorm_forward(a.out, sum, a.mean, a.rstd, inp, added, weight, bias, eps, ctx.stream);
    else
        rmsnorm_forward(a.out, sum, a.rstd, inp, added, weight, eps, ctx.stream);
}

// The norm after attention or the MLP: a.out = stream + norm(a.inp).
void norm_after_forward(const Context& ctx, const Model& model, Slot slot, int64_t layer, const NormActs& a,
                        Tensor stream) {
    const Range range(ctx.profiler, "norm");
    rmsnorm_add_forward(a.out, a.rstd, a.inp, stream, model.weight(slot, layer),
                        static_cast<float>(model.config.norm_eps), ctx.stream);
}

// The name of a linear layer in a profile.
const char* linear_name(Slot weight) {
    return weight == QKV_W ? "qkv" : weight == PROJ_W ? "proj" : weight == FC_W ? "fc" : "fcproj";
}

// Whether the forward pass runs for the first time, or what it did not keep is computed again.
enum class Pass : uint8_t { First, Again };

// Scratch as a matrix of fp8 codes.
Tensor code_matrix(const Tensor& scratch, int64_t rows, int64_t columns) {
    return make_tensor(scratch.data, scratch.dtype, scratch.device, {rows, columns});
}

// Quantises the input of a linear layer: its rows into acts.fp8_rows (`rows`: the matmul follows), and its columns for
// the backward pass where they are given.
template <typename Produce>
void quantise_input(const Context& ctx, const Activations& acts, Slot slot, int64_t l, int64_t n, bool rows,
                    Tensor columns, Pass pass, Produce produce) {
    const Range range(ctx.profiler, "quantise");
    const Tensor codes = rows ? code_matrix(acts.fp8_rows, n, linear_layer_sizes(acts.config, slot).inputs) : Tensor{};
    acts.fp8->quantise(Fp8Operand::Input, slot, l, codes, columns, pass == Pass::Again, ctx.stream, produce);
}

void quantise_input(const Context& ctx, const Activations& acts, Slot slot, int64_t l, Tensor inp, bool rows,
                    Tensor columns, Pass pass) {
    quantise_input(ctx, acts, slot, l, inp.shape[0], rows, columns, pass,
                   [&](const Fp8Output& out) { fp8_quantise(out, inp, ctx.stream); });
}

// The adapters of a linear layer; a null: it has none.
struct LoraLayer {
    Tensor a, b;
    const std::vector<LoraPart>* parts = nullptr;
    Tensor low_rank;  // s·A·inp of all adapters, [n, parts·R]: the forward pass keeps it
    float scale = 0;  // s
};
Tensor low_rank_of(const LayerActs& a, Slot slot) {
    return slot == QKV_W ? a.lora_qkv : slot == PROJ_W ? a.lora_proj : slot == FC_W ? a.lora_fc : a.lora_fcproj;
}
LoraLayer lora_layer(const Model& model, const Activations& acts, Slot slot, int64_t l, int64_t n) {
    if (!model.adapters) return {};
    const auto parts = model.lora->parts.find({int(slot), l});
    if (parts == model.lora->parts.end()) return {};
    const Tensor a = model.adapters->weight(lora_a(slot), l), b = model.adapters->weight(lora_b(slot), l);
    const Tensor low_rank = low_rank_of(acts.forward[size_t(l)], slot).rows(0, n).columns(0, a.shape[0]);
    return {a, b, &parts->second, low_rank, static_cast<float>(model.lora->options.scale())};
}

// Calls f(rows of B, rows of the layer's output, rows of A) for each adapter: their ranges begin, end.
template <typename F>
void for_each_part(const LoraLayer& lora, F f) {
    const int64_t R = lora.b.shape[1];
    int64_t a = 0, b = 0;
    for (const LoraPart& part : *lora.parts) {
        f(std::pair(b, b + part.rows), std::pair(part.row, part.row + part.rows), std::pair(a, a + R));
        a += R, b += part.rows;
    }
}

// s·B·A·inp, added to out or written to it.
void lora_forward(const Context& ctx, const LoraLayer& lora, Tensor out, Tensor inp, bool adds, Pass pass) {
    const Range range(ctx.profiler, "lora");
    if (pass == Pass::First) matmul(lora.low_rank, inp, lora.a, false, true, false, ctx.stream, lora.scale);
    for_each_part(lora, [&](auto b, auto rows, auto a) {
        (adds ? matmul_forward_add : matmul_forward)(out.columns(rows.first, rows.second),
                                                     lora.low_rank.columns(a.first, a.second),
                                                     lora.b.rows(b.first, b.second), {}, ctx.stream);
    });
}

// The weight of a linear layer as its matmul reads it.
Tensor linear_weight(const Context& ctx, const Model& model, const Activations& acts, Slot slot, int64_t l) {
    if (!model.nf4) return model.weight(slot, l);
    const Range range(ctx.profiler, "dequantise");
    return model.nf4->weight(*model.table.find(slot, static_cast<int>(l)), acts.base_weight, ctx.stream);
}

// out = inp·weightᵀ + bias. fp8: columns receives the quantised input for the backward pass; without inp the rows are
// quantised already. Accumulation may be fast: the operands' rounding is the larger error (docs/low_precision.md).
void linear_forward(const Context& ctx, const Model& model, const Activations& acts, Slot slot, int64_t l, Tensor out,
                    Tensor inp, Tensor columns = {}, Pass pass = Pass::First) {
    const Range range(ctx.profiler, linear_name(slot));
    const Tensor weight = linear_weight(ctx, model, acts, slot, l), bias = model.weight(bias_of(slot), l);
    if (!acts.uses_fp8(l)) {
        // Adapters that reach all of out write it, and the matmul with the weight adds to it: that hides the read in
        // its epilogue, where a thin matmul would wait for it.
        const LoraLayer lora = lora_layer(model, acts, slot, l, out.shape[0]);
        const bool writes = lora.a && lora.b.shape[0] == out.shape[1];
        if (writes) lora_forward(ctx, lora, out, inp, false, pass);
        (writes ? matmul_forward_add : matmul_forward)(out, inp, weight, bias, ctx.stream);
        if (lora.a && !writes) lora_forward(ctx, lora, out, inp, true, pass);
        return;
    }
    if (inp) quantise_input(ctx, acts, slot, l, inp, true, columns, pass);
    const Tensor rows = code_matrix(acts.fp8_rows, out.shape[0], weight.shape[1]);
    matmul_fp8(out, acts.fp8->matrix(Fp8Operand::Input, slot, l, rows),
               acts.fp8->weight(slot, l, false, weight, acts.fp8_weight, ctx.stream), bias, false, true,
               acts.forward_scratch, ctx.stream);
}

Activation activation_of(Mlp mlp) {
    return mlp == Mlp::GELU ? Activation::GELU : mlp == Mlp::SwiGLU ? Activation::SwiGLU : Activation::ReLU2;
}

void mlp_forward(const Context& ctx, const Model& model, const Activations& acts, int64_t l, const LayerActs& a,
                 Pass pass) {
    const Range range(ctx.profiler, "activation");
    if (acts.uses_fp8(l)) {
        const Activation f = activation_of(model.config.mlp);
        return quantise_input(ctx, acts, FCPROJ_W, l, a.fc.shape[0], pass == Pass::First, a.act_t, pass,
                              [&](const Fp8Output& out) { fp8_activation_forward(out, f, a.fc, ctx.stream); });
    }
    if (!a.act) return;  // mlp_half_backward() computes it again
    switch (model.config.mlp) {
        case Mlp::GELU:
            return gelu_forward(a.act, a.fc, ctx.stream);
        case Mlp::SwiGLU:
            return swiglu_forward(a.act, a.fc, ctx.stream);
        case Mlp::ReLU2:
            return relu2_forward(a.act, a.fc, ctx.stream);
    }
}

// What rotates q and k of the layer; null: nothing.
Tensor rope_table_of(const Activations& acts, int64_t l) {
    return acts.config.uses_rope(l) ? acts.rope_table : Tensor{};
}

// Applies QK-norm and RoPE to q and k, which are adjacent in the packed rows: in place, or from qkv to qk if the
// backward pass needs both.
void qk_forward(const Context& ctx, const Model& model, const Activations& acts, const Input& in, int64_t l,
                const LayerActs& a) {
    const ModelConfig& c = model.config;
    const Tensor inp = split_qk(c, a.qkv), table = rope_table_of(acts, l);
    if (c.qk_norm == QkNorm::Off) {
        if (!table) return;
        const Range range(ctx.profiler, "rope");
        return rope(inp, in.positions, table, false, ctx.stream);
    }
    const Range range(ctx.profiler, "qk_norm");
    const QkWeights weight{model.weight(QNORM_W, l), model.weight(KNORM_W, l)};
    const float eps = static_cast<float>(c.norm_eps);
    if (c.qk_norm == QkNorm::AllHeads) {
        const Tensor rows = qk_rows(c, a.qkv);
        return qk_norm_all_heads_forward(a.qk ? a.qk : rows, {a.rstd_q, a.rstd_k}, rows, weight, in.positions, table,
                                         c.heads + c.kv_heads, eps, ctx.stream);
    }
    const Tensor out = a.qk ? split_qk(c, a.qk) : inp;
    qk_norm_forward(out, a.rstd_qk, inp, weight, in.positions, table, c.heads, eps, ctx.stream);
}

// The same for the gradients of q and k, in place in dqkv.
void qk_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                 const Input& in, int64_t l, const LayerActs& a, bool accumulate) {
    const ModelConfig& c = model.config;
    const Tensor d = split_qk(c, a.dqkv), table = rope_table_of(acts, l);
    if (c.qk_norm == QkNorm::Off) {
        if (!table) return;
        const Range range(ctx.profiler, "rope");
        return rope(d, in.positions, table, true, ctx.stream);
    }
    const Range range(ctx.profiler, "qk_norm");
    const QkWeights weight{model.weight(QNORM_W, l), model.weight(KNORM_W, l)};
    const QkWeights dweight{model.gradient(grads, QNORM_W, l), model.gradient(grads, KNORM_W, l)};
    if (c.qk_norm == QkNorm::AllHeads) {
        return qk_norm_all_heads_backward(qk_rows(c, a.dqkv), dweight, qk_rows(c, a.qkv), {a.rstd_q, a.rstd_k}, weight,
                                          in.positions, table, c.heads + c.kv_heads, acts.scratch, accumulate,
                                          ctx.stream);
    }
    qk_norm_backward(d, dweight, d, split_qk(c, a.qkv), a.rstd_qk, weight, in.positions, table, c.heads, acts.scratch,
                     accumulate, ctx.stream);
}

// What attention reads.
QkvHeads attention_inputs(const ModelConfig& c, const LayerActs& a) {
    QkvHeads x = split_qkv(c, a.qkv);
    if (!a.qk) return x;
    const int64_t Q = c.heads * c.head_size;
    x.q = split_heads(a.qk.columns(0, Q), c.heads);
    x.k = split_heads(a.qk.columns(Q, a.qk.shape[1]), c.kv_heads);
    return x;
}

// Gated linear attention: computes a log decay for each token and KV head.
void layer_decay_gate_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a) {
    if (model.config.attention_type(l) != AttentionType::GatedLinear) return;
    const Range range(ctx.profiler, "gate");
    decay_gate_forward(a.log_decay, qkv_input(a), model.weight(DECAY_GATE_W, l), model.weight(DECAY_GATE_B, l),
                       ctx.stream);
}

AttentionSequences softmax_sequences(const ModelConfig& c, const Input& in, int64_t l) {
    AttentionSequences sequences = in.sequences;
    sequences.window = c.window(l);
    return sequences;
}

// Computes a.att from a.qkv, by the layer's attention type.
void layer_attention_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a,
                             const Activations& acts, const Input& in) {
    const ModelConfig& c = model.config;
    const AttentionType type = c.attention_type(l);
    const bool gated = type == AttentionType::GatedLinear;
    const QkvHeads x = attention_inputs(c, a);
    const Range range(ctx.profiler, "attention");
    if (type == AttentionType::Softmax) {
        return attention_forward(split_heads(a.att, c.heads), a.lse, x.q, x.k, x.v, softmax_sequences(c, in, l),
                                 c.attention_scale(), acts.forward_scratch, ctx.stream);
    }
    linear_attention_forward(split_heads(gated ? a.att_unnormed : a.att, c.heads), a.lse, {}, x.q, x.k, x.v,
                             a.log_decay, {}, {in.sequences.cum_q, in.sequences.max_q}, linear_attention_type(gated),
                             acts.forward_scratch, ctx.stream);
    if (gated) {
        rmsnorm_forward(head_matrix(a.att, c.heads), {}, head_vector(a.rstd_att), head_matrix(a.att_unnormed, c.heads),
                        {}, model.weight(HEADNORM_W, l), static_cast<float>(c.norm_eps), ctx.stream);
    }
}

// A block from the input of attention to the MLP's activation: the part that `--recompute block` repeats. The caller
// does the last matmul, because the backward pass does not need that matmul's output.
void block_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a, const Activations& acts,
                   const Input& in, Pass pass) {
    linear_forward(ctx, model, acts, QKV_W, l, a.qkv, qkv_input(a), a.norm1_t, pass);
    layer_decay_gate_forward(ctx, model, l, a);
    qk_forward(ctx, model, acts, in, l, a);
    layer_attention_forward(ctx, model, l, a, acts, in);
    linear_forward(ctx, model, acts, PROJ_W, l, a.proj, a.att, {}, pass);
    if (model.config.norm_after)
        norm_after_forward(ctx, model, NORM1_W, l, norm_after_attention(a), a.res1);
    else
        norm_forward(ctx, model, NORM2_W, l, norm2(a), a.res1, a.proj);
    if (acts.shape.gelu_epilogue == GeluEpilogue::Both) {
        const Range range(ctx.profiler, "fc");
        matmul_forward_gelu(a.act, a.fc, fc_input(a), model.weight(FC_W, l), model.weight(FC_B, l), ctx.stream);
    } else {
        linear_forward(ctx, model, acts, FC_W, l, a.fc, fc_input(a), a.norm2_t, pass);
        mlp_forward(ctx, model, acts, l, a, pass);
    }
}

}  // namespace

void forward(const Context& ctx, const Model& model, const Activations& acts, const Input& in) {
    const Range range(ctx.profiler, "forward");
    const int64_t L = model.config.layers;
    const bool norm_after = model.config.norm_after;
    LayerActs previous{};
    if (model.gatherer) model.gatherer->begin(ctx.stream);
    for (int64_t l = 0; l < L; l++) {
        const LayerActs a = first_tokens(acts.forward[static_cast<size_t>(l)], in.n);
        if (l == 0) {
            const Range embedding(ctx.profiler, "embedding");
            const GatheredGroup weights = model.use(ctx, 0, model.layer_group(0));
            const NormActs e = embedding_norm(acts, a.res1);
            embedding_forward(model.config.embedding_norm ? e.inp : a.res1, in.tokens, in.positions, model.weight(WTE),
                              model.weight(WPE), ctx.stream);
            if (model.config.embedding_norm) norm_forward(ctx, model, EMBEDNORM_W, -1, e);
            if (!norm_after) norm_forward(ctx, model, NORM1_W, l, norm1(a));
        } else if (norm_after) {
            norm_after_forward(ctx, model, NORM2_W, l - 1, norm_after_mlp(previous, a.res1), previous.res2);
        } else {
            norm_forward(ctx, model, NORM1_W, l, norm1(a), previous.res2, previous.fcproj);
        }
        const GatheredGroup weights =
            model.use(ctx, model.layer_group(l), l + 1 < L ? model.layer_group(l + 1) : model.head_group());
        if (acts.in_host_memory(l)) acts.host_inputs->store(l, a.res1);
        block_forward(ctx, model, l, a, acts, in, Pass::First);
        linear_forward(ctx, model, acts, FCPROJ_W, l, a.fcproj, a.act);
        if (acts.in_host_memory(l)) acts.host_inputs->wait();  // then res1 may be overwritten
        previous = a;
    }
    const NormActs last = final_norm(acts, in.n);
    if (norm_after) {
        norm_after_forward(ctx, model, NORM2_W, L - 1, norm_after_mlp(previous, last.inp), previous.res2);
        norm_forward(ctx, model, NORMF_W, -1, last);
    } else {
        norm_forward(ctx, model, NORMF_W, -1, last, previous.res2, previous.fcproj);
    }
}

namespace {

// The head's output before the softcap, which cross_entropy applies itself.
Tensor head_forward(const Context& ctx, const Model& model, const Activations& acts, Tensor inp) {
    const Range range(ctx.profiler, "head");
    const GatheredGroup weights = model.use(ctx, model.head_group());
    const Tensor out = acts.logits.rows(0, inp.shape[0]);
    matmul_forward(out, inp, model.weight(model.head()), model.weight(HEAD_B), ctx.stream);
    return out;
}

}  // namespace

Tensor head_logits(const Context& ctx, const Model& model, const Activations& acts, int64_t begin, int64_t end) {
    const Tensor logits = head_forward(ctx, model, acts, acts.normf.rows(begin, end));
    softcap_forward(logits, model.config.logit_softcap, ctx.stream);
    return logits;
}

void evaluate_loss(const Context& ctx, const Model& model, const Activations& acts, const Input& in, bool accumulate,
                   const std::function<void(int64_t begin, Tensor logits)>& look) {
    const int64_t chunk = acts.logits.shape[0];
    for (int64_t begin = 0; begin < in.n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, in.n);
        const Tensor logits = head_forward(ctx, model, acts, acts.normf.rows(begin, end));
        cross_entropy_forward(acts.losses.rows(begin, end), logits, in.targets.rows(begin, end),
                              model.config.vocab_size, model.config.logit_softcap, ctx.stream);
        if (look) look(begin, logits);
    }
    sum_losses(acts.loss_sum, acts.losses.rows(0, in.n), accumulate, ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Backward. The first micro-step overwrites the gradients of parameters, the others add to them (accumulate), so
// nothing is zeroed. Gradients of activations are overwritten. grads.open() and grads.close() enclose the writes of a
// group's gradient; close() starts its reduction over the ranks (parallel/gradients.h).

namespace {

// The head, chunk by chunk of tokens: logits, losses, the gradient of the logits (which overwrites them), the head's
// weight gradient and dnormf. Tokens without a target would only multiply zeros. Where they are left out, the rows of
// the others are gathered in dnormf's memory, and their gradients come back in normf's.
void head_forward_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                           const Input& in, float dloss, bool accumulate) {
    const int64_t chunk = acts.logits.shape[0];
    const GatheredGroup weights = model.use(ctx, model.head_group());
    const Tensor weight = model.weight(model.head()), dweight = model.gradient(grads, model.head());
    const int64_t n = in.head_tokens();
    const Tensor inp = in.loss_rows ? acts.dnormf : acts.normf, dinp = in.loss_rows ? acts.normf : acts.dnormf;
    if (in.loss_rows) gather_rows(inp.rows(0, n), acts.normf.rows(0, in.n), in.loss_rows, ctx.stream);
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, n);
        const Tensor logits = head_forward(ctx, model, acts, inp.rows(begin, end));
        {
            const Range range(ctx.profiler, "cross_entropy");
            cross_entropy_forward_backward(acts.losses.rows(begin, end), logits, in.targets.rows(begin, end),
                                           model.config.vocab_size, dloss, model.config.logit_softcap, ctx.stream);
        }
        const Range range(ctx.profiler, "head");
        if (!model.table.frozen)
            matmul_backward_weight(dweight, model.gradient(grads, HEAD_B), logits, inp.rows(begin, end),
                                   accumulate || begin > 0, ctx.stream);
        matmul_backward_input(dinp.rows(begin, end), logits, weight, false, ctx.stream);
    }
    if (in.loss_rows) scatter_rows(acts.dnormf.rows(0, in.n), dinp.rows(0, n), in.loss_rows, ctx.stream);
}

struct NormGradients {
    Tensor dx;            // of the norm's input: the norm's gradient is added to it
    Tensor dout;          // of the norm's output
    Tensor dbias_before;  // of the bias of the linear layer whose output the norm read, or added to the residual stream
                          // that it read: the sum of dx over the tokens. Null: no bias
    bool adds = true;     // false: dx is overwritten
};

void norm_backward(const Context& ctx, const Model& model, const Gradients& grads, Slot slot, int64_t layer,
                   const NormActs& a, const NormGradients& d, Tensor scratch, bool accumulate) {
    const Range range(ctx.profiler, "norm");
    const Tensor weight = model.weight(slot, layer), dweight = model.gradient(grads, slot, layer);
    const Tensor dbias = model.gradient(grads, bias_of(slot), layer);
    const Tensor dresidual = d.adds ? d.dx : Tensor{};
    if (model.config.norm == Norm::LayerNorm) {
        layernorm_backward(d.dx, dweight, dbias, d.dbias_before, d.dout, dresidual, a.inp, weight, a.mean, a.rstd,
                           scratch, accumulate, ctx.stream);
    } else {
        rmsnorm_backward(d.dx, dweight, d.dbias_before, d.dout, dresidual, a.inp, weight, a.rstd, scratch, accumulate,
                         ctx.stream);
    }
}

// The gradient of a linear layer's bias, where it has one. Those of proj and fcproj are null here: the backward pass of
// the norm that follows them, at once or behind the addition, computes them (NormGradients::dbias_before).
Tensor bias_gradient(const Model& model, const Gradients& grads, Slot slot, int64_t l) {
    return slot == PROJ_W || slot == FCPROJ_W ? Tensor{} : model.gradient(grads, bias_of(slot), l);
}

// The gradients of a linear layer's weight and bias.
void weight_backward(const Context& ctx, const Model& model, const Gradients& grads, Slot slot, int64_t l, Tensor dout,
                     Tensor inp, bool accumulate) {
    if (model.table.frozen) return;
    const Range range(ctx.profiler, linear_name(slot));
    matmul_backward_weight(model.gradient(grads, slot, l), bias_gradient(model, grads, slot, l), dout, inp, accumulate,
                           ctx.stream);
}

// fp8: the gradients of a linear layer's weight and input. inp_t: the input's codes [C, N]; produce: what quantises the
// gradient of the output. Sums of gradients are in full fp32.
template <typename Produce>
void fp8_linear_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                         Slot slot, int64_t l, Tensor dinp, Tensor inp_t, bool accumulate, Produce produce) {
    const Tensor weight = model.weight(slot, l);
    const int64_t n = dinp.shape[0], OC = weight.shape[0];
    const Tensor rows = code_matrix(acts.fp8_rows, n, OC), columns = code_matrix(acts.fp8_columns, OC, n);
    {
        const Range range(ctx.profiler, "quantise");
        acts.fp8->quantise(Fp8Operand::Gradient, slot, l, rows, columns, false, ctx.stream, produce);
    }
    const Range range(ctx.profiler, linear_name(slot));
    matmul_fp8(model.gradient(grads, slot, l), acts.fp8->matrix(Fp8Operand::Gradient, slot, l, columns),
               acts.fp8->matrix(Fp8Operand::Input, slot, l, inp_t), {}, accumulate, false, acts.forward_scratch,
               ctx.stream);
    matmul_fp8(dinp, acts.fp8->matrix(Fp8Operand::Gradient, slot, l, rows),
               acts.fp8->weight(slot, l, true, weight, acts.fp8_weight, ctx.stream), {}, false, false,
               acts.forward_scratch, ctx.stream);
}

// LoRA: with h = s·A·inp of the forward pass, dB = doutᵀ·h; with dh = s·dout·B, dA = dhᵀ·inp and dinp = dh·A. adds: to
// dinp, which may be null.
void lora_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                   const LoraLayer& lora, Slot slot, int64_t l, Tensor dinp, Tensor dout, Tensor inp, bool accumulate,
                   bool adds) {
    const Range range(ctx.profiler, "lora");
    const Tensor da = model.adapters->gradient(grads, lora_a(slot), l),
                 db = model.adapters->gradient(grads, lora_b(slot), l),
                 dlow_rank = acts.dlow_rank.rows(0, inp.shape[0]).columns(0, lora.a.shape[0]);
    for_each_part(lora, [&](auto b, auto rows, auto a) {
        const Tensor d = dout.columns(rows.first, rows.second), h = lora.low_rank.columns(a.first, a.second);
        matmul_backward_weight(db.rows(b.first, b.second), {}, d, h, accumulate, ctx.stream);
        matmul(dlow_rank.columns(a.first, a.second), d, lora.b.rows(b.first, b.second), false, false, false, ctx.stream,
               lora.scale);
    });
    matmul_backward_weight(da, {}, dlow_rank, inp, accumulate, ctx.stream);
    if (dinp) matmul_backward_input(dinp, dlow_rank, lora.a, adds, ctx.stream);
}

// The gradients of a linear layer's weight, or its adapters, of its bias and input. fp8: inp_t replaces inp. adds: to
// dinp; not in fp8. dinp may be null where the weight is frozen. Adapters write dinp first, as in linear_forward().
void linear_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts, Slot slot,
                     int64_t l, Tensor dinp, Tensor dout, Tensor inp, Tensor inp_t, bool accumulate,
                     bool adds = false) {
    if (acts.uses_fp8(l)) {
        if (const Tensor dbias = bias_gradient(model, grads, slot, l)) {
            const Range range(ctx.profiler, linear_name(slot));
            matmul_backward_bias(dbias, dout, accumulate, ctx.stream);
        }
        return fp8_linear_backward(ctx, model, grads, acts, slot, l, dinp, inp_t, accumulate,
                                   [&](const Fp8Output& out) { fp8_quantise(out, dout, ctx.stream); });
    }
    weight_backward(ctx, model, grads, slot, l, dout, inp, accumulate);
    const LoraLayer lora = lora_layer(model, acts, slot, l, inp.shape[0]);
    if (lora.a) lora_backward(ctx, model, grads, acts, lora, slot, l, dinp, dout, inp, accumulate, adds);
    if (!dinp) return;
    const Range range(ctx.profiler, linear_name(slot));
    matmul_backward_input(dinp, dout, linear_weight(ctx, model, acts, slot, l), adds || lora.a, ctx.stream);
}

// Returns the gradient of the activation's input. It overwrites dact (GELU, ReLU²) or the input itself (SwiGLU). Then
// act, if the forward pass did not keep it, overwrites dact.
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
            swiglu_backward(a.fc, a.act ? Tensor{} : a.dact, a.dact, a.fc, ctx.stream);
            return a.fc;
    }
    return {};
}

// fp8: the gradients of the activation function and of FC, in whose place mlp_backward() and linear_backward() are
// otherwise. The gradient of FC's output is stored in the model's dtype only for that of the bias.
void fp8_fc_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts, int64_t l,
                     const LayerActs& a, bool accumulate) {
    const Activation f = activation_of(model.config.mlp);
    const Tensor dbias = bias_gradient(model, grads, FC_W, l);
    const Tensor dfc = !dbias ? Tensor{} : f == Activation::SwiGLU ? a.fc : a.dact;
    fp8_linear_backward(ctx, model, grads, acts, FC_W, l, a.dnorm2, a.norm2_t, accumulate, [&](const Fp8Output& out) {
        // dfc overwrites what a second call would read.
        fp8_activation_backward(out, out.rows ? dfc : Tensor{}, f, a.dact, a.fc, ctx.stream);
    });
    if (dbias) matmul_backward_bias(dbias, dfc, accumulate, ctx.stream);
}

// Computes what the forward pass didn't keep, with the same kernels from the same inputs: the bits are the same.
void recompute(const Context& ctx, const Model& model, int64_t l, const LayerActs& a, const Activations& acts,
               const Input& in) {
    const Range range(ctx.profiler, "recompute");
    const Recompute level = acts.shape.recompute;
    const bool norm_after = model.config.norm_after;
    if (level >= Recompute::Norms && !norm_after) norm_forward(ctx, model, NORM1_W, l, norm1(a));
    if (level == Recompute::Block) {
        block_forward(ctx, model, l, a, acts, in, Pass::Again);
        if (norm_after) linear_forward(ctx, model, acts, FCPROJ_W, l, a.fcproj, a.act, {}, Pass::Again);
        return;
    }
    if (level >= Recompute::Norms && a.qk) qk_forward(ctx, model, acts, in, l, a);
    if (level >= Recompute::Norms && !norm_after) norm_forward(ctx, model, NORM2_W, l, norm2(a));
    if (level >= Recompute::Norms && acts.uses_fp8(l)) {
        quantise_input(ctx, acts, QKV_W, l, a.norm1, false, a.norm1_t, Pass::Again);
        quantise_input(ctx, acts, FC_W, l, a.norm2, false, a.norm2_t, Pass::Again);
    }
    if (level >= Recompute::Activation) mlp_forward(ctx, model, acts, l, a, Pass::Again);
}

// Computes a.dqkv and a.dlog_decay from a.datt. The gradient of the per-head norm overwrites that norm's output, a.att.
void layer_attention_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l,
                              const LayerActs& a, const Activations& acts, const Input& in, bool accumulate) {
    const ModelConfig& c = model.config;
    const AttentionType type = c.attention_type(l);
    const bool gated = type == AttentionType::GatedLinear;
    const QkvHeads x = attention_inputs(c, a), d = split_qkv(c, a.dqkv);
    const Range range(ctx.profiler, "attention");
    if (type == AttentionType::Softmax) {
        return attention_backward(d.q, d.k, d.v, split_heads(a.datt, c.heads), x.q, x.k, x.v,
                                  split_heads(a.att, c.heads), a.lse, softmax_sequences(c, in, l), c.attention_scale(),
                                  acts.scratch, ctx.stream, acts.shape.deterministic);
    }
    if (gated) {
        rmsnorm_backward(head_matrix(a.att, c.heads), model.gradient(grads, HEADNORM_W, l), {},
                         head_matrix(a.datt, c.heads), {}, head_matrix(a.att_unnormed, c.heads),
                         model.weight(HEADNORM_W, l), head_vector(a.rstd_att), acts.scratch, accumulate, ctx.stream);
    }
    linear_attention_backward(d.q, d.k, d.v, a.dlog_decay, {}, split_heads(gated ? a.att : a.datt, c.heads), {}, x.q,
                              x.k, x.v, a.log_decay, {}, split_heads(gated ? a.att_unnormed : a.att, c.heads), a.lse,
                              {in.sequences.cum_q, in.sequences.max_q}, linear_attention_type(gated), acts.scratch,
                              ctx.stream);
}

// Gated linear attention: gradients of the decay gate's weights, and of its input, which is added to dinp.
void layer_decay_gate_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l,
                               const LayerActs& a, Tensor dinp, bool accumulate) {
    if (model.config.attention_type(l) != AttentionType::GatedLinear) return;
    const Range range(ctx.profiler, "gate");
    const Tensor dx = a.ddecay_gate.columns(0, model.config.kv_heads);
    decay_gate_backward(dx, a.dlog_decay, a.log_decay, ctx.stream);
    if (!model.table.frozen)
        matmul_backward_weight(model.gradient(grads, DECAY_GATE_W, l), model.gradient(grads, DECAY_GATE_B, l), dx,
                               qkv_input(a), accumulate, ctx.stream);
    matmul_backward_input(dinp, dx, model.weight(DECAY_GATE_W, l), true, ctx.stream);
}

// The MLP's half of a block, from the gradient of fcproj's output to that of fc's input, dinp. adds: to dinp.
void mlp_half_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l, const LayerActs& a,
                       const Activations& acts, Tensor dinp, Tensor dout, bool adds, bool accumulate) {
    Tensor dfc = a.dact;
    if (acts.shape.gelu_epilogue != GeluEpilogue::Off) {
        weight_backward(ctx, model, grads, FCPROJ_W, l, dout, a.act, accumulate);
        const Range range(ctx.profiler, "fcproj");
        matmul_backward_input_gelu(a.dact, dout, model.weight(FCPROJ_W, l), a.fc, ctx.stream);
    } else if (!a.act && !acts.uses_fp8(l)) {
        {
            const Range range(ctx.profiler, "fcproj");
            matmul_backward_input(a.dact, dout, model.weight(FCPROJ_W, l), false, ctx.stream);
        }
        dfc = mlp_backward(ctx, model, a);
        weight_backward(ctx, model, grads, FCPROJ_W, l, dout, a.dact, accumulate);  // act is in its place now
    } else {
        linear_backward(ctx, model, grads, acts, FCPROJ_W, l, a.dact, dout, a.act, a.act_t, accumulate);
        if (acts.uses_fp8(l)) return fp8_fc_backward(ctx, model, grads, acts, l, a, accumulate);
        dfc = mlp_backward(ctx, model, a);
    }
    linear_backward(ctx, model, grads, acts, FC_W, l, dinp, dfc, fc_input(a), {}, accumulate, adds);
}

// Whether a block's input needs a gradient: nothing below the first block is trained where the base is frozen.
bool passes_gradient_on(const Model& model, int64_t l) {
    return l > 0 || !model.table.frozen;
}

// The attention half, from the gradient of proj's output to that of the QKV projection's input, dinp. adds: to dinp.
void attention_half_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l,
                             const LayerActs& a, const Activations& acts, const Input& in, Tensor dinp, Tensor dout,
                             bool adds, bool accumulate) {
    if (acts.uses_fp8(l)) quantise_input(ctx, acts, PROJ_W, l, a.att, false, a.att_t, Pass::Again);
    linear_backward(ctx, model, grads, acts, PROJ_W, l, a.datt, dout, a.att, a.att_t, accumulate);
    layer_attention_backward(ctx, model, grads, l, a, acts, in, accumulate);
    qk_backward(ctx, model, grads, acts, in, l, a, accumulate);
    if (!passes_gradient_on(model, l)) dinp = {};
    linear_backward(ctx, model, grads, acts, QKV_W, l, dinp, a.dqkv, qkv_input(a), a.norm1_t, accumulate, adds);
    if (dinp) layer_decay_gate_backward(ctx, model, grads, l, a, dinp, accumulate);
}

// dx: on entry the gradient of the block's output, on return that of its input, if it needs one.
void block_backward(const Context& ctx, const Model& model, Gradients& grads, int64_t l, const LayerActs& a,
                    const Activations& acts, const Input& in, Tensor dx, bool accumulate) {
    mlp_half_backward(ctx, model, grads, l, a, acts, a.dnorm2, dx, false, accumulate);
    norm_backward(ctx, model, grads, NORM2_W, l, norm2(a), {dx, a.dnorm2, model.gradient(grads, PROJ_B, l)},
                  acts.scratch, accumulate);
    attention_half_backward(ctx, model, grads, l, a, acts, in, a.dnorm1, dx, false, accumulate);
    if (!passes_gradient_on(model, l)) return;
    if (l) grads.open(model.layer_group(l - 1), ctx.stream);  // norm1's backward writes that layer's FCPROJ_B gradient
    const Tensor dbias_before = l ? model.gradient(grads, FCPROJ_B, l - 1) : Tensor{};
    norm_backward(ctx, model, grads, NORM1_W, l, norm1(a), {dx, a.dnorm1, dbias_before}, acts.scratch, accumulate);
}

// The same with norms after attention and the MLP: each half's gradient is added to dx.
void block_backward_norm_after(const Context& ctx, const Model& model, Gradients& grads, int64_t l, const LayerActs& a,
                               const Activations& acts, const Input& in, Tensor dx, bool accumulate) {
    norm_backward(ctx, model, grads, NORM2_W, l, norm_after_mlp(a, {}),
                  {a.dfcproj, dx, model.gradient(grads, FCPROJ_B, l), false}, acts.scratch, accumulate);
    mlp_half_backward(ctx, model, grads, l, a, acts, dx, a.dfcproj, true, accumulate);
    norm_backward(ctx, model, grads, NORM1_W, l, norm_after_attention(a),
                  {a.dproj, dx, model.gradient(grads, PROJ_B, l), false}, acts.scratch, accumulate);
    attention_half_backward(ctx, model, grads, l, a, acts, in, dx, a.dproj, true, accumulate);
    if (l) grads.open(model.layer_group(l - 1), ctx.stream);
}

}  // namespace

void backward(const Context& ctx, const Model& model, Gradients& grads, const Activations& acts, const Input& in,
              float dloss, bool first_micro, bool last_micro) {
    const Range range(ctx.profiler, "backward");
    grads.begin(first_micro, last_micro, acts.micro_step);
    const bool accumulate = grads.accumulate();
    const bool frozen = model.table.frozen;  // then only the layers' adapters have gradients
    if (!frozen) {
        grads.open(model.fp32_group(), ctx.stream);
        grads.open(model.head_group(), ctx.stream);
    }
    head_forward_backward(ctx, model, grads, acts, in, dloss, accumulate);
    sum_losses(acts.loss_sum, acts.losses.rows(0, in.head_tokens()), !first_micro, ctx.stream);
    if (!model.config.tied && !frozen) grads.close(model.head_group(), ctx.stream);
    const Tensor dx = acts.dx.rows(0, in.n);
    const int64_t last = model.config.layers - 1;
    grads.open(model.layer_group(last), ctx.stream);
    const bool norm_after = model.config.norm_after;  // then its own norm follows the last fcproj
    const Tensor dbias_before = norm_after ? Tensor{} : model.gradient(grads, FCPROJ_B, last);
    norm_backward(ctx, model, grads, NORMF_W, -1, final_norm(acts, in.n),
                  {dx, acts.dnormf.rows(0, in.n), dbias_before, false}, acts.scratch, accumulate);
    for (int64_t l = last; l >= 0; l--) {
        const LayerActs a = first_tokens(acts.backward[static_cast<size_t>(l)], in.n);
        const GatheredGroup weights = model.use(ctx, model.layer_group(l), l ? model.layer_group(l - 1) : -1);
        if (acts.in_host_memory(l)) acts.host_inputs->wait();
        if (l && acts.in_host_memory(l - 1))
            acts.host_inputs->fetch(l - 1, acts.backward[static_cast<size_t>(l - 1)].res1.rows(0, in.n));
        recompute(ctx, model, l, a, acts, in);
        (norm_after ? block_backward_norm_after : block_backward)(ctx, model, grads, l, a, acts, in, dx, accumulate);
        grads.close(model.layer_group(l), ctx.stream);
    }
    if (frozen) return grads.end(ctx.stream);
    if (!model.config.tied) grads.open(0, ctx.stream);
    if (model.config.embedding_norm) {
        norm_backward(ctx, model, grads, EMBEDNORM_W, -1, embedding_norm(acts, dx), {dx, dx, {}, false}, acts.scratch,
                      accumulate);
    }
    {
        const Range embedding(ctx.profiler, "embedding");
        // The gradient of a tied embedding already holds the head's part of this micro-step.
        embedding_backward(model.gradient(grads, WTE), model.gradient(grads, WPE), dx, in.tokens, in.positions,
                           acts.scratch, accumulate || model.config.tied, accumulate, ctx.stream);
    }
    grads.close(0, ctx.stream);
    grads.close(model.fp32_group(), ctx.stream);
    grads.end(ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Update.

int64_t Optimizer::second_moments(const Model& model) {
    if (!model.table.uses(OptimizerType::Muon)) return moments(model);
    const int64_t parts = model.sharding.parts(model.sharding.splits_optimizer());
    int64_t largest = 0;
    for (int64_t part = 0; part < parts; part++)
        largest = std::max(largest, second_moment_starts(model.table, part, parts).back());
    return largest;
}

void Optimizer::allocate(const Context& ctx, const Model& whole, const OptimizerOptions& optimizer_options,
                         const GradientOptions& gradients) {
    const Model& model = whole.trained();
    const ParamTable& table = model.table;
    const Sharding& sharding = model.sharding;
    const int64_t grad_bytes = Gradients::memory(table, sharding, gradients).bytes(), n = moments(model);
    const DType dtype = model.precision.moments;
    gradient_memory = Arena(grad_bytes, "gradients");
    state_memory = Arena(state_bytes(model), "optimizer", Offload::place(model.offload.optimizer));
    const Tensor gradient_bytes = gradient_memory.at(0, DType::U8, {grad_bytes}),
                 first = state_memory.at(0, dtype, {n}),
                 second = state_memory.at(first.bytes(), dtype, {second_moments(model)});
    for (const Tensor& t : {gradient_bytes, first, second})
        device_fill(t.data, 0, static_cast<size_t>(t.bytes()), ctx.stream);
    grads.allocate(table, sharding, gradients, gradient_bytes, &ctx);
    m = sharding.arena(first, sharding.splits_optimizer());
    v = sharding.arena(second, sharding.splits_optimizer());
    if (table.uses(OptimizerType::Muon)) v.starts = second_moment_starts(table, v.part, v.parts);
    options = optimizer_options;
    slices = make_update_slices(table, sharding, model.arenas, grads, m, v, options.rates);
    updated = std::vector<Event>(slices.size());
    muon = Muon(table, sharding, slices, m, options.rates, model.precision.dtype, options.muon);
}

int64_t update_workspace_bytes(const Model& whole, int64_t round_bytes, const Target& target) {
    const Model& model = whole.trained();
    return muon_workspace(model.table, model.sharding, model.precision.dtype, round_bytes, target).bytes();
}

// Muon goes first: the weights of a slice are gathered when both optimizers have updated it.
void update(const Context& ctx, Model& model, Optimizer& optimizer, const Activations& acts, double scale,
            double grad_unit) {
    const Range range(ctx.profiler, "update");
    const std::vector<UpdateSlice>& slices = optimizer.slices;
    for (size_t i = 0; i < slices.size(); i++)
        sum_squares(acts.sum(ctx.rank, SUM_SQUARES), slices[i].own_grads, i > 0, acts.scratch, ctx.stream);
    ctx.comm->all_gather(acts.sums, acts.sums.rows(ctx.rank, ctx.rank + 1), ctx.stream);
    step_control(acts.scalars, acts.sums, scale, grad_unit, ctx.stream);
    optimizer.muon.update(ctx, slices, acts.update_workspace, acts.scalars);
    for (size_t i = 0; i < slices.size(); i++) {
        const UpdateSlice& p = slices[i];
        adamw_update(p.params, p.params_T, p.m, p.v, p.grads, p.segments.data(),
                     static_cast<int64_t>(p.segments.size()), optimizer.options.adamw, acts.scalars, ctx.stream);
        if (!p.gathered) continue;
        optimizer.updated[i].record(ctx.stream);
        optimizer.updated[i].make_wait(ctx.side);
        const Range gathering(ctx.profiler, "all_gather of updated weights", ctx.side);
        ctx.comm->all_gather(p.gathered, model.trained().sharding.own(p.gathered), ctx.side);
        optimizer.updated[i].record(ctx.side);
    }
    if (model.trained().sharding.splits_optimizer()) {
        const Range waiting(ctx.profiler, "wait for weights");
        for (size_t i = 0; i < slices.size(); i++)
            if (slices[i].gathered) optimizer.updated[i].make_wait(ctx.stream);
    }
    if (acts.fp8) acts.fp8->update(ctx);
    quantise_weights(ctx, model, acts);
}

void quantise_weights(const Context& ctx, const Model& model, const Activations& acts) {
    if (!acts.fp8 || !acts.shape.fp8.whole_weights) return;
    const Range range(ctx.profiler, "quantise");
    for (int64_t l = 0; l < model.config.layers; l++)
        for (const Slot slot : LINEAR_LAYERS)
            if (acts.uses_fp8(l)) acts.fp8->update_weight(slot, l, model.weight(slot, l), ctx.stream);
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
// Evaluation and sampling during training.

Evaluation evaluate(const Context& ctx, const Model& model, const Activations& acts, const TokenFiles& files,
                    const Packing* packing, int32_t end_of_text, int64_t limit, int64_t split_bytes,
                    const std::function<void()>& before_batch) {
    const EvalBatches batches{files, acts.shape.B, acts.shape.T, model.config.vocab_size, end_of_text, limit, packing};
    return evaluate(ctx, batches, split_bytes, acts.loss_sum, [&](const Batch& batch, bool accumulate) {
        if (before_batch) before_batch();
        const Input in = upload(ctx, acts, batch);
        forward(ctx, model, acts, in);
        evaluate_loss(ctx, model, acts, in, accumulate);
    });
}

namespace {

// The token with the largest logit [1, vocabulary].
int32_t most_likely(const Context& ctx, const ModelConfig& config, const Tensor& logits) {
    std::vector<char> row(size_t(logits.bytes()));
    std::vector<float> values(size_t(logits.numel()));
    ctx.wait_for_stream("evaluation");
    copy_to_host(row.data(), logits.data, row.size(), ctx.stream);
    convert_to_float(values.data(), row.data(), logits.dtype, logits.numel());
    return int32_t(std::max_element(values.begin(), values.begin() + config.vocab_size) - values.begin());
}

}  // namespace

QuestionResults answer_questions(const Context& ctx, const Model& model, const Activations& acts,
                                 const std::vector<Question>& questions, const std::vector<Choice>& choices,
                                 const Tokenizer& tokenizer, const std::function<void()>& before_batch) {
    int64_t passes = 0;
    const auto run = [&](const Batch& batch) {
        if (before_batch) before_batch();
        const Input in = upload(ctx, acts, batch);
        forward(ctx, model, acts, in);
        ChoiceScorer::TokenScores scores{std::vector<float>(batch.tokens.size()),
                                         std::vector<bool>(batch.tokens.size(), false)};
        evaluate_loss(ctx, model, acts, in, false, [&](int64_t begin, Tensor logits) {
            for (int64_t i = 0; ask_for_last_words(questions) && i < logits.shape[0]; i++) {
                const int32_t target = batch.targets[size_t(begin + i)];
                if (target != Batch::NO_TARGET)
                    scores.missed[size_t(begin + i)] = most_likely(ctx, model.config, logits.rows(i, i + 1)) != target;
            }
        });
        ctx.wait_for_stream("evaluation");
        copy_to_host(scores.losses.data(), acts.losses.data, scores.losses.size() * sizeof(float), ctx.stream);
        return scores;
    };
    Batch last;  // with ZeRO stage 3 all ranks gather weights together, so they run equally many passes
    const auto own_scores = [&](const Batch& batch) {
        last = batch;
        return passes++ % ctx.world == ctx.rank
                   ? run(batch)
                   : ChoiceScorer::TokenScores{std::vector<float>(batch.tokens.size()), {}};
    };
    const std::vector<EndingScore> own = score_choices(
        choices,
        {tokenizer.start_of_text(), start_token(model.config, &tokenizer), acts.shape.B, acts.shape.T, own_scores});
    const int64_t in_last_round = passes % ctx.world;
    if (in_last_round && ctx.rank >= in_last_round) run(last);
    std::vector<EndingScore> all(own.size() * size_t(ctx.world)), scores(own.size());
    ctx.comm->all_gather_host(all.data(), own.data(), own.size() * sizeof(EndingScore));
    for (size_t i = 0; i < all.size(); i++) {  // all but one rank's are 0
        scores[i % scores.size()].nats += all[i].nats;
        scores[i % scores.size()].missed += all[i].missed;
    }
    return question_results(questions, choices, scores);
}

namespace {

// Samples the token that follows `tokens`, with the activation memory of the training run. There is no KV cache: the
// whole context is computed again, or its last seq-len tokens. All ranks take part and continue with rank 0's token,
// which is below `vocab`. key: of its random number, with the seed: the sequence and the position.
int32_t next_token(const Context& ctx, const Model& model, const Activations& acts, const std::vector<int32_t>& tokens,
                   int64_t vocab, uint64_t seed, std::array<int64_t, 2> key) {
    const int64_t n = std::min(static_cast<int64_t>(tokens.size()), acts.shape.T);
    const Input in = upload(ctx, acts, single_sequence(tokens.data() + tokens.size() - size_t(n), n));
    forward(ctx, model, acts, in);
    const Tensor logits = head_logits(ctx, model, acts, n - 1, n);
    copy_to_device(acts.sample_key.data, key.data(), sizeof key, ctx.stream);
    SamplingOptions sampling = TRAINING_SAMPLES;
    sampling.seed = seed;
    sample_tokens(acts.sample_id, logits, vocab, acts.sample_key.rows(0, 1), acts.sample_key.rows(1, 2), sampling, {},
                  acts.scratch, ctx.stream);
    ctx.wait_for_stream("sampling");
    int32_t id;
    copy_to_host(&id, acts.sample_id.data, sizeof id, ctx.stream);
    ctx.comm->broadcast_host(id, 0);
    return id;
}

}  // namespace

// --------------------------------------------------------------------------------------------------------------------
// The memory plan, printed before anything is allocated.

MemoryPlan memory_plan(const Model& model, const Target& target) {
    const int64_t size = dtype_size(model.precision.dtype);
    MemoryPlan plan;
    plan.device = target.device;
    plan.add("weights", model.kept() * size);
    plan.add("gathered weights", model.gathered() * size);
    plan.add("master weights", model.master() * 4, Offload::place(model.offload.master));
    plan.add("fp32 weights", model.fp32() * 4);
    if (model.nf4) plan.add("NF4 weights", model.nf4->bytes());
    if (model.adapters) plan.add("adapters", model.adapters->bytes());
    return plan;
}

MemoryPlan memory_plan(const Model& model, const Activations& acts, const GradientOptions& gradients) {
    const Target& target = acts.shape.target;
    MemoryPlan plan = memory_plan(model, target);
    if (acts.shape.training) {
        const Model& trained = model.trained();
        const Gradients::Memory grads = Gradients::memory(trained.table, trained.sharding, gradients);
        plan.add("gradients", grads.arena);
        plan.add("gradients in progress", grads.slots + grads.buffer);
        plan.add("optimizer (m, v)", Optimizer::state_bytes(trained), Offload::place(model.offload.optimizer));
        if (model.sharding.world > 1) plan.add("collectives", target.comm_overhead_bytes());
    }
    plan.add("activations", acts.plan.bytes());
    plan.add("block inputs", acts.host_bytes(), MemoryPlace::Host);
    if (acts.fp8) {
        plan.add("fp8 weights", acts.fp8->weight_bytes());
        plan.add("fp8 scales", acts.fp8->scale_bytes(model.sharding.world));
    }
    plan.add("program and libraries", target.overhead_bytes());
    return plan;
}

Snapshot snapshot_of(const Model& whole) {
    const Model& model = whole.trained();
    const DType exact = model.master() ? DType::F32 : model.precision.dtype;
    return {model.table, exact, model.precision.moments, model.sharding.rank, model.sharding.world};
}

// --------------------------------------------------------------------------------------------------------------------
// The training loop.

GradientOptions gradient_options(const ShardingOptions& o, const std::string& dtype, uint64_t seed) {
    return {training_dtype(o.reduce_dtype), o.bucket_mib << 20, training_dtype(dtype), seed};
}

Offload offload_options(const std::string& what) {
    const auto has = [&](const char* state) { return what.find(state) != std::string::npos; };
    return {has("optimizer"), has("master"), has("activations")};
}

Fp8Options fp8_options(Fp8Options options, const Model& model) {
    options.whole_weights = !model.sharding.splits_weights();
    options.keep_weights &= options.whole_weights;
    return options;
}

Model model_of(const RunOptions& o, const ModelConfig& config, int64_t rank, int64_t world) {
    const DType dtype = o.model.type();
    return Model(config, {o.sharding.zero_stage, rank, world},
                 {dtype, dtype != DType::F32 && o.master_weights, training_dtype(o.optimizer_dtype)}, o.optimizer,
                 offload_options(o.offload), o.lora);
}

RunShape run_shape(const RunOptions& o, const Model& model, const Target& target) {
    RunShape shape = training_shape(o.batch_size, o.seq_len, o.model.type());
    shape.target = target;
    shape.recompute = o.recompute;
    shape.world = model.sharding.world;
    shape.update_bytes = update_workspace_bytes(model, MUON_ROUND_BYTES, target);
    if (shape.dtype != DType::F32) shape.gelu_epilogue = o.gelu_epilogue;
    shape.deterministic = !o.nondeterministic;
    shape.fp8 = fp8_options(o.fp8, model);
    shape.offload_inputs = model.offload.moves_inputs(target);
    set_adapters(shape, model);
    return shape;
}

// Advice for a run that does not fit: options with which it does.
std::string what_fits(const TrainOptions& o, const ModelConfig& config, const Context& ctx, int64_t available) {
    RunOptions fitting = o;
    const FitReport fit = find_fit(fitting, ctx.world, this_target(), available, [&](const RunOptions& tried) {
        const Model model = model_of(tried, config, ctx.rank, ctx.world);
        const Activations acts(config, run_shape(tried, model));
        return memory_plan(model, acts, gradient_options(tried.sharding, tried.grad_dtype)).total;
    });
    if (!fit.found()) return fit.remedy();
    const std::string same_step =
        fitting.batch_size < o.batch_size ? str(" --total-batch-tokens ", o.total_batch_tokens) : "";
    return str(fit.tried.back().options, same_step, " fits: it needs ", human_bytes(fit.tried.back().bytes));
}

void set_adapters(RunShape& shape, const Model& model) {
    if (model.lora) shape.lora_widths = model.lora->widths;
    if (model.nf4) shape.nf4_weight = model.nf4->largest();
}

// A warning, or nothing. On an H100 GPT-2 with 768 channels gains 1.09 times (docs/performance.md). Narrower models are
// not measured: quantising an input [N, C] and a gradient [N, OC] reads and writes 4·N·(C + OC) bytes at 2.5 TB/s;
// their three matmuls save 40% of 6·N·C·OC FLOP at 650 TFLOP/s, so fp8 loses below C·OC/(C + OC) = 430.
std::string fp8_warning(const ModelConfig& c) {
    if (backend_device() == Device::CPU) return "fp8 is emulated on the CPU: it is slower than fp32\n";
    if (c.channels >= 768) return "";
    return str("--matmul-dtype fp8 is hardly faster, or slower, with ", c.channels,
               " channels: quantisation takes what the matmuls save\n");
}

OptimizerOptions optimizer_options(const TrainOptions& o) {
    OptimizerOptions options;
    options.adamw = {static_cast<float>(o.beta1), static_cast<float>(o.beta2), static_cast<float>(o.adam_eps), o.seed};
    const RateGroupValues rates = learning_rates(o);
    for (size_t g = 0; g < NUM_RATE_GROUPS; g++) {
        const double decay = g ? o.muon.adam_weight_decay.value_or(o.weight_decay) : o.weight_decay;
        options.rates[g] = {float(rates[0] > 0 ? rates[g] / rates[0] : 1), float(decay)};
    }
    options.muon.newton_schulz =
        newton_schulz_coefficients(o.muon.coefficients_or_default(), int(o.muon.iterations.value_or(0)));
    options.muon.scale = o.muon.rms_scale() ? MuonScale::RMS : MuonScale::Spectral;
    options.muon.seed = o.seed;
    return options;
}

void Trainer::tell(const std::string& text) const {
    if (ctx.rank == 0) std::cerr << text;
}

Trainer::Trainer(const Context& context, TrainSetup setup, std::unique_ptr<DirectoryLock> held)
    : ctx(context),
      s(std::move(setup)),
      lock(std::move(held)),
      o(s.o),
      dtype(o.model.type()),
      model(model_of(o, s.source.config, ctx.rank, ctx.world)),
      acts(s.source.config, run_shape(o, model)),
      checkpoints(ctx, model.trained().table, {o.out, o.keep, training_dtype(o.save_dtype), o.on_save_error == "stop"}),
      asked_to_stop(static_cast<size_t>(ctx.world)),
      watchdog(o.step_timeout, str("train_gpt: train: ", ctx.world > 1 ? str("rank ", ctx.rank, ": ") : ""),
               str(" (--step-timeout); 'train --resume --out ", o.out, "' continues from the last checkpoint")) {
    const std::string tokenizer_path = s.tokenizer_data().tokenizer_path();
    if (!tokenizer_path.empty()) tokenizer = std::make_unique<Tokenizer>(tokenizer_path);
    if (!s.questions.empty()) choices = make_choices(s.questions, *tokenizer, s.source.config.vocab_size);
    for (const TrainingData& data : s.data)
        val_bytes.push_back(data.val_files ? text_bytes(data.directory, *data.val_files, false) : 0);
    if (model.adapters) {
        if (!s.resume.checkpoint.empty())
            LoraAdapter::check_base(s.resume.checkpoint, s.source.directory, model.config, model.table);
        base_record = LoraAdapter::base_record(s.source.directory, model.config, model.table);
    }
    const GradientOptions gradients = gradient_options(o.sharding, o.grad_dtype, o.seed);
    MemoryPlan plan = memory_plan(model, acts, gradients);
    plan.limit = o.gpu_memory;
    planned_bytes = plan.total;
    plan.check([&](int64_t available) { return what_fits(o, model.config, ctx, available); });
    if (!plan.host_lines.empty()) {
        const std::string missing = checkpoints.lacks_memory(plan.host_total());
        require(missing.empty(), "--offload ", o.offload, ": ", missing,
                "; offload less, use --optimizer-dtype bf16, or free memory of the host");
    }
    make_directories(o.out);  // before the plan is printed: if this fails, only the error is printed
    claim_run_directory(ctx, o.out, lock);
    const bool saves_meanwhile = o.save_every && o.save_every < o.steps;
    const int64_t snapshot_bytes = saves_meanwhile ? snapshot_of(model).bytes() : 0;
    std::string no_snapshot = saves_meanwhile ? checkpoints.lacks_memory(plan.host_total() + snapshot_bytes) : "";
    if (no_snapshot.empty()) plan.add("checkpoint snapshot", snapshot_bytes, MemoryPlace::Host);
    tell(str(s.source.name, ": ", describe(model.config, model.table.num_weights()), ", ", dtype_name(dtype),
             o.model.auto_dtype ? " (--dtype auto)" : "", acts.fp8 ? ", matmuls of the blocks in fp8\n" : "\n",
             device_description(), ", ", matmul_library(), "\n",
             ctx.world > 1 ? str(ctx.world, " ranks, ZeRO stage ", o.sharding.zero_stage, "\n") : "", "memory plan\n",
             plan.text(ctx.in_use_before)));
    if (acts.fp8) tell(fp8_warning(model.config));
    if (model.adapters)
        tell(str("LoRA adapters of ", model.lora->options.description(), ": ",
                 with_commas(model.adapters->table.num_weights()), " weights are trained\n"));
    peak_flops = dense_peak_flops(device_name(), dtype);
    // Before the arenas are allocated, because it allocates memory of its own.
    if (o.measure_peak || !peak_flops) measured_flops = measured_peak_flops(ctx.stream, dtype);
    tell(str("MFU is a fraction of ", with_commas(std::llround((peak_flops ? peak_flops : measured_flops) / 1e9)),
             " GFLOP/s", ctx.world > 1 ? " of each rank, " : ", ",
             peak_flops ? str("the dense ", dtype_name(dtype), " peak of ", device_name())
                        : str("a matmul in ", dtype_name(dtype), " measured now"),
             "\n"));
    if (!peak_flops) peak_flops = measured_flops;
    model.allocate(ctx);
    acts.allocate(ctx);
    optimizer.allocate(ctx, model, optimizer_options(o), gradients);
    if (saves_meanwhile && no_snapshot.empty()) no_snapshot = checkpoints.allocate(snapshot_of(model));
    if (!no_snapshot.empty())
        tell("training waits while a checkpoint is written, there is no memory for a copy: " + no_snapshot + "\n");
    start();
    warm_up();
    if (ctx.rank == 0) write_file(join_path(o.out, "run.toml"), o.toml);
}

// Waits for the device, which may still run a step and write its scalars.
Trainer::~Trainer() {
    if (abort_on_failure.failed()) return;
    try {
        synchronize(ctx.stream);
    } catch (const Error&) {  // a destructor cannot report it
    }
}

// QLoRA: reads the matrices that load_weights() leaves out.
void quantise_base(const ModelSource& source, const Model& model) {
    const WeightSource weights = open_weight_source(source, model.table);
    std::vector<float> buffer;
    for (const Param& p : model.table.params)
        if (Nf4Base::quantises(p)) model.nf4->store(p, weights.fetch(p, buffer));
}

void Trainer::start() {
    StepScalars scalars{};
    Model& trained = model.trained();
    if (model.adapters) tell(load_weights(s.source, model.table, model.arenas));
    if (model.nf4) quantise_base(s.source, model);
    if (!s.resume.checkpoint.empty()) {
        load_state(s.resume.checkpoint, trained.table, {trained.arenas, optimizer.m, optimizer.v}, ranks_of(ctx));
        step = saved_step = s.resume.step;
        scalars.t = s.resume.adam_steps;
        scalars.norm_count = s.resume.norm_count;
        std::copy(s.resume.grad_norms.begin(), s.resume.grad_norms.end(), scalars.norms);
    } else if (!s.source.directory.empty() && !model.adapters) {
        tell(load_weights(s.source, model.table, model.arenas));
    } else {
        initialise_weights(trained.table, trained.arenas, o.seed, ctx.stream);
    }
    if (acts.fp8 && !s.resume.fp8_history.empty())
        acts.fp8->restore(s.resume.fp8_history, s.resume.fp8_steps, ctx.stream);
    quantise_weights(ctx, model, acts);
    write_scalars(ctx, acts, scalars);
}

// Chooses the GEMM algorithms and records the graphs, so that all steps run the same kernels. It runs micro-steps on
// token 0; the first step overwrites everything that they compute.
void Trainer::warm_up() {
    if (!graphs_replay()) return;
    if (acts.fp8) acts.fp8->hold_scales(true);  // a graph repeats what follows the calibration
    if (o.gemm_tune) load_matmul_cache(ctx.stream);
    adopt_checkpoint_choices();
    matmul_tuning(o.gemm_tune && ctx.rank == 0, ctx.stream);
    Batch batch;
    const size_t N = static_cast<size_t>(o.batch_size * o.seq_len);
    batch.tokens = batch.targets = batch.positions = std::vector<int32_t>(N, 0);
    for (int64_t b = 0; b <= o.batch_size; b++) batch.cum_seqlens.push_back(static_cast<int32_t>(b * o.seq_len));
    batch.max_seqlen = o.seq_len;
    if (const int64_t room = max_sequences()) {
        batch.num_sequences = o.batch_size;
        batch.cum_seqlens.resize(size_t(room) + 1, batch.cum_seqlens.back());
    }
    const auto micro_steps = [&](bool replay) {
        for (int64_t micro = 0; micro < s.micro_steps; micro++) {
            const bool first = micro == 0, last = micro + 1 == s.micro_steps;
            if (first || last || micro == 1) micro_step(batch, first, last, replay);
        }
    };
    if (ctx.world > 1) {  // all ranks take rank 0's algorithms before graphs are recorded
        micro_steps(false);
        optimizer.muon.warm_up(ctx, acts.update_workspace);
        ctx.wait_for_stream("warm-up");
        std::string chosen = matmul_choices(ctx.stream, true);
        ctx.comm->broadcast_host(chosen, 0);
        matmul_use_choices(chosen, ctx.stream, true);
    }
    micro_steps(true);
    optimizer.muon.warm_up(ctx, acts.update_workspace);
    matmul_tuning(false, ctx.stream);
    if (o.gemm_tune && ctx.rank == 0) store_matmul_cache(ctx.stream);
    if (acts.fp8) acts.fp8->hold_scales(false);
    ctx.wait_for_stream("warm-up");
}

// A resumed run uses the algorithms that its checkpoint names, so that it computes the same bits.
void Trainer::adopt_checkpoint_choices() {
    bool adopted;
    try {
        adopted = matmul_use_choices(s.resume.gemm, ctx.stream, true);
    } catch (const Error&) {
        throw Error(str(join_path(s.resume.checkpoint, "trainer.json"),
                        ": key 'gemm' is damaged; set it to \"\" to have the algorithms chosen again"));
    }
    if (!adopted) {
        tell(
            "the checkpoint's matmul algorithms were chosen on another GPU or library: choosing again, so results may "
            "differ in the last digits\n");
    }
}

// Forward and backward over one batch. The first of a step overwrites the gradients, the others add to them.
void Trainer::micro_step(const Batch& batch, bool first, bool last, bool replay) {
    const Input in = upload(ctx, acts, batch, true);
    auto work = [&] {
        if (acts.fp8 && first) acts.fp8->begin_step(ctx.stream);
        forward(ctx, model, acts, in);
        backward(ctx, model, optimizer.grads, acts, in, static_cast<float>(1.0 / double(o.total_batch_tokens)), first,
                 last);
    };
    // Documents and examples that do not have the shape of all batches change the kernels' grids. A profiler cannot
    // time the parts of a graph. And calibration runs kernels that later steps do not.
    const bool has_own_shape = (o.document_mask || s.packs()) && batch.num_sequences == 0;
    if (has_own_shape || ctx.profiler.on() || !replay || (acts.fp8 && acts.fp8->calibrates()))
        work();
    else
        graphs[first][last && ctx.world > 1][in.head_tokens()].run(ctx.stream, work);
}

// Queues one optimizer step: micro-steps whose gradients add up, then the update. The host runs ahead of the device by
// at most as many batches as Staging has slots. False: the run was asked to stop, so the step was left out or left
// unfinished. That loses nothing: weights, optimizer state and step change only in the update, and the next step
// overwrites the gradients.
bool Trainer::queue_step(Loader& loader) {
    QueuedStep& q = queue[queued % 2];
    q.begin.record(ctx.stream);
    StepScalars settings{};
    settings.lr = static_cast<float>(learning_rate(o, step));
    settings.grad_clip = static_cast<float>(o.grad_clip);
    settings.momentum = static_cast<float>(momentum(o, step));
    settings.spike_factor = static_cast<float>(o.spike_factor);
    acts.staging->next();
    acts.staging->put(acts.scalars.data, &settings, offsetof(StepScalars, loss), ctx.stream);
    int64_t loss_tokens = 0;
    for (int64_t micro = 0; micro < s.micro_steps; micro++) {
        if (stopping()) return false;
        watchdog.phase("reading training data", step + 1);
        if (o.overfit_one_batch && static_cast<int64_t>(one_batch.size()) < s.micro_steps)
            one_batch.push_back(loader.next());
        const Batch& batch = o.overfit_one_batch ? one_batch[static_cast<size_t>(micro)] : loader.next();
        watchdog.phase("forward and backward", step + 1);
        if (optimizer.grads.rounds()) {
            const int64_t number = step * s.micro_steps + micro;
            acts.staging->put(acts.micro_step.data, &number, sizeof number, ctx.stream);
        }
        micro_step(batch, micro == 0, micro + 1 == s.micro_steps);
        loss_tokens += batch.loss_tokens;
    }
    // The gradients were divided by total_batch_tokens, a constant that graphs can record; grad_unit corrects them to
    // the number of loss tokens. A step whose tokens are all masked has none.
    const double count = double(std::max<int64_t>(loss_tokens, 1));
    watchdog.phase("update", step + 1);
    update(ctx, model, optimizer, acts, 1 / count, double(o.total_batch_tokens) / count);
    copy_to_host_async(q.scalars(), acts.scalars.data, sizeof(StepScalars), ctx.stream);
    if (acts.fp8) copy_to_host_async(q.fp8_counts(), acts.fp8->counts().data, QueuedStep::FP8_BYTES, ctx.stream);
    q.end.record(ctx.stream);
    if (ctx.world > 1) ctx.comm->watch(str("step ", step + 1), ctx.stream);
    q.step = ++step;
    queued++;
    val_loss = NAN;
    return true;
}

// Waits for the oldest queued step and reports it.
void Trainer::finish_step(RunLog& log, Progress& progress) {
    const QueuedStep& q = queue[finished++ % 2];
    watchdog.phase("waiting for the device", q.step);
    ctx.wait(q.end);
    const StepScalars& r = *q.scalars();
    const double ms = elapsed_ms(q.begin, q.end), tokens_per_s = double(o.total_batch_tokens) / ms * 1e3;
    const double flops = tokens_per_s / double(ctx.world) * flop_per_token(model, o.seq_len);
    ordered_json line = {{"step", q.step},
                         {"loss", r.loss},
                         {"lr", r.lr},
                         {"grad_norm", r.grad_norm},
                         {"ms", ms},
                         {"tokens_per_s", tokens_per_s},
                         {"mfu", flops / peak_flops},
                         {"memory", planned_bytes}};
    if (o.measure_peak) line["of_measured"] = flops / measured_flops;
    if (r.skip) {
        line["skipped"] = true;
        if (r.skip == SKIP_SPIKE) line["spike"] = true;
        line["skips"] = q.step - r.t;  // since step 1
    }
    if (acts.fp8) {
        const auto fraction = [&](Fp8Count c) {
            return double(q.fp8_counts()[c]) / double(q.fp8_counts()[FP8_ELEMENTS]);
        };
        line["fp8_saturated"] = fraction(FP8_SATURATED), line["fp8_underflowed"] = fraction(FP8_UNDERFLOWED);
    }
    watchdog.phase("writing log.jsonl", q.step);
    log.write(line);
    char text[160];
    std::snprintf(text, sizeof text, "loss %.4f  lr %.2e  norm %.3f  %.0f tokens/s", r.loss, r.lr, r.grad_norm,
                  tokens_per_s);
    progress.step(q.step, text);

    skips_in_a_row = r.skip ? skips_in_a_row + 1 : 0;
    if (skips_in_a_row == o.max_skips) checkpoints.wait();
    const bool spike = r.skip == SKIP_SPIKE;
    if (r.skip)
        progress.note(str("step ", q.step,
                          spike ? str(": the gradient norm ", r.grad_norm, " is a spike")
                                : ": the loss or the gradient is not finite",
                          "; update skipped, ", q.step - r.t, " so far"));
    require(skips_in_a_row < o.max_skips, "stopped at step ", q.step, ": ",
            spike ? "the gradient norm was a spike or" : "loss or gradient", " not finite ", skips_in_a_row,
            " times in a row; the weights are those of step ", q.step - skips_in_a_row,
            "; lower --lr or raise --warmup", spike ? " or --spike-factor" : "",
            ", and start from the last checkpoint");
}

// The validation splits, and the questions of --eval-multiple-choice. Of several directories val_loss is the mean of
// their losses by their weights; the log and the line name each.
void Trainer::evaluate_splits(RunLog& log, Progress& progress) {
    const auto progressing = [this] { watchdog.phase("evaluating", step); };
    double sum = 0, weights = 0;
    ordered_json line = {{"step", step}}, by_directory;
    std::string text;
    for (size_t k = 0; k < s.data.size(); k++) {
        const TrainingData& data = s.data[k];
        if (!data.val_files) continue;
        const Evaluation e = evaluate(ctx, model, acts, *data.val_files, data.val_packing.get(),
                                      data.directory.end_of_text, o.eval_tokens, val_bytes[k], progressing);
        sum += double(data.weight) * e.loss();
        weights += double(data.weight);
        ordered_json& entry = s.data.size() > 1 ? by_directory[data.directory.path] : line;
        entry["val_loss"] = e.loss();
        entry["bits_per_byte"] = e.bits_per_byte();
        char part[128];
        int length = std::snprintf(part, sizeof part, "  val_loss %.4f", e.loss());
        if (e.bytes > 0) std::snprintf(part + length, sizeof part - length, "  bits_per_byte %.4f", e.bits_per_byte());
        text += s.data.size() > 1 ? str("\n  ", data.directory.path, part) : part;
    }
    if (weights > 0) line["val_loss"] = val_loss = sum / weights;
    if (weights > 0 && s.data.size() > 1) {
        line["val"] = by_directory;
        char mean[48];
        std::snprintf(mean, sizeof mean, "  val_loss %.4f", val_loss);
        text = mean + text;
    }
    if (!choices.empty()) {
        for (const auto& [name, value] :
             answer_questions(ctx, model, acts, s.questions, choices, *tokenizer, progressing)) {
            line[name] = value;
            char part[64];
            std::snprintf(part, sizeof part, "  %s %.4f", name.c_str(), value);
            text += part;
        }
    }
    log.write(line);
    progress.note(str("step ", step, text));
}

// Whether any rank was asked to stop. Every rank asks before each micro-step and gets the same answer, so all leave out
// the same micro-steps and none waits for a collective that the others don't call. Hosts wait for each other here, the
// devices meanwhile run what is queued.
bool Trainer::stopping() {
    const char asked = stop_requested();
    ctx.comm->all_gather_host(asked_to_stop.data(), &asked, 1);
    return std::find(asked_to_stop.begin(), asked_to_stop.end(), 1) != asked_to_stop.end();
}

void Trainer::sample_text(RunLog& log, Progress& progress) {
    const int64_t vocab = sampled_vocab(model.config, tokenizer.get());
    ordered_json samples;
    for (const SamplePrompts::Prompt& prompt : s.sample_prompts.prompts) {
        Completion completion(tokenizer.get(), s.sample_prompts.completion);
        std::vector<int32_t> tokens = prompt.tokens;
        const auto sequence = int64_t(samples.size());
        do {
            watchdog.phase("sampling", step);
            tokens.push_back(
                next_token(ctx, model, acts, tokens, vocab, o.seed, {sequence, int64_t(tokens.size()) - 1}));
        } while (!completion.add(tokens.back()));
        progress.note(prompt.text.empty()
                          ? str("step ", step, "  sample: ", completion.text())
                          : str("step ", step, "  prompt: ", prompt.text, "\n  response: ", completion.text()));
        samples.push_back({{"prompt", prompt.text}, {"text", completion.text()}});
    }
    log.write({{"step", step}, {"samples", samples}});
}

namespace {

// For trainer.json: all data that the run has used, the last one since its first_step.
ordered_json data_history(const TrainSetup& s) {
    std::vector<DataUse> uses = s.resume.data;
    uses.push_back(s.data_use);
    ordered_json history = ordered_json::array();
    for (const DataUse& use : uses)
        history.push_back({{"first_step", use.first_step}, {"data", use.data}, {"fingerprint", use.fingerprint}});
    return history;
}

}  // namespace

// Starts a checkpoint of this step, or with `last` writes it.
void Trainer::save(bool last) {
    if (saved_step == step && !(last && checkpoints.failed())) return;
    saved_step = step;
    watchdog.phase("saving a checkpoint", step);
    ctx.wait_for_stream("a checkpoint");
    const StepScalars scalars = read_scalars(ctx, acts);
    const int64_t adam_steps = scalars.t;
    ordered_json rates;
    for (size_t g = 0; g < NUM_RATE_GROUPS; g++) rates[RATE_GROUP_NAMES[g]] = learning_rates(o)[g];
    nlohmann::json trainer = {{"step", step},
                              {"adam_steps", adam_steps},
                              {"norm_count", scalars.norm_count},
                              {"grad_norms", scalars.norms},
                              {"samples", step * (o.total_batch_tokens / o.seq_len)},
                              {"seed", o.seed},
                              {"seq_len", o.seq_len},
                              {"total_batch_tokens", o.total_batch_tokens},
                              {"data", s.data_use.fingerprint},
                              {"data_history", data_history(s)},
                              {"pack", o.pack},
                              {"dtype", dtype_name(dtype)},
                              {"optimizer", OPTIMIZER_NAMES[size_t(o.optimizer)]},
                              {"optimizer_dtype", o.optimizer_dtype},
                              {"lora", o.lora.description()},
                              {"learning_rates", rates},
                              {"gemm", matmul_choices(ctx.stream, true)},
                              {"val_loss", val_loss}};
    if (acts.fp8) trainer["fp8"] = {{"steps", acts.fp8->recorded()}, {"history", acts.fp8->history(ctx.stream)}};
    SafetensorsWriter::Metadata metadata = {{"step", str(step)}, {"adam_steps", str(adam_steps)}};
    metadata.insert(base_record.begin(), base_record.end());
    const auto small_files = [this, trainer](const std::string& directory) {
        if (model.adapters)
            LoraAdapter::write_config(directory, model.lora->options, s.source.directory, model.table);
        else
            save_model_files(directory, model.config, s.source.original_config,
                             {s.source.directory, s.tokenizer_data().path});
        write_json(join_path(directory, "trainer.json"), trainer);
    };
    // In the files of tensors too, so that a file of another checkpoint is noticed.
    const TrainingArenas arenas = {model.trained().arenas, optimizer.m, optimizer.v};
    checkpoints.save({step, std::move(metadata), small_files}, arenas, last);
}

// The attention sequences that a recorded micro-step has room for; 0: none is recorded, or it has one per training
// sequence. Documents of fewer than 16 tokens on average are rare: micro-steps that hold more are queued kernel by
// kernel.
int64_t Trainer::max_sequences() const {
    if (!graphs_replay() || model.config.has_linear_attention()) return 0;
    int64_t in_sequence = o.document_mask ? o.seq_len / 16 : -1;
    for (const TrainingData& data : s.data)
        if (data.train_packing) in_sequence = std::max(in_sequence, data.train_packing->max_examples());
    return o.batch_size * std::min(in_sequence + 1, o.seq_len);
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
    options.max_sequences = max_sequences();
    options.end_of_text = s.tokenizer_data().end_of_text;
    options.vocab_size = model.config.vocab_size;
    return options;
}

void Trainer::run() {
    catch_stop_signals();
    Progress progress(o.steps, step, ctx.rank == 0);
    checkpoints.note = [&](const std::string& line) { progress.note(line); };
    RunLog log(ctx.rank == 0 ? join_path(o.out, "log.jsonl") : "", step,
               [&](const std::string& line) { progress.note(line); });
    const int64_t first_batch = o.overfit_one_batch ? 0 : step - s.data_use.first_step;  // resumed, the same one batch
    Loader loader(s.sources(), loader_options(), first_batch);
    progress.note(
        str(step ? str("resumed from ", s.resume.checkpoint, o.new_data.empty() ? "" : " with new data", "; ") : "",
            describe_training_data(s, loader), s.data.size() > 1 ? "\n" : ", ", with_commas(o.total_batch_tokens),
            s.data.size() > 1 ? " tokens" : "", " a step"));
    while (step < o.steps) {
        if (step + 1 == o.profile) ctx.profiler.start(ctx.stream);
        if (!queue_step(loader)) break;
        checkpoints.poll();
        if (ctx.profiler.on()) {
            ctx.profiler.stop();
            progress.note(str("profile of step ", step, "\n", ctx.profiler.report()));
        }
        const bool last = step == o.steps,
                   evaluating = s.evaluates() && (last || (o.eval_every && step % o.eval_every == 0)),
                   sampling = o.sample_every && step % o.sample_every == 0,
                   saving = last || (o.save_every && step % o.save_every == 0);
        // Finishes the previous step. Finishes this one too if evaluation, sampling or saving follows, or if it is
        // already done. Several ranks do not ask whether it is done: their answers could differ, but they must act
        // alike.
        while (finished < queued && (queued - finished > 1 || evaluating || sampling || saving ||
                                     (ctx.world == 1 && queue[finished % 2].end.reached()))) {
            finish_step(log, progress);
        }
        if (evaluating) evaluate_splits(log, progress);
        if (sampling) sample_text(log, progress);
        if (saving) save(last);
    }
    while (finished < queued) finish_step(log, progress);
    progress.finish();
    watchdog.phase("waiting for a checkpoint", step);
    checkpoints.wait();
    save(true);
    if (step < o.steps) progress.note(str("stopped at step ", step, "; 'train --resume --out ", o.out, "' continues"));
}

// --------------------------------------------------------------------------------------------------------------------
// The command `train`.

void run_train(const Args& args) {
    TrainOptions options = parse_train(args);
    if (const int64_t ranks = ranks_to_start(options.launch)) {
        // Reports an error once, not once per rank.
        if (is_directory(options.out)) DirectoryLock(options.out, "--out");
        check_training(options, ranks);
        Args command = {"train"};
        command.insert(command.end(), args.begin(), args.end());
        return run_ranks(ranks, command);
    }
    const Context ctx(join_world(options.launch));
    std::unique_ptr<DirectoryLock> lock;
    claim_run_directory(ctx, options.out, lock);  // before its checkpoints are looked at
    TrainSetup setup = check_training(std::move(options), ctx.world);
    if (setup.resume.step >= setup.o.steps) {
        if (ctx.rank > 0) return;
        std::cerr << setup.o.out << " is done: step " << setup.resume.step << " of " << setup.o.steps
                  << "; raise --steps to continue\n";
        return;
    }
    Trainer(ctx, std::move(setup), std::move(lock)).run();
}
