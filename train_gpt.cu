// train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA.
//
// This file is the model and the training step, from top to bottom in the order in which data flows:
//
//     parameter table → forward → loss → backward → update → training loop
//
// model.h declares the model and the step. driver/ holds the parts with a file of their own: linear layers with
// adapters or in fp8, the memory plan of activations, evaluation, and what a run does between its steps. This file
// contains no kernels: it calls the launchers of kernels/. g++ compiles it for the CPU and nvcc for the GPU; the
// Makefile decides which definitions of the launchers are linked.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "driver/linear_layer.h"
#include "driver/trainer.h"
#include "kernels/activation_functions.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "kernels/layernorm.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/matmul.h"
#include "kernels/qk_norm_all_heads.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/softcap.h"
#include "models/family.h"
#include "runtime/files/files.h"
#include "runtime/model/head_views.h"
#include "runtime/signals.h"

// --------------------------------------------------------------------------------------------------------------------
// The parameter table: the only list of the model's tensors.

namespace {

// Norms and the decay gate's bias stay fp32 in a 16-bit model too: they are few, and their precision matters. They form
// the last group of the table.
bool stays_fp32(Role role) {
    return role == NORM1_W || role == NORM1_B || role == NORM2_W || role == NORM2_B || role == NORMF_W ||
           role == NORMF_B || role == EMBEDNORM_W || role == EMBEDNORM_B || role == QNORM_W || role == KNORM_W ||
           role == HEADNORM_W || role == DECAY_GATE_B;
}

// The standard deviation of a matrix's initial weights. gpt2: by Init::GPT2.
double initial_std(const ModelConfig& c, Role role, int64_t inputs, double gpt2) {
    if (c.zero_init && (role == PROJ_W || role == FCPROJ_W || role == HEAD_W)) return 0;
    if (c.init == Init::GPT2) return gpt2;
    const bool lookup_only = role == WPE || (role == WTE && !c.tied);
    return lookup_only ? 1 : std::sqrt(0.33 / double(inputs));
}

RateGroup rate_group(Role role, bool matrix) {
    if (role == WTE || role == WPE) return RateGroup::Embeddings;
    if (role == HEAD_W) return RateGroup::Head;
    return matrix && role != DECAY_GATE_W ? RateGroup::HiddenMatrices : RateGroup::Vectors;
}

}  // namespace

