#include "models/gguf_keys.h"

#include <fnmatch.h>

#include <algorithm>
#include <vector>

#include "runtime/error.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

enum class Kind : uint8_t { Text, Integer, Number, Boolean, IntegerOrEach, Texts, Integers, Numbers };

// {arch} is the architecture's name; * any text. scripts/check_keys.py reads these three tables.
struct UsedKey {
    const char* key;
    Kind kind;
};
constexpr UsedKey USED[] = {
    {"general.architecture", Kind::Text},
    {"general.alignment", Kind::Integer},
    {"{arch}.block_count", Kind::Integer},
    {"{arch}.context_length", Kind::Integer},
    {"{arch}.embedding_length", Kind::Integer},
    {"{arch}.feed_forward_length", Kind::IntegerOrEach},
    {"{arch}.expert_count", Kind::Integer},
    {"{arch}.attention.head_count", Kind::IntegerOrEach},
    {"{arch}.attention.head_count_kv", Kind::IntegerOrEach},
    {"{arch}.attention.key_length", Kind::Integer},
    {"{arch}.attention.value_length", Kind::Integer},
    {"{arch}.attention.layer_norm_rms_epsilon", Kind::Number},
    {"{arch}.attention.sliding_window", Kind::IntegerOrEach},
    {"{arch}.rope.dimension_count", Kind::Integer},
    {"{arch}.rope.freq_base", Kind::Number},
    {"{arch}.rope.scaling.type", Kind::Text},
    {"{arch}.rope.scaling.factor", Kind::Number},
    {"{arch}.rope.scale_linear", Kind::Number},
    {"{arch}.rope.scaling.original_context_length", Kind::Integer},
    {"tokenizer.ggml.model", Kind::Text},
    {"tokenizer.ggml.pre", Kind::Text},
    {"tokenizer.ggml.tokens", Kind::Texts},
    {"tokenizer.ggml.token_type", Kind::Integers},
    {"tokenizer.ggml.scores", Kind::Numbers},
    {"tokenizer.ggml.merges", Kind::Texts},
    {"tokenizer.ggml.bos_token_id", Kind::Integer},
    {"tokenizer.ggml.eos_token_id", Kind::Integer},
    {"tokenizer.ggml.eot_token_id", Kind::Integer},
    {"tokenizer.ggml.eom_token_id", Kind::Integer},
    {"tokenizer.ggml.unknown_token_id", Kind::Integer},
    {"tokenizer.ggml.padding_token_id", Kind::Integer},
    {"tokenizer.ggml.fim_pad_token_id", Kind::Integer},
    {"tokenizer.ggml.fim_rep_token_id", Kind::Integer},
    {"tokenizer.ggml.fim_sep_token_id", Kind::Integer},
    {"tokenizer.ggml.add_bos_token", Kind::Boolean},
    {"tokenizer.ggml.add_space_prefix", Kind::Boolean},
    {"tokenizer.chat_template", Kind::Text},
    {"general.sampling.temp", Kind::Number},
    {"general.sampling.top_k", Kind::Integer},
    {"general.sampling.top_p", Kind::Number},
    {"general.sampling.min_p", Kind::Number},
    {"general.sampling.penalty_repeat", Kind::Number},
    {"{arch}.attention.layer_norm_epsilon", Kind::Number},
};

