#include "models/model_source.h"

#include <set>

#include "models/family.h"
#include "runtime/files/files.h"

using nlohmann::json;

ModelSource find_model(const std::string& name) {
    ModelSource source;
    source.name = name;
    source.original_config = json::object();
    if (preset(name, source.config)) return source;

    std::string presets;
    for (const std::string& p : preset_names()) presets += (presets.empty() ? "" : ", ") + p;
    require(path_exists(name), name, ": no such model; name a model directory, a run directory or one of ", presets);
    require(is_directory(name), name, ": is a file; name the directory that holds the model's config.json");
    source.directory = name;
    if (!path_exists(join_path(name, "config.json"))) {
        const std::vector<std::string> checkpoints = list_checkpoints(name);
        require(!checkpoints.empty(), name, ": holds neither a config.json nor a complete checkpoint; name a model ",
                "directory, a run directory or one of ", presets);
        source.directory = join_path(name, checkpoints.back());
    }
    const std::string config_path = join_path(source.directory, "config.json");
    source.original_config = read_json(config_path);
    source.config = config_from_json(source.original_config, config_path);
    return source;
}

void save_model_files(const std::string& directory, const ModelConfig& config, const json& original_config,
                      const std::vector<std::string>& carry_from) {
    write_json(join_path(directory, "config.json"), config_to_json(config, original_config));
    const std::set<std::string> carried = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                           "special_tokens_map.json"};
    for (const std::string& source : carry_from) {
        if (source.empty()) continue;
        for (const std::string& name : list_directory(source)) {
            const std::string from = join_path(source, name), to = join_path(directory, name);
            const bool wanted = carried.count(name) || name.rfind("chat_template.", 0) == 0;
            if (wanted && !is_directory(from) && !path_exists(to)) write_file(to, read_file(from));
        }
    }
}
