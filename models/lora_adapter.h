// LoRA adapters in the format of peft: adapter_config.json and adapter_model.safetensors.
//
// An adapter changes matrices W [out, in] of a base model to W + s·B·A with A [r, in] and B [out, r], where s =
// alpha/r, or alpha/√r with use_rslora (Hu et al. 2021, "LoRA"; Kalajdzievski 2023, "A Rank Stabilization Scaling
// Factor for Fine-Tuning with LoRA"). It names matrices as the base's files do, so it reaches the parts of a fused
// parameter too.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/lora.h"
#include "runtime/files/read_params.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

// The base of adapters in training: a model directory, or a preset with the initial weights of a seed, which no file
// holds.
struct LoraBase {
    std::string name;
    std::optional<uint64_t> seed = {};  // of random weights
};

struct TensorChange;

class LoraAdapter {
  public:
    // Whether a directory holds an adapter instead of a model.
    static bool is_adapter(const std::string& directory);
    // base_model_name_or_path of adapter_config.json, which may name a repository of the hub; empty: none.
    static std::string base_of(const std::string& directory);
    // Of an adapter that was trained on random weights: the preset and the seed, for a message. Empty: it was not.
    static std::string random_base_of(const std::string& directory);

    // Writes adapter_config.json of trained adapters. The absolute path of the base is recorded, or null for random
    // weights; table: its parameters.
    static void write_config(const std::string& directory, const LoraOptions& lora, const LoraBase& base,
                             const ParamTable& table);

    // Of a base: CRC-32C, as eight hexadecimal digits, of the name, the shape and the first 16384 values, as fp32, of
    // each tensor in the table's order.
    static std::string fingerprint(const LoraBase& base, const ParamTable& table);
    // Of an adapter in a directory: CRC-32C of its file of tensors.
    static uint32_t checksum(const std::string& directory);
    // The record of the base in the metadata of an adapter's tensors: the fingerprint, and as JSON the keys of
    // config.json that change what the model computes; of random weights also what random_base_of() returns.
    static std::map<std::string, std::string> base_record(const LoraBase& base, const ModelConfig& config,
                                                          const ParamTable& table);
    // Throws Error if the adapter in a directory was trained here on another base. An adapter of peft has no
    // record of its base and is not checked.
    static void check_base(const std::string& directory, const LoraBase& base, const ModelConfig& config,
                           const ParamTable& table);

    // table: the base's. Throws Error, naming the key or tensor, for another kind of adapter (DoRA, biases, ...), and
    // for a tensor that the base does not have, or not in this shape.
    LoraAdapter(const std::string& directory, const ParamTable& table);

    // What the adapter changes of a parameter: the matrix at rows [row, row + rows), by B·A with B [rows, rank], which
    // includes s, and A [rank, cols].
    struct Update {
        int64_t row, rows, rank;
        std::vector<float> a, b;
    };
    int64_t rank() const { return R; }  // the largest
    const std::vector<Update>& updates_of(const Param& p) const;

    // Whether it has whole weights of a parameter (modules_to_save), instead of the base's.
    bool replaces(const Param& p) const;

    // Replaces elements [begin, begin + count) of a parameter, in memory order, where the adapter has them whole, and
    // adds s·B·A.
    void apply_to(const Param& p, int64_t begin, int64_t count, float* values) const;

  private:
    Update read_update(const TensorChange& change, int64_t rank, double scale) const;
    void check_tied(const TensorChange& head, const TensorChange& embedding) const;

    std::shared_ptr<const SafetensorsFile> file;
    int64_t R = 0;
    std::map<size_t, std::vector<Update>> updates;  // by Param::index
    std::map<size_t, std::vector<StoredPart>> wholes;
};
