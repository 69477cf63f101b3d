#include "models/lora_adapter.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "models/family.h"
#include "models/gguf_model.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/files/safetensors.h"
#include "runtime/files/weight_files.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

// Keys of adapter_config.json that are read here, or that do not change what a trained adapter computes. All others
// must be null, false or empty, as peft writes them for a plain adapter.
const std::set<std::string> KNOWN_KEYS = {"auto_mapping",
                                          "base_model_name_or_path",
                                          "bias",
                                          "corda_config",
                                          "ensure_weight_tying",
                                          "eva_config",
                                          "exclude_modules",
                                          "fan_in_fan_out",
                                          "inference_mode",
                                          "init_lora_weights",
                                          "layers_pattern",
                                          "layers_to_transform",
                                          "loftq_config",
                                          "lora_alpha",
                                          "lora_dropout",
                                          "lora_ga_config",
                                          "megatron_config",
                                          "megatron_core",
                                          "peft_type",
                                          "peft_version",
                                          "qalora_group_size",
                                          "r",
                                          "revision",
                                          "runtime_config",
                                          "target_modules",
                                          "task_type",
                                          "use_rslora"};

bool is_plain(const json& value) {
    return value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
}

JsonKeys read_config(const std::string& directory) {
    const std::string path = join_path(directory, ADAPTER_CONFIG);
    return {path, read_json(path)};
}

void check_config(const JsonKeys& config) {
    const auto refuse = [&](const std::string& key, const std::string& why) {
        throw Error(str(config.path, ": key '", key, "' is ", shown(config.object.value(key, json())), ": ", why,
                        "; merge the adapter with peft"));
    };
    if (config.object.value("peft_type", json()) != "LORA") refuse("peft_type", "only LORA is supported");
    if (config.has("bias") && config.object["bias"] != "none") refuse("bias", "trained biases are not supported");
    // These initialisations change the base's weights, too.
    const json initialisation = config.object.value("init_lora_weights", json(true));
    if (initialisation.is_string() && initialisation != "gaussian" && initialisation != "orthogonal" &&
        initialisation != "eva")
        refuse("init_lora_weights", "the adapter does not belong to the base as it was published");
    for (const auto& [key, value] : config.object.items())
        if (!KNOWN_KEYS.count(key) && !is_plain(value)) refuse(key, "not supported");
}

// The keys of an adapter's metadata that describe its base.
constexpr const char *FINGERPRINT = "base_fingerprint", *CONFIG = "base_config";

// config.json without what changes no logits of a model of given weights.
json computing_keys(const ModelConfig& config) {
    json keys = config_to_json(config, json::object());
    for (const char* key : {"architectures", "initializer_range", "bos_token_id", "eos_token_id"}) keys.erase(key);
    if (config.rope_scaling.kind != RopeScaling::Kind::Dynamic) keys.erase("max_position_embeddings");
    return keys;
}

// "base_model.model.<matrix>.lora_A.weight": the matrix, and 'A' or 'B'; 0 for another name.
std::pair<std::string, char> parse_name(const std::string& name) {
    const std::string start = "base_model.model.", end = ".lora_A.weight";
    if (name.size() <= start.size() + end.size() || !starts_with(name, start)) return {"", 0};
    const size_t cut = name.size() - end.size();
    const char which = name[cut + end.find('A')];
    std::string tail = name.substr(cut);
    tail[end.find('A')] = 'A';
    if (tail != end || (which != 'A' && which != 'B')) return {"", 0};
    return {name.substr(start.size(), cut - start.size()), which};
}

// The first n values of a tensor.
std::vector<float> read_values(const SafetensorsFile& file, const SafetensorsEntry& entry, int64_t n) {
    std::vector<char> bytes(size_t(n * dtype_size(entry.dtype)));
    file.read(entry, 0, n, bytes.data());
    std::vector<float> values(static_cast<size_t>(n));
    convert_to_float(values.data(), bytes.data(), entry.dtype, n);
    return values;
}

}  // namespace

