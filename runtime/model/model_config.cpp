#include "runtime/model/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/files/log.h"

using nlohmann::json;

namespace {

constexpr int64_t MAX_SIZE = std::numeric_limits<int32_t>::max();  // of one dimension: GEMM libraries count in int32
constexpr int64_t MAX_LAYERS = 10000;
constexpr int64_t MAX_LINEAR_HEAD = 512;   // of kernels/linear_attention/linear_attention.h
constexpr int64_t MAX_QK_NORM_HEAD = 512;  // of kernels/qk_norm.h
constexpr double MAX_WEIGHTS = 1e15;       // keeps every product of sizes far inside 64 bits

void check_size(const std::string& where, const char* option, int64_t value, int64_t limit = MAX_SIZE) {
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

// Presets.

ModelConfig gpt2(int64_t layers, int64_t channels, int64_t heads, int64_t vocab_size, int64_t max_positions = 1024) {
    ModelConfig c;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    c.vocab_size = vocab_size;
    c.max_positions = max_positions;
    if (vocab_size == 50257) c.bos = c.eos = 50256;
    return c;
}

ModelConfig llama(int64_t layers, int64_t channels, int64_t heads, int64_t kv_heads, int64_t ffn) {
    ModelConfig c;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.ffn = ffn;
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.mlp = Mlp::SwiGLU;
    c.qkv_bias = c.proj_bias = c.mlp_bias = false;
    return c;
}

// LLaMA 3.1 and 3.2: the RoPE of 8192 positions stretched to 131072.
ModelConfig llama3(ModelConfig c, bool tied, double rope_factor) {
    c.vocab_size = 128256;
    c.max_positions = 131072;
    c.rope_theta = 500000;
    c.rope_scaling = {RopeScaling::Kind::Llama3, rope_factor, 1, 4, 8192};
    c.tied = tied;
    c.bos = 128000;
    c.eos = 128001;
    return c;
}

ModelConfig llama2(ModelConfig c, int64_t vocab_size, int64_t max_positions, bool tied) {
    c.vocab_size = vocab_size;
    c.max_positions = max_positions;
    c.tied = tied;
    if (vocab_size == 32000) {
        c.bos = 1;
        c.eos = 2;
    }
    return c;
}

// The GPT of modded-nanogpt's track 3, in any depth: width = 64·depth, heads of 128.
ModelConfig modern(int64_t layers) {
    ModelConfig c = gpt2(layers, 64 * layers, layers / 2, 50257);
    c.norm = Norm::RMSNorm;
    c.norm_eps = 0x1p-23;  // torch's default in F.rms_norm: float32's epsilon
    c.positions = Positions::RoPE;
    c.rope_theta = 1024;
    c.rope_scaling.kind = RopeScaling::Kind::Truncated;
    c.rope_scaling.fraction = 0.5;
    c.qk_norm = QkNorm::Plain;
    c.mlp = Mlp::ReLU2;
    c.tied = false;
    c.head_bias = c.embedding_norm = c.zero_init = true;
    c.softmax_scale = 0.12;
    c.logit_softcap = {Softcap::Function::Rsqrt, 15};
    c.init = Init::FanIn;
    return c;
}

struct Preset {
    const char* name;
    ModelConfig config;
};

std::vector<Preset> all_presets() {
    return {
        {"gpt2-tiny", gpt2(4, 128, 4, 4096, 256)},
        {"gpt2-mini", gpt2(6, 384, 6, 4096)},
        {"gpt2-124M", gpt2(12, 768, 12, 50257)},
        {"gpt2-350M", gpt2(24, 1024, 16, 50257)},
        {"gpt2-774M", gpt2(36, 1280, 20, 50257)},
        {"gpt2-1558M", gpt2(48, 1600, 25, 50257)},
        {"llama-tiny", llama2(llama(4, 128, 4, 2, 384), 4096, 1024, true)},
        {"llama-1B", llama3(llama(16, 2048, 32, 8, 8192), true, 32)},
        {"llama-3B", llama3(llama(28, 3072, 24, 8, 8192), true, 32)},
        {"llama-8B", llama3(llama(32, 4096, 32, 8, 14336), false, 8)},
        {"modern-124M", modern(12)},
        {"modern-345M", modern(18)},
        {"modern-757M", modern(24)},
        {"modern-1424M", modern(30)},
        {"llama2-7B", llama2(llama(32, 4096, 32, 32, 11008), 32000, 4096, false)},
    };
}

// Reading config.json.

// The members of a JSON object, checked: an absent or null key gives the default, a wrong type an Error naming the key.
class Keys {
  public:
    Keys(const json& members, const std::string& file, const std::string& key_prefix = "")
        : object(members), path(file), prefix(key_prefix) {}

    const json* find(const char* key) const {
        const auto it = object.find(key);
        return it == object.end() || it->is_null() ? nullptr : &*it;
    }
    bool has(const char* key) const { return find(key) != nullptr; }

    int64_t integer(const char* key, int64_t otherwise) const {
        const json* value = find(key);
        if (!value) return otherwise;
        const bool fits =
            value->is_number_integer() &&
            (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t(std::numeric_limits<int64_t>::max()));
        if (!fits) wrong(key, "a whole number");
        return value->get<int64_t>();
    }
    // A dimension: positive. alias: transformers' common name, which a GPT-2 config may use instead.
    int64_t size(const char* key, int64_t otherwise, const char* alias = nullptr) const {
        const int64_t common = alias ? integer(alias, otherwise) : otherwise, value = integer(key, common);
        demand(!alias || !has(alias) || common == value, alias, str("the same as ", key));
        if (value <= 0) wrong(key, "positive");
        if (value > MAX_SIZE) wrong(key, str("at most ", MAX_SIZE));
        return value;
    }
    double number(const char* key, double otherwise) const {
        const json* value = find(key);
        if (value && !value->is_number()) wrong(key, "a number");
        return value ? value->get<double>() : otherwise;
    }
    bool boolean(const char* key, bool otherwise) const {
        const json* value = find(key);
        if (value && !value->is_boolean()) wrong(key, "true or false");
        return value ? value->get<bool>() : otherwise;
    }
    std::string text(const char* key, const std::string& otherwise) const {
        const json* value = find(key);
        if (value && !value->is_string()) wrong(key, "a string");
        return value ? value->get<std::string>() : otherwise;
    }
    // An object of its own, {} where the key is absent.
    json nested(const char* key) const {
        const json* value = find(key);
        if (value && !value->is_object()) wrong(key, "an object");
        return value ? *value : json::object();
    }
    // The first id inside the vocabulary of a number or a list of numbers, -1 if there is none.
    int32_t token_id(const char* key, int32_t otherwise, int64_t vocab_size) const {
        const json* value = find(key);
        if (!value) return object.contains(key) || otherwise >= vocab_size ? -1 : otherwise;
        for (const json& id : value->is_array() ? *value : json::array({*value})) {
            if (!id.is_number_integer()) wrong(key, "a token id or a list of them");
            if (id >= 0 && id < vocab_size) return id.get<int32_t>();
        }
        return -1;
    }

    // For values that would change the logits in a way we don't compute.
    void demand(bool ok, const char* key, const std::string& supported) const {
        if (!ok) throw Error(str(path, ": key '", prefix, key, "' is ", shown(key), "; supported: ", supported));
    }
    [[noreturn]] void wrong(const char* key, const std::string& expected) const {
        throw Error(str(path, ": key '", prefix, key, "' is ", shown(key), "; it must be ", expected));
    }

  private:
    std::string shown(const char* key) const {
        const json* value = find(key);
        if (!value) return "missing";
        std::string text = value->dump(-1, ' ', true, json::error_handler_t::replace);
        if (text.size() > 60) text = text.substr(0, 60) + "…";
        return text;
    }

    const json& object;
    const std::string& path;
    const std::string prefix;
};

struct Rope {
    double theta = 10000;
    RopeScaling scaling;
};

bool same(const Rope& a, const Rope& b) {
    return a.theta == b.theta && a.scaling.kind == b.scaling.kind && a.scaling.factor == b.scaling.factor &&
           a.scaling.low_freq_factor == b.scaling.low_freq_factor &&
           a.scaling.high_freq_factor == b.scaling.high_freq_factor &&
           a.scaling.original_max_position == b.scaling.original_max_position;
}

// transformers 4's rope_scaling or transformers 5's rope_parameters.
Rope read_rope_object(const Keys& keys, double theta, int64_t max_positions, bool ours) {
    Rope rope;
    rope.theta = keys.number("rope_theta", theta);
    keys.demand(keys.number("partial_rotary_factor", 1) == 1, "partial_rotary_factor", "1");
    const std::string old_type = keys.text("type", "default"), type = keys.text("rope_type", old_type);
    // transformers 4 prefers one, transformers 5 the other.
    keys.demand(!keys.has("type") || type == old_type, "type", "the same as rope_type");
    if (type == "default") return rope;

    RopeScaling& scaling = rope.scaling;
    const char* type_key = keys.has("rope_type") ? "rope_type" : "type";
    if (ours && type == "truncated") {
        scaling.kind = RopeScaling::Kind::Truncated;
        return rope;
    }
    keys.demand(type == "linear" || type == "dynamic" || type == "llama3", type_key,
                "default, linear, dynamic, llama3");
    if (!keys.has("factor")) keys.wrong("factor", "a number");
    scaling.factor = keys.number("factor", 1);
    if (type == "linear") scaling.kind = RopeScaling::Kind::Linear;
    if (type == "dynamic") {
        scaling.kind = RopeScaling::Kind::Dynamic;
        // transformers takes max_position_embeddings for the original length, whatever else is written here.
        scaling.original_max_position = keys.size("original_max_position_embeddings", max_positions);
        keys.demand(ours || scaling.original_max_position == max_positions, "original_max_position_embeddings",
                    "the same as max_position_embeddings");
    }
    if (type == "llama3") {
        scaling.kind = RopeScaling::Kind::Llama3;
        for (const char* key : {"low_freq_factor", "high_freq_factor"}) {
            if (!keys.has(key)) keys.wrong(key, "a number");
        }
        scaling.low_freq_factor = keys.number("low_freq_factor", 1);
        scaling.high_freq_factor = keys.number("high_freq_factor", 4);
        scaling.original_max_position = keys.size("original_max_position_embeddings", max_positions);
    }
    return rope;
}

void read_rope(ModelConfig& c, const Keys& keys, const std::string& path, bool ours) {
    const double theta = keys.number("rope_theta", 10000);
    const json scaling = keys.nested("rope_scaling"), parameters = keys.nested("rope_parameters");
    for (const auto& [name, value] : parameters.items()) {
        require(!value.is_object(), path, ": key 'rope_parameters' holds one set for each layer type ('", name,
                "'); only one set for all layers is supported");
    }
    const double fraction = keys.number("partial_rotary_factor", 1);
    keys.demand(ours || fraction == 1, "partial_rotary_factor", "1");
    const Rope old_form = read_rope_object(Keys(scaling, path, "rope_scaling."), theta, c.max_positions, ours);
    const Rope new_form = read_rope_object(Keys(parameters, path, "rope_parameters."), theta, c.max_positions, ours);
    require(scaling.empty() || parameters.empty() || same(old_form, new_form), path,
            ": keys 'rope_scaling' and 'rope_parameters' contradict each other; remove one");
    const Rope& rope = parameters.empty() ? old_form : new_form;
    c.rope_theta = rope.theta;
    c.rope_scaling = rope.scaling;
    c.rope_scaling.fraction = fraction;
    if (c.rope_scaling.kind == RopeScaling::Kind::Llama3) {
        // transformers 5 lets this one win, transformers 4 ignores it.
        const int64_t original = c.rope_scaling.original_max_position;
        keys.demand(keys.integer("original_max_position_embeddings", original) == original,
                    "original_max_position_embeddings", "the value given for RoPE's scaling");
    }
}

ModelConfig read_gpt2(const Keys& keys) {
    ModelConfig c;
    c.layers = keys.size("n_layer", 12, "num_hidden_layers");
    c.channels = keys.size("n_embd", 768, "hidden_size");
    c.heads = keys.size("n_head", 12, "num_attention_heads");
    c.max_positions = keys.size("n_positions", 1024, "max_position_embeddings");
    if (keys.has("n_inner")) c.ffn = keys.size("n_inner", 0);
    c.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
    c.tied = keys.boolean("tie_word_embeddings", true);
    c.vocab_size = keys.size("vocab_size", 50257);
    c.bos = keys.token_id("bos_token_id", 50256, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", 50256, c.vocab_size);
    const std::string act = keys.text("activation_function", "gelu_new");
    keys.demand(act == "gelu_new" || act == "gelu_pytorch_tanh", "activation_function", "gelu_new, gelu_pytorch_tanh");
    keys.demand(keys.boolean("scale_attn_weights", true), "scale_attn_weights", "true");
    keys.demand(!keys.boolean("scale_attn_by_inverse_layer_idx", false), "scale_attn_by_inverse_layer_idx", "false");
    keys.demand(!keys.boolean("add_cross_attention", false), "add_cross_attention", "false");
    return c;
}

ModelConfig read_llama(const Keys& keys, const std::string& path) {
    ModelConfig c;
    c.layers = keys.size("num_hidden_layers", 32);
    c.channels = keys.size("hidden_size", 4096);
    c.heads = keys.size("num_attention_heads", 32);
    c.kv_heads = keys.size("num_key_value_heads", c.heads);
    if (keys.has("head_dim")) c.head_size = keys.size("head_dim", 0);
    c.ffn = keys.size("intermediate_size", 11008);
    c.max_positions = keys.size("max_position_embeddings", 2048);
    c.norm = Norm::RMSNorm;
    c.norm_eps = keys.number("rms_norm_eps", 1e-6);
    c.positions = Positions::RoPE;
    read_rope(c, keys, path, false);
    c.mlp = Mlp::SwiGLU;
    c.qkv_bias = c.proj_bias = keys.boolean("attention_bias", false);
    c.mlp_bias = keys.boolean("mlp_bias", false);
    c.tied = keys.boolean("tie_word_embeddings", false);
    c.vocab_size = keys.size("vocab_size", 32000);
    c.bos = keys.token_id("bos_token_id", 1, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", 2, c.vocab_size);
    const std::string act = keys.text("hidden_act", "silu");
    keys.demand(act == "silu" || act == "swish", "hidden_act", "silu");
    return c;
}

// Names of the enumerators in a config of type train_gpt.
constexpr std::array<const char*, 2> NORM_NAMES = {"layernorm", "rmsnorm"};
constexpr std::array<const char*, 2> POSITIONS_NAMES = {"learned", "rope"};
constexpr std::array<const char*, 3> MLP_NAMES = {"gelu", "swiglu", "relu2"};
constexpr std::array<const char*, 3> SOFTCAP_NAMES = {"none", "tanh", "rsqrt"};
constexpr std::array<const char*, 3> QK_NORM_NAMES = {"off", "plain", "weights"};

template <typename Enum, size_t N>
Enum read_enum(const Keys& keys, const char* key, const std::array<const char*, N>& names) {
    const std::string value = keys.text(key, "");
    std::string supported;
    for (size_t i = 0; i < N; i++) {
        if (value == names[i]) return Enum(i);
        supported += str(i ? ", " : "", names[i]);
    }
    keys.demand(false, key, supported);
    throw Error("unreachable");
}

ModelConfig read_train_gpt(const Keys& keys, const std::string& path) {
    ModelConfig c;
    const auto size = [&](const char* key) {
        if (!keys.has(key)) keys.wrong(key, "a whole number");
        return keys.size(key, 0);
    };
    const auto flag = [&](const char* key) {
        if (!keys.has(key)) keys.wrong(key, "true or false");
        return keys.boolean(key, false);
    };
    c.layers = size("num_hidden_layers");
    c.channels = size("hidden_size");
    c.heads = size("num_attention_heads");
    c.kv_heads = size("num_key_value_heads");
    c.head_size = size("head_dim");
    c.ffn = size("intermediate_size");
    c.vocab_size = size("vocab_size");
    c.max_positions = size("max_position_embeddings");
    c.norm = read_enum<Norm>(keys, "norm", NORM_NAMES);
    if (!keys.has("norm_eps")) keys.wrong("norm_eps", "a number");
    c.norm_eps = keys.number("norm_eps", 0);
    c.positions = read_enum<Positions>(keys, "positions", POSITIONS_NAMES);
    if (c.positions == Positions::RoPE) read_rope(c, keys, path, true);
    c.mlp = read_enum<Mlp>(keys, "mlp", MLP_NAMES);
    c.qkv_bias = flag("qkv_bias");
    c.proj_bias = flag("proj_bias");
    c.mlp_bias = flag("mlp_bias");
    c.tied = flag("tie_word_embeddings");
    if (!keys.has("attention")) keys.wrong("attention", "one letter per layer");
    c.attention = keys.text("attention", "");
    c.linear_rope = keys.boolean("linear_rope", true);
    c.embedding_norm = keys.boolean("embedding_norm", false);
    c.head_bias = keys.boolean("head_bias", false);
    if (keys.has("attention_scale")) {
        c.softmax_scale = keys.number("attention_scale", 0);
        if (!(c.softmax_scale > 0)) keys.wrong("attention_scale", "positive");
    }
    if (keys.has("logit_softcap")) {
        c.logit_softcap.cap = static_cast<float>(keys.number("logit_softcap", 0));
        c.logit_softcap.function = read_enum<Softcap::Function>(keys, "softcap_function", SOFTCAP_NAMES);
        keys.demand(bool(c.logit_softcap), "softcap_function", "tanh, rsqrt");
    }
    if (keys.has("qk_norm")) c.qk_norm = read_enum<QkNorm>(keys, "qk_norm", QK_NORM_NAMES);
    c.bos = keys.token_id("bos_token_id", -1, c.vocab_size);
    c.eos = keys.token_id("eos_token_id", -1, c.vocab_size);
    return c;
}

// Every key that one of the families reads or writes. When a config is saved, these come from the model and never from
// the file that it was loaded from. The weights' dtype is left to the weights: transformers would round fp32 weights to
// the bf16 that an old torch_dtype asks for.
constexpr const char* OUR_KEYS[] = {
    "model_type", "architectures", "torch_dtype", "dtype",
    // GPT-2
    "n_layer", "n_embd", "n_head", "n_positions", "n_ctx", "n_inner", "layer_norm_epsilon", "activation_function",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention",
    // LLaMA
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias", "hidden_act",
    // train_gpt
    "norm", "norm_eps", "positions", "mlp", "qkv_bias", "proj_bias", "attention", "linear_rope", "qk_norm",
    "embedding_norm", "head_bias", "attention_scale", "logit_softcap", "softcap_function",
    // all
    "vocab_size", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pruned_heads",
    "quantization_config"};

void write_rope(json& out, const ModelConfig& c) {
    // transformers 4's form, which transformers 5 reads with the same meaning; the reverse isn't so.
    out["rope_theta"] = c.rope_theta;
    const RopeScaling& s = c.rope_scaling;
    switch (s.kind) {
        case RopeScaling::Kind::None:
            out["rope_scaling"] = nullptr;
            break;
        case RopeScaling::Kind::Linear:
            out["rope_scaling"] = {{"rope_type", "linear"}, {"factor", s.factor}};
            break;
        case RopeScaling::Kind::Truncated:
            out["rope_scaling"] = {{"rope_type", "truncated"}};
            break;
        case RopeScaling::Kind::Dynamic:
            out["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", s.factor}};
            if (s.original_max_position != c.max_positions) {  // not in a LLaMA config: see model_family
                out["rope_scaling"]["original_max_position_embeddings"] = s.original_max_position;
            }
            break;
        case RopeScaling::Kind::Llama3:
            out["rope_scaling"] = {{"rope_type", "llama3"},
                                   {"factor", s.factor},
                                   {"low_freq_factor", s.low_freq_factor},
                                   {"high_freq_factor", s.high_freq_factor},
                                   {"original_max_position_embeddings", s.original_max_position}};
    }
    if (s.fraction != 1) out["partial_rotary_factor"] = s.fraction;
}

// A list of ids, or one beyond the vocabulary, stays as it was written if it means the same id.
void write_token_id(json& out, const json& original, const char* key, int32_t id, int64_t vocab_size) {
    out[key] = id >= 0 ? json(id) : json(nullptr);
    if (original.contains(key) && Keys(original, "config.json").token_id(key, -1, vocab_size) == id) {
        out[key] = original[key];
    }
}

}  // namespace

float ModelConfig::attention_scale() const {
    return float(softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(double(head_size)));
}

int64_t ModelConfig::rotary_channels() const {
    const bool truncated = rope_scaling.kind == RopeScaling::Kind::Truncated;
    return truncated ? head_size : int64_t(double(head_size) * rope_scaling.fraction);
}

int64_t ModelConfig::layers_of(AttentionType type) const {
    return std::count(attention.begin(), attention.end(), char(type));
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
        // SwiGLU has three matrices where the others have two: 8/3 of the channels gives as many weights, rounded up.
        c.ffn = c.mlp == Mlp::SwiGLU ? (8 * c.channels / 3 + 127) / 128 * 128 : 4 * c.channels;
    }
    if (c.attention.size() <= 1) {
        check_size(where, "layers", c.layers, MAX_LAYERS);
        c.attention = std::string(size_t(c.layers), c.attention.empty() ? 'S' : c.attention[0]);
    }
}

void validate(const ModelConfig& c, const std::string& where) {
    check_size(where, "layers", c.layers, MAX_LAYERS);
    check_size(where, "channels", c.channels);
    check_size(where, "heads", c.heads);
    check_size(where, "KV heads", c.kv_heads);
    check_size(where, "head size", c.head_size);
    check_size(where, "ffn", c.ffn);
    check_size(where, "vocabulary", c.vocab_size, MAX_SIZE - 127);  // padded, it still fits
    check_size(where, "number of positions", c.max_positions);
    require(c.heads % c.kv_heads == 0, where, ": ", c.kv_heads, " KV heads do not divide ", c.heads, " heads");

    const double C = double(c.channels), HS = double(c.head_size);
    const double per_layer = C * HS * double(2 * c.heads + 2 * c.kv_heads) + 3 * C * double(c.ffn);
    const double weights = double(c.layers) * per_layer + C * (2 * double(c.vocab_size) + double(c.max_positions));
    const double widest = HS * double(c.heads + 2 * c.kv_heads);
    require(weights <= MAX_WEIGHTS && widest <= double(MAX_SIZE) && 2 * double(c.ffn) <= double(MAX_SIZE), where,
            ": a model of these sizes has ", weights, " weights; use smaller ones");

    check_positive(where, "norm epsilon", c.norm_eps);
    require(std::isfinite(c.init_std) && c.init_std >= 0, where, ": the initial standard deviation is ", c.init_std,
            "; it must not be negative");
    if (c.positions == Positions::RoPE) check_rope(c, where);
    require(c.softmax_scale == 0 || (std::isfinite(c.softmax_scale) && c.softmax_scale > 0), where,
            ": the attention scale is ", c.softmax_scale, "; it must be positive");
    if (c.logit_softcap) check_positive(where, "the logits' softcap", double(c.logit_softcap.cap));

    require(int64_t(c.attention.size()) == c.layers, where, ": attention '", c.attention, "' names ",
            c.attention.size(), " layers, the model has ", c.layers, "; give one type, or one per layer");
    for (const char type : c.attention) {
        require(type == 'S' || type == 'L' || type == 'G', where, ": attention '", c.attention,
                "' has an unknown letter; use S (softmax), L (linear) or G (gated linear)");
    }
    require(c.qk_norm == QkNorm::Off || c.head_size <= MAX_QK_NORM_HEAD, where, ": QK-norm takes heads of up to ",
            MAX_QK_NORM_HEAD, ", not ", c.head_size);
    require(!c.has_linear_attention() || c.head_size <= MAX_LINEAR_HEAD, where,
            ": linear attention takes heads of up to ", MAX_LINEAR_HEAD, ", not ", c.head_size);
}

bool preset(const std::string& name, ModelConfig& config) {
    for (const Preset& p : all_presets()) {
        if (name != p.name) continue;
        config = p.config;
        fill_defaults(config, name);
        return true;
    }
    return false;
}

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const Preset& p : all_presets()) names.push_back(p.name);
    return names;
}

