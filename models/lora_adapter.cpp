#include "models/lora_adapter.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "models/family.h"
#include "models/gguf_model.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/files/safetensors.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/initialise.h"
#include "runtime/model/roles.h"
#include "runtime/text.h"

using nlohmann::json;

// What a tensor of an adapter is to the module that it names.
enum class AdapterPart : uint8_t { A, B, EmbeddingA, EmbeddingB, Whole, Unknown };

// What an adapter does to a tensor of the base's files.
struct TensorChange {
    const Param* param;
    const SourceTensor* source;
    bool embedding;      // its A is [r, rows] and its B [columns, r]
    std::string module;  // as the adapter names it
    const SafetensorsEntry *a = nullptr, *b = nullptr, *whole = nullptr;

    std::vector<int64_t> expected_shape(AdapterPart part, int64_t rank) const {
        const int64_t rows = source->rows, cols = param->cols;
        switch (part) {
            case AdapterPart::A:
                return {rank, cols};
            case AdapterPart::B:
                return {rows, rank};
            case AdapterPart::EmbeddingA:
                return {rank, rows};
            case AdapterPart::EmbeddingB:
                return {cols, rank};
            default:
                return cols ? std::vector<int64_t>{rows, cols} : std::vector<int64_t>{rows};
        }
    }
};

namespace {

// Keys of adapter_config.json that are read here, or that do not change what a trained adapter computes. All others
// must be null, false or empty, as peft writes them for a plain adapter.
const std::set<std::string> KNOWN_KEYS = {"alpha_pattern",
                                          "auto_mapping",
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
                                          "modules_to_save",
                                          "peft_type",
                                          "peft_version",
                                          "qalora_group_size",
                                          "r",
                                          "rank_pattern",
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
constexpr const char *FINGERPRINT = "base_fingerprint", *CONFIG = "base_config", *RANDOM = "base_random";

std::string recorded(const SafetensorsFile& file, const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? "" : found->second;
}

constexpr int64_t SAMPLE = 1 << 14;  // values of a tensor in a fingerprint

struct SampledTensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
};

// As a file would hold the first values of a tensor of initial weights.
SampledTensor initial_sample(const Param& p, const SourceTensor& source, uint64_t seed) {
    const int64_t R = source.rows, C = p.row_size();
    SampledTensor sampled{bare_name(source.name), {R}, std::vector<float>(size_t(std::min(SAMPLE, R * C)))};
    if (p.cols) sampled.shape = source.transposed ? std::vector<int64_t>{C, R} : std::vector<int64_t>{R, C};
    float* const values = sampled.values.data();
    const auto n = int64_t(sampled.values.size());
    if (!source.transposed) {
        initial_values(values, p, seed, source.row * C, n);
        return sampled;
    }
    for (int64_t i = 0; i < n; i++) initial_values(values + i, p, seed, (source.row + i % R) * C + i / R, 1);
    return sampled;
}

// config.json without what changes no logits of a model of given weights.
json computing_keys(const ModelConfig& config) {
    json keys = config_to_json(config, json::object());
    for (const char* key : {"architectures", "initializer_range", "bos_token_id", "eos_token_id"}) keys.erase(key);
    if (config.rope_scaling.kind != RopeScaling::Kind::Dynamic) keys.erase("max_position_embeddings");
    return keys;
}

// A number of adapter_config.json for all modules, and a pattern that gives some another one. peft's rule: of the
// expressions that match a module's name, or the end of it behind a point, the first in the file counts.
class PatternedNumber {
  public:
    PatternedNumber(const std::string& path, const char* key, double of_others) : others(of_others) {
        const auto config = nlohmann::ordered_json::parse(read_file(path));  // in the file's order
        const auto found = config.find(key);
        if (found == config.end() || found->is_null()) return;
        require(found->is_object(), path, ": key '", key, "' is ", shown(*found), ": expected an object");
        for (const auto& [expression, number] : found->items()) {
            const std::string where = str(path, ": key '", key, "': '", expression, "'");
            require(number.is_number() && number > 0, where, " is ", number.dump(), ": expected a positive number");
            try {
                patterns.emplace_back(std::regex("(.*\\.)?(" + expression + ")$"), number.get<double>());
            } catch (const std::regex_error&) {
                throw Error(str(where, " is a regular expression that is not supported; merge the adapter with peft"));
            }
        }
    }
    double of(const std::string& module) const {
        for (const auto& [expression, number] : patterns)
            if (std::regex_search(module, expression, std::regex_constants::match_continuous)) return number;
        return others;
    }