bool LoraAdapter::is_adapter(const std::string& directory) {
    return path_exists(join_path(directory, ADAPTER_CONFIG)) && !path_exists(join_path(directory, "config.json"));
}

std::string LoraAdapter::base_of(const std::string& directory) {
    const JsonKeys config = read_config(directory);
    const bool named = config.object.value("base_model_name_or_path", json()).is_string();
    return named ? config.text("base_model_name_or_path") : "";
}

void LoraAdapter::write_config(const std::string& directory, const LoraOptions& lora, const std::string& base,
                               const ParamTable& table) {
    bool transposed = false;  // GPT-2's Conv1D
    for (const Param& p : table.params)
        for (const SourceTensor& source : p.sources) transposed |= source.transposed;
    const bool whole = lora.alpha == std::floor(lora.alpha);
    const json alpha = whole ? json(int64_t(lora.alpha)) : json(lora.alpha);
    write_json(join_path(directory, ADAPTER_CONFIG),
               {{"peft_type", "LORA"},
                {"task_type", "CAUSAL_LM"},
                {"base_model_name_or_path", std::filesystem::absolute(base).lexically_normal().string()},
                {"r", lora.rank},
                {"lora_alpha", alpha},
                {"lora_dropout", 0.0},
                {"use_rslora", lora.rank_stabilized},
                {"target_modules", lora.targets},
                {"fan_in_fan_out", transposed},
                {"bias", "none"},
                {"inference_mode", true}});
}

std::string LoraAdapter::fingerprint(const std::string& base, const ParamTable& table) {
    constexpr int64_t SAMPLE = 1 << 14;  // values of a tensor
    const StoredWeights weights = stored_weights(base, table);
    std::string sample;
    uint32_t crc = 0;
    for (const Param& p : table.params) {
        for (size_t i = 0; i < weights.tensors(p).size(); i++) {
            const auto& [name, part] = weights.tensors(p)[i];
            std::vector<float> values(size_t(std::min(SAMPLE, part.numel())));
            part.read_values(0, int64_t(values.size()), values.data());
            sample.assign(reinterpret_cast<const char*>(&crc), sizeof crc);
            // A tensor of a GGUF file counts as what it is in a model directory.
            sample += bare_name(part.gguf ? p.sources[i].name : name) + shape_string(part.shape(p.cols > 0));
            sample.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
            crc = crc32c(sample.data(), int64_t(sample.size()));
        }
    }
    char text[9];
    std::snprintf(text, sizeof text, "%08x", crc);
    return text;
}

std::map<std::string, std::string> LoraAdapter::base_record(const std::string& base, const ModelConfig& config,
                                                            const ParamTable& table) {
    return {{FINGERPRINT, fingerprint(base, table)}, {CONFIG, computing_keys(config).dump()}};
}

void LoraAdapter::check_base(const std::string& directory, const std::string& base, const ModelConfig& config,
                             const ParamTable& table) {
    const SafetensorsFile file(join_path(directory, ADAPTER_WEIGHTS));
    const auto recorded = [&](const char* key) {
        const auto found = file.metadata().find(key);
        return found == file.metadata().end() ? "" : found->second;
    };
    if (const std::string old = recorded(FINGERPRINT); !old.empty()) {
        const std::string own = fingerprint(base, table);
        require(old == own, base, " is not the base that the adapter in ", directory, " was trained on (fingerprint ",
                own, ", it was ", old, "); name that with --base, or to train as --model");
    }
    const json old = json::parse(recorded(CONFIG), nullptr, false), own = computing_keys(config);
    if (!old.is_object()) return;  // of older versions
    json keys = own;
    keys.update(old);
    for (const auto& item : keys.items()) {
        const auto text = [&](const json& from) {
            return from.contains(item.key()) ? from[item.key()].dump() : "absent";
        };
        require(text(own) == text(old), join_path(base, "config.json"), ": key '", item.key(), "' is ", text(own),
                "; the adapter in ", directory, " was trained with ", text(old),
                "; restore it, or name the adapter's base with --base, or to train as --model");
    }
}

