// models/family.h and runtime/model/model_config.h: presets, every form of config.json, and the errors of unsupported
// configs.
#include "models/family.h"

#include <nlohmann/json.hpp>
#include <random>

#include "dev/tests/temp_dir.h"

using nlohmann::json;

namespace {

const std::string PATH = "dir/config.json";

void expect_same_layers(const ModelConfig& a, const ModelConfig& b) {
    EXPECT_EQ(a.attention(), b.attention());
    EXPECT_EQ(a.qk_norm, b.qk_norm);
    for (size_t l = 0; l < std::min(a.layer.size(), b.layer.size()); l++) {
        EXPECT_EQ(a.layer[l].window, b.layer[l].window) << l;
        EXPECT_EQ(a.layer[l].rope, b.layer[l].rope) << l;
    }
}

void expect_same(const ModelConfig& a, const ModelConfig& b) {
    EXPECT_EQ(a.layers, b.layers);
    EXPECT_EQ(a.channels, b.channels);
    EXPECT_EQ(a.heads, b.heads);
    EXPECT_EQ(a.kv_heads, b.kv_heads);
    EXPECT_EQ(a.head_size, b.head_size);
    EXPECT_EQ(a.ffn, b.ffn);
    EXPECT_EQ(a.vocab_size, b.vocab_size);
    EXPECT_EQ(a.max_positions, b.max_positions);
    EXPECT_EQ(a.norm, b.norm);
    EXPECT_EQ(a.norm_eps, b.norm_eps);
    EXPECT_EQ(a.norm_after, b.norm_after);
    EXPECT_EQ(a.positions, b.positions);
    EXPECT_EQ(a.activation, b.activation);
    EXPECT_EQ(a.qkv_bias, b.qkv_bias);
    EXPECT_EQ(a.proj_bias, b.proj_bias);
    EXPECT_EQ(a.mlp_bias, b.mlp_bias);
    EXPECT_EQ(a.tied, b.tied);
    EXPECT_EQ(a.init_std, b.init_std);
    expect_same_layers(a, b);
    EXPECT_EQ(a.bos, b.bos);
    EXPECT_EQ(a.eos, b.eos);
    if (a.positions != Positions::RoPE) return;
    EXPECT_EQ(a.rope_theta, b.rope_theta);
    EXPECT_EQ(a.rope_scaling.kind, b.rope_scaling.kind);
    EXPECT_EQ(a.rope_scaling.factor, b.rope_scaling.factor);
    EXPECT_EQ(a.rope_scaling.low_freq_factor, b.rope_scaling.low_freq_factor);
    EXPECT_EQ(a.rope_scaling.high_freq_factor, b.rope_scaling.high_freq_factor);
    EXPECT_EQ(a.rope_scaling.original_max_position, b.rope_scaling.original_max_position);
    EXPECT_EQ(a.rope_scaling.fraction, b.rope_scaling.fraction);
}

ModelConfig preset_config(const std::string& name) {
    ModelConfig c;
    EXPECT_TRUE(preset(name, c)) << name;
    return c;
}

ModelConfig read(const std::string& text) {
    return config_from_json(json::parse(text), PATH);
}

// The number of weights, computed from the shape (the driver counts its parameter table).
int64_t count_weights(const ModelConfig& c) {
    const int64_t mlp_matrices = c.activation == Activation::SwiGLU ? 3 : 2, norm = c.norm == Norm::LayerNorm ? 2 : 1;
    int64_t layer =
        c.channels * c.qkv_channels() + c.heads * c.head_size * c.channels + mlp_matrices * c.channels * c.ffn;
    if (c.qkv_bias) layer += c.qkv_channels();
    if (c.proj_bias) layer += c.channels;
    if (c.qk_norm == QkNorm::Weights) layer += 2 * c.head_size;
    if (c.qk_norm == QkNorm::AllHeads) layer += (c.heads + c.kv_heads) * c.head_size;
    if (c.mlp_bias) layer += c.fc_channels() + c.channels;
    layer += 2 * norm * c.channels;
    const int64_t positions = c.positions == Positions::Learned ? c.max_positions * c.channels : 0;
    return c.vocab_size * c.channels * (c.tied ? 1 : 2) + positions + c.layers * layer + norm * c.channels;
}

TEST(ModelConfig, PresetsHaveThePublishedSizes) {
    const std::map<std::string, int64_t> published = {
        {"gpt2-124M", 124439808},    {"gpt2-350M", 354823168},     {"gpt2-774M", 774030080},
        {"gpt2-1558M", 1557611200},  {"llama-1B", 1235814400},     {"llama-3B", 3212749824},
        {"llama-8B", 8030261248},    {"llama-70B", 70553706496},   {"llama2-7B", 6738415616},
        {"qwen2.5-0.5B", 494032768}, {"qwen2.5-1.5B", 1543714304}, {"qwen2.5-3B", 3085938688},
        {"qwen2.5-7B", 7615616512},  {"qwen3-0.6B", 596049920},    {"qwen3-1.7B", 1720574976},
        {"qwen3-4B", 4022468096},    {"qwen3-8B", 8190735360},     {"smollm3-3B", 3075098624},
        {"mistral-7B", 7241732096},  {"olmo2-1B", 1484916736},     {"olmo2-7B", 7298617344},
        {"olmo2-13B", 13716198400},  {"olmo2-32B", 32234279936}};
    for (const auto& [name, weights] : published) EXPECT_EQ(count_weights(preset_config(name)), weights) << name;
    const std::map<std::string, const char*> families = {
        {"gpt2", "gpt2"},        {"llama", "llama"},     {"llama2", "llama"},
        {"modern", "train_gpt"}, {"qwen2.5", "qwen2"},   {"qwen3", "qwen3"},
        {"smollm3", "smollm3"},  {"mistral", "mistral"}, {"olmo2", "olmo2"}};
    EXPECT_EQ(preset_names().size(), 31u);
    for (const std::string& name : preset_names()) {
        const ModelConfig c = preset_config(name);
        EXPECT_NO_THROW(validate(c, name));
        EXPECT_STREQ(family_of(c).name, families.at(name.substr(0, name.find('-')))) << name;
    }
    const ModelConfig tiny = preset_config("llama-tiny");
    EXPECT_EQ(tiny.kv_heads, 2);
    EXPECT_EQ(tiny.head_size, 32);
    EXPECT_EQ(tiny.attention(), "SSSS");
    EXPECT_FLOAT_EQ(tiny.attention_scale(), 0.17677669f);
    EXPECT_EQ(preset_config("gpt2-tiny").vocab_size, 4096);
    EXPECT_EQ(preset_config("gpt2-tiny").max_positions, 256);
    EXPECT_EQ(preset_config("gpt2-mini").layers, 6);
    ModelConfig c;
    EXPECT_FALSE(preset("gpt2", c));
    EXPECT_FALSE(preset("", c));
}

TEST(ModelConfig, SavedConfigsReadBack) {
    for (const std::string& name : preset_names()) {
        const ModelConfig c = preset_config(name);
        const json saved = config_to_json(c, json::object());
        expect_same(config_from_json(json::parse(saved.dump()), PATH), c);
        EXPECT_EQ(config_to_json(c, saved), saved) << name;  // saving again changes nothing
    }
}

TEST(ModelConfig, OptionsOfNoFamilyMakeATrainGptConfig) {
    const auto changed = [](const char* name, void (*change)(ModelConfig&)) {
        ModelConfig c = preset_config(name);
        change(c);
        EXPECT_NO_THROW(validate(c, "test"));
        EXPECT_STREQ(family_of(c).name, "train_gpt");
        const json saved = config_to_json(c, json::object());
        EXPECT_EQ(saved["model_type"], "train_gpt");
        EXPECT_FALSE(saved.contains("architectures"));
        expect_same(config_from_json(json::parse(saved.dump()), PATH), c);
    };
    changed("gpt2-tiny", [](ModelConfig& c) { c.activation = Activation::ReLU2; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.norm = Norm::RMSNorm; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.positions = Positions::RoPE; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.qkv_bias = false; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.proj_bias = false; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.mlp_bias = false; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.kv_heads = 1; });
    changed("gpt2-tiny", [](ModelConfig& c) { c.head_size = 64; });
    changed("llama-tiny", [](ModelConfig& c) { c.qkv_bias = true; });
    changed("llama-tiny", [](ModelConfig& c) { c.activation = Activation::GELU; });
    changed("llama-tiny", [](ModelConfig& c) { c.norm = Norm::LayerNorm; });
    changed("llama-tiny", [](ModelConfig& c) { c.positions = Positions::Learned; });
    changed("llama-tiny", [](ModelConfig& c) { c.rope_scaling = {RopeScaling::Kind::Dynamic, 2, 1, 4, 512}; });
}

TEST(ModelConfig, DefaultsMatchTransformers) {
    const ModelConfig gpt2 = read(R"({"model_type": "gpt2"})");
    expect_same(gpt2, preset_config("gpt2-124M"));
    const ModelConfig llama = read(R"({"model_type": "llama"})");
    ModelConfig expected = preset_config("llama2-7B");
    expected.max_positions = 2048;
    expected.norm_eps = 1e-6;
    expect_same(llama, expected);
}

TEST(ModelConfig, ReadsGpt2) {
    const ModelConfig c = read(R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 100,
        "n_positions": 64, "n_ctx": 64, "layer_norm_epsilon": 1e-6, "activation_function": "gelu_pytorch_tanh",
        "vocab_size": 101, "tie_word_embeddings": false, "initializer_range": 0.5, "bos_token_id": 50256,
        "eos_token_id": [50256, 7, 8], "resid_pdrop": 0.3, "reorder_and_upcast_attn": true, "unknown": {"a": [1]}})");
    EXPECT_EQ(c.channels, 48);
    EXPECT_EQ(c.layers, 2);
    EXPECT_EQ(c.heads, 3);
    EXPECT_EQ(c.kv_heads, 3);
    EXPECT_EQ(c.head_size, 16);
    EXPECT_EQ(c.ffn, 100);
    EXPECT_EQ(c.max_positions, 64);
    EXPECT_EQ(c.norm_eps, 1e-6);
    EXPECT_EQ(c.vocab_size, 101);
    EXPECT_EQ(c.padded_vocab(), 128);
    EXPECT_FALSE(c.tied);
    EXPECT_EQ(c.init_std, 0.5);
    EXPECT_EQ(c.bos, -1);  // beyond the vocabulary
    EXPECT_EQ(c.eos, 7);   // the first id in the vocabulary
    EXPECT_EQ(c.attention(), "SS");
    EXPECT_EQ(read(R"({"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 1})").channels, 96);
    EXPECT_EQ(read(R"({"model_type": "gpt2", "bos_token_id": null, "n_inner": null})").bos, -1);
}

