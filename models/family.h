// Model families: the keys of a family's config.json, the names of the tensors in its files, its presets, and which
// configs it can express. A family is one file of this directory and one line in family.cpp; CONTRIBUTING.md has the
// recipe.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/config_keys.h"
#include "runtime/model/model_config.h"
#include "runtime/model/packed_weight.h"
#include "runtime/model/params.h"
#include "runtime/model/roles.h"

// How a family's files store the weight in a role, and its bias.
struct TensorNames {
    Role role;  // of the weight
    // Without ".weight" and ".bias", "*" for the number of the layer: one name for each matrix that the parameter fuses
    // (q, k, v; gate, up) in the order of its rows, or one name for all of them.
    std::vector<std::string> names;
    bool transposed = false;  // the file stores matrices as [cols, rows]
};

struct Preset {
    std::string name;
    ModelConfig config;
};

struct Family {
    const char* name;          // model_type in config.json
    const char* architecture;  // transformers' class; null if it has none
    // Of the keys that read() and write() use, those that neither COMMON_KEYS (family.cpp) nor another family has.
    std::vector<const char*> keys;
    // Throws Error naming the key if a value would change the logits and is not implemented. What a config may omit
    // (fill_defaults) may stay open.
    ModelConfig (*read)(const ConfigKeys& keys);
    bool (*expresses)(const ModelConfig& config);
    // Adds the family's keys to out. original: the file that the model was loaded from, or {}.
    void (*write)(nlohmann::json& out, const ModelConfig& config, const nlohmann::json& original);
    std::vector<TensorNames> tensors;  // none: files name tensors as the parameter table does
    std::vector<Preset> presets;
};

// clang-format off
namespace gpt2 { const Family& family(); }
namespace llama { const Family& family(); }
namespace mistral { const Family& family(); }
namespace olmo2 { const Family& family(); }
namespace phi3 { const Family& family(); }
namespace qwen2 { const Family& family(); }
namespace qwen3 { const Family& family(); }
namespace smollm3 { const Family& family(); }
namespace train_gpt { const Family& family(); }  // this project's own: every ModelConfig
// clang-format on

// The family that a model is saved as: config.family, or if that cannot express the config exactly, GPT-2 or LLaMA, or
// if they cannot either, this project's own.
const Family& family_of(const ModelConfig& config);

// True if all layers are softmax attention and no option is set that only configs of type train_gpt have.
bool has_common_options(const ModelConfig& config);

// The tensors of the family's files that a parameter is made of. role: of the weight, also for its bias; parts: the
// rows of each matrix that the parameter fuses, or its rows alone. Empty if files name it as the parameter table does.
std::vector<SourceTensor> source_tensors(const Family& family, Role role, bool bias, int64_t layer,
                                         const std::vector<int64_t>& parts);

// Looks up "gpt2-124M", "llama-1B", ...; returns false for an unknown name. The config is complete and valid. After a
// change of layers, channels or heads, reset layer to {} and head_size and ffn to 0, and call fill_defaults().
bool preset(const std::string& name, ModelConfig& config);
std::vector<std::string> preset_names();

// Reads a config.json of any family, as transformers 4 and 5 write it. path is for errors. Throws Error naming the key
// if a value would change the logits and is not implemented.
ModelConfig config_from_json(const nlohmann::json& json, const std::string& path);

// How config.json says that a directory's weights are packed (`convert --weights`), under the key that transformers has
// for quantised weights. transformers does not know the method and refuses the directory.
//     "quantization_config": {"quant_method": "train_gpt", "weights": "int4"}
// Nothing without the key. Throws Error naming the key for another method or other weights.
std::optional<Packing> packing_from_json(const nlohmann::json& json, const std::string& path);
void add_packing(nlohmann::json& json, Packing packing);

// Writes a config.json that transformers 4 and 5 both read. original: the file that the model was loaded from ({} if
// none); keys that this program does not know are copied from it.
nlohmann::json config_to_json(const ModelConfig& config, const nlohmann::json& original);
