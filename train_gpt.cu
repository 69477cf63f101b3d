// train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA.
//
// This file is the model and the training step, from top to bottom in the order in which data flows:
//
//     parameter table → forward → loss → backward → update → training loop
//
// model.h declares the model and the step. driver/ holds the parts with a file of their own: linear layers with
// adapters or in fp8, the memory plan of activations, evaluation, and what a run does between its steps. This file
// contains no kernels: it calls the launchers of kernels/, and the Makefile decides which definitions of them are
// linked: the same text is the program for the CPU and for the GPU.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "driver/fp8_layer.h"
#include "driver/linear_layer.h"
#include "driver/norm_acts.h"
#include "driver/sequence_loss.h"
#include "driver/trainer.h"
#include "kernels/activation.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/qk_norm_all_heads.h"
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
    // Each block adds to the residual twice. The factor keeps the residual's variance independent of the number of
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
        const Parts fc = is_gated(c.activation) ? Parts{c.ffn, c.ffn} : Parts{c.ffn};
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
    if (p.packing) packed = std::make_unique<PackedWeights>(table, *p.packing);
    if (packed) starts = packed->other_starts(table);
}

Model::Model(const ModelConfig& model_config, const Sharding& ranks, Precision p, OptimizerType hidden_matrices,
             Offload to_host, const LoraOptions& lora_options, const Fp8Options& fp8_options)
    : Model(model_config, parameter_table(model_config, ranks.world, hidden_matrices), ranks, p) {
    offload = to_host;
    const int64_t parts = ranks.parts(ranks.splits_weights());
    const FrozenMemory::Kept where{Offload::place(offload.weights), parts > 1 ? ranks.rank : 0, parts};
    if (lora_options.nf4) {
        nf4 = std::make_unique<Nf4Base>(table, where);
        starts = Nf4Base::other_starts(table);
    } else if (lora_options.on() && fp8_options.on) {
        fp8 = std::make_unique<Fp8Base>(table, fp8_options.skip_first, config.layers - fp8_options.skip_last,
                                        fp8_options.keep_weights, p.dtype, where);
        starts = fp8->other_starts(table);
    } else if (fp8_options.on && fp8_options.keep_weights && splits_groups()) {
        const int64_t end = config.layers - fp8_options.skip_last;
        shards = std::make_unique<Fp8Shards>(table, ranks, p.dtype, fp8_options.skip_first, end);
    }
    if (splits_groups() || streams_groups()) buffers = GroupBuffers(table, WeightGatherer::LAYER_BUFFERS, false);
    if (!lora_options.on()) return;
    table.frozen = true;
    precision.master = false;
    lora = std::make_unique<LoraTable>(table, lora_options, ranks.world, hidden_matrices);
    const Sharding whole{std::min<int64_t>(ranks.stage, 2), ranks.rank, ranks.world};
    adapters.reset(new Model(config, lora->params, whole, p));
}

void Model::allocate(const Context& ctx) {
    const DType dtype = precision.dtype;
    const int64_t of_buffers = gathered() * dtype_size(dtype);
    memory = Arena(kept() * dtype_size(dtype), "weights", Offload::place(streams_groups()));
    buffer_memory = Arena(of_buffers + fp32() * 4, "gathered and fp32 weights");
    master_memory = Arena(master() * 4, "master weights", Offload::place(offload.master));
    arenas.weights = sharding.arena(memory.at(0, dtype, {kept()}), splits_groups());
    arenas.weights.starts = starts;
    if (nf4) nf4->memory.allocate("NF4 weights");
    if (fp8) fp8->memory.allocate("fp8 weights");
    if (packed) packed->allocate();
    if (master())
        arenas.master = sharding.arena(master_memory.at(0, DType::F32, {master()}), sharding.splits_optimizer());
    if (fp32()) arenas.fp32 = buffer_memory.at(of_buffers, DType::F32, {fp32()});
    arenas.fp32.origin = table.total - table.fp32_total;
    if (gathered()) {
        arenas.weights.views = buffers.views(table, buffer_memory.at(0, dtype, {gathered()}));
        std::vector<KeptGroup> groups = kept_groups(table, arenas.weights, buffers);
        if (shards) shards->allocate(ctx, table, arenas, groups);
        gatherer = std::make_unique<WeightGatherer>(ctx, std::move(groups), Offload::place(offload.weights));
    } else if (frozen() && frozen()->buffer_bytes()) {
        gatherer = std::make_unique<WeightGatherer>(ctx, frozen()->groups(table.num_groups()), frozen()->place());
    }
    if (sharding.splits_optimizer() && !table.frozen) arrivals = std::vector<Event>(size_t(table.num_groups()));
    if (adapters) adapters->allocate(ctx);
}

GatheredGroup Model::use(const Context& ctx, int group, int next) const {
    if (!arrivals.empty() && (!gatherer || group == fp32_group())) {
        const Range waiting(ctx.profiler, "wait for weights");
        arrivals[size_t(group)].make_wait_in_graph(ctx.stream);
    }
    return GatheredGroup(gatherer.get(), group, next, ctx.stream);
}

void Model::await_weights(const Context& ctx) const {
    const Range waiting(ctx.profiler, "wait for weights");
    for (const Event& arrival : arrivals) arrival.make_wait_in_graph(ctx.stream);
}

// --------------------------------------------------------------------------------------------------------------------
// Forward.

