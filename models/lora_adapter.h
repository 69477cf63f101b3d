// LoRA adapters in the format of peft: adapter_config.json and adapter_model.safetensors.
//
// An adapter changes matrices W [out, in] of a base model to W + s·B·A with A [r, in] and B [out, r], where s =
// alpha/r, or alpha/√r with use_rslora (Hu et al. 2021, "LoRA"; Kalajdzievski 2023, "A Rank Stabilization Scaling
// Factor for Fine-Tuning with LoRA"). It names matrices as the base's files do, so it reaches the parts of a fused
// parameter too.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "models/lora.h"
#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

class LoraAdapter {
  public:
    // Whether a directory holds an adapter instead of a model.
    static bool is_adapter(const std::string& directory);
    // base_model_name_or_path of adapter_config.json, which may name a repository of the hub; empty: none.
    static std::string base_of(const std::string& directory);

    // Writes adapter_config.json of trained adapters. base: the base's directory, of which the absolute path is
    // recorded; table: its parameters.
    static void write_config(const std::string& directory, const LoraOptions& lora, const std::string& base,
                             const ParamTable& table);

    // Of a base: CRC-32C, as eight hexadecimal digits, of the name, the shape and the first 16384 values, as fp32, of
    // each tensor in the table's order.
    static std::string fingerprint(const std::string& base, const ParamTable& table);
    // The record of the base in the metadata of an adapter's tensors: the fingerprint, and as JSON the keys of
    // config.json that change what the model computes.
    static std::map<std::string, std::string> base_record(const std::string& base, const ModelConfig& config,
                                                          const ParamTable& table);
    // Throws Error if the adapter in a directory was trained here on another base. An adapter of peft has no
    // record of its base and is not checked.
    static void check_base(const std::string& directory, const std::string& base, const ModelConfig& config,
                           const ParamTable& table);

    // table: the base's. Throws Error, naming the key or tensor, for another kind of adapter (DoRA, rank_pattern,
    // modules_to_save, biases, ...), and for a matrix that the base does not have, or not in this shape.
    LoraAdapter(const std::string& directory, const ParamTable& table);

    // What the adapter changes of a parameter: the matrix at rows [row, row + rows), by B·A with B [rows, rank], which
    // includes s, and A [rank, cols].
    struct Update {
        int64_t row, rows;
        std::vector<float> a, b;
    };
    int64_t rank() const { return R; }
    const std::vector<Update>& updates_of(const Param& p) const;

    // Adds s·B·A to elements [begin, begin + count) of a parameter, in memory order.
    void add_to(const Param& p, int64_t begin, int64_t count, float* values) const;

  private:
    void read_tensors(const std::string& path, const ParamTable& table, double scale);

    int64_t R = 0;
    std::map<size_t, std::vector<Update>> updates;  // by Param::index
};
