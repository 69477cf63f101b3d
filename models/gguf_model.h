// Models in GGUF files (llama.cpp), read and written: which of llama.cpp's architectures a family is, the keys of a
// config, and how its tensors are named. Supported architectures: llama (LLaMA, Mistral), qwen2, qwen3, smollm3, olmo2,
// phi3, gpt2. In llama and smollm3 RoPE rotates neighbouring channels, so the rows of q and k have another order.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/files/gguf_file.h"
#include "runtime/files/model_files.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

// A model in a GGUF file. Throws Error naming key or tensor for what is damaged, or would change tokens or logits and
// is not supported.
class GgufModel {
  public:
    // Whether the path is a file whose name ends in .gguf or that starts as such a file does.
    static bool is_gguf(const std::string& path);
    explicit GgufModel(const std::string& path);

    // As config.json has it. RoPE scaling: rope.scaling.factor without a type, and the older rope.scale_linear, mean
    // linear; LLaMA 3.1's is found by the factors in tensor rope_freqs.weight.
    const nlohmann::json& config() const { return config_json; }
    // config.json, generation_config.json (end tokens and sampling) and those of data/gguf_tokenizer.h.
    const ModelFiles& files() const { return model_files; }
    // The weights, which must be all of the file's tensors. table: config()'s.
    StoredWeights weights(const ParamTable& table) const;
    std::map<std::string, int64_t> types() const;  // "Q4_0": how many tensors have it
    // A line for stderr that names the keys that are unknown; empty if there are none.
    const std::string& warning() const { return unknown_keys; }

  private:
    std::shared_ptr<const GgufFile> file;
    std::string unknown_keys;
    nlohmann::json config_json;
    ModelFiles model_files;
};

// The weights of a model directory, or of a GGUF file.
StoredWeights stored_weights(const std::string& model, const ParamTable& table);