Input upload(const Context& ctx, const Activations& acts, const Batch& batch, bool loss_tokens_only) {
    const int64_t n = static_cast<int64_t>(batch.tokens.size()), S = static_cast<int64_t>(batch.cum_seqlens.size());
    auto put = [&](Tensor planned, const std::vector<int32_t>& host) {
        const Tensor t = planned.rows(0, static_cast<int64_t>(host.size()));
        acts.staging->put(t.data, host.data(), t.bytes(), ctx.stream);
        return t;
    };
    acts.staging->next();
    Input in{n, put(acts.tokens, batch.tokens), put(acts.positions, acts.angle_rows(batch, ctx.stream)), {}, {}, {}};
    std::vector<int32_t> rows;
    if (loss_tokens_only) rows = acts.shape.preference ? upload_pairs(ctx, acts, batch, in) : loss_rows(acts, batch);
    if (acts.shape.rollout && loss_tokens_only) upload_policy(ctx, acts, batch, rows, in);
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

// The input of the QKV projection, and that of FC.
Tensor qkv_input(const LayerActs& a) {
    return a.norm1 ? a.norm1 : a.res1;
}
Tensor fc_input(const LayerActs& a) {
    return a.norm2 ? a.norm2 : a.res2;
}

float norm_eps(const Pass& p) {
    return static_cast<float>(p.model.config.norm_eps);
}

// out = norm(inp + added), and inp + added becomes the residual a.inp. If added is null: out = norm(a.inp), because a
// matmul has added already.
void norm_forward(const Pass& p, Role role, int64_t layer, const NormActs& a, Tensor inp = {}, Tensor added = {}) {
    const Range range(p.ctx.profiler, "norm");
    const NormForward norm{.out = a.out,
                           .sum = added ? a.inp : Tensor{},
                           .mean = a.mean,
                           .rstd = a.rstd,
                           .inp = added ? inp : a.inp,
                           .residual = added,
                           .weight = p.model.weight(role, layer),
                           .bias = p.model.weight(bias_of(role), layer),
                           .eps = norm_eps(p)};
    switch (p.model.config.norm) {
        case Norm::LayerNorm:
            return layernorm_forward(norm, p.stream());
        case Norm::RMSNorm:
            return rmsnorm_forward(norm, p.stream());
    }
}

// The norm after attention or the MLP: a.out = residual + norm(a.inp).
void norm_after_forward(const Pass& p, Role role, int64_t layer, const NormActs& a, Tensor residual) {
    const Range range(p.ctx.profiler, "norm");
    const Tensor weight = p.model.weight(role, layer);
    rmsnorm_add_forward(
        {.out = a.out, .rstd = a.rstd, .inp = a.inp, .residual = residual, .weight = weight, .eps = norm_eps(p)},
        p.stream());
}

Activation activation_of(const Block& b) {
    return b.p.model.config.activation;
}

void mlp_forward(const Block& b) {
    const Range range(b.p.ctx.profiler, "activation");
    if (b.fp8() && (b.a.act_t || !b.again())) {
        return quantise_input(b, FCPROJ_W, !b.again(), b.a.act_t, [&](const Fp8Output& out) {
            fp8_activation_forward(out, b.a.act, activation_of(b), b.a.fc, b.p.stream());
        });
    }
    if (b.a.act)  // else mlp_half_backward() computes it again
        activation_forward(activation_of(b), b.a.act, b.a.fc, b.p.stream());
}

// The table that rotates q and k of the layer; null: nothing does.
Tensor rope_table_of(const Block& b) {
    return b.p.model.config.uses_rope(b.l) ? b.p.acts.rope_table : Tensor{};
}

// Applies QK-norm and RoPE to q and k, which are adjacent in the packed rows: in place, or from qkv to qk if the
// backward pass needs both.
void qk_forward(const Block& b) {
    const ModelConfig& c = b.p.model.config;
    const Tensor inp = split_qk(c, b.a.qkv), table = rope_table_of(b), positions = b.p.in.positions;
    if (c.qk_norm == QkNorm::Off) {
        if (!table) return;
        const Range range(b.p.ctx.profiler, "rope");
        return rope(inp, positions, table, false, b.p.stream());
    }
    const Range range(b.p.ctx.profiler, "qk_norm");
    const QkWeights weight{b.w.qnorm, b.w.knorm};
    if (c.qk_norm == QkNorm::AllHeads) {
        const Tensor rows = qk_rows(c, b.a.qkv);
        return qk_norm_all_heads_forward(b.a.qk ? b.a.qk : rows, {b.a.rstd_q, b.a.rstd_k}, rows, weight, positions,
                                         table, c.heads + c.kv_heads, norm_eps(b.p), b.p.stream());
    }
    const Tensor out = b.a.qk ? split_qk(c, b.a.qk) : inp;
    qk_norm_forward(out, b.a.rstd_qk, inp, weight, positions, table, c.heads, norm_eps(b.p), b.p.stream());
}

// The same for the gradients of q and k, in place in dqkv.
void qk_backward(const Block& b) {
    const ModelConfig& c = b.p.model.config;
    const Tensor d = split_qk(c, b.a.dqkv), table = rope_table_of(b), positions = b.p.in.positions;
    if (c.qk_norm == QkNorm::Off) {
        if (!table) return;
        const Range range(b.p.ctx.profiler, "rope");
        return rope(d, positions, table, true, b.p.stream());
    }
    const Range range(b.p.ctx.profiler, "qk_norm");
    const QkWeights weight{b.w.qnorm, b.w.knorm}, dweight{b.grad(QNORM_W).t, b.grad(KNORM_W).t};
    const bool accumulate = b.p.grads->accumulate();
    if (c.qk_norm == QkNorm::AllHeads) {
        return qk_norm_all_heads_backward(qk_rows(c, b.a.dqkv), dweight, qk_rows(c, b.a.qkv), {b.a.rstd_q, b.a.rstd_k},
                                          weight, positions, table, c.heads + c.kv_heads, b.p.acts.scratch, accumulate,
                                          b.p.stream());
    }
    qk_norm_backward(d, dweight, d, split_qk(c, b.a.qkv), b.a.rstd_qk, weight, positions, table, c.heads,
                     b.p.acts.scratch, accumulate, b.p.stream());
}

QkvHeads attention_inputs(const Block& b) {
    const ModelConfig& c = b.p.model.config;
    QkvHeads x = split_qkv(c, b.a.qkv);
    if (!b.a.qk) return x;
    const int64_t Q = c.heads * c.head_size;
    x.q = split_heads(b.a.qk.columns(0, Q), c.heads);
    x.k = split_heads(b.a.qk.columns(Q, b.a.qk.shape[1]), c.kv_heads);
    return x;
}

// Gated linear attention: computes a log decay for each token and KV head.
void layer_decay_gate_forward(const Block& b) {
    if (b.p.model.config.attention_type(b.l) != AttentionType::GatedLinear) return;
    const Range range(b.p.ctx.profiler, "gate");
    decay_gate_forward(b.a.log_decay, qkv_input(b.a), b.w.gate.weight, b.w.gate.bias, b.p.stream());
}

AttentionSequences softmax_sequences(const Block& b) {
    AttentionSequences sequences = b.p.in.sequences;
    sequences.window = b.p.model.config.window(b.l);
    return sequences;
}

}  // namespace

