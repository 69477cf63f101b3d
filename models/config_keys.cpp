#include "models/config_keys.h"

#include <algorithm>
#include <limits>

#include "runtime/files/json_keys.h"

using nlohmann::json;

const json* ConfigKeys::find(const char* key) const {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
}

int64_t ConfigKeys::integer(const char* key, int64_t otherwise) const {
    const json* value = find(key);
    if (!value) return otherwise;
    const bool fits =
        value->is_number_integer() &&
        (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t(std::numeric_limits<int64_t>::max()));
    if (!fits) wrong(key, "a whole number");
    return value->get<int64_t>();
}

int64_t ConfigKeys::size(const char* key, int64_t otherwise, const char* alias) const {
    const int64_t common = alias ? integer(alias, otherwise) : otherwise, value = integer(key, common);
    demand(!alias || !has(alias) || common == value, alias, str("the same as ", key));
    if (value <= 0) wrong(key, "positive");
    if (value > MAX_DIMENSION) wrong(key, str("at most ", MAX_DIMENSION));
    return value;
}

double ConfigKeys::number(const char* key, double otherwise) const {
    const json* value = find(key);
    if (value && !value->is_number()) wrong(key, "a number");
    return value ? value->get<double>() : otherwise;
}

bool ConfigKeys::boolean(const char* key, bool otherwise) const {
    const json* value = find(key);
    if (value && !value->is_boolean()) wrong(key, "true or false");
    return value ? value->get<bool>() : otherwise;
}

std::string ConfigKeys::text(const char* key, const std::string& otherwise) const {
    const json* value = find(key);
    if (value && !value->is_string()) wrong(key, "a string");
    return value ? value->get<std::string>() : otherwise;
}

json ConfigKeys::list(const char* key, size_t size, const char* what, bool (*ok)(const json&)) const {
    const json* values = find(key);
    if (!values) return json::array();
    if (!values->is_array() || values->size() < size || !std::all_of(values->begin(), values->end(), ok))
        wrong(key, str("a list of ", size, " ", what, ", one per layer"));
    return json(values->begin(), values->begin() + std::ptrdiff_t(size));
}

json ConfigKeys::nested(const char* key) const {
    const json* value = find(key);
    if (value && !value->is_object()) wrong(key, "an object");
    return value ? *value : json::object();
}

int32_t ConfigKeys::token_id(const char* key, int32_t otherwise, int64_t vocab_size) const {
    const json* value = find(key);
    if (!value) return object.contains(key) || otherwise >= vocab_size ? -1 : otherwise;
    for (const json& id : value->is_array() ? *value : json::array({*value})) {
        if (!id.is_number_integer()) wrong(key, "a token id or a list of them");
        if (id >= 0 && id < vocab_size) return id.get<int32_t>();
    }
    return -1;
}

void ConfigKeys::demand(bool ok, const char* key, const std::string& supported) const {
    if (!ok) throw Error(str(path, ": key '", prefix, key, "' is ", shown(key), "; supported: ", supported));
}

void ConfigKeys::wrong(const char* key, const std::string& expected) const {
    throw Error(str(path, ": key '", prefix, key, "' is ", shown(key), "; it must be ", expected));
}

std::string ConfigKeys::shown(const char* key) const {
    const json* value = find(key);
    return value ? ::shown(*value) : "missing";
}

// RoPE.

