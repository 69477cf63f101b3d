// Reading and writing the keys of a config.json.
//
// Errors name the file, the key, the value found and the values supported.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/model/model_config.h"

// The members of a JSON object, checked: an absent or null key gives the default, a wrong type an Error naming the key.
class ConfigKeys {
  public:
    ConfigKeys(const nlohmann::json& members, const std::string& file, const std::string& key_prefix = "")
        : object(members), path(file), prefix(key_prefix) {}

    const nlohmann::json* find(const char* key) const;
    bool null(const char* key) const { return object.contains(key) && !has(key); }
    bool has(const char* key) const { return find(key) != nullptr; }
    const std::string& file() const { return path; }

    int64_t integer(const char* key, int64_t otherwise) const;
    // A dimension: positive. alias: transformers' common name, which a GPT-2 config may use instead.
    int64_t size(const char* key, int64_t otherwise, const char* alias = nullptr) const;
    double number(const char* key, double otherwise) const;
    bool boolean(const char* key, bool otherwise) const;
    std::string text(const char* key, const std::string& otherwise) const;
    // The first `size` values of an array that has at least so many, each of which `ok` accepts; [] where the key is
    // absent. what: "booleans", for the error.
    nlohmann::json list(const char* key, size_t size, const char* what, bool (*ok)(const nlohmann::json&)) const;
    nlohmann::json nested(const char* key) const;  // an object of its own, {} where the key is absent
    // The first id inside the vocabulary of a number or a list of numbers, -1 if there is none.
    int32_t token_id(const char* key, int32_t otherwise, int64_t vocab_size) const;

    // For values that would change the logits in a way we don't compute.
    void demand(bool ok, const char* key, const std::string& supported) const;
    [[noreturn]] void wrong(const char* key, const std::string& expected) const;

  private:
    std::string shown(const char* key) const;

    const nlohmann::json& object;
    const std::string& path;
    const std::string prefix;
};

// The RoPE options of a family.
struct RopeForms {
    double theta = 10000;  // default
    bool scaling = true;   // linear, dynamic, llama3
    bool partial = false;  // of the first channels of a head
    bool own = false;      // what only configs of type train_gpt have
};
// RoPE's theta and scaling from transformers 4's rope_theta and rope_scaling or transformers 5's rope_parameters, into
// config; max_positions must be set.
void read_rope(ModelConfig& config, const ConfigKeys& keys, const RopeForms& forms);
// Throws for a window. Of families without windows transformers' cache has them nevertheless, but not its mask.
void refuse_windows(const ConfigKeys& keys);
// Writes transformers 4's form, which transformers 5 reads with the same meaning; the reverse isn't so.
void write_rope(nlohmann::json& out, const ModelConfig& config);

// A token id. A list of ids, or one beyond the vocabulary, stays as it was written if it means the same id.
void write_token_id(nlohmann::json& out, const nlohmann::json& original, const char* key, int32_t id,
                    int64_t vocab_size);