TEST(ModelConfig, ReadsLlama) {
    const ModelConfig c = read(R"({"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "attention_bias": true, "mlp_bias": true,
        "tie_word_embeddings": true, "vocab_size": 99, "pretraining_tp": 2, "attention_dropout": 0.1,
        "rope_theta": 500000.0, "rope_scaling": null})");
    EXPECT_EQ(c.kv_heads, 2);
    EXPECT_EQ(c.head_size, 16);
    EXPECT_EQ(c.qkv_channels(), 128);
    EXPECT_EQ(c.fc_channels(), 200);
    EXPECT_TRUE(c.qkv_bias && c.proj_bias && c.mlp_bias && c.tied);
    EXPECT_EQ(c.rope_theta, 500000);
    EXPECT_EQ(c.rope_scaling.kind, RopeScaling::Kind::None);
    EXPECT_EQ(c.bos, 1);
}

ModelConfig read_rope(const std::string& keys) {
    return read(R"({"model_type": "llama", "max_position_embeddings": 4096, )" + keys + "}");
}

TEST(ModelConfig, ReadsRopeOfTransformers4And5) {
    const std::string llama3 =
        R"("factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024)";
    for (const std::string& keys :
         {R"("rope_theta": 5000, "rope_scaling": {"rope_type": "llama3", )" + llama3 + "}",
          R"("rope_theta": 5000, "rope_scaling": {"type": "llama3", )" + llama3 + "}",
          R"("rope_parameters": {"rope_type": "llama3", "rope_theta": 5000, )" + llama3 + "}",
          R"("rope_theta": 5000, "rope_parameters": {"rope_type": "llama3", )" + llama3 + "}",
          R"("rope_theta": 5000, "rope_scaling": {"rope_type": "llama3", )" + llama3 +
              R"(}, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000, )" + llama3 + "}"}) {
        const ModelConfig c = read_rope(keys);
        EXPECT_EQ(c.rope_theta, 5000) << keys;
        EXPECT_EQ(c.rope_scaling.kind, RopeScaling::Kind::Llama3);
        EXPECT_EQ(c.rope_scaling.factor, 8);
        EXPECT_EQ(c.rope_scaling.low_freq_factor, 1);
        EXPECT_EQ(c.rope_scaling.high_freq_factor, 4);
        EXPECT_EQ(c.rope_scaling.original_max_position, 1024);
    }
    EXPECT_EQ(read_rope(R"("rope_parameters": {"rope_type": "default", "rope_theta": 7})").rope_theta, 7);
    EXPECT_EQ(read_rope(R"("rope_theta": 8, "rope_parameters": {"rope_theta": 7})").rope_theta, 7);
    EXPECT_EQ(read_rope(R"("rope_scaling": {"rope_type": "linear", "factor": 2})").rope_scaling.factor, 2);
    const ModelConfig dynamic = read_rope(R"("rope_scaling": {"type": "dynamic", "factor": 2.0})");
    EXPECT_EQ(dynamic.rope_scaling.kind, RopeScaling::Kind::Dynamic);
    EXPECT_EQ(dynamic.rope_scaling.original_max_position, 4096);
    EXPECT_STREQ(family_of(dynamic).name, "llama");
    expect_same(config_from_json(config_to_json(dynamic, json::object()), PATH), dynamic);
}

