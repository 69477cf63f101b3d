// The model that the options of a command name.
#include <algorithm>
#include <sstream>

#include "driver/options.h"
#include "models/family.h"
#include "runtime/device/device.h"
#include "runtime/error.h"

std::string RunOptions::recompute_text() const {
    const std::string level = RECOMPUTE_NAMES[size_t(recompute)];
    return recompute_layers == ALL_LAYERS ? level : str(level, ":", recompute_layers);
}

DType ModelOptions::type() const {
    return float_type(dtype);
}

void ModelOptions::check_dtype(const ModelConfig& config) const {
    require(type() != DType::F16 || !config.has_linear_attention(),
            "--dtype fp16: the states of linear attention exceed its range; use --dtype bf16 or fp32");
}

bool ModelOptions::any_option() const {
    const auto given = [](const auto&... options) { return (options.has_value() || ...); };
    const auto named = [](const auto&... options) { return (!options.empty() || ...); };
    return given(layers, channels, heads, kv_heads, head_size, ffn, max_positions, vocab_size, rope_theta,
                 rope_fraction, attention_scale, logit_softcap) ||
           named(norm, positions, mlp, bias, tied, attention, window, linear_rope, qk_norm, norm_placement,
                 rope_partial, softcap_function, embedding_norm, head_bias, init, zero_init);
}

// The options that change no size.
void ModelOptions::change_architecture(ModelConfig& c) const {
    if (!mlp.empty()) c.activation = enum_of<Activation>(ACTIVATION_NAMES, mlp);
    if (!norm.empty()) c.norm = enum_of<Norm>(NORM_NAMES, norm);
    if (!positions.empty()) {
        c.positions = enum_of<Positions>(POSITIONS_NAMES, positions);
        if (c.positions == Positions::Learned) c.rope_scaling = {};
    }
    if (!bias.empty()) c.qkv_bias = c.proj_bias = c.mlp_bias = bias == "yes";
    if (!tied.empty()) c.tied = tied == "yes";
    if (!qk_norm.empty()) c.qk_norm = enum_of<QkNorm>(QK_NORM_NAMES, qk_norm);
    if (!norm_placement.empty()) c.norm_after = norm_placement == "after";
    if (!embedding_norm.empty()) c.embedding_norm = embedding_norm == "yes";
    if (!head_bias.empty()) c.head_bias = head_bias == "yes";
    if (attention_scale) c.softmax_scale = *attention_scale;
    if (!init.empty()) c.init = enum_of<Init>(INIT_NAMES, init);
    if (!zero_init.empty()) c.zero_init = zero_init == "yes";

    Softcap& cap = c.logit_softcap;
    if (logit_softcap) cap = {cap ? cap.function : Softcap::Function::Tanh, static_cast<float>(*logit_softcap)};
    if (logit_softcap && *logit_softcap == 0) cap = {};
    require(softcap_function.empty() || cap, "--softcap-function ", softcap_function, " needs --logit-softcap");
    if (!softcap_function.empty()) cap.function = enum_of<Softcap::Function>(SOFTCAP_NAMES, softcap_function);

    require((!rope_theta && !rope_fraction && rope_partial.empty()) || c.positions == Positions::RoPE,
            "--rope-theta, --rope-fraction and --rope-partial need --positions rope");
    using Kind = RopeScaling::Kind;
    if (rope_theta) c.rope_theta = *rope_theta;
    if (rope_fraction) c.rope_scaling.fraction = *rope_fraction;
    if (rope_partial == "channels" && c.rope_scaling.kind == Kind::Truncated) c.rope_scaling.kind = Kind::None;
    if (rope_partial == "frequencies") {
        require(c.rope_scaling.kind == Kind::None || c.rope_scaling.kind == Kind::Truncated,
                "--rope-partial frequencies: the preset scales RoPE's frequencies in another way; use another preset");
        c.rope_scaling.kind = Kind::Truncated;
    }
}

void ModelOptions::set_windows(ModelConfig& c) const {
    if (window.empty()) return;
    std::vector<int64_t> windows;
    std::istringstream list(window);
    for (std::string item; std::getline(list, item, ',');) windows.push_back(std::stoll(item));
    const bool all = windows.size() == 1;
    require(all || windows.size() == c.layer.size(), "--window ", window, ": ", windows.size(), " windows for ",
            c.layer.size(), " layers; give one for all, or one per layer");
    require(!all || windows[0] == 0 || c.layers_of(AttentionType::Softmax) > 0, "--window ", window,
            " needs --attention softmax in at least one layer");
    for (size_t l = 0; l < c.layer.size(); l++) {
        const bool softmax = c.layer[l].attention == AttentionType::Softmax;
        c.layer[l].window = all ? (softmax ? windows[0] : 0) : windows[l];
    }
}

ModelSource ModelOptions::resolve(int64_t data_vocab) const {
    ModelSource source = find_model(model, base);
    ModelConfig& c = source.config;
    require(dtype == "fp32" || for_gpu || backend_device() != Device::CPU, "--dtype ", dtype,
            ": the CPU backend supports fp32 only; use --dtype fp32");

    if (!source.directory.empty()) {
        require(!any_option(), "--model ", model,
                " is a checkpoint and fixes the shape; leave out the model options (--layers … --linear-rope)");
        check_dtype(c);
        return source;
    }

    if (layers) change_layers(c, *layers, "--model " + model);
    if (channels) c.channels = *channels;
    if (heads) c.heads = *heads;
    if (max_positions) c.max_positions = *max_positions;
    change_architecture(c);
    // Values that are derived from a changed option are derived again, unless they are given too.
    if (kv_heads || heads) c.kv_heads = kv_heads.value_or(0);
    if (head_size || channels || heads) c.head_size = head_size.value_or(0);
    if (ffn || channels || !mlp.empty()) c.ffn = ffn.value_or(0);
    if (!attention.empty())
        c.set_attention(attention.size() == 1 ? std::string(c.layer.size(), attention[0]) : attention);
    fill_defaults(c, "--model " + model);
    set_windows(c);
    for (LayerConfig& l : c.layer) l.rope = l.rope && (linear_rope != "no" || l.attention == AttentionType::Softmax);
    if (vocab_size) {
        require(*vocab_size >= data_vocab, "--vocab-size ", *vocab_size, " is smaller than the data's vocabulary of ",
                data_vocab, " tokens; leave it out or raise it");
        c.vocab_size = *vocab_size;
    } else if (data_vocab > 0) {
        c.vocab_size = data_vocab;
    }
    // A preset's special ids mean nothing in another vocabulary.
    if (c.bos >= c.vocab_size) c.bos = -1;
    if (c.eos >= c.vocab_size) c.eos = -1;
    validate(c, "--model " + model);
    require(linear_rope.empty() || (c.has_linear_attention() && c.positions == Positions::RoPE), "--linear-rope ",
            linear_rope, " needs --attention linear or gated_linear in at least one layer, and --positions rope");
    check_dtype(c);
    return source;
}
