#include "models/family.h"

#include <algorithm>

using nlohmann::json;

namespace {

// A config that its own family cannot express goes to the first that can. So those after train_gpt, which can express
// any, only get what comes from their own files and presets.
const std::vector<const Family*>& families() {
    static const std::vector<const Family*> all = {&gpt2::family(),    &llama::family(),   &train_gpt::family(),
                                                   &mistral::family(), &phi3::family(),    &qwen2::family(),
                                                   &qwen3::family(),   &smollm3::family(), &olmo2::family()};
    return all;
}

const Family* find_family(const std::string& name) {
    for (const Family* f : families()) {
        if (f->name == name) return f;
    }
    return nullptr;
}

// Keys of several families, and of all. The weights' dtype is left to the weights: transformers would round fp32
// weights to the bf16 that an old torch_dtype asks for.
constexpr const char* COMMON_KEYS[] = {"model_type",
                                       "architectures",
                                       "torch_dtype",
                                       "dtype",
                                       "num_hidden_layers",
                                       "hidden_size",
                                       "num_attention_heads",
                                       "num_key_value_heads",
                                       "head_dim",
                                       "intermediate_size",
                                       "max_position_embeddings",
                                       "original_max_position_embeddings",
                                       "rope_theta",
                                       "rope_scaling",
                                       "rope_parameters",
                                       "partial_rotary_factor",
                                       "mlp_bias",
                                       "vocab_size",
                                       "tie_word_embeddings",
                                       "initializer_range",
                                       "bos_token_id",
                                       "eos_token_id",
                                       "pruned_heads",
                                       "per_layer_config",
                                       "attention_chunk_size",
                                       "kv_sharing_modes",
                                       "num_kv_shared_layers",
                                       "is_causal",
                                       "is_encoder_decoder",
                                       "add_cross_attention",
                                       "quantization_config"};

constexpr const char *QUANTIZATION = "quantization_config", *PACKED_METHOD = "train_gpt";

}  // namespace

const Family& family_of(const ModelConfig& c) {
    // A config of our own type becomes one that transformers knows, if it can.
    const Family* own = find_family(c.family);
    if (own && own->architecture && own->expresses(c)) return *own;
    return **std::find_if(families().begin(), families().end(), [&](const Family* f) { return f->expresses(c); });
}

bool has_common_options(const ModelConfig& c) {
    return !c.has_linear_attention() && !c.norm_after && !c.embedding_norm && !c.head_bias && c.softmax_scale == 0 &&
           !c.logit_softcap;
}

std::vector<SourceTensor> source_tensors(const Family& family, Role role, bool bias, int64_t layer,
                                         const std::vector<int64_t>& parts) {
    std::vector<SourceTensor> sources;
    if (family.tensors.empty()) return sources;
    const auto names = std::find_if(family.tensors.begin(), family.tensors.end(),
                                    [&](const TensorNames& t) { return t.role == role; });
    require(names != family.tensors.end(), "files of family ", family.name, " have no tensor for role ", int(role));
    const size_t n = names->names.size();
    require(n == 1 || n == parts.size(), "family ", family.name, ": role ", int(role), " has ", n, " names for ",
            parts.size(), " matrices");
    int64_t row = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        if (i < n) {
            std::string name = names->names[i];
            if (const size_t at = name.find('*'); at != std::string::npos) name.replace(at, 1, str(layer));
            sources.push_back({name + (bias ? ".bias" : ".weight"), row, 0, names->transposed && !bias});
        }
        sources.back().rows += parts[i];
        row += parts[i];
    }
    return sources;
}

bool preset(const std::string& name, ModelConfig& config) {
    for (const Family* family : families()) {
        for (const Preset& p : family->presets) {
            if (name != p.name) continue;
            config = p.config;
            config.family = family->name;
            fill_defaults(config, name);
            return true;
        }
    }
    return false;
}

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const Family* family : families()) {
        for (const Preset& p : family->presets) names.push_back(p.name);
    }
    return names;
}

ModelConfig config_from_json(const json& object, const std::string& path) {
    require(object.is_object(), path, ": not a JSON object; it must be a model's config.json");
    const ConfigKeys keys(object, path);
    const Family* family = find_family(keys.text("model_type", ""));
    if (!family) {
        std::string names;
        for (const Family* f : families()) names += str(names.empty() ? "" : ", ", f->name);
        keys.demand(false, "model_type", names);
    }
    packing_from_json(object, path);
    keys.demand(keys.nested("pruned_heads").empty(), "pruned_heads", "none");
    keys.demand(keys.nested("per_layer_config").empty(), "per_layer_config", "none");
    // transformers' cache acts on these in every family.
    keys.demand(!keys.has("attention_chunk_size"), "attention_chunk_size", "null");
    keys.demand(!keys.has("kv_sharing_modes"), "kv_sharing_modes", "null");
    keys.demand(keys.integer("num_kv_shared_layers", 0) == 0, "num_kv_shared_layers", "0");
    keys.demand(keys.boolean("is_causal", true), "is_causal", "true");
    keys.demand(!keys.boolean("is_encoder_decoder", false), "is_encoder_decoder", "false");
    keys.demand(!keys.boolean("add_cross_attention", false), "add_cross_attention", "false");
    ModelConfig c = family->read(keys);
    c.family = family->name;
    c.init_std = keys.number("initializer_range", 0.02);
    fill_defaults(c, path);
    validate(c, path);
    return c;
}

std::optional<Packing> packing_from_json(const json& object, const std::string& path) {
    if (!ConfigKeys(object, path).has(QUANTIZATION)) return {};
    const json& given = object[QUANTIZATION];
    const auto text = [&](const char* key) {
        return given.is_object() && given.contains(key) && given[key].is_string() ? given[key].get<std::string>() : "";
    };
    const std::optional<Packing> packing = find_enum<Packing>(PACKING_NAMES, text("weights"));
    require(text("quant_method") == PACKED_METHOD && packing, path, ": key '", QUANTIZATION, "' is ", given.dump(),
            "; supported: none, or what `convert --weights` writes; use weights that are not quantized");
    return packing;
}

void add_packing(json& object, Packing packing) {
    object[QUANTIZATION] = {{"quant_method", PACKED_METHOD}, {"weights", packing_name(packing)}};
}

json config_to_json(const ModelConfig& c, const json& original) {
    json out = original.is_object() ? original : json::object();
    for (const char* key : COMMON_KEYS) out.erase(key);
    for (const Family* f : families()) {
        for (const char* key : f->keys) out.erase(key);
    }
    const Family& family = family_of(c);
    out["model_type"] = family.name;
    if (family.architecture) out["architectures"] = {family.architecture};
    family.write(out, c, original);
    out["vocab_size"] = c.vocab_size;
    out["tie_word_embeddings"] = c.tied;
    out["initializer_range"] = c.init_std;
    write_token_id(out, original, "bos_token_id", c.bos, c.vocab_size);
    write_token_id(out, original, "eos_token_id", c.eos, c.vocab_size);
    return out;
}