TEST(ModelConfig, RejectsUnsupportedRope) {
    const auto refused = [](const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read_rope(keys); }, parts);
    };
    refused(R"("rope_scaling": {"rope_type": "yarn", "factor": 2.0})",
            {PATH, "rope_scaling.rope_type", "yarn", "llama3"});
    refused(R"("rope_scaling": {"type": "longrope"})", {"rope_scaling.type", "longrope"});
    refused(R"("rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2})", {"rope_scaling.type"});
    refused(R"("rope_scaling": {"rope_type": "linear"})", {"rope_scaling.factor", "missing"});
    refused(R"("rope_scaling": {"rope_type": "linear", "factor": "2"})", {"rope_scaling.factor", "a number"});
    refused(R"("rope_scaling": {"rope_type": "linear", "factor": 0})", {"factor is 0", "positive"});
    refused(R"("rope_scaling": {"rope_type": "linear", "factor": 0.5})", {"factor is 0.5", "at least 1"});
    refused(R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4})", {"low_freq_factor"});
    refused(R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})",
            {"low_freq_factor 4"});
    refused(R"("rope_scaling": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 7})",
            {"original_max_position_embeddings", "7"});
    refused(R"("original_max_position_embeddings": 9, "rope_scaling": {"rope_type": "llama3", "factor": 8,
               "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 7})",
            {"original_max_position_embeddings", "9"});
    refused(R"("rope_scaling": [1])", {"rope_scaling", "an object"});
    refused(R"("rope_theta": 0)", {"theta", "positive"});
    refused(R"("rope_theta": "10000")", {"rope_theta", "a number"});
    refused(R"("partial_rotary_factor": 0.5)", {"partial_rotary_factor", "0.5"});
    refused(R"("rope_parameters": {"partial_rotary_factor": 0.5})", {"rope_parameters.partial_rotary_factor"});
    refused(R"("rope_parameters": {"full_attention": {"rope_theta": 5}})", {"rope_parameters", "full_attention"});
    refused(R"("rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 10000})",
            {"rope_scaling", "rope_parameters", "contradict"});
}

TEST(ModelConfig, RejectsOptionsThatChangeTheLogits) {
    const auto refused = [](const std::string& type, const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read("{\"model_type\": \"" + type + "\", " + keys + "}"); }, parts);
    };
    for (const char* act : {"gelu", "relu", "silu", "quick_gelu", "relu2"}) {
        refused("gpt2", str("\"activation_function\": \"", act, "\""), {PATH, "activation_function", act, "gelu_new"});
    }
    refused("gpt2", R"("scale_attn_weights": false)", {"scale_attn_weights", "false"});
    refused("gpt2", R"("scale_attn_by_inverse_layer_idx": true)", {"scale_attn_by_inverse_layer_idx", "true"});
    for (const char* family : {"gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "olmo2"}) {
        refused(family, R"("add_cross_attention": true)", {"add_cross_attention"});
        refused(family, R"("is_encoder_decoder": true)", {"is_encoder_decoder", "true", "false"});
        refused(family, R"("is_causal": false)", {"is_causal", "false"});
        refused(family, R"("per_layer_config": {"0": {"intermediate_size": 8}})", {"per_layer_config"});
        refused(family, R"("attention_chunk_size": 8)", {"attention_chunk_size", "8"});
        refused(family, R"("kv_sharing_modes": ["full"])", {"kv_sharing_modes"});
        refused(family, R"("num_kv_shared_layers": 1)", {"num_kv_shared_layers"});
        EXPECT_NO_THROW(read(str(R"({"model_type": ")", family, R"(", "is_causal": true, "per_layer_config": {},)",
                                 R"("attention_chunk_size": null, "num_kv_shared_layers": 0})")));
    }
    for (const char* family : {"gpt2", "llama", "olmo2"}) {  // without windows
        refused(family, R"("sliding_window": 8)", {"sliding_window", "8", "null"});
        refused(family, R"("layer_types": ["sliding_attention"])", {"layer_types", "full_attention in all layers"});
        EXPECT_NO_THROW(read(
            str(R"({"model_type": ")", family, R"(", "sliding_window": null, "layer_types": ["full_attention"]})")));
    }
    refused("gpt2", R"("pruned_heads": {"0": [1]})", {"pruned_heads"});
    refused("gpt2", R"("n_embd": 768, "hidden_size": 64)", {"hidden_size", "n_embd"});
    refused("llama", R"("hidden_act": "gelu")", {"hidden_act", "gelu", "silu"});
    refused("llama", R"("quantization_config": {"bits": 4})", {"quantization_config"});
    EXPECT_NO_THROW(read(R"({"model_type": "llama", "hidden_act": "swish", "pruned_heads": {}})"));
    refused("bert", R"("a": 1)", {PATH, "model_type", "bert", "gpt2, llama, train_gpt, mistral"});
    expect_error([] { read("{}"); }, {PATH, "model_type", "missing"});
    expect_error([] { read("[1]"); }, {PATH, "not a JSON object"});
}

