#include "models/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "data/gguf_tokenizer.h"
#include "models/gguf_architecture.h"
#include "models/gguf_keys.h"
#include "models/gguf_rope.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

constexpr const char* ROPE_FACTORS = "rope_freqs.weight";

// The keys of one architecture, as config.json has them.
class ConfigReader {
  public:
    ConfigReader(const GgufFile& from, const GgufArchitecture& a)
        : file(from), keys(from.keys()), architecture(a), name(a.name) {}

    json config() const {
        require(value("expert_count", 0) == 0, file.path(), ": is a mixture of experts; dense models are supported");
        const GgufTensor& embedding = file.tensor("token_embd.weight");
        require(embedding.shape.size() == 2, file.path(), ": tensor token_embd.weight has the shape ",
                shape_string(embedding.shape), ", expected [tokens, channels]; the file is damaged");
        const int64_t layers = size("block_count");
        require(layers <= int64_t(file.tensors().size()), file.path(), ": key ", key("block_count"), " is ", layers,
                ", and the file has ", file.tensors().size(), " tensors; the file is damaged");
        json c = name == "gpt2" ? gpt2() : llama_block();
        c["model_type"] = architecture.family;
        c["vocab_size"] = embedding.shape[0];
        c["tie_word_embeddings"] = file.tensors().count("output.weight") == 0;
        c["initializer_range"] = 0.02;
        if (name != "gpt2") add_attention(c);
        for (const char* role : {"bos", "eos"})
            c[str(role, "_token_id")] = keys.value(str("tokenizer.ggml.", role, "_token_id"), json());
        c["pad_token_id"] = keys.value("tokenizer.ggml.padding_token_id", json());
        return c;
    }

  private:
    std::string key(const char* of) const { return str(name, ".", of); }

    template <typename T>
    T value(const char* of, const T& otherwise) const {
        return keys.value(key(of), otherwise);
    }
    // A dimension, which may be written once for each layer. otherwise 0: the key is needed.
    int64_t size(const char* of, int64_t otherwise = 0) const {
        const std::string full = key(of);
        require(otherwise || keys.contains(full), file.path(), ": key ", full, " is missing");
        const json found = keys.value(full, json(otherwise));
        const json all = found.is_array() ? found : json::array({found});
        const bool same =
            !all.empty() && std::all_of(all.begin(), all.end(), [&](const json& x) { return x == all[0]; });
        require(same, file.path(), ": key ", full, " differs from layer to layer; only one value for all is supported");
        require(all[0] >= 1 && all[0] <= MAX_DIMENSION, file.path(), ": key ", full, " is ", shown(all[0]),
                "; it must be positive and at most ", MAX_DIMENSION);
        return all[0].get<int64_t>();
    }
    double epsilon(const char* of) const {
        require(keys.contains(key(of)), file.path(), ": key ", key(of), " is missing");
        return keys[key(of)].get<double>();
    }

    json gpt2() const {
        const int64_t heads = size("attention.head_count"), channels = size("embedding_length");
        require(size("attention.head_count_kv", heads) == heads, file.path(), ": key gpt2.attention.head_count_kv is ",
                size("attention.head_count_kv", heads), "; supported: the number of heads, ", heads);
        return {{"n_layer", size("block_count")},
                {"n_embd", channels},
                {"n_head", heads},
                {"n_positions", size("context_length")},
                {"n_inner", size("feed_forward_length")},
                {"layer_norm_epsilon", epsilon("attention.layer_norm_epsilon")},
                {"activation_function", "gelu_new"}};
    }

    json llama_block() const {
        const int64_t channels = size("embedding_length"), heads = size("attention.head_count");
        const int64_t head_size = size("attention.key_length", std::max<int64_t>(channels / heads, 1));
        const auto demand_head_size = [&](const char* of) {
            const int64_t found = size(of, head_size);
            require(found == head_size, file.path(), ": key ", key(of), " is ", found, "; supported: the head size, ",
                    head_size);
        };
        demand_head_size("attention.value_length");
        if (name != "phi3") demand_head_size("rope.dimension_count");
        const double theta = value("rope.freq_base", 10000.0);
        return {{"hidden_size", channels},
                {"num_hidden_layers", size("block_count")},
                {"num_attention_heads", heads},
                {"num_key_value_heads", size("attention.head_count_kv", heads)},
                {"head_dim", head_size},
                {"intermediate_size", size("feed_forward_length")},
                {"max_position_embeddings", size("context_length")},
                {"rms_norm_eps", epsilon("attention.layer_norm_rms_epsilon")},
                {"rope_theta", theta},
                {"rope_scaling", rope_scaling(theta, head_size)},
                {"hidden_act", "silu"}};
    }