// An error unless the value is one of these, as JSON. []: whatever the value is.
struct DemandedKey {
    const char *key, *supported;
};
constexpr DemandedKey DEMANDED[] = {
    {"general.type", "[\"model\"]"},
    {"split.count", "[0, 1]"},
    {"{arch}.attention.causal", "[true]"},
    {"{arch}.use_parallel_residual", "[false]"},
    {"{arch}.logit_scale", "[0, 1]"},
    {"{arch}.residual_scale", "[0, 1]"},
    {"{arch}.embedding_scale", "[0, 1]"},
    {"{arch}.rope.scaling.attn_factor", "[0, 1]"},
    {"{arch}.rope.scaling.alpha", "[0]"},
    {"{arch}.rope.dimension_sections", "[]"},
    {"{arch}.rope.dimension_count_swa", "[]"},
    {"{arch}.rope.freq_base_swa", "[]"},
    {"{arch}.attention.key_length_swa", "[]"},
    {"{arch}.attention.value_length_swa", "[]"},
    {"{arch}.attention.key_length_mla", "[]"},
    {"{arch}.attention.value_length_mla", "[]"},
    {"{arch}.attention.sliding_window_pattern", "[]"},
    {"{arch}.embedding_length_out", "[0]"},
    {"{arch}.leading_dense_block_count", "[0]"},
    {"{arch}.expert_used_count", "[0]"},
    {"{arch}.nextn_predict_layers", "[0]"},
    {"{arch}.n_deepstack_layers", "[0]"},
    {"{arch}.attn_logit_softcapping", "[0]"},
    {"{arch}.final_logit_softcapping", "[0]"},
    {"{arch}.attention.max_alibi_bias", "[0]"},
    {"{arch}.attention.clamp_kqv", "[0]"},
    {"{arch}.attention.scale", "[0]"},
    {"{arch}.attention.output_scale", "[0]"},
    {"{arch}.attention.temperature_scale", "[0]"},
    {"{arch}.attention.temperature_length", "[0]"},
    {"{arch}.attention.shared_kv_layers", "[0]"},
    {"tokenizer.ggml.add_eos_token", "[false]"},
    {"tokenizer.ggml.add_sep_token", "[false]"},
    {"tokenizer.ggml.remove_extra_whitespaces", "[false]"},
    {"tokenizer.ggml.precompiled_charsmap", "[[]]"},
};