TEST(ModelConfig, RejectsInvalidTypesAndNumbers) {
    const auto refused = [](const std::string& type, const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read("{\"model_type\": \"" + type + "\", " + keys + "}"); }, parts);
    };
    for (const char* value : {"\"12\"", "12.5", "[12]", "true", "{}", "18446744073709551615"}) {
        refused("gpt2", str("\"n_layer\": ", value), {PATH, "'n_layer'", "a whole number"});
    }
    for (const char* key : {"n_layer", "n_embd", "n_head", "n_positions", "n_inner", "vocab_size"}) {
        refused("gpt2", str("\"", key, "\": 0"), {PATH, key, "is 0", "positive"});
        refused("gpt2", str("\"", key, "\": -7"), {PATH, key, "is -7", "positive"});
        refused("gpt2", str("\"", key, "\": 9223372036854775807"), {PATH, key, "9223372036854775807", "at most"});
    }
    for (const char* key : {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
                            "head_dim", "intermediate_size", "max_position_embeddings", "vocab_size"}) {
        refused("llama", str("\"", key, "\": 0"), {PATH, key, "is 0", "positive"});
        refused("llama", str("\"", key, "\": \"x\""), {PATH, key, "a whole number"});
        EXPECT_NO_THROW(read(str("{\"model_type\": \"llama\", \"", key, "\": null}"))) << key;
    }
    refused("gpt2", R"("n_layer": 2147483647)", {"layers is 2147483647", "at most 10000"});
    refused("gpt2", R"("n_embd": 2147483646, "n_head": 2, "n_inner": 8)", {"weights", "smaller"});
    refused("gpt2", R"("n_head": 7)", {PATH, "7 heads do not divide 768 channels"});
    refused("llama", R"("num_key_value_heads": 5)", {PATH, "5 KV heads do not divide 32 heads"});
    refused("llama", R"("head_dim": 15)", {PATH, "even head size", "15"});
    refused("gpt2", R"("layer_norm_epsilon": "1e-5")", {"layer_norm_epsilon", "a number"});
    refused("gpt2", R"("layer_norm_epsilon": 0)", {"epsilon", "positive"});
    refused("gpt2", R"("initializer_range": -1)", {"standard deviation", "-1"});
    refused("gpt2", R"("tie_word_embeddings": 1)", {"tie_word_embeddings", "true or false"});
    refused("gpt2", R"("activation_function": 3)", {"activation_function", "a string"});
    refused("gpt2", R"("eos_token_id": "x")", {"eos_token_id", "a token id"});
    refused("gpt2", R"("eos_token_id": [1.5])", {"eos_token_id", "a token id"});
    const json good = config_to_json(
        [] {
            ModelConfig c = preset_config("gpt2-tiny");
            c.activation = Activation::ReLU2;
            return c;
        }(),
        json::object());
    for (const char* key :
         {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "max_position_embeddings", "norm", "norm_eps", "positions", "mlp",
          "qkv_bias", "proj_bias", "mlp_bias", "tie_word_embeddings", "attention"}) {
        json changed = good;
        changed.erase(key);
        expect_error([&] { config_from_json(changed, PATH); }, {PATH, key, "missing"});
        changed[key] = json::array({1});
        expect_error([&] { config_from_json(changed, PATH); }, {PATH, key, "[1]"});
    }
    json changed = good;
    changed["attention"] = "SSG";
    expect_error([&] { config_from_json(changed, PATH); }, {PATH, "'SSG' names 3 layers, the model has 4"});
    changed["attention"] = "SSXS";
    expect_error([&] { config_from_json(changed, PATH); }, {PATH, "unknown letter"});
    changed["attention"] = "S";
    EXPECT_EQ(config_from_json(changed, PATH).attention(), "SSSS");
    changed["attention"] = "SLGS";
    EXPECT_EQ(config_from_json(changed, PATH).attention(), "SLGS");
    changed["head_dim"] = 514;
    expect_error([&] { config_from_json(changed, PATH); }, {PATH, "heads of up to 512, not 514"});
}

TEST(ModelConfig, HeadsOfALlamaNeedNotDivideItsChannels) {
    const ModelConfig c = config_from_json(
        json::parse(R"({"model_type": "llama", "hidden_size": 40, "num_attention_heads": 3, "head_dim": 32})"), PATH);
    EXPECT_STREQ(family_of(c).name, "llama");
    const json saved = config_to_json(c, json::object());
    EXPECT_EQ(saved["model_type"], "llama");
    EXPECT_EQ(saved["head_dim"], 32);
    expect_same(config_from_json(saved, PATH), c);
}

TEST(ModelConfig, AttentionTypes) {
    ModelConfig c = preset_config("llama-tiny");
    c.set_attention("SLGS");
    EXPECT_STREQ(family_of(c).name, "train_gpt");
    EXPECT_TRUE(c.has_linear_attention());
    EXPECT_EQ(c.layers_of(AttentionType::Softmax), 2);
    EXPECT_TRUE(c.uses_rope(0) && c.uses_rope(1) && c.uses_rope(2));
    c.layer[1].rope = c.layer[2].rope = false;
    EXPECT_TRUE(c.uses_rope(0) && !c.uses_rope(1) && !c.uses_rope(2) && c.uses_rope(3));
    const json saved = config_to_json(c, json::object());
    EXPECT_EQ(saved["attention"], "SLGS");
    EXPECT_EQ(saved["linear_rope"], false);
    const ModelConfig again = config_from_json(saved, PATH);
    EXPECT_EQ(again.attention(), "SLGS");
    EXPECT_FALSE(again.layer[1].rope || again.layer[2].rope);
    json without = saved;
    without.erase("linear_rope");
    EXPECT_EQ(config_from_json(without, PATH).layers_without_rope(), 0);
    without["linear_rope"] = 1;
    expect_error([&] { config_from_json(without, PATH); }, {"linear_rope", "true or false"});
    c.layer.assign(4, {});
    EXPECT_STREQ(family_of(c).name, "llama");
    EXPECT_FALSE(c.has_linear_attention());
    c.positions = Positions::Learned;
    c.set_attention("LLLL");
    EXPECT_FALSE(c.uses_rope(0));
    EXPECT_FALSE(config_to_json(c, json::object()).contains("linear_rope"));
}

// Layers that differ in more than the attention type are lists in a config of our own; others don't write the lists.
TEST(ModelConfig, LayerFeatures) {
    const ModelConfig plain = preset_config("llama-tiny");
    for (const char* key : {"layer_rope", "layer_windows", "linear_rope"})
        EXPECT_FALSE(config_to_json(plain, json::object()).contains(key)) << key;
    ModelConfig c = plain;
    c.layer = {{AttentionType::Softmax, 64, false}, {AttentionType::Linear}, {AttentionType::Softmax, 16}, {}};
    EXPECT_EQ(c.smallest_window(), 16);
    EXPECT_STREQ(family_of(c).name, "train_gpt");
    const json saved = config_to_json(c, json::object());
    EXPECT_EQ(saved["layer_windows"], json::array({64, 0, 16, 0}));
    EXPECT_EQ(saved["layer_rope"], json::array({false, true, true, true}));
    EXPECT_FALSE(saved.contains("linear_rope"));
    expect_same(config_from_json(saved, PATH), c);
    c.set_attention("SSSG");
    EXPECT_EQ(c.layer[0].window, 64);
    EXPECT_FALSE(c.layer[0].rope);
    c.set_attention("LSSG");
    EXPECT_EQ(c.layer[0].window, 0);  // linear attention has none

    const auto refused = [&](const char* key, const json& value, const std::vector<std::string>& parts) {
        json changed = saved;
        changed[key] = value;
        expect_error([&] { config_from_json(changed, PATH); }, parts);
    };
    refused("layer_rope", json::array({true}), {PATH, "layer_rope", "a list of 4 booleans"});
    refused("layer_rope", json::array({1, 1, 1, 1}), {PATH, "layer_rope", "a list of 4 booleans"});
    refused("layer_windows", 7, {PATH, "layer_windows", "a list of 4 whole numbers"});
    refused("layer_windows", json::array({1, 0, 1, UINT64_MAX}), {PATH, "layer_windows", "whole numbers"});
    refused("layer_windows", json::array({-1, 0, 1, 1}), {PATH, "layer_windows", "whole numbers"});
    refused("layer_windows", json::array({1, 1, 1, 1}), {PATH, "layer of linear attention", "window of 1"});
    ModelConfig deeper = c;
    change_layers(deeper, 7, "m");
    EXPECT_EQ(deeper.attention(), "LSSGLSS");
    EXPECT_EQ(deeper.layer[6].window, 16);
    change_layers(deeper, 1, "m");
    EXPECT_EQ(deeper.attention(), "L");
    expect_error([&] { change_layers(deeper, 10001, "m"); }, {"m", "layers is 10001", "at most 10000"});
    expect_error([&] { change_layers(deeper, 0, "m"); }, {"m", "layers is 0", "positive"});
}