void attention_in_sequences(const Block& b) {
    const ModelConfig& c = b.p.model.config;
    const LayerActs& a = b.a;
    const AttentionType type = c.attention_type(b.l);
    const bool gated = type == AttentionType::GatedLinear;
    const QkvHeads x = attention_inputs(b);
    const Range range(b.p.ctx.profiler, "attention");
    if (type == AttentionType::Softmax) {
        return attention_forward(split_heads(a.att, c.heads), a.lse, x.q, x.k, x.v, softmax_sequences(b),
                                 c.attention_scale(), b.p.acts.forward_scratch, b.p.stream());
    }
    linear_attention_forward(split_heads(gated ? a.att_unnormed : a.att, c.heads), a.lse, {}, x.q, x.k, x.v,
                             a.log_decay, {}, {b.p.in.sequences.cum_q, b.p.in.sequences.max_q},
                             linear_attention_type(gated), b.p.acts.forward_scratch, b.p.stream());
    if (gated) {
        const Tensor out = head_matrix(a.att, c.heads), inp = head_matrix(a.att_unnormed, c.heads);
        rmsnorm_forward(
            {.out = out, .rstd = head_vector(a.rstd_att), .inp = inp, .weight = b.w.headnorm, .eps = norm_eps(b.p)},
            b.p.stream());
    }
}

namespace {

// next = residual + proj or fcproj of inp. If out exists, it receives the layer's output, and the norm that follows
// adds that to the residual.
void add_to_residual(const Block& b, Role role, Tensor out, Tensor next, Tensor inp, Tensor residual) {
    if (out) return linear_forward(b, role, out, inp);
    linear_forward(b, role, next, inp, {}, residual);
}

// A block from the input of attention to the MLP's activation: the part that `--recompute block` repeats. The caller
// does the last matmul, because the backward pass does not need that matmul's output.
void block_forward(const Block& b) {
    const LayerActs& a = b.a;
    linear_forward(b, QKV_W, a.qkv, qkv_input(a), a.norm1_t);
    layer_decay_gate_forward(b);
    qk_forward(b);
    b.p.attention(b);
    add_to_residual(b, PROJ_W, a.proj, a.res2, a.att, a.res1);
    if (b.p.model.config.norm_after)
        norm_after_forward(b.p, NORM1_W, b.l, norm_after_attention(a), a.res1);
    else
        norm_forward(b.p, NORM2_W, b.l, norm2(a), a.res1, a.proj);
    if (b.p.acts.shape.activation_epilogue == ActivationEpilogue::Both) {
        linear_forward_activation(b, FC_W, a.act, a.fc, fc_input(a));
    } else {
        linear_forward(b, FC_W, a.fc, fc_input(a), a.norm2_t);
        mlp_forward(b);
    }
}

}  // namespace

void forward(const Pass& pass) {
    // Without gradients: its blocks are those of the forward pass.
    const Pass p{pass.ctx, pass.model, pass.acts, pass.in, nullptr, pass.attention, pass.adapters};
    const Range range(p.ctx.profiler, "forward");
    const Model& model = p.model;
    const Activations& acts = p.acts;
    const int64_t L = model.config.layers;
    const bool norm_after = model.config.norm_after;
    const NormActs last = final_norm(p);
    LayerActs previous{};
    if (model.gatherer) model.gatherer->begin(p.stream());
    const GatheredGroup norms = model.use(p.ctx, model.fp32_group());
    for (int64_t l = 0; l < L; l++) {
        const Block b = block_of(p, l);
        const LayerActs& a = b.a;
        if (l == 0) {
            const Range embedding(p.ctx.profiler, "embedding");
            const GatheredGroup weights = model.use(p.ctx, 0, p.layer_group(0));
            const NormActs e = embedding_norm(p, a.res1);
            embed(p, model.config.embedding_norm ? e.inp : a.res1);
            if (model.config.embedding_norm) norm_forward(p, EMBEDNORM_W, -1, e);
            if (!norm_after) norm_forward(p, NORM1_W, l, norm1(a));
        } else if (norm_after) {
            norm_after_forward(p, NORM2_W, l - 1, norm_after_mlp(previous, a.res1), previous.res2);
        } else {
            norm_forward(p, NORM1_W, l, norm1(a), previous.res2, previous.fcproj);
        }
        const GatheredGroup weights =
            model.use(p.ctx, p.layer_group(l), l + 1 < L ? p.layer_group(l + 1) : model.head_group());
        if (acts.in_host_memory(l)) acts.host_inputs->store(l, a.res1);
        block_forward(b);
        const Tensor next = l + 1 < L ? first_rows(acts.forward[size_t(l + 1)].res1, p.in.n) : last.inp;
        add_to_residual(b, FCPROJ_W, a.fcproj, next, a.act, a.res2);
        if (acts.in_host_memory(l)) acts.host_inputs->wait();  // then res1 may be overwritten
        previous = a;
    }
    if (norm_after) {
        norm_after_forward(p, NORM2_W, L - 1, norm_after_mlp(previous, last.inp), previous.res2);
        norm_forward(p, NORMF_W, -1, last);
    } else {
        norm_forward(p, NORMF_W, -1, last, previous.res2, previous.fcproj);
    }
}