std::string model_family(const ModelConfig& c) {
    const bool rope_of_families = c.rope_scaling.fraction == 1 && c.rope_scaling.kind != RopeScaling::Kind::Truncated;
    if (c.qk_norm != QkNorm::Off || c.embedding_norm || c.head_bias || c.softmax_scale > 0 || c.logit_softcap ||
        (c.positions == Positions::RoPE && !rope_of_families)) {
        return "train_gpt";
    }
    const bool fits_gpt2 = c.norm == Norm::LayerNorm && c.positions == Positions::Learned && c.mlp == Mlp::GELU &&
                           c.qkv_bias && c.proj_bias && c.mlp_bias && c.kv_heads == c.heads &&
                           c.heads * c.head_size == c.channels;
    if (fits_gpt2 && !c.has_linear_attention()) return "gpt2";
    const bool fits_llama =
        c.norm == Norm::RMSNorm && c.positions == Positions::RoPE && c.mlp == Mlp::SwiGLU && c.qkv_bias == c.proj_bias;
    const bool rope =
        c.rope_scaling.kind != RopeScaling::Kind::Dynamic || c.rope_scaling.original_max_position == c.max_positions;
    if (fits_llama && rope && !c.has_linear_attention()) return "llama";
    return "train_gpt";
}

std::string describe(const ModelConfig& c, int64_t weights) {
    return str(with_commas(weights), " weights, ", c.layers, " layers x ", c.channels, " channels, ", c.heads, " heads",
               c.kv_heads == c.heads ? "" : str(" on ", c.kv_heads, " KV heads"), " of ", c.head_size,
               c.has_linear_attention() ? ", attention " + c.attention : "", ", vocabulary ", c.vocab_size);
}