    json rope_scaling(double theta, int64_t head_size) const {
        const std::string type = value<std::string>("rope.scaling.type", "linear");
        double factor = value("rope.scaling.factor", value("rope.scale_linear", 0.0));
        if (factor == 0) factor = 1;
        const std::string& path = file.path();
        require(factor > 0 && std::isfinite(factor), path, ": RoPE's scaling factor is ", factor,
                "; it must be positive");
        for (const char* tensor : {"rope_factors_long.weight", "rope_factors_short.weight"})
            require(!file.tensors().count(tensor), path, ": tensor ", tensor,
                    " is for RoPE scaling longrope; supported: none, linear, LLaMA 3.1's");
        const bool none = type == "none" || (type == "linear" && factor == 1);
        if (!file.tensors().count(ROPE_FACTORS)) {
            if (none) return nullptr;
            require(type == "linear" && name != "phi3", path, ": key ", key("rope.scaling.type"), " is ", type,
                    ", the factor ", factor, "; supported: none, linear (not for phi3)");
            return {{"rope_type", "linear"}, {"factor", factor}};
        }
        require(none, path, ": has tensor ", ROPE_FACTORS, " and RoPE scaling ", type, " with factor ", factor,
                "; supported: one of them");
        const int64_t count = file.tensor(ROPE_FACTORS).numel();
        std::vector<float> stored(size_t(head_size + 1) / 2);
        RopeScaling scaling;
        const bool fits = count == int64_t(stored.size());
        if (fits) file.read(ROPE_FACTORS, 0, count, stored.data());
        require(fits && llama3_scaling(stored, theta, head_size, scaling), path, ": tensor ", ROPE_FACTORS,
                " is not LLaMA 3.1's scaling, the only one supported");
        return {{"rope_type", "llama3"},
                {"factor", scaling.factor},
                {"low_freq_factor", scaling.low_freq_factor},
                {"high_freq_factor", scaling.high_freq_factor},
                {"original_max_position_embeddings", scaling.original_max_position}};
    }

    bool has_bias(const std::vector<Role>& roles) const {
        if (roles.empty()) return false;
        for (const TensorNames& t : architecture.tensors)
            if (t.role == roles[0]) return file.tensors().count(replace_layer(t.names[0]) + ".bias") > 0;
        return false;
    }
    static std::string replace_layer(std::string tensor) { return tensor.replace(tensor.find('*'), 1, "0"); }

    // The keys about biases, windows and layers without RoPE.
    void add_attention(json& c) const {
        if (!architecture.attention_bias.empty()) c["attention_bias"] = has_bias(architecture.attention_bias);
        if (!architecture.mlp_bias.empty()) c["mlp_bias"] = has_bias(architecture.mlp_bias);
        const json window_key = value("attention.sliding_window", json(0));
        const int64_t window = window_key == 0 ? 0 : size("attention.sliding_window");
        const std::string window_name = key("attention.sliding_window");
        require(!window || name == "phi3" || name == "llama", file.path(), ": key ", window_name, " is ", window,
                "; supported for llama and phi3");
        if (name == "phi3") {
            c["sliding_window"] = window ? json(window) : json();
            const int64_t head_size = c["head_dim"], positions = c["max_position_embeddings"];
            c["partial_rotary_factor"] = double(size("rope.dimension_count", head_size)) / double(head_size);
            c["original_max_position_embeddings"] = size("rope.scaling.original_context_length", positions);
        }
        if (name == "llama" && window) {
            require(!c["attention_bias"] && !c["mlp_bias"], file.path(),
                    ": has a sliding window and biases; no model that is supported has both");
            c["model_type"] = "mistral";
            c["sliding_window"] = window;
        }
        if (name == "smollm3") {  // the file does not say; llama.cpp has each fourth layer without RoPE
            c["no_rope_layer_interval"] = 4;
            for (int64_t l = 0; l < c["num_hidden_layers"]; l++) c["no_rope_layers"].push_back((l + 1) % 4 ? 1 : 0);
        }
        if (name == "smollm3" || name == "qwen2" || name == "qwen3") c["use_sliding_window"] = false;
    }