namespace {

// The head's output before the softcap, which cross_entropy applies itself.
Tensor head_forward(const Pass& p, Tensor inp) {
    const Range range(p.ctx.profiler, "head");
    const GatheredGroup weights = p.model.use(p.ctx, p.model.head_group());
    const Tensor out = p.acts.logits.rows(0, inp.shape[0]);
    const LinearWeights w = linear_weights(p.model, p.model.head());
    w.packed ? packed_forward(p, out, inp, w) : matmul_forward(out, inp, w.weight, w.bias, p.stream());
    if (p.adapters && w.lora.a) add_low_rank(out, p.acts.low_rank.rows(0, inp.shape[0]), inp, w.lora, p.stream());
    return out;
}

// The head's input: normf, or the rows of the loss tokens alone, gathered into dnormf's memory; with a temperature
// divided by it.
Tensor head_input(const Pass& p) {
    const Tensor &normf = p.acts.normf, &gathered = p.acts.dnormf;
    if (!p.in.loss_rows) return normf;
    gather_rows(gathered.rows(0, p.in.head_tokens()), normf.rows(0, p.in.n), p.in.loss_rows, p.stream(),
                logit_scale(p.acts));
    return gathered;
}

// Rows begin … end of the head's input, for linear_cross_entropy.
LinearCrossEntropy head_of(const Pass& p, const Tensor& inp, int64_t begin, int64_t end) {
    LinearCrossEntropy head;
    head.losses = p.acts.losses.rows(begin, end);
    head.targets = p.in.targets.rows(begin, end);
    head.inp = inp.rows(begin, end);
    head.logits = p.acts.logits.rows(0, end - begin);
    head.weight = p.model.weight(p.model.head());
    head.bias = p.model.weight(HEAD_B);
    head.V = p.model.config.vocab_size;
    head.softcap = p.model.config.logit_softcap;
    head.lora = adapter_of(p, p.model.head());
    if (head.lora.a) head.low_rank = p.acts.low_rank.rows(0, end - begin);
    return head;
}

}  // namespace

Tensor head_logits(const Pass& p, int64_t begin, int64_t end) {
    const Tensor logits = head_forward(p, p.acts.normf.rows(begin, end));
    softcap_forward(logits, p.model.config.logit_softcap, p.stream());
    return logits;
}

void token_losses(const Pass& p, const std::function<void(int64_t begin, Tensor logits)>& look) {
    const int64_t chunk = p.acts.logits.shape[0], n = p.in.head_tokens();
    const GatheredGroup weights = p.model.use(p.ctx, p.model.head_group());
    const Tensor inp = head_input(p);
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const LinearCrossEntropy head = head_of(p, inp, begin, std::min(begin + chunk, n));
        if (look || !head.weight) {  // or the head is packed
            head_forward(p, head.inp);
            cross_entropy_forward(head.losses, head.logits, head.targets, head.V, head.softcap, p.stream());
            if (look) look(begin, head.logits);
        } else {
            const Range range(p.ctx.profiler, "head and loss");
            linear_cross_entropy_forward(head, p.stream());
        }
    }
}

void evaluate_loss(const Pass& p, bool accumulate, const std::function<void(int64_t begin, Tensor logits)>& look) {
    token_losses(p, look);
    sum_losses(p.acts.loss_sum, p.acts.losses.rows(0, p.in.head_tokens()), accumulate, p.stream());
}

// --------------------------------------------------------------------------------------------------------------------
// Backward. The first micro-step writes over the gradients of parameters, the others add to them (Pass::grad), so
// nothing is zeroed. Gradients of activations are written over. grads.open() and grads.close() enclose the writes of a
// group's gradient; close() starts its reduction over the ranks (parallel/gradients.h).