  private:
    const double others;
    std::vector<std::pair<std::regex, double>> patterns;
};

// "base_model.model.<module>.lora_A.weight": the base's tensor, "<module>.weight", and the part. base_layer: a copy of
// the base's, which peft saves of embeddings and heads with an adapter.
std::pair<std::string, AdapterPart> parse_name(const std::string& name) {
    const std::string start = "base_model.model.", copy = ".base_layer.";
    if (!starts_with(name, start)) return {"", AdapterPart::Unknown};
    std::string rest = name.substr(start.size());
    const std::pair<const char*, AdapterPart> ends[] = {{".lora_A.weight", AdapterPart::A},
                                                        {".lora_B.weight", AdapterPart::B},
                                                        {".lora_embedding_A", AdapterPart::EmbeddingA},
                                                        {".lora_embedding_B", AdapterPart::EmbeddingB}};
    for (const auto& [end, part] : ends)
        if (ends_with(rest, end)) return {rest.substr(0, rest.size() - std::string(end).size()) + ".weight", part};
    if (rest.find(".lora_") != std::string::npos) return {"", AdapterPart::Unknown};
    if (const size_t at = rest.find(copy); at != std::string::npos) rest.replace(at, copy.size(), ".");
    return {rest, AdapterPart::Whole};
}

// Of modules_to_save, as peft does it: whether the name of a module, or of one that it is in, ends in this.
bool is_in(const std::string& module, const std::string& name) {
    return ends_with(module, name) || module.find(name + ".") != std::string::npos;
}

// The name of a tied head, which the table does not have.
constexpr const char* TIED_HEAD = "lm_head.weight";

std::map<std::string, TensorChange> no_changes(const ParamTable& table) {
    std::map<std::string, TensorChange> changes;  // by bare name
    for (const Param& p : table.params)
        for (const SourceTensor& source : p.sources)
            changes[bare_name(source.name)] = {&p, &source, p.role == WTE || p.role == WPE, ""};
    const Param* const embedding = table.find(WTE);
    if (!table.find(HEAD_W) && embedding) changes[TIED_HEAD] = {embedding, &embedding->sources[0], false, ""};
    return changes;
}

std::vector<float> transposed(const std::vector<float>& values, int64_t columns) {
    std::vector<float> turned(values.size());
    const int64_t rows = int64_t(values.size()) / columns;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < columns; c++) turned[size_t(c * rows + row)] = values[size_t(row * columns + c)];
    return turned;
}

SampledTensor stored_sample(const StoredWeights& weights, const Param& p, size_t i) {
    const auto& [name, part] = weights.tensors(p)[i];
    // A tensor of a GGUF file counts as what it is in a model directory.
    SampledTensor sampled{bare_name(part.gguf ? p.sources[i].name : name), part.shape(p.cols > 0),
                          std::vector<float>(size_t(std::min(SAMPLE, part.numel())))};
    part.read_values(0, int64_t(sampled.values.size()), sampled.values.data());
    return sampled;
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

std::string LoraAdapter::random_base_of(const std::string& directory) {
    return recorded(SafetensorsFile(join_path(directory, ADAPTER_WEIGHTS)), RANDOM);
}

void LoraAdapter::write_config(const std::string& directory, const LoraOptions& lora, const LoraBase& base,
                               const ParamTable& table) {
    bool transposed = false;  // GPT-2's Conv1D
    for (const Param& p : table.params)
        for (const SourceTensor& source : p.sources) transposed |= source.transposed;
    const bool whole = lora.alpha == std::floor(lora.alpha);
    const json alpha = whole ? json(int64_t(lora.alpha)) : json(lora.alpha);
    const json path = base.seed ? json() : json(std::filesystem::absolute(base.name).lexically_normal().string());
    write_json(join_path(directory, ADAPTER_CONFIG), {{"peft_type", "LORA"},
                                                      {"task_type", "CAUSAL_LM"},
                                                      {"base_model_name_or_path", path},
                                                      {"r", lora.rank},
                                                      {"lora_alpha", alpha},
                                                      {"lora_dropout", 0.0},
                                                      {"use_rslora", lora.rank_stabilized},
                                                      {"target_modules", lora.targets},
                                                      {"fan_in_fan_out", transposed},
                                                      {"bias", "none"},
                                                      {"inference_mode", true}});
}

std::string LoraAdapter::fingerprint(const LoraBase& base, const ParamTable& table) {
    std::optional<StoredWeights> weights;
    if (!base.seed) weights.emplace(stored_weights(base.name, table));
    std::string sample;
    uint32_t crc = 0;
    for (const Param& p : table.params) {
        for (size_t i = 0; i < p.sources.size(); i++) {
            const SampledTensor tensor =
                base.seed ? initial_sample(p, p.sources[i], *base.seed) : stored_sample(*weights, p, i);
            sample.assign(reinterpret_cast<const char*>(&crc), sizeof crc);
            sample += tensor.name + shape_string(tensor.shape);
            sample.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * sizeof(float));
            crc = crc32c(sample.data(), int64_t(sample.size()));
        }
    }
    char text[9];
    std::snprintf(text, sizeof text, "%08x", crc);
    return text;
}

