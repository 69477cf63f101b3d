#include "models/model_source.h"

#include <algorithm>
#include <memory>
#include <set>

#include "models/family.h"
#include "models/gguf_model.h"
#include "models/lora_adapter.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

ModelSource find_base(const std::string& name, const std::string& adapter, const std::string& given) {
    const std::string base = given.empty() ? LoraAdapter::base_of(adapter) : given;
    if (given.empty()) {
        const std::string random = base.empty() ? LoraAdapter::random_base_of(adapter) : "";
        require(random.empty(), adapter, ": its base was random (", random,
                ") and never stored; train adapters of a model directory to use them");
        require(is_directory(base) || GgufModel::is_gguf(base), adapter, ": its base, '", base,
                "', is neither a directory nor a GGUF file here; name it with --base");
    }
    require(find_adapter(base).empty(), "--base ", base, ": is an adapter; name a model directory");
    ModelSource source = find_model(base);
    require(!source.directory.empty(), "--base ", base, ": is a preset, which has no weights; name a model directory");
    source.name = name;
    source.adapter = adapter;
    refuse_packed(source, "an adapter");
    return source;
}

LoraAdapter read_adapter(const std::string& directory, const ModelSource& source, const ParamTable& table) {
    LoraAdapter adapter(directory, table);
    LoraAdapter::check_base(directory, {source.directory}, source.config, table);
    return adapter;
}

AdjustValues adapter_of(const ModelSource& source, const ParamTable& table) {
    if (source.adapter.empty()) return {};
    const auto adapter = std::make_shared<const LoraAdapter>(read_adapter(source.adapter, source, table));
    return [adapter](const Param& p, int64_t begin, int64_t count, float* values) {
        adapter->apply_to(p, begin, count, values);
    };
}

constexpr const char* GENERATION_CONFIG = "generation_config.json";

constexpr const char* MORE_TEMPLATES = "additional_chat_templates";

void carry(const ModelFiles& from, const std::string& name, const std::string& directory) {
    const std::string to = join_path(directory, name);
    if (!path_exists(to)) write_file(to, from.read(name));
}

void append_end_tokens(const json& object, int64_t vocab_size, std::vector<int32_t>& ids) {
    const json eos = object.value("eos_token_id", json());
    for (const json& id : eos.is_array() ? eos : json::array({eos})) {
        const bool valid = id.is_number_integer() && id >= 0 && id < vocab_size;
        if (valid && std::find(ids.begin(), ids.end(), id.get<int32_t>()) == ids.end())
            ids.push_back(id.get<int32_t>());
    }
}

}  // namespace

JsonKeys generation_config(const ModelSource& source) {
    for (const ModelFiles& files : {ModelFiles(source.adapter), source.files}) {
        const std::string path = files.shown_as(GENERATION_CONFIG);
        if (files.has(GENERATION_CONFIG)) return {path, parse_json_object(files.read(GENERATION_CONFIG), path)};
    }
    return {"", json::object()};
}

std::vector<int32_t> declared_end_tokens(const ModelSource& source) {
    std::vector<int32_t> ids;
    append_end_tokens(source.original_config, source.config.vocab_size, ids);
    append_end_tokens(generation_config(source).object, source.config.vocab_size, ids);
    return ids;
}

void add_end_tokens(const std::string& directory, const ModelSource& source, const std::vector<int32_t>& ids) {
    json object = generation_config(source).object;
    if (object.empty()) {  // without the file transformers takes these keys from config.json
        const ModelConfig& c = source.config;
        object = {{"eos_token_id", source.original_config.value("eos_token_id", json(c.eos))}};
        if (c.bos >= 0) object["bos_token_id"] = c.bos;
        if (source.original_config.contains("pad_token_id"))
            object["pad_token_id"] = source.original_config["pad_token_id"];
    }
    std::vector<int32_t> all;
    append_end_tokens(object, source.config.vocab_size, all);
    const size_t before = all.size();
    for (const int32_t id : ids)
        if (std::find(all.begin(), all.end(), id) == all.end()) all.push_back(id);
    const bool carried = source.adapter.empty();  // the base's file is in the directory already
    if (all.empty() || (all.size() == before && carried)) return;
    object["eos_token_id"] = all;
    write_json(join_path(directory, GENERATION_CONFIG), object);
}