// The defaults of the descendants of LLaMA where transformers' differ from LLaMA's.
TEST(ModelConfig, DefaultsOfTheFamilies) {
    const auto defaults = [](const char* type) {
        const ModelConfig c = read(str("{\"model_type\": \"", type, "\"}"));
        EXPECT_STREQ(family_of(c).name, type);
        EXPECT_STREQ(family_of(read(config_to_json(c, json::object()).dump())).name, type);
        return c;
    };
    const ModelConfig qwen2 = defaults("qwen2");
    EXPECT_TRUE(qwen2.qkv_bias && !qwen2.proj_bias && !qwen2.mlp_bias && !qwen2.tied && !qwen2.has_windows());
    EXPECT_EQ(qwen2.vocab_size, 151936);
    EXPECT_EQ(qwen2.bos, -1);
    const ModelConfig qwen3 = defaults("qwen3");
    EXPECT_EQ(qwen3.head_size, 128);
    EXPECT_EQ(qwen3.qk_norm, QkNorm::Weights);
    EXPECT_FALSE(qwen3.qkv_bias || qwen3.proj_bias);
    // hidden_size need not be a multiple of the heads.
    EXPECT_EQ(read(R"({"model_type": "qwen3", "hidden_size": 40, "num_attention_heads": 32})").head_size, 128);
    const ModelConfig smollm3 = defaults("smollm3");
    EXPECT_EQ(smollm3.rope_theta, 2000000);
    EXPECT_EQ(smollm3.layers_without_rope(), 9);
    EXPECT_TRUE(smollm3.uses_rope(2) && !smollm3.uses_rope(3) && smollm3.tied);
    EXPECT_EQ(smollm3.kv_heads, 4);
    EXPECT_EQ(read(R"({"model_type": "smollm3", "num_key_value_heads": null})").kv_heads, 16);
    const ModelConfig mistral = defaults("mistral");
    EXPECT_EQ(mistral.smallest_window(), 4096);
    EXPECT_EQ(mistral.kv_heads, 8);
    const ModelConfig phi3 = defaults("phi3");
    EXPECT_EQ(phi3.rope_scaling.fraction, 1);
    EXPECT_EQ(phi3.eos, 32000);
    EXPECT_FALSE(phi3.has_windows());
    const ModelConfig olmo2 = defaults("olmo2");
    EXPECT_TRUE(olmo2.norm_after && olmo2.qk_norm == QkNorm::AllHeads && !olmo2.qkv_bias && !olmo2.tied);
    EXPECT_EQ(olmo2.norm_eps, 1e-5);
    EXPECT_EQ(olmo2.max_positions, 2048);
    EXPECT_EQ(olmo2.kv_heads, 32);
    EXPECT_EQ(olmo2.eos, 50279);
}

std::vector<int64_t> windows_of(const ModelConfig& c) {
    std::vector<int64_t> windows;
    for (const LayerConfig& l : c.layer) windows.push_back(l.window);
    return windows;
}

// A config is read, written, and read again as the same.
ModelConfig read_family(const std::string& type, const std::string& keys) {
    const ModelConfig c = read("{\"model_type\": \"" + type + "\", \"num_hidden_layers\": 4, " + keys + "}");
    EXPECT_STREQ(family_of(c).name, type.c_str()) << keys;
    const json saved = config_to_json(c, json::object());
    EXPECT_EQ(saved["model_type"], type);
    expect_same(config_from_json(saved, PATH), c);
    return c;
}

TEST(ModelConfig, WindowsOfTheFamilies) {
    using Windows = std::vector<int64_t>;
    for (const char* type : {"qwen2", "qwen3"}) {
        const auto windows = [&](const std::string& keys) { return windows_of(read_family(type, keys)); };
        EXPECT_EQ(windows(R"("sliding_window": 8, "max_window_layers": 2)"), (Windows{0, 0, 0, 0}));  // not used
        EXPECT_EQ(windows(R"("use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2)"),
                  (Windows{0, 0, 8, 8}));
        EXPECT_EQ(windows(R"("use_sliding_window": true, "max_window_layers": 0)"), (Windows{4096, 4096, 4096, 4096}));
        EXPECT_EQ(windows(R"("use_sliding_window": true, "sliding_window": 8)"), (Windows{0, 0, 0, 0}));  // from 28 on
        EXPECT_EQ(windows(R"("use_sliding_window": true, "sliding_window": null, "max_window_layers": 0)"),
                  (Windows{0, 0, 0, 0}));
        EXPECT_EQ(windows(R"("use_sliding_window": true, "sliding_window": 8, "layer_types":
            ["sliding_attention", "full_attention", "sliding_attention", "full_attention"])"),
                  (Windows{8, 0, 8, 0}));
    }
    EXPECT_EQ(windows_of(read_family("smollm3", R"("use_sliding_window": true, "sliding_window": 8)")),
              (Windows{0, 0, 0, 8}));  // where there is no RoPE
    for (const char* type : {"mistral", "phi3"}) {
        EXPECT_EQ(windows_of(read_family(type, R"("sliding_window": 8)")), (Windows{8, 8, 8, 8}));
        EXPECT_EQ(windows_of(read_family(type, R"("sliding_window": null)")), (Windows{0, 0, 0, 0}));
    }
    const auto refused = [](const std::string& type, const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read("{\"model_type\": \"" + type + "\", \"num_hidden_layers\": 2, " + keys + "}"); },
                     parts);
    };
    // layer_types that contradict use_sliding_window, of another attention, or of another number of layers.
    const std::string sliding = R"("layer_types": ["full_attention", "sliding_attention"])";
    for (const char* type : {"qwen2", "qwen3", "smollm3"}) {
        refused(type, sliding, {PATH, "layer_types", "use_sliding_window"});
        refused(type, sliding + R"(, "use_sliding_window": true, "sliding_window": null)", {PATH, "layer_types"});
        refused(type, R"("use_sliding_window": true, "sliding_window": 0)", {PATH, "sliding_window", "positive"});
        refused(type, R"("layer_types": ["full_attention", "chunked_attention"])",
                {PATH, "layer_types", "2 \"full_att"});
        refused(type, R"("layer_types": ["full_attention"])", {PATH, "layer_types", "a list of 2"});
        refused(type, R"("use_sliding_window": 1)", {PATH, "use_sliding_window", "true or false"});
    }
    refused("mistral", R"("sliding_window": -4)", {PATH, "sliding_window", "positive"});
    refused("phi3", R"("sliding_window": "x")", {PATH, "sliding_window", "a whole number"});
    // A family has one size of window, LLaMA has none.
    ModelConfig c = read_family("qwen2", R"("use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2)");
    c.layer[0].window = 16;
    EXPECT_STREQ(family_of(c).name, "train_gpt");
    ModelConfig llama = preset_config("llama-tiny");
    llama.layer[3].window = 16;
    EXPECT_STREQ(family_of(llama).name, "train_gpt");
}