ParamTable parameter_table(const ModelConfig& c, int64_t world, OptimizerType hidden_matrices) {
    const Family& family = family_of(c);
    ParamTable table;

    // Adds a parameter of rows × cols; cols = 0 for a vector. Its initial values are normal(0, init_std), or init_value
    // if init_std is 0. sources: the tensors of a Hugging Face checkpoint that it is made of; {}: one of its own name.
    auto add = [&](Role role, int64_t layer, const std::string& name, int64_t rows, int64_t cols, double init_std,
                   double init_value, std::vector<SourceTensor> sources) {
        const bool embedding = role == WTE || role == WPE || (role == HEAD_B && c.tied);
        const int64_t group = stays_fp32(role) ? c.layers + 2 : layer >= 0 ? 1 + layer : embedding ? 0 : 1 + c.layers;
        const int64_t padded = role == WTE || role == HEAD_W || role == HEAD_B ? c.padded_vocab() : rows;
        if (cols > 0) init_std = initial_std(c, role, cols, init_std);
        if (sources.empty()) sources = {{name, 0, rows, false}};
        table.params.push_back({role, static_cast<int>(layer), static_cast<int>(group), name, rows, cols, padded,
                                static_cast<float>(init_std), static_cast<float>(init_value), cols > 0,
                                stays_fp32(role), std::move(sources)});
        Param& p = table.params.back();
        p.rate_group = rate_group(role, cols > 0);
        if (p.rate_group == RateGroup::HiddenMatrices) {
            p.optimizer = hidden_matrices;
            p.part_rows = {rows};
        }
    };
    const double weight_std = c.init_std;
    // Each block adds to the residual stream twice. The factor keeps the stream's variance independent of the number of
    // layers (GPT-2, section 2.3).
    const double residual_std = weight_std / std::sqrt(2.0 * double(c.layers));
    const int64_t C = c.channels, V = c.vocab_size, q_rows = c.heads * c.head_size, kv_rows = c.kv_heads * c.head_size;

    auto norm = [&](Role role, int64_t layer, const std::string& name, int64_t n) {
        add(role, layer, name + ".weight", n, 0, 0, 1, source_tensors(family, role, false, layer, {n}));
    };
    auto norm_of_channels = [&](Role role, int64_t layer, const std::string& name) {
        norm(role, layer, name, C);
        if (c.norm != Norm::LayerNorm) return;
        add(bias_of(role), layer, name + ".bias", C, 0, 0, 0, source_tensors(family, role, true, layer, {C}));
    };
    // A linear layer: weight and bias. parts: the rows of the matrices that it fuses (q, k, v; gate, up), which may be
    // tensors of their own in files.
    using Parts = std::vector<int64_t>;
    auto linear = [&](Role role, int64_t layer, const std::string& name, const Parts& parts, int64_t cols,
                      double init_std, bool bias) {
        const int64_t rows = std::accumulate(parts.begin(), parts.end(), int64_t(0));
        add(role, layer, name + ".weight", rows, cols, init_std, 0, source_tensors(family, role, false, layer, parts));
        table.params.back().part_rows = parts;
        if (!bias) return;
        add(bias_of(role), layer, name + ".bias", rows, 0, 0, 0, source_tensors(family, role, true, layer, parts));
    };
    // An embedding or the head.
    auto table_of_rows = [&](Role role, const std::string& name, int64_t rows) {
        add(role, -1, name + ".weight", rows, C, weight_std, 0, source_tensors(family, role, false, -1, {rows}));
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
    if (sharding.splits_weights()) buffers = GroupBuffers(table, WeightGatherer::LAYER_BUFFERS, false);
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
    if (nf4) {
        arenas.weights.starts = Nf4Base::other_starts(table);
        nf4->allocate();
    }
    if (gathered()) arenas.weights.views = buffers.views(table, part(precision.dtype, gathered()));
    if (master())
        arenas.master = sharding.arena(master_memory.at(0, DType::F32, {master()}), sharding.splits_optimizer());
    if (fp32()) arenas.fp32 = part(DType::F32, fp32());
    arenas.fp32.origin = table.total - table.fp32_total;
    if (gathered()) gatherer = std::make_unique<WeightGatherer>(ctx, table, arenas.weights, buffers);
    if (adapters) adapters->allocate(ctx);
}

// --------------------------------------------------------------------------------------------------------------------
// Forward.

namespace {

// The rows of the tokens with a target. On a GPU whole chunks of the head, filled up with −1, so that a recorded
// micro-step fits every batch with as many chunks. Empty: no chunk can be left out.
std::vector<int32_t> find_loss_rows(const Activations& acts, const std::vector<int32_t>& targets) {
    const size_t count = targets.size() - size_t(std::count(targets.begin(), targets.end(), Batch::NO_TARGET));
    const size_t unit = acts.logits.device == Device::CPU ? 1 : size_t(acts.logits.shape[0]);
    const size_t size = std::max<size_t>((count + unit - 1) / unit, 1) * unit;
    if (size >= targets.size()) return {};
    std::vector<int32_t> rows;
    rows.reserve(size);
    for (size_t n = 0; n < targets.size(); n++)
        if (targets[n] != Batch::NO_TARGET) rows.push_back(static_cast<int32_t>(n));
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
    require(S >= 2, "upload: the batch has no attention sequence");
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

// out = norm(inp + added), and inp + added becomes the residual stream a.inp. If added is null: out = norm(a.inp),
// because a matmul has added already.
void norm_forward(const Context& ctx, const Model& model, Role role, int64_t layer, const NormActs& a, Tensor inp = {},
                  Tensor added = {}) {
    const Range range(ctx.profiler, "norm");
    const float eps = static_cast<float>(model.config.norm_eps);
    const Tensor weight = model.weight(role, layer), bias = model.weight(bias_of(role), layer);
    const Tensor sum = added ? a.inp : Tensor{};
    if (!added) inp = a.inp;
    if (model.config.norm == Norm::LayerNorm)
        layernorm_forward(a.out, sum, a.mean, a.rstd, inp, added, weight, bias, eps, ctx.stream);
    else
        rmsnorm_forward(a.out, sum, a.rstd, inp, added, weight, eps, ctx.stream);
}

// The norm after attention or the MLP: a.out = stream + norm(a.inp).
void norm_after_forward(const Context& ctx, const Model& model, Role role, int64_t layer, const NormActs& a,
                        Tensor stream) {
    const Range range(ctx.profiler, "norm");
    rmsnorm_add_forward(a.out, a.rstd, a.inp, stream, model.weight(role, layer),
                        static_cast<float>(model.config.norm_eps), ctx.stream);
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
    if (a.act)  // else mlp_half_backward() computes it again
        activation_forward(activation_of(model.config.mlp), a.act, a.fc, ctx.stream);
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

// next_stream = stream + proj or fcproj of inp. If out exists, it receives the layer's output, and the norm that
// follows adds that to the stream.
void add_to_stream(const Context& ctx, const Model& model, const Activations& acts, Role role, int64_t l, Tensor out,
                   Tensor next_stream, Tensor inp, Tensor stream, Pass pass) {
    if (out) return linear_forward(ctx, model, acts, role, l, out, inp, {}, pass);
    linear_forward(ctx, model, acts, role, l, next_stream, inp, {}, pass, stream);
}

// A block from the input of attention to the MLP's activation: the part that `--recompute block` repeats. The caller
// does the last matmul, because the backward pass does not need that matmul's output.
void block_forward(const Context& ctx, const Model& model, int64_t l, const LayerActs& a, const Activations& acts,
                   const Input& in, Pass pass) {
    linear_forward(ctx, model, acts, QKV_W, l, a.qkv, qkv_input(a), a.norm1_t, pass);
    layer_decay_gate_forward(ctx, model, l, a);
    qk_forward(ctx, model, acts, in, l, a);
    layer_attention_forward(ctx, model, l, a, acts, in);
    add_to_stream(ctx, model, acts, PROJ_W, l, a.proj, a.res2, a.att, a.res1, pass);
    if (model.config.norm_after)
        norm_after_forward(ctx, model, NORM1_W, l, norm_after_attention(a), a.res1);
    else
        norm_forward(ctx, model, NORM2_W, l, norm2(a), a.res1, a.proj);
    if (acts.shape.activation_epilogue == ActivationEpilogue::Both) {
        const Range range(ctx.profiler, "fc");
        matmul_forward_activation(activation_of(model.config.mlp), a.act, a.fc, fc_input(a), model.weight(FC_W, l),
                                  model.weight(FC_B, l), ctx.stream);
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
    const NormActs last = final_norm(acts, in.n);
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
        const Tensor next_stream = l + 1 < L ? first_rows(acts.forward[size_t(l + 1)].res1, in.n) : last.inp;
        add_to_stream(ctx, model, acts, FCPROJ_W, l, a.fcproj, next_stream, a.act, a.res2, Pass::First);
        if (acts.in_host_memory(l)) acts.host_inputs->wait();  // then res1 may be overwritten
        previous = a;
    }
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

// Tokens begin … end of the head's input, for linear_cross_entropy.
LinearCrossEntropy head_of(const Model& model, const Activations& acts, const Input& in, const Tensor& inp,
                           int64_t begin, int64_t end) {
    LinearCrossEntropy head;
    head.losses = acts.losses.rows(begin, end);
    head.targets = in.targets.rows(begin, end);
    head.inp = inp.rows(begin, end);
    head.logits = acts.logits.rows(0, end - begin);
    head.weight = model.weight(model.head());
    head.bias = model.weight(HEAD_B);
    head.V = model.config.vocab_size;
    head.softcap = model.config.logit_softcap;
    return head;
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
    const GatheredGroup weights = model.use(ctx, model.head_group());
    for (int64_t begin = 0; begin < in.n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, in.n);
        const LinearCrossEntropy head = head_of(model, acts, in, acts.normf, begin, end);
        if (look) {
            head_forward(ctx, model, acts, head.inp);
            cross_entropy_forward(head.losses, head.logits, head.targets, head.V, head.softcap, ctx.stream);
            look(begin, head.logits);
        } else {
            const Range range(ctx.profiler, "head and loss");
            linear_cross_entropy_forward(head, ctx.stream);
        }
    }
    sum_losses(acts.loss_sum, acts.losses.rows(0, in.n), accumulate, ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Backward. The first micro-step overwrites the gradients of parameters, the others add to them (accumulate), so
// nothing is zeroed. Gradients of activations are overwritten. grads.open() and grads.close() enclose the writes of a
// group's gradient; close() starts its reduction over the ranks (parallel/gradients.h).

namespace {

// The head, chunk by chunk of tokens: losses, the head's weight gradient and dnormf. Tokens without a target have no
// gradient. If they are left out (in.loss_rows), the rows of the loss tokens are gathered into dnormf's memory, their
// gradients are computed in normf's, and scattered to dnormf.
void head_forward_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                           const Input& in, float dloss, bool accumulate) {
    const Range range(ctx.profiler, "head and loss");
    const int64_t chunk = acts.logits.shape[0];
    const GatheredGroup weights = model.use(ctx, model.head_group());
    const Tensor dweight = model.gradient(grads, model.head());
    const int64_t n = in.head_tokens();
    const Tensor inp = in.loss_rows ? acts.dnormf : acts.normf, dinp = in.loss_rows ? acts.normf : acts.dnormf;
    if (in.loss_rows) gather_rows(inp.rows(0, n), acts.normf.rows(0, in.n), in.loss_rows, ctx.stream);
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, n);
        LinearCrossEntropy head = head_of(model, acts, in, inp, begin, end);
        head.dinp = dinp.rows(begin, end);
        head.dloss = dloss;
        head.accumulate = accumulate || begin > 0;
        if (!model.table.frozen) {
            head.dweight = dweight;
            head.dbias = model.gradient(grads, HEAD_B);
        }
        linear_cross_entropy(head, ctx.stream);
    }
    if (in.loss_rows) scatter_rows(acts.dnormf.rows(0, in.n), dinp.rows(0, n), in.loss_rows, ctx.stream);
}

struct NormGradients {
    Tensor dx;            // of the norm's input: the norm's gradient is added to it
    Tensor dout;          // of the norm's output
    Tensor dbias_before;  // of the bias of the linear layer before the norm (proj or fcproj): dx summed over the
                          // tokens. Null: no bias
    bool adds = true;     // false: dx is overwritten
};

void norm_backward(const Context& ctx, const Model& model, const Gradients& grads, Role role, int64_t layer,
                   const NormActs& a, const NormGradients& d, Tensor scratch, bool accumulate) {
    const Range range(ctx.profiler, "norm");
    const Tensor weight = model.weight(role, layer), dweight = model.gradient(grads, role, layer);
    const Tensor dbias = model.gradient(grads, bias_of(role), layer);
    const Tensor dresidual = d.adds ? d.dx : Tensor{};
    if (model.config.norm == Norm::LayerNorm) {
        layernorm_backward(d.dx, dweight, dbias, d.dbias_before, d.dout, dresidual, a.inp, weight, a.mean, a.rstd,
                           scratch, accumulate, ctx.stream);
    } else {
        rmsnorm_backward(d.dx, dweight, d.dbias_before, d.dout, dresidual, a.inp, weight, a.rstd, scratch, accumulate,
                         ctx.stream);
    }
}

// Where the gradient of the activation's input goes: over dact (GELU, ReLU²) or over the input (SwiGLU). If the forward
// pass did not keep act, it is computed again and overwrites dact.
ActivationGradient activation_gradient(const Model& model, const LayerActs& a) {
    ActivationGradient d;
    d.dpre = model.config.mlp == Mlp::SwiGLU ? a.fc : a.dact;
    d.dact = a.dact;
    if (!a.act) d.act = a.dact;
    return d;
}

void mlp_backward(const Context& ctx, const Model& model, const LayerActs& a) {
    const Range range(ctx.profiler, "activation");
    const ActivationGradient d = activation_gradient(model, a);
    activation_backward(activation_of(model.config.mlp), d.dpre, d.act, d.dact, a.fc, ctx.stream);
}

// fp8: the gradients of the activation function and of FC, instead of mlp_backward() and linear_backward(). The
// gradient of FC's output is stored in the model's dtype only if FC has a bias, whose gradient is computed from it.
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

// Where attention's backward pass sums the gradients of q, k and v, for that of the QKV projection's bias. Null: it
// does not.
AttentionGradientSums gradient_sums(const ModelConfig& c, const Activations& acts, const Input& in, int64_t l) {
    const bool planned = acts.dq_sums && c.attention_type(l) == AttentionType::Softmax;
    if (!planned || in.sequences.count) return {};
    const AttentionSumRows rows =
        attention_gradient_sum_rows(in.sequences.cum_q.shape[0] - 1, in.sequences.max_q, in.sequences.max_k, c.heads,
                                    c.head_size, acts.shape.dtype, acts.shape.deterministic);
    if (rows.dq > acts.dq_sums.shape[0] || rows.dkv > acts.dkv_sums.shape[0]) return {};
    return {acts.dq_sums.rows(0, rows.dq), acts.dkv_sums.rows(0, rows.dkv)};
}

// Computes a.dqkv and a.dlog_decay from a.datt. The gradient of the per-head norm overwrites that norm's output, a.att.
void layer_attention_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l,
                              const LayerActs& a, const Activations& acts, const Input& in,
                              const AttentionGradientSums& sums, bool accumulate) {
    const ModelConfig& c = model.config;
    const AttentionType type = c.attention_type(l);
    const bool gated = type == AttentionType::GatedLinear;
    const QkvHeads x = attention_inputs(c, a), d = split_qkv(c, a.dqkv);
    const Range range(ctx.profiler, "attention");
    if (type == AttentionType::Softmax) {
        attention_backward(d.q, d.k, d.v, split_heads(a.datt, c.heads), x.q, x.k, x.v, split_heads(a.att, c.heads),
                           a.lse, softmax_sequences(c, in, l), c.attention_scale(), acts.scratch, ctx.stream,
                           acts.shape.deterministic, sums);
        if (!sums.dq) return;
        const Tensor dbias = model.gradient(grads, QKV_B, l);
        const int64_t Q = sums.dq.shape[1];
        matmul_backward_bias(dbias.rows(0, Q), sums.dq, accumulate, ctx.stream);
        return matmul_backward_bias(dbias.rows(Q, dbias.shape[0]), sums.dkv, accumulate, ctx.stream);
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

// The gradients of fcproj and of the activation function in one matmul, with that of fc's bias.
void fused_mlp_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l, const LayerActs& a,
                        Tensor dout, bool accumulate) {
    ActivationGradient d = activation_gradient(model, a);
    d.dbias = bias_gradient(model, grads, FC_W, l);
    d.accumulate = accumulate;
    if (a.act) weight_backward(ctx, model, grads, FCPROJ_W, l, dout, a.act, {}, accumulate);
    {
        const Range range(ctx.profiler, "fcproj");
        matmul_backward_activation(activation_of(model.config.mlp), d, dout, model.weight(FCPROJ_W, l), a.fc,
                                   ctx.stream);
    }
    if (!a.act) weight_backward(ctx, model, grads, FCPROJ_W, l, dout, d.act, {}, accumulate);
}

// The MLP's half of a block, from the gradient of fcproj's output to that of fc's input, dinp. adds: to dinp.
void mlp_half_backward(const Context& ctx, const Model& model, const Gradients& grads, int64_t l, const LayerActs& a,
                       const Activations& acts, Tensor dinp, Tensor dout, bool adds, bool accumulate) {
    const Tensor dfc = activation_gradient(model, a).dpre;
    if (acts.shape.activation_epilogue != ActivationEpilogue::Off) {
        fused_mlp_backward(ctx, model, grads, l, a, dout, accumulate);
        weight_backward(ctx, model, grads, FC_W, l, dfc, fc_input(a), {}, accumulate);
        const Range range(ctx.profiler, "fc");
        return matmul_backward_input(dinp, dfc, model.weight(FC_W, l), adds, ctx.stream);
    }
    if (!a.act && !acts.uses_fp8(l)) {
        {
            const Range range(ctx.profiler, "fcproj");
            matmul_backward_input(a.dact, dout, model.weight(FCPROJ_W, l), false, ctx.stream);
        }
        mlp_backward(ctx, model, a);
        weight_backward(ctx, model, grads, FCPROJ_W, l, dout, a.dact, {}, accumulate);  // act is in dact now
    } else {
        linear_backward(ctx, model, grads, acts, FCPROJ_W, l, a.dact, dout, a.act, a.act_t, accumulate);
        if (acts.uses_fp8(l)) return fp8_fc_backward(ctx, model, grads, acts, l, a, accumulate);
        mlp_backward(ctx, model, a);
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
    const AttentionGradientSums sums = gradient_sums(model.config, acts, in, l);
    layer_attention_backward(ctx, model, grads, l, a, acts, in, sums, accumulate);
    qk_backward(ctx, model, grads, acts, in, l, a, accumulate);
    if (!passes_gradient_on(model, l)) dinp = {};
    linear_backward(ctx, model, grads, acts, QKV_W, l, dinp, a.dqkv, qkv_input(a), a.norm1_t, accumulate, adds,
                    !sums.dq);
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
        for (const Role role : LINEAR_LAYERS)
            if (acts.uses_fp8(l)) acts.fp8->update_weight(role, l, model.weight(role, l), ctx.stream);
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
// The training loop.

// Forward and backward over one batch. The first of a step overwrites the gradients, the others add to them.
void Trainer::micro_step(const Batch& batch, bool first, bool last, bool replay) {
    const Input in = upload(ctx, acts, batch, true);
    auto work = [&] {
        if (acts.fp8 && first) acts.fp8->begin_step(ctx.stream);
        forward(ctx, model, acts, in);
        backward(ctx, model, optimizer.grads, acts, in, static_cast<float>(1.0 / double(options.total_batch_tokens)),
                 first, last);
    };
    // A batch with more documents or examples than a recorded micro-step has room for needs other grids. A profiler
    // cannot time the parts of a graph. Calibration runs kernels that later steps do not.
    const bool has_own_shape = (options.document_mask || setup.packs()) && batch.num_sequences == 0;
    if (has_own_shape || ctx.profiler.on() || !replay || (acts.fp8 && acts.fp8->calibrates()))
        work();
    else
        graphs[first][last && optimizer.grads.completes_sums()][in.head_tokens()].run(ctx.stream, work);
}

// Queues one optimizer step: micro-steps whose gradients add up, then the update. The host runs ahead of the device by
// at most as many batches as Staging has buffers. False: the run was asked to stop, so the step was left out or left
// unfinished. That loses nothing: weights, optimizer state and step change only in the update, and the next step
// overwrites the gradients.
bool Trainer::queue_step(Loader& loader) {
    QueuedStep& q = queue[queued % 2];
    q.begin.record(ctx.stream);
    StepScalars settings{};
    settings.lr = static_cast<float>(learning_rate(options, step));
    settings.grad_clip = static_cast<float>(options.grad_clip);
    settings.momentum = static_cast<float>(momentum(options, step));
    settings.spike_factor = static_cast<float>(options.spike_factor);
    acts.staging->next();
    acts.staging->put(acts.scalars.data, &settings, offsetof(StepScalars, loss), ctx.stream);
    int64_t loss_tokens = 0;
    for (int64_t micro = 0; micro < setup.micro_steps; micro++) {
        if (stopping()) return false;
        watchdog.phase("reading training data", step + 1);
        if (options.overfit_one_batch && static_cast<int64_t>(one_batch.size()) < setup.micro_steps)
            one_batch.push_back(loader.next());
        const Batch& batch = options.overfit_one_batch ? one_batch[static_cast<size_t>(micro)] : loader.next();
        watchdog.phase("forward and backward", step + 1);
        if (optimizer.grads.numbers_micro_steps()) {
            const int64_t number = step * setup.micro_steps + micro;
            acts.staging->put(acts.micro_step.data, &number, sizeof number, ctx.stream);
        }
        micro_step(batch, micro == 0, micro + 1 == setup.micro_steps);
        loss_tokens += batch.loss_tokens;
    }
    // The gradients were divided by total_batch_tokens, a constant that graphs can record; grad_unit corrects them to
    // the number of loss tokens. A step whose tokens are all masked has none.
    const double count = double(std::max<int64_t>(loss_tokens, 1));
    watchdog.phase("update", step + 1);
    update(ctx, model, optimizer, acts, 1 / count, double(options.total_batch_tokens) / count);
    copy_to_host_async(q.scalars(), acts.scalars.data, sizeof(StepScalars), ctx.stream);
    if (acts.fp8) copy_to_host_async(q.fp8_counts(), acts.fp8->counts().data, QueuedStep::FP8_BYTES, ctx.stream);
    q.end.record(ctx.stream);
    if (ctx.world > 1) ctx.comm->watch(str("step ", step + 1), ctx.stream);
    q.step = ++step;
    queued++;
    val_loss = NAN;
    return true;
}

// Whether any rank was asked to stop. Every rank asks before each micro-step and gets the same answer, so all leave out
// the same micro-steps and none waits for a collective that the others don't call. Hosts wait for each other here, the
// devices meanwhile run what is queued.
bool Trainer::stopping() {
    const char asked = stop_requested();
    ctx.comm->all_gather_host(asked_to_stop.data(), &asked, 1);
    return std::find(asked_to_stop.begin(), asked_to_stop.end(), 1) != asked_to_stop.end();
}

void Trainer::run() {
    catch_stop_signals();
    Progress progress(options.steps, step, ctx.rank == 0);
    checkpoints.note = [&](const std::string& line) { progress.note(line); };
    RunLog log(ctx.rank == 0 ? join_path(options.out, "log.jsonl") : "", step,
               [&](const std::string& line) { progress.note(line); });
    const int64_t first_batch =
        options.overfit_one_batch ? 0 : step - setup.data_use.first_step;  // resumed, the same one batch
    Loader loader(setup.sources(), loader_options(), first_batch);
    progress.note(
        str(step ? str("resumed from ", setup.resume.checkpoint, options.new_data.empty() ? "" : " with new data", "; ")
                 : "",
            describe_training_data(setup, loader), setup.data.size() > 1 ? "\n" : ", ",
            with_commas(options.total_batch_tokens), setup.data.size() > 1 ? " tokens" : "", " a step"));
    while (step < options.steps) {
        if (step + 1 == options.profile) ctx.profiler.start(ctx.stream);
        if (!queue_step(loader)) break;
        checkpoints.poll();
        if (ctx.profiler.on()) {
            ctx.profiler.stop();
            progress.note(str("profile of step ", step, "\n", ctx.profiler.report()));
        }
        const bool last = step == options.steps,
                   evaluating = setup.evaluates() && (last || (options.eval_every && step % options.eval_every == 0)),
                   sampling = options.sample_every && step % options.sample_every == 0,
                   saving = last || (options.save_every && step % options.save_every == 0);
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
    if (step < options.steps)
        progress.note(str("stopped at step ", step, "; 'train --resume --out ", options.out, "' continues"));
}