std::string find_adapter(const std::string& name) {
    if (LoraAdapter::is_adapter(name)) return name;
    ModelConfig config;
    if (preset(name, config) || !is_directory(name) || path_exists(join_path(name, "config.json"))) return "";
    const std::vector<std::string> checkpoints = list_checkpoints(name);
    const std::string newest = checkpoints.empty() ? "" : join_path(name, checkpoints.back());
    return !newest.empty() && LoraAdapter::is_adapter(newest) ? newest : "";
}

ModelSource find_model(const std::string& name, const std::string& base) {
    const std::string adapter = find_adapter(name);
    if (!adapter.empty()) return find_base(name, adapter, base);
    require(base.empty(), "--base ", base, ": ", name, " is not an adapter; leave the option out");
    ModelSource source;
    source.name = name;
    source.original_config = json::object();
    if (preset(name, source.config)) return source;

    std::string presets;
    for (const std::string& p : preset_names()) presets += (presets.empty() ? "" : ", ") + p;
    require(path_exists(name), name, ": no such model; name a model directory, a run directory or one of ", presets);
    source.directory = name;
    if (GgufModel::is_gguf(name)) {
        source.gguf = std::make_shared<const GgufModel>(name);
        source.files = source.gguf->files();
        source.original_config = source.gguf->config();
        source.config = config_from_json(source.original_config, name);
        return source;
    }
    require(is_directory(name), name,
            ": is a file, but no GGUF file; name the directory that holds the model's config.json");
    if (!path_exists(join_path(name, "config.json"))) {
        const std::vector<std::string> checkpoints = list_checkpoints(name);
        require(!checkpoints.empty(), name, ": holds neither a config.json nor a complete checkpoint; name a model ",
                "directory, a run directory or one of ", presets);
        source.directory = join_path(name, checkpoints.back());
    }
    source.files = source.directory;
    const std::string config_path = join_path(source.directory, "config.json");
    source.original_config = read_json(config_path);
    source.config = config_from_json(source.original_config, config_path);
    source.packing = packing_from_json(source.original_config, config_path);
    return source;
}

std::vector<LoraAdapter> read_adapters(const ModelSource& source, const ParamTable& table,
                                       const std::vector<std::string>& names) {
    std::vector<LoraAdapter> adapters;
    for (const std::string& name : names) {
        require(!source.directory.empty(), "--adapter ", name, ": --model ", source.name,
                " is a preset; name the adapter's base");
        require(source.adapter.empty(), "--adapter ", name, ": --model ", source.name,
                " is an adapter itself, which is merged; name their base as --model");
        const std::string directory = find_adapter(name);
        require(!directory.empty(), "--adapter ", name,
                ": is no LoRA adapter; name its directory, or a run that trained one");
        adapters.push_back(read_adapter(directory, source, table));
    }
    return adapters;
}

void refuse_packed(const ModelSource& source, const std::string& what) {
    if (!source.packing) return;
    throw Error(str(source.directory, ": its weights are packed (", packing_name(*source.packing),
                    "), for inference alone; for ", what, " name the model that it was converted from"));
}

StoredWeights stored_weights(const ModelSource& source, const ParamTable& table) {
    return source.gguf ? source.gguf->weights(table) : StoredWeights(source.directory, table, source.packing);
}

std::string load_weights(const ModelSource& source, const ParamTable& table, const WeightArenas& arenas) {
    const StoredWeights weights = stored_weights(source, table);
    return (source.gguf ? source.gguf->warning() : "") +
           load_weights(weights, table, arenas, adapter_of(source, table));
}

WeightSource open_weight_source(const ModelSource& source, const ParamTable& table) {
    refuse_packed(source, "this");
    return open_weight_source(stored_weights(source, table), adapter_of(source, table));
}

void save_model_files(const std::string& directory, const ModelConfig& config, const json& original_config,
                      const std::vector<ModelFiles>& carry_from) {
    write_json(join_path(directory, "config.json"), config_to_json(config, original_config));
    const std::set<std::string> carried = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                           "special_tokens_map.json", "added_tokens.json"};
    for (const ModelFiles& source : carry_from) {
        for (const std::string& name : source.names())
            if (carried.count(name) || starts_with(name, "chat_template.")) carry(source, name, directory);
        const std::vector<std::string> more = source.names(MORE_TEMPLATES);
        if (!more.empty()) make_directories(join_path(directory, MORE_TEMPLATES));
        for (const std::string& name : more) carry(source, name, directory);
    }
}