LoraAdapter::LoraAdapter(const std::string& directory, const ParamTable& table) {
    const JsonKeys config = read_config(directory);
    check_config(config);
    R = config.whole_number("r", 1, 1 << 20);
    const double alpha = config.number("lora_alpha", 0);
    const bool root = config.has("use_rslora") && config.boolean("use_rslora");
    read_tensors(join_path(directory, ADAPTER_WEIGHTS), table, alpha / (root ? std::sqrt(double(R)) : double(R)));
}

void LoraAdapter::read_tensors(const std::string& path, const ParamTable& table, double scale) {
    const SafetensorsFile file(path);
    struct Matrix {
        const Param* param;
        const SourceTensor* source;
        const SafetensorsEntry *a = nullptr, *b = nullptr;
    };
    std::map<std::string, Matrix> matrices;  // by the name in the base's files
    for (const Param& p : table.params)
        for (const SourceTensor& source : p.sources)
            if (p.cols) matrices[bare_name(source.name)] = {&p, &source};

    for (const auto& [name, entry] : file.entries()) {
        const auto [matrix, half] = parse_name(name);
        const std::string where = str(path, ": tensor ", name);
        require(name.find(".base_layer.") == std::string::npos, where,
                " is a copy of the base's; save the adapter with peft's save_embedding_layers=False");
        require(half, where,
                " is neither A nor B of a linear layer; embedding adapters, biases and DoRA are not supported");
        const auto found = matrices.find(bare_name(matrix + ".weight"));
        require(found != matrices.end(), where,
                ": the base has no such matrix (a tied head is not one); name the adapter's base with --base");
        Matrix& m = found->second;
        const std::vector<int64_t> expected =
            half == 'A' ? std::vector<int64_t>{R, m.param->cols} : std::vector<int64_t>{m.source->rows, R};
        require(entry.shape == expected, where, ": shape ", shape_string(entry.shape), ", expected ",
                shape_string(expected), "; name the adapter's base with --base");
        require(entry.dtype == DType::F32 || entry.dtype == DType::BF16 || entry.dtype == DType::F16, where, ": is ",
                dtype_name(entry.dtype), "; expected F32, BF16 or F16");
        (half == 'A' ? m.a : m.b) = &entry;
    }
    for (const auto& [name, m] : matrices) {
        require(!m.a == !m.b, path, ": ", name, " has only one of lora_A and lora_B; the file is damaged");
        if (!m.a) continue;
        Update update{m.source->row, m.source->rows, read_values(file, *m.a, m.a->numel()),
                      read_values(file, *m.b, m.b->numel())};
        for (float& b : update.b) b = float(scale * double(b));
        updates[m.param->index].push_back(std::move(update));
    }
}

const std::vector<LoraAdapter::Update>& LoraAdapter::updates_of(const Param& p) const {
    static const std::vector<Update> none;
    const auto found = updates.find(p.index);
    return found == updates.end() ? none : found->second;
}

void LoraAdapter::add_to(const Param& p, int64_t begin, int64_t count, float* values) const {
    if (count == 0) return;
    const int64_t C = p.cols, end = begin + count;
    for (const Update& u : updates_of(p)) {
        const int64_t first = std::max(begin / C, u.row), last = std::min((end - 1) / C + 1, u.row + u.rows);
#pragma omp parallel if ((last - first) * C > 1 << 16)
        {
            std::vector<float> sum;
#pragma omp for schedule(static)
            for (int64_t row = first; row < last; row++) {
                const int64_t low = std::max(begin - row * C, int64_t(0)), high = std::min(end - row * C, C);
                sum.assign(size_t(high - low), 0.0f);
                for (int64_t k = 0; k < R; k++) {
                    const float b = u.b[size_t((row - u.row) * R + k)];
                    const float* const a = u.a.data() + k * C + low;
                    for (size_t i = 0; i < sum.size(); i++) sum[i] += b * a[i];
                }
                float* const to = values + (row * C + low - begin);
                for (size_t i = 0; i < sum.size(); i++) to[i] += sum[i];
            }
        }
    }
}
