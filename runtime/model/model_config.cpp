#include "runtime/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/files/log.h"

namespace {

constexpr int64_t MAX_LAYERS = 10000;
constexpr int64_t MAX_LINEAR_HEAD = 512;   // of kernels/linear_attention/linear_attention.h
constexpr int64_t MAX_QK_NORM_HEAD = 512;  // of kernels/qk_norm.h
constexpr double MAX_WEIGHTS = 1e15;       // keeps every product of sizes far inside 64 bits

void check_size(const std::string& where, const char* option, int64_t value, int64_t limit = MAX_DIMENSION) {
    require(value > 0, where, ": ", option, " is ", value, "; it must be positive");
    require(value <= limit, where, ": ", option, " is ", value, "; at most ", limit, " is supported");
}

void check_positive(const std::string& where, const char* option, double value) {
    require(std::isfinite(value) && value > 0, where, ": ", option, " is ", value, "; it must be positive and finite");
}

void check_rope(const ModelConfig& c, const std::string& where) {
    require(c.head_size % 2 == 0, where, ": RoPE needs an even head size, it is ", c.head_size);
    check_positive(where, "RoPE theta", c.rope_theta);
    const RopeScaling& s = c.rope_scaling;
    require(std::isfinite(s.fraction) && s.fraction > 0 && s.fraction <= 1, where, ": RoPE fraction is ", s.fraction,
            "; it must be above 0 and at most 1");
    require(c.rotary_channels() > 0 && c.rotary_channels() % 2 == 0, where, ": a RoPE fraction of ", s.fraction,
            " rotates ", c.rotary_channels(), " of ", c.head_size, " channels; they must be an even number");
    if (s.kind == RopeScaling::Kind::Truncated) {
        require(s.fraction * double(c.head_size) >= 2, where, ": a RoPE fraction of ", s.fraction,
                " rotates no pair of ", c.head_size, " channels; raise it");
        return;
    }
    if (s.kind == RopeScaling::Kind::None) return;
    check_positive(where, "RoPE scaling factor", s.factor);
    require(s.factor >= 1, where, ": RoPE scaling factor is ", s.factor, "; it must be at least 1");
    if (s.kind == RopeScaling::Kind::Linear) return;
    check_size(where, "RoPE's original length", s.original_max_position);
    if (s.kind == RopeScaling::Kind::Dynamic) {
        require(c.rotary_channels() > 2, where, ": dynamic RoPE scaling needs more than 2 rotary channels");
        return;
    }
    check_positive(where, "RoPE low_freq_factor", s.low_freq_factor);
    check_positive(where, "RoPE high_freq_factor", s.high_freq_factor);
    require(s.low_freq_factor < s.high_freq_factor, where, ": RoPE low_freq_factor ", s.low_freq_factor,
            " must be below high_freq_factor ", s.high_freq_factor);
}

}  // namespace

float ModelConfig::attention_scale() const {
    return float(softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(double(head_size)));
}

int64_t ModelConfig::rotary_channels() const {
    const bool truncated = rope_scaling.kind == RopeScaling::Kind::Truncated;
    return truncated ? head_size : int64_t(double(head_size) * rope_scaling.fraction);
}

std::string ModelConfig::attention() const {
    std::string letters;
    for (const LayerConfig& l : layer) letters += char(l.attention);
    return letters;
}

void ModelConfig::set_attention(const std::string& letters) {
    layer.resize(letters.size());
    for (size_t l = 0; l < letters.size(); l++) {
        layer[l].attention = AttentionType(letters[l]);
        if (layer[l].attention != AttentionType::Softmax) layer[l].window = 0;
    }
}

int64_t ModelConfig::layers_of(AttentionType type) const {
    return std::count_if(layer.begin(), layer.end(), [&](const LayerConfig& l) { return l.attention == type; });
}

int64_t ModelConfig::smallest_window() const {
    int64_t smallest = 0;
    for (const LayerConfig& l : layer) {
        if (l.window > 0 && (smallest == 0 || l.window < smallest)) smallest = l.window;
    }
    return smallest;
}

int64_t ModelConfig::layers_without_rope() const {
    return std::count_if(layer.begin(), layer.end(), [](const LayerConfig& l) { return !l.rope; });
}