TEST(ModelConfig, LayersWithoutRope) {
    const auto rope = [](const std::string& keys) {
        const ModelConfig c = read_family("smollm3", keys);
        std::string with;
        for (int64_t l = 0; l < c.layers; l++) with += c.uses_rope(l) ? '1' : '0';
        return with;
    };
    EXPECT_EQ(rope(R"("no_rope_layer_interval": 2)"), "1010");
    EXPECT_EQ(rope(R"("no_rope_layer_interval": 1)"), "0000");
    EXPECT_EQ(rope(R"("no_rope_layers": [0, 1, 1, 0], "no_rope_layer_interval": 3)"), "0110");
    EXPECT_EQ(rope(R"("no_rope_layers": [1, 1, 1, 1, 0, 1])"), "1111");  // more than layers
    const auto refused = [](const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read("{\"model_type\": \"smollm3\", \"num_hidden_layers\": 2, " + keys + "}"); }, parts);
    };
    refused(R"("no_rope_layers": [1])", {PATH, "no_rope_layers", "a list of 2 numbers"});
    refused(R"("no_rope_layers": [1, 2])", {PATH, "no_rope_layers", "a list of 2 numbers"});
    refused(R"("no_rope_layer_interval": 0)", {PATH, "no_rope_layer_interval", "positive"});
    ModelConfig llama = preset_config("llama-tiny");
    llama.layer[1].rope = false;
    EXPECT_STREQ(family_of(llama).name, "train_gpt");
}

TEST(ModelConfig, PartialRopeOfPhi3) {
    const std::string sizes = R"("hidden_size": 64, "num_attention_heads": 4, )";
    for (const char* keys : {R"("partial_rotary_factor": 0.5, "rope_theta": 500)",
                             R"("rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500})"}) {
        const ModelConfig c = read_family("phi3", sizes + keys);
        EXPECT_EQ(c.rope_scaling.fraction, 0.5) << keys;
        EXPECT_EQ(c.rotary_channels(), 8) << keys;
        EXPECT_EQ(c.rope_theta, 500) << keys;
    }
    const auto refused = [&](const std::string& keys, const std::vector<std::string>& parts) {
        expect_error([&] { read("{\"model_type\": \"phi3\", " + sizes + keys + "}"); }, parts);
    };
    refused(R"("rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]})",
            {PATH, "rope_scaling.type", "longrope", "supported: default"});
    refused(R"("rope_scaling": {"type": "linear", "factor": 2})", {PATH, "rope_scaling.type", "supported: default"});
    refused(R"("partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 1, "type": "default"},
               "rope_parameters": {"rope_theta": 10000})",
            {PATH, "contradict"});
    // transformers' defaults lie beyond a small vocabulary.
    for (const char* type : {"phi3", "smollm3", "olmo2"}) {
        const ModelConfig c = read(str("{\"model_type\": \"", type, "\", \"vocab_size\": 300}"));
        EXPECT_TRUE(config_to_json(c, json::object()).at("pad_token_id").is_null());
        EXPECT_EQ(config_to_json(c, {{"pad_token_id", 7}})["pad_token_id"], 7);
    }
    // Other families have no such key.
    for (const char* type : {"llama", "qwen2", "qwen3", "smollm3", "mistral", "olmo2"}) {
        expect_error([&] { read(str("{\"model_type\": \"", type, "\", \"partial_rotary_factor\": 0.5}")); },
                     {PATH, "partial_rotary_factor", "supported: 1"});
    }
}