uint32_t LoraAdapter::checksum(const std::string& directory) {
    const std::string bytes = read_file(join_path(directory, ADAPTER_WEIGHTS));
    return crc32c(bytes.data(), int64_t(bytes.size()));
}

std::map<std::string, std::string> LoraAdapter::base_record(const LoraBase& base, const ModelConfig& config,
                                                            const ParamTable& table) {
    std::map<std::string, std::string> record = {{FINGERPRINT, fingerprint(base, table)},
                                                 {CONFIG, computing_keys(config).dump()}};
    if (base.seed) record[RANDOM] = str(base.name, ", seed ", *base.seed);
    return record;
}

void LoraAdapter::check_base(const std::string& directory, const LoraBase& base, const ModelConfig& config,
                             const ParamTable& table) {
    const SafetensorsFile file(join_path(directory, ADAPTER_WEIGHTS));
    if (const std::string old = recorded(file, FINGERPRINT); !old.empty()) {
        const std::string own = fingerprint(base, table);
        require(old == own, base.name, " is not the base that the adapter in ", directory,
                " was trained on (fingerprint ", own, ", it was ", old,
                "); name that with --base, or to train as --model");
    }
    const json old = json::parse(recorded(file, CONFIG), nullptr, false), own = computing_keys(config);
    if (!old.is_object()) return;  // of older versions
    json keys = own;
    keys.update(old);
    for (const auto& item : keys.items()) {
        const auto text = [&](const json& from) {
            return from.contains(item.key()) ? from[item.key()].dump() : "absent";
        };
        require(text(own) == text(old), base.seed ? base.name : join_path(base.name, "config.json"), ": key '",
                item.key(), "' is ", text(own), "; the adapter in ", directory, " was trained with ", text(old),
                "; restore it, or name the adapter's base with --base, or to train as --model");
    }
}

LoraAdapter::Update LoraAdapter::read_update(const TensorChange& change, int64_t rank, double scale) const {
    const SafetensorsEntry &first = *change.a, &second = *change.b;
    Update update{change.source->row, change.source->rows, rank, read_values(*file, first, first.numel()),
                  read_values(*file, second, second.numel())};
    if (change.embedding) {  // its delta is (B·A)^T
        std::vector<float> b = transposed(update.a, change.source->rows);
        update.a = transposed(update.b, rank);
        update.b = std::move(b);
    }
    for (float& b : update.b) b = float(scale * double(b));
    return update;
}

// peft changes an embedding and a head that is tied to it alike with ensure_weight_tying, and then saves both.
void LoraAdapter::check_tied(const TensorChange& head, const TensorChange& embedding) const {
    bool same = !head.a == !embedding.a && !head.whole == !embedding.whole;
    if (same && head.a) {
        const int64_t rank = head.a->shape[0];
        same = embedding.a->shape[0] == rank;
        if (same) {
            const Update x = read_update(head, rank, 1), y = read_update(embedding, rank, 1);
            same = x.a == y.a && x.b == y.b;
        }
    }
    if (same && head.whole)
        same = read_values(*file, *head.whole, head.whole->numel()) ==
               read_values(*file, *embedding.whole, embedding.whole->numel());
    require(same, file->path(), ": changes ", bare_name(head.source->name), " and ", TIED_HEAD,
            " in different ways, but the base's are tied; train it with peft's ensure_weight_tying=True");
}