    const GgufFile& file;
    const json& keys;
    const GgufArchitecture& architecture;
    const std::string name;
};

const GgufArchitecture& architecture_of(const GgufFile& file) {
    const std::string name = file.keys().at("general.architecture");
    const GgufArchitecture* found = find_gguf_architecture(name);
    require(found, file.path(), ": is of the architecture ", shown_text(name),
            "; supported: ", gguf_architecture_names());
    return *found;
}

// The end tokens, and the sampling that the file declares. In llama.cpp a temperature or top_k below 0 means 0.
json generation_config_of(const GgufFile& file) {
    json out = json::object();
    const std::vector<int64_t> ends = gguf_end_tokens(file);
    if (ends.size() == 1) out["eos_token_id"] = ends[0];
    if (ends.size() > 1) out["eos_token_id"] = ends;
    if (file.keys().contains("tokenizer.ggml.bos_token_id"))
        out["bos_token_id"] = file.keys()["tokenizer.ggml.bos_token_id"];
    for (const auto& [theirs, ours] : GGUF_SAMPLING) {
        const json found = file.keys().value(str("general.sampling.", theirs), json());
        if (!found.is_null()) out[ours] = found < 0 ? json(0) : found;
    }
    return out;
}

std::string unknown_keys_of(const std::string& path, const std::vector<std::string>& keys) {
    if (keys.empty()) return "";
    std::string names;
    constexpr size_t MOST = 5;
    for (size_t i = 0; i < std::min(keys.size(), MOST); i++) names += str(i ? ", " : "", shown_text(keys[i]));
    if (keys.size() > MOST) names += str(" and ", keys.size() - MOST, " more");
    return str(path, ": unknown keys are ignored: ", names, "\n");
}

}  // namespace

bool GgufModel::is_gguf(const std::string& path) {
    return path_exists(path) && !is_directory(path) && (ends_with(path, ".gguf") || GgufFile::has_magic(path));
}

GgufModel::GgufModel(const std::string& path) : file(std::make_shared<const GgufFile>(path)) {
    unknown_keys = unknown_keys_of(path, check_gguf_keys(*file));
    config_json = ConfigReader(*file, architecture_of(*file)).config();
    ModelFiles::Contents contents = gguf_tokenizer_files(file);
    contents["config.json"] = [config = config_json] { return config.dump(2) + "\n"; };
    const json generation = generation_config_of(*file);
    if (!generation.empty()) contents["generation_config.json"] = [generation] { return generation.dump(2) + "\n"; };
    model_files = ModelFiles(path, std::move(contents));
}

std::map<std::string, int64_t> GgufModel::types() const {
    std::map<std::string, int64_t> counts;
    for (const auto& [name, tensor] : file->tensors()) counts[tensor.type->name]++;
    return counts;
}

StoredWeights GgufModel::weights(const ParamTable& table) const {
    const GgufArchitecture& architecture = architecture_of(*file);
    const int64_t head_size = config_json.value("head_dim", int64_t(0));
    StoredWeights::Tensors all(table.params.size());
    std::set<std::string> wanted = {ROPE_FACTORS};
    for (const Param& p : table.params) {
        const std::vector<std::string> names = gguf_names(architecture, p);
        for (size_t i = 0; i < names.size(); i++) {
            const SourceTensor& source = p.sources[i];
            const std::vector<int64_t> expected =
                p.cols ? std::vector<int64_t>{source.rows, p.cols} : std::vector<int64_t>{source.rows};
            const GgufTensor& tensor = file->tensor(names[i]);
            require(tensor.shape == expected, file->path(), ": tensor ", names[i], ": shape ",
                    shape_string(tensor.shape), ", expected ", shape_string(expected),
                    "; the file's keys describe another model");
            all[p.index].push_back({names[i],
                                    {nullptr, nullptr, source.row * p.row_size(), source.rows, p.row_size(), false,
                                     file.get(), names[i], gguf_interleaves(architecture, p, i) ? head_size : 0}});
            wanted.insert(names[i]);
        }
    }
    for (const auto& [name, tensor] : file->tensors())
        require(wanted.count(name), file->path(), ": tensor ", shown_text(name), " is of no ", architecture.name,
                " model that is supported");
    return {file->path(), file, std::move(all)};
}

StoredWeights stored_weights(const std::string& model, const ParamTable& table) {
    if (GgufModel::is_gguf(model)) return GgufModel(model).weights(table);
    return {model, table};
}