// The block of the families is LLaMA's otherwise, and what they lack makes a config of our own.
TEST(ModelConfig, WhatTheFamiliesCannotExpress) {
    const auto changed = [](const char* name, void (*change)(ModelConfig&)) {
        ModelConfig c = preset_config(name);
        change(c);
        EXPECT_STREQ(family_of(c).name, "train_gpt") << name;
        expect_same(config_from_json(config_to_json(c, json::object()), PATH), c);
    };
    for (const char* name : {"qwen2.5-0.5B", "qwen3-0.6B", "smollm3-3B", "mistral-7B"}) {
        changed(name, [](ModelConfig& c) { c.norm = Norm::LayerNorm; });
        changed(name, [](ModelConfig& c) { c.activation = Activation::GELU; });
        changed(name, [](ModelConfig& c) { c.qk_norm = QkNorm::Plain; });
        changed(name, [](ModelConfig& c) { c.rope_scaling.fraction = 0.5; });
        changed(name, [](ModelConfig& c) { c.softmax_scale = 0.5; });
        changed(name, [](ModelConfig& c) {
            c.qkv_bias = false;
            c.proj_bias = true;
        });
        changed(name, [](ModelConfig& c) { c.set_attention(std::string(size_t(c.layers), 'L')); });
    }
    changed("qwen2.5-0.5B", [](ModelConfig& c) { c.mlp_bias = true; });
    changed("qwen3-0.6B", [](ModelConfig& c) { c.layer[1].rope = false; });
    changed("mistral-7B", [](ModelConfig& c) { c.layer[1].window = 0; });
    // Another shape of a preset stays in its family.
    ModelConfig small = preset_config("qwen2.5-0.5B");
    change_layers(small, 2, "m");
    EXPECT_STREQ(family_of(small).name, "qwen2");
    // A config of our own that a family could express stays our own, except for GPT-2 and LLaMA.
    ModelConfig llama = preset_config("llama-tiny");
    llama.qk_norm = QkNorm::Weights;
    EXPECT_STREQ(family_of(llama).name, "train_gpt");
    for (const char* type : {"qwen2", "qwen3", "smollm3", "mistral", "phi3", "olmo2"}) {
        const std::string start = str("{\"model_type\": \"", type, "\", ");
        expect_error([&] { read(start + R"("hidden_act": "gelu"})"); }, {PATH, "hidden_act", "gelu", "silu"});
        expect_error([&] { read(start + R"("rope_scaling": {"rope_type": "yarn", "factor": 4}})"); },
                     {PATH, "rope_scaling.rope_type", "yarn", "supported: default"});
    }
    for (const char* type : {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe"})
        expect_error([&] { read(str("{\"model_type\": \"", type, "\"}")); },
                     {PATH, "model_type", type, "qwen2, qwen3"});
}

TEST(ModelConfig, NormsOfOlmo2) {
    EXPECT_TRUE(read_family("olmo2", R"("attention_bias": true)").proj_bias);
    EXPECT_EQ(read_family("olmo2", R"("head_dim": 20)").head_size, 20);
    const json saved = config_to_json(read_family("olmo2", R"("num_key_value_heads": 8)"), json::object());
    EXPECT_EQ(saved["architectures"], json::array({"Olmo2ForCausalLM"}));
    for (const char* key : {"head_dim", "norm_placement", "qk_norm"}) EXPECT_FALSE(saved.contains(key)) << key;
    const auto our_own = [](void (*change)(ModelConfig&)) {
        ModelConfig c = preset_config("olmo2-1B");
        change(c);
        EXPECT_STREQ(family_of(c).name, "train_gpt");
        const json own = config_to_json(c, json::object());
        EXPECT_EQ(own.contains("norm_placement"), c.norm_after);
        expect_same(config_from_json(own, PATH), c);
    };
    our_own([](ModelConfig& c) { c.norm_after = false; });
    our_own([](ModelConfig& c) { c.qk_norm = QkNorm::Weights; });
    our_own([](ModelConfig& c) { c.qk_norm = QkNorm::Off; });
    our_own([](ModelConfig& c) { c.mlp_bias = true; });
    our_own([](ModelConfig& c) { c.proj_bias = true; });
    our_own([](ModelConfig& c) { c.layer[3].window = 64; });
    our_own([](ModelConfig& c) { c.layer[3].rope = false; });
    our_own([](ModelConfig& c) { c.activation = Activation::GELU; });
    // No other family has them.
    for (const char* name : {"gpt2-124M", "llama-tiny", "qwen2.5-0.5B", "qwen3-0.6B", "smollm3-3B", "mistral-7B"}) {
        ModelConfig c = preset_config(name);
        c.qk_norm = QkNorm::AllHeads;
        EXPECT_STREQ(family_of(c).name, "train_gpt") << name;
        c = preset_config(name);
        c.norm_after = true;
        EXPECT_STREQ(family_of(c).name, "train_gpt") << name;
    }
    ModelConfig c = preset_config("olmo2-1B");
    c.norm = Norm::LayerNorm;
    expect_error([&] { validate(c, "m"); }, {"m", "RMSNorm", "--norm rmsnorm"});
    json own = config_to_json(c, json::object());
    own["norm_placement"] = "between";
    expect_error([&] { config_from_json(own, PATH); }, {PATH, "norm_placement", "between", "before, after"});
}

TEST(ModelConfig, QkNorm) {
    const ModelConfig llama = preset_config("llama-tiny");
    EXPECT_FALSE(config_to_json(llama, json::object()).contains("qk_norm"));
    for (const auto& [value, name] :
         {std::pair{QkNorm::Plain, "plain"}, {QkNorm::Weights, "weights"}, {QkNorm::AllHeads, "all-heads"}}) {
        ModelConfig c = llama;
        c.qk_norm = value;
        const json saved = config_to_json(c, json::object());
        EXPECT_EQ(saved["model_type"], "train_gpt");
        EXPECT_EQ(saved["qk_norm"], name);
        EXPECT_EQ(config_from_json(saved, PATH).qk_norm, value);
        json changed = saved;
        changed["qk_norm"] = "heads";
        expect_error([&] { config_from_json(changed, PATH); }, {PATH, "qk_norm", "heads", "off, plain, weights"});
        changed = saved;
        changed.erase("qk_norm");
        EXPECT_EQ(config_from_json(changed, PATH).qk_norm, QkNorm::Off);
        c.head_size = 514;
        if (value == QkNorm::AllHeads)
            EXPECT_NO_THROW(validate(c, "m"));
        else
            expect_error([&] { validate(c, "m"); }, {"QK-norm takes heads of up to 512, not 514"});
    }
}

// Each option alone makes a config of our own, is written and read back; a model without it writes no key.
TEST(ModelConfig, ArchitectureOptions) {
    const ModelConfig llama = preset_config("llama-tiny");
    const json plain = config_to_json(llama, json::object());
    for (const char* key : {"embedding_norm", "head_bias", "attention_scale", "logit_softcap", "softcap_function",
                            "partial_rotary_factor"})
        EXPECT_FALSE(plain.contains(key)) << key;
    const auto round_trip = [&](auto change) {
        ModelConfig c = llama;
        change(c);
        const json saved = config_to_json(c, json::object());
        EXPECT_EQ(saved["model_type"], "train_gpt") << saved;
        const ModelConfig again = config_from_json(saved, PATH);
        EXPECT_EQ(config_to_json(again, json::object()), saved);
        return again;
    };
    EXPECT_TRUE(round_trip([](ModelConfig& c) { c.embedding_norm = true; }).embedding_norm);
    EXPECT_TRUE(round_trip([](ModelConfig& c) { c.head_bias = true; }).head_bias);
    EXPECT_FLOAT_EQ(round_trip([](ModelConfig& c) { c.softmax_scale = 0.12; }).attention_scale(), 0.12f);
    const ModelConfig capped = round_trip([](ModelConfig& c) { c.logit_softcap = {Softcap::Function::Rsqrt, 15}; });
    EXPECT_EQ(capped.logit_softcap.function, Softcap::Function::Rsqrt);
    EXPECT_EQ(capped.logit_softcap.cap, 15);
    EXPECT_EQ(round_trip([](ModelConfig& c) { c.rope_scaling.fraction = 0.5; }).rotary_channels(), 16);
    const ModelConfig truncated = round_trip([](ModelConfig& c) {
        c.rope_scaling.kind = RopeScaling::Kind::Truncated;
        c.rope_scaling.fraction = 0.5;
    });
    EXPECT_EQ(truncated.rope_scaling.kind, RopeScaling::Kind::Truncated);
    EXPECT_EQ(truncated.rotary_channels(), 32);

    const json good = config_to_json(capped, json::object());
    const auto refused = [&](const char* key, const json& value, const std::vector<std::string>& parts) {
        json changed = good;
        changed[key] = value;
        expect_error([&] { config_from_json(changed, PATH); }, parts);
    };
    refused("logit_softcap", -1, {PATH, "softcap is -1"});
    refused("softcap_function", "none", {PATH, "softcap_function", "tanh, rsqrt"});
    refused("attention_scale", 0, {PATH, "attention_scale", "positive"});
    refused("partial_rotary_factor", 0.3, {PATH, "rotates 9 of 32 channels", "even"});
    refused("partial_rotary_factor", 1.5, {PATH, "RoPE fraction is 1.5"});
    refused("embedding_norm", 1, {PATH, "embedding_norm", "true or false"});
    json llama_partial = plain;
    llama_partial["partial_rotary_factor"] = 0.5;
    expect_error([&] { config_from_json(llama_partial, PATH); }, {PATH, "partial_rotary_factor"});
}

// The model of modded-nanogpt's track 3, and its shape in other depths.
TEST(ModelConfig, ModernPresets) {
    const ModelConfig c = preset_config("modern-124M");
    EXPECT_EQ(c.head_size, 128);
    EXPECT_EQ(c.ffn, 3072);
    EXPECT_STREQ(family_of(c).name, "train_gpt");
    EXPECT_TRUE(c.qkv_bias && c.proj_bias && c.mlp_bias && c.head_bias && !c.tied && c.embedding_norm && c.zero_init);
    const std::pair<const char*, int64_t> depths[] = {
        {"modern-124M", 12}, {"modern-345M", 18}, {"modern-757M", 24}, {"modern-1424M", 30}};
    for (const auto& [name, layers] : depths) {
        const ModelConfig m = preset_config(name);
        EXPECT_EQ(m.layers, layers);
        EXPECT_EQ(m.channels, 64 * layers);
        EXPECT_EQ(m.heads * 128, m.channels);
    }
    const ModelConfig tiny = preset_config("modern-tiny");
    EXPECT_EQ(tiny.layers * 32, tiny.channels);
    EXPECT_EQ(tiny.qk_norm, QkNorm::Off);
    EXPECT_EQ(tiny.rope_theta, c.rope_theta);
}

TEST(ModelConfig, FillsInDefaults) {
    ModelConfig c;
    c.layers = 3;
    c.channels = 96;
    c.heads = 4;
    fill_defaults(c, "test");
    EXPECT_EQ(c.kv_heads, 4);
    EXPECT_EQ(c.head_size, 24);
    EXPECT_EQ(c.ffn, 384);
    EXPECT_EQ(c.attention(), "SSS");
    c.ffn = 0;
    c.activation = Activation::SwiGLU;
    c.set_attention("G");
    fill_defaults(c, "test");
    EXPECT_EQ(c.ffn, 256);
    EXPECT_EQ(c.attention(), "GGG");
    c.vocab_size = 10;
    c.max_positions = 10;
    EXPECT_NO_THROW(validate(c, "test"));
    for (int64_t ModelConfig::*size :
         {&ModelConfig::layers, &ModelConfig::channels, &ModelConfig::heads, &ModelConfig::kv_heads,
          &ModelConfig::head_size, &ModelConfig::ffn, &ModelConfig::vocab_size, &ModelConfig::max_positions}) {
        for (const int64_t value : {int64_t(0), int64_t(-1), INT64_MIN, INT64_MAX, int64_t(1) << 31}) {
            ModelConfig bad = c;
            bad.set_attention("SSS");
            bad.*size = value;
            expect_error([&] { validate(bad, "test"); }, {"test", std::to_string(value)});
        }
    }
    ModelConfig heads;
    heads.layers = 1;
    heads.channels = 100;
    heads.heads = 3;
    expect_error([&] { fill_defaults(heads, "--heads"); },
                 {"--heads", "3 heads do not divide 100 channels", "head size"});
    heads.heads = 0;
    expect_error([&] { fill_defaults(heads, "--heads"); }, {"heads is 0"});
    heads.layers = -5;
    heads.head_size = heads.kv_heads = 1;
    expect_error([&] { fill_defaults(heads, "x"); }, {"layers is -5"});
}

TEST(ModelConfig, KeepsUnrelatedKeys) {
    const json original = json::parse(R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "attention_dropout": 0.25, "unknown": {"x": [1, 2]}, "eos_token_id": [200, 7, 8], "bos_token_id": 300,
        "pad_token_id": 0})");
    const ModelConfig c = config_from_json(original, PATH);
    const json saved = config_to_json(c, original);
    EXPECT_EQ(saved["attention_dropout"], 0.25);
    EXPECT_EQ(saved["unknown"], original["unknown"]);
    EXPECT_EQ(saved["eos_token_id"], original["eos_token_id"]);
    EXPECT_EQ(saved["bos_token_id"], 300);
    EXPECT_EQ(saved["pad_token_id"], 0);
    EXPECT_FALSE(saved.contains("torch_dtype"));  // the weight files have their own dtype
    EXPECT_FALSE(saved.contains("dtype"));
    EXPECT_FALSE(saved.contains("rope_parameters"));  // transformers 4 and 5 both read rope_theta and rope_scaling
    EXPECT_EQ(saved["rope_theta"], 5000.0);
    expect_same(config_from_json(saved, PATH), c);
    const json gelu = {{"model_type", "gpt2"}, {"activation_function", "gelu_pytorch_tanh"}};
    EXPECT_EQ(config_to_json(config_from_json(gelu, PATH), gelu)["activation_function"], "gelu_pytorch_tanh");
    ModelConfig mixed = c;  // no key of the previous family remains
    mixed.norm = Norm::LayerNorm;
    const json other = config_to_json(mixed, original);
    EXPECT_EQ(other["model_type"], "train_gpt");
    EXPECT_FALSE(other.contains("hidden_act") || other.contains("attention_bias") || other.contains("rms_norm_eps"));
    EXPECT_EQ(other["unknown"], original["unknown"]);
    mixed.eos = 9;
    EXPECT_EQ(config_to_json(mixed, original)["eos_token_id"], 9);
}

TEST(ModelConfig, RandomValuesNeverCrash) {
    const std::vector<json> values = {nullptr,
                                      true,
                                      false,
                                      0,
                                      -1,
                                      1,
                                      3,
                                      1e300,
                                      -0.5,
                                      INT64_MAX,
                                      UINT64_MAX,
                                      INT64_MIN,
                                      "",
                                      "x",
                                      json::array(),
                                      json::array({1, "a"}),
                                      json::object(),
                                      {{"rope_type", "linear"}}};
    std::mt19937 random(5);
    for (const char* name : {"gpt2-tiny", "llama-1B", "qwen2.5-0.5B", "qwen3-0.6B", "smollm3-3B", "mistral-7B"}) {
        for (const bool mixed : {false, true}) {
            ModelConfig c = preset_config(name);
            if (mixed) c.activation = Activation::ReLU2;
            const json good = config_to_json(c, json::object());
            for (int i = 0; i < 400; i++) {
                json bad = good;
                for (uint32_t changes = 1 + random() % 3; changes > 0; changes--) {
                    auto it = bad.begin();
                    std::advance(it, random() % bad.size());
                    if (it->is_object() && !it->empty() && random() % 2) it = it->begin();
                    *it = values[random() % values.size()];
                }
                try {
                    const ModelConfig read_back = config_from_json(bad, PATH);
                    EXPECT_NO_THROW(validate(read_back, PATH));
                    config_to_json(read_back, bad);
                } catch (const Error& e) {
                    EXPECT_NE(std::string(e.what()).find(PATH), std::string::npos) << e.what();
                }
            }
        }
    }
}

}  // namespace