void fill_defaults(ModelConfig& c, const std::string& where) {
    if (c.kv_heads == 0) c.kv_heads = c.heads;
    if (c.head_size == 0) {
        check_size(where, "channels", c.channels);
        check_size(where, "heads", c.heads);
        require(c.channels % c.heads == 0, where, ": ", c.heads, " heads do not divide ", c.channels,
                " channels; change one of them or give a head size");
        c.head_size = c.channels / c.heads;
    }
    if (c.ffn == 0) {
        check_size(where, "channels", c.channels);
        // A gated function has three matrices where the others have two: 8/3 of the channels gives as many weights,
        // rounded up.
        c.ffn = is_gated(c.activation) ? (8 * c.channels / 3 + 127) / 128 * 128 : 4 * c.channels;
    }
    if (c.layer.size() <= 1) {
        check_size(where, "layers", c.layers, MAX_LAYERS);
        c.layer.assign(size_t(c.layers), c.layer.empty() ? LayerConfig{} : c.layer[0]);
    }
}

void change_layers(ModelConfig& c, int64_t layers, const std::string& where) {
    check_size(where, "layers", layers, MAX_LAYERS);
    const std::vector<LayerConfig> old = c.layer;
    c.layer.clear();
    for (size_t l = 0; l < size_t(layers); l++) c.layer.push_back(old[l % old.size()]);
    c.layers = layers;
}

void validate(const ModelConfig& c, const std::string& where) {
    check_size(where, "layers", c.layers, MAX_LAYERS);
    check_size(where, "channels", c.channels);
    check_size(where, "heads", c.heads);
    check_size(where, "KV heads", c.kv_heads);
    check_size(where, "head size", c.head_size);
    check_size(where, "ffn", c.ffn);
    check_size(where, "vocabulary", c.vocab_size, MAX_DIMENSION - 127);  // padded, it still fits
    check_size(where, "number of positions", c.max_positions);
    require(c.heads % c.kv_heads == 0, where, ": ", c.kv_heads, " KV heads do not divide ", c.heads, " heads");

    const double C = double(c.channels), HS = double(c.head_size);
    const double per_layer = C * HS * double(2 * c.heads + 2 * c.kv_heads) + 3 * C * double(c.ffn);
    const double weights = double(c.layers) * per_layer + C * (2 * double(c.vocab_size) + double(c.max_positions));
    const double widest = HS * double(c.heads + 2 * c.kv_heads);
    require(weights <= MAX_WEIGHTS && widest <= double(MAX_DIMENSION) && 2 * double(c.ffn) <= double(MAX_DIMENSION),
            where, ": a model of these sizes has ", weights, " weights; use smaller ones");

    check_positive(where, "norm epsilon", c.norm_eps);
    require(std::isfinite(c.init_std) && c.init_std >= 0, where, ": the initial standard deviation is ", c.init_std,
            "; it must not be negative");
    if (c.positions == Positions::RoPE) check_rope(c, where);
    require(c.softmax_scale == 0 || (std::isfinite(c.softmax_scale) && c.softmax_scale > 0), where,
            ": the attention scale is ", c.softmax_scale, "; it must be positive");
    if (c.logit_softcap) check_positive(where, "the logits' softcap", double(c.logit_softcap.cap));

    const std::string attention = c.attention();
    require(int64_t(c.layer.size()) == c.layers, where, ": attention '", attention, "' names ", c.layer.size(),
            " layers, the model has ", c.layers, "; give one type, or one per layer");
    for (const LayerConfig& l : c.layer) {
        const bool softmax = l.attention == AttentionType::Softmax;
        require(softmax || l.attention == AttentionType::Linear || l.attention == AttentionType::GatedLinear, where,
                ": attention '", attention, "' has an unknown letter; use S (softmax), L (linear) or G (gated linear)");
        require(l.window >= 0, where, ": a layer's window is ", l.window, "; it must be positive, or 0 for none");
        require(softmax || l.window == 0, where, ": a layer of linear attention has a window of ", l.window,
                "; only softmax attention takes one");
    }
    require(!c.norm_after || c.norm == Norm::RMSNorm, where,
            ": norms after attention and the MLP are RMSNorms; use --norm rmsnorm");
    const bool norm_of_heads = c.qk_norm == QkNorm::Plain || c.qk_norm == QkNorm::Weights;
    require(!norm_of_heads || c.head_size <= MAX_QK_NORM_HEAD, where, ": QK-norm takes heads of up to ",
            MAX_QK_NORM_HEAD, ", not ", c.head_size);
    require(!c.has_linear_attention() || c.head_size <= MAX_LINEAR_HEAD, where,
            ": linear attention takes heads of up to ", MAX_LINEAR_HEAD, ", not ", c.head_size);
}

std::string describe(const ModelConfig& c, int64_t weights) {
    return str(with_commas(weights), " weights, ", c.layers, " layers x ", c.channels, " channels, ", c.heads, " heads",
               c.kv_heads == c.heads ? "" : str(" on ", c.kv_heads, " KV heads"), " of ", c.head_size,
               c.has_linear_attention() ? ", attention " + c.attention() : "", ", vocabulary ", c.vocab_size);
}