namespace {

struct Rope {
    double theta = 10000;
    RopeScaling scaling;
};

bool same(const Rope& a, const Rope& b) {
    return a.theta == b.theta && a.scaling.kind == b.scaling.kind && a.scaling.factor == b.scaling.factor &&
           a.scaling.low_freq_factor == b.scaling.low_freq_factor &&
           a.scaling.high_freq_factor == b.scaling.high_freq_factor &&
           a.scaling.original_max_position == b.scaling.original_max_position &&
           a.scaling.fraction == b.scaling.fraction;
}

// transformers 4's rope_scaling or transformers 5's rope_parameters. theta and fraction: those of the config itself.
Rope read_rope_object(const ConfigKeys& keys, double theta, double fraction, int64_t max_positions,
                      const RopeForms& forms) {
    Rope rope;
    rope.theta = keys.number("rope_theta", theta);
    RopeScaling& scaling = rope.scaling;
    scaling.fraction = keys.number("partial_rotary_factor", fraction);
    keys.demand(forms.partial || scaling.fraction == 1, "partial_rotary_factor", "1");
    const std::string old_type = keys.text("type", "default"), type = keys.text("rope_type", old_type);
    // transformers 4 prefers one, transformers 5 the other.
    keys.demand(!keys.has("type") || type == old_type, "type", "the same as rope_type");
    if (type == "default") return rope;

    const char* type_key = keys.has("rope_type") ? "rope_type" : "type";
    if (forms.own && type == "truncated") {
        scaling.kind = RopeScaling::Kind::Truncated;
        return rope;
    }
    keys.demand(forms.scaling && (type == "linear" || type == "dynamic" || type == "llama3"), type_key,
                forms.scaling ? "default, linear, dynamic, llama3" : "default");
    if (!keys.has("factor")) keys.wrong("factor", "a number");
    scaling.factor = keys.number("factor", 1);
    if (type == "linear") scaling.kind = RopeScaling::Kind::Linear;
    if (type == "dynamic") {
        scaling.kind = RopeScaling::Kind::Dynamic;
        // transformers takes max_position_embeddings for the original length, whatever else is written here.
        scaling.original_max_position = keys.size("original_max_position_embeddings", max_positions);
        keys.demand(forms.own || scaling.original_max_position == max_positions, "original_max_position_embeddings",
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

}  // namespace

void read_rope(ModelConfig& c, const ConfigKeys& keys, const RopeForms& forms) {
    const std::string& path = keys.file();
    const json scaling = keys.nested("rope_scaling"), parameters = keys.nested("rope_parameters");
    for (const auto& [name, value] : parameters.items()) {
        require(!value.is_object(), path, ": key 'rope_parameters' holds one set for each layer type ('", name,
                "'); only one set for all layers is supported");
    }
    const double theta = keys.number("rope_theta", forms.theta), fraction = keys.number("partial_rotary_factor", 1);
    keys.demand(forms.partial || fraction == 1, "partial_rotary_factor", "1");
    const auto read = [&](const json& object, const char* prefix) {
        return read_rope_object(ConfigKeys(object, path, prefix), theta, fraction, c.max_positions, forms);
    };
    const Rope old_form = read(scaling, "rope_scaling."), new_form = read(parameters, "rope_parameters.");
    require(scaling.empty() || parameters.empty() || same(old_form, new_form), path,
            ": keys 'rope_scaling' and 'rope_parameters' contradict each other; remove one");
    const Rope& rope = parameters.empty() ? old_form : new_form;
    c.rope_theta = rope.theta;
    c.rope_scaling = rope.scaling;
    if (c.rope_scaling.kind == RopeScaling::Kind::Llama3) {
        // transformers 5 lets this one win, transformers 4 ignores it.
        const int64_t original = c.rope_scaling.original_max_position;
        keys.demand(keys.integer("original_max_position_embeddings", original) == original,
                    "original_max_position_embeddings", "the value given for RoPE's scaling");
    }
}

void refuse_windows(const ConfigKeys& keys) {
    keys.demand(!keys.has("sliding_window"), "sliding_window", "null");
    const json* types = keys.find("layer_types");
    const bool full = !types || (types->is_array() && std::all_of(types->begin(), types->end(),
                                                                  [](const json& x) { return x == "full_attention"; }));
    keys.demand(full, "layer_types", "full_attention in all layers");
}

void write_rope(json& out, const ModelConfig& c) {
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
            if (s.original_max_position != c.max_positions) {  // not in a LLaMA config: see has_llama_block()
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

void write_token_id(json& out, const json& original, const char* key, int32_t id, int64_t vocab_size) {
    out[key] = id >= 0 ? json(id) : json(nullptr);
    if (original.contains(key) && ConfigKeys(original, "config.json").token_id(key, -1, vocab_size) == id) {
        out[key] = original[key];
    }
}