namespace {

// The head, chunk by chunk of tokens: losses, the head's weight gradient and dnormf. Tokens without a target have no
// gradient. If they are left out (in.loss_rows), the gradients of the gathered rows are computed in normf's memory, and
// scattered to dnormf.
void head_forward_backward(const Pass& p, float dloss, bool first_micro) {
    const Range range(p.ctx.profiler, "head and loss");
    const Activations& acts = p.acts;
    const Input& in = p.in;
    const int64_t chunk = acts.logits.shape[0], n = in.head_tokens();
    const GatheredGroup weights = p.model.use(p.ctx, p.model.head_group());
    const Into dweight = p.grad(p.model.head());
    const Tensor inp = head_input(p), dinp = in.loss_rows ? acts.normf : acts.dnormf;
    const auto rows = [&](int64_t begin, int64_t end) {
        LinearCrossEntropy head = head_of(p, inp, begin, end);
        head.dinp = dinp.rows(begin, end);
        head.dloss = dloss;
        head.accumulate = dweight.add || begin > 0;
        head.dweight = dweight.t;
        head.dbias = p.grad(HEAD_B).t;
        if (!head.lora.a) return head;
        head.accumulate = p.grads->accumulate() || begin > 0;
        head.dlow_rank = acts.dlow_rank.rows(0, end - begin).columns(0, head.lora.a.shape[0]);
        head.da = p.model.adapters->gradient(*p.grads, lora_a(HEAD_W));
        head.db = p.model.adapters->gradient(*p.grads, lora_b(HEAD_W));
        return head;
    };
    if (acts.shape.preference)
        pair_head_forward_backward(p, dloss, rows);
    else if (acts.shape.rollout)
        policy_head_forward_backward(p, dloss, !first_micro, rows);
    else
        for (int64_t begin = 0; begin < n; begin += chunk)
            linear_cross_entropy(rows(begin, std::min(begin + chunk, n)), p.stream());
    if (!in.loss_rows) return;
    scatter_rows(acts.dnormf.rows(0, in.n), dinp.rows(0, n), in.loss_rows, p.stream(), logit_scale(acts));
}

struct NormGradients {
    Into dx;              // of the norm's input
    Tensor dout;          // of the norm's output
    Tensor dbias_before;  // of the bias of the linear layer before the norm (proj or fcproj): dx summed over the
                          // tokens. Null: no bias
};

void norm_backward(const Pass& p, Role role, int64_t layer, const NormActs& a, const NormGradients& d) {
    const Range range(p.ctx.profiler, "norm");
    const NormBackward norm{.dinp = d.dx.t,
                            .dweight = p.grad(role, layer).t,
                            .dbias = p.grad(bias_of(role), layer).t,
                            .dsum = d.dbias_before,
                            .dout = d.dout,
                            .dresidual = d.dx.add ? d.dx.t : Tensor{},
                            .inp = a.inp,
                            .weight = p.model.weight(role, layer),
                            .mean = a.mean,
                            .rstd = a.rstd,
                            .scratch = p.acts.scratch,
                            .accumulate = p.grads->accumulate()};
    switch (p.model.config.norm) {
        case Norm::LayerNorm:
            return layernorm_backward(norm, p.stream());
        case Norm::RMSNorm:
            return rmsnorm_backward(norm, p.stream());
    }
}

// Where the gradient of the activation's input goes: over dact, or if it is gated over the input. If the forward
// pass did not keep act, it is computed again and overwrites dact.
ActivationGradient activation_gradient(const Block& b) {
    ActivationGradient d;
    d.dpre = is_gated(activation_of(b)) ? b.a.fc : b.a.dact;
    d.dact = b.a.dact;
    if (!b.a.act) d.act = b.a.dact;
    return d;
}

void mlp_backward(const Block& b) {
    const Range range(b.p.ctx.profiler, "activation");
    const ActivationGradient d = activation_gradient(b);
    activation_backward(activation_of(b), d.dpre, d.act, d.dact, b.a.fc, b.p.stream());
}

// fp8: the gradients of the activation function and of FC, instead of mlp_backward() and linear_backward(). The
// gradient of FC's output is stored in the model's dtype only for the gradients of FC's bias and adapters.
void fp8_fc_backward(const Block& b) {
    const Tensor dbias = bias_gradient(b, FC_W);
    const Tensor dfc = dbias || b.w.fc.lora.a ? activation_gradient(b).dpre : Tensor{};
    fp8_linear_backward(b, FC_W, over(b.a.dnorm2), dfc, b.a.norm2, b.a.norm2_t, [&](const Fp8Output& out) {
        // dfc overwrites what a second call would read.
        fp8_activation_backward(out, out.rows ? dfc : Tensor{}, activation_of(b), b.a.dact, b.a.fc, b.p.stream());
    });
    if (dbias) matmul_backward_bias(dbias, dfc, b.p.grads->accumulate(), b.p.stream());
}

// Computes what the forward pass didn't keep, with the same kernels from the same inputs: the bits are the same.
void recompute(const Block& b) {
    const Range range(b.p.ctx.profiler, "recompute");
    const LayerActs& a = b.a;
    const Recompute level = b.p.acts.shape.recompute_in(b.l);
    const bool norm_after = b.p.model.config.norm_after;
    if (level >= Recompute::Norms && !norm_after) norm_forward(b.p, NORM1_W, b.l, norm1(a));
    if (level == Recompute::Block) {
        block_forward(b);
        if (norm_after) linear_forward(b, FCPROJ_W, a.fcproj, a.act);
        return;
    }
    if (level >= Recompute::Norms && a.qk) qk_forward(b);
    if (level >= Recompute::Norms && !norm_after) norm_forward(b.p, NORM2_W, b.l, norm2(a));
    if (level >= Recompute::Norms && a.norm1_t) {
        quantise_input(b, QKV_W, a.norm1, false, a.norm1_t);
        quantise_input(b, FC_W, a.norm2, false, a.norm2_t);
    }
    if (level >= Recompute::Activation) mlp_forward(b);
}

// Where attention's backward pass sums the gradients of q, k and v, for that of the QKV projection's bias. Null: it
// does not.
AttentionGradientSums gradient_sums(const Block& b) {
    const ModelConfig& c = b.p.model.config;
    const Activations& acts = b.p.acts;
    const AttentionSequences& sequences = b.p.in.sequences;
    const bool planned = acts.dq_sums && c.attention_type(b.l) == AttentionType::Softmax;
    if (!planned || sequences.count) return {};
    const AttentionSumRows rows =
        attention_gradient_sum_rows(sequences.cum_q.shape[0] - 1, sequences.max_q, sequences.max_k, c.heads,
                                    c.head_size, acts.shape.dtype, acts.shape.deterministic);
    if (rows.dq > acts.dq_sums.shape[0] || rows.dkv > acts.dkv_sums.shape[0]) return {};
    return {acts.dq_sums.rows(0, rows.dq), acts.dkv_sums.rows(0, rows.dkv)};
}

// Computes a.dqkv and a.dlog_decay from a.datt. The gradient of the per-head norm overwrites that norm's output, a.att.
void layer_attention_backward(const Block& b, const AttentionGradientSums& sums) {
    const ModelConfig& c = b.p.model.config;
    const LayerActs& a = b.a;
    const AttentionType type = c.attention_type(b.l);
    const bool gated = type == AttentionType::GatedLinear;
    const QkvHeads x = attention_inputs(b), d = split_qkv(c, a.dqkv);
    const Range range(b.p.ctx.profiler, "attention");
    if (type == AttentionType::Softmax) {
        attention_backward(d.q, d.k, d.v, split_heads(a.datt, c.heads), x.q, x.k, x.v, split_heads(a.att, c.heads),
                           a.lse, softmax_sequences(b), c.attention_scale(), b.p.acts.scratch, b.p.stream(),
                           b.p.acts.shape.deterministic, sums);
        if (!sums.dq) return;
        const Into dbias = b.grad(QKV_B);
        const int64_t Q = sums.dq.shape[1];
        matmul_backward_bias(dbias.t.rows(0, Q), sums.dq, dbias.add, b.p.stream());
        return matmul_backward_bias(dbias.t.rows(Q, dbias.t.shape[0]), sums.dkv, dbias.add, b.p.stream());
    }
    if (gated) {
        rmsnorm_backward({.dinp = head_matrix(a.att, c.heads),
                          .dweight = b.grad(HEADNORM_W).t,
                          .dout = head_matrix(a.datt, c.heads),
                          .inp = head_matrix(a.att_unnormed, c.heads),
                          .weight = b.w.headnorm,
                          .rstd = head_vector(a.rstd_att),
                          .scratch = b.p.acts.scratch,
                          .accumulate = b.p.grads->accumulate()},
                         b.p.stream());
    }
    linear_attention_backward(d.q, d.k, d.v, a.dlog_decay, {}, split_heads(gated ? a.att : a.datt, c.heads), {}, x.q,
                              x.k, x.v, a.log_decay, {}, split_heads(gated ? a.att_unnormed : a.att, c.heads), a.lse,
                              {b.p.in.sequences.cum_q, b.p.in.sequences.max_q}, linear_attention_type(gated),
                              b.p.acts.scratch, b.p.stream());
}

// Gated linear attention: gradients of the decay gate's weights, and of its input, which is added to dinp.
void layer_decay_gate_backward(const Block& b, Tensor dinp) {
    if (b.p.model.config.attention_type(b.l) != AttentionType::GatedLinear) return;
    const Range range(b.p.ctx.profiler, "gate");
    const Tensor dx = b.a.ddecay_gate.columns(0, b.p.model.config.kv_heads);
    decay_gate_backward(dx, b.a.dlog_decay, b.a.log_decay, b.p.stream());
    if (const Into dweight = b.grad(DECAY_GATE_W))
        matmul_backward_weight(dweight.t, b.grad(DECAY_GATE_B).t, dx, qkv_input(b.a), dweight.add, b.p.stream());
    matmul_backward_input(dinp, dx, b.w.gate.weight, true, b.p.stream());
}

// The gradients of fcproj and of the activation function in one matmul, with that of fc's bias.
void fused_mlp_backward(const Block& b, Tensor dout) {
    ActivationGradient d = activation_gradient(b);
    d.dbias = bias_gradient(b, FC_W);
    d.accumulate = b.p.grads->accumulate();
    linear_backward_activation(b, FCPROJ_W, d, dout);
}

// The MLP's half of a block, from the gradient of fcproj's output to that of fc's input.
void mlp_half_backward(const Block& b, Into dinp, Tensor dout) {
    const LayerActs& a = b.a;
    const Tensor dfc = activation_gradient(b).dpre;
    if (b.p.acts.shape.activation_epilogue != ActivationEpilogue::Off) {
        fused_mlp_backward(b, dout);
        return linear_backward(b, FC_W, dinp, dfc, fc_input(a), {}, false);
    }
    if (!a.act && !b.fp8()) {
        {
            const Range range(b.p.ctx.profiler, "fcproj");
            matmul_backward_input(a.dact, dout, linear_weight(b, FCPROJ_W), false, b.p.stream());
        }
        mlp_backward(b);
        weight_backward(b, FCPROJ_W, dout, a.dact, {});  // act is in dact now
    } else {
        linear_backward(b, FCPROJ_W, over(a.dact), dout, a.act, a.act_t);
        if (b.fp8()) return fp8_fc_backward(b);
        mlp_backward(b);
    }
    linear_backward(b, FC_W, dinp, dfc, fc_input(a), {});
}

// Whether a block's input needs a gradient: below the first block nothing but an adapter of the embedding is trained
// where the base is frozen.
bool passes_gradient_on(const Block& b) {
    return b.l > 0 || !b.p.model.table.frozen || adapter_of(b.p, WTE).a;
}

// The attention half, from the gradient of proj's output to that of the QKV projection's input.
void attention_half_backward(const Block& b, Into dinp, Tensor dout) {
    const LayerActs& a = b.a;
    if (a.att_t) quantise_input(b, PROJ_W, a.att, false, a.att_t);
    linear_backward(b, PROJ_W, over(a.datt), dout, a.att, a.att_t);
    const AttentionGradientSums sums = gradient_sums(b);
    layer_attention_backward(b, sums);
    qk_backward(b);
    if (!passes_gradient_on(b)) dinp = {};
    linear_backward(b, QKV_W, dinp, a.dqkv, qkv_input(a), a.norm1_t, !sums.dq);
    if (dinp) layer_decay_gate_backward(b, dinp.t);
}

// dx: on entry the gradient of the block's output, on return that of its input, if it needs one.
void block_backward(const Block& b, Tensor dx) {
    const Pass& p = b.p;
    mlp_half_backward(b, over(b.a.dnorm2), dx);
    norm_backward(p, NORM2_W, b.l, norm2(b.a), {onto(dx), b.a.dnorm2, b.grad(PROJ_B).t});
    attention_half_backward(b, over(b.a.dnorm1), dx);
    if (!passes_gradient_on(b)) return;
    Tensor dbias_before;
    if (b.l > 0) {  // norm1's backward pass writes the gradient of the previous layer's FCPROJ_B
        p.grads->open(p.model.layer_group(b.l - 1), p.stream());
        dbias_before = p.grad(FCPROJ_B, b.l - 1).t;
    }
    norm_backward(p, NORM1_W, b.l, norm1(b.a), {onto(dx), b.a.dnorm1, dbias_before});
}

// The same with norms after attention and the MLP: each half's gradient is added to dx.
void block_backward_norm_after(const Block& b, Tensor dx) {
    const Pass& p = b.p;
    norm_backward(p, NORM2_W, b.l, norm_after_mlp(b.a, {}), {over(b.a.dfcproj), dx, b.grad(FCPROJ_B).t});
    mlp_half_backward(b, onto(dx), b.a.dfcproj);
    norm_backward(p, NORM1_W, b.l, norm_after_attention(b.a), {over(b.a.dproj), dx, b.grad(PROJ_B).t});
    attention_half_backward(b, onto(dx), b.a.dproj);
    if (b.l > 0) p.grads->open(p.model.layer_group(b.l - 1), p.stream());
}

}  // namespace