struct IgnoredKeys {
    const char* reason;
    std::vector<const char*> patterns;
};
const std::vector<IgnoredKeys> IGNORED = {
    {"it describes the file, not the model",
     {"general.name",         "general.author",    "general.version",     "general.organization",
      "general.finetune",     "general.basename",  "general.description", "general.quantized_by",
      "general.size_label",   "general.license",   "general.license.*",   "general.url",
      "general.doi",          "general.uuid",      "general.repo_url",    "general.source.*",
      "general.base_model.*", "general.dataset.*", "general.tags",        "general.languages"}},
    {"each tensor names its own type", {"general.quantization_version", "general.file_type"}},
    {"sample and chat have no such sampler",
     {"general.sampling.sequence", "general.sampling.xtc_*", "general.sampling.penalty_last_n",
      "general.sampling.mirostat*"}},
    {"split.count is 1 if everything is in the file", {"split.no", "split.tensors.count"}},
    {"the tensors' shapes say it", {"{arch}.vocab_size"}},
    {"llama.cpp reads it without a use for it", {"{arch}.tensor_data_layout", "{arch}.rope.scaling.finetuned"}},
    {"YaRN reads it, which is refused", {"{arch}.rope.scaling.yarn_*"}},
    {"embeddings and classes are not computed, only logits",
     {"{arch}.pooling_type", "{arch}.classifier.output_labels"}},
    {"it says nothing without experts, which are refused",
     {"{arch}.expert_*", "{arch}.experts_per_group", "{arch}.moe_*", "{arch}.interleave_moe_layer_step",
      "{arch}.router_logit_softcapping", "{arch}.swiglu_clamp_*"}},
    {"architectures that are refused read it",
     {"{arch}.features_length",
      "{arch}.decoder_*",
      "{arch}.swin_norm",
      "{arch}.rescale_every_n_layers",
      "{arch}.time_*_extra_dim",
      "{arch}.token_shift_count",
      "{arch}.full_attention_interval",
      "{arch}.activation_sparsity_scale",
      "{arch}.altup.*",
      "{arch}.embedding_length_per_layer_input",
      "{arch}.*_feat_in",
      "{arch}.*_feat_out",
      "{arch}.attention.group_norm_*",
      "{arch}.attention.*_lora_rank",
      "{arch}.attention.relative_buckets_count",
      "{arch}.attention.indexer.*",
      "{arch}.ssm.*",
      "{arch}.kda.*",
      "{arch}.wkv.*",
      "{arch}.posnet.*",
      "{arch}.convnext.*",
      "{arch}.shortconv.*",
      "clip.*",
      "diffusion.*",
      "xielu.*",
      "tokenizer.rwkv.world",
      "tokenizer.ggml.token_type_count"}},
    {"general.type says that the file is no model, and is refused", {"adapter.*", "imatrix.*"}},
    {"text is not filled in at a middle, classified or masked",
     {"tokenizer.ggml.fim_*", "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id",
      "tokenizer.ggml.middle_token_id", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.seperator_token_id"}},
    {"llama.cpp reads the vocabulary's other keys instead", {"tokenizer.huggingface.json"}},
    {"the default template is imported; to take another is a choice of each request",
     {"tokenizer.chat_templates", "tokenizer.chat_template.*"}},
};
// Keys that tools of llama.cpp write about a file and its Python package does not declare.
constexpr const char* WRITTEN_BY_TOOLS[] = {"general.datasets", "quantize.imatrix.*"};

bool is_list_of(const json& value, bool (json::*of_type)() const noexcept) {
    return value.is_array() && std::all_of(value.begin(), value.end(), [&](const json& x) { return (x.*of_type)(); });
}

bool has_kind(const json& value, Kind kind) {
    switch (kind) {
        case Kind::Text:
            return value.is_string();
        case Kind::Integer:
            return value.is_number_integer();
        case Kind::Number:
            return value.is_number();
        case Kind::Boolean:
            return value.is_boolean();
        case Kind::IntegerOrEach:
            return value.is_number_integer() || is_list_of(value, &json::is_number_integer);
        case Kind::Texts:
            return is_list_of(value, &json::is_string);
        case Kind::Integers:
            return is_list_of(value, &json::is_number_integer);
        case Kind::Numbers:
            return is_list_of(value, &json::is_number);
    }
    return false;
}

const char* name_of(Kind kind) {
    constexpr const char* NAMES[] = {"text",
                                     "a whole number",
                                     "a number",
                                     "true or false",
                                     "a whole number, or a list of them",
                                     "a list of texts",
                                     "a list of whole numbers",
                                     "a list of numbers"};
    return NAMES[size_t(kind)];
}

bool is_ignored(const std::string& key) {
    const auto matches = [&](const char* pattern) { return fnmatch(pattern, key.c_str(), 0) == 0; };
    return std::any_of(std::begin(WRITTEN_BY_TOOLS), std::end(WRITTEN_BY_TOOLS), matches) ||
           std::any_of(IGNORED.begin(), IGNORED.end(), [&](const IgnoredKeys& group) {
               return std::any_of(group.patterns.begin(), group.patterns.end(), matches);
           });
}

template <typename Row, size_t N>
const Row* find_row(const Row (&rows)[N], const std::string& key) {
    const auto* const found = std::find_if(rows, rows + N, [&](const Row& row) { return key == row.key; });
    return found == rows + N ? nullptr : found;
}

}  // namespace

std::vector<std::string> check_gguf_keys(const GgufFile& file) {
    const json architecture = file.keys().value("general.architecture", json());
    require(architecture.is_string(), file.path(), ": key general.architecture is ",
            architecture.is_null() ? "missing" : shown(architecture) + "; it must be text");
    const std::string prefix = architecture.get<std::string>() + ".";
    std::vector<std::string> unknown;
    for (const auto& [key, value] : file.keys().items()) {
        const std::string general = starts_with(key, prefix) ? "{arch}." + key.substr(prefix.size()) : key;
        if (const UsedKey* used = find_row(USED, general)) {
            require(has_kind(value, used->kind), file.path(), ": key ", key, " is ", shown(value), "; it must be ",
                    name_of(used->kind));
        } else if (const DemandedKey* demanded = find_row(DEMANDED, general)) {
            const json supported = json::parse(demanded->supported);
            if (std::find(supported.begin(), supported.end(), value) != supported.end()) continue;
            std::string allowed;
            for (const json& x : supported) allowed += (allowed.empty() ? "" : " or ") + x.dump();
            throw Error(str(file.path(), ": key ", key, " is ", shown(value),
                            "; supported: ", allowed.empty() ? "a file without it" : allowed));
        } else if (!is_ignored(general)) {
            unknown.push_back(key);
        }
    }
    return unknown;
}
