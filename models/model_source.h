// Finding the model that a user names: a model directory in Hugging Face layout, a GGUF file, a run, a preset. Saving
// the files beside the weights.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/lora_adapter.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/model_files.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/model_config.h"
#include "runtime/model/packed_weight.h"

struct JsonKeys;  // runtime/files/json_keys.h
class GgufModel;  // models/gguf_model.h

// A model as the user named it: a preset, a model directory, a GGUF file, or a run directory (its newest complete
// checkpoint).
// Relative paths stay as given. A preset's name always means the preset; write "./gpt2-tiny" for a directory.
struct ModelSource {
    std::string name;                       // as given by the user
    std::string directory;                  // model directory or GGUF file; empty for a preset
    ModelFiles files;                       // its small files
    std::shared_ptr<const GgufModel> gguf;  // null: it is no GGUF file
    ModelConfig config;
    nlohmann::json original_config = nlohmann::json::object();  // contents of config.json, {} for a preset
    std::string adapter;                  // directory of a LoRA adapter that is added to the weights; empty: none
    std::optional<Packing> packing = {};  // of a directory with packed weights (`convert --weights`): inference only
};
// An adapter (models/lora_adapter.h), or a run that trained one, is its base with the adapter added. base: the base's
// directory, or empty for the one that the adapter names.
ModelSource find_model(const std::string& name, const std::string& base = "");

// The directory of the adapter that a model's name means: itself, or the newest checkpoint of a run that trained one.
// Empty: it is no adapter.
std::string find_adapter(const std::string& name);

// Adapters to be applied at run time, each a directory or a run that trained one. Throws Error, naming --adapter, for
// what is no adapter, or one that was trained on another base.
std::vector<LoraAdapter> read_adapters(const ModelSource& source, const ParamTable& table,
                                       const std::vector<std::string>& names);

// load_weights() and open_weight_source() of the model, with the adapter added while weights are read.
// open_weight_source() throws Error for packed weights.
StoredWeights stored_weights(const ModelSource& source, const ParamTable& table);
std::string load_weights(const ModelSource& source, const ParamTable& table, const WeightArenas& arenas);
WeightSource open_weight_source(const ModelSource& source, const ParamTable& table);

// Throws Error, for what needs the weights in 16 or 32 bits, if they are packed. what: "training", ...
void refuse_packed(const ModelSource& source, const std::string& what);

// The model's generation_config.json, or its adapter's; without keys if there is none.
JsonKeys generation_config(const ModelSource& source);

// The tokens that end a text: eos_token_id, a number or a list, of config.json and of generation_config.json, an
// adapter's included. Ids beyond the vocabulary are left out.
std::vector<int32_t> declared_end_tokens(const ModelSource& source);

// Makes generation_config.json in `directory`, a copy of the model's own, list these end tokens too: transformers and
// `sample` stop at no others. If they are listed already, the file stays as it is.
void add_end_tokens(const std::string& directory, const ModelSource& source, const std::vector<int32_t>& ids);

// Writes the files of a model directory other than the weights: config.json, and tokenizer.json, tokenizer_config.json,
// special_tokens_map.json, added_tokens.json, generation_config.json, chat_template.* and additional_chat_templates/
// copied from the `carry_from` models or directories (the first that has a file wins).
void save_model_files(const std::string& directory, const ModelConfig& config, const nlohmann::json& original_config,
                      const std::vector<ModelFiles>& carry_from);