void backward(const Pass& p, float dloss, bool first_micro, bool last_micro) {
    const Range range(p.ctx.profiler, "backward");
    const Model& model = p.model;
    const Activations& acts = p.acts;
    Gradients& grads = *p.grads;
    const int64_t n = p.in.n;
    grads.begin(first_micro, last_micro, acts.micro_step);
    const bool frozen = model.table.frozen;  // then only adapters have gradients
    const bool trains_head = !frozen || adapter_of(p, model.head()).a,
               trains_embedding = !frozen || adapter_of(p, WTE).a;
    if (!frozen) grads.open(model.fp32_group(), p.stream());
    if (trains_head) grads.open(model.head_group(), p.stream());
    head_forward_backward(p, dloss, first_micro);
    if (acts.shape.preference)
        sum_pairs(p, !first_micro);
    else if (!acts.shape.rollout)
        sum_losses(acts.loss_sum, acts.losses.rows(0, p.in.head_tokens()), !first_micro, p.stream());
    if (!model.config.tied && trains_head) grads.close(model.head_group(), p.stream());
    const Tensor dx = acts.dx.rows(0, n);
    const int64_t last = model.config.layers - 1;
    grads.open(model.layer_group(last), p.stream());
    const bool norm_after = model.config.norm_after;  // then its own norm follows the last fcproj
    const Tensor dbias_before = norm_after ? Tensor{} : p.grad(FCPROJ_B, last).t;
    norm_backward(p, NORMF_W, -1, final_norm(p), {over(dx), acts.dnormf.rows(0, n), dbias_before});
    for (int64_t l = last; l >= 0; l--) {
        const GatheredGroup weights = model.use(p.ctx, p.layer_group(l), l ? p.layer_group(l - 1) : -1);
        if (acts.in_host_memory(l)) acts.host_inputs->wait();
        if (l && acts.in_host_memory(l - 1))
            acts.host_inputs->fetch(l - 1, acts.backward[static_cast<size_t>(l - 1)].res1.rows(0, n));
        const Block b = block_of(p, l);
        recompute(b);
        (norm_after ? block_backward_norm_after : block_backward)(b, dx);
        grads.close(model.layer_group(l), p.stream());
    }
    if (!trains_embedding) return grads.end(p.stream());
    if (!model.config.tied) grads.open(0, p.stream());
    if (model.config.embedding_norm) norm_backward(p, EMBEDNORM_W, -1, embedding_norm(p, dx), {over(dx), dx, {}});
    {
        const Range embedding(p.ctx.profiler, "embedding");
        if (frozen) {
            embedding_adapter_backward(p, dx);
            grads.close(0, p.stream());
            return grads.end(p.stream());
        }
        // The gradient of a tied embedding already holds the head's part of this micro-step.
        const Into dwte = p.grad(WTE), dwpe = p.grad(WPE);
        embedding_backward(dwte.t, dwpe.t, dx, p.in.tokens, p.in.positions, acts.scratch, dwte.add || model.config.tied,
                           dwpe.add, p.stream());
    }
    grads.close(0, p.stream());
    grads.close(model.fp32_group(), p.stream());
    grads.end(p.stream());
}