LoraAdapter::LoraAdapter(const std::string& directory, const ParamTable& table)
    : file(std::make_shared<SafetensorsFile>(join_path(directory, ADAPTER_WEIGHTS))) {
    const JsonKeys config = read_config(directory);
    check_config(config);
    const PatternedNumber ranks(config.path, "rank_pattern", double(config.whole_number("r", 1, 1 << 20))),
        alphas(config.path, "alpha_pattern", config.number("lora_alpha", 0));
    const bool root = config.has("use_rslora") && config.boolean("use_rslora");
    std::map<std::string, TensorChange> changes = no_changes(table);
    std::set<std::string> saved;
    for (const json& name : config.object.value("modules_to_save", json::array())) {
        require(name.is_string(), config.path, ": key 'modules_to_save' holds ", shown(name), ": expected names");
        saved.insert(name.get<std::string>());
    }
    const auto is_saved = [&](const std::string& module) {
        return std::any_of(saved.begin(), saved.end(), [&](const std::string& name) { return is_in(module, name); });
    };
    for (const auto& [name, entry] : file->entries()) {
        const auto [tensor, part] = parse_name(name);
        const std::string where = str(file->path(), ": tensor ", name);
        require(part != AdapterPart::Unknown, where,
                " is neither A, B nor a whole weight; biases of adapters and DoRA are not supported");
        const auto found = changes.find(bare_name(tensor));
        require(found != changes.end(), where, ": the base has no such matrix; name the adapter's base with --base");
        TensorChange& change = found->second;
        const bool whole = part == AdapterPart::Whole, vocabulary = change.embedding || change.param->role == HEAD_W;
        const std::string module = tensor.substr(0, tensor.rfind('.'));
        require(!whole || vocabulary || bare_name(tensor) == TIED_HEAD || is_saved(module), where,
                " is neither A nor B of a matrix, and modules_to_save does not name it; the file is damaged");
        require(!whole || !change.source->transposed, where,
                " is whole and transposed, which is not supported; merge the adapter with peft");
        const bool of_embedding = part == AdapterPart::EmbeddingA || part == AdapterPart::EmbeddingB;
        require(whole || (change.param->cols && of_embedding == change.embedding), where, " is neither A nor B of ",
                change.embedding ? "an embedding" : "a matrix", "; the file is damaged");
        change.module = module;
        const std::vector<int64_t> expected = change.expected_shape(part, int64_t(ranks.of(module)));
        require(entry.shape == expected, where, ": shape ", shape_string(entry.shape), ", expected ",
                shape_string(expected), "; name the adapter's base with --base");
        require(entry.dtype == DType::F32 || entry.dtype == DType::BF16 || entry.dtype == DType::F16, where, ": is ",
                dtype_name(entry.dtype), "; expected F32, BF16 or F16");
        const bool a = part == AdapterPart::A || part == AdapterPart::EmbeddingA;
        (whole ? change.whole : a ? change.a : change.b) = &entry;
    }
    for (const std::string& name : saved) {
        const bool found = std::any_of(changes.begin(), changes.end(), [&](const auto& item) {
            return item.second.whole && is_in(item.second.module, name);
        });
        require(found, file->path(), ": has no weight of '", name,
                "', which key 'modules_to_save' names; the file is damaged");
    }
    for (const auto& [name, change] : changes) {
        require(!change.a == !change.b, file->path(), ": ", name,
                " has only one of lora_A and lora_B; the file is damaged");
        if (name == TIED_HEAD && change.param->role == WTE) {
            check_tied(change, changes.at(bare_name(change.source->name)));
            continue;
        }
        const int64_t at = change.source->row * change.param->row_size();
        if (change.whole)
            wholes[change.param->index].push_back(
                {file.get(), change.whole, at, change.source->rows, change.param->row_size(), false});
        if (!change.a) continue;
        const int64_t rank = int64_t(ranks.of(change.module));
        const double alpha = alphas.of(change.module), scale = alpha / (root ? std::sqrt(double(rank)) : double(rank));
        updates[change.param->index].push_back(read_update(change, rank, scale));
        R = std::max(R, rank);
    }
}

const std::vector<LoraAdapter::Update>& LoraAdapter::updates_of(const Param& p) const {
    static const std::vector<Update> none;
    const auto found = updates.find(p.index);
    return found == updates.end() ? none : found->second;
}

bool LoraAdapter::replaces(const Param& p) const {
    return wholes.count(p.index) > 0;
}

void LoraAdapter::apply_to(const Param& p, int64_t begin, int64_t count, float* values) const {
    if (count == 0) return;
    const int64_t C = p.cols, end = begin + count;
    if (const auto found = wholes.find(p.index); found != wholes.end()) {
        for (const StoredPart& part : found->second) {
            const int64_t first = std::max(begin, part.begin), last = std::min(end, part.begin + part.numel());
            if (first < last) part.read_values(first - part.begin, last - part.begin, values + (first - begin));
        }
    }
    for (const Update& u : updates_of(p)) {
        const int64_t first = std::max(begin / C, u.row), last = std::min((end - 1) / C + 1, u.row + u.rows);
#pragma omp parallel if ((last - first) * C > 1 << 16)
        {
            std::vector<float> sum;
#pragma omp for schedule(static)
            for (int64_t row = first; row < last; row++) {
                const int64_t low = std::max(begin - row * C, int64_t(0)), high = std::min(end - row * C, C);
                sum.assign(size_t(high - low), 0.0f);
                for (int64_t k = 0; k < u.rank; k++) {
                    const float b = u.b[size_t((row - u.row) * u.rank + k)];
                    const float* const a = u.a.data() + k * C + low;
                    for (size_t i = 0; i < sum.size(); i++) sum[i] += b * a[i];
                }
                float* const to = values + (row * C + low - begin);
                for (size_t i = 0; i < sum.size(); i++) to[i] += sum[i];
            }
        }
    }
}