ModelConfig config_from_json(const json& object, const std::string& path) {
    require(object.is_object(), path, ": not a JSON object; it must be a model's config.json");
    const Keys keys(object, path);
    const std::string type = keys.text("model_type", "");
    keys.demand(type == "gpt2" || type == "llama" || type == "train_gpt", "model_type", "gpt2, llama, train_gpt");
    keys.demand(!keys.has("quantization_config"), "quantization_config", "none; use weights that are not quantized");
    keys.demand(keys.nested("pruned_heads").empty(), "pruned_heads", "none");
    ModelConfig c = type == "gpt2"    ? read_gpt2(keys)
                    : type == "llama" ? read_llama(keys, path)
                                      : read_train_gpt(keys, path);
    c.init_std = keys.number("initializer_range", 0.02);
    fill_defaults(c, path);
    validate(c, path);
    return c;
}

json config_to_json(const ModelConfig& c, const json& original) {
    json out = original.is_object() ? original : json::object();
    for (const char* key : OUR_KEYS) out.erase(key);

    const std::string family = model_family(c);
    out["model_type"] = family;
    if (family == "gpt2") {
        out["architectures"] = {"GPT2LMHeadModel"};
        out["n_layer"] = c.layers;
        out["n_embd"] = c.channels;
        out["n_head"] = c.heads;
        out["n_positions"] = c.max_positions;
        out["n_inner"] = c.ffn;
        out["layer_norm_epsilon"] = c.norm_eps;
        // One formula with two names, computed in another order: the name stays, so that transformers gives the same
        // bits.
        const bool other_name =
            original.is_object() && original.value("activation_function", json()) == "gelu_pytorch_tanh";
        out["activation_function"] = other_name ? "gelu_pytorch_tanh" : "gelu_new";
        // Training here has no dropout; transformers' default is 0.1.
        for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
            if (!out.contains(key)) out[key] = 0.0;
        }
    } else {
        out["num_hidden_layers"] = c.layers;
        out["hidden_size"] = c.channels;
        out["num_attention_heads"] = c.heads;
        out["num_key_value_heads"] = c.kv_heads;
        out["head_dim"] = c.head_size;
        out["intermediate_size"] = c.ffn;
        out["max_position_embeddings"] = c.max_positions;
        out["mlp_bias"] = c.mlp_bias;
        if (c.positions == Positions::RoPE) write_rope(out, c);
    }
    if (family == "llama") {
        out["architectures"] = {"LlamaForCausalLM"};
        out["rms_norm_eps"] = c.norm_eps;
        out["attention_bias"] = c.qkv_bias;
        out["hidden_act"] = "silu";
    }
    if (family == "train_gpt") {
        out["norm"] = NORM_NAMES[size_t(c.norm)];
        out["norm_eps"] = c.norm_eps;
        out["positions"] = POSITIONS_NAMES[size_t(c.positions)];
        out["mlp"] = MLP_NAMES[size_t(c.mlp)];
        out["qkv_bias"] = c.qkv_bias;
        out["proj_bias"] = c.proj_bias;
        out["attention"] = c.attention;
        if (c.has_linear_attention() && c.positions == Positions::RoPE) out["linear_rope"] = c.linear_rope;
        if (c.embedding_norm) out["embedding_norm"] = true;
        if (c.head_bias) out["head_bias"] = true;
        if (c.softmax_scale > 0) out["attention_scale"] = c.softmax_scale;
        if (c.logit_softcap) {
            out["logit_softcap"] = c.logit_softcap.cap;
            out["softcap_function"] = SOFTCAP_NAMES[size_t(c.logit_softcap.function)];
        }
        if (c.qk_norm != QkNorm::Off) out["qk_norm"] = QK_NORM_NAMES[size_t(c.qk_norm)];
    }
    out["vocab_size"] = c.vocab_size;
    out["tie_word_embeddings"] = c.tied;
    out["initializer_range"] = c.init_std;
    write_token_id(out, original, "bos_token_id", c.bos, c.vocab_size);
    write_token_id(out, original, "eos_token_id", c.eos, c.vocab_size);
    return out;
}