// --------------------------------------------------------------------------------------------------------------------
// Update.

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
    v.starts = second_moment_starts(table, v.part, v.parts);
    options = optimizer_options;
    slices = make_update_slices(table, sharding, model.arenas, grads, m, v, options.rates);
    muon = Muon(table, sharding, slices, m, options.rates, model.precision.dtype, options.muon);
}

int64_t update_workspace_bytes(const Model& whole, int64_t round_bytes, const Target& target) {
    const Model& model = whole.trained();
    return muon_workspace(model.table, model.sharding, model.precision.dtype, round_bytes, target).bytes();
}

// Whole matrices go first: a slice's weights are gathered when all its optimizers have updated it. The last slice,
// whose norms all blocks read, is the next. The next forward pass hides the gathering: it waits for a group where it
// uses it.
void update(const Context& ctx, Model& model, Optimizer& optimizer, const Activations& acts, double scale,
            double grad_unit) {
    const Range range(ctx.profiler, "update");
    const std::vector<UpdateSlice>& slices = optimizer.slices;
    Model& trained = model.trained();
    for (size_t i = 0; i < slices.size(); i++)
        sum_squares(acts.sum(ctx.rank, SUM_SQUARES), slices[i].own_grads, i > 0, acts.scratch, ctx.stream);
    ctx.comm->all_gather(acts.sums, acts.sums.rows(ctx.rank, ctx.rank + 1), ctx.stream);
    step_control(acts.scalars, acts.sums, scale, grad_unit, ctx.stream);
    optimizer.muon.update(ctx, slices, acts.update_workspace, acts.scalars);
    const auto gather = [&](const UpdateSlice& p) {
        if (!p.gathered) return;
        Event& arrival = trained.arrivals[size_t(p.first_group)];
        arrival.record(ctx.stream);
        arrival.make_wait(ctx.side);
        const Range gathering(ctx.profiler, "all_gather of updated weights", ctx.side);
        ctx.comm->all_gather(p.gathered, trained.sharding.own(p.gathered), ctx.side);
        arrival.record(ctx.side);
    };
    const auto slice = [&](size_t i) -> const UpdateSlice& { return slices[i ? i - 1 : slices.size() - 1]; };
    for (size_t i = 0; i < slices.size(); i++) {
        update_elements(slice(i), optimizer.options, acts.scalars, ctx.stream);
        if (!acts.fp8) gather(slice(i));
    }
    if (acts.fp8) {  // scales first: NCCL finishes collectives in the order of the calls, on any stream
        acts.fp8->update(ctx);
        scale_weights(ctx, model, acts);
        for (size_t i = 0; i < slices.size(); i++) gather(slice(i));
    }
    if (model.adapters || acts.shape.rollout) trained.await_weights(ctx);
    quantise_weights(ctx, model, acts);
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

// Forward and backward over one batch. The first of a step writes over the gradients, the others add to them.
void micro_step(Trainer& t, const Batch& batch, bool first, bool last, bool replay) {
    const Context& ctx = t.ctx;
    const Activations& acts = t.acts;
    Gradients& grads = t.optimizer.grads;
    const Input in = upload(ctx, acts, batch, true);
    if (!t.reference.train.empty()) upload_reference(ctx, acts, t.reference.of_training(batch));
    auto work = [&] {
        if (acts.fp8 && first) acts.fp8->begin_step(ctx.stream);
        if (t.options.preference.adapters_off) reference_pass(ctx, t.model, acts, in);
        const Pass pass{ctx, t.model, acts, in, &grads};
        forward(pass);
        backward(pass, static_cast<float>(1.0 / double(t.options.total_batch_tokens)), first, last);
    };
    // A batch with more documents or examples than a recorded micro-step has room for needs other grids. A profiler
    // cannot time the parts of a graph. Calibration runs kernels that later steps do not.
    const bool has_own_shape = (t.options.document_mask || t.setup.packs()) && batch.num_sequences == 0;
    if (has_own_shape || ctx.profiler.on() || !replay || (acts.fp8 && acts.fp8->calibrates()))
        work();
    else
        t.graphs[first][last && grads.completes_sums()][in.head_kind()].run(ctx.stream, work);
}

// Queues one optimizer step: micro-steps whose gradients add up, then the update. The host runs ahead of the device by
// at most as many batches as Staging has buffers. False: the run was asked to stop, so the step was left out or left
// unfinished. That loses nothing: weights, optimizer state and step change only in the update, and the next step writes
// over the gradients.
bool queue_step(Trainer& t, BatchSource& source) {
    const Context& ctx = t.ctx;
    const Activations& acts = t.acts;
    t.watchdog.state("preparing batches", t.step + 1);
    const int64_t number = t.step + 1, micro_steps = source.begin_step(t.step);
    if (micro_steps == 0) return false;
    Trainer::QueuedStep& q = t.queue[t.queued % 2];
    q.begin.record(ctx.stream);
    const StepScalars settings = t.settings();
    acts.staging->next();
    acts.staging->put(acts.scalars.data, &settings, offsetof(StepScalars, loss), ctx.stream);
    int64_t terms = 0;
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        if (source.may_stop() && t.stopping()) return false;
        t.watchdog.state("reading training data", number);
        const Batch& batch = source.next();
        t.watchdog.state("forward and backward", number);
        if (t.optimizer.grads.numbers_micro_steps()) {
            const int64_t in_run = t.step * t.setup.micro_steps + micro;
            acts.staging->put(acts.micro_step.data, &in_run, sizeof in_run, ctx.stream);
        }
        micro_step(t, batch, micro == 0, micro + 1 == micro_steps);
        terms += batch.loss_terms();
    }
    // The gradients were divided by total_batch_tokens, a constant that graphs can record; grad_unit corrects them to
    // the number of loss tokens or pairs. Of a step that has none, loss and norm become 0/0, so its update is skipped.
    const double count = double(terms);
    t.watchdog.state("update", number);
    update(ctx, t.model, t.optimizer, acts, 1 / count, double(t.options.total_batch_tokens) / count);
    copy_to_host_async(q.scalars(), acts.scalars.data, sizeof(StepScalars), ctx.stream);
    if (acts.shape.rollout) copy_to_host_async(q.sums.get(), acts.sums.data, size_t(acts.sums.bytes()), ctx.stream);
    if (acts.fp8)
        copy_to_host_async(q.fp8_counts(), acts.fp8->counts().data, Trainer::QueuedStep::FP8_BYTES, ctx.stream);
    q.end.record(ctx.stream);
    if (ctx.world > 1) ctx.comm->watch(str("step ", number), ctx.stream);
    q.step = t.step = number;
    q.loss_terms = terms;
    t.idle_steps = terms ? 0 : t.idle_steps + 1;
    q.tokens = source.tokens();
    q.entries = source.log_entries();
    t.queued++;
    t.val_loss = NAN;
    return true;
}

void train(Trainer& t, BatchSource& source) {
    const Context& ctx = t.ctx;
    const TrainOptions& options = t.options;
    catch_stop_signals();
    Progress progress(options.steps, t.step, ctx.rank == 0);
    const auto note = [&](const std::string& line) { progress.note(line); };
    t.checkpoints.note = source.note = note;
    RunLog log(ctx.rank == 0 ? join_path(options.out, "log.jsonl") : "", t.step, note);
    note(t.describe_start(source));
    while (t.step < options.steps) {
        if (t.step + 1 == options.profile) ctx.profiler.start(ctx.stream);
        if (!queue_step(t, source)) break;
        t.checkpoints.poll();
        if (ctx.profiler.on()) {
            ctx.profiler.stop();
            note(str("profile of step ", t.step, "\n", ctx.profiler.report()));
        }
        const auto due = [&](int64_t every) { return every && t.step % every == 0; };
        const bool last = t.step == options.steps, saving = last || due(options.save_every);
        const bool evaluating = t.setup.evaluates() && (last || due(options.eval_every));
        const bool sampling = due(options.sample_every);
        t.finish_steps(evaluating || sampling || saving, log, progress);
        if (evaluating) t.evaluate_splits(log, progress);
        if (sampling) t.sample_text(log, progress);
        if (saving) t.save(last);
    }
    t.finish_steps(true, log, progress);
    progress.finish();
    t.watchdog.state("waiting for a checkpoint", t.step);
    t.checkpoints.wait();
    t.save(true);
    if (t.step < options.steps)
        note(str("stopped at step ", t.step, "; '", options.command, " --resume --out ", options.out, "' continues"));
    t.end_log(log);
}
